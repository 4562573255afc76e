"""Draws the errors of a conversion by layer, beside those that normal random weights would have."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._core.patterns import layer_of
from ..spec import QuantSpec
from ._convert.encode import encode, find_amax
from ._layouts.layouts import TE
from ._layouts.names import module_of
from ._layouts.stored import Weight
from .convert import Result
from .verify import ErrorStats, Record, error_stats

NO_LAYER = -1  # where weights are drawn whose names have no number of a layer
_NORMAL_SHAPE = (256, 1024)
Value = Callable[[ErrorStats], float]


def plot_errors(path: Path, records: list[Record], result: Result | None = None) -> bool:
    """Draws the relative error by layer, one line per kind of module, and below it the share of the largest codes.

    Args:
      path: the PNG file.
      records: of a verification.
      result: the conversion, if the report is about one; it gives the title and the lines to compare with.

    Returns:
      whether it was drawn: matplotlib must be installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    errors = [(r.name, r.error) for r in records if r.error and math.isfinite(r.error.relative_error)]
    normal = errors_of_normal(result.plan.options.spec) if result else None
    figure = Figure(figsize=(10, 7), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for axes, label, value in (
        (above, "relative error |w - d| / |w|", lambda e: e.relative_error),
        (below, "share of codes 6 and -6", lambda e: e.largest_code_share),
    ):
        _draw(axes, errors, value, normal)
        axes.set_ylabel(label)
    _number_layers(below, [name for name, _ in errors])
    below.set_xlabel("layer (bands: all weights of a kind in a layer)" if above.collections else "layer")
    figure.legend(*above.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.suptitle(_plain(_title([e.relative_error for _, e in errors], result)))
    figure.savefig(path, dpi=120)
    return True


def errors_of_normal(spec: QuantSpec) -> ErrorStats:
    """Measures the errors of normal random weights, which those of most models come close to."""
    x = np.random.default_rng(0).normal(size=_NORMAL_SHAPE).astype(np.float32)
    amax = find_amax(x, spec.format.amax_scope == "row").value
    ((_, codes, scales),) = encode(x, amax, spec, jax.local_devices(backend="cpu")[0], x.nbytes)
    return error_stats(x, Weight("", TE, codes, scales, amax.reshape(-1), e4m3_max=spec.format.e4m3_max))


def _layer(name: str) -> int:
    layer = layer_of(name)
    return NO_LAYER if layer is None else layer


def _draw(axes: Any, errors: list[tuple[str, ErrorStats]], value: Value, normal: ErrorStats | None) -> None:
    """Draws one number of every weight. Weights of one kind in one layer, such as experts, are a mean and a span."""
    drawn = [value(e) for _, e in errors]
    for kind, layers in sorted(_by_kind(errors, value).items()):
        x = sorted(layers)
        (line,) = axes.plot(x, [np.mean(layers[i]) for i in x], marker="o", markersize=4, label=_plain(kind))
        if any(len(layers[i]) > 1 for i in x):
            low, high = ([f(layers[i]) for i in x] for f in (min, max))
            axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if normal is not None:
        drawn.append(value(normal))
        axes.axhline(drawn[-1], color="black", linestyle="--", linewidth=1, label="normal random weights")
    axes.set_ylim(*limits(drawn))
    axes.grid(axis="y", alpha=0.3)


def limits(values: list[float]) -> tuple[float, float]:
    """Chooses the ends of an axis: around the values, but not so near that noise looks large; from 0 if they are apart.

    So a weight whose error is unusual is seen by its distance to 0, and usual ones can be told from each other.
    """
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high > 2 * low or not high:
        return 0.0, 1.1 * high or 1.0
    margin = max(0.2 * (high - low), 0.05 * high)
    return low - margin, high + margin


def _by_kind(errors: list[tuple[str, ErrorStats]], value: Value) -> Mapping[str, Mapping[int, list[float]]]:
    out: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, error in errors:
        out[module_of(name).rpartition(".")[2]][_layer(name)].append(value(error))
    return out


def _plain(text: str) -> str:
    """Escapes what matplotlib would take for a formula, and what is no text."""
    return text.replace("$", r"\$").encode("utf-8", "backslashreplace").decode()


def _number_layers(axes: Any, names: list[str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    layers = {_layer(name) for name in names}
    first, last = (min(layers), max(layers)) if layers else (0, 0)
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "none" if x == NO_LAYER else f"{x:.0f}"))


def _title(errors: list[float], result: Result | None) -> str:
    measured = f"{len(errors)} weights"
    if errors:
        measured += f", relative error {np.mean(errors):.4f} on average, {max(errors):.4f} at most"
    if result is None:
        return measured
    source, options = result.plan.source, result.plan.options
    model_type = (source.config or {}).get("model_type")
    model = source.directory.resolve().name + (f" ({model_type})" if model_type else "")
    blocks = f"{options.spec.block_rows}x16 blocks"
    return f"{model} as {options.recipe}, {blocks}, layout {options.layout}\n{measured}"
