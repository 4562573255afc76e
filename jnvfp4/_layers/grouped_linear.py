"""``grouped_linear``, the differentiable product of groups of rows with weights of their own, and ``RaggedDot``."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .._core.tensor import NVFP4Tensor
from .._native import plans
from .._ops.arguments import (
    Implementation,
    as_float_array,
    as_group_sizes,
    check_implementation,
    float_dtype,
    operation,
)
from .._ops.matmul import grouped_matmul_nt
from .._ops.quantize import dequantize, quantize, quantize_pair, transpose
from .._primitives._base import axes_of_dims, bind, match_varying, resharded
from .._primitives._checks import check_parts
from .._primitives._groups import Rows, check_sizes, rows_of
from .._primitives.grouped_contract import grouped_contract_p
from .._primitives.grouped_dot import GroupedDotParams, grouped_dot_p
from ..recipes import DEFAULT, Recipe
from ..spec import BLOCK, QuantSpec
from .dot_general import check_options, dtype_of_lax
from .keys import layer_key, needs_key
from .linear import (
    DY,
    Pair,
    Quantizer,
    W,
    WeightAxes,
    X,
    check_contractions,
    check_recipe,
    pack,
    recipe_key,
    save,
    save_for_backward,
    units,
    unpack,
)

Weight = jax.Array | NVFP4Tensor  # an NVFP4Tensor is frozen, and packed within this module


class Call(NamedTuple):
    """Holds the static arguments of one grouped linear layer."""

    op: str
    recipe: Recipe
    out_dtype: Any
    implementation: str | None = None
    w_axes: WeightAxes = "nk"
    axes: tuple[Any, Any] = (None, None)  # mesh axes of x and w by dimension, for their gradients
    dtypes: tuple[Any, Any] = (None, None)  # of the same; None has no gradient

    @property
    def common(self) -> Implementation:
        """Returns the implementation of quantizers and gradients: a kernel is named for the forward product alone."""
        if self.implementation == "native":
            return "native"
        return "reference" if self.implementation == "reference" else None

    @property
    def k_axis(self) -> int:
        """Returns the axis of w that the forward product contracts."""
        return 2 if self.w_axes == "nk" else 1


@operation
def grouped_linear(
    x: ArrayLike,
    w: ArrayLike | NVFP4Tensor,
    group_sizes: ArrayLike,
    recipe: Recipe = DEFAULT,
    *,
    key: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
    w_axes: WeightAxes = "nk",
) -> jax.Array:
    """Computes x w^T with weights of its own for each group of rows, from quantized operands, with gradients.

    Args:
      x: [M, K], float32, bfloat16 or float16: the tokens of all experts, those of expert 0 first, then those of
        expert 1, and so on. What rows beyond the groups hold changes nothing, not even an amax.
      w: [G, N, K], or [G, K, N] for ``w_axes="kn"``, float32, bfloat16 or float16: the weights of each expert, which
        is quantized alone. K and N must be multiples of 16. Or an NVFP4Tensor [G, N, K] with any N, in the format of
        ``recipe.fprop.w``: weights that stay as they are, as in ``linear``.
      group_sizes: int32 [G], as in ``grouped_matmul_nt``.
      recipe: as in ``linear``; no spec of fprop or dgrad may have amax scope "window64". Its wgrad is not quantized,
        because blocks of 16 rows would cross experts: a pair of specs there means None.
      key: as in ``linear``. Expert g draws from ``jax.random.fold_in(k, g)``, where k is the key that ``linear`` would
        use for w. Inside ``jax.shard_map`` g counts the experts of one device: fold its index into the key.
      out_dtype: float32, bfloat16 or float16; the dtype of x if None.
      implementation: as in ``quantize``; or the name of a kernel of ``grouped_matmul_nt``, for the forward product,
        which ``recipe.fprop`` must then quantize.
      w_axes: "nk" or "kn", as in ``linear``.

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
    if w_axes not in ("nk", "kn"):
        raise ValueError(f"{op}: w_axes must be 'nk' or 'kn', got {w_axes!r}")
    dtype = None if out_dtype is None else float_dtype(op, "out_dtype", out_dtype)
    check_recipe(op, recipe)
    if recipe.fprop is None and implementation in plans.grouped_kernels():
        raise ValueError(
            f"{op}: implementation must be None, 'native' or 'reference' where recipe.fprop is None, got "
            f"{implementation!r}; no kernel of grouped_matmul_nt computes a product in high precision"
        )
    call = Call(op, _without_wgrad(recipe), dtype, implementation, w_axes)
    return _call_grouped(call, x, w, group_sizes, key)


def _without_wgrad(recipe: Recipe) -> Recipe:
    return Recipe(recipe.fprop, recipe.dgrad, None) if recipe.wgrad_specs else recipe


def _call_grouped(call: Call, x: Any, w: Any, group_sizes: Any, key: Any) -> jax.Array:
    """Checks the arguments."""
    op = call.op
    if isinstance(w, NVFP4Tensor):
        call, w = _frozen(call, w)
    else:
        w = as_float_array(op, "w", w)
    _check_scopes(op, call.recipe)
    key = recipe_key(op, call.recipe, key)
    x, sizes = as_float_array(op, "x", x), as_group_sizes(op, group_sizes)
    if call.recipe.fprop is not None and call.recipe.fprop.x is None and x.dtype == jnp.float32:
        raise TypeError(f"{op}: x must be bfloat16 or float16 for a weight-only recipe, got {x.dtype}")
    n, k = _weight_sizes(call, x, w)
    check_sizes(op, sizes, w.shape[0])
    check_contractions(op, w.shape, n, k, call.recipe)
    operands, structure = jax.tree.flatten((x, w, sizes))
    # Outside the custom derivative, so that its transpose sums gradients over data-parallel devices.
    x, w, sizes = jax.tree.unflatten(structure, match_varying(*operands, like=key))
    sizes = resharded(sizes, [None])  # where a group begins depends on all sizes before it
    frozen = isinstance(w, NVFP4Tensor)
    call = call._replace(
        out_dtype=call.out_dtype or x.dtype,
        axes=(tuple(axes_of_dims(jax.typeof(x))), None if frozen else tuple(axes_of_dims(jax.typeof(w)))),
        dtypes=(x.dtype, None if frozen else w.dtype),
    )
    return _grouped(x, w, sizes, key, call)


def _frozen(call: Call, w: NVFP4Tensor) -> tuple[Call, NVFP4Tensor]:
    """Checks weights that are quantized already; returns them packed, and the call by which they have no gradient."""
    op, given = call.op, call.recipe.fprop
    if given is None:
        raise ValueError(
            f"{op}: recipe.fprop must be a pair for an NVFP4Tensor w, got None; jnvfp4.dequantize gives its values"
        )
    if call.w_axes != "nk":
        raise ValueError(
            f"{op}: w_axes must be 'nk' for an NVFP4Tensor w, whose blocks run along its last axis, K, got "
            f"{call.w_axes!r}; make it of w [G, K, N] by jax.vmap of quantize(w, transpose=True)"
        )
    if w.format != given.w.format:
        raise ValueError(
            f"{op}: w must have the format of recipe.fprop.w, {given.w.format.name}, got {w.format.name}; choose a "
            "recipe whose spec of w has that format"
        )
    check_parts(op, "w", (w.data, w.scale, w.amax), w.format)
    fprop = (given.x, replace(given.w, block_rows=1, rounding="nearest"))
    return call._replace(recipe=Recipe(fprop, "dequantized", None)), pack(w)


def _check_scopes(op: str, recipe: Recipe) -> None:
    for gemm in ("fprop", "dgrad"):
        specs = getattr(recipe, gemm)
        for spec in specs if isinstance(specs, tuple) else ():
            if spec is not None and spec.format.amax_scope == "window64":
                raise ValueError(
                    f'{op}: recipe.{gemm} must have amax_scope "tensor" or "row", got "window64", whose amaxes change '
                    "along the axis that is contracted; choose another recipe"
                )


def _weight_sizes(call: Call, x: jax.Array, w: Weight) -> tuple[int, int]:
    """Returns N and K."""
    if w.ndim != 3:
        names = "[G, N, K]" if call.w_axes == "nk" else "[G, K, N]"
        raise ValueError(f"{call.op}: w must have rank 3, {names}, got w.shape={w.shape}")
    if not w.shape[0]:
        raise ValueError(f"{call.op}: w must have one expert or more, got w.shape={w.shape}")
    if x.ndim != 2:
        raise ValueError(f"{call.op}: x must have rank 2, [M, K], got x.shape={x.shape}; flatten tokens first, or vmap")
    n, k = w.shape[1:] if call.w_axes == "nk" else w.shape[:0:-1]
    if x.shape[1] != k:
        raise ValueError(
            f"{call.op}: the last axis of x and axis {call.k_axis} of w must have the same size K, "
            f"got x.shape={x.shape}, w.shape={w.shape}"
        )
    return n, k


# ---------------------------------------------------------------- operands
@partial(jax.jit, inline=True)  # an eager call transfers no constants
def _masked(x: jax.Array, rows: Rows) -> jax.Array:
    """Returns x with zeros in the rows that no group holds, so that what they have is in no amax and in no sum."""
    return jnp.where(rows.held(x.shape[0]), x, jnp.zeros((), x.dtype))


def _weights(
    call: Call, w: jax.Array, key: jax.Array | None, along_k: QuantSpec | None, along_n: QuantSpec | None
) -> Pair:
    """Quantizes each expert along K, [G, N, K], and along N, [G, K, N], by the specs that are wanted."""
    specs = (along_k, along_n) if call.w_axes == "nk" else (along_n, along_k)
    quantizer = Quantizer(key, call.common)
    base = quantizer.operand_key(W, *(spec for spec in specs if spec is not None))
    experts = resharded(jnp.arange(w.shape[0], dtype=jnp.uint32), axes_of_dims(jax.typeof(w)))
    keys = None if base is None else jax.vmap(lambda g: jax.random.fold_in(base, g))(experts)

    def of_expert(w: jax.Array, key: jax.Array | None) -> Pair:
        first, second = specs
        if first is not None and second is not None:
            return quantize_pair(w, first, second, key=key, implementation=call.common)
        if first is not None:
            return quantize(w, first, key=key, implementation=call.common), None
        if second is not None:
            return None, quantize(w, second, key=key, transpose=True, implementation=call.common)
        return None, None

    if specs == (None, None):
        return None, None
    first, second = jax.vmap(of_expert)(w, keys)
    return (first, second) if call.w_axes == "nk" else (second, first)


def _reads_one_weight(recipe: Recipe) -> bool:
    """Says whether dx reads the weights of the forward product, transposed: that has the quantizer's bytes."""
    fprop, dgrad = recipe.fprop, recipe.dgrad_specs
    if fprop is None or dgrad is None or fprop.w != dgrad.w:
        return False
    spec = fprop.w
    return (spec.block_rows, spec.select) == (BLOCK, "max6")


# ---------------------------------------------------------------- the products
@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _grouped(x: jax.Array, w: Weight, sizes: jax.Array, key: Any, call: Call) -> jax.Array:
    forward_alone = Recipe(call.recipe.fprop, None, None)
    return _forward(x, w, sizes, key, call._replace(recipe=forward_alone))[0]


def _forward(x: jax.Array, w: Weight, sizes: jax.Array, key: Any, call: Call) -> tuple[jax.Array, Any]:
    recipe, rows = call.recipe, rows_of(sizes, x.shape[0])
    x = _masked(x, rows)
    quantizer = Quantizer(key, call.common)
    of_x, of_w = recipe.fprop or (None, None)
    dgrad = recipe.dgrad_specs
    qx = save(x if of_x is None else quantizer.rows(x, of_x, X))
    if isinstance(w, NVFP4Tensor):
        return _product(call, qx, unpack(w), sizes), (None, w, sizes, key)
    one = _reads_one_weight(recipe)
    w_row, w_t = _weights(call, w, key, of_w, None if one else dgrad and dgrad.w)
    qw = w_row and save(w_row)
    kept_w = w_t if w_t is not None else w if recipe.dgrad is None else None
    w_saved = save_for_backward(qw if kept_w is None else save(kept_w))
    x_saved = save_for_backward(save(x) if recipe.wgrad is None else qx)
    if qw is None:
        y = _dot(x, w, rows, call.k_axis, call.out_dtype)
    else:
        y = _product(call, qx, qw, sizes)
    return y, (pack(x_saved), pack(w_saved), sizes, key)


def _product(call: Call, qx: Any, qw: NVFP4Tensor, sizes: jax.Array) -> jax.Array:
    return grouped_matmul_nt(qx, qw, sizes, out_dtype=call.out_dtype, implementation=call.implementation)


def _dot(a: jax.Array, b: jax.Array, rows: Rows, b_axis: int, dtype: Any) -> jax.Array:
    """Multiplies in high precision."""
    return bind(grouped_dot_p, a, b, *rows, params=GroupedDotParams(b_axis, jnp.dtype(dtype)), implementation=None)[0]


def _backward(call: Call, residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    *saved, sizes, key = residuals
    x_saved, w_saved = map(unpack, saved)
    rows = rows_of(sizes, dy.shape[0])
    dy = _masked(dy, rows)
    dgrad = call.recipe.dgrad_specs
    dx = _dgrad(call, dy if dgrad is None else Quantizer(key, call.common).rows(dy, dgrad.dy, DY), w_saved, sizes, rows)
    dx = resharded(dx, call.axes[0])
    if call.dtypes[1] is None:
        return dx, None, None, None
    dw = _wgrad(call, dy, x_saved, rows).astype(call.dtypes[1])
    return dx, resharded(dw, call.axes[1]), None, None


def _dgrad(call: Call, dy: Any, w: Any, sizes: jax.Array, rows: Rows) -> jax.Array:
    """Computes dx [M, K] from dy [M, N] and w: quantized along N, quantized along K, or as the caller passed it."""
    dtype = call.dtypes[0]
    if isinstance(dy, NVFP4Tensor):
        if _reads_one_weight(call.recipe):
            assert call.recipe.fprop is not None
            w = transpose(w, call.recipe.fprop.w, implementation=call.common)
        return grouped_matmul_nt(dy, w, sizes, out_dtype=dtype, implementation=call.common)
    if isinstance(w, NVFP4Tensor):
        return _dot(dy, dequantize(w, dy.dtype, implementation=call.common), rows, 1, dtype)
    return _dot(dy, w, rows, 3 - call.k_axis, dtype)


def _wgrad(call: Call, dy: jax.Array, x: Any, rows: Rows) -> jax.Array:
    """Computes dw in the axes of w, float32: the products of rows of dy and x, summed over the rows of each group."""
    if isinstance(x, NVFP4Tensor):
        x = dequantize(x, dy.dtype, implementation=call.common)
    a, b = (dy, x) if call.w_axes == "nk" else (x, dy)
    return bind(grouped_contract_p, a, b, *rows, params=None, implementation=None)[0]


_grouped.defvjp(_forward, _backward)


# ---------------------------------------------------------------- the sibling of DotGeneral
@dataclass(frozen=True)
class RaggedDot:
    """Stands in for ``jax.lax.ragged_dot`` where model code takes one, and multiplies by a recipe.

    It holds no arrays and compares by value, so it can be an attribute of a module or a static argument of jit.

    Attributes:
      recipe: how each product quantizes its operands, as in ``jnvfp4.grouped_linear``.
      path: the name of the layer in its model. A layer that rounds stochastically draws its random bits by
        ``layer_key(path)`` where no key is passed.
    """

    recipe: Recipe = DEFAULT
    path: str | None = None

    def __post_init__(self) -> None:
        check_recipe("RaggedDot", self.recipe)
        if self.path is not None and not isinstance(self.path, str):
            raise TypeError(f"RaggedDot: path must be a string or None, got {self.path!r}")

    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike | NVFP4Tensor,
        group_sizes: ArrayLike,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        group_offset: Any = None,
        *,
        key: jax.Array | None = None,
        **unsupported: Any,
    ) -> jax.Array:
        """Computes ``jax.lax.ragged_dot`` by ``grouped_linear``, with zeros added where K or N needs them.

        Args:
          lhs: [M, K], as x of ``jnvfp4.grouped_linear``.
          rhs: [G, K, N], as w of ``grouped_linear`` with ``w_axes="kn"``. Or an NVFP4Tensor [G, N, K].
          group_sizes: int32 [G].
          precision: only None or the default, because the operands are quantized.
          preferred_element_type: the dtype of the result; that of ``lax.ragged_dot`` if None.
          group_offset: must be None, as ``lax.ragged_dot`` has it too.
          key: as in ``grouped_linear``. If it is None and the recipe rounds stochastically, ``layer_key(path)``.
          **unsupported: newer arguments of ``lax.ragged_dot``; each must be None.

        Returns:
          [M, N].

        Raises:
          ValueError, TypeError: operands or arguments do not fit; the message names them.
        """
        op = "RaggedDot" if self.path is None else f"RaggedDot of layer {self.path!r}"
        check_options(op, self.recipe, precision, None, {"group_offset": group_offset, **unsupported})
        recipe = _without_wgrad(self.recipe)
        if key is None and recipe.stochastic:
            if self.path is None:
                raise needs_key(op, "RaggedDot(recipe, path=...) has a path that no other layer has")
            key = layer_key(self.path)
        x = as_float_array(op, "lhs", lhs)
        if isinstance(rhs, NVFP4Tensor):
            dtype = float_dtype(op, "preferred_element_type", preferred_element_type or x.dtype)
            return _call_grouped(Call(op, recipe, dtype), x, rhs, group_sizes, key)
        w = as_float_array(op, "rhs", rhs)
        dtype = float_dtype(op, "preferred_element_type", preferred_element_type or dtype_of_lax(x, w))
        call = Call(op, recipe, dtype, w_axes="kn")
        if w.ndim != 3 or x.ndim != 2:
            return _call_grouped(call, x, w, group_sizes, key)  # raises
        n = w.shape[2]
        unit_n, unit_k = units(recipe)
        more_n, more_k = -n % unit_n, -x.shape[1] % unit_k
        if more_n or more_k:
            x, w = jnp.pad(x, ((0, 0), (0, more_k))), jnp.pad(w, ((0, 0), (0, more_k), (0, more_n)))
        y = _call_grouped(call, x, w, group_sizes, key)
        return y[:, :n] if more_n else y
