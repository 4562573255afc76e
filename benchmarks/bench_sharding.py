"""Weights that two GPUs or more gather, packed and in bfloat16, and layers on a mesh: NVFP4 against bfloat16.

FSDP splits weights and tokens over all devices and gathers the weights; tensor parallel splits the rows of the weights.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jnvfp4
from jnvfp4 import NVFP4_2D, NVFP4Tensor, recipes

from .bench_gemm import parse
from .bench_products import burst_and_steady
from .bench_steps import CUBLAS
from .device_time import device_events

CASES = ("8192x8192x8192",)
GATHERED = 8  # weights of a program
CHAIN = 2  # layers of a program
COMBINED = {"xla_gpu_all_gather_combine_threshold_bytes": 2**31 - 1}
AXIS = "devices"
LAYOUTS = {  # shardings of x, dy and w, and of w as a product reads it
    "fsdp": (P(AXIS, None), P(AXIS, None), P(AXIS, None), P()),
    "tensor parallel": (P(), P(None, AXIS), P(AXIS, None), P(AXIS, None)),
}


def make_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), (AXIS,))


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _normal(seed: int, rows: int, cols: int, dtype: Any, sharding: Any) -> jax.Array:
    return lax.with_sharding_constraint(jax.random.normal(jax.random.key(seed), (rows, cols), dtype), sharding)


def gathers(mesh: Mesh, n: int, k: int) -> dict[str, Callable]:
    """Returns programs that gather weights [N, K]: "bf16", and "packed", whose codes and scales travel as bytes.

    Each as XLA does it unasked, and combined: all arrays of the program in one collective.
    """
    kept = NamedSharding(mesh, LAYOUTS["fsdp"][2])
    weights = [_normal(i, n, k, jnp.bfloat16, kept) for i in range(GATHERED)]
    quantize = jax.jit(lambda w: _parts(jnvfp4.quantize(w, NVFP4_2D)))
    packed = [quantize(w) for w in weights]
    jax.block_until_ready(packed)
    whole = NamedSharding(mesh, P())
    kinds = {"bf16": weights, "packed": packed}
    return {
        f"{name}{suffix}": _compiled(partial(_place, whole), [ws], options)
        for suffix, options in (("", None), (" combined", COMBINED))
        for name, ws in kinds.items()
    }


def _parts(t: NVFP4Tensor) -> tuple[jax.Array, jax.Array]:
    return t.data, lax.bitcast_convert_type(t.scale, jnp.uint8)


def _place(sharding: NamedSharding, tree: Any) -> Any:
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, sharding), tree)


def _compiled(f: Callable, args: list, options: dict | None = None) -> Callable:
    return partial(jax.jit(f).lower(*args).compile(compiler_options=options), *args)


def layers(mesh: Mesh, case: str, layout: str) -> dict[str, Callable]:
    """Returns programs of layers with float32 weights, forward and backward: "bf16" and "pretrain"."""
    m, n, k = parse(case)
    of_x, of_dy, of_w, read = (NamedSharding(mesh, spec) for spec in LAYOUTS[layout])
    chain = [
        (
            _normal(3 * i, m, k, jnp.bfloat16, of_x),
            _normal(3 * i + 1, n, k, jnp.float32, of_w),
            _normal(3 * i + 2, m, n, jnp.bfloat16, of_dy),
        )
        for i in range(CHAIN)
    ]

    def dense(x: jax.Array, w: jax.Array, _key: Any) -> jax.Array:
        w = _place(read, _place(of_w, w.astype(x.dtype)))
        return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)

    def quantized(x: jax.Array, w: jax.Array, key: Any) -> jax.Array:
        return jnvfp4.linear(x, w, recipes.pretrain(), key=key, w_gather=(of_w, read))

    def program(layer: Callable) -> Callable:
        def step(chain: list[tuple], key: Any) -> list:
            found = []
            for x, w, dy in chain:
                y, pull = jax.vjp(lambda x, w: layer(x, w, key), x, w)
                dx, dw = pull(dy)
                found.append((_place(of_dy, y), _place(of_x, dx), _place(of_w, dw)))
            return found

        return _compiled(step, [chain, jax.random.key(0)], CUBLAS)

    return {"bf16": program(dense), "pretrain": program(quantized)}


# ---------------------------------------------------------------- what a profile shows
def hidden(program: Callable) -> tuple[float, float]:
    """Returns the microseconds of collectives on the first device, and how many of them other kernels run beside."""
    events = device_events(program)
    collectives = [(start, end) for start, end, name in events if re.search("nccl|AllGather|ReduceScatter", name)]
    others = [(start, end) for start, end, name in events if not re.search("nccl|AllGather|ReduceScatter", name)]
    covered = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in collectives
        for other_start, other_end in others
    )
    return sum(end - start for start, end in collectives) / 1e3, covered / 1e3


def measure(case: str) -> Iterator[list[dict[str, Any]]]:
    _, n, k = parse(case)
    mesh = make_mesh()
    yield _rows(f"{n}x{k} on {mesh.size}", "gather", gathers(mesh, n, k), GATHERED, faster=3.0)
    for layout in LAYOUTS:
        yield _rows(f"{case} on {mesh.size}", layout, layers(mesh, case, layout), CHAIN)


def _rows(case: str, what: str, programs: dict[str, Callable], count: int, faster: float | None = None) -> list[dict]:
    speeds = burst_and_steady(list(programs.values()))
    rows = []
    for (name, program), speed in zip(programs.items(), speeds, strict=True):
        memory = program.func.memory_analysis()  # type: ignore[attr-defined]
        collective_us, hidden_us = hidden(program)
        target = faster if name.startswith("packed") else None
        baseline = speeds[list(programs).index(name.replace("packed", "bf16"))] if target else speeds[0]
        row = {
            "case": case,
            "op": f"{what} {name}",
            **speed.columns(count, baseline),
            "collectives_us": round(collective_us / count, 1),
            "hidden_us": round(hidden_us / count, 1),
            "MiB beside arguments and results": round(memory.temp_size_in_bytes / 2**20, 1),
        }
        if target:
            row |= {"target": target, "met": baseline.median_us / speed.median_us >= target}
        rows.append(row)
    return rows


def run(cases: list[str] | None) -> Iterator[list[dict[str, Any]]]:
    """Yields rows when they are measured."""
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        raise ValueError("the sharding suite needs two GPUs or more")
    for case in cases or CASES:
        yield from measure(case)
