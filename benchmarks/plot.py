"""A picture of a result: the roofline of every row, and the first case's operations against their targets."""

import pathlib
from typing import Any

from .results import Result, clocks


def plot(result: Result, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if not row["op"].startswith("empty")]
    roofline = any("GB/s" in row for row in rows)
    first = [row for row in rows if row["case"] == rows[0]["case"]] if roofline else rows
    height = 1.5 + 0.2 * len(first)
    figure, axes = pyplot.subplots(1, 2 if roofline else 1, figsize=(16 if roofline else 9, height), squeeze=False)
    try:
        _bars(axes[0, 0], first)
        if roofline:
            _roofline(axes[0, 1], rows)
        figure.suptitle(_title(result))
        figure.tight_layout()
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)


def _title(result: Result) -> str:
    env = result["environment"]
    return f"{result['suite']}: {env['device']}, jax {env['jax']}, commit {env['commit']}, clock {clocks(result)}"


def measure_of(row: dict[str, Any]) -> str:
    """The column that is 1 at the speed of light: of a copy, or of an unquantized product."""
    return next(key for key in row if key == "share of copy" or key.startswith("speed of"))


def _bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Bars, and a tick at each target: a share, or a time turned into one."""
    measure = measure_of(rows[0])
    labels = [row["op"] if row["case"] == rows[0]["case"] else f"{row['case']} {row['op']}" for row in rows]
    if len({row["case"] for row in rows}) > 1:
        labels = [f"{row['case']} {row['op']}" for row in rows]
    colors = [
        "0.7" if row["op"].startswith(("naive", "copy")) else "C0" if row.get("met", True) else "C3" for row in rows
    ]
    axes.barh(range(len(rows)), [row[measure] for row in rows], color=colors)
    for i, row in enumerate(rows):
        if "target share" in row:
            axes.plot([row["target share"]] * 2, [i - 0.45, i + 0.45], color="black", linewidth=2)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.set_xlabel(f"{measure} (black: target; red: missed; grey: baselines)")
    axes.set_title(rows[0]["case"] if len({row["case"] for row in rows}) == 1 else "")


def _roofline(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Achieved bytes a second against bytes moved; the roof is the copies of the same run."""
    kinds = {"naive": ("0.7", "."), "copy": ("black", "o"), "": ("C0", ".")}
    for prefix, (color, marker) in kinds.items():
        some = [r for r in rows if next(p for p in kinds if r["op"].startswith(p)) == prefix]
        label = {"naive": "naive jnp", "copy": "copy", "": "jnvfp4 and peers"}[prefix]
        axes.loglog([r["bytes"] for r in some], [r["GB/s"] for r in some], marker, color=color, label=label)
    roof: dict[float, float] = {}
    for row in rows:
        if row["op"].startswith("copy"):
            roof[row["bytes"]] = max(roof.get(row["bytes"], 0), row["GB/s"])
    axes.plot(sorted(roof), [roof[b] for b in sorted(roof)], color="black", linewidth=0.8)
    axes.set_xlabel("bytes of the floor")
    axes.set_ylabel("GB/s on them")
    axes.legend()
