"""nvfp4_grouped_dot: (a [M, K], b, starts, ends) -> row m of a times the matrix of b of its group, in high precision.

XLA computes it, as a loop over parts of groups whose number depends on shapes alone. ``lax.ragged_dot`` is not used:
XLA expands it to a product of all rows with the matrices of all groups, or gives it to cuDNN.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from ._base import (
    Axes,
    Backend,
    Body,
    Shape,
    axes_of,
    axes_of_dims,
    make_primitive,
    typed,
    without_axes,
)
from ._groups import Rows, chunks_of, claims, map_examples, product, rows_of_device, sum_over_devices, without_shared
from .matmul import scattered_over


def _abstract(a: ShapedArray, b: ShapedArray, *_: ShapedArray, b_axis: int, out_dtype: Any) -> list[ShapedArray]:
    assert (a.ndim, b.ndim) == (2, 3)
    assert a.shape[1] == b.shape[b_axis]
    axes = without_shared(axes_of_dims(a)[0], axes_of_dims(b)[3 - b_axis])
    return [typed(a, (a.shape[0], b.shape[3 - b_axis]), out_dtype, axes)]


def _local(_backend: Backend, a, b, starts, ends, *, b_axis: int, out_dtype: Any) -> Sequence[jax.Array]:
    chunks = chunks_of(Rows(starts, ends), a.shape[0])

    def step(y: jax.Array, turn: tuple) -> tuple[jax.Array, None]:
        group, begin, end = turn
        rows, at = chunks.take(a, begin, end)
        w = lax.dynamic_index_in_dim(b, group, keepdims=False)
        computed = product(rows, w, (1, b_axis - 1)).astype(out_dtype)
        others = lax.dynamic_slice_in_dim(y, at, chunks.size)
        part = jnp.where(chunks.within(at, begin, end), computed, others)
        return lax.dynamic_update_slice_in_dim(y, part, at, 0), None

    zeros = jnp.zeros((a.shape[0], b.shape[3 - b_axis]), out_dtype)
    return [lax.scan(step, zeros, chunks.turns)[0]]


def _partition(
    mesh: Any, operands: list[Axes], shapes: list[Shape], results: list[Axes], *, b_axis: int, out_dtype: Any
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    (row, of_a), b_axes = operands[:2]
    (rows, depth), b_shape = shapes[:2]
    claim = claims(mesh)
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


def _batch(args, dims, **params) -> tuple:
    return map_examples(grouped_dot_p, args, dims, params)


def _rule(*_: Shape, b_axis: int, **__: Any) -> tuple[list[list], list[list]]:
    return [["m", "k"], ["g", "k", "n"] if b_axis == 1 else ["g", "n", "k"], [None], [None]], [["m", "n"]]


grouped_dot_p = make_primitive(
    "nvfp4_grouped_dot",
    abstract=_abstract,
    local=_local,
    batch=_batch,
    partition=_partition,
    rule=_rule,
    sums=True,
)
