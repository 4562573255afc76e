"""``linear``, the differentiable product of an array with weights."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .._core.mesh import Axes, Entry, Placement, axes_of, axes_of_dims, resharded, without_axes
from .._core.tensor import NVFP4Tensor
from .._native import plans
from .._ops.arguments import Accumulation, operation
from .._ops.matmul import contract_rows, matmul_nt
from .._primitives._products import product
from ..recipes import DEFAULT, Recipe
from ..spec import QuantSpec
from .gather import as_pair
from .layer import Call, Given, Products, call_of, dense, multiply
from .quantizer import Operand, Pair, Quantizer, SpecPair, T, W
from .weights import QuantizedWeight, WeightAxes, quantized_along


@operation
def linear(
    x: ArrayLike,
    w: ArrayLike | NVFP4Tensor | QuantizedWeight,
    recipe: Recipe = DEFAULT,
    *,
    bias: ArrayLike | None = None,
    key: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    accumulation: Accumulation = "fast",
    implementation: str | None = None,
    w_axes: WeightAxes = "nk",
    w_gather: tuple[Placement, Placement] | None = None,
    w_amax: ArrayLike | None = None,
    stats: jax.Array | None = None,
) -> jax.Array:
    """Computes x w^T + bias with quantized operands, in the forward GEMM and in both gradient GEMMs.

    Args:
      x: [..., K], float32, bfloat16 or float16. The leading axes count as one axis of M tokens, of which there may be
        any number: the gradient of w needs blocks along M, and zero tokens fill the last one, which changes no result.
        Any leading axis may be sharded. Where the recipe has blocks along M, the last leading axis must be a multiple
        of their size, 16 or 64, and so must its part on each device; otherwise XLA gathers tokens, and an Explicit
        mesh refuses x.
      w: [N, K], or [K, N] for ``w_axes="kn"``, float32, bfloat16 or float16. K and N must be multiples of 16, or of 64
        where an operand has windows of 64 along them (N only if a GEMM contracts it or w has 16x16 tiles). Or an
        NVFP4Tensor [N, K] with any N, in the format of ``recipe.fprop.w``: weights that stay as they are. They have no
        gradient, and dx is computed in high precision from their dequantized values, whatever ``recipe.dgrad``.
        Or a ``QuantizedWeight``, an array that was quantized before, whose gradient is that of the array.
        On an Explicit mesh N must not be sharded over an axis that a leading axis of x is sharded over. An axis of K
        that x does not have is gathered as packed bytes.
      recipe: how each GEMM quantizes its operands (``jnvfp4.recipes``). The default, ``recipes.DEFAULT``, is
        ``recipes.pretrain(stochastic_rounding=False)``: it quantizes all three GEMMs and needs no key.
      bias: [N], any float dtype, added in float32 before the cast.
      key: a JAX PRNG key, needed for gradients if the recipe rounds stochastically (``recipe.stochastic``), without
        gradients only if the forward GEMM does (``recipe.stochastic_forward``), and otherwise unused. Give each layer
        and each step its own. x, w and dy draw from ``jax.random.fold_in(key, i)`` for i = 0, 1, 2, with the bits of
        their amax folded in, so that other data draw other bits (docs/numerics.md). If w is an NVFP4Tensor, only the
        rounding of x can need a key.
      out_dtype: float32, bfloat16 or float16; the dtype of x if None.
      accumulation: as in ``matmul_nt``, for every GEMM of quantized operands, forward and backward. XLA computes GEMMs
        in high precision, in its own order.
      implementation: as in ``quantize``, for quantizers and GEMMs. Or the name of a kernel of ``matmul_nt``, for the
        forward GEMM alone.
      w_axes: "nk" for w [N, K], "kn" for w [K, N], the order of Flax. "kn" transposes nothing in memory and returns the
        gradient of w as [K, N]; the results have the bits of ``w.T`` with "nk" where the order of sums is pinned. But a
        spec that rounds w stochastically draws its bits for w as it is stored, so they differ from those of ``w.T``.
        An NVFP4Tensor needs "nk".
      w_gather: None, or the pair (sharded, gathered) of shardings of w by its axes, for weights that each device of an
        Auto or Explicit mesh keeps a part of. w is quantized as ``sharded``; its codes and scales, as bytes, then go to
        ``gathered``: once if fprop and dgrad quantize w by the same spec of 16x16 tiles (``NVFP4_2D``), since dx then
        reads these bytes transposed; otherwise again, along N, for dx. The gradient of w leaves as ``sharded``: partial
        sums over tokens are reduce-scattered in float32 and then rounded to the dtype of w. A GEMM in high precision
        reads the original w, which XLA gathers in its own dtype. A sharding is a NamedSharding or, where the mesh is
        known (that of w, or of ``jax.set_mesh``), a PartitionSpec, and splits w between its blocks.
      w_amax: float32 (), the amax of w for every spec that reads w and has amax scope "tensor" and no ``rht``; larger
        magnitudes saturate. None finds it here. A w that is quantized already takes none.
      stats: a probe (``jnvfp4.stats.probe``), whose gradient is the statistics of the FP4 tensors of x,
        w and dy in this call; or zeros, float32 [K, K], whose gradient is X^T X of x before it is quantized
        (``jnvfp4.calibration.hessian``). None collects nothing.

    Returns:
      [..., N] of ``out_dtype``. The gradients have the dtypes of x, w and bias. The backward pass keeps the quantized
      tensors (for a GEMM in high precision, the original array) under names that policies of jax.checkpoint can save
      (``jnvfp4.remat``). If w is an NVFP4Tensor, it keeps only that.

    Raises:
      ValueError, TypeError: shapes or dtypes do not fit; the message names them.
    """
    call = call_of("linear", Dense, recipe, w_axes, out_dtype, accumulation, implementation, plans.matmul_kernels())
    return multiply(call, x, w, key, as_pair(call.op, w_gather), w_amax=w_amax, bias=bias, stats=stats)


# ---------------------------------------------------------------- the GEMMs
class Dense(Products):
    """Computes the GEMMs of x [*rows, K] and one matrix w, split over devices as their operands and gradients are."""

    @staticmethod
    def n_and_k(call: Call, x: jax.Array, w: Operand) -> tuple[int, int]:
        if w.ndim != 2:
            names = ", ".join(call.weights.ordered("N", "K"))
            raise ValueError(f"{call.op}: w must have rank 2, [{names}], got w.shape={w.shape}")
        n, k = call.weights.ordered(*w.shape)
        if x.ndim < 1 or x.shape[-1] != k:
            which = "last" if call.weights.order == "nk" else "first"
            raise ValueError(
                f"{call.op}: the last axis of x and the {which} axis of w must have the same size K, "
                f"got x.shape={x.shape}, w.shape={w.shape}{call.turned(x, w)}"
            )
        return n, k

    @staticmethod
    def tokens(call: Call, x: jax.Array, w: Operand) -> jax.Array:
        """Keeps the leading axes of x apart, since XLA cannot merge axes that are sharded.

        They are flattened where a block of tokens would be in two of them. An Explicit mesh allows that only if the
        first alone is sharded. It has no axis for both the rows and the columns of a result, as in ``lax.dot_general``.
        """
        of_rows, unit = axes_of_dims(jax.typeof(x))[:-1], call.recipe.unit_of_tokens
        flatten = x.ndim < 3 or x.shape[-2] % unit != 0
        if flatten and any(entry is not None for entry in of_rows[1:]):
            raise ValueError(
                f"{call.op}: where a leading axis of x other than the first is sharded on an Explicit mesh, the last "
                f"leading axis must be a multiple of {unit}, since recipe has blocks along it, got {jax.typeof(x)}; "
                "pad x, or reshard it"
            )
        of_w = jax.typeof(w.data if isinstance(w, NVFP4Tensor) else w)
        of_n, which = call.weights.ordered(*axes_of_dims(of_w))[0], f"w {of_w}"
        if (gather := call.weights.gather) is not None:
            of_n, which = gather.gathered[0], f"w_gather.gathered, {PartitionSpec(*gather.gathered)} of [N, K]"
        rows = {axis for entry in of_rows for axis in axes_of(entry)}
        if shared := [axis for axis in axes_of(of_n) if axis in rows]:
            raise ValueError(
                f"{call.op}: the leading axes of x and N of w must be sharded over different axes of an Explicit mesh, "
                f"got {shared[0]!r} for both, in x {jax.typeof(x)} and {which}; gather w by w_gather, or shard it "
                "along K, over which its packed bytes are gathered"
            )
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if flatten else x

    def quantized_weights(self, quantizer: Quantizer, w: jax.Array, specs: SpecPair, amax: Given) -> Pair:
        return quantized_along(w, specs, quantizer, quantizer.key_of(W, *specs), amax)

    def weights_again(self, quantizer: Quantizer, w: NVFP4Tensor, dtype: DTypeLike, spec: QuantSpec) -> NVFP4Tensor:
        return quantizer.again(w, dtype, spec, quantizer.key_of(W, spec))

    def fprop(self, x: Operand, w: NVFP4Tensor, bias: jax.Array | None) -> jax.Array:
        call = self.call
        accumulation, implementation = call.accumulation, call.implementation
        return matmul_nt(
            x, w, out_dtype=call.out_dtype, bias=bias, accumulation=accumulation, implementation=implementation
        )

    def fprop_in_high_precision(self, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        contracted = ([x.ndim - 1], [2 + self.weights.k_axis])
        dtype = self.call.out_dtype if bias is None else jnp.float32
        y = _high_precision(x, self.weights.in_high_precision(w), contracted, dtype, [None] * x.ndim)
        if bias is None:
            return y
        return (y + bias.astype(jnp.float32)[(None,) * (y.ndim - 1)]).astype(self.call.out_dtype)

    def dgrad(self, dy: NVFP4Tensor, w: NVFP4Tensor) -> jax.Array:
        return self._gradient(dy, _gathered_as(self.call.axes.x[-1], w, 0), 1, self.call.axes.x, self.call.dtypes.x)

    def dgrad_in_high_precision(self, dy: jax.Array, w: Operand) -> jax.Array:
        call, axis = self.call, 0 if isinstance(w, NVFP4Tensor) else -1 - self.weights.k_axis
        w = dense(_gathered_as(self.call.axes.x[-1], w, 1 - axis), dy.dtype, call.common)
        return _high_precision(dy, w, ([dy.ndim - 1], [axis]), call.dtypes.x, self.call.axes.x)

    def wgrad(self, dy: NVFP4Tensor, x: NVFP4Tensor) -> jax.Array:
        return self._gradient(*self.weights.ordered(dy, x), dy.data.ndim - 1, self.call.axes.w, self.call.dtypes.w)

    def wgrad_in_high_precision(self, dy: jax.Array, x: jax.Array) -> jax.Array:
        rows = list(range(dy.ndim - 1))
        operands = self.weights.ordered(dy, x)
        return _high_precision(*operands, (rows, rows), self.call.dtypes.w, self.call.axes.w)

    def _gradient(
        self, a: NVFP4Tensor, b: NVFP4Tensor, contracted: int, axes: Sequence[Entry], dtype: np.dtype
    ) -> jax.Array:
        """Multiplies over the last ``contracted`` axes of each, for a gradient with these mesh axes."""
        of_a, of_b = (axes_of_dims(jax.typeof(t.data)) for t in (a, b))
        summed = of_a[-contracted:] + of_b[1:]
        of_a[:-contracted], of_b[0] = _as_gradient(of_a[:-contracted], of_b[0], summed, axes)
        a, b, call = resharded(a, of_a), resharded(b, of_b), self.call
        return contract_rows(
            a, b, contracted, out_dtype=dtype, accumulation=call.accumulation, implementation=call.common
        )


def _gathered_as(of_dx: Entry, w: T, axis: int) -> T:
    """Gathers K of w over the mesh axes that K of dx is not split over: w, and packed, instead of all tokens' dx."""
    axes = axes_of_dims(jax.typeof(w.data if isinstance(w, NVFP4Tensor) else w))
    axes[axis] = without_axes(axes[axis], set(axes_of(axes[axis])) - set(axes_of(of_dx)))
    return resharded(w, axes)


def _high_precision(
    a: jax.Array, b: jax.Array, contracted: tuple[list[int], list[int]], dtype: DTypeLike, axes: Sequence[Entry]
) -> jax.Array:
    """Multiplies original or dequantized operands over axes that leave b one, accumulated in float32."""
    of_a, of_b = (axes_of_dims(jax.typeof(operand)) for operand in (a, b))
    rows = [i for i in range(a.ndim) if i not in contracted[0]]
    (col,) = (j for j in range(b.ndim) if j not in contracted[1])
    over = [of[i] for of, dims in zip((of_a, of_b), contracted, strict=True) for i in dims]
    of_rows, of_b[col] = _as_gradient([of_a[i] for i in rows], of_b[col], over, axes)
    for i, entry in zip(rows, of_rows, strict=True):
        of_a[i] = entry
    for i, j in zip(*contracted, strict=True):
        if of_a[i] is not None and of_b[j] is not None:  # lax.dot_general refuses two that differ
            of_a[i] = of_b[j] = without_axes(of_a[i], set(axes_of(of_b[col])))
    summed = any(entry is not None for entry in over)
    a, b = resharded(a, of_a), resharded(b, of_b)
    # JAX asks for the sharding of a result where it is a sum over an axis of an Explicit mesh.
    sharding = NamedSharding(jax.typeof(a).sharding.mesh, PartitionSpec(*of_rows, of_b[col])) if summed else None
    return product(a, b, contracted, sharding).astype(dtype)


def _as_gradient(of_a: Axes, of_b: Entry, summed: Axes, axes: Sequence[Entry]) -> tuple[Axes, Entry]:
    """Returns the mesh axes for rows of a and of b in a product that will have ``axes``; ``summed`` are those of sums.

    An axis that both have is removed from a where the gradient has it on b's, else from b. Rows that are whole are
    split as those of the gradient, over axes that nothing else is split over: that moves no data, and each device
    computes a part.
    """
    shared = {axis for entry in of_a for axis in axes_of(entry)} & set(axes_of(of_b))
    from_a = shared & set(axes_of(axes[-1]))
    rows = [*(without_axes(entry, from_a) for entry in of_a), without_axes(of_b, shared - from_a)]
    taken = {axis for entry in (*rows, *summed) for axis in axes_of(entry)}
    *of_a, of_b = (without_axes(e, taken) if of is None else of for of, e in zip(rows, axes, strict=True))
    return of_a, of_b
