"""Quantize and dequantize against a copy of the same bytes, and against the naive jnp quantizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jnvfp4
from jnvfp4 import QuantSpec
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


@dataclass(frozen=True)
class Op:
    """A quantizer to time. Bytes an element are those of the floor: x read once, 0.5625 written an orientation."""

    name: str
    specs: tuple[QuantSpec | None, QuantSpec | None]  # of x, and of its transpose
    given: bool = True  # the amax; otherwise found, at the cost of another read for a tensor scope

    def call(self, x: jax.Array, amax: tuple | None) -> Any:
        row, col = self.specs
        key = jax.random.key(0) if any(s and s.rounding == "stochastic" for s in self.specs) else None
        if row and col:
            return jnvfp4.quantize_pair(x, row, col, amax=amax, key=key)
        spec, transpose = (row, False) if row else (col, True)
        assert spec
        return jnvfp4.quantize(x, spec, amax=None if amax is None else amax[transpose], key=key, transpose=transpose)

    def amax(self, x: jax.Array) -> tuple | None:
        """What the specs take: of the tensor, of rows, or nothing, since windows are always found."""
        if not self.given or any(s and s.format.amax_scope == "window64" for s in self.specs):
            return None
        magnitude = jnp.abs(x.astype(jnp.float32))
        found: list[Any] = [None, None]
        for i, spec in enumerate(self.specs):
            if spec:
                found[i] = jnp.max(magnitude, axis=None if spec.format.amax_scope == "tensor" else -1 - i)
        return tuple(found)

    def bytes_per_element(self, size: int) -> float:
        reads = 1 if self.given or all(s is None or s.finds_amax for s in self.specs) else 2
        windows = sum(4 / 64 for s in self.specs if s and s.format.amax_scope == "window64")
        return reads * size + 0.5625 * sum(s is not None for s in self.specs) + windows


def _four_over_six() -> list[Op]:
    ops = [
        Op(f"4over6 {error}{' fast' * fast}", (jnvfp4.four_over_six(error, fast=fast), None))
        for error in ("mae", "mse")
        for fast in (False, True)
    ]
    one, tile = jnvfp4.four_over_six(), jnvfp4.four_over_six(block_rows=16)
    return [*ops, Op("4over6 mae, pair", (one, one)), Op("4over6_2d mae, pair", (tile, tile))]


OPS = [
    Op("nvfp4", (jnvfp4.NVFP4, None)),
    Op("nvfp4, amax included", (jnvfp4.NVFP4, None), given=False),
    Op("nvfp4 transposed", (None, jnvfp4.NVFP4)),
    Op("nvfp4, pair", (jnvfp4.NVFP4, jnvfp4.NVFP4)),
    Op("nvfp4_2d", (jnvfp4.NVFP4_2D, None)),
    Op("nvfp4_2d transposed", (None, jnvfp4.NVFP4_2D)),
    Op("nvfp4_2d, pair", (jnvfp4.NVFP4_2D, jnvfp4.NVFP4_2D)),
    Op("row_scaled", (jnvfp4.ROW_SCALED, None)),
    Op("row_scaled, amax found", (jnvfp4.ROW_SCALED, None), given=False),
    Op("row_scaled transposed, amax found", (None, jnvfp4.ROW_SCALED), given=False),
    Op("row_scaled, pair", (jnvfp4.ROW_SCALED, jnvfp4.ROW_SCALED)),
    Op("window64", (jnvfp4.WINDOW64, None)),
    Op("window64, pair", (jnvfp4.WINDOW64, jnvfp4.WINDOW64)),
    Op("nvfp4_sr", (jnvfp4.NVFP4_SR, None)),
    Op("nvfp4_rht transposed", (None, jnvfp4.NVFP4_RHT)),
    Op("nvfp4_rht transposed, amax included", (None, jnvfp4.NVFP4_RHT), given=False),
    Op("pretrain x, pair", (jnvfp4.NVFP4, jnvfp4.NVFP4_RHT)),
    Op("pretrain dy, pair", (jnvfp4.NVFP4_SR, jnvfp4.NVFP4_RHT_SR)),
    *_four_over_six(),
]


def _bench_case(case: Case) -> list[dict[str, Any]]:
    xs = _inputs(case)
    elements, size = xs[0].size, xs[0].dtype.itemsize
    copy = time_calls(lambda x: -x, [(x,) for x in xs])
    copy_gb_s = 2 * size * elements / copy.median_us / 1e3
    rows = [_row(case, f"copy {np.dtype(xs[0].dtype).name}", copy, 2 * size * elements, copy_gb_s)]

    def add(what: str, f: Callable, args: list[tuple], bytes_per_element: float) -> None:
        rows.append(_row(case, what, time_calls(f, args), bytes_per_element * elements, copy_gb_s))

    amax = jnp.max(jnp.abs(xs[0])).astype(jnp.float32)
    add("naive jnp", naive.quantize, [(x, amax) for x in xs], size + 0.5625)
    for op in OPS:
        if all(s is None or case.shape[-2 if i else -1] % s.unit == 0 for i, s in enumerate(op.specs)):
            add(op.name, op.call, [(x, op.amax(x)) for x in xs], op.bytes_per_element(size))
    for name, spec in (("dequantize", jnvfp4.NVFP4), ("dequantize rotated", jnvfp4.NVFP4_RHT)):
        tensors = [jax.block_until_ready(jnvfp4.quantize(x, spec)) for x in xs]
        add(f"{name} to bf16", lambda t: jnvfp4.dequantize(t, jnp.bfloat16), [(t,) for t in tensors], 2.5625)
    return rows


def run(names: list[str] | None) -> list[dict[str, Any]]:
    names = names or (CPU_CASES if jax.default_backend() == "cpu" else GPU_CASES)
    by_name = {case.name: case for case in CASES}
    return [row for name in names for row in _bench_case(by_name[name])]
