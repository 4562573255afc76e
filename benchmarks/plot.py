"""A picture of a result: operations against a copy or bfloat16; for the quantize suite also one by size."""

import math
import pathlib
from typing import Any

from .results import Result, clocks

BASELINES = ("copy", "empty", "naive", "bf16 ")
OURS, NAIVE = "tab:blue", "0.75"
# Of the quantize suite, in the words of a reader who does not know the names of specs. The rest is in the result.
SHOWN = {
    "nvfp4": "quantize",
    "nvfp4 amax included": "quantize, and find the amax",
    "nvfp4 transposed": "quantize the transpose",
    "nvfp4 pair": "quantize x and its transpose",
    "nvfp4_2d pair": "the same in 16x16 tiles",
    "row_scaled amax found": "quantize, an amax for each row",
    "window64": "quantize, an amax for each 64",
    "nvfp4_sr": "quantize, rounding at random",
    "nvfp4_rht transposed": "rotate and quantize the transpose",
    "pretrain x pair": "pretraining recipe: x and transpose",
    "pretrain dy pair": "pretraining recipe: dy and transpose",
    "4over6 mae": "quantize by 4over6",
    "dequantize to bf16": "dequantize",
}
# The lines of the panel of sizes: operations, and of several the fastest.
SIZES = {
    "copy": ("black", ("copy by memcpy", "copy by kernel")),
    "quantize": (OURS, ("nvfp4",)),
    "jitted jnp": (NAIVE, ("naive nvfp4",)),
}
CLOCKS = {"cupti": "time in kernels", "wall": "wall time"}
Row = dict[str, Any]


def plot(result: Result, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    with_sizes = any("GB/s" in row for row in rows)
    bars = _bar_rows(rows, with_sizes)
    figure, axes = pyplot.subplots(
        1,
        1 + with_sizes,
        figsize=(15 if with_sizes else 9, max(5, 2 + 0.42 * len(bars))),
        width_ratios=[3, 2][: 1 + with_sizes],
        squeeze=False,
        layout="constrained",
    )
    try:
        _bars(axes[0, 0], bars)
        if with_sizes:
            _sizes(axes[0, 1], rows)
        env = result["environment"]
        clock = ", ".join(CLOCKS[name] for name in clocks(result))
        title = f"{result['suite']} on {env['device']} (jax {env['jax']}, commit {env['commit']}, {clock})"
        figure.suptitle(title, fontsize=14)
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)


def _bar_rows(rows: list[Row], with_sizes: bool) -> list[Row]:
    """Chooses what has a bar: of the quantize suite the first case, and of that what SHOWN names, if it has any."""
    bars = [row for row in rows if not row["op"].startswith(BASELINES)]
    if with_sizes:
        bars = [row for row in bars if row["case"] == bars[0]["case"]]
        bars = [row for row in bars if row["op"] in SHOWN] or bars
    return bars


def _measure(row: Row) -> str:
    """The column that is 1 at the roof: a copy, or an unquantized product."""
    return next(key for key in row if key == "share of copy" or key.startswith("speed of"))


def _bars(axes: Any, rows: list[Row]) -> None:
    measure, baseline = _measure(rows[0]), _measure(rows[0]).rpartition(" ")[2]
    one_case = len({row["case"] for row in rows}) == 1
    labels = [SHOWN.get(row["op"], row["op"]) if one_case else f"{row['case']} {row['op']}" for row in rows]
    right = max(1, *(row[measure] for row in rows))
    for i, row in enumerate(rows):
        share = row[measure]
        axes.barh(i, share, height=0.72, color=OURS)
        note = f"{100 * share:.0f} %"
        if "times naive" in row:
            axes.barh(i, share / row["times naive"], height=0.3, color=NAIVE)
            note += f", {row['times naive']:.1f}x jitted jnp"
        axes.text(1.02 * right, i, note, va="center", fontsize=11)
    axes.axvline(1, color="0.3", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(rows)), labels, fontsize=11)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.2 * right)
    axes.set_xticks([0.2 * n for n in range(int(5 * right) + 1)])
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    if baseline == "copy":
        axes.set_xlabel("of the speed of a copy: 100 % moves bytes as fast as a copy of x", fontsize=11)
        axes.set_title(f"x of {rows[0]['shape']}, {rows[0]['dtype']}", fontsize=12)
    else:
        axes.set_xlabel(f"of the speed of the unquantized product ({baseline})", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    if any("times naive" in row for row in rows):
        from matplotlib.patches import Patch

        entries = [Patch(color=OURS, label="jnvfp4"), Patch(color=NAIVE, label="the same in jax.numpy under jit")]
        axes.figure.legend(handles=entries, loc="outside lower left", ncols=2, frameon=False, fontsize=11)


def _sizes(axes: Any, rows: list[Row]) -> None:
    """Draws bytes moved a second against the elements of x, for the first dtype and whole tiles of rows."""
    rows = [row for row in rows if row["dtype"] == rows[0]["dtype"] and int(row["shape"].partition("x")[0]) % 16 == 0]
    names: dict[int, str] = {}  # one shape for each number of elements
    for label, (color, ops) in SIZES.items():
        points: dict[int, float] = {}
        for row in rows:
            if row["op"] in ops:
                size = math.prod(map(int, row["shape"].split("x")))
                points[size] = max(points.get(size, 0.0), row["GB/s"])
                names.setdefault(size, row["shape"])
        sizes = sorted(points)
        axes.plot(sizes, [points[size] for size in sizes], "o-", color=color, label=label, markersize=6)
    axes.set(xscale="log", xlabel="", ylabel="GB/s")
    axes.set_xticks([], minor=True)
    shown = _spread(sorted(names))
    axes.set_xticks(shown, [names[size] for size in shown], rotation=45, ha="right", fontsize=10)
    axes.set_xlabel("x, rows x columns (logarithmic in their product)", fontsize=11)
    axes.set_ylim(0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_title("bytes read and written a second, by size", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=11)


def _spread(sizes: list[int]) -> list[int]:
    """Leaves out sizes that are too near to the one before for a label of their own."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size > 1.3 * kept[-1]:
            kept.append(size)
    return kept
