"""nvfp4_grouped_dot and nvfp4_grouped_contract: grouped products in high precision, which XLA computes.

They are loops over parts of groups, whose number depends on shapes alone. ``lax.ragged_dot`` is not used: XLA expands
it to a product of all rows with the matrices of all groups, or gives it to cuDNN.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from .. import reference
from ..spec import BLOCK
from ._base import (
    Axes,
    Backend,
    Body,
    Shape,
    axes_if_divisible,
    axes_of,
    axes_of_dims,
    make_primitive,
    typed,
    ways,
    without_axes,
)
from ._groups import Rows, chunks_of, map_examples, rows_of_device, sum_over_devices
from .matmul import scattered_over


def _product(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    common = a.dtype if a.dtype == b.dtype else jnp.float32  # also where jax.numpy_dtype_promotion is strict
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    # HIGHEST: float32 operands stay float32, never TF32.
    return lax.dot_general(
        a.astype(common), b.astype(common), dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _claims(mesh: Any) -> Callable[[Any, int], Any]:
    """Returns the function that takes mesh axes for a dimension of a size, if no other has taken them."""
    used: set[str] = set()

    def claim(entry: Any, size: int) -> Any:
        entry = axes_if_divisible(mesh, without_axes(entry, used), size)
        used.update(axes_of(entry))
        return entry

    return claim


def _without_shared(first: Any, second: Any) -> list[Any]:
    return [first, without_axes(second, set(axes_of(first)))]


# ---------------------------------------------------------------- y[m] = a[m] b[g(m)]^T
def _dot_abstract(a: ShapedArray, b: ShapedArray, *_: ShapedArray, b_axis: int, out_dtype: Any) -> list[ShapedArray]:
    assert (a.ndim, b.ndim) == (2, 3)
    assert a.shape[1] == b.shape[b_axis]
    axes = _without_shared(axes_of_dims(a)[0], axes_of_dims(b)[3 - b_axis])
    return [typed(a, (a.shape[0], b.shape[3 - b_axis]), out_dtype, axes)]


def _dot_local(_backend: Backend, a, b, starts, ends, *, b_axis: int, out_dtype: Any) -> Sequence[jax.Array]:
    chunks = chunks_of(Rows(starts, ends), a.shape[0])

    def step(y: jax.Array, turn: tuple) -> tuple[jax.Array, None]:
        group, begin, end = turn
        rows, at = chunks.take(a, begin, end)
        w = lax.dynamic_index_in_dim(b, group, keepdims=False)
        product = _product(rows, w, (1, b_axis - 1)).astype(out_dtype)
        others = lax.dynamic_slice_in_dim(y, at, chunks.size)
        part = jnp.where(chunks.within(at, begin, end, 2), product, others)
        return lax.dynamic_update_slice_in_dim(y, part, at, 0), None

    zeros = jnp.zeros((a.shape[0], b.shape[3 - b_axis]), out_dtype)
    return [lax.scan(step, zeros, chunks.turns)[0]]


def _dot_partition(
    mesh: Any, operands: list[Axes], shapes: list[Shape], results: list[Axes], *, b_axis: int, out_dtype: Any
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    (row, of_a), b_axes = operands[:2]
    (rows, depth), b_shape = shapes[:2]
    claim = _claims(mesh)
    g = claim(b_axes[0], b_shape[0])
    k = claim(of_a if axes_of(of_a) == axes_of(b_axes[b_axis]) else None, depth)
    of_col = set(axes_of(b_axes[3 - b_axis])) & set(axes_of(results[0][1]))
    m = claim(without_axes(row, of_col), rows)
    c = claim(b_axes[3 - b_axis], b_shape[3 - b_axis])
    over = (*axes_of(g), *axes_of(k))
    sizes = rows, b_shape[3 - b_axis]
    scattered = [scattered_over(mesh, *of, over) for of in zip(results[0], (m, c), sizes, strict=True)]
    y_axes = [(*axes_of(entry), *more) or None for entry, more in zip((m, c), scattered, strict=True)]

    def wrap(local: Body) -> Body:
        def body(a, b, *of):
            mine = rows_of_device(mesh, Rows(*of), (m, a.shape[0]), (g, b.shape[0]))
            if not over:
                return tuple(local(a, b, *mine))
            dtype = jnp.dtype(jnp.float32) if axes_of(k) else out_dtype
            y = local(a, b, *mine, out_dtype=dtype)[0]
            return (sum_over_devices(y, axes_of(g), axes_of(k), scattered).astype(out_dtype),)

        return body

    b_axes = [g, k, c] if b_axis == 1 else [g, c, k]
    return [[m, k], b_axes, [None], [None]], [y_axes], wrap


def _dot_batch(args, dims, **params) -> tuple:
    return map_examples(grouped_dot_p, args, dims, params)


def _dot_rule(*_: Shape, b_axis: int, **__: Any) -> tuple[list[list], list[list]]:
    return [["m", "k"], ["g", "k", "n"] if b_axis == 1 else ["g", "n", "k"], [None], [None]], [["m", "n"]]


grouped_dot_p = make_primitive(
    "nvfp4_grouped_dot",
    abstract=_dot_abstract,
    local=_dot_local,
    batch=_dot_batch,
    partition=_dot_partition,
    rule=_dot_rule,
    sums=True,
)


# ---------------------------------------------------------------- y[g] = sum over the rows m of group g of a[m] b[m]^T
class Contracted(NamedTuple):
    """Holds a flat operand list by role: each of a and b is an array, or data and scale along ``axis``."""

    a: tuple
    b: tuple
    of: tuple


def _contracted(flat: Sequence[Any], quantized: bool) -> Contracted:
    flat, parts = tuple(flat), 2 if quantized else 1
    return Contracted(flat[:parts], flat[parts : 2 * parts], flat[2 * parts :])


def _contract_abstract(*flat: ShapedArray, axis: int, quantized: bool) -> list[ShapedArray]:
    ops = _contracted(flat, quantized)
    a, b = ops.a[0], ops.b[0]
    assert (a.ndim, b.ndim) == (2, 2)
    assert a.shape[axis] == b.shape[axis]
    axes = _without_shared(axes_of_dims(a)[1 - axis], axes_of_dims(b)[1 - axis])
    return [typed(a, (*ops.of[0].shape, a.shape[1 - axis], b.shape[1 - axis]), jnp.float32, [None, *axes])]


def _contract_local(_backend: Backend, *flat: jax.Array, axis: int, quantized: bool) -> Sequence[jax.Array]:
    ops = _contracted(flat, quantized)
    a, b = (reference.decode_16(*parts) if quantized else parts[0] for parts in (ops.a, ops.b))
    chunks = chunks_of(Rows(*ops.of), a.shape[axis])

    def step(sums: jax.Array, turn: tuple) -> tuple[jax.Array, None]:
        group, begin, end = turn
        left, right = (chunks.take(v, begin, end, axis)[0] for v in (a, b))
        before = lax.dynamic_index_in_dim(sums, group, keepdims=False)
        after = before + _product(left, right, (axis, axis))
        return lax.dynamic_update_index_in_dim(sums, after, group, 0), None

    zeros = jnp.zeros((*ops.of[0].shape, a.shape[1 - axis], b.shape[1 - axis]), jnp.float32)
    return [lax.scan(step, zeros, chunks.turns)[0]]


def _contract_partition(
    mesh: Any, operands: list[Axes], shapes: list[Shape], results: list[Axes], *, axis: int, quantized: bool
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    (a_axes, *_), (b_axes, *_), _ = _contracted(operands, quantized)
    (a_shape, *_), (b_shape, *_), ((groups,), _) = _contracted(shapes, quantized)
    claim = _claims(mesh)
    m = claim(a_axes[axis] or b_axes[axis], a_shape[axis] // (BLOCK // 2 if quantized else 1))
    n = claim(a_axes[1 - axis], a_shape[1 - axis])
    k = claim(b_axes[1 - axis], b_shape[1 - axis])
    sizes = groups, a_shape[1 - axis], b_shape[1 - axis]
    # Over other axes that the result has for its groups, each device computes some of them.
    g = claim(results[0][0], groups)
    of_y = g, n, k
    scattered = [scattered_over(mesh, *of, axes_of(m)) for of in zip(results[0], of_y, sizes, strict=True)]
    y_axes = [(*axes_of(entry), *more) or None for entry, more in zip(of_y, scattered, strict=True)]

    def wrap(local: Body) -> Body:
        def body(*flat):
            ops = _contracted(flat, quantized)
            rows = ops.a[0].shape[axis] * (2 if quantized else 1)
            mine = rows_of_device(mesh, Rows(*ops.of), (m, rows), (g, groups // ways(mesh, g)))
            return (sum_over_devices(local(*ops.a, *ops.b, *mine)[0], (), axes_of(m), scattered),)

        return body

    sides = [[m, entry] if axis == 0 else [entry, m] for entry in (n, k)]
    return [*(side for side in sides for _ in range(2 if quantized else 1)), [None], [None]], [y_axes], wrap


def _contract_batch(args, dims, **params) -> tuple:
    return map_examples(grouped_contract_p, args, dims, params)


def _contract_rule(*_: Shape, axis: int, quantized: bool) -> tuple[list[list], list[list]]:
    sides = [["m", name] if axis == 0 else [name, "m"] for name in ("n", "k")]
    return [*(side for side in sides for _ in range(2 if quantized else 1)), [None], [None]], [["g", "n", "k"]]


grouped_contract_p = make_primitive(
    "nvfp4_grouped_contract",
    abstract=_contract_abstract,
    local=_contract_local,
    batch=_contract_batch,
    partition=_contract_partition,
    rule=_contract_rule,
    sums=True,
)
