"""Compares the error of NVFP4 weights here and in Qwix, from very small weights to very large ones.

    pip install ".[examples]" qwix==0.1.8
    python -m benchmarks.quality.small_weights

NVFP4 has one E4M3 scale per 16 values. E4M3 numbers go from 2^-9 to 448, so the format has a second scale, a float32
number for the tensor, which moves the block scales into that range. Qwix 0.1.8 leaves it out: the block scales of small
weights are rounded to 0, and with them the weights.

Both libraries quantize the same normal bfloat16 weights [size, size] in blocks of 16 along rows. The relative error is
||dequantized - w|| / ||w||.

Prints a table, and writes ``small_weights.json`` and ``small_weights.png`` to ``--out``. Takes a few seconds on two CPU
cores. Without Qwix it shows this library alone.
"""

import argparse
import importlib
import importlib.util
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax import Array

import jnvfp4

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DEVIATIONS = [float(f"{digit}e{power}") for power in range(-5, 5) for digit in (1, 2, 5)]
SHOWN = 1e-3  # standard deviation of the weights that the left panel shows
POINTS = 3000


def jnvfp4_values(w: Array) -> Array:
    return jnvfp4.dequantize(jnvfp4.quantize(w))


def qwix_values(w: Array) -> Array:
    qwix = importlib.import_module("qwix")
    # Channelwise rows: without them Qwix gives all rows of 16 columns one scale.
    return qwix.dequantize(qwix.quantize(w, "nvfp4", channelwise_axes=(0,), tiled_axes={1: 16}))


def libraries() -> dict[str, Callable[[Array], Array]]:
    """Lists the installed libraries by a name with their version: what each makes of weights."""
    found: dict[str, Callable[[Array], Array]] = {f"jnvfp4 {jnvfp4.__version__}": jnvfp4_values}
    if importlib.util.find_spec("qwix") is None:
        print("qwix is not installed: only jnvfp4 is shown")
    else:
        found[f"Qwix {version('qwix')}"] = qwix_values
    return found


def weights(deviation: float, size: int) -> Array:
    return (deviation * jax.random.normal(jax.random.key(0), (size, size))).astype(jnp.bfloat16)


def relative_error(values: Array, w: Array) -> float:
    """Returns ||values - w|| / ||w||, computed in float64: squares of small weights underflow in float32."""
    got, exact = (np.asarray(v).astype(np.float64) for v in (values, w))
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def plot(path: Path, errors: dict[str, list[float]], compared: dict[str, Callable[[Array], Array]], size: int) -> None:
    """Plots what some weights become, and the errors over the size of the weights."""
    figure, (values, curves) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    w = weights(SHOWN, size)
    exact = 1e3 * np.asarray(w).astype(np.float32).ravel()[:POINTS]
    values.axline((0, 0), slope=1, color="black", linewidth=0.8)
    for i, (name, quantized) in enumerate(compared.items()):
        got = 1e3 * np.asarray(quantized(w)).astype(np.float32).ravel()[:POINTS]
        values.plot(exact, got, ".", markersize=3, color=f"C{i}", label=name)
        curves.plot(DEVIATIONS, [100 * e for e in errors[name]], ".-", color=f"C{i}", label=name)
    values.set(
        title=f"Weights of N(0, {SHOWN:g}²), before and after NVFP4",
        xlabel="weight, thousandths",
        ylabel="dequantized, thousandths",
    )
    curves.set(
        title="Error over the size of the weights",
        xlabel="standard deviation of the weights",
        ylabel="relative error, %",
        xscale="log",
        ylim=(0, 105),
    )
    curves.axvline(SHOWN, color="grey", linestyle=":", linewidth=1)
    for axes in (values, curves):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = curves.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=110)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares the error of NVFP4 weights here and in Qwix.")
    parser.add_argument("--size", type=int, default=1024, help="rows and columns (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/small_weights"), help="folder for the PNG and the JSON")
    args = parser.parse_args()
    if args.size < 16 or args.size % 16:
        parser.error(f"--size must be a positive multiple of 16, got {args.size}")
    return args


def main() -> None:
    args = parse_args()
    compared = libraries()
    errors: dict[str, list[float]] = {name: [] for name in compared}
    print(f"{'standard deviation':>20}" + "".join(f"{name:>16}" for name in compared) + "    relative error, %")
    for deviation in DEVIATIONS:
        w = weights(deviation, args.size)
        for name, quantized in compared.items():
            errors[name].append(relative_error(quantized(w), w))
        print(f"{deviation:20g}" + "".join(f"{100 * errors[name][-1]:16.2f}" for name in compared))
    args.out.mkdir(parents=True, exist_ok=True)
    plot(args.out / "small_weights.png", errors, compared, args.size)
    results: dict[str, Any] = {
        "size": args.size,
        "dtype": "bfloat16",
        "versions": {"jax": jax.__version__},
        "device": jax.devices()[0].device_kind,
        "standard_deviations": DEVIATIONS,
        "relative_errors": errors,
    }
    (args.out / "small_weights.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwrote {args.out}/small_weights.png and {args.out}/small_weights.json")


if __name__ == "__main__":
    main()
