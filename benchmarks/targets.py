"""The targets beside the measured rows of the quantize suite, and whether they are met."""

from typing import Any

from .ops import BY_NAME, FOUR_OVER_SIX

Row = dict[str, Any]
EMPTY = "empty kernel"
ADVERSARIAL = ("same46", "even46", "sparse")
FIT_CACHE = ("4096x3584", "2048x4096")


def judge(rows: list[Row], platform: str) -> list[Row]:
    """The rows with "target ..." columns, and "met": each of them, and no slower than naive code."""
    times = {(row["case"], row["op"]): row["median_us"] for row in rows}
    return [row | _verdict(row, _gpu(row, times) if platform == "gpu" else _cpu(row)) for row in rows]


def _verdict(row: Row, target: Row) -> Row:
    if "times naive" not in row and not target:
        return {}
    met = [row["share of copy"] >= target.get("target share", 0)]
    met.append(row["median_us"] <= target.get("target us", float("inf")))
    met.append(row.get("times naive", 1) >= target.get("target times naive", 1))
    return {**target, "met": all(met)}


def _gpu(row: Row, times: dict[tuple[str, str], float]) -> Row:
    case, op = row["case"], BY_NAME.get(row["op"])
    if op is None:
        return {}
    m, k = map(int, row["shape"].split("x"))
    if case in ("large", "16384x16384"):
        return {} if op.target is None else {"target share": op.target}
    if case == "decode":
        return {"target us": round(times[case, EMPTY] + 2, 2)}
    if case in ADVERSARIAL:
        normal = times.get(("large", op.name))
        return {} if normal is None else {"target us": round(1.6 * normal, 2)}
    if row["dtype"] != "bf16":
        return {"target share": 0.85} if op.name == "nvfp4" else {}
    if case in FIT_CACHE and not op.given:
        return {"target share": 0.75}
    return {"target share": min(0.70, op.target or 1)} if m * k > 8 << 20 else {}


def _cpu(row: Row) -> Row:
    if row["case"] != "cpu":
        return {}
    if row["op"] == "nvfp4":
        return {"target times naive": 15}
    return {"target times naive": 10} if row["op"] in FOUR_OVER_SIX and "pair" not in row["op"] else {}
