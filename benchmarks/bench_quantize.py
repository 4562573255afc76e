"""Quantize and dequantize against a copy of the same bytes, and against the naive jnp quantizer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jnvfp4
from tests.cases import CASES, Case

from . import naive
from .timing import Timing, time_calls

GPU_CASES = ["large", "square", "decode"]
CPU_CASES = ["cpu"]


def _inputs(case: Case) -> list[jax.Array]:
    """Copies of the case, enough of them that no cache holds the next one."""
    count = 8 if jax.default_backend() != "cpu" else 2
    base = jnp.asarray(case.make())
    return [jax.block_until_ready(jnp.roll(base, i, axis=-1)) for i in range(count)]


def _row(case: Case, what: str, timing: Timing, bytes_moved: float, copy_gb_s: float) -> dict[str, Any]:
    gb_s = bytes_moved / timing.median_us / 1e3
    return {
        "case": case.name,
        "op": what,
        **timing.json(),
        "GB/s": round(gb_s, 1),
        "share of copy": round(gb_s / copy_gb_s, 3),
    }


def _bench_case(case: Case) -> list[dict[str, Any]]:
    xs = _inputs(case)
    amax = jnp.max(jnp.abs(xs[0])).astype(jnp.float32)
    elements, size = xs[0].size, xs[0].dtype.itemsize
    packed = 0.5625 * elements
    copy = time_calls(lambda x: -x, [(x,) for x in xs])
    copy_gb_s = 2 * size * elements / copy.median_us / 1e3
    given = [(x, amax) for x in xs]
    row_amax = [(x, jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1)) for x in xs]
    one = size * elements + packed

    def quantizer(spec, transpose=False):
        return lambda x, a=None: jnvfp4.quantize(x, spec, amax=a, transpose=transpose)

    tensors = [jax.block_until_ready(jnvfp4.quantize(x)) for x in xs]
    cases: list[tuple[str, Callable, list[tuple], float]] = [
        ("naive jnp, amax given", naive.quantize, given, one),
        ("nvfp4, amax given", quantizer(jnvfp4.NVFP4), given, one),
        ("nvfp4, amax included", quantizer(jnvfp4.NVFP4), [(x,) for x in xs], one + size * elements),
        ("nvfp4 transposed, amax given", quantizer(jnvfp4.NVFP4, True), given, one),
        ("nvfp4_2d, amax given", quantizer(jnvfp4.NVFP4_2D), given, one),
        ("nvfp4_2d transposed, amax given", quantizer(jnvfp4.NVFP4_2D, True), given, one),
        ("row_scaled, amax given", quantizer(jnvfp4.ROW_SCALED), row_amax, one),
        ("row_scaled, amax found", quantizer(jnvfp4.ROW_SCALED), [(x,) for x in xs], one),
        ("row_scaled transposed, amax found", quantizer(jnvfp4.ROW_SCALED, True), [(x,) for x in xs], one),
        (
            "dequantize to bf16",
            lambda t: jnvfp4.dequantize(t, jnp.bfloat16),
            [(t,) for t in tensors],
            packed + 2 * elements,
        ),
    ]
    rows = [_row(case, f"copy {np.dtype(xs[0].dtype).name}", copy, 2 * size * elements, copy_gb_s)]
    return rows + [_row(case, what, time_calls(f, args), moved, copy_gb_s) for what, f, args, moved in cases]


def run(names: list[str] | None) -> list[dict[str, Any]]:
    names = names or (CPU_CASES if jax.default_backend() == "cpu" else GPU_CASES)
    by_name = {case.name: case for case in CASES}
    return [row for name in names for row in _bench_case(by_name[name])]
