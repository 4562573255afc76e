"""``grouped_linear``, the differentiable product of groups of rows with weights of their own, and ``RaggedDot``."""

from dataclasses import replace
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .._core.mesh import Placement, axes_of_dims, resharded
from .._core.tensor import NVFP4Tensor
from .._native import plans
from .._ops.arguments import Accumulation, operation
from .._ops.matmul import grouped_matmul_nt
from .._primitives._base import bind
from .._primitives._groups import Rows, rows_of
from .._primitives.grouped_contract import grouped_contract_p
from .._primitives.grouped_dot import GroupedDotParams, grouped_dot_p
from ..recipes import DEFAULT, Recipe
from ..spec import QuantSpec
from .dot_general import LayerProduct, dtype_of_lax, padded
from .gather import as_pair
from .layer import Call, Given, Products, call_of, dense, multiply
from .quantizer import Operand, Pair, Quantizer, SpecPair, W
from .weights import QuantizedWeight, WeightAxes, Weights


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
    stats: jax.Array | None = None,
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
      stats: as in ``linear``, of all experts together.

    Returns:
      [M, N] of ``out_dtype``. Rows that no group holds are zero, and so are they in the gradient of x. The gradients
      have the dtypes of x and w; that of an expert without rows is zero. dx is a grouped product by ``recipe.dgrad``
      (in 16x16 tiles with one spec for both, such as ``NVFP4_2D``, it reads w as the forward product does, by
      ``jnvfp4.transpose``). dw is a sum of products in high precision, in the dtype of x and float32 sums.

    Raises:
      ValueError, TypeError: shapes, dtypes or arguments do not fit; the message names them.
    """
    kernels = plans.grouped_kernels()
    call = call_of("grouped_linear", Grouped, recipe, w_axes, out_dtype, accumulation, implementation, kernels)
    if recipe.fprop is None and implementation in kernels:
        raise ValueError(
            f"{call.op}: implementation must be None, 'native' or 'reference' where recipe.fprop is None, got "
            f"{implementation!r}; no kernel of grouped_matmul_nt computes a product in high precision"
        )
    call = replace(call, recipe=_without_wgrad(recipe))
    return multiply(call, x, w, key, as_pair(call.op, w_gather), group_sizes=group_sizes, stats=stats)


def _without_wgrad(recipe: Recipe) -> Recipe:
    return replace(recipe, wgrad=None) if recipe.wgrad_specs else recipe


def _keys(base: jax.Array | None, w: jax.Array) -> jax.Array | None:
    """Returns the keys of experts, sharded like them."""
    if base is None:
        return None
    experts = resharded(jnp.arange(w.shape[0], dtype=jnp.uint32), axes_of_dims(jax.typeof(w)))
    return jax.vmap(lambda g: jax.random.fold_in(base, g))(experts)


# ---------------------------------------------------------------- the GEMMs
@partial(jax.jit, inline=True)  # an eager call transfers no constants
def _masked(x: jax.Array, rows: Rows) -> jax.Array:
    return jnp.where(rows.held(x.shape[0]), x, jnp.zeros((), x.dtype))


class Grouped(Products):
    """Computes the GEMMs of groups of rows of x [M, K] and experts w [G, N, K]; wgrad is in high precision."""

    transposes_w = True

    def __init__(self, call: Call, group_sizes: jax.Array, tokens: int) -> None:
        super().__init__(call, group_sizes, tokens)
        self.sizes, self.rows = group_sizes, rows_of(group_sizes, tokens)

    @staticmethod
    def n_and_k(call: Call, x: jax.Array, w: Operand) -> tuple[int, int]:
        op, recipe = call.op, call.recipe
        for gemm, specs in (("fprop", recipe.fprop), ("dgrad", recipe.dgrad_specs)):
            if any(spec is not None and spec.format.amax_scope == "window64" for spec in specs or ()):
                raise ValueError(
                    f'{op}: recipe.{gemm} must have amax_scope "tensor" or "row", got "window64", whose amaxes change '
                    "along the axis that is contracted; choose another recipe"
                )
        if w.ndim != 3:
            names = ", ".join(("G", *call.weights.ordered("N", "K")))
            raise ValueError(f"{op}: w must have rank 3, [{names}], got w.shape={w.shape}")
        if not w.shape[0]:
            raise ValueError(f"{op}: w must have one expert or more, got w.shape={w.shape}")
        if x.ndim != 2:
            raise ValueError(f"{op}: x must have rank 2, [M, K], got x.shape={x.shape}; flatten tokens first, or vmap")
        n, k = call.weights.ordered(*w.shape[1:])
        if x.shape[1] != k:
            raise ValueError(
                f"{op}: the last axis of x and axis {3 + call.weights.k_axis} of w must have the same size K, "
                f"got x.shape={x.shape}, w.shape={w.shape}{call.turned(x, w)}"
            )
        return n, k

    def masked(self, x: jax.Array) -> jax.Array:
        """Returns x with zeros in the rows that no group holds, so that what they have is in no amax and in no sum."""
        return _masked(x, self.rows)

    def quantized_weights(self, quantizer: Quantizer, w: jax.Array, specs: SpecPair, amax: Given) -> Pair:
        """Quantizes each expert with a key of its own."""
        if specs == (None, None):
            return None, None
        return jax.vmap(lambda w, key: quantizer.pair(w, specs, key))(w, _keys(quantizer.key_of(W, *specs), w))

    def weights_again(self, quantizer: Quantizer, w: NVFP4Tensor, dtype: DTypeLike, spec: QuantSpec) -> NVFP4Tensor:
        keys = _keys(quantizer.key_of(W, spec), w.data)
        return jax.vmap(lambda w, key: quantizer.again(w, dtype, spec, key))(w, keys)

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
            dy, w, self.sizes, out_dtype=self.call.dtypes.x, accumulation=accumulation, implementation=implementation
        )

    def dgrad_in_high_precision(self, dy: jax.Array, w: Operand) -> jax.Array:
        if not isinstance(w, NVFP4Tensor):
            return self._dot(dy, self.weights.in_high_precision(w), -self.weights.k_axis, self.call.dtypes.x)
        return self._dot(dy, dense(w, dy.dtype, self.call.common), 1, self.call.dtypes.x)

    def wgrad(self, dy: NVFP4Tensor, x: NVFP4Tensor) -> jax.Array:
        raise AssertionError("blocks of 16 rows would cross experts")

    def wgrad_in_high_precision(self, dy: jax.Array, x: jax.Array) -> jax.Array:
        """Sums the products of rows of dy and x over the rows of each group, in float32."""
        operands = self.weights.ordered(dy, x)
        dw = bind(grouped_contract_p, *operands, *self.rows, params=None, implementation=None)[0]
        return dw.astype(self.call.dtypes.w)

    def _dot(self, a: jax.Array, b: jax.Array, b_axis: int, dtype: np.dtype | None) -> jax.Array:
        params = GroupedDotParams(b_axis, jnp.dtype(dtype))
        return bind(grouped_dot_p, a, b, *self.rows, params=params, implementation=None)[0]


# ---------------------------------------------------------------- the sibling of DotGeneral
class RaggedDot(LayerProduct):
    """Stands in for ``jax.lax.ragged_dot`` where model code takes one, and multiplies by a recipe.

    It holds no arrays and compares by value, so it can be an attribute of a module or a static argument of jit.

    Attributes:
      recipe: how each product quantizes its operands, as in ``jnvfp4.grouped_linear``.
      path: the name of the layer in its model, which a layer that rounds stochastically folds into the key of
        ``step_key`` where no key is passed.
      w_gather: as in ``jnvfp4.grouped_linear``, by the axes of rhs.
      pad: as in ``jnvfp4.DotGeneral``.
    """

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
        check = self.checks(precision, None, {"group_offset": group_offset, **unsupported})
        check.choice("w_axes", w_axes, get_args(WeightAxes))
        recipe, frozen = _without_wgrad(self.recipe), isinstance(rhs, NVFP4Tensor)
        check = replace(check, recipe=recipe, weights=Weights("nk" if frozen else w_axes))
        key = self.key_or_own(check, key)
        x = check.float_array("lhs", lhs)
        w = rhs if isinstance(rhs, NVFP4Tensor) else check.float_array("rhs", rhs)
        dtype = preferred_element_type or (x.dtype if isinstance(w, NVFP4Tensor) else dtype_of_lax(x, w))
        dtype = check.float_dtype("preferred_element_type", dtype)
        call = Call(check.op, recipe, check.weights, Grouped, dtype)
        if isinstance(w, NVFP4Tensor) or w.ndim != 3 or x.ndim != 2:  # which raises for other ranks
            return multiply(call, x, w, key, self.w_gather, group_sizes=group_sizes, stats=self.probe)
        n, _ = call.weights.ordered(*w.shape[1:])
        x, w = padded(x, w, w_axes, *recipe.units_of(self.pad))
        y = multiply(call, x, w, key, self.w_gather, group_sizes=group_sizes, stats=self.probe)
        return y[:, :n] if y.shape[1] != n else y
