"""nvfp4_grouped_dot: (a [M, K], b, starts, ends) -> row m of a times the matrix of b of its group, in high precision.

XLA computes it, as a loop over parts of groups whose number depends on shapes alone. ``lax.ragged_dot`` is not used:
XLA expands it to a product of all rows with the matrices of all groups, or gives it to cuDNN.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from .._core.mesh import Entry, Shape, axes_of, axes_of_dims, typed
from ._base import Backend, Body, Partition, Proposal, make_primitive
from ._groups import Rows, chunks_of, map_examples, rows_of_device, without_shared
from ._products import ProductAxes, product


class GroupedDotParams(NamedTuple):
    """Holds the static parameters of ``nvfp4_grouped_dot``."""

    b_axis: int  # of b, which is contracted: 1 of [G, K, N], 2 of [G, N, K]
    out_dtype: np.dtype

    @property
    def col(self) -> int:
        """Returns the axis of b that is N."""
        return 3 - self.b_axis


def _abstract(p: GroupedDotParams, a: ShapedArray, b: ShapedArray, *_: ShapedArray) -> list[ShapedArray]:
    assert (a.ndim, b.ndim) == (2, 3)
    assert a.shape[1] == b.shape[p.b_axis]
    axes = without_shared(axes_of_dims(a)[0], axes_of_dims(b)[p.col])
    return [typed(a, (a.shape[0], b.shape[p.col]), p.out_dtype, axes)]


def _local(p: GroupedDotParams, _: Backend, a: jax.Array, b: jax.Array, *of: jax.Array) -> Sequence[jax.Array]:
    chunks = chunks_of(Rows(*of), a.shape[0])

    def step(y: jax.Array, turn: tuple) -> tuple[jax.Array, None]:
        group, begin, end = turn
        rows, at = chunks.take(a, begin, end)
        w = lax.dynamic_index_in_dim(b, group, keepdims=False)
        computed = product(rows, w, ((1,), (p.b_axis - 1,))).astype(p.out_dtype)
        others = lax.dynamic_slice_in_dim(y, at, chunks.size)
        part = jnp.where(chunks.within(at, begin, end), computed, others)
        return lax.dynamic_update_slice_in_dim(y, part, at, 0), None

    zeros = jnp.zeros((a.shape[0], b.shape[p.col]), p.out_dtype)
    return [lax.scan(step, zeros, chunks.turns)[0]]


def _partition(p: GroupedDotParams, proposed: Proposal) -> Partition:
    ((row, of_a), of_b, *_), ((rows, depth), sizes, *_) = proposed.operands, proposed.shapes
    split = ProductAxes(proposed)
    g = split.claim(of_b[0], sizes[0])
    k = split.contracted(of_a, of_b[p.b_axis], depth)
    m, c = split.rows_then_column([row], [rows], of_b[p.col], sizes[p.col])
    result = split.result([m, c], [rows, sizes[p.col]], summed=axes_of(k), apart=axes_of(g))

    def wrap(local: Body) -> Body:
        def body(a, b, *of):
            mine = rows_of_device(proposed.mesh, Rows(*of), (m, a.shape[0]), (g, b.shape[0]))
            part = p._replace(out_dtype=jnp.dtype(jnp.float32)) if axes_of(k) else p
            return (result.sum(local(a, b, *mine, params=part)[0]).astype(p.out_dtype),)

        return body

    return _shardings(p, m, g, c, k), [result.axes], wrap


def _shardings(p: GroupedDotParams, row: Entry, group: Entry, col: Entry, depth: Entry) -> list[list]:
    """Returns the shardings of all operands: mesh axes, or names of a sharding rule."""
    return [[row, depth], [group, depth, col] if p.b_axis == 1 else [group, col, depth], [None], [None]]


def _rule(p: GroupedDotParams, *_: Shape) -> tuple[list[list], list[list]]:
    return _shardings(p, "m", "g", "n", "k"), [["m", "n"]]


grouped_dot_p = make_primitive(
    "nvfp4_grouped_dot",
    abstract=_abstract,
    local=_local,
    batch=map_examples,
    partition=_partition,
    rule=_rule,
    sums=True,
)
