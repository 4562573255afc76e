"""The weights of a layer: trained or frozen, their axis order, and their shardings at rest and as GEMMs read them."""

from dataclasses import replace
from typing import Literal, NamedTuple

import jax

from .._core.tensor import NVFP4Tensor
from .._ops.arguments import Implementation, as_float_array
from .._ops.quantize import transpose
from .._primitives._checks import check_parts
from ..recipes import Recipe
from ..spec import Format
from .gather import Gather, Placement, as_gather
from .quantizer import Operand, T, pack

WeightAxes = Literal["nk", "kn"]
_FITTING = {Format("row"): ": Recipe(fprop=(None, ROW_SCALED))", Format(e4m3_max=256): ": recipes.four_over_six()"}


class Weights(NamedTuple):
    """Says what w is; the array itself is passed beside it, since it is traced."""

    order: WeightAxes = "nk"  # for w [..., N, K]; "kn" for [..., K, N]
    frozen: bool = False  # w is an NVFP4Tensor [..., N, K] (its scales as bytes), which has no gradient
    gather: Gather | None = None  # where w [..., N, K] is kept and where GEMMs read it; None if it is not gathered
    one: bool = False  # dgrad reads the tensor that fprop read, transposed: w is quantized and gathered once

    @property
    def k_axis(self) -> int:
        """Returns the axis of w, from the end, that fprop contracts."""
        return -1 if self.order == "nk" else -2

    def ordered(self, first: T, second: T) -> tuple[T, T]:
        """Returns a pair for w [..., N, K] in the order of the axes that w has; it is its own inverse."""
        return (first, second) if self.order == "nk" else (second, first)

    def for_fprop(self, w: NVFP4Tensor) -> NVFP4Tensor:
        """Moves w, quantized along K, to where GEMMs read it."""
        return w if self.gather is None else self.gather.gather(w)

    def for_dgrad(self, w: NVFP4Tensor, recipe: Recipe, implementation: Implementation) -> NVFP4Tensor:
        """Returns w [..., K, N], quantized along N, of what was saved for it."""
        if self.one:
            assert recipe.fprop is not None
            return transpose(w, recipe.fprop.w, implementation=implementation)
        return w if self.gather is None else self.gather.reversed.gather(w)

    def in_high_precision(self, w: jax.Array) -> jax.Array:
        """Moves the original w to where fprop reads it."""
        if self.gather is None:
            return w
        return (self.gather if self.order == "nk" else self.gather.reversed).read(w)


def weights_and_recipe(op: str, recipe: Recipe, w: object, order: WeightAxes) -> tuple[Operand, Recipe]:
    """Checks w, and returns it with its recipe, by which weights that are quantized already have no gradient."""
    if not isinstance(w, NVFP4Tensor):
        return as_float_array(op, "w", w), recipe
    if recipe.fprop is None:
        raise ValueError(
            f"{op}: recipe.fprop must be a pair for an NVFP4Tensor w, got None; jnvfp4.dequantize gives its values"
        )
    x_spec, w_spec = recipe.fprop
    if order != "nk":
        raise ValueError(
            f"{op}: w_axes must be 'nk' for an NVFP4Tensor w, whose blocks run along its last axis, K, got "
            f"{order!r}; {made_of(w)}"
        )
    if w.format != w_spec.format:
        raise ValueError(
            f"{op}: w must have the format of recipe.fprop.w, {w_spec.format.name}, got {w.format.name}; choose a "
            f"recipe whose spec of w has that format{_FITTING.get(w.format, '')}"
        )
    check_parts(op, "w", (w.data, w.scale, w.amax), w.format)
    # How w was quantized does not matter any more: neither its blocks nor its rounding.
    return w, Recipe((x_spec, replace(w_spec, block_rows=1, rounding="nearest")), "dequantized", None)


def placed(
    op: str, recipe: Recipe, weights: Weights, w: Operand, w_gather: tuple[Placement, Placement] | None
) -> tuple[Weights, Operand]:
    """Places w as each device keeps it: outside the custom derivative, so that the gradient of w has this place too."""
    weights, matrices = weights._replace(frozen=isinstance(w, NVFP4Tensor)), (1,) * (w.ndim - 2)
    if isinstance(w, NVFP4Tensor):
        if w_gather is not None:
            units = (*matrices, 1, w.format.unit)
            weights = weights._replace(gather=as_gather(op, "w_gather", w_gather, w.data, w.shape, units))
        return weights, pack(w)
    if w_gather is None:
        return weights, w
    units = (*matrices, *weights.ordered(*recipe.weight_blocks))
    gather = as_gather(op, "w_gather", w_gather, w, w.shape, units)
    return weights._replace(gather=gather if weights.order == "nk" else gather.reversed), gather.constrain(w)


def made_of(w: NVFP4Tensor) -> str:
    lead, function = ("", "quantize") if w.ndim == 2 else ("G, ", "jax.vmap of quantize")
    return f"make it of w [{lead}K, N] by {function}(w, transpose=True)"


def turned(op: str, weights: Weights, x: jax.Array, w: Operand) -> str:
    """Returns the end of an error for w whose other axis has the size of K of x."""
    if x.ndim < 1 or x.shape[-1] != w.shape[-3 - weights.k_axis]:
        return ""
    if isinstance(w, NVFP4Tensor):
        return f"; {made_of(w)}"
    if op not in ("linear", "grouped_linear"):
        return "; weights are [G, K, N]" if op.startswith("RaggedDot") else ""
    other = "kn" if weights.order == "nk" else "nk"
    return f"; pass w_axes={other!r} for w [{'G, ' * (w.ndim - 2)}{', '.join(other.upper())}]"


def check_contractions(op: str, w_shape: tuple[int, ...], n: int, k: int, recipe: Recipe) -> None:
    _, unit = recipe.units
    if k % unit:
        raise ValueError(
            f"{op}: K must be a multiple of {unit}, got K={k} in w.shape={w_shape}; pad K of x and w to {k + -k % unit}"
        )
    for reason, unit in recipe.needs_of_n:
        if n % unit:
            raise ValueError(
                f"{op}: N must be a multiple of {unit}, since {reason}, got N={n} in w.shape={w_shape}; "
                f"pad N to {n + -n % unit} or choose another recipe"
            )
