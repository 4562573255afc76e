"""The report of a conversion: every tensor as JSON and CSV, and a picture of the errors by layer."""

import csv
import dataclasses
import json
import math
import platform
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jnvfp4
from jnvfp4.convert.convert import Result
from jnvfp4.convert.names import layer_of, module_of
from jnvfp4.convert.plan import json_bytes
from jnvfp4.convert.verify import SUSPICIOUS, Record, as_json

NAMES = ("report.json", "report.csv", "report.png")


def summary(records: list[Record], result: Result | None = None) -> dict[str, Any]:
    """Totals, the worst tensors, versions and options; JSON values."""
    # What is no number is worse than any; JSON has neither.
    found = [(r.error.rel_err, r.name) for r in records if r.error]
    errors = sorted(((e if math.isfinite(e) else math.inf, name) for e, name in found), reverse=True)
    finite = [e for e, _ in errors if e < math.inf]
    out: dict[str, Any] = {
        "quantized": len(errors),
        "kept": len(records) - len(errors),
        "mean_rel_err": float(np.mean(finite)) if finite else None,
        "worst": [{"name": name, "rel_err": e if e < math.inf else None} for e, name in errors[:10]],
        "suspicious": [name for e, name in errors if e > SUSPICIOUS],
        "versions": {"jnvfp4": jnvfp4.__version__, "jax": jax.__version__, "python": platform.python_version()},
    }
    if result is not None:
        reasons: dict[str, int] = defaultdict(int)
        for d in result.plan.decisions.values():
            reasons[d.reason or "quantized"] += 1
        out |= {
            "bytes_before": result.bytes_before,
            "bytes_after": result.bytes_after,
            "ratio": result.bytes_after / result.bytes_before if result.bytes_before else None,
            "reasons": dict(sorted(reasons.items())),
            "device": str(result.device),
            "options": json.loads(json.dumps(dataclasses.asdict(result.plan.options), default=str)),
            "warnings": result.warnings,
        }
    return out


def write_report(directory: Path | str, records: list[Record], result: Result | None = None) -> list[Path]:
    """Writes report.json, report.csv and, with matplotlib, report.png. Returns what was written."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    groups = {m: list(g.members) for g in result.plan.groups for m in g.members} if result else {}
    tensors = [{**t, **_of_conversion(t["name"], result, groups)} for t in as_json(records)]
    paths = [directory / name for name in NAMES]
    paths[0].write_bytes(json_bytes({**summary(records, result), "tensors": tensors}))
    columns = list(dict.fromkeys(key for t in tensors for key in t))
    with open(paths[1], "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({**t, "shape": "x".join(map(str, t["shape"]))} for t in tensors)
    return paths if _plot(paths[2], records) else paths[:2]


def _of_conversion(name: str, result: Result | None, groups: Mapping[str, list[str]]) -> dict[str, Any]:
    """What only the conversion knows of a tensor."""
    if result is None or (amax := result.amaxes.get(module_of(name))) is None:
        return {}
    seconds = result.seconds.get(name)
    value = float(amax) if amax.size == 1 else amax.tolist()
    return {"group": groups[module_of(name)], "amax": value, "seconds": seconds}


def _plot(path: Path, records: list[Record]) -> bool:
    """Relative error by layer, a line for each kind of module, and the share of saturated codes below."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    lines: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for r in records:
        if r.error:
            kind = module_of(r.name).rpartition(".")[2]
            lines[kind].append((layer_of(r.name) or 0, r.error.rel_err, r.error.saturated))
    figure = Figure(figsize=(9, 7), layout="constrained")
    error, saturated = figure.subplots(2, sharex=True)
    for kind, points in sorted(lines.items()):
        x, e, s = zip(*sorted(points), strict=True)
        error.plot(x, e, marker="o", markersize=3, label=kind)
        saturated.plot(x, s, marker="o", markersize=3)
    error.set(yscale="log", ylabel="relative error")
    error.legend(fontsize="small", ncols=4)
    saturated.set(xlabel="layer", ylabel="share of codes ±6")
    figure.savefig(path, dpi=120)
    return True
