"""nvfp4_matmul: (a parts, b parts, bias?) -> a b^T.

``a`` is three operands (data, scale, amax), or one 16-bit array when ``a_format`` is None. ``b`` is three operands.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from .._core import softfloat
from ..spec import Format
from ._base import (
    Axes,
    Backend,
    Body,
    Shape,
    axes_if_divisible,
    axes_of,
    axes_of_dims,
    check_explicit,
    make_primitive,
    typed,
    without_axes,
)
from ._batching import batch_size, batched, batched_parts
from ._checks import check_float, check_parts
from ._known_answers import product_check
from ._matmul_routes import Product, by_reference, choose, multiply
from ._self_check import Check
from ._shardings import part_shardings

DENSE_DTYPES = (jnp.bfloat16, jnp.float16)


class Operands(NamedTuple):
    """Holds a flat operand list by role: arrays, or their shapes, shardings or batch dimensions."""

    a: tuple
    b: tuple
    bias: tuple


def _split(flat: Sequence[Any], a_format: Format | None, has_bias: bool) -> Operands:
    flat, na = tuple(flat), 1 if a_format is None else 3
    return Operands(flat[:na], flat[na : na + 3], flat[na + 3 :])


def _merged_shape(shape: Shape, k_axes: int) -> Shape:
    """Returns ``shape`` with its last ``k_axes`` axes as one."""
    first = len(shape) - k_axes
    return (*shape[:first], math.prod(shape[first:]))


def _merge_k(parts: Sequence[Any], fmt: Format | None, k_axes: int, merge: Callable[[Any, Shape], Any]) -> tuple:
    """Makes the axes that are contracted one axis: those of data and scale, and of an amax for each window."""
    if k_axes == 1:
        return tuple(parts)
    amax = parts[2:] if fmt is None or fmt.amax_scope != "window64" else ()
    along_k = parts[: len(parts) - len(amax)]
    return *(merge(part, _merged_shape(part.shape, k_axes)) for part in along_k), *amax


def _merged(ops: Operands, a_format: Format | None, b_format: Format, k_axes: int, merge: Callable) -> Operands:
    a, b = _merge_k(ops.a, a_format, k_axes, merge), _merge_k(ops.b, b_format, k_axes, merge)
    return ops._replace(a=a, b=b)


def _merge_avals(aval: ShapedArray, shape: Shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _depth(a: Any, a_format: Format | None) -> int:
    return a.shape[-1] if a_format is None else 2 * a.shape[-1]


def _check_formats(a_format: Format | None, b_format: Format) -> None:
    a_rht = a_format is not None and a_format.rht
    if a_rht != b_format.rht:
        raise ValueError(
            f"matmul_nt: a and b must both be rotated (format.rht) or neither, got a.rht={a_rht}, b.rht={b_format.rht}"
        )
    if a_format is None and b_format.amax_scope == "window64":
        raise ValueError(
            'matmul_nt: b must have amax_scope "tensor" or "row" where a is not quantized, got "window64"; quantize a'
        )


def unit_of_k(*formats: Format | None) -> int:
    """Returns what a device's part of K must be a multiple of."""
    return max(fmt.unit for fmt in formats if fmt is not None)


def _abstract(
    *flat: ShapedArray,
    a_format: Format | None,
    b_format: Format,
    has_bias: bool,
    out_dtype: Any,
    accumulation: str,
    k_axes: int,
) -> list[ShapedArray]:
    ops = _split(flat, a_format, has_bias)
    whole_a, whole_b = ops.a[0], ops.b[0]
    assert whole_a.shape[whole_a.ndim - k_axes : -1] == whole_b.shape[whole_b.ndim - k_axes : -1]
    ops = _merged(ops, a_format, b_format, k_axes, _merge_avals)
    a, b = ops.a[0], ops.b[0]
    if a_format is None:
        if a.dtype not in DENSE_DTYPES:
            raise TypeError(f"matmul_nt: an unquantized a must be bfloat16 or float16, got {a.dtype}")
        if a.ndim < 2:
            raise ValueError(f"matmul_nt: a must have rank 2 or more, [..., M, K], got a.shape={a.shape}")
    else:
        check_parts("matmul_nt", "a", ops.a, a_format)
    check_parts("matmul_nt", "b", ops.b, b_format)
    _check_formats(a_format, b_format)
    depth = _depth(a, a_format)
    if depth != 2 * b.shape[-1]:
        raise ValueError(f"matmul_nt: a and b must have the same K, got K={depth} and K={2 * b.shape[-1]}")
    if b.ndim != 2 and b.shape[:-2] != a.shape[:-2]:
        raise ValueError(
            f"matmul_nt: b must be [N, K] or have the leading axes of a, got a [{a.shape[:-2]}, M, K] and "
            f"b [{b.shape[:-2]}, N, K]"
        )
    if has_bias:
        bias = ops.bias[0]
        if bias.shape != (b.shape[-2],):
            raise ValueError(f"matmul_nt: bias must have shape (N,)=({b.shape[-2]},), got {bias.shape}")
        check_float("matmul_nt", "bias", bias.dtype)
    unit = unit_of_k(a_format, b_format)  # of elements, of which a byte of data has two
    check_explicit("matmul_nt", whole_a, whole_a.ndim - 1, unit if a_format is None else unit // 2)
    check_explicit("matmul_nt", whole_b, whole_b.ndim - 1, unit // 2)
    axes = [*axes_of_dims(whole_a)[:-k_axes], axes_of_dims(whole_b)[-1 - k_axes]]
    _check_axes_once(axes)
    return [typed(whole_a, (*a.shape[:-1], b.shape[-2]), out_dtype, axes)]


def _check_axes_once(axes: Axes) -> None:
    used = [axis for entry in axes for axis in axes_of(entry)]
    if len(used) != len(set(used)):
        raise ValueError(
            f"matmul_nt: M of a and N of b are sharded over a common mesh axis (result would be {axes}); "
            "reshard one of them"
        )


def _empty(
    *flat: jax.Array,
    a_format: Format | None,
    b_format: Format,
    has_bias: bool,
    out_dtype: Any,
    accumulation: str,
    k_axes: int,
) -> Sequence[jax.Array]:
    """Returns the result without a kernel: the sum over no products is 0, which leaves the bias."""
    ops = _split(flat, a_format, has_bias)
    zero = jnp.zeros((*ops.a[0].shape[:-k_axes], ops.b[0].shape[-1 - k_axes]), jnp.float32)
    return [_finish(zero, *ops.bias, out_dtype=out_dtype)]


# ---------------------------------------------------------------- on one device
def _local(
    backend: Backend,
    *flat: jax.Array,
    a_format: Format | None,
    b_format: Format,
    has_bias: bool,
    out_dtype: Any,
    accumulation: str,
    k_axes: int,
) -> Sequence[jax.Array]:
    ops = _merged(_split(flat, a_format, has_bias), a_format, b_format, k_axes, jnp.reshape)
    bias = ops.bias[0] if has_bias else None
    product = Product(ops.a, ops.b, bias, a_format, b_format, out_dtype, accumulation)
    return [by_reference(product) if backend.name == "reference" else multiply(product, backend)]


@partial(jax.jit, static_argnames="out_dtype", inline=True)  # an eager call transfers no constants
def _finish(y: jax.Array, *bias: jax.Array, out_dtype: Any) -> jax.Array:
    """Takes the kernel's last two steps, + bias and the cast.

    On bit patterns: XLA would delete a cast and its inverse, and its float addition flushes subnormal numbers and
    takes 0 + -0 for -0.
    """
    bits = softfloat.to_bits(y)
    for b in bias:
        bits = softfloat.add(bits, jnp.broadcast_to(softfloat.to_bits(b), bits.shape))
    return softfloat.from_bits(bits, out_dtype)


# ---------------------------------------------------------------- vmap
def _amax_per_row(amax: jax.Array, data_shape: tuple[int, ...]) -> jax.Array:
    """Gives each row its amax, so that leading axes can be merged with rows; one amax a window is that already."""
    rows = data_shape[:-1]
    if amax.ndim > len(rows):
        return amax
    return jnp.broadcast_to(amax.reshape(*amax.shape, *(1,) * (len(rows) - amax.ndim)), rows)


def _merge_rows(parts: Sequence[jax.Array], keep: int) -> list[jax.Array]:
    """Reshapes [keep..., others..., M, K] to [keep..., others * M, K], for one dense array or three NVFP4 parts."""
    shape = parts[0].shape
    rows = math.prod(shape[keep:-1])
    merged = [p.reshape(*shape[:keep], rows, p.shape[-1]) for p in parts[:2]]
    if len(parts) == 3:
        amax = parts[2]
        if amax.ndim:
            per_row = _amax_per_row(amax, shape)
            amax = per_row.reshape(*shape[:keep], rows, *per_row.shape[len(shape) - 1 :])
        merged.append(amax)
    return merged


def _move(size: int, parts: Sequence[jax.Array], dims: Sequence[int | None]) -> list[jax.Array]:
    if len(parts) == 3:
        return batched_parts(size, parts, dims)
    return [batched(size, parts[0], dims[0])]


def _batch(args, dims, **params):
    a_format, has_bias, out_dtype = params["a_format"], params["has_bias"], params["out_dtype"]
    ops, od = _split(args, a_format, has_bias), _split(dims, a_format, has_bias)
    size = batch_size(args, dims)
    if not has_bias or od.bias[0] is None:
        y, dim = _batch_products(size, ops, od, params)
        return [y], [dim]
    # A bias per example: the same sum, then the same addition and cast, outside the kernel.
    params = {**params, "has_bias": False, "out_dtype": jnp.dtype(jnp.float32)}
    y, dim = _batch_products(size, ops._replace(bias=()), od._replace(bias=()), params)
    y, bias = jnp.moveaxis(y, dim, 0), jnp.moveaxis(ops.bias[0], od.bias[0], 0)
    bias = bias.reshape(size, *(1,) * (y.ndim - 2), y.shape[-1])
    return [_finish(y, bias, out_dtype=out_dtype)], [0]


def _batch_products(size: int, ops: Operands, od: Operands, params: dict[str, Any]) -> tuple[jax.Array, int]:
    """Applies the rule for a and b of which either may be batched, with no bias or one for all examples.

    Examples become rows or columns of one product where they can: one call with a larger M or N is faster than many,
    and [N, K] is not repeated for each example.
    """

    def bind(a, b, bias):
        return matmul_p.bind(*a, *b, *bias, **params)[0]

    a_batched, b_batched = (any(d is not None for d in dims) for dims in (od.a, od.b))
    if not (a_batched or b_batched):
        return jnp.broadcast_to(y := bind(ops.a, ops.b, ops.bias), (size, *y.shape)), 0
    if not b_batched and params["k_axes"] == 1:  # the examples of a are more rows
        a, keep = _move(size, ops.a, od.a), ops.b[0].ndim - 2
        if not keep:
            return bind(a, ops.b, ops.bias), 0
        a = [part if part.ndim == 0 else jnp.moveaxis(part, 0, keep) for part in a]
        y = bind(_merge_rows(a, keep), ops.b, ops.bias)
        return y.reshape(*a[0].shape[:-1], y.shape[-1]), keep
    b = _move(size, ops.b, od.b)
    if params["k_axes"] > 1:
        return bind(_move(size, ops.a, od.a), b, ops.bias), 0
    if b[0].ndim == 3 and not a_batched:  # the examples of b are more columns
        y = bind(ops.a, _merge_rows(b, 0), [jnp.tile(x, size) for x in ops.bias])
        return y.reshape(*y.shape[:-1], size, b[0].shape[-2]), y.ndim - 1
    a = _move(size, ops.a, od.a)
    if b[0].ndim > 3:
        return bind(a, b, ops.bias), 0
    lead = a[0].shape[1:-1]  # a shared by all leading axes: they become rows
    y = bind(_merge_rows(a, 1), b, ops.bias)
    return y.reshape(size, *lead, y.shape[-1]), 0


# ---------------------------------------------------------------- sharding
def _shardings(lead: list, row: Any, col: Any, depth: list, n: Operands) -> list[list]:
    """Returns the shardings of a and b of these shapes: mesh axes, or names of a sharding rule.

    ``lead`` are those of the leading axes of a, the others those of M, N and the axes of K.
    """
    b_lead = lead if len(n.b[0]) > 1 + len(depth) else []
    a_dims, b_dims = [*lead, row, *depth], [*b_lead, col, *depth]
    return [*(part_shardings(a_dims, n.a[2]) if len(n.a) == 3 else [a_dims]), *part_shardings(b_dims, n.b[2])]


def _partition(
    mesh: Any,
    operands: list[Axes],
    shapes: list[Shape],
    results: list[Axes],
    *,
    a_format: Format | None,
    b_format: Format,
    has_bias: bool,
    out_dtype: Any,
    accumulation: str,
    k_axes: int,
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    axes, n = _split(operands, a_format, has_bias), _split(shapes, a_format, has_bias)
    *lead, row = axes.a[0][:-k_axes]
    units = [*n.b[0][-k_axes:-1], 2 * n.b[0][-1] // unit_of_k(a_format, b_format)]
    used: set[str] = set()

    def claim(entry: Any, size: int) -> Any:
        """Takes the axes that no other dimension has taken: K is first, then the leading axes, M and N."""
        free = tuple(axis for axis in axes_of(entry) if axis not in used)
        entry = axes_if_divisible(mesh, free or None, size)
        used.update(axes_of(entry))
        return entry

    # Where a and b do not split K alike, XLA gathers the packed parts of the one that does.
    along_k = zip(axes.a[0][-k_axes:], axes.b[0][-k_axes:], units, strict=True)
    k = [claim(of_a if axes_of(of_a) == axes_of(of_b) else None, unit) for of_a, of_b, unit in along_k]
    over_k = tuple(axis for entry in k for axis in axes_of(entry))
    rows, cols = n.a[0][:-k_axes], n.b[0][-1 - k_axes]
    # An axis that splits M and N stays with N if the result has it there: the packed rows are gathered, and not b.
    col = axes.b[0][-1 - k_axes]
    of_col = set(axes_of(col)) & set(axes_of(results[0][-1]))
    *lead, m = (claim(without_axes(e, of_col), size) for e, size in zip([*lead, row], rows, strict=True))
    c = claim(col, cols)
    # Over the axes of K that the result should have, a reduce-scatter makes the sum: half of an all-reduce's bytes.
    y, sizes = [*lead, m, c], (*rows, cols)
    scattered = [scattered_over(mesh, *of) for of in zip(results[0], y, sizes, [over_k] * len(y), strict=True)]
    summed = tuple(axis for axis in over_k if not any(axis in over for over in scattered))
    y_axes = [(*axes_of(entry), *over) or None for entry, over in zip(y, scattered, strict=True)]

    def sum_over_k(local: Body) -> Body:
        if not over_k:
            return local

        def body(*flat):
            ops = _split(flat, a_format, has_bias)
            y = local(*ops.a, *ops.b, has_bias=False, out_dtype=jnp.dtype(jnp.float32))[0]
            for dim, over in enumerate(scattered):
                y = lax.psum_scatter(y, over, scatter_dimension=dim, tiled=True) if over else y
            y = lax.psum(y, summed) if summed else y
            return (_finish(y, *ops.bias, out_dtype=out_dtype),)  # the bias of what is left of N

        return body

    return [*_shardings(lead, m, c, k, n), *[y_axes[-1:]] * has_bias], [y_axes], sum_over_k


def scattered_over(mesh: Any, wanted: Any, entry: Any, size: int, summed: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes of a sum that ``wanted`` has for a dimension of y, if they can split what ``entry`` leaves."""
    over = tuple(axis for axis in axes_of(wanted) if axis in summed)
    return over if axes_if_divisible(mesh, (*axes_of(entry), *over), size) else ()


def _rule(
    *shapes: Shape, a_format: Format | None, has_bias: bool, k_axes: int, **_: Any
) -> tuple[list[list], list[list]]:
    n = _split(shapes, a_format, has_bias)
    lead = [f"b{i}" for i in range(len(n.a[0]) - 1 - k_axes)]
    depth = [f"k{i}" for i in range(k_axes)]
    return [*_shardings(lead, "m", "n", depth, n), *[["n"]] * has_bias], [[*lead, "m", "n"]]


def _known(
    backend: Backend,
    flat: Sequence[ShapedArray],
    *,
    a_format: Format | None,
    b_format: Format,
    has_bias: bool,
    out_dtype: Any,
    accumulation: str,
    k_axes: int,
) -> list[Check]:
    """Returns the check of the kernel for these sizes, and of the one for few rows if a device may have a part."""
    ops = _merged(_split(flat, a_format, has_bias), a_format, b_format, k_axes, _merge_avals)
    bias = ops.bias[0] if has_bias else None
    product = Product(ops.a, ops.b, bias, a_format, b_format, out_dtype, accumulation)
    kernels = [choose(product, backend)]
    if backend.split and backend.kernel is None:
        *lead, _, depth = ops.a[0].shape
        few = jax.ShapeDtypeStruct((*lead, 1, depth), ops.a[0].dtype)
        kernels.append(choose(product._replace(a=(few, *ops.a[1:])), backend))
    names = dict.fromkeys(chosen.kernel for chosen in kernels if not chosen.reason and chosen.kernel != "reference")
    return [product_check(matmul_p, name, backend.capability) for name in names]


matmul_p = make_primitive(
    "nvfp4_matmul",
    abstract=_abstract,
    local=_local,
    batch=_batch,
    partition=_partition,
    rule=_rule,
    empty=_empty,
    sums=True,
    known=_known,
)
