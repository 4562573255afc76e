"""``Recipe``, which says how each GEMM of a linear layer quantizes its operands, and the named recipes."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from .spec import (
    BLOCK,
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    ROW_SCALED,
    WINDOW64,
    Format,
    QuantSpec,
    check_choice,
    check_switch,
    name_of,
)
from .spec import four_over_six as _four_over_six_spec

__all__ = [
    "DEFAULT",
    "Dgrad",
    "Fprop",
    "Recipe",
    "Wgrad",
    "four_over_six",
    "inference",
    "pretrain",
    "pretrain_4over6",
    "rl",
    "row_scaled",
    "window64",
]

Backward = Literal["nvfp4", "high_precision", "dequantized"]
Scope = Literal["weights", "activations", "all"]


class Fprop(NamedTuple):
    """Holds the specs of the forward GEMM, y = x w^T. ``x`` is None if only the weights are quantized."""

    x: QuantSpec | None
    w: QuantSpec


class Dgrad(NamedTuple):
    """Holds the specs of dx = dy w: of dy, and of w transposed."""

    dy: QuantSpec
    w: QuantSpec


class Wgrad(NamedTuple):
    """Holds the specs of dw = dy^T x: of dy transposed, and of x transposed."""

    dy: QuantSpec
    x: QuantSpec


Specs = tuple[QuantSpec, QuantSpec]
Gradient = Specs | Literal["dequantized"] | None


@dataclass(frozen=True, init=False)
class Recipe:
    """Says how the three GEMMs of a linear layer quantize their operands: y = x w^T, dx = dy w and dw = dy^T x.

    It is static and hashable, so that it can be a static argument of ``jax.jit``. Each GEMM takes a plain pair of
    specs, which becomes a ``Fprop``, ``Dgrad`` or ``Wgrad``. ``Recipe()`` quantizes all three GEMMs without rotation or
    stochastic rounding; ``linear`` without a recipe uses ``recipes.DEFAULT``, which is another one.

    Attributes:
      fprop: the pair (spec of x, spec of w). With None for x only the weights are quantized, and x must be bfloat16 or
        float16. Or None, to compute y in high precision from the original x and w, while gradients may be quantized.
      dgrad: the pair (spec of dy, spec of w transposed); or None, to compute dx in high precision from the original w;
        or "dequantized", to compute it in high precision from the quantized w of fprop, which fprop=None has not.
      wgrad: the pair (spec of dy transposed, spec of x transposed); None and "dequantized" mean the same with x.
      requantize: whether the pairs of dgrad and wgrad quantize what fprop multiplied, the dequantized x and w in their
        dtypes, instead of x and w: gradients of what was computed. What fprop does not quantize it multiplies as it is.

    Raises:
      ValueError: a GEMM has neither a pair of specs nor one of the values above, only one of its operands is rotated,
        or requantize is neither True nor False.
    """

    fprop: Fprop | None
    dgrad: Dgrad | Literal["dequantized"] | None
    wgrad: Wgrad | Literal["dequantized"] | None
    requantize: bool

    def __init__(
        self,
        fprop: tuple[QuantSpec | None, QuantSpec] | None = (NVFP4, NVFP4_2D),
        dgrad: Gradient = (NVFP4, NVFP4_2D),
        wgrad: Gradient = (NVFP4, NVFP4),
        requantize: bool = False,
    ) -> None:
        for field, value in (
            ("fprop", _specs(Fprop, fprop)),
            ("dgrad", _specs(Dgrad, dgrad)),
            ("wgrad", _specs(Wgrad, wgrad)),
        ):
            object.__setattr__(self, field, value)
            if fprop is None and value == "dequantized":
                raise ValueError(f'Recipe: {field} must not be "dequantized" for fprop=None, which quantizes nothing')
        check_switch("Recipe", "requantize", requantize)
        object.__setattr__(self, "requantize", requantize)

    @property
    def dgrad_specs(self) -> Dgrad | None:
        """Returns the specs of dgrad; None if it runs in high precision."""
        return self.dgrad if isinstance(self.dgrad, Dgrad) else None

    @property
    def wgrad_specs(self) -> Wgrad | None:
        """Returns the specs of wgrad; None if it runs in high precision."""
        return self.wgrad if isinstance(self.wgrad, Wgrad) else None

    @property
    def stochastic(self) -> bool:
        """Says whether any spec rounds stochastically, so that training needs a key."""
        return _draws(self.fprop, self.dgrad_specs, self.wgrad_specs)

    @property
    def stochastic_forward(self) -> bool:
        """Says whether the forward GEMM rounds stochastically, so that a call without gradients needs a key too."""
        return _draws(self.fprop)

    @property
    def weight_specs(self) -> tuple[QuantSpec | None, QuantSpec | None]:
        """Returns the specs of w in fprop and of w transposed in dgrad; None where a GEMM does not quantize it."""
        fprop, dgrad = self.fprop, self.dgrad_specs
        return fprop and fprop.w, dgrad and dgrad.w

    @property
    def takes_weight_amax(self) -> bool:
        """Says whether any spec reads the amax of the whole, unrotated w, which ``linear`` takes as ``w_amax``."""
        fprop, dgrad = self.weight_specs
        return any(spec is not None and spec.plain_amax for spec in (fprop, None if self.requantizes_w else dgrad))

    @property
    def requantizes_w(self) -> bool:
        """Says whether dgrad quantizes the dequantized w of fprop: not where it can read that transposed, as it is."""
        return self.requantize and None not in self.weight_specs and not self.one_weight

    @property
    def one_weight(self) -> bool:
        """Says whether dgrad can read the w that fprop read, transposed, with the bytes that the quantizer would give.

        So it is for nearest values in 16x16 tiles by one spec; 4over6 may choose another scale for a transposed tile.
        """
        fprop, dgrad = self.fprop, self.dgrad_specs
        if fprop is None or dgrad is None or fprop.w != dgrad.w:
            return False
        return (fprop.w.block_rows, fprop.w.select) == (BLOCK, "max6")

    @property
    def units(self) -> tuple[int, int]:
        """Returns the numbers that N and K must be multiples of."""
        dgrad, wgrad = self.dgrad_specs, self.wgrad_specs
        of_k = _unit(self.fprop, dgrad and dgrad.w, wgrad and wgrad.x)
        return max(unit for _, unit in self.needs_of_n), of_k

    def units_of(self, pad: bool) -> tuple[int, int]:
        """Returns what N and K are padded to multiples of: what the recipe needs, or with ``pad`` at least 16."""
        unit_n, unit_k = (max(unit, BLOCK if pad else 1) for unit in self.units)
        return unit_n, unit_k

    @property
    def needs_of_n(self) -> list[tuple[str, int]]:
        """Lists why N must be a multiple of a number, and of which."""
        needs = [("recipe.dgrad contracts over it", _unit(self.dgrad_specs))]
        if self.fprop is not None and self.fprop.w.block_rows == BLOCK:
            needs.append(("recipe.fprop quantizes w in 16x16 tiles", BLOCK))
        if self.wgrad_specs and self.wgrad_specs.dy.block_rows == BLOCK:
            needs.append(("recipe.wgrad quantizes dy in 16x16 tiles", BLOCK))
        return needs

    @property
    def unit_of_wgrad(self) -> int:
        """Returns the number of tokens that a block of wgrad's operands has, to which zeros fill the last one."""
        return _unit(self.wgrad_specs)

    @property
    def unit_of_tokens(self) -> int:
        """Returns the number of tokens that a block of any operand has."""
        fprop, dgrad = self.fprop, self.dgrad_specs
        return _unit(self.wgrad_specs, fprop and fprop.x, dgrad and dgrad.dy)

    @property
    def weight_blocks(self) -> tuple[int, int]:
        """Returns how many elements a block of w has along N and K, at most."""
        fprop, dgrad = self.fprop, self.dgrad_specs
        along_k = (fprop.w.block_rows, fprop.w.unit) if fprop else (1, 1)
        along_n = (dgrad.w.unit, dgrad.w.block_rows) if dgrad else (1, 1)
        return max(along_k[0], along_n[0]), max(along_k[1], along_n[1])

    @property
    def name(self) -> str:
        """Returns the call of ``jnvfp4.recipes`` that makes this recipe, or else the specs of its GEMMs."""
        made = _named().get(self)
        again = ", requantize=True" if self.requantize else ""
        return made or f"Recipe({', '.join(map(_pair_name, (self.fprop, self.dgrad, self.wgrad)))}{again})"


def _draws(*pairs: tuple[QuantSpec | None, QuantSpec] | None) -> bool:
    return any(spec is not None and spec.rounding == "stochastic" for pair in pairs for spec in pair or ())


def _unit(contracted: tuple[QuantSpec | None, QuantSpec] | None, *tiled: QuantSpec | None) -> int:
    """Returns what an axis must be a multiple of: GEMM operands contract over it, others have tiles along it."""
    units = [spec.unit for spec in contracted or () if spec is not None]
    return max([1, *units, *(spec.block_rows for spec in tiled if spec is not None)])


def _makers() -> dict[str, Callable[..., Recipe]]:
    """Returns the functions of this module that make recipes, by name."""
    return {name: globals()[name] for name in __all__ if inspect.isfunction(globals()[name])}


def to_recipe(value: object) -> str:
    """Returns the end of an error for a spec, or for a function that makes recipes and was not called, or its name."""
    for name, make in _makers().items():
        if value is make or (isinstance(value, str) and value == name):
            return f"; {'call it:' if value is make else 'pass'} jnvfp4.recipes.{name}()"
    return "; make one: jnvfp4.Recipe(fprop=(x spec, w spec), ...)" if isinstance(value, QuantSpec) else ""


@functools.cache
def _named() -> dict[Recipe, str]:
    """Returns the names of the recipes that the functions of this module make, which are all different."""
    names = {make(): f"{name}()" for name, make in _makers().items()}
    weight_only, requantized = inference(weight_only=True), pretrain_4over6(requantize=True)
    more = {weight_only: "inference(weight_only=True)", requantized: "pretrain_4over6(requantize=True)"}
    return names | more | {DEFAULT: "DEFAULT", Recipe(): "Recipe()"}


def _pair_name(pair: tuple[QuantSpec | None, QuantSpec] | Literal["dequantized"] | None) -> str:
    if not isinstance(pair, tuple):
        return str(pair)
    return " x ".join("16-bit" if spec is None else name_of(spec) for spec in pair)


def _specs(kind: type[Fprop] | type[Dgrad] | type[Wgrad], value: object) -> object:
    """Checks the specs of a GEMM, or what stands for them."""
    field, forward = kind.__name__.lower(), kind is Fprop
    if value is None or (value == "dequantized" and not forward):
        return value
    types = QuantSpec | None if forward else QuantSpec, QuantSpec
    if not (isinstance(value, tuple) and len(value) == 2 and all(map(isinstance, value, types))):
        pair = "(x spec or None, w spec)" if forward else f"({', '.join(f'{name} spec' for name in kind._fields)})"
        other = "" if forward else ', "dequantized"'
        raise ValueError(f"Recipe: {field} must be a pair {pair}{other} or None, got {value!r}")
    first, second = value
    if first is None and second.format.amax_scope == "window64":
        raise ValueError(f'Recipe: fprop weight-only needs a w spec with amax_scope "tensor" or "row", got {value!r}')
    if (first is not None and first.format.rht) != second.format.rht:
        raise ValueError(f"Recipe: {field} operands must both be rotated (format.rht) or neither, got {value!r}")
    return kind(*value)


def _gradient_switches(function: str, backward: Backward, **switches: bool | None) -> list[bool]:
    """Checks the switches of quantized gradients: None means True; others are refused where none is quantized."""
    check_choice(function, "backward", backward, get_args(Backward))
    for name, value in switches.items():
        if value is not None and backward != "nvfp4":
            raise ValueError(
                f'{function}: {name} must be left out for backward="{backward}", which quantizes no gradient, '
                f"got {value!r}"
            )
    chosen = {name: True if value is None else value for name, value in switches.items()}
    for name, value in chosen.items():
        check_switch(function, name, value)
    return list(chosen.values())


def _trained(
    x: QuantSpec, w: QuantSpec, backward: Backward, stochastic: bool, rht: bool = False, unbiased: bool = False
) -> Recipe:
    """Makes a recipe whose gradients quantize x and w by the specs of fprop, with wgrad rotated if ``rht``."""
    if backward != "nvfp4":
        how: Literal["dequantized"] | None = "dequantized" if backward == "dequantized" else None
        return Recipe(Fprop(x, w), how, how)
    rounding: Literal["stochastic", "nearest"] = "stochastic" if stochastic else "nearest"
    dy, rotated = (QuantSpec(Format(rht=r), rounding=rounding, scale_headroom=unbiased) for r in (False, rht))
    return Recipe(Fprop(x, w), Dgrad(dy, w), Wgrad(rotated, NVFP4_RHT if rht else x))


def pretrain(
    *,
    backward: Backward = "nvfp4",
    rht: bool | None = None,
    stochastic_rounding: bool | None = None,
    weight_tiles: bool = True,
    unbiased: bool = False,
) -> Recipe:
    """Makes the recipe for pretraining.

    x has blocks of 1x16 and w tiles of 16x16; dy is rounded stochastically; the operands of wgrad are rotated by the
    random Hadamard transform.

    Args:
      backward: "nvfp4" quantizes both gradient GEMMs. "high_precision" computes both in high precision from the
        original operands, "dequantized" from the quantized operands of the forward pass.
      rht: rotate the operands of wgrad; None means True. Only for ``backward="nvfp4"``.
      stochastic_rounding: round dy stochastically, for which ``linear`` needs a key; None means True. Only for
        ``backward="nvfp4"``.
      weight_tiles: quantize w in 16x16 tiles, so that its transpose has the same values. False takes 1x16 blocks.
      unbiased: give the block scales of dy headroom (``QuantSpec.scale_headroom``), so that stochastic rounding clips
        no value. Without it about half of the blocks clip their largest one. Needs stochastic rounding.

    Raises:
      ValueError: an argument has another value than these, or contradicts ``backward`` or ``stochastic_rounding``.

    Source: arXiv:2509.25149; the default of NVIDIA TransformerEngine at d0067d0da.
    """
    rotate, stochastic = _gradient_switches("pretrain", backward, rht=rht, stochastic_rounding=stochastic_rounding)
    check_switch("pretrain", "weight_tiles", weight_tiles)
    check_switch("pretrain", "unbiased", unbiased)
    if unbiased and (backward != "nvfp4" or not stochastic):
        cause = "stochastic_rounding=False" if backward == "nvfp4" else f'backward="{backward}"'
        raise ValueError(f"pretrain: unbiased must be False for {cause}, which rounds nothing stochastically, got True")
    return _trained(NVFP4, NVFP4_2D if weight_tiles else NVFP4, backward, stochastic, rotate, unbiased)


def row_scaled(*, backward: Backward = "nvfp4", stochastic_rounding: bool | None = None) -> Recipe:
    """Makes a recipe for x whose rows (tokens) differ in magnitude by orders.

    x has one amax per row (for wgrad, per column). w has 16x16 tiles and one amax, and so has dy, without tiles.
    ``backward`` and ``stochastic_rounding`` are those of ``pretrain``.
    """
    (stochastic,) = _gradient_switches("row_scaled", backward, stochastic_rounding=stochastic_rounding)
    return _trained(ROW_SCALED, NVFP4_2D, backward, stochastic)


def four_over_six(
    scope: Scope = "weights",
    error: Literal["mae", "mse"] = "mae",
    *,
    e4m3_max: Literal[448, 256] = 256,
    fast: bool = False,
    backward: Backward = "nvfp4",
    rht: bool | None = None,
    stochastic_rounding: bool | None = None,
) -> Recipe:
    """Makes ``pretrain`` with 4over6 block scales (``jnvfp4.spec.four_over_six``) for w, for x or for both.

    Gradients never have them.

    Args:
      scope: what has them: "weights", "activations" or "all".
      error: as in ``jnvfp4.spec.four_over_six``.
      e4m3_max: as in ``jnvfp4.spec.four_over_six``.
      fast: as in ``jnvfp4.spec.four_over_six``.
      backward: as in ``pretrain``.
      stochastic_rounding: as in ``pretrain``.
      rht: rotate the operands of wgrad. None means True for scope "weights" and False otherwise, because 4over6
        activations cannot be rotated.
    """
    check_choice("four_over_six", "scope", scope, get_args(Scope))
    on_x, on_w = scope != "weights", scope != "activations"
    rotate, stochastic = _gradient_switches("four_over_six", backward, rht=rht, stochastic_rounding=stochastic_rounding)
    check_switch("four_over_six", "fast", fast)
    if rht and on_x:
        raise ValueError(
            f'four_over_six: rht must be False for scope="{scope}", since wgrad reads 4over6 activations, got {rht!r}'
        )
    one, tile = (_four_over_six_spec(error, e4m3_max=e4m3_max, fast=fast, block_rows=rows) for rows in (1, 16))
    x, w = one if on_x else NVFP4, tile if on_w else NVFP4_2D
    return _trained(x, w, backward, stochastic, rotate and not on_x)


def window64(*, backward: Backward = "nvfp4", stochastic_rounding: bool | None = None) -> Recipe:
    """Makes a recipe for x that differs in magnitude by orders along its rows, too.

    x has one amax for every 64 elements. w has 16x16 tiles and one amax, and so has dy, without tiles. K must be a
    multiple of 64; for wgrad ``linear`` pads the number of tokens to one. ``backward`` and ``stochastic_rounding`` are
    those of ``pretrain``.
    """
    (stochastic,) = _gradient_switches("window64", backward, stochastic_rounding=stochastic_rounding)
    return _trained(WINDOW64, NVFP4_2D, backward, stochastic)


def pretrain_4over6(*, stochastic_rounding: bool = True, requantize: bool = False) -> Recipe:
    """Makes ``pretrain`` with a forward pass of lower error: x and w have 1x16 blocks with 4over6 scales.

    The gradients are those of ``pretrain``: w in 16x16 tiles, dy rounded stochastically, the operands of wgrad rotated.
    So w has other values in the backward pass than in the forward pass, and is quantized twice.

    Args:
      stochastic_rounding: as in ``pretrain``.
      requantize: quantize what the forward pass multiplied for the gradients, instead of x and w
        (``Recipe.requantize``). Losses and times are in docs/results.md.

    Source: the ablations of Quartet II (IST-DASLab), where the forward pass causes most of the loss, 4over6 lessens it
    and 16x16 tiles add to it.
    """
    check_switch("pretrain_4over6", "stochastic_rounding", stochastic_rounding)
    check_switch("pretrain_4over6", "requantize", requantize)
    spec, gradients = _four_over_six_spec(), pretrain(stochastic_rounding=stochastic_rounding)
    return replace(gradients, fprop=Fprop(spec, spec), requantize=requantize)


def rl(*, backward: Literal["dequantized", "high_precision"] = "dequantized", four_over_six: bool = False) -> Recipe:
    """Makes the recipe for reinforcement learning: training computes y with the bits of a rollout in NVFP4.

    x has one amax for each row (token), so that a token has the same codes in every batch, and the same y with
    ``accumulation="pinned"``; w has 1x16 blocks and one amax, as in a checkpoint for inference. Nothing is rotated or
    rounded stochastically.

    Args:
      backward: "dequantized" or "high_precision", as in ``pretrain``.
      four_over_six: give x and w 4over6 block scales.

    Source: the NVFP4 recipes of the RL trainers miles, SkyRL, verl and NeMo-RL.
    """
    check_choice("rl", "backward", backward, ("dequantized", "high_precision"))
    check_switch("rl", "four_over_six", four_over_six)
    x, w = (_four_over_six_spec(amax_scope="row"), _four_over_six_spec()) if four_over_six else (ROW_SCALED, NVFP4)
    return _trained(x, w, backward, stochastic=False)


def inference(*, weight_only: bool = False, four_over_six: bool = False) -> Recipe:
    """Makes the recipe for inference, and for training towards it: x and w have 1x16 blocks.

    Gradients, if taken, are computed in high precision.

    Args:
      weight_only: quantize only w, and leave x in bfloat16 or float16.
      four_over_six: give x and w 4over6 block scales of least squared error, up to 448, and x an amax per token. Such
        are the weights of ``jnvfp4 convert --recipe 4over6``. Errors are lower; engines that store a scale of x cannot
        do it.
    """
    check_switch("inference", "weight_only", weight_only)
    check_switch("inference", "four_over_six", four_over_six)
    x, w = NVFP4, NVFP4
    if four_over_six:
        x, w = (_four_over_six_spec("mse", e4m3_max=448, amax_scope=scope) for scope in ("row", "tensor"))
    return Recipe(Fprop(None if weight_only else x, w), None, None)


DEFAULT = pretrain(stochastic_rounding=False)
"""The recipe of ``linear`` and other layers if none is given: ``pretrain`` without stochastic rounding, so no keys."""
