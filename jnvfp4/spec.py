"""``Format``, which says how to read a quantized tensor, ``QuantSpec``, which says how to make one, and their lists.

``SUPPORTED_SPECS`` lists every spec, ``FUSED_PAIRS`` the pairs that ``quantize_pair`` quantizes in one pass over x, and
``name_of`` gives a spec's short name.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

AmaxScope = Literal["tensor", "row", "window64"]
BLOCK = 16  # elements that share one E4M3 scale
WINDOW = 64  # elements that share one amax under scope "window64"


# What the fields of Format and of QuantSpec may be.
_OF_FORMAT = {"amax_scope": ("tensor", "row", "window64"), "e4m3_max": (448, 256), "rht": (False, True)}
_OF_SPEC = {
    "block_rows": (1, 16),
    "select": ("max6", "mae", "mse", "search"),
    "error_math": ("fp32", "fp16"),
    "rounding": ("nearest", "stochastic"),
    "scale_headroom": (False, True),
}


def check_choice(op: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Refuses an argument that is none of the choices; 1 is not True."""
    if not any(value is c or (type(value) is type(c) and value == c) for c in choices):
        *first, last = map(repr, choices)
        raise ValueError(f"{op}: {name} must be {', '.join(first)} or {last}, got {value!r}")


def check_switch(op: str, name: str, value: object) -> None:
    check_choice(op, name, value, (True, False))


@dataclass(frozen=True)
class Format:
    """Says how to read an NVFP4 tensor.

    Attributes:
      amax_scope: which elements share one float32 amax: the whole tensor ("tensor"), a row ("row"), or 64 elements
        along a row ("window64").
      e4m3_max: the largest block scale that the quantizer aimed at: 448, or 256 for some 4over6 tensors.
      rht: whether the values were rotated by the 16-point random Hadamard transform.

    Raises:
      ValueError: a field has another value than these, or the fields contradict each other.
    """

    amax_scope: AmaxScope = "tensor"
    e4m3_max: Literal[448, 256] = 448
    rht: bool = False

    def __post_init__(self) -> None:
        for field, choices in _OF_FORMAT.items():
            check_choice("Format", field, getattr(self, field), choices)
        if self.amax_scope == "window64" and (self.rht or self.e4m3_max == 256):
            raise ValueError(f"Format: window64 goes with neither rht nor e4m3_max=256, got {self!r}")
        if self.rht and (self.amax_scope == "row" or self.e4m3_max == 256):
            raise ValueError(f'Format: rht needs amax_scope="tensor" and e4m3_max=448, got {self!r}')

    @property
    def name(self) -> str:
        """Returns a short name, such as "nvfp4_tensor_448_rht": scope, ``e4m3_max``, and whether it is rotated."""
        return f"nvfp4_{self.amax_scope}_{self.e4m3_max}{'_rht' * self.rht}"

    @property
    def unit(self) -> int:
        """Returns the number that the length of the quantized axis is a multiple of."""
        return WINDOW if self.amax_scope == "window64" else BLOCK


@dataclass(frozen=True, repr=False)
class QuantSpec:
    """Says how to quantize a tensor: a static, hashable argument of ``quantize``. Its repr is its ``name_of``.

    Attributes:
      format: how to read the result.
      block_rows: how many rows share a block scale: 1 (1x16 blocks) or 16 (16x16 tiles, for weights).
      select: how the block scale is chosen. "max6" maps the largest magnitude of the block to 6. "mae" and "mse" try 4
        and 6, and take the one with the smaller error (4over6): of the sum of magnitudes, or of squares. "search" tries
        the 11 E4M3 numbers that can have the least squared error, from 3 below that of "max6" to 7 above it.
      error_math: how 4over6 computes these errors: "fp32" of the dequantized values, or "fp16", which is faster, of the
        scaled ones.
      rounding: how values are rounded to E2M1: to "nearest" even, or "stochastic", which needs ``block_rows=1``, as a
        rotation does.
      scale_headroom: whether the block scale is made larger by 1/16 before it is rounded to E4M3, so that no element is
        clipped because its block scale was rounded down. Without it stochastic rounding is biased there. Needs
        ``rounding="stochastic"``.

    Raises:
      ValueError: a field has another value than these, or the fields contradict each other. Every other combination is
        implemented.
    """

    format: Format = Format()
    block_rows: Literal[1, 16] = 1
    select: Literal["max6", "mae", "mse", "search"] = "max6"
    error_math: Literal["fp32", "fp16"] = "fp32"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    scale_headroom: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise ValueError(f"QuantSpec: format must be a Format, got {self.format!r}")
        for field, choices in _OF_SPEC.items():
            check_choice("QuantSpec", field, getattr(self, field), choices)
        if reason := self._contradiction():
            values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
            raise ValueError(f"QuantSpec: {reason}, got {values}")

    def __repr__(self) -> str:
        return name_of(self)

    def _contradiction(self) -> str | None:
        fmt, stochastic = self.format, self.rounding == "stochastic"
        if self.select in ("max6", "search"):
            if fmt.e4m3_max == 256:
                return 'e4m3_max=256 needs select="mae" or "mse"'
            if self.error_math == "fp16":
                return 'error_math="fp16" needs select="mae" or "mse"'
        if self.select != "max6" and stochastic:
            return (
                f'rounding="stochastic" needs select="max6", not "{self.select}", which compares the errors of '
                "values rounded to nearest"
            )
        if self.select != "max6" and fmt.rht:
            return (
                f'rht=True needs select="max6", not "{self.select}", whose errors are those of values that are '
                "not rotated"
            )
        if fmt.amax_scope == "window64" and (self.block_rows == 16 or self.select != "max6" or stochastic):
            return (
                'amax_scope="window64" needs block_rows=1, select="max6" and rounding="nearest", since the others are '
                "defined for one amax per tensor or row"
            )
        if self.select == "search" and self.block_rows == 16:
            return 'block_rows=16 needs select="max6", "mae" or "mse", since a search is for 16 elements of a row'
        if fmt.amax_scope == "row" and (self.block_rows == 16 or stochastic):
            return (
                'amax_scope="row" needs block_rows=1 and rounding="nearest", since a 16x16 tile has rows of several '
                "amaxes, and gradients, which are rounded stochastically, have one amax per tensor"
            )
        if self.block_rows == 16 and (stochastic or fmt.rht):
            return (
                'block_rows=16 needs rounding="nearest" and rht=False, since 16x16 tiles are for weights, whose values '
                "stay when they are transposed: random bits and rotations depend on the orientation"
            )
        if self.scale_headroom and not stochastic:
            return (
                'scale_headroom=True needs rounding="stochastic" and block_rows=1, since it is for gradients: a value '
                "that is rounded to nearest is biased with or without it"
            )
        return None

    @property
    def unit(self) -> int:
        """Returns the number that the length of the quantized axis is a multiple of."""
        return self.format.unit

    @property
    def finds_amax(self) -> bool:
        """Says whether the amax belongs to a row or a part of one, so that the quantizer itself can find it."""
        return self.format.amax_scope != "tensor"

    @property
    def plain_amax(self) -> bool:
        """Says whether the amax is the largest magnitude of the whole array as it is, not rotated."""
        return self.format.amax_scope == "tensor" and not self.format.rht

    def ffi_attrs(self) -> dict[str, str | np.int32 | bool]:
        """Returns the attributes of the FFI call, as ``SpecAttr`` in ffi/calls/spec_attr.h reads them."""
        return {
            "amax_scope": self.format.amax_scope,
            "e4m3_max": np.int32(self.format.e4m3_max),
            "rht": self.format.rht,
            "block_rows": np.int32(self.block_rows),
            "select": self.select,
            "error_math": self.error_math,
            "rounding": self.rounding,
            "scale_headroom": self.scale_headroom,
        }


NVFP4 = QuantSpec()
"""1x16 blocks, rounded to nearest, one amax per tensor."""
NVFP4_2D = QuantSpec(block_rows=16)
"""16x16 tiles, for weights: the transpose has the same values."""
NVFP4_SR = QuantSpec(rounding="stochastic")
"""Stochastic rounding, for gradients."""
NVFP4_RHT = QuantSpec(Format(rht=True))
"""Values rotated by the 16-point random Hadamard transform, for the operands of wgrad."""
NVFP4_RHT_SR = QuantSpec(Format(rht=True), rounding="stochastic")
"""Rotation and stochastic rounding, for dy in wgrad."""
NVFP4_SR_UNBIASED = QuantSpec(rounding="stochastic", scale_headroom=True)
"""``NVFP4_SR`` with block scales large enough that no value is clipped."""
NVFP4_RHT_SR_UNBIASED = QuantSpec(Format(rht=True), rounding="stochastic", scale_headroom=True)
"""``NVFP4_RHT_SR`` with block scales large enough that no value is clipped."""
ROW_SCALED = QuantSpec(Format(amax_scope="row"))
"""One amax per row (per-token scaling)."""
WINDOW64 = QuantSpec(Format(amax_scope="window64"))
"""One amax per 64 elements along a row."""


def four_over_six(
    error: Literal["mae", "mse"] = "mae",
    *,
    e4m3_max: Literal[448, 256] = 256,
    fast: bool = False,
    block_rows: Literal[1, 16] = 1,
    amax_scope: Literal["tensor", "row"] = "tensor",
) -> QuantSpec:
    """Makes a spec of adaptive block scaling ("4over6").

    The largest magnitude of each block is mapped to 4 or to 6, whichever gives the smaller error. Values of E2M1 near
    4 are closer together than those near 6.

    Args:
      error: the sum over the block of magnitudes ("mae") or squares ("mse") of the errors. Equal errors choose 6.
      e4m3_max: 448; or 256, with which even the blocks with the largest values can choose 4, whose scale is 1.5 times
        as large.
      fast: compare the errors of the scaled values (``error_math="fp16"``), which chooses differently for a few blocks.
      block_rows: 1; or 16, which chooses once for each 16x16 tile.
      amax_scope: "tensor" or "row".

    Raises:
      ValueError: an argument has another value than these.

    Source: arXiv:2512.02010; arithmetic as in NVIDIA TransformerEngine at d0067d0da.
    """
    check_choice("four_over_six", "error", error, ("mae", "mse"))
    check_choice("four_over_six", "amax_scope", amax_scope, ("tensor", "row"))
    check_switch("four_over_six", "fast", fast)
    math: Literal["fp32", "fp16"] = "fp16" if fast else "fp32"
    return QuantSpec(Format(amax_scope, e4m3_max), block_rows, error, math)


def _every_spec() -> tuple[QuantSpec, ...]:
    """Lists every combination of fields that does not contradict itself."""
    specs = []
    (scopes, maxima, rhts), (*others, headrooms) = _OF_FORMAT.values(), _OF_SPEC.values()
    values: Iterable = itertools.product(scopes, rhts, *others, maxima, headrooms)
    for scope, rht, rows, select, math, rounding, e4m3_max, headroom in values:
        try:
            specs.append(QuantSpec(Format(scope, e4m3_max, rht), rows, select, math, rounding, headroom))
        except ValueError:
            continue
    return tuple(specs)


SUPPORTED_SPECS = _every_spec()


def _fused_pairs() -> frozenset[tuple[QuantSpec, QuantSpec]]:
    alike = [NVFP4, NVFP4_SR, NVFP4_SR_UNBIASED, NVFP4_2D, ROW_SCALED, WINDOW64]
    alike += [s for s in SUPPORTED_SPECS if s.select in ("mae", "mse") and s.format.amax_scope == "tensor"]
    rotated = [(NVFP4, NVFP4_RHT), (NVFP4_SR, NVFP4_RHT_SR), (NVFP4_SR_UNBIASED, NVFP4_RHT_SR_UNBIASED)]
    return frozenset([*((s, s) for s in alike), *rotated])


# Pairs that `quantize_pair` quantizes in one pass over x: ffi/core/spec.h's list in Python words.
FUSED_PAIRS = _fused_pairs()


def name_of(spec: QuantSpec) -> str:
    """Returns a short name, such as "NVFP4_RHT_SR", "NVFP4_SEARCH" or "FOUR_OVER_SIX_2D_MAE_256"."""
    fmt, stochastic = spec.format, "_SR" * (spec.rounding == "stochastic")
    tiles = "_2D" * (spec.block_rows == BLOCK)
    if spec.select in ("mae", "mse"):
        row, fast = "_ROW" * (fmt.amax_scope == "row"), "_FAST" * (spec.error_math == "fp16")
        return f"FOUR_OVER_SIX{row}{tiles}_{spec.select.upper()}_{fmt.e4m3_max}{fast}"
    scope = {"tensor": "NVFP4", "row": "ROW_SCALED", "window64": "WINDOW64"}[fmt.amax_scope]
    search = "_SEARCH" * (spec.select == "search")
    return f"{scope}{tiles}{search}{'_RHT' * fmt.rht}{stochastic}{'_UNBIASED' * spec.scale_headroom}"
