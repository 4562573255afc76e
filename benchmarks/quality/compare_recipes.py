"""Compares the errors of every named spec and recipe on normal, heavy-tailed and outlier-row data.

    pip install ".[examples]"
    python -m benchmarks.quality.compare_recipes
    python -m benchmarks.quality.compare_recipes --size 256 --only row_scaled,window64 --out out/scopes

Prints the ``quantization_report`` of each spec, and the error of x w^T when the forward GEMM of each recipe computes it
(x of all three kinds of data, w normal). ``--out`` receives the same as ``compare_recipes.png`` and
``compare_recipes.json``. A relative error is ||result - exact|| / ||exact||. Outlier rows dominate that of a tensor, so
the tables also have the mean of the relative errors of rows. Takes about a minute on two CPU cores, most of it
compilation.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
from jax import Array

import jnvfp4
from jnvfp4 import QuantSpec, Recipe
from jnvfp4.spec import four_over_six, name_of
from lm.recipes import RECIPES

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# kind of data -> name of a spec or recipe -> name of a measurement -> value
Table = dict[str, dict[str, dict[str, float]]]

SPECS: dict[str, QuantSpec] = {
    name_of(spec): spec
    for spec in (
        jnvfp4.NVFP4,
        jnvfp4.NVFP4_SR,
        jnvfp4.NVFP4_SR_UNBIASED,
        jnvfp4.NVFP4_RHT,
        jnvfp4.NVFP4_RHT_SR,
        jnvfp4.NVFP4_RHT_SR_UNBIASED,
        jnvfp4.ROW_SCALED,
        jnvfp4.WINDOW64,
        four_over_six("mae", e4m3_max=256),
        four_over_six("mae", e4m3_max=256, fast=True),
        four_over_six("mae", e4m3_max=448),
        four_over_six("mae", e4m3_max=448, fast=True),
        four_over_six("mse", e4m3_max=256),
        four_over_six("mse", e4m3_max=256, fast=True),
        four_over_six("mse", e4m3_max=448),
        four_over_six("mse", e4m3_max=448, fast=True),
        four_over_six("mae", amax_scope="row"),
        jnvfp4.NVFP4_2D,
        four_over_six("mae", block_rows=16),
        four_over_six("mse", block_rows=16),
    )
}
FORWARD_RECIPES: dict[str, Recipe] = {
    name: RECIPES[name]()
    for name in (
        "pretrain",
        "row_scaled",
        "window64",
        "four_over_six_weights",
        "four_over_six_activations",
        "four_over_six_all",
        "inference",
        "weight_only",
    )
}
KINDS = {"normal": ("C0", "o"), "heavy-tailed": ("C1", "D"), "outlier rows": ("C3", "s")}
REPORT_COLUMNS = {
    "relative_error": "relative error",
    "row_error": "mean error of a row",
    "clip_share": "clipped elements",
    "zero_scale_share": "blocks with scale 0",
    "saturated_scale_share": "blocks with scale 448",
    "map_to_4_share": "blocks mapped to 4",
}
PRODUCT_COLUMNS = {"relative_error": "relative error of x w$^T$", "row_error": "mean error of a row"}


def make_data(size: int) -> dict[str, Array]:
    """Draws [size, size] bfloat16 matrices.

    "heavy-tailed" is Student's t with 3 degrees of freedom; of "outlier rows" one row in 64 is 100,000 times larger.
    """
    normal = jax.random.normal(jax.random.key(0), (size, size))
    heavy = jax.random.t(jax.random.key(1), 3.0, (size, size))
    large = jnp.where(jnp.arange(size) % 64 == 0, 100_000.0, 1.0)
    data = {"normal": normal, "heavy-tailed": heavy, "outlier rows": normal * large[:, None]}
    return {kind: x.astype(jnp.bfloat16) for kind, x in data.items()}


def mean_row_error(result: Array, exact: Array) -> Array:
    """Returns the mean over rows of the relative error of a row."""
    result, exact = result.astype(jnp.float32), exact.astype(jnp.float32)
    return jnp.mean(jnp.linalg.norm(result - exact, axis=-1) / jnp.linalg.norm(exact, axis=-1))


def spec_table(data: dict[str, Array], specs: dict[str, QuantSpec]) -> Table:
    """Measures what quantizing and dequantizing changes, with every spec."""
    table: Table = {kind: {} for kind in data}
    for name, spec in specs.items():
        key = jax.random.key(2) if spec.rounding == "stochastic" else None

        @jax.jit
        def measure(x: Array, spec: QuantSpec = spec, key: Array | None = key) -> tuple[Any, Array]:
            report = jnvfp4.stats.quantization_report(x, spec, key=key)
            values = jnvfp4.dequantize(jnvfp4.quantize(x, spec, key=key))
            return report, mean_row_error(values, x)

        for kind, x in data.items():
            report, row_error = jax.device_get(measure(x))
            measured = {"row_error": row_error, **vars(report)}
            table[kind][name] = {column: float(measured[column]) for column in REPORT_COLUMNS}
    return table


def product_table(data: dict[str, Array], chosen: dict[str, Recipe]) -> Table:
    """Measures the error of x w^T with every recipe."""
    size = len(data["normal"])
    w = jax.random.normal(jax.random.key(3), (size, size)).astype(jnp.bfloat16)
    key = jax.random.key(4)
    table: Table = {}
    for kind, x in data.items():
        wide_x, wide_w = x.astype(jnp.float32), w.astype(jnp.float32)
        exact = jnp.matmul(wide_x, wide_w.T, precision=jax.lax.Precision.HIGHEST)
        table[kind] = {}
        for name, recipe in chosen.items():
            y = jnvfp4.linear(x, w, recipe, key=key).astype(jnp.float32)
            error = jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)
            table[kind][name] = {"relative_error": float(error), "row_error": float(mean_row_error(y, exact))}
    return table


def print_table(title: str, table: Table) -> None:
    for kind, rows in table.items():
        columns = list(next(iter(rows.values())))
        print(f"\n{f'{title}, {kind}, %':44}" + "".join(f"{column.removesuffix('_share'):>17}" for column in columns))
        for name, row in rows.items():
            print(f"  {name:42}" + "".join(f"{100 * value:17.3f}" for value in row.values()))


def dots(axes: Any, table: Table, column: str, title: str) -> None:
    """Draws one panel: a line for each name, with a marker for each kind of data."""
    for offset, (kind, (color, marker)) in zip((-0.2, 0, 0.2), KINDS.items(), strict=True):
        values = [100 * row[column] for row in table[kind].values()]
        places = [i + offset for i in range(len(values))]
        axes.plot(values, places, marker, color=color, markersize=4.5, label=kind)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("%", fontsize=9)
    right = max(1.0, 1.05 * axes.get_xlim()[1])
    axes.set_xlim(-0.03 * right, right)
    axes.margins(y=0.03)
    axes.tick_params(labelsize=9, length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for place in range(0, len(table["normal"]), 2):  # stripes guide the eye from a name to its markers
        axes.axhspan(place - 0.5, place + 0.5, color="black", alpha=0.04, linewidth=0)


def panels(figure: Any, table: Table, columns: dict[str, str], title: str) -> None:
    """Draws the panels of one table side by side, one for each column."""
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", weight="bold")
    row = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, (column, heading) in zip(row, columns.items(), strict=True):
        dots(axes, table, column, heading)
    names = list(table["normal"])
    row[0].set_yticks(range(len(names)), names)
    row[0].set_ylim(len(names) - 0.5, -0.5)


def plot(path: Path, reports: Table, products: Table) -> None:
    """Plots the errors and shares of the specs and, below them, the errors of the forward GEMM of the recipes."""
    shown = [(reports, REPORT_COLUMNS, "Specs"), (products, PRODUCT_COLUMNS, "Recipes: the forward GEMM")]
    shown = [part for part in shown if part[0]["normal"]]
    heights = [0.3 * len(table["normal"]) + 1.3 for table, _, _ in shown]
    figure = plt.figure(figsize=(15, sum(heights) + 0.4), layout="constrained")
    parts = figure.subfigures(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (table, columns, title) in zip(parts, shown, strict=True):
        panels(part, table, columns, title)
    handles, labels = parts[0].axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=110)


def chosen(table: dict[str, Any], only: str) -> dict[str, Any]:
    """Returns the entries whose names contain one of the comma-separated parts."""
    return {name: value for name, value in table.items() if any(part in name.lower() for part in only.split(","))}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares every named spec and recipe on three kinds of data.")
    parser.add_argument(
        "--size", type=int, default=1024, help="rows and columns, a multiple of 64 (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="parts of names, comma-separated: only those specs and recipes")
    parser.add_argument("--out", type=Path, default=Path("out/compare_recipes"), help="folder for the PNG and the JSON")
    args = parser.parse_args()
    if args.size < 64 or args.size % 64:
        parser.error(f"--size must be a positive multiple of 64, got {args.size}")
    if not chosen(SPECS | FORWARD_RECIPES, args.only.lower()):
        parser.error(f"--only {args.only} fits none of {', '.join([*SPECS, *FORWARD_RECIPES])}")
    return args


def main() -> None:
    args = parse_args()
    data = make_data(args.size)
    reports = spec_table(data, chosen(SPECS, args.only.lower()))
    products = product_table(data, chosen(FORWARD_RECIPES, args.only.lower()))
    for title, table in (("spec", reports), ("x w^T by recipe", products)):
        if table["normal"]:
            print_table(title, table)
    args.out.mkdir(parents=True, exist_ok=True)
    plot(args.out / "compare_recipes.png", reports, products)
    versions = {"jnvfp4": jnvfp4.__version__, "jax": jax.__version__}
    results = {"size": args.size, "versions": versions, "specs": reports, "recipes": products}
    (args.out / "compare_recipes.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwrote {args.out}/compare_recipes.png and {args.out}/compare_recipes.json")


if __name__ == "__main__":
    main()
