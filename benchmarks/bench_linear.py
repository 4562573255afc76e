"""``linear``, forward alone and with both gradients, of the named recipes against the unquantized layer.

"frozen" layers have a w that is quantized before.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jnvfp4
from jnvfp4 import Recipe, recipes

from .bench_gemm import against, compute_dtype, operands, parse
from .timing import Job, rotations

GPU_CASES = ("4096x4096x4096", "16x14336x4096", "1024x14336x4096")
CPU_CASES = ("256x1024x1024",)
RECIPES: dict[str, Recipe] = {
    "pretrain": recipes.pretrain(),
    "row_scaled": recipes.row_scaled(),
    "four_over_six": recipes.four_over_six(),
    "window64": recipes.window64(),
    "inference": recipes.inference(),
}
FROZEN = {
    "W4A16": recipes.inference(weight_only=True),
    "inference": recipes.inference(),
    "inference 4over6": recipes.inference(four_over_six=True),
}
FORWARD, BOTH = "forward", "forward+backward"


def dense_layer(x: jax.Array, w: jax.Array, _key: Any) -> jax.Array:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)


def quantized_layer(recipe: Recipe, **options: Any) -> Callable:
    return lambda x, w, key: jnvfp4.linear(x, w, recipe, key=key, **options)


def two_tensors(x: jax.Array, w: jnvfp4.NVFP4Tensor, _key: Any) -> jax.Array:
    """Multiplies x as the sum of two quantized tensors, the second of what the first leaves."""
    left = x - jnvfp4.fake_quant(x).astype(x.dtype)
    first, second = (jnvfp4.linear(part, w, recipes.inference(), out_dtype=jnp.float32) for part in (x, left))
    return (first + second).astype(x.dtype)


def _with_gradients(layer: Callable) -> Callable:
    def run(x: jax.Array, w: jax.Array, key: Any, dy: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, w: layer(x, w, key), x, w)
        return y, pull(dy)

    return run


def _jobs(case: str) -> dict[str, dict[str, Job]]:
    """For each of "forward" and "forward+backward": the layers by name."""
    m, n, k = parse(case)
    key = jax.random.key(0)
    dense = operands(m, n, k, rotations((m + n) * k * jnp.dtype(compute_dtype()).itemsize))
    layers = {"dense": dense_layer, **{name: quantized_layer(recipe) for name, recipe in RECIPES.items()}}
    forward = [(x, w, key) for x, w in dense]
    frozen = [(x.astype(jnp.bfloat16), jnvfp4.quantize(w), key) for x, w in dense]
    of_frozen = {name: quantized_layer(recipe) for name, recipe in FROZEN.items()} | {"x as two tensors": two_tensors}
    both = [(*args, jnp.ones((m, n), compute_dtype())) for args in forward]
    return {
        f"{case} {FORWARD}": {name: Job(layer, forward) for name, layer in layers.items()}
        | {f"frozen {name}": Job(layer, frozen) for name, layer in of_frozen.items()},
        f"{case} {BOTH}": {name: Job(_with_gradients(layer), both) for name, layer in layers.items()},
    }


def run(cases: list[str] | None = None) -> list[dict[str, Any]]:
    def flops(case: str, _op: str) -> float:
        shape, what = case.split()
        m, n, k = parse(shape)
        return (2.0 if what == FORWARD else 6.0) * m * n * k

    names = cases or (CPU_CASES if jax.default_backend() == "cpu" else GPU_CASES)
    jobs = {label: layers for case in names for label, layers in _jobs(case).items()}
    return against("dense", jobs, flops)
