"""Chains of layers with float32 weights, forward and backward, as a training step runs them: NVFP4 against bfloat16.

bfloat16 casts the weights inside the timed program, and returns gradients of the same dtypes. Burst and steady times
are those of ``bench_products``. All products of bfloat16 are cuBLAS's: some of Triton's are slower.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jnvfp4 import Recipe, recipes

from .bench_gemm import parse
from .bench_linear import RECIPES, dense_layer, quantized_layer
from .bench_products import burst_and_steady

# M, N, K: the most time of recipes.pretrain(), and of rl() in the pinned order, in times that of bfloat16.
TARGETS = {"8192x8192x8192": 1.08, "16384x14336x4096": 1.10, "4096x4096x4096": 1.35}
PINNED_TARGETS = {"8192x8192x8192": 1.40}
CUBLAS: dict[str, bool | str] = {"xla_gpu_enable_triton_gemm": False}  # options of the compiler: no product by Triton
CHAIN = 2  # layers of a program, each with weights, inputs and gradients of its own


def layers(case: str) -> dict[str, Callable]:
    """Returns programs by the name of the recipe: y and both gradients of each layer of a chain."""
    m, n, k = parse(case)

    @partial(jax.jit, static_argnums=(1, 2, 3))
    def make(seed: int, rows: int, cols: int, dtype: Any) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), (rows, cols), dtype)

    chain = [
        (make(3 * i, m, k, jnp.bfloat16), make(3 * i + 1, n, k, jnp.float32), make(3 * i + 2, m, n, jnp.bfloat16))
        for i in range(CHAIN)
    ]
    named = {"bf16": _cast, **{name: quantized_layer(recipe) for name, recipe in RECIPES.items() if _trains(recipe)}}
    named["rl pinned"] = quantized_layer(recipes.rl(), accumulation="pinned")
    return {name: _program(layer, chain) for name, layer in named.items()}


def _cast(x: jax.Array, w: jax.Array, key: Any) -> jax.Array:
    return dense_layer(x, w.astype(x.dtype), key)


def _trains(recipe: Recipe) -> bool:
    return recipe.dgrad is not None and recipe.wgrad is not None


def _program(layer: Callable, chain: list[tuple]) -> Callable:
    def step(chain: list[tuple], key: Any) -> list:
        found = []
        for x, w, dy in chain:
            y, pull = jax.vjp(lambda x, w: layer(x, w, key), x, w)
            found.append((y, pull(dy)))
        return found

    args = chain, jax.random.key(0)
    return partial(jax.jit(step).lower(*args).compile(compiler_options=CUBLAS), *args)


def measure(case: str) -> list[dict[str, Any]]:
    programs = layers(case)
    rows = []
    speeds = burst_and_steady(list(programs.values()))
    for name, speed in zip(programs, speeds, strict=True):
        time = speed.median_us / speeds[0].median_us
        row = {"case": case, "op": f"linear {name}", **speed.columns(CHAIN, speeds[0])}
        row |= {"time of bf16": round(time, 3), "steady time of bf16": round(speed.steady_us / speeds[0].steady_us, 3)}
        target = {"pretrain": TARGETS, "rl pinned": PINNED_TARGETS}.get(name, {}).get(case)
        if target:
            row |= {"target": target, "met": time <= 1.02 * target}
        rows.append(row)
    return rows


def run(cases: list[str] | None) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of a case when they are measured."""
    if jax.default_backend() != "gpu":
        raise ValueError("steps are timed by the profiler of a GPU; python -m benchmarks linear times them on a CPU")
    for case in cases or TARGETS:
        yield measure(case)
