"""Result files: what they hold, and what the committed ones say about the same hardware."""

import json
import pathlib
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"
Result = dict[str, Any]  # suite, environment, rows


def load(path: pathlib.Path) -> Result:
    result = json.loads(path.read_text())
    known = isinstance(result, dict) and {"suite", "environment", "rows"} <= result.keys()
    if not known or any(not {"case", "op", "median_us"} <= row.keys() for row in result["rows"]):
        raise ValueError(f"{path} must hold suite, environment and rows, as --json writes them")
    return result


def save(result: Result, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def hardware(result: Result) -> tuple:
    environment = result["environment"]
    return environment["device"], environment["cpus"] if environment["platform"] == "cpu" else None


def clocks(result: Result) -> list[str]:
    return sorted({row.get("clock", "wall") for row in result["rows"]})


def committed(new: Result, folder: pathlib.Path = RESULTS) -> pathlib.Path:
    """The result in ``folder`` of the suite, by which its file is named, and of the hardware of ``new``."""
    found = [p for p in sorted(folder.glob(f"*_{new['suite']}.json")) if _comparable(p, new)]
    if len(found) != 1:
        names = [p.name for p in found]
        raise ValueError(f"{folder} must hold one {new['suite']} result of {hardware(new)}, got {names}; name one")
    return found[0]


def _comparable(path: pathlib.Path, new: Result) -> bool:
    try:
        old = load(path)
    except ValueError:  # of another program
        return False
    return old["suite"] == new["suite"] and hardware(old) == hardware(new)


def table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(k for row in rows for k in row))
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(str(row.get(c, "")) for c in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
