"""``linear``, the differentiable product of an array with weights."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .._core.tensor import NVFP4Tensor, with_float_scale, with_scale_bytes
from .._native import plans
from .._ops.arguments import (
    Accumulation,
    AmaxPair,
    Implementation,
    as_amax,
    as_float_array,
    as_key,
    check_accumulation,
    check_implementation,
    float_dtype,
    operation,
)
from .._ops.matmul import contract_rows, matmul_nt
from .._ops.quantize import dequantize, quantize, quantize_pair, quantize_pair_rows, quantize_rows, transpose
from .._primitives._base import Axes, axes_of, axes_of_dims, match_varying, resharded, without_axes
from .._primitives._checks import check_parts
from ..recipes import DEFAULT, Recipe
from ..spec import BLOCK, QuantSpec
from .gather import Gather, Placement, as_gather, as_pair, gathered

RESIDUAL_NAME = "nvfp4_residual"
"""The name of what ``linear`` keeps for its gradients, for ``jax.checkpoint_policies.save_only_these_names``."""
BACKWARD_NAME = "nvfp4_backward"
"""The name of that part of it which the gradient GEMMs read; the rest are operands of the forward GEMM."""

WeightAxes = Literal["nk", "kn"]
Weight = jax.Array | NVFP4Tensor  # an NVFP4Tensor is frozen; its scales are bytes within this module
Pair = tuple[NVFP4Tensor | None, NVFP4Tensor | None]  # of x, and of x transposed


class Call(NamedTuple):
    """Holds the static arguments of one linear layer."""

    op: str
    recipe: Recipe
    out_dtype: Any
    accumulation: Accumulation = "fast"
    implementation: str | None = None
    w_axes: WeightAxes = "nk"
    axes: tuple[Any, ...] = (None, None, None)  # mesh axes of x, w and bias by dimension, for their gradients
    dtypes: tuple[Any, ...] = (None, None, None)  # of the same; None has no gradient
    gather: Gather | None = None  # of w [N, K]

    @property
    def gather_t(self) -> Gather | None:
        """Returns where w transposed, [K, N], is kept and read."""
        return None if self.gather is None else self.gather.reversed

    @property
    def common(self) -> Implementation:
        """Returns the implementation of quantizers and gradient GEMMs: a kernel is named for the forward GEMM alone."""
        if self.implementation == "native":
            return "native"
        return "reference" if self.implementation == "reference" else None


@operation
def linear(
    x: ArrayLike,
    w: ArrayLike | NVFP4Tensor,
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
        On an Explicit mesh N must not be sharded over an axis that a leading axis of x is sharded over. An axis of K
        that x does not have is gathered as packed bytes.
      recipe: how each GEMM quantizes its operands (``jnvfp4.recipes``). The default, ``recipes.DEFAULT``, is
        ``recipes.pretrain(stochastic_rounding=False)``: it quantizes all three GEMMs and needs no key.
      bias: [N], any float dtype, added in float32 before the cast.
      key: a JAX PRNG key, needed if the recipe rounds stochastically (``recipe.stochastic``) and otherwise unused. Give
        each layer, each step, each iteration of a loop and each example of vmap its own: a key from outside a loop, or
        a constant of the jitted function, draws the same bits each time, which only ``step_key`` refuses. x, w and dy
        draw from ``jax.random.fold_in(key, i)`` for i = 0, 1, 2. If w is an NVFP4Tensor, only the rounding of x can
        need a key.
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
      w_amax: float32 (), the amax of w for every spec of w with amax scope "tensor" and without ``rht``; larger
        magnitudes saturate. None finds it here.

    Returns:
      [..., N] of ``out_dtype``. The gradients have the dtypes of x, w and bias. The backward pass keeps the quantized
      tensors (for a GEMM in high precision, the original array) under names that policies of jax.checkpoint can save
      (``jnvfp4.remat``). If w is an NVFP4Tensor, it keeps only that.

    Raises:
      ValueError, TypeError: shapes or dtypes do not fit; the message names them.
    """
    op = "linear"
    check_implementation(op, implementation, plans.matmul_kernels())
    check_accumulation(op, accumulation)
    if w_axes not in ("nk", "kn"):
        raise ValueError(f"{op}: w_axes must be 'nk' or 'kn', got {w_axes!r}")
    dtype = None if out_dtype is None else float_dtype(op, "out_dtype", out_dtype)
    call = Call(op, recipe, dtype, accumulation, implementation, w_axes)
    return call_linear(call, x, w, bias, key, as_pair(op, w_gather), w_amax)


def call_linear(
    call: Call,
    x: Any,
    w: Any,
    bias: Any,
    key: Any,
    w_gather: tuple[Placement, Placement] | None = None,
    w_amax: Any = None,
) -> jax.Array:
    """Checks the arguments and flattens the leading axes of x."""
    op, given = call.op, call.recipe
    check_recipe(op, given)
    if isinstance(w, NVFP4Tensor):
        call, w = _frozen(call, w)
    else:
        w = as_float_array(op, "w", w)
    recipe = call.recipe
    w_amax = _checked_amax(op, given, w, w_amax)
    key = recipe_key(op, recipe, key)
    x = as_float_array(op, "x", x)
    bias = None if bias is None else as_float_array(op, "bias", bias)
    if recipe.fprop is not None and recipe.fprop.x is None and x.dtype == jnp.float32:
        raise TypeError(f"{op}: x must be bfloat16 or float16 for a weight-only recipe, got {x.dtype}")
    n, k = _weight_sizes(call, x, w)
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"{op}: bias must have shape (N,)=({n},), got {bias.shape}")
    check_contractions(op, w.shape, n, k, recipe)
    if w_gather is not None:
        call, w = _kept_sharded(call, w, w_gather)
    tokens = x if _keeps_axes(op, x, recipe) else x.reshape(math.prod(x.shape[:-1]), k)
    operands, structure = jax.tree.flatten((tokens, w, bias))
    # Outside the custom derivative, so that its transpose sums gradients over data-parallel devices.
    tokens, w, bias = jax.tree.unflatten(structure, match_varying(*operands, like=(key, w_amax)))
    if call.out_dtype is None:
        call = call._replace(out_dtype=x.dtype)
    of = [v if isinstance(v, jax.Array) else None for v in (tokens, w, bias)]
    call = call._replace(
        axes=tuple(None if v is None else tuple(axes_of_dims(jax.typeof(v))) for v in of),
        dtypes=tuple(None if v is None else v.dtype for v in of),
    )
    _check_axes_of_result(call, tokens, w)
    y = _linear(tokens, w, bias, key, w_amax, call)
    return y.reshape(*x.shape[:-1], n)


def _frozen(call: Call, w: NVFP4Tensor) -> tuple[Call, NVFP4Tensor]:
    """Checks weights that are quantized already; returns them packed, and the call by which they have no gradient."""
    op, given = call.op, call.recipe.fprop
    if given is None:
        raise ValueError(
            f"{op}: recipe.fprop must be a pair for an NVFP4Tensor w, got None; jnvfp4.dequantize gives its values"
        )
    x_spec, w_spec = given
    if call.w_axes != "nk":
        raise ValueError(
            f"{op}: w_axes must be 'nk' for an NVFP4Tensor w, whose blocks run along its last axis, K, got "
            f"{call.w_axes!r}; make it of w [K, N] by quantize(w, transpose=True)"
        )
    if w.format != w_spec.format:
        raise ValueError(
            f"{op}: w must have the format of recipe.fprop.w, {w_spec.format.name}, got {w.format.name}; choose a "
            "recipe whose spec of w has that format"
        )
    check_parts(op, "w", (w.data, w.scale, w.amax), w.format)
    # How w was quantized does not matter any more: neither its blocks nor its rounding.
    fprop = (x_spec, replace(w_spec, block_rows=1, rounding="nearest"))
    return call._replace(recipe=Recipe(fprop, "dequantized", None)), pack(w)


def _kept_sharded(call: Call, w: Any, w_gather: tuple[Placement, Placement]) -> tuple[Call, Any]:
    """Places w as each device keeps it: outside the custom derivative, so that the gradient of w has this place too."""
    if isinstance(w, NVFP4Tensor):
        gather = as_gather(call.op, "w_gather", w_gather, w.data, w.shape, (1, w.format.unit))
        return call._replace(gather=gather), w
    n, k = _blocks_of_w(call.recipe)
    gather = as_gather(call.op, "w_gather", w_gather, w, w.shape, (n, k) if call.w_axes == "nk" else (k, n))
    return call._replace(gather=gather if call.w_axes == "nk" else gather.reversed), gather.constrain(w)


def _blocks_of_w(recipe: Recipe) -> tuple[int, int]:
    """Returns how many elements a block of w has along N and K, at most."""
    fprop, dgrad = recipe.fprop, recipe.dgrad_specs
    along_k = (fprop.w.block_rows, fprop.w.unit) if fprop else (1, 1)
    along_n = (dgrad.w.unit, dgrad.w.block_rows) if dgrad else (1, 1)
    return max(along_k[0], along_n[0]), max(along_k[1], along_n[1])


# ---------------------------------------------------------------- checks
def _checked_amax(op: str, recipe: Recipe, w: Any, w_amax: Any) -> jax.Array | None:
    if w_amax is None:
        return None
    if isinstance(w, NVFP4Tensor):
        raise ValueError(f"{op}: w_amax must be None for an NVFP4Tensor w, which has an amax, got {w_amax!r}")
    if not any(_takes_amax(gemm and gemm.w) for gemm in (recipe.fprop, recipe.dgrad_specs)):
        raise ValueError(
            f'{op}: w_amax must be None, since no spec of w in the recipe has amax_scope "tensor" without rht, got '
            f"{w_amax!r}"
        )
    amax = as_amax(op, w_amax)
    if amax.shape != () or amax.dtype != jnp.float32:
        raise ValueError(f"{op}: w_amax must be float32 of shape (), got {amax.dtype} of shape {amax.shape}")
    return amax


def _takes_amax(spec: QuantSpec | None) -> bool:
    return spec is not None and spec.format.amax_scope == "tensor" and not spec.format.rht


def check_recipe(op: str, recipe: Any) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{op}: recipe must be a Recipe, got {recipe!r}")


def recipe_key(op: str, recipe: Recipe, key: Any) -> jax.Array | None:
    """Returns the key if the recipe needs one, else None."""
    if not recipe.stochastic:
        return None
    if key is None:
        raise ValueError(f"{op}: key must be a JAX PRNG key, since the recipe rounds stochastically, got None")
    return as_key(op, key)


def _weight_sizes(call: Call, x: jax.Array, w: Weight) -> tuple[int, int]:
    """Returns N and K."""
    if w.ndim != 2:
        names = "[N, K]" if call.w_axes == "nk" else "[K, N]"
        raise ValueError(f"{call.op}: w must have rank 2, {names}, got w.shape={w.shape}")
    n, k = w.shape if call.w_axes == "nk" else w.shape[::-1]
    if x.ndim < 1 or x.shape[-1] != k:
        which = "last" if call.w_axes == "nk" else "first"
        raise ValueError(
            f"{call.op}: the last axis of x and the {which} axis of w must have the same size K, "
            f"got x.shape={x.shape}, w.shape={w.shape}"
        )
    return n, k


def check_contractions(op: str, w_shape: tuple[int, ...], n: int, k: int, recipe: Recipe) -> None:
    unit = _unit_of_k(recipe)
    if k % unit:
        raise ValueError(
            f"{op}: K must be a multiple of {unit}, got K={k} in w.shape={w_shape}; pad K of x and w to {_up(k, unit)}"
        )
    for reason, unit in _needs_of_n(recipe):
        if n % unit:
            raise ValueError(
                f"{op}: N must be a multiple of {unit}, since {reason}, got N={n} in w.shape={w_shape}; "
                f"pad N to {_up(n, unit)} or choose another recipe"
            )


def _needs_of_n(recipe: Recipe) -> list[tuple[str, int]]:
    """Lists what N must be a multiple of, and why."""
    needs = [("recipe.dgrad contracts over it", _unit(recipe.dgrad_specs))]
    if recipe.fprop is not None and recipe.fprop.w.block_rows == BLOCK:
        needs.append(("recipe.fprop quantizes w in 16x16 tiles", BLOCK))
    if recipe.wgrad_specs and recipe.wgrad_specs.dy.block_rows == BLOCK:
        needs.append(("recipe.wgrad quantizes dy in 16x16 tiles", BLOCK))
    return needs


def _unit_of_k(recipe: Recipe) -> int:
    """Returns what K must be a multiple of: fprop contracts over it, and the other GEMMs may have tiles along it."""
    dgrad, wgrad = recipe.dgrad_specs, recipe.wgrad_specs
    tiled = [spec.block_rows for spec in (dgrad and dgrad.w, wgrad and wgrad.x) if spec is not None]
    return max(_unit(recipe.fprop), *tiled, 1)


def units(recipe: Recipe) -> tuple[int, int]:
    """Returns the numbers that N and K must be multiples of."""
    return max(unit for _, unit in _needs_of_n(recipe)), _unit_of_k(recipe)


def _keeps_axes(op: str, x: jax.Array, recipe: Recipe) -> bool:
    """Says whether the leading axes of x stay apart, since XLA cannot merge axes that are sharded.

    They are flattened where a block of tokens would be in two of them. An Explicit mesh allows that only if the first
    alone is sharded.
    """
    unit = _unit_of_tokens(recipe)
    if x.ndim > 2 and x.size and x.shape[-2] % unit == 0:
        return True
    if any(entry is not None for entry in axes_of_dims(jax.typeof(x))[1:-1]):
        raise ValueError(
            f"{op}: where a leading axis of x other than the first is sharded on an Explicit mesh, the last leading "
            f"axis must be a multiple of {unit}, since recipe has blocks along it, got {jax.typeof(x)}; pad x, or "
            "reshard it"
        )
    return False


def _check_axes_of_result(call: Call, x: jax.Array, w: Weight) -> None:
    """Refuses an axis of an Explicit mesh that the result would have twice, as ``lax.dot_general`` does."""
    of_w = jax.typeof(w.data if isinstance(w, NVFP4Tensor) else w)
    of_n, which = axes_of_dims(of_w)[0 if call.w_axes == "nk" else 1], f"w {of_w}"
    if call.gather is not None:
        of_n, which = call.gather.gathered[0], f"w_gather.gathered, {PartitionSpec(*call.gather.gathered)} of [N, K]"
        of_n = () if of_n is PartitionSpec.UNCONSTRAINED else of_n
    rows = {axis for entry in axes_of_dims(jax.typeof(x))[:-1] for axis in axes_of(entry)}
    shared = [axis for axis in axes_of(of_n) if axis in rows]
    if shared:
        raise ValueError(
            f"{call.op}: the leading axes of x and N of w must be sharded over different axes of an Explicit mesh, got "
            f"{shared[0]!r} for both, in x {jax.typeof(x)} and {which}; gather w by w_gather, or shard it along K, "
            "over which its packed bytes are gathered"
        )


def _unit_of_tokens(recipe: Recipe) -> int:
    """Returns how many tokens a block of any GEMM takes."""
    fprop, dgrad = recipe.fprop, recipe.dgrad_specs
    tiled = [spec.block_rows for spec in (fprop and fprop.x, dgrad and dgrad.dy) if spec is not None]
    return max(_unit(recipe.wgrad_specs), *tiled, 1)


def _unit(specs: tuple[QuantSpec | None, QuantSpec] | None) -> int:
    """Returns the number that the contracted axis of a GEMM is a multiple of; 1 for a GEMM in high precision."""
    return max((spec.unit for spec in specs or () if spec is not None), default=1)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


# ---------------------------------------------------------------- operands
X, W, DY = range(3)  # operands, for their keys


@partial(jax.jit, static_argnums=1, inline=True)  # an eager call transfers no constants
def _pad_rows(x: jax.Array, unit: int) -> jax.Array:
    """Adds zero rows up to a multiple of ``unit``: zeros add nothing to a sum."""
    return jnp.pad(x, ((0, _up(x.shape[0], unit) - x.shape[0]), (0, 0))) if x.shape[-2] % unit else x


def _crop_rows(t: NVFP4Tensor, rows: int) -> NVFP4Tensor:
    if t.data.shape[0] == rows:
        return t
    return jax.tree.map(lambda part: lax.slice_in_dim(part, 0, rows) if part.ndim else part, t)


@partial(jax.jit, static_argnums=1, inline=True)
def _fold_in(key: jax.Array, operand: int) -> jax.Array:
    return jax.random.fold_in(key, operand)


class Quantizer(NamedTuple):
    """Quantizes the operands of one call."""

    key: jax.Array | None
    implementation: Implementation

    def operand_key(self, operand: int, *specs: QuantSpec) -> jax.Array | None:
        if self.key is None or all(spec.rounding == "nearest" for spec in specs):
            return None
        return _fold_in(self.key, operand)

    def one(
        self, x: jax.Array, spec: QuantSpec, operand: int, transpose: bool = False, amax: jax.Array | None = None
    ) -> NVFP4Tensor:
        key = self.operand_key(operand, spec)
        options: Any = {"amax": amax, "key": key, "transpose": transpose, "implementation": self.implementation}
        return quantize(x, spec, **options) if x.ndim == 2 else quantize_rows(x, spec, x.ndim - 1, **options)

    def rows(self, x: jax.Array, spec: QuantSpec, operand: int, amax: jax.Array | None = None) -> NVFP4Tensor:
        """Quantizes x [M, K] along K, for any M, or x [*rows, K] whose rows need no zeros."""
        return _crop_rows(self.one(_pad_rows(x, spec.block_rows), spec, operand, amax=amax), x.shape[0])

    def both(
        self,
        x: jax.Array,
        row_spec: QuantSpec | None,
        col_spec: QuantSpec | None,
        unit: int,
        operand: int,
        amax: AmaxPair = (None, None),
    ) -> Pair:
        """Quantizes x along K and along its rows, by the specs.

        Rows are those of x [M, K] with zeros up to a multiple of ``unit``, or those of x [*rows, K], which needs none.
        """
        if row_spec is None or col_spec is None:
            row = None if row_spec is None else self.rows(x, row_spec, operand, amax[0])
            if col_spec is None:
                return row, None
            return row, self.one(_pad_rows(x, unit), col_spec, operand, transpose=True, amax=amax[1])
        key = self.operand_key(operand, row_spec, col_spec)
        options: Any = {"amax": amax, "key": key, "implementation": self.implementation}
        if x.ndim > 2:
            return quantize_pair_rows(x, row_spec, col_spec, x.ndim - 1, **options)
        row, col = quantize_pair(_pad_rows(x, unit), row_spec, col_spec, **options)
        return _crop_rows(row, x.shape[0]), col

    def weights(
        self,
        w: jax.Array,
        w_axes: WeightAxes,
        fprop: QuantSpec | None,
        dgrad: QuantSpec | None,
        amax: jax.Array | None,
    ) -> Pair:
        """Quantizes w along K, [N, K], and along N, [K, N]: for "kn" the second is the orientation of the array."""
        specs = (fprop, dgrad) if w_axes == "nk" else (dgrad, fprop)
        of_first, of_second = (amax if _takes_amax(spec) else None for spec in specs)
        first, second = self.both(w, *specs, 1, W, (of_first, of_second))
        return (first, second) if w_axes == "nk" else (second, first)


def save(t: Any) -> Any:
    """Names what the backward pass needs: an array, or the parts of a quantized tensor, its scales as bytes."""
    return unpack(jax.tree.map(lambda v: checkpoint_name(v, RESIDUAL_NAME), pack(t)))


def save_for_backward(t: Any) -> Any:
    """Names what is saved for the backward pass alone or in place of more."""
    return unpack(jax.tree.map(lambda v: checkpoint_name(v, BACKWARD_NAME), pack(t)))


def pack(t: Any) -> Any:
    """Views scales as bytes: jax.checkpoint rounds the floats it saves by IEEE rules, where E4M3 256 is infinite."""
    return with_scale_bytes(t) if isinstance(t, NVFP4Tensor) else t


def unpack(t: Any) -> Any:
    return with_float_scale(t) if isinstance(t, NVFP4Tensor) else t


# ---------------------------------------------------------------- the GEMMs
@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _linear(x: jax.Array, w: Weight, bias: Any, key: Any, w_amax: Any, call: Call) -> jax.Array:
    if call.recipe.fprop is None:
        assert not isinstance(w, NVFP4Tensor)
        return _unquantized(call, x, w, bias)
    x_spec, w_spec = call.recipe.fprop
    quantizer = Quantizer(key, call.common)
    qx = x if x_spec is None else quantizer.rows(x, x_spec, X)
    if isinstance(w, NVFP4Tensor):
        return _product(call, save(qx), gathered(unpack(w), call.gather), bias)
    qw, _ = quantizer.weights(w, call.w_axes, w_spec, None, w_amax)
    assert qw is not None
    return _product(call, save(qx), gathered(save(qw), call.gather), bias)


def _unquantized(call: Call, x: jax.Array, w: jax.Array, bias: Any) -> jax.Array:
    """Computes y in high precision, from x and w as the caller passed them."""
    contracted = ([x.ndim - 1], [1 if call.w_axes == "nk" else 0])
    if call.gather is not None:
        w = (call.gather if call.w_axes == "nk" else call.gather.reversed).read(w)
    y = _high_precision(x, w, contracted, call.out_dtype if bias is None else jnp.float32, [None] * x.ndim)
    if bias is None:
        return y
    return (y + bias.astype(jnp.float32)[(None,) * (y.ndim - 1)]).astype(call.out_dtype)


def _product(call: Call, qx: Any, qw: NVFP4Tensor, bias: Any) -> jax.Array:
    """Runs the forward GEMM, of w as it is read."""
    return matmul_nt(
        qx,
        qw,
        out_dtype=call.out_dtype,
        bias=bias,
        accumulation=call.accumulation,
        implementation=call.implementation,
    )


def _forward(x: jax.Array, w: Weight, bias: Any, key: Any, w_amax: Any, call: Call) -> tuple[jax.Array, Any]:
    if isinstance(w, NVFP4Tensor):
        # w is an argument, which a policy that saves residuals by their name need not copy.
        return _linear(x, w, bias, key, w_amax, call), (None, w, key)
    recipe, quantizer = call.recipe, Quantizer(key, call.common)
    dgrad, wgrad = recipe.dgrad_specs, recipe.wgrad_specs
    of_x, of_w = recipe.fprop or (None, None)
    x_row, x_t = quantizer.both(x, of_x, wgrad and wgrad.x, _unit(wgrad), X)
    of_w_t = None if _reads_one_weight(call) else dgrad and dgrad.w
    w_row, w_t = quantizer.weights(w, call.w_axes, of_w, of_w_t, w_amax)
    # Named before they are gathered, so that a checkpoint policy saves the quantizers' work, and the part of a device.
    qx, kept = save(x if x_row is None else x_row), w_row and save(w_row)
    of_backward = save(w_t) if w_t is not None else save(w) if recipe.dgrad is None else None
    if of_backward is None:
        kept = kept and save_for_backward(kept)
    qw = kept and gathered(kept, call.gather)
    w_saved = qw if of_backward is None else save_for_backward(of_backward)
    x_saved = save_for_backward(save(x_t) if x_t is not None else save(x) if recipe.wgrad is None else qx)
    y = _unquantized(call, x, w, bias) if qw is None else _product(call, qx, qw, bias)
    return y, (pack(x_saved), pack(w_saved), key)


def _reads_one_weight(call: Call) -> bool:
    """Says whether dx is computed from the weight that the forward GEMM read, transposed, so that it is gathered once.

    The transpose of nearest values in 16x16 tiles has the bytes that the quantizer would give.
    """
    fprop, dgrad = call.recipe.fprop, call.recipe.dgrad_specs
    if call.gather is None or fprop is None or dgrad is None or fprop.w != dgrad.w:
        return False
    spec = fprop.w
    return (spec.block_rows, spec.select) == (BLOCK, "max6")


def _backward(call: Call, residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    *saved, key = residuals
    of_x, of_w, of_bias = call.dtypes
    x_saved, w_saved = map(unpack, saved)
    if of_w is None:
        w_saved = gathered(w_saved, call.gather)
    dgrad, wgrad = call.recipe.dgrad_specs, call.recipe.wgrad_specs
    quantizer = Quantizer(key, call.common)
    dy_row, dy_t = quantizer.both(dy, dgrad and dgrad.dy, wgrad and wgrad.dy, _unit(wgrad), DY)
    dx = _dgrad(call, dy if dy_row is None else dy_row, w_saved, of_x)
    dw = None if of_w is None else _wgrad(call, dy if dy_t is None else dy_t, x_saved, of_w)
    db = None if of_bias is None else _sum_of_rows(dy).astype(of_bias)
    gradients = zip((dx, dw, db), call.axes, strict=True)
    return *(g if g is None else resharded(g, axes) for g, axes in gradients), None, None


def _sum_of_rows(dy: jax.Array) -> jax.Array:
    return jnp.sum(dy.astype(jnp.float32), tuple(range(dy.ndim - 1)))


def _dgrad(call: Call, dy: Any, w: Any, dtype: Any) -> jax.Array:
    """Computes dx [..., K] from dy [..., N] and w: quantized along N, quantized along K, or as the caller passed it."""
    if isinstance(dy, NVFP4Tensor):
        if _reads_one_weight(call):
            assert call.recipe.fprop is not None
            w = transpose(w, call.recipe.fprop.w, implementation=call.common)
        else:
            w = gathered(w, call.gather_t)
        w = _gathered_as(call.axes[0][-1], w, 0)
        return _gradient(call, dy, w, 1, dtype, call.axes[0])
    axis = 0 if isinstance(w, NVFP4Tensor) or call.w_axes == "nk" else 1
    w = _gathered_as(call.axes[0][-1], w, 1 - axis)
    return _high_precision(dy, _dense(w, dy.dtype, call.common), ([dy.ndim - 1], [axis]), dtype, call.axes[0])


def _gathered_as(of_dx: Any, w: Any, axis: int) -> Any:
    """Gathers K of w over the mesh axes that K of dx is not split over: w, and packed, instead of all tokens' dx."""
    axes = axes_of_dims(jax.typeof(w.data if isinstance(w, NVFP4Tensor) else w))
    axes[axis] = without_axes(axes[axis], set(axes_of(axes[axis])) - set(axes_of(of_dx)))
    return resharded(w, axes)


def _wgrad(call: Call, dy: Any, x: Any, dtype: Any) -> jax.Array:
    """Computes dw in the axes of w, from dy and x; both are quantized along their rows or neither is."""
    if isinstance(dy, NVFP4Tensor):
        return _gradient(call, *_in_order(call, dy, x), dy.data.ndim - 1, dtype, call.axes[1])
    first, second = _in_order(call, dy, _dense(x, dy.dtype, call.common))
    rows = list(range(dy.ndim - 1))
    return _high_precision(first, second, (rows, rows), dtype, call.axes[1])


def _in_order(call: Call, dy: Any, x: Any) -> tuple[Any, Any]:
    """Orders the operands of wgrad as the axes of w."""
    return (dy, x) if call.w_axes == "nk" else (x, dy)


def _gradient(call: Call, a: NVFP4Tensor, b: NVFP4Tensor, contracted: int, dtype: Any, axes: Axes) -> jax.Array:
    """Multiplies over the last ``contracted`` axes of each; ``axes`` are mesh axes that the gradient will have."""
    of_a, of_b = (axes_of_dims(jax.typeof(t.data)) for t in (a, b))
    summed = of_a[-contracted:] + of_b[1:]
    of_a[:-contracted], of_b[0] = _as_gradient(of_a[:-contracted], of_b[0], summed, axes)
    a, b = resharded(a, of_a), resharded(b, of_b)
    if contracted == 1:
        return matmul_nt(a, b, out_dtype=dtype, accumulation=call.accumulation, implementation=call.common)
    options: Any = {"out_dtype": dtype, "accumulation": call.accumulation, "implementation": call.common}
    return contract_rows(a, b, contracted, **options)


def _dense(t: Any, dtype: Any, implementation: Implementation) -> jax.Array:
    return dequantize(t, dtype, implementation=implementation) if isinstance(t, NVFP4Tensor) else t


def _high_precision(
    a: jax.Array, b: jax.Array, contracted: tuple[list[int], list[int]], dtype: Any, axes: Axes
) -> jax.Array:
    """Multiplies original or dequantized operands over axes that leave b one, accumulated in float32."""
    common = a.dtype if a.dtype == b.dtype else jnp.float32  # also where jax.numpy_dtype_promotion is strict
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
    product = lax.dot_general(
        a.astype(common),
        b.astype(common),
        (contracted, ((), ())),
        precision=lax.Precision.HIGHEST,  # float32 operands stay float32, never TF32
        preferred_element_type=jnp.float32,
        out_sharding=sharding,
    )
    return product.astype(dtype)


def _as_gradient(of_a: Axes, of_b: Any, summed: Axes, axes: Axes) -> tuple[Axes, Any]:
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


_linear.defvjp(_forward, _backward)
