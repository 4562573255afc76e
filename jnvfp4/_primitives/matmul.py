"""nvfp4_matmul: (a parts, b parts, bias?, gain?) -> a b^T.

``a`` is three operands (data, scale, amax), or one 16-bit array when ``params.a`` is None. ``b`` is three operands. A
gain asks for the norm of a, and has ``params.epsilon`` with it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from .._core.mesh import Axes, Entry, Shape, axes_of, axes_of_dims, typed
from ._base import Backend, Body, Partition, Proposal, make_primitive
from ._batching import batch_size, batched, batched_parts
from ._checks import check_float
from ._matmul_routes import MatmulParams, finish, multiply, rms_norm
from ._products import Operands, ProductAxes, check_axes_once, check_depth, check_operands, operand_shardings

OP = "matmul_nt"
F32 = jnp.dtype(jnp.float32)


# ---------------------------------------------------------------- types
def _abstract(params: MatmulParams, *flat: ShapedArray) -> list[ShapedArray]:
    whole, product = params.split(flat), params.product(flat)
    (whole_a, *_), (whole_b, *_), k_axes = whole.a, whole.b, params.k_axes
    assert whole_a.shape[whole_a.ndim - k_axes : -1] == whole_b.shape[whole_b.ndim - k_axes : -1]
    check_operands(OP, params, product.a, product.b)
    a, b, bias, gain = product.a[0], product.b[0], product.bias, product.gain
    if a.ndim < 2:
        raise ValueError(f"{OP}: a must have rank 2 or more, [..., M, K], got a.shape={a.shape}")
    if params.a is None and params.b.amax_scope == "window64":
        raise ValueError(
            f'{OP}: b must have amax_scope "tensor" or "row" where a is not quantized, got "window64"; quantize a'
        )
    check_depth(OP, params, whole_a, whole_b)
    if b.ndim != 2 and b.shape[:-2] != a.shape[:-2]:
        raise ValueError(
            f"{OP}: b must be [N, K] or have the leading axes of a, got a [{a.shape[:-2]}, M, K] and "
            f"b [{b.shape[:-2]}, N, K]"
        )
    if bias is not None:
        if bias.shape not in ((b.shape[-2],), product.result.shape):
            raise ValueError(
                f"{OP}: bias must have shape (N,)=({b.shape[-2]},) or that of the result, {product.result.shape}, "
                f"got {bias.shape}"
            )
        check_float(OP, "bias", bias.dtype)
    if gain is not None:
        assert params.a is None
        assert k_axes == 1
        if gain.shape != a.shape[-1:]:
            raise ValueError(f"{OP}: the gain of norm must have shape (K,)=({a.shape[-1]},), got {gain.shape}")
        check_float(OP, "the gain of norm", gain.dtype)
    axes = [*axes_of_dims(whole_a)[:-k_axes], axes_of_dims(whole_b)[-1 - k_axes]]
    check_axes_once(OP, axes)
    return [typed(whole_a, product.result.shape, params.out_dtype, axes)]


def _empty(params: MatmulParams, *flat: jax.Array) -> Sequence[jax.Array]:
    """Returns the result without a kernel: the sum over no products is 0, which leaves the bias."""
    zero = jnp.zeros(params.product(flat).result.shape, jnp.float32)
    return [finish(zero, *params.bias_and_gain(params.split(flat).rest)[0], out_dtype=params.out_dtype)]


# ---------------------------------------------------------------- on one device
def _local(params: MatmulParams, backend: Backend, *flat: jax.Array) -> Sequence[jax.Array]:
    return [multiply(params.product(flat), backend)]


# ---------------------------------------------------------------- vmap
def _merge_rows(parts: Sequence[jax.Array], keep: int) -> list[jax.Array]:
    """Reshapes [keep..., others..., M, K] to [keep..., others * M, K], for one dense array or three NVFP4 parts."""
    shape = parts[0].shape
    rows = math.prod(shape[keep:-1])
    merged = [p.reshape(*shape[:keep], rows, p.shape[-1]) for p in parts[:2]]
    for amax in parts[2:]:
        if 0 < amax.ndim < len(shape):  # each row gets its amax; one amax a window is that already
            amax = jnp.broadcast_to(amax.reshape(*amax.shape, *(1,) * (len(shape) - 1 - amax.ndim)), shape[:-1])
        merged.append(amax.reshape(*shape[:keep], rows, *amax.shape[len(shape) - 1 :]) if amax.ndim else amax)
    return merged


def _move(size: int, parts: Sequence[jax.Array], dims: Sequence[int | None]) -> list[jax.Array]:
    if len(parts) == 3:
        return batched_parts(size, parts, dims)
    return [batched(size, parts[0], dims[0])]


def _batch(params: MatmulParams, bind: Callable, args, dims):
    ops, od, size = params.split(args), params.split(dims), batch_size(args, dims)
    (bias, gain), (bias_dim, gain_dim) = params.bias_and_gain(ops.rest), params.bias_and_gain(od.rest)
    if gain_dim not in ((), (None,)):  # a gain per example: the same norm, outside the kernel
        normalize = jax.vmap(partial(rms_norm, epsilon=params.epsilon), (*od.a, *gain_dim))
        ops, od, gain = ops._replace(a=(normalize(*ops.a, *gain),)), od._replace(a=(0,)), ()
        params = replace(params, epsilon=None)
    if not bias or (bias_dim == (None,) and bias[0].ndim == 1):
        y, dim = _batch_products(params, bind, size, ops._replace(rest=(*bias, *gain)), od)
        return [y], [dim]
    # A bias per example or of the shape of a result: the same sum, then the same addition and cast, outside the kernel.
    y, dim = _batch_products(replace(params, out_dtype=F32), bind, size, ops._replace(rest=gain), od)
    y = jnp.moveaxis(y, dim, 0)
    each = bias[0][None] if bias_dim == (None,) else jnp.moveaxis(bias[0], bias_dim[0], 0)
    each = each.reshape(each.shape[0], *(1,) * (y.ndim - each.ndim), *each.shape[1:])
    return [finish(y, each, out_dtype=params.out_dtype)], [0]


def _batch_products(
    params: MatmulParams, bind: Callable, size: int, ops: Operands, od: Operands
) -> tuple[jax.Array, int]:
    """Applies the rule for a and b of which either may be batched, with no bias or one [N] for all examples.

    Examples become rows or columns of one product where they can: one call with a larger M or N is faster than many,
    and [N, K] is not repeated for each example.
    """

    def multiply(a, b, rest):
        return bind(params, *a, *b, *rest)[0]

    a_batched, b_batched = (any(d is not None for d in dims) for dims in (od.a, od.b))
    if not (a_batched or b_batched):
        return jnp.broadcast_to(y := multiply(ops.a, ops.b, ops.rest), (size, *y.shape)), 0
    if not b_batched and params.k_axes == 1:  # the examples of a are more rows
        a, keep = _move(size, ops.a, od.a), ops.b[0].ndim - 2
        if not keep:
            return multiply(a, ops.b, ops.rest), 0
        a = [part if part.ndim == 0 else jnp.moveaxis(part, 0, keep) for part in a]
        y = multiply(_merge_rows(a, keep), ops.b, ops.rest)
        return y.reshape(*a[0].shape[:-1], y.shape[-1]), keep
    b = _move(size, ops.b, od.b)
    if params.k_axes > 1:
        return multiply(_move(size, ops.a, od.a), b, ops.rest), 0
    if b[0].ndim == 3 and not a_batched:  # the examples of b are more columns
        bias, gain = params.bias_and_gain(ops.rest)
        y = multiply(ops.a, _merge_rows(b, 0), (*(jnp.tile(x, size) for x in bias), *gain))
        return y.reshape(*y.shape[:-1], size, b[0].shape[-2]), y.ndim - 1
    a = _move(size, ops.a, od.a)
    if b[0].ndim > 3:
        return multiply(a, b, ops.rest), 0
    lead = a[0].shape[1:-1]  # a shared by all leading axes: they become rows
    y = multiply(_merge_rows(a, 1), b, ops.rest)
    return y.reshape(size, *lead, y.shape[-1]), 0


# ---------------------------------------------------------------- sharding
def _shardings(
    params: MatmulParams, lead: list, row: Entry, col: Entry, depth: list, result: Axes, n: Operands
) -> list[list]:
    """Returns the shardings of operands of these shapes: mesh axes, or names of a sharding rule.

    ``lead`` are those of the leading axes of a, the others those of M, N, the axes of K and the result, as which the
    bias is split.
    """
    b_lead = lead if len(n.b[0]) > 1 + len(depth) else []
    bias, gain = params.bias_and_gain(n.rest)
    rest = [*(list(result[-len(shape) :]) for shape in bias), *[list(depth)] * len(gain)]
    return [*operand_shardings([*lead, row, *depth], [*b_lead, col, *depth], n), *rest]


def _partition(params: MatmulParams, proposed: Proposal) -> Partition:
    axes, n, depth = params.split(proposed.operands), params.split(proposed.shapes), params.k_axes
    sizes, units = [*n.a[0][:-depth], n.b[0][-1 - depth]], [*n.b[0][-depth:-1], 2 * n.b[0][-1] // params.unit]
    split = ProductAxes(proposed)
    along_k = zip(axes.a[0][-depth:], axes.b[0][-depth:], units, strict=True)
    k = [split.contracted(*of) for of in along_k]
    own = split.rows_then_column(axes.a[0][:-depth], sizes[:-1], axes.b[0][-1 - depth], sizes[-1])
    result = split.result(own, sizes, summed=tuple(axis for entry in k for axis in axes_of(entry)))
    *lead, m, c = own

    def sum_over_k(local: Body) -> Body:
        if not result.over:
            return local

        def body(*flat):
            ops = params.split(flat)
            bias, gain = params.bias_and_gain(ops.rest)
            a = (rms_norm(*ops.a, *gain, params.epsilon, result.over),) if gain else ops.a
            y = result.sum(local(*a, *ops.b, params=replace(params, out_dtype=F32, epsilon=None))[0])
            return (finish(y, *bias, out_dtype=params.out_dtype),)  # the bias of what is left of the result

        return body

    return _shardings(params, lead, m, c, k, result.axes, n), [result.axes], sum_over_k


def _rule(params: MatmulParams, *shapes: Shape) -> tuple[list[list], list[list]]:
    n = params.split(shapes)
    lead = [f"b{i}" for i in range(len(n.a[0]) - 1 - params.k_axes)]
    depth = [f"k{i}" for i in range(params.k_axes)]
    result = [*lead, "m", "n"]
    return _shardings(params, lead, "m", "n", depth, result, n), [result]


matmul_p = make_primitive(
    "nvfp4_matmul",
    abstract=_abstract,
    local=_local,
    batch=_batch,
    partition=_partition,
    rule=_rule,
    empty=_empty,
    sums=True,
)
