"""The guard: a new result against an old one of the same suite, hardware and clock."""

from typing import Any

from .results import Result, hardware


def compare(new: Result, old: Result, tolerance: float = 0.05) -> list[dict[str, Any]]:
    """A row for each case and op of either, with "regression" where the median is over 1 + tolerance of the old one."""
    for what, a, b in (
        ("suite", new["suite"], old["suite"]),
        ("hardware", hardware(new), hardware(old)),
        ("clock", *_clocks_of_common_rows(new, old)),
    ):
        if a != b:
            raise ValueError(f"compare: both results must be of one {what}, got {a} and {b}")
    before, after = _by_name(old), _by_name(new)
    names = list(dict.fromkeys([*after, *before]))
    return [_row(name, after.get(name), before.get(name), tolerance) for name in names]


def regressions(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["verdict"] == "regression"]


def _clocks_of_common_rows(*both: Result) -> list[list[str]]:
    """Not of all rows: peers have a clock of their own, and are not everywhere."""
    common = set.intersection(*(set(_by_name(result)) for result in both))
    return [sorted({_by_name(result)[name].get("clock", "wall") for name in common}) for result in both]


def _by_name(result: Result) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["case"], row["op"]): row for row in result["rows"]}


def _row(
    name: tuple[str, str], new: dict[str, Any] | None, old: dict[str, Any] | None, tolerance: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"case": name[0], "op": name[1]}
    if new is None or old is None:
        (present, verdict) = (new, "added") if old is None else (old, "removed")
        assert present
        return {**row, "old_us": "", "new_us": "", "ratio": "", "verdict": verdict} | (
            {"new_us": present["median_us"]} if old is None else {"old_us": present["median_us"]}
        )
    ratio = new["median_us"] / old["median_us"]
    verdict = "regression" if ratio > 1 + tolerance else "faster" if ratio < 1 - tolerance else "same"
    return {
        **row,
        "old_us": old["median_us"],
        "new_us": new["median_us"],
        "ratio": round(ratio, 3),
        "verdict": verdict,
    }
