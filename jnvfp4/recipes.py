"""The named recipes: what is known to train or to serve well, as ``Recipe`` values."""

from dataclasses import replace
from typing import Literal, get_args

from .recipe import Recipe
from .spec import NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_RHT_SR, NVFP4_SR, ROW_SCALED, WINDOW64, QuantSpec
from .spec import four_over_six as _four_over_six_spec

Backward = Literal["nvfp4", "high_precision", "dequantized"]
Scope = Literal["weights", "activations", "all"]


def _check(function: str, name: str, value: object, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{function}: {name} must be one of {choices}, got {value!r}")


def _check_switches(function: str, **switches: object) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{function}: {name} must be True or False, got {value!r}")


def _gradient_switches(function: str, backward: Backward, **switches: bool | None) -> list[bool]:
    """What concerns quantized gradients: True where None, refused where no gradient is quantized."""
    _check(function, "backward", backward, get_args(Backward))
    for name, value in switches.items():
        if value is not None and backward != "nvfp4":
            raise ValueError(
                f'{function}: {name} must be left out for backward="{backward}", which quantizes no gradient, '
                f"got {value!r}"
            )
    chosen = {name: True if value is None else value for name, value in switches.items()}
    _check_switches(function, **chosen)
    return list(chosen.values())


def _with_backward(recipe: Recipe, backward: Backward) -> Recipe:
    """``recipe``, or its forward half with both gradients from original or dequantized operands."""
    if backward == "nvfp4":
        return recipe
    how: Literal["dequantized"] | None = "dequantized" if backward == "dequantized" else None
    return replace(recipe, dgrad=how, wgrad=how)


def _gradient(stochastic_rounding: bool, rht: bool = False) -> QuantSpec:
    if rht:
        return NVFP4_RHT_SR if stochastic_rounding else NVFP4_RHT
    return NVFP4_SR if stochastic_rounding else NVFP4


def pretrain(
    *,
    backward: Backward = "nvfp4",
    rht: bool | None = None,
    stochastic_rounding: bool | None = None,
    weight_tiles: bool = True,
) -> Recipe:
    """The pretraining recipe: x 1x16, w 16x16 tiles, stochastic rounding on dy, rotated wgrad operands.

    Args:
      backward: "nvfp4", or both gradients in high precision, from the original operands ("high_precision") or
        from the dequantized ones of the forward pass ("dequantized").
      rht: rotate the operands of wgrad; True if None. Only for ``backward="nvfp4"``.
      stochastic_rounding: of dy, True if None; ``linear`` then needs a key. Only for ``backward="nvfp4"``.
      weight_tiles: w in 16x16 tiles, so that its transpose has the same values; otherwise 1x16.

    Source: arXiv:2509.25149; the default of NVIDIA TransformerEngine at d0067d0da.
    """
    rotate, stochastic = _gradient_switches("pretrain", backward, rht=rht, stochastic_rounding=stochastic_rounding)
    _check_switches("pretrain", weight_tiles=weight_tiles)
    w, dy = NVFP4_2D if weight_tiles else NVFP4, _gradient(stochastic)
    wgrad = (_gradient(stochastic, rotate), NVFP4_RHT if rotate else NVFP4)
    return _with_backward(Recipe((NVFP4, w), (dy, w), wgrad), backward)


def row_scaled(*, backward: Backward = "nvfp4", stochastic_rounding: bool | None = None) -> Recipe:
    """x with one amax per row (per column for wgrad); w in tiles and dy with one amax per tensor."""
    (stochastic,) = _gradient_switches("row_scaled", backward, stochastic_rounding=stochastic_rounding)
    dy = _gradient(stochastic)
    recipe = Recipe((ROW_SCALED, NVFP4_2D), (dy, NVFP4_2D), (dy, ROW_SCALED))
    return _with_backward(recipe, backward)


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
    """``pretrain`` with 4over6 block scales for w, for x or for both; never for gradients.

    Args:
      scope: "weights", "activations" or "all".
      error: as in ``jnvfp4.four_over_six``.
      e4m3_max: as in ``jnvfp4.four_over_six``.
      fast: as in ``jnvfp4.four_over_six``.
      backward: as in ``pretrain``.
      stochastic_rounding: as in ``pretrain``.
      rht: rotate the operands of wgrad. 4over6 activations cannot be rotated: the default is True for scope
        "weights" and False otherwise.
    """
    _check("four_over_six", "scope", scope, get_args(Scope))
    on_x, on_w = scope != "weights", scope != "activations"
    rotate, stochastic = _gradient_switches("four_over_six", backward, rht=rht, stochastic_rounding=stochastic_rounding)
    _check_switches("four_over_six", fast=fast)
    if rht and on_x:
        raise ValueError(
            f'four_over_six: rht must be False for scope="{scope}", since wgrad reads 4over6 activations, got {rht!r}'
        )
    one, tile = (_four_over_six_spec(error, e4m3_max=e4m3_max, fast=fast, block_rows=rows) for rows in (1, 16))
    base = pretrain(rht=rotate and not on_x, stochastic_rounding=stochastic)
    assert isinstance(base.dgrad, tuple)
    assert isinstance(base.wgrad, tuple)
    x, w = one if on_x else NVFP4, tile if on_w else NVFP4_2D
    wgrad = (base.wgrad[0], one if on_x else base.wgrad[1])
    return _with_backward(Recipe((x, w), (base.dgrad[0], w), wgrad), backward)


def window64(*, backward: Backward = "nvfp4", stochastic_rounding: bool | None = None) -> Recipe:
    """x with one amax per 64 elements, in fprop and wgrad; w in tiles and dy with one amax per tensor.

    K must be a multiple of 64; tokens are padded to one.
    """
    (stochastic,) = _gradient_switches("window64", backward, stochastic_rounding=stochastic_rounding)
    dy = _gradient(stochastic)
    recipe = Recipe((WINDOW64, NVFP4_2D), (dy, NVFP4_2D), (dy, WINDOW64))
    return _with_backward(recipe, backward)


def inference(*, weight_only: bool = False) -> Recipe:
    """x and w 1x16, or only w with x in 16 bits (``weight_only``). Gradients, if taken, are in high precision."""
    _check_switches("inference", weight_only=weight_only)
    return Recipe((None if weight_only else NVFP4, NVFP4), None, None)
