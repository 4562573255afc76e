"""``grouped_linear``, the differentiable product of groups of rows with weights of their own, and ``RaggedDot``."""

import math
from dataclasses import dataclass
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._core.tensor import NVFP4Tensor
from .._native import plans
from .._ops.arguments import (
    Accumulation,
    as_float_array,
    as_group_sizes,
    check_implementation,
    float_dtype,
    operation,
)
from .._ops.matmul import grouped_matmul_nt
from .._primitives._base import axes_of_dims, bind, match_varying, resharded
from .._primitives._groups import Rows, check_sizes, rows_of
from .._primitives.grouped_contract import grouped_contract_p
from .._primitives.grouped_dot import GroupedDotParams, grouped_dot_p
from ..recipes import DEFAULT, Recipe
from ..spec import check_choice
from .dot_general import check_options, dtype_of_lax, padded, units_of
from .gather import Placement, as_pair
from .keys import check_path, key_of_product
from .layer import Call, Given, Products, check_dtype_of_x, dense, layer, recipe_key
from .quantizer import Operand, Pair, Quantizer, SpecPair, W
from .weights import (
    QuantizedWeight,
    WeightAxes,
    Weights,
    check_contractions,
    check_recipe,
    placed,
    turned,
    weights_and_recipe,
)


@operation
def grouped_linear(
    x: ArrayLike,
    w: ArrayLike | NVFP4Tensor | QuantizedWeight,
    group_sizes: ArrayLike,
    recipe: Recipe = DEFAULT,
    *,
    key: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    accumulation: Accumulation = "fast",
    implementation: str | None = None,
    w_axes: WeightAxes = "nk",
    w_gather: tuple[Placement, Placement] | None = None,
) -> jax.Array:
    """Computes x w^T with weights of its own for each group of rows, from quantized operands, with gradients.

    Args:
      x: [M, K], float32, bfloat16 or float16: the tokens of all experts, those of expert 0 first, then those of
        expert 1, and so on. Rows past the last group are ignored, including for the amax.
      w: [G, N, K], or [G, K, N] for ``w_axes="kn"``, float32, bfloat16 or float16: the weights of each expert, which
        is quantized alone. K and N must be multiples of 16. Or an NVFP4Tensor [G, N, K] with any N, in the format of
        ``recipe.fprop.w``: weights that stay as they are, as in ``linear``. Or a ``QuantizedWeight`` of such an array,
        by ``jax.vmap`` of ``QuantizedWeight.of``.
      group_sizes: int32 [G], as in ``grouped_matmul_nt``.
      recipe: as in ``linear``; no spec of fprop or dgrad may have amax scope "window64". Its wgrad is not quantized,
        because blocks of 16 rows would cross experts: a pair of specs there means None.
      key: as in ``linear``. Expert g folds g into ``jax.random.fold_in(key, 1)``, and then the bits of its amax. Inside
        ``jax.shard_map`` g counts the experts of one device: fold its index into the key.
      out_dtype: float32, bfloat16 or float16; the dtype of x if None.
      accumulation: as in ``grouped_matmul_nt``, for the forward product and that of dx.
      implementation: as in ``quantize``; or the name of a kernel of ``grouped_matmul_nt``, for the forward product,
        which ``recipe.fprop`` must then quantize.
      w_axes: "nk" or "kn", as in ``linear``.
      w_gather: as in ``linear``, by the three axes of w. Experts that each device keeps for itself (expert parallelism)
        are split in both shardings.

    Returns:
      [M, N] of ``out_dtype``. Rows that no group holds are zero, and so are they in the gradient of x. The gradients
      have the dtypes of x and w; that of an expert without rows is zero. dx is a grouped product by ``recipe.dgrad``
      (in 16x16 tiles with one spec for both, such as ``NVFP4_2D``, it reads w as the forward product does, by
      ``jnvfp4.transpose``). dw is a sum of products in high precision, in the dtype of x and float32 sums.

    Raises:
      ValueError, TypeError: shapes, dtypes or arguments do not fit; the message names them.
    """
    op = "grouped_linear"
    check_implementation(op, implementation, plans.grouped_kernels())
    check_choice(op, "w_axes", w_axes, get_args(WeightAxes))
    check_choice(op, "accumulation", accumulation, get_args(Accumulation))
    dtype = None if out_dtype is None else float_dtype(op, "out_dtype", out_dtype)
    check_recipe(op, recipe)
    if recipe.fprop is None and implementation in plans.grouped_kernels():
        raise ValueError(
            f"{op}: implementation must be None, 'native' or 'reference' where recipe.fprop is None, got "
            f"{implementation!r}; no kernel of grouped_matmul_nt computes a product in high precision"
        )
    weights = Weights(w_axes)
    call = Call(op, Grouped, _without_wgrad(recipe), dtype, accumulation, implementation, weights)
    return _call_grouped(call, x, w, group_sizes, key, as_pair(op, w_gather))


def _without_wgrad(recipe: Recipe) -> Recipe:
    return Recipe(recipe.fprop, recipe.dgrad, None) if recipe.wgrad_specs else recipe


def _call_grouped(
    call: Call, x: object, w: object, group_sizes: object, key: Given, w_gather: tuple[Placement, Placement] | None
) -> jax.Array:
    """Checks the arguments."""
    op, recipe = call.op, call.recipe
    w, forms, recipe = weights_and_recipe(op, recipe, w, call.weights.order)
    _check_scopes(op, recipe)
    key = recipe_key(op, recipe, key)
    x = as_float_array(op, "x", x)
    sizes = as_group_sizes(op, group_sizes, math.prod(x.shape[:1]))
    check_dtype_of_x(op, recipe, x)
    n, k = _weight_sizes(call, x, w)
    check_sizes(op, sizes, w.shape[0])
    check_contractions(op, w.shape, n, k, recipe)
    weights, w = placed(op, recipe, call.weights, w, w_gather)
    operands, structure = jax.tree.flatten((x, w, sizes, forms))
    # Outside the custom derivative, so that its transpose sums gradients over data-parallel devices.
    tokens, experts, sizes, forms = jax.tree.unflatten(structure, match_varying(*operands, like=key))
    sizes = resharded(sizes, [None])  # where a group begins depends on all sizes before it
    weights = weights._replace(one=recipe.one_weight and (forms is None or w_gather is not None))
    call = call._replace(recipe=recipe, weights=weights, out_dtype=call.out_dtype or x.dtype)
    return layer(tokens, experts, None, key, forms, sizes, call.with_types(tokens, experts, None))


def _check_scopes(op: str, recipe: Recipe) -> None:
    for gemm in ("fprop", "dgrad"):
        specs = getattr(recipe, gemm)
        for spec in specs if isinstance(specs, tuple) else ():
            if spec is not None and spec.format.amax_scope == "window64":
                raise ValueError(
                    f'{op}: recipe.{gemm} must have amax_scope "tensor" or "row", got "window64", whose amaxes change '
                    "along the axis that is contracted; choose another recipe"
                )


def _weight_sizes(call: Call, x: jax.Array, w: Operand) -> tuple[int, int]:
    """Returns N and K."""
    if w.ndim != 3:
        names = ", ".join(("G", *call.weights.ordered("N", "K")))
        raise ValueError(f"{call.op}: w must have rank 3, [{names}], got w.shape={w.shape}")
    if not w.shape[0]:
        raise ValueError(f"{call.op}: w must have one expert or more, got w.shape={w.shape}")
    if x.ndim != 2:
        raise ValueError(f"{call.op}: x must have rank 2, [M, K], got x.shape={x.shape}; flatten tokens first, or vmap")
    n, k = call.weights.ordered(*w.shape[1:])
    if x.shape[1] != k:
        raise ValueError(
            f"{call.op}: the last axis of x and axis {3 + call.weights.k_axis} of w must have the same size K, "
            f"got x.shape={x.shape}, w.shape={w.shape}{turned(call.op, call.weights, x, w)}"
        )
    return n, k


# ---------------------------------------------------------------- the GEMMs
@partial(jax.jit, inline=True)  # an eager call transfers no constants
def _masked(x: jax.Array, rows: Rows) -> jax.Array:
    return jnp.where(rows.held(x.shape[0]), x, jnp.zeros((), x.dtype))


class Grouped(Products):
    """Computes the GEMMs of groups of rows of x [M, K] and experts w [G, N, K]; wgrad is in high precision."""

    def __init__(self, call: Call, group_sizes: jax.Array, tokens: int) -> None:
        super().__init__(call, group_sizes, tokens)
        self.sizes, self.rows = group_sizes, rows_of(group_sizes, tokens)

    def masked(self, x: jax.Array) -> jax.Array:
        """Returns x with zeros in the rows that no group holds, so that what they have is in no amax and in no sum."""
        return _masked(x, self.rows)

    def quantized_weights(self, quantizer: Quantizer, w: jax.Array, specs: SpecPair, amax: Given) -> Pair:
        """Quantizes each expert with a key of its own."""
        if specs == (None, None):
            return None, None
        base = quantizer.key_of(W, *specs)
        experts = resharded(jnp.arange(w.shape[0], dtype=jnp.uint32), axes_of_dims(jax.typeof(w)))
        keys = None if base is None else jax.vmap(lambda g: jax.random.fold_in(base, g))(experts)
        return jax.vmap(lambda w, key: quantizer.pair(w, specs, key))(w, keys)

    def fprop(self, x: Operand, w: NVFP4Tensor, bias: jax.Array | None) -> jax.Array:
        call = self.call
        accumulation, implementation = call.accumulation, call.implementation
        return grouped_matmul_nt(
            x, w, self.sizes, out_dtype=call.out_dtype, accumulation=accumulation, implementation=implementation
        )

    def fprop_in_high_precision(self, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        return self._dot(x, self.weights.in_high_precision(w), 3 + self.weights.k_axis, self.call.out_dtype)

    def dgrad(self, dy: NVFP4Tensor, w: NVFP4Tensor) -> jax.Array:
        accumulation, implementation = self.call.accumulation, self.call.common
        return grouped_matmul_nt(
            dy, w, self.sizes, out_dtype=self.call.dtypes[0], accumulation=accumulation, implementation=implementation
        )

    def dgrad_in_high_precision(self, dy: jax.Array, w: Operand) -> jax.Array:
        if not isinstance(w, NVFP4Tensor):
            return self._dot(dy, self.weights.in_high_precision(w), -self.weights.k_axis, self.call.dtypes[0])
        return self._dot(dy, dense(w, dy.dtype, self.call.common), 1, self.call.dtypes[0])

    def wgrad(self, dy: NVFP4Tensor, x: NVFP4Tensor) -> jax.Array:
        raise AssertionError("blocks of 16 rows would cross experts")

    def wgrad_in_high_precision(self, dy: jax.Array, x: jax.Array) -> jax.Array:
        """Sums the products of rows of dy and x over the rows of each group, in float32."""
        operands = self.weights.ordered(dy, x)
        dw = bind(grouped_contract_p, *operands, *self.rows, params=None, implementation=None)[0]
        return dw.astype(self.call.dtypes[1])

    def _dot(self, a: jax.Array, b: jax.Array, b_axis: int, dtype: np.dtype | None) -> jax.Array:
        params = GroupedDotParams(b_axis, jnp.dtype(dtype))
        return bind(grouped_dot_p, a, b, *self.rows, params=params, implementation=None)[0]


# ---------------------------------------------------------------- the sibling of DotGeneral
@dataclass(frozen=True)
class RaggedDot:
    """Stands in for ``jax.lax.ragged_dot`` where model code takes one, and multiplies by a recipe.

    It holds no arrays and compares by value, so it can be an attribute of a module or a static argument of jit.

    Attributes:
      recipe: how each product quantizes its operands, as in ``jnvfp4.grouped_linear``.
      path: the name of the layer in its model, which a layer that rounds stochastically folds into the key of
        ``step_key`` where no key is passed.
      w_gather: as in ``jnvfp4.grouped_linear``, by the axes of rhs.
      pad: as in ``jnvfp4.DotGeneral``.
    """

    recipe: Recipe = DEFAULT
    path: str | None = None
    w_gather: tuple[Placement, Placement] | None = None
    pad: bool = False

    def __post_init__(self) -> None:
        check_recipe("RaggedDot", self.recipe)
        as_pair("RaggedDot", self.w_gather)
        check_path("RaggedDot", self.path)

    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike | NVFP4Tensor,
        group_sizes: ArrayLike,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None,
        group_offset: object = None,
        *,
        key: jax.Array | None = None,
        w_axes: WeightAxes = "kn",
        **unsupported: object,
    ) -> jax.Array:
        """Computes ``jax.lax.ragged_dot`` by ``grouped_linear``, with zeros added where K or N needs them.

        Args:
          lhs: [M, K], as x of ``jnvfp4.grouped_linear``.
          rhs: as w of ``grouped_linear``: [G, K, N], or an NVFP4Tensor [G, N, K].
          group_sizes: int32 [G].
          precision: only None or the default, because the operands are quantized.
          preferred_element_type: the dtype of the result; that of ``lax.ragged_dot`` if None.
          group_offset: must be None, as ``lax.ragged_dot`` has it too.
          key: as in ``grouped_linear``. If it is None and the recipe rounds stochastically, that of ``step_key``.
          w_axes: as in ``grouped_linear``.
          **unsupported: newer arguments of ``lax.ragged_dot``; each must be None.

        Returns:
          [M, N].

        Raises:
          ValueError, TypeError: operands or arguments do not fit; the message names them.
        """
        op = "RaggedDot" if self.path is None else f"RaggedDot of layer {self.path!r}"
        check_choice(op, "w_axes", w_axes, get_args(WeightAxes))
        check_options(op, self.recipe, precision, None, {"group_offset": group_offset, **unsupported})
        recipe = _without_wgrad(self.recipe)
        if key is None:
            key = key_of_product(op, "RaggedDot", self.path, recipe)
        x = as_float_array(op, "lhs", lhs)
        if isinstance(rhs, NVFP4Tensor):
            dtype = float_dtype(op, "preferred_element_type", preferred_element_type or x.dtype)
            return _call_grouped(Call(op, Grouped, recipe, dtype), x, rhs, group_sizes, key, self.w_gather)
        w = as_float_array(op, "rhs", rhs)
        dtype = float_dtype(op, "preferred_element_type", preferred_element_type or dtype_of_lax(x, w))
        call = Call(op, Grouped, recipe, dtype, weights=Weights(w_axes))
        if w.ndim != 3 or x.ndim != 2:
            return _call_grouped(call, x, w, group_sizes, key, self.w_gather)  # raises
        n, _ = call.weights.ordered(*w.shape[1:])
        y = _call_grouped(call, *padded(x, w, w_axes, *units_of(recipe, self.pad)), group_sizes, key, self.w_gather)
        return y[:, :n] if y.shape[1] != n else y
