"""A picture of a result: operations against their targets, and for the quantize suite the roofline of all rows."""

import pathlib
from typing import Any

from .results import Result, clocks

BASELINES = ("copy", "empty", "naive")
Row = dict[str, Any]


def plot(result: Result, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    with_roofline = any("GB/s" in row for row in rows)
    bars = [row for row in rows if not row["op"].startswith(BASELINES)]
    if with_roofline:  # the other cases are in the roofline
        bars = [row for row in bars if row["case"] == bars[0]["case"]]
    size = (16 if with_roofline else 9, max(6, 1.5 + 0.22 * len(bars)))
    figure, axes = pyplot.subplots(1, 1 + with_roofline, figsize=size, squeeze=False, layout="constrained")
    try:
        _bars(axes[0, 0], bars)
        if with_roofline:
            _roofline(axes[0, 1], rows)
        env = result["environment"]
        clock = ", ".join(clocks(result))
        figure.suptitle(f"{result['suite']}: {env['device']}, jax {env['jax']}, commit {env['commit']}, clock: {clock}")
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)


def _measure(row: Row) -> str:
    """The column that is 1 at the roof: a copy, or an unquantized product."""
    return next(key for key in row if key == "share of copy" or key.startswith("speed of"))


def _bars(axes: Any, rows: list[Row]) -> None:
    measure = _measure(rows[0])
    one_case = len({row["case"] for row in rows}) == 1
    labels = [row["op"] if one_case else f"{row['case']} {row['op']}" for row in rows]
    axes.barh(labels, [row[measure] for row in rows], color=["C0" if row.get("met", True) else "C3" for row in rows])
    for i, row in enumerate(rows):
        if "target share" in row:
            axes.plot([row["target share"]] * 2, [i - 0.45, i + 0.45], color="black", linewidth=2)
        if "times naive" in row:
            axes.plot(row[measure] / row["times naive"], i, ".", color="0.6")
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.tick_params("y", labelsize=7)
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.set_xlabel(measure)
    axes.set_title(f"{rows[0]['case'] if one_case else ''} (black: target, red: missed, grey: naive jnp)", fontsize=9)


def _roofline(axes: Any, rows: list[Row]) -> None:
    """Bytes a second against bytes; the roof is the copies of the same run."""
    kinds = {"naive": ("naive jnp", "0.7", "."), "copy": ("copy", "black", "o"), "": ("others", "C0", ".")}
    groups: dict[str, list[Row]] = {kind: [] for kind in kinds}
    for row in rows:
        if not row["op"].startswith("empty"):
            groups[next(kind for kind in kinds if row["op"].startswith(kind))].append(row)
    for kind, (label, color, marker) in kinds.items():
        points = groups[kind]
        axes.plot([r["bytes"] for r in points], [r["GB/s"] for r in points], marker, color=color, label=label)
    roof = {row["bytes"]: 0.0 for row in groups["copy"]}
    for row in groups["copy"]:
        roof[row["bytes"]] = max(roof[row["bytes"]], row["GB/s"])
    axes.plot(sorted(roof), [roof[n] for n in sorted(roof)], color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="bytes of the floor", ylabel="GB/s", title="every case")
    axes.legend()
