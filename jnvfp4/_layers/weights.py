"""The weights of a layer: trained or frozen, their axis order, and their shardings at rest and as GEMMs read them."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core.mesh import Placement
from .._core.tensor import NVFP4Tensor
from .._ops.arguments import Checks, Implementation, describe
from .._ops.quantize import transpose
from .._primitives._checks import check_parts
from ..recipes import DEFAULT, Recipe, to_recipe
from ..spec import Format, name_of
from .gather import Gather, as_gather
from .quantizer import Operand, Pair, Quantizer, SpecPair, T, pack

WeightAxes = Literal["nk", "kn"]
Amax = jax.Array | None
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

    def as_nk(self, w: jax.Array) -> jax.Array:
        """Returns w [..., N, K]."""
        return w if self.order == "nk" else jnp.swapaxes(w, -1, -2)

    def kept(self, w: NVFP4Tensor) -> NVFP4Tensor:
        """Places w, quantized along K, as each device keeps it: what is made of its values is made there, too."""
        return w if self.gather is None else self.gather.keep(w)

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


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "fprop", "dgrad"],
    meta_fields=["specs", "w_axes", "requantized"],
)
@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """Holds an array of weights together with its quantized forms, which the microbatches of one step share: a pytree.

    ``linear`` and ``grouped_linear`` take it as w: they read the forms where they would quantize the array, and results
    and gradients have the same bits. The gradient is that of the array. The forms are constants, so ``jax.grad`` is
    taken with respect to the array alone:

        weight = QuantizedWeight.of(w, recipe)  # once per step, outside the loop over microbatches
        dw = jax.grad(lambda w: loss(dataclasses.replace(weight, array=w), batch))(w)  # inside

    Attributes:
      array: w [..., N, K], or [..., K, N] for ``w_axes="kn"``.
      fprop: the NVFP4Tensor [..., N, K] by ``recipe.fprop.w``; None where fprop quantizes nothing.
      dgrad: the NVFP4Tensor [..., K, N] by ``recipe.dgrad.w``; None where dgrad reads another w.
      specs: the specs of both.
      w_axes: the order of the axes of ``array``.
      requantized: whether ``dgrad`` is made of the values of ``fprop``, by ``recipe.requantize``.
    """

    array: jax.Array
    fprop: NVFP4Tensor | None
    dgrad: NVFP4Tensor | None
    specs: SpecPair
    w_axes: WeightAxes = "nk"
    requantized: bool = False

    @classmethod
    def of(
        cls,
        w: ArrayLike,
        recipe: Recipe = DEFAULT,
        *,
        w_axes: WeightAxes = "nk",
        w_amax: ArrayLike | None = None,
        implementation: Implementation = None,
    ) -> "QuantizedWeight":
        """Quantizes w for all three GEMMs of ``linear(x, w, recipe)``.

        Args:
          w: [N, K], or [K, N] for ``w_axes="kn"``, as in ``linear``. Layers or experts [L, N, K] need ``jax.vmap``.
          recipe: as in ``linear``; its specs of w must round to nearest.
          w_axes: as in ``linear``, which must be given the same.
          w_amax: as in ``linear``.
          implementation: as in ``quantize``.

        Raises:
          ValueError, TypeError: shapes, dtypes or arguments do not fit; the message names them.
        """
        op, weights = "QuantizedWeight.of", Weights(w_axes)
        check = LayerChecks(op, recipe, weights)
        check.choice("w_axes", w_axes, get_args(WeightAxes))
        check.lowering(implementation)
        array, specs = check.float_array("w", w), recipe.weight_specs
        if any(spec is not None and spec.rounding == "stochastic" for spec in specs):
            raise ValueError(
                f"{op}: recipe must round w to nearest, got {_names(specs)}; microbatches would share the random bits, "
                "so pass the array to linear, which draws its own for each"
            )
        if array.ndim != 2:
            raise ValueError(
                f"{op}: w must have rank 2, [{', '.join(weights.ordered('N', 'K'))}], got w.shape={array.shape}; use "
                "jax.vmap for a stack of layers or experts, each of which has an amax of its own"
            )
        check.contractions(array.shape, *weights.ordered(*array.shape))
        amax, values = check.weight_amax(array, w_amax), lax.stop_gradient(array)
        quantizer, (of_fprop, of_dgrad) = Quantizer(None, implementation), specs
        of_array = weights.ordered(of_fprop, None if recipe.requantizes_w else of_dgrad)
        fprop, dgrad = weights.ordered(*quantized_along(values, of_array, quantizer, None, amax))
        if recipe.requantizes_w and fprop is not None and of_dgrad is not None:
            dgrad = quantizer.again(fprop, values.dtype, of_dgrad, None)
        return cls(array, fprop, dgrad, specs, w_axes, recipe.requantizes_w)


def quantized_along(w: jax.Array, specs: SpecPair, quantizer: Quantizer, key: jax.Array | None, amax: Amax) -> Pair:
    """Quantizes a matrix along its last axis and along its first, with the amax given where a spec takes one."""
    first, second = (amax if spec is not None and spec.plain_amax else None for spec in specs)
    return quantizer.pair(w, specs, key, (first, second))


def _names(specs: SpecPair) -> str:
    return " and ".join("None" if spec is None else name_of(spec) for spec in specs)


def made_of(w: NVFP4Tensor) -> str:
    lead, function = ("", "quantize") if w.ndim == 2 else ("G, ", "jax.vmap of quantize")
    return f"make it of w [{lead}K, N] by {function}(w, transpose=True)"


@dataclass(frozen=True)
class LayerChecks(Checks):
    """Checks the arguments of a layer with a recipe and these weights."""

    recipe: Recipe
    weights: Weights = field(default_factory=Weights)

    def __post_init__(self) -> None:
        """Refuses what is no recipe."""
        recipe: object = self.recipe
        if not isinstance(recipe, Recipe):
            remedy = to_recipe(recipe)
            if isinstance(recipe, jax.Array | np.ndarray) and self.op in ("linear", "grouped_linear"):
                is_float = jnp.issubdtype(recipe.dtype, jnp.floating)
                remedy = "" if is_float and self.op != "linear" else f"; pass {'bias' if is_float else 'key'}="
            raise TypeError(f"{self.op}: recipe must be a Recipe, got {describe(recipe)}{remedy}")

    def operand(self, w: object) -> tuple[Operand, Pair | None, Recipe]:
        """Returns the array or tensor of w, its quantized forms, and the recipe, by which a tensor has no gradient."""
        op, recipe, order = self.op, self.recipe, self.weights.order
        if isinstance(w, QuantizedWeight):
            return self.float_array("w.array", w.array), self._forms(w), recipe
        if not isinstance(w, NVFP4Tensor):
            return self.float_array("w", w), None, recipe
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
        return w, None, Recipe((x_spec, replace(w_spec, block_rows=1, rounding="nearest")), "dequantized", None)

    def _forms(self, w: QuantizedWeight) -> Pair:
        """Returns the forms of w for fprop and dgrad, with scales as bytes."""
        op, order, specs = self.op, self.weights.order, self.recipe.weight_specs
        if w.w_axes != order:
            raise ValueError(
                f"{op}: w_axes must be {w.w_axes!r} for a QuantizedWeight that was made with it, got {order!r}"
            )
        if w.specs != specs:
            raise ValueError(
                f"{op}: w must be quantized by the specs of w in recipe.fprop and recipe.dgrad, {_names(specs)}, got "
                f"{_names(w.specs)}; make it by QuantizedWeight.of(w, recipe)"
            )
        if w.requantized != self.recipe.requantizes_w:
            raise ValueError(
                f"{op}: w must be made with requantize={not w.requantized}, as the recipe says, got one with "
                f"{w.requantized}; make it by QuantizedWeight.of(w, recipe)"
            )
        for form, axes in ((w.fprop, "nk"), (w.dgrad, "kn")):
            step = 1 if axes == order else -1
            if form is not None and w.array.shape != (*form.shape[:-2], *form.shape[-2:][::step]):
                raise ValueError(
                    f"{op}: w.array must have the shape of what was quantized, got {w.array.shape} beside a form of "
                    f"shape {form.shape}; make it by QuantizedWeight.of(w, recipe)"
                )
        return pack(w.fprop), pack(w.dgrad)

    def placed(self, w: Operand, w_gather: tuple[Placement, Placement] | None) -> tuple[Weights, Operand]:
        """Places w as each device keeps it: outside the custom derivative, so that so is the gradient of w."""
        weights, matrices = self.weights._replace(frozen=isinstance(w, NVFP4Tensor)), (1,) * (w.ndim - 2)
        if isinstance(w, NVFP4Tensor):
            if w_gather is not None:
                units = (*matrices, 1, w.format.unit)
                weights = weights._replace(gather=as_gather(self.op, "w_gather", w_gather, w.data, w.shape, units))
            return weights, pack(w)
        if w_gather is None:
            return weights, w
        units = (*matrices, *weights.ordered(*self.recipe.weight_blocks))
        gather = as_gather(self.op, "w_gather", w_gather, w, w.shape, units)
        return weights._replace(gather=gather if weights.order == "nk" else gather.reversed), gather.constrain(w)

    def turned(self, x: jax.Array, w: Operand) -> str:
        """Returns the end of an error for w whose other axis has the size of K of x."""
        op, order = self.op, self.weights.order
        if x.ndim < 1 or x.shape[-1] != w.shape[-3 - self.weights.k_axis]:
            return ""
        if isinstance(w, NVFP4Tensor):
            return f"; {made_of(w)}"
        if op not in ("linear", "grouped_linear"):
            ragged = op.startswith("RaggedDot")
            return f"; weights are [G, {', '.join(order.upper())}] for w_axes={order!r}" if ragged else ""
        other = "kn" if order == "nk" else "nk"
        return f"; pass w_axes={other!r} for w [{'G, ' * (w.ndim - 2)}{', '.join(other.upper())}]"

    def weight_amax(self, w: object, w_amax: ArrayLike | None) -> Amax:
        """Returns the amax of w that is given; a w that is quantized already has one."""
        op = self.op
        if w_amax is None:
            return None
        if isinstance(w, NVFP4Tensor | QuantizedWeight):
            which = "an NVFP4Tensor w" if isinstance(w, NVFP4Tensor) else "a QuantizedWeight w"
            raise ValueError(f"{op}: w_amax must be None for {which}, which has an amax, got {w_amax!r}")
        if not self.recipe.takes_weight_amax:
            raise ValueError(
                f'{op}: w_amax must be None, since no spec that reads w has amax_scope "tensor" without rht, got '
                f"{w_amax!r}"
            )
        amax = self.amax(w_amax)
        if amax.shape != () or amax.dtype != jnp.float32:
            raise ValueError(f"{op}: w_amax must be float32 of shape (), got {amax.dtype} of shape {amax.shape}")
        return amax

    def contractions(self, w_shape: tuple[int, ...], n: int, k: int) -> None:
        """Refuses N and K that are no multiples of what the recipe needs."""
        op, (_, unit) = self.op, self.recipe.units
        if k % unit:
            raise ValueError(
                f"{op}: K must be a multiple of {unit}, got K={k} in w.shape={w_shape}; pad K of x and w to "
                f"{k + -k % unit}"
            )
        for reason, unit in self.recipe.needs_of_n:
            if n % unit:
                raise ValueError(
                    f"{op}: N must be a multiple of {unit}, since {reason}, got N={n} in w.shape={w_shape}; "
                    f"pad N to {n + -n % unit} or choose another recipe"
                )
