"""What the quantize suite times: every recipe of the library, with the bytes it must move and its target."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jnvfp4
from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_RHT_SR,
    NVFP4_RHT_SR_UNBIASED,
    NVFP4_SR,
    NVFP4_SR_UNBIASED,
    ROW_SCALED,
    WINDOW64,
    QuantSpec,
)
from jnvfp4.spec import four_over_six

What = Literal["quantize", "dequantize", "transpose"]
PACKED = 0.5625  # bytes an element of codes and scales


@dataclass(frozen=True)
class Op:
    """Something to time, by the module ``jnvfp4`` or by ``naive``.

    Attributes:
      specs: of x, and of its transpose.
      given: the amax; otherwise found, at the cost of another read for a tensor scope.
      what: the function of these specs.
      target: the share of the copy's rate to reach on 16384 x 6144.
    """

    name: str
    specs: tuple[QuantSpec | None, QuantSpec | None]
    given: bool = True
    what: What = "quantize"
    target: float | None = None

    @property
    def spec(self) -> QuantSpec:
        """The only one, or that of x."""
        spec = self.specs[0] or self.specs[1]
        assert spec
        return spec

    def fits(self, shape: tuple[int, ...]) -> bool:
        row, col = self.specs
        needs: list[tuple[int, int]] = [(row.block_rows, row.unit)] if row else []
        needs += [(col.unit, col.block_rows)] if col else []
        return all(n % unit == 0 for need in needs for n, unit in zip(shape, need, strict=True))

    def call(self, api: Any) -> Callable:
        """The operation, of ``arguments``."""
        row, col = self.specs
        spec, side = self.spec, 0 if row else 1
        if self.what == "dequantize":
            return lambda t: api.dequantize(t, jnp.bfloat16)
        if self.what == "transpose":
            return lambda t: api.transpose(t, spec)
        if row and col:
            return lambda x, amax, key: api.quantize_pair(x, row, col, amax=amax, key=key)
        return lambda x, amax, key: api.quantize(x, spec, amax=amax and amax[side], key=key, transpose=side == 1)

    def arguments(self, of: "Input") -> tuple:
        if self.what in ("dequantize", "transpose"):
            return (of.quantized(self.spec),)
        # The key is an argument, so that XLA cannot compute the random bits while compiling.
        key = jax.random.key(0) if any(s and s.rounding == "stochastic" for s in self.specs) else None
        return of.x, of.amax(self), key

    def bytes_per_element(self, size: int) -> float:
        """Of the floor: x read once (twice to find a tensor's amax), what is quantized written once."""
        windows = sum(4 / 64 for s in self.specs if s and s.format.amax_scope == "window64")
        if self.what == "dequantize":
            return PACKED + windows + 2
        if self.what == "transpose":
            return 2 * PACKED
        reads = 1 if self.given or all(s is None or s.finds_amax for s in self.specs) else 2
        return reads * size + PACKED * sum(s is not None for s in self.specs) + windows

    def baseline(self) -> "Op":
        """What naive code does for it: the same for either error math."""
        row, col = (spec and replace(spec, error_math="fp32") for spec in self.specs)
        return replace(self, name="", specs=(row, col), target=None)


class Input:
    """An array and what the operations need of it beside, each made once."""

    def __init__(self, x: jax.Array) -> None:
        self.x = x
        self._amaxes: dict[tuple, tuple] = {}

    def quantized(self, spec: QuantSpec) -> jnvfp4.NVFP4Tensor:
        return jax.jit(jnvfp4.quantize, static_argnums=1)(self.x, spec)

    def amax(self, op: Op) -> tuple | None:
        """What the specs of ``op`` take: as the operation finds it; nothing for windows, which are always found."""
        if not op.given or any(s and s.format.amax_scope == "window64" for s in op.specs):
            return None
        row, col = (s and QuantSpec(replace(s.format, e4m3_max=448)) for s in op.specs)
        if (row, col) not in self._amaxes:
            finder = replace(op, given=False, what="quantize", specs=(row, col))
            found = jax.jit(finder.call(jnvfp4))(*finder.arguments(self))
            tensors = found if row and col else (found, None) if row else (None, found)
            self._amaxes[row, col] = tuple(t and t.amax for t in tensors)
        return self._amaxes[row, col]


def _four_over_six() -> list[Op]:
    ops = [
        Op(f"4over6 {error}{' fast' * fast}", (four_over_six(error, fast=fast), None), target=0.67)
        for error in ("mae", "mse")
        for fast in (False, True)
    ]
    for error in ("mae", "mse"):
        one, tile = four_over_six(error), four_over_six(error, block_rows=16)
        ops.append(Op(f"4over6 {error} pair", (one, one), target=0.45))
        ops.append(Op(f"4over6_2d {error} pair", (tile, tile), target=0.70))
    return ops


OPS = [
    Op("nvfp4", (NVFP4, None), target=0.97),
    Op("nvfp4 amax included", (NVFP4, None), given=False, target=0.88),
    Op("nvfp4 transposed", (None, NVFP4), target=0.88),
    Op("nvfp4 pair", (NVFP4, NVFP4), target=0.88),
    Op("nvfp4 pair amax included", (NVFP4, NVFP4), given=False),
    Op("nvfp4_2d", (NVFP4_2D, None)),
    Op("nvfp4_2d transposed", (None, NVFP4_2D)),
    Op("nvfp4_2d pair", (NVFP4_2D, NVFP4_2D), target=0.88),
    Op("row_scaled", (ROW_SCALED, None)),
    Op("row_scaled amax found", (ROW_SCALED, None), given=False, target=0.85),
    Op("row_scaled transposed amax found", (None, ROW_SCALED), given=False),
    Op("row_scaled pair", (ROW_SCALED, ROW_SCALED)),
    Op("window64", (WINDOW64, None), target=0.85),
    Op("window64 pair", (WINDOW64, WINDOW64), target=0.85),
    Op("nvfp4_sr", (NVFP4_SR, None), target=0.80),
    Op("nvfp4_sr pair", (NVFP4_SR, NVFP4_SR)),
    Op("nvfp4_sr_unbiased", (NVFP4_SR_UNBIASED, None), target=0.80),
    Op("nvfp4_sr_unbiased pair", (NVFP4_SR_UNBIASED, NVFP4_SR_UNBIASED)),
    Op("nvfp4_rht transposed", (None, NVFP4_RHT), target=0.80),
    Op("nvfp4_rht transposed amax included", (None, NVFP4_RHT), given=False),
    Op("nvfp4_rht_sr transposed", (None, NVFP4_RHT_SR)),
    Op("nvfp4_rht_sr_unbiased transposed", (None, NVFP4_RHT_SR_UNBIASED)),
    Op("pretrain x pair", (NVFP4, NVFP4_RHT), target=0.75),
    Op("pretrain dy pair", (NVFP4_SR, NVFP4_RHT_SR), target=0.55),
    Op("pretrain dy pair unbiased", (NVFP4_SR_UNBIASED, NVFP4_RHT_SR_UNBIASED), target=0.55),
    *_four_over_six(),
    Op("dequantize to bf16", (NVFP4, None), what="dequantize", target=0.95),
    Op("dequantize row_scaled to bf16", (ROW_SCALED, None), what="dequantize"),
    Op("dequantize window64 to bf16", (WINDOW64, None), what="dequantize"),
    Op("dequantize rotated to bf16", (NVFP4_RHT, None), what="dequantize"),
    Op("transpose nvfp4_2d", (NVFP4_2D, None), what="transpose", target=0.85),
]
BY_NAME = {op.name: op for op in OPS}

PLAIN = ("nvfp4", "nvfp4 amax included")
FOUR_OVER_SIX = tuple(op.name for op in _four_over_six())
# Of every shape that models have.
COMMON = (*PLAIN, "nvfp4 transposed", "nvfp4 pair", "nvfp4_2d pair", "row_scaled amax found", "dequantize to bf16")
