"""What a quantized tensor is (``Format``) and how it is made (``QuantSpec``)."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

AmaxScope = Literal["tensor", "row", "window64"]
BLOCK = 16  # elements that share one E4M3 scale


def _check_choice(owner: str, field: str, value: object, choices: tuple) -> None:
    if not any(value is c or (value == c and type(value) is type(c)) for c in choices):
        raise ValueError(f"{owner}: {field} must be one of {choices}, got {value!r}")


@dataclass(frozen=True)
class Format:
    """What a consumer of an NVFP4 tensor must know.

    Attributes:
      amax_scope: which elements share one float32 amax: the whole tensor, a row, or 64 along a row.
      e4m3_max: the largest block scale the encoder aimed at; 448 except for some 4over6 tensors.
      rht: whether the values were rotated by the 16-point random Hadamard transform.
    """

    amax_scope: AmaxScope = "tensor"
    e4m3_max: Literal[448, 256] = 448
    rht: bool = False

    def __post_init__(self) -> None:
        _check_choice("Format", "amax_scope", self.amax_scope, ("tensor", "row", "window64"))
        _check_choice("Format", "e4m3_max", self.e4m3_max, (448, 256))
        _check_choice("Format", "rht", self.rht, (False, True))
        if self.amax_scope == "window64" and (self.rht or self.e4m3_max == 256):
            raise ValueError(f"Format: window64 goes with neither rht nor e4m3_max=256, got {self!r}")


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor is quantized: a static, hashable argument of ``quantize``.

    Attributes:
      format: what the result is.
      block_rows: rows that share a block scale: 1 (1x16 blocks) or 16 (16x16 tiles, for weights).
      select: the block scale: "max6" maps the block's amax to 6; "mae" and "mse" try 4 and 6 (4over6).
      error_math: for 4over6, where the candidate errors are computed.
      rounding: of the E2M1 values: "nearest" even or "stochastic".

    A combination that means nothing raises ValueError here; one that is well defined but not implemented
    yet raises NotImplementedError when used (see ``jnvfp4.supports``).
    """

    format: Format = Format()
    block_rows: Literal[1, 16] = 1
    select: Literal["max6", "mae", "mse"] = "max6"
    error_math: Literal["fp32", "fp16"] = "fp32"
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise ValueError(f"QuantSpec: format must be a Format, got {self.format!r}")
        _check_choice("QuantSpec", "block_rows", self.block_rows, (1, 16))
        _check_choice("QuantSpec", "select", self.select, ("max6", "mae", "mse"))
        _check_choice("QuantSpec", "error_math", self.error_math, ("fp32", "fp16"))
        _check_choice("QuantSpec", "rounding", self.rounding, ("nearest", "stochastic"))
        if reason := self._contradiction():
            raise ValueError(f"QuantSpec: {reason}, got {self!r}")

    def _contradiction(self) -> str | None:
        fmt, stochastic = self.format, self.rounding == "stochastic"
        if self.select == "max6":
            if fmt.e4m3_max == 256:
                return 'e4m3_max=256 needs select="mae" or "mse"'
            if self.error_math == "fp16":
                return 'error_math="fp16" needs select="mae" or "mse"'
        elif stochastic:
            return f'rounding="stochastic" needs select="max6", not "{self.select}"'
        elif fmt.rht:
            return f'rht=True needs select="max6", not "{self.select}"'
        if fmt.amax_scope != "tensor" and self.block_rows == 16:
            return f'block_rows=16 needs amax_scope="tensor", not "{fmt.amax_scope}"'
        if fmt.amax_scope == "window64" and (self.select != "max6" or stochastic):
            return 'amax_scope="window64" needs select="max6" and rounding="nearest"'
        return None

    def ffi_attrs(self) -> dict[str, Any]:
        """The attributes of the FFI call, as ``SpecAttr`` in ffi/check.h reads them."""
        return {
            "amax_scope": self.format.amax_scope,
            "e4m3_max": np.int32(self.format.e4m3_max),
            "rht": self.format.rht,
            "block_rows": np.int32(self.block_rows),
            "select": self.select,
            "error_math": self.error_math,
            "rounding": self.rounding,
        }


NVFP4 = QuantSpec()
NVFP4_2D = QuantSpec(block_rows=16)
ROW_SCALED = QuantSpec(Format(amax_scope="row"))

# The specs that `quantize` implements: ffi/spec.h's list in Python words.
SUPPORTED_SPECS = (NVFP4, NVFP4_2D, ROW_SCALED)


def unsupported_reason(spec: QuantSpec) -> str | None:
    """Which field of ``spec`` has no implementation in this version, or None."""
    if spec in SUPPORTED_SPECS:
        return None
    for field, value, default in (
        ("format.amax_scope", spec.format.amax_scope, ("tensor", "row")),
        ("format.rht", spec.format.rht, (False,)),
        ("select", spec.select, ("max6",)),
        ("rounding", spec.rounding, ("nearest",)),
    ):
        if value not in default:
            return f"{field}={value!r} is not implemented in this version; accepted: {default}"
    return f"{spec!r} is not implemented in this version"
