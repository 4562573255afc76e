"""Writes the report of a conversion: every tensor as JSON and CSV, and a plot of the errors by layer."""

import csv
import dataclasses
import json
import math
import platform
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from .._version import __version__
from ._files.files import checked_path, json_bytes
from ._files.safetensors import JSON
from ._layouts.names import module_of
from .convert import Result
from .plot import plot_errors
from .verify import SUSPICIOUS, Record, as_json

NAMES = ("report.json", "report.csv", "report.png")


def summary(records: list[Record], result: Result | None = None) -> JSON:
    """Gives totals, the worst tensors, versions and options as JSON values."""
    # NaN counts as infinite, which JSON cannot express: both become null.
    named = [(r.error.relative_error, r.name) for r in records if r.error]
    errors = sorted(((e if math.isfinite(e) else math.inf, name) for e, name in named), reverse=True)
    finite = [e for e, _ in errors if e < math.inf]
    out: JSON = {
        "quantized": len(errors),
        "kept": len(records) - len(errors),
        "mean_rel_err": float(np.mean(finite)) if finite else None,
        "worst": [{"name": name, "rel_err": e if e < math.inf else None} for e, name in errors[:10]],
        "suspicious": [name for e, name in errors if e > SUSPICIOUS],
        "versions": {"jnvfp4": __version__, "jax": jax.__version__, "python": platform.python_version()},
    }
    if result is not None:
        reasons: dict[str, int] = defaultdict(int)
        for item in result.plan.items.values():
            reasons[item.choice.reason or "quantized"] += 1
        out |= {
            "bytes_before": result.bytes_before,
            "bytes_after": result.bytes_after,
            "ratio": result.bytes_after / result.bytes_before if result.bytes_before else None,
            "reasons": dict(sorted(reasons.items())),
            "device": str(result.device),
            "options": json.loads(json.dumps(dataclasses.asdict(result.plan.options), default=str)),
            "warnings": list(result.warnings),
        }
    return out


def write_report(directory: Path | str, records: list[Record], result: Result | None = None) -> list[Path]:
    """Writes report.json, report.csv and, if matplotlib is installed, report.png.

    Args:
      directory: the directory of the report, which is made if it does not exist.
      records: of ``verify_checkpoint``, or of the ``VerificationError`` that it raised.
      result: of ``convert_checkpoint``, if the report is about a conversion.

    Returns:
      the files that were written.
    """
    directory = checked_path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    groups = {m: list(g.members) for g in result.plan.groups for m in g.members} if result else {}
    tensors = [{**t, **_from_conversion(t["name"], result, groups)} for t in as_json(records)]
    paths = [directory / name for name in NAMES]
    paths[0].write_bytes(json_bytes({**summary(records, result), "tensors": tensors}))
    columns = list(dict.fromkeys(key for t in tensors for key in t))
    with open(paths[1], "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({**t, "shape": "x".join(map(str, t["shape"]))} for t in tensors)
    return paths if plot_errors(paths[2], records, result) else paths[:2]


def _from_conversion(name: str, result: Result | None, groups: Mapping[str, list[str]]) -> JSON:
    """Gives the group, amax and time of a tensor, which only the conversion knows."""
    if result is None or (amax := result.amaxes.get(module_of(name))) is None:
        return {}
    seconds = result.seconds.get(name)
    value = float(amax) if amax.size == 1 else amax.tolist()
    return {"group": groups[module_of(name)], "amax": value, "seconds": seconds}
