"""Weights that two GPUs or more gather, packed and in bfloat16, and layers on a mesh: NVFP4 against bfloat16.

FSDP splits weights and tokens over all devices and gathers the weights; tensor parallel splits the rows of the weights.
Layers scale weakly: a case PARTxWHOLE on n devices has PART tokens (FSDP) or PART rows of the weight (tensor parallel)
per device, and WHOLE along every other axis, so that each device multiplies as much as one device alone.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jnvfp4
from jnvfp4 import NVFP4_2D, NVFP4Tensor, recipes

from .bench_products import burst_and_steady
from .bench_steps import CUBLAS
from .device_time import device_events

CASES = ("4096x8192",)
COUNTS = (1, 2, 4, 8)  # of devices, as far as there are so many
GATHERED = 8  # weights of a program
CHAIN = 2  # layers of a program
COMBINED = {"xla_gpu_all_gather_combine_threshold_bytes": 2**31 - 1}
AXIS = "devices"
TARGETS = {"fsdp": 0.93, "tensor parallel": 0.88}  # the speed of bf16 on eight devices
LAYOUTS = {  # shardings of x, dy and w, and of w as a product reads it
    "fsdp": (P(AXIS, None), P(AXIS, None), P(AXIS, None), P()),
    "tensor parallel": (P(), P(None, AXIS), P(AXIS, None), P(AXIS, None)),
}


class Case(NamedTuple):
    """The sizes of a layer on so many devices."""

    part: int
    whole: int
    devices: int

    def mesh(self) -> Mesh:
        return Mesh(np.array(jax.devices()[: self.devices]), (AXIS,))

    def sizes(self, layout: str) -> tuple[int, int, int]:
        """Returns M, N and K."""
        scaled = self.part * self.devices
        return (scaled, self.whole, self.whole) if layout == "fsdp" else (self.whole, scaled, self.whole)

    def name(self, layout: str) -> str:
        return f"{'x'.join(map(str, self.sizes(layout)))} on {self.devices}"


def parse(case: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+x\d+", case):
        raise ValueError(f"a case must be PARTxWHOLE, got {case!r}")
    part, whole = map(int, case.split("x"))
    return part, whole


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _normal(seed: int, rows: int, cols: int, dtype: Any, sharding: Any) -> jax.Array:
    return lax.with_sharding_constraint(jax.random.normal(jax.random.key(seed), (rows, cols), dtype), sharding)


def gathers(case: Case) -> dict[str, Callable]:
    """Returns programs that gather square weights: "bf16", and "packed", whose codes and scales travel as bytes.

    Each as XLA does it unasked, and combined: all arrays of the program in one collective.
    """
    mesh = case.mesh()
    kept = NamedSharding(mesh, LAYOUTS["fsdp"][2])
    weights = [_normal(i, case.whole, case.whole, jnp.bfloat16, kept) for i in range(GATHERED)]
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


def layers(case: Case, layout: str) -> dict[str, Callable]:
    """Returns programs of layers with float32 weights, forward and backward: "bf16" and "pretrain"."""
    mesh, (m, n, k) = case.mesh(), case.sizes(layout)
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


def measure(case: Case) -> Iterator[list[dict[str, Any]]]:
    if case.devices > 1:
        name = f"{case.whole}x{case.whole} on {case.devices}"
        yield _rows(name, "gather", gathers(case), GATHERED, {"packed": 3.0, "packed combined": 3.0})
    for layout, least in TARGETS.items():
        targets = {"pretrain": least} if case.devices == COUNTS[-1] else {}
        yield _rows(case.name(layout), layout, layers(case, layout), CHAIN, targets)


def _rows(
    case: str, what: str, programs: dict[str, Callable], count: int, targets: dict[str, float]
) -> list[dict[str, Any]]:
    """Times the programs of a case, each against the bfloat16 one of its kind."""
    speeds = dict(zip(programs, burst_and_steady(list(programs.values())), strict=True))
    rows = []
    for name, program in programs.items():
        memory = program.func.memory_analysis()  # type: ignore[attr-defined]
        collective_us, hidden_us = hidden(program)
        baseline = speeds[re.sub("packed|pretrain", "bf16", name)]
        row = {
            "case": case,
            "op": f"{what} {name}",
            **speeds[name].columns(count, baseline),
            "collectives_us": round(collective_us / count, 1),
            "hidden_us": round(hidden_us / count, 1),
            "MiB beside arguments and results": round(memory.temp_size_in_bytes / 2**20, 1),
        }
        if target := targets.get(name):
            row |= {"target": target, "met": baseline.median_us / speeds[name].median_us >= target}
        rows.append(row)
    return rows


def run(cases: list[str] | None) -> Iterator[list[dict[str, Any]]]:
    """Yields rows when they are measured."""
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        raise ValueError("the sharding suite needs two GPUs or more")
    for sizes in map(parse, cases or CASES):
        for count in COUNTS:
            if count <= len(jax.devices()):
                yield from measure(Case(*sizes, count))
