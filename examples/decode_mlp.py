"""Times the MLP of a language model during decoding: few tokens at a time, so reading the weights takes the time.

    pip install ".[examples]"
    python examples/decode_mlp.py

A layer is y = x + silu(x w1^T) w2^T, w1 [hidden, width] and w2 [width, hidden]. Its weights are bfloat16, or NVFP4,
which takes 0.28 times the memory; then the tokens stay bfloat16 ("W4A16"), or are quantized too, with per-token scaling
("W4A4").

Prints tokens per second through all layers, the memory of the weights, and the error of what NVFP4 computes. Writes
``decode_mlp.json`` and ``decode_mlp.png`` to ``--out``. Takes about a minute. On a GPU the layers are as wide as those
of Llama 3 8B, and no cache holds their weights; on a CPU they are small.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax import Array

import jnvfp4
from jnvfp4 import NVFP4_2D, ROW_SCALED, NVFP4Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RUNS, LEAST_SECONDS = 7, 0.05


class Layer(NamedTuple):
    """Holds the weights of a layer, bfloat16 or NVFP4."""

    w1: Any
    w2: Any


def bf16(x: Array, w: Array) -> Array:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def w4a16(x: Array, w: NVFP4Tensor) -> Array:
    return jnvfp4.matmul_nt(x, w)


def w4a4(x: Array, w: NVFP4Tensor) -> Array:
    return jnvfp4.matmul_nt(jnvfp4.quantize(x, ROW_SCALED), w)


PRODUCTS: dict[str, Callable[[Array, Any], Array]] = {"bf16": bf16, "W4A16": w4a16, "W4A4": w4a4}


def make_layers(count: int, width: int, hidden: int) -> list[Layer]:
    """Makes weights that keep the size of what they multiply."""

    def weight(seed: int, rows: int, cols: int) -> Array:
        return (jax.random.normal(jax.random.key(seed), (rows, cols)) / np.sqrt(cols)).astype(jnp.bfloat16)

    return [Layer(weight(2 * i, hidden, width), weight(2 * i + 1, width, hidden)) for i in range(count)]


def quantize_layer(layer: Layer) -> Layer:
    return Layer(*(jax.jit(lambda w: jnvfp4.quantize(w, NVFP4_2D))(w) for w in layer))


def nbytes(layers: list[Layer]) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(layers))


def forward(product: Callable[[Array, Any], Array], x: Array, layers: list[Layer]) -> Array:
    for layer in layers:
        x = x + product(jax.nn.silu(product(x, layer.w1)), layer.w2)
    return x


def seconds(run: Callable[[], Array]) -> float:
    """Returns the median time of a run among several in a row, whose dispatch overlaps with work."""
    run().block_until_ready()
    begin = time.perf_counter()
    run().block_until_ready()
    in_a_row = max(1, min(200, int(LEAST_SECONDS / (time.perf_counter() - begin))))
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        jax.block_until_ready([run() for _ in range(in_a_row)])
        times.append((time.perf_counter() - begin) / in_a_row)
    return statistics.median(times)


def measure(tokens: int, layers: dict[str, list[Layer]], width: int) -> dict[str, dict[str, float]]:
    """Measures tokens per second, and the error relative to bfloat16, by the name of the product."""
    x = jax.random.normal(jax.random.key(100), (tokens, width), jnp.bfloat16)
    found: dict[str, dict[str, float]] = {}
    exact = np.zeros(0)
    for name, product in PRODUCTS.items():
        program = jax.jit(forward, static_argnums=0).lower(product, x, layers[name]).compile()
        y = np.asarray(program(x, layers[name]), np.float64)
        exact = y if name == "bf16" else exact
        error = float(np.linalg.norm(y - exact) / np.linalg.norm(exact))
        elapsed = seconds(lambda program=program, own=layers[name]: program(x, own))  # type: ignore[misc]
        found[name] = {"tokens_per_second": tokens / elapsed, "relative_error": error}
    return found


def plot(path: Path, rows: dict[int, dict[str, dict[str, float]]], title: str) -> None:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in PRODUCTS:
        axes.plot(list(rows), [row[name]["tokens_per_second"] for row in rows.values()], ".-", label=name)
    axes.set(title=title, xlabel="tokens at a time", ylabel="tokens per second", xscale="log", yscale="log")
    axes.set_xticks(list(rows), [str(tokens) for tokens in rows])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def parse_args() -> argparse.Namespace:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description="Times the MLP of a language model where text is generated.")
    parser.add_argument("--width", type=int, default=4096 if gpu else 512, help="of a token (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=14336 if gpu else 1792, help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8 if gpu else 2, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="at a time")
    parser.add_argument("--out", type=Path, default=Path("out/decode_mlp"), help="folder for the PNG and the JSON")
    args = parser.parse_args()
    for name in ("width", "hidden"):
        if getattr(args, name) < 16 or getattr(args, name) % 16:
            parser.error(f"--{name} must be a positive multiple of 16, got {getattr(args, name)}")
    if args.layers < 1 or min(args.tokens) < 1:
        parser.error(f"--layers and --tokens must be positive, got {args.layers} and {args.tokens}")
    return args


def main() -> None:
    args = parse_args()
    dense = make_layers(args.layers, args.width, args.hidden)
    quantized = [quantize_layer(layer) for layer in dense]
    layers = {"bf16": dense, "W4A16": quantized, "W4A4": quantized}
    memory = {"bf16": nbytes(dense), "NVFP4": nbytes(quantized)}
    print(f"{args.layers} layers, width {args.width}, hidden {args.hidden}, on {jax.devices()[0].device_kind}")
    print("weights: " + ", ".join(f"{size / 1e6:.1f} MB in {name}" for name, size in memory.items()))
    print(f"{'tokens':>8}" + "".join(f"{name:>16}" for name in PRODUCTS) + "    tokens per second (times bf16)")
    rows = {}
    for tokens in args.tokens:
        row = rows[tokens] = measure(tokens, layers, args.width)
        rates = [row[name]["tokens_per_second"] for name in PRODUCTS]  # the first is bfloat16's
        print(f"{tokens:>8}" + "".join(f"{rate:>9.0f} ({rate / rates[0]:.2f})" for rate in rates))
    worst = {name: max(row[name]["relative_error"] for row in rows.values()) for name in PRODUCTS}
    print("error relative to bf16: " + ", ".join(f"{100 * worst[name]:.1f} % {name}" for name in ("W4A16", "W4A4")))
    args.out.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0].device_kind
    plot(args.out / "decode_mlp.png", rows, f"{args.layers} MLP layers, {args.width} x {args.hidden}, {device}")
    results = {
        "layers": args.layers,
        "width": args.width,
        "hidden": args.hidden,
        "device": device,
        "versions": {"jax": jax.__version__, "jnvfp4": jnvfp4.__version__},
        "weight_bytes": memory,
        "tokens": {str(tokens): row for tokens, row in rows.items()},
    }
    (args.out / "decode_mlp.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwrote {args.out}/decode_mlp.png and {args.out}/decode_mlp.json")


if __name__ == "__main__":
    main()
