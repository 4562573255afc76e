"""Which spec each GEMM operand of a linear layer uses."""

from dataclasses import dataclass
from typing import Literal

from .spec import NVFP4, NVFP4_2D, QuantSpec

Pair = tuple[QuantSpec, QuantSpec]


def _check_pair(field: str, pair: object, first: str, second: str, first_optional: bool) -> None:
    ok = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], QuantSpec)
    if ok and isinstance(pair, tuple):
        ok = isinstance(pair[0], QuantSpec) or (first_optional and pair[0] is None)
    if not ok:
        none = " or None" if first_optional else ""
        raise ValueError(f"Recipe: {field} must be a pair ({first} spec{none}, {second} spec), got {pair!r}")


def _check_operands(field: str, pair: tuple[QuantSpec | None, QuantSpec]) -> None:
    """What a GEMM cannot take: one rotated operand, or windows beside an operand that is not quantized."""
    if pair[0] is None and pair[1].format.amax_scope == "window64":
        raise ValueError(f'Recipe: {field} weight-only needs a w spec with amax_scope "tensor" or "row", got {pair!r}')
    rotated = [spec is not None and spec.format.rht for spec in pair]
    if rotated[0] != rotated[1]:
        raise ValueError(f"Recipe: {field} operands must both be rotated (format.rht) or neither, got {pair!r}")


@dataclass(frozen=True)
class Recipe:
    """The quantization of the three GEMMs of ``y = x w^T``: a static, hashable argument of ``linear``.

    Attributes:
      fprop: (x spec, w spec); x spec None is weight-only, with x in bfloat16 or float16.
      dgrad: (dy spec, w spec), the w spec applied to w transposed; None computes dx in high precision from
        the original w; "dequantized" in high precision from the w of fprop, dequantized.
      wgrad: (dy spec, x spec), both applied to the transposed arrays; None and "dequantized" likewise with x.
    """

    fprop: tuple[QuantSpec | None, QuantSpec] = (NVFP4, NVFP4_2D)
    dgrad: Pair | Literal["dequantized"] | None = (NVFP4, NVFP4_2D)
    wgrad: Pair | Literal["dequantized"] | None = (NVFP4, NVFP4)

    def __post_init__(self) -> None:
        _check_pair("fprop", self.fprop, "x", "w", first_optional=True)
        _check_operands("fprop", self.fprop)
        for field, pair, second in (("dgrad", self.dgrad, "w"), ("wgrad", self.wgrad, "x")):
            if pair is None or pair == "dequantized":
                continue
            if isinstance(pair, str):
                raise ValueError(f'Recipe: {field} must be a pair of specs, None or "dequantized", got {pair!r}')
            _check_pair(field, pair, "dy", second, first_optional=False)
            _check_operands(field, pair)

    @property
    def stochastic(self) -> bool:
        """Whether any spec rounds stochastically, so that a key is needed."""
        pairs = [p for p in (self.fprop, self.dgrad, self.wgrad) if isinstance(p, tuple)]
        return any(s is not None and s.rounding == "stochastic" for pair in pairs for s in pair)


DEFAULT = Recipe()
