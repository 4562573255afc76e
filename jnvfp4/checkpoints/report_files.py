"""Writes the report of a conversion: every tensor as JSON and CSV, and a plot of the errors by layer."""

import csv
import dataclasses
import json
import math
import platform
from collections import Counter, defaultdict
from operator import attrgetter
from pathlib import Path

import jax
import numpy as np

from .._core.patterns import layer_of
from .._version import __version__
from ..spec import QuantSpec
from ._convert.encode import encode, find_amax
from ._files.files import checked_path, json_bytes
from ._files.safetensors import JSON
from ._layouts.names import module_of
from ._layouts.stored import Weight
from ._layouts.te import TE
from .convert import Result
from .verify import SUSPICIOUS, ErrorStats, Record, as_json, error_stats

NO_LAYER = -1  # the position in the plot of weights that are in no layer


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
        reasons = Counter(item.choice.reason or "quantized" for item in result.plan.items.values())
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
    tensors = as_json(records)
    if result:
        groups = {m: list(g.members) for g in result.plan.groups for m in g.members}
        for t in tensors:
            if (amax := result.amaxes.get(module := module_of(t["name"]))) is not None:
                value = float(amax) if amax.size == 1 else amax.tolist()
                t |= {"group": groups[module], "amax": value, "seconds": result.seconds.get(t["name"])}
                if module in result.inexact_blocks:
                    t["inexact_blocks"] = result.inexact_blocks[module]
    paths = [directory / f"report.{kind}" for kind in ("json", "csv", "png")]
    paths[0].write_bytes(json_bytes({**summary(records, result), "tensors": tensors}))
    columns = list(dict.fromkeys(key for t in tensors for key in t))
    with open(paths[1], "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({**t, "shape": "x".join(map(str, t["shape"]))} for t in tensors)
    return paths if plot_errors(paths[2], records, result) else paths[:2]


# ---------------------------------------------------------------- plot
def plot_errors(path: Path, records: list[Record], result: Result | None) -> bool:
    """Plots the relative error and the share of the largest codes by layer, one line per kind of module.

    Weights of one kind in one layer, such as experts, are a mean and a band. ``result`` adds a title and the errors
    of normal random weights.

    Returns:
      False if matplotlib is not installed; then nothing is written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator
    except ImportError:
        return False
    errors = {r.name: r.error for r in records if r.error and math.isfinite(r.error.relative_error)}
    by_kind: dict[str, dict[int, list[ErrorStats]]] = defaultdict(lambda: defaultdict(list))
    for name, error in errors.items():
        layer = layer_of(name)
        by_kind[module_of(name).rpartition(".")[2]][NO_LAYER if layer is None else layer].append(error)
    normal = [errors_of_normal(result.plan.options.spec)] if result else []
    figure = Figure(figsize=(10, 7), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for axes, label, value in (
        (above, "relative error |w - d| / |w|", attrgetter("relative_error")),
        (below, "share of codes 6 and -6", attrgetter("largest_code_share")),
    ):
        for kind, layers in sorted(by_kind.items()):
            x, y = sorted(layers), [[*map(value, layers[i])] for i in sorted(layers)]
            (line,) = axes.plot(x, [*map(np.mean, y)], marker="o", markersize=4, label=_plain(kind))
            if any(len(v) > 1 for v in y):
                axes.fill_between(x, [*map(min, y)], [*map(max, y)], color=line.get_color(), alpha=0.2, linewidth=0)
        for level in map(value, normal):
            axes.axhline(level, color="black", linestyle="--", linewidth=1, label="normal random weights")
        axes.set_ylim(*limits([*map(value, (*errors.values(), *normal))]))
        axes.set_ylabel(label)
        axes.grid(axis="y", alpha=0.3)
    below.set_xlabel("layer (bands: all weights of a kind in a layer)" if above.collections else "layer")
    below.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    below.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "none" if x == NO_LAYER else f"{x:.0f}"))
    figure.legend(*above.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.suptitle(_plain(_title([e.relative_error for e in errors.values()], result)))
    figure.savefig(path, dpi=120)
    return True


def errors_of_normal(spec: QuantSpec) -> ErrorStats:
    """Measures the errors of normal random weights; the weights of most models have similar errors."""
    x = np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32)
    amax = find_amax(x, spec.format.amax_scope == "row").value
    ((_, codes, scales),) = encode(x, amax, spec, jax.local_devices(backend="cpu")[0], x.nbytes)
    return error_stats(x, Weight("", TE, codes, scales, amax.reshape(-1), e4m3_max=spec.format.e4m3_max))


def limits(values: list[float]) -> tuple[float, float]:
    """Chooses the ends of an axis: around similar values, not so near that noise looks large; else from 0."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high > 2 * low or not high:
        return 0.0, 1.1 * high or 1.0
    margin = max(0.2 * (high - low), 0.05 * high)
    return low - margin, high + margin


def _plain(text: str) -> str:
    """Escapes what matplotlib would take for a formula, and bytes of paths that are no text."""
    return text.replace("$", r"\$").encode("utf-8", "backslashreplace").decode()


def _title(errors: list[float], result: Result | None) -> str:
    measured = f"{len(errors)} weights"
    if errors:
        measured += f", relative error {np.mean(errors):.4f} on average, {max(errors):.4f} at most"
    if result is None:
        return measured
    source, options = result.plan.source, result.plan.options
    model_type = (source.config or {}).get("model_type")
    model = source.directory.resolve().name + (f" ({model_type})" if model_type else "")
    return f"{model} as {options.recipe}, {options.spec.block_rows}x16 blocks, layout {options.layout}\n{measured}"
