"""nvfp4_grouped_contract: (a, b, starts, ends) -> for each group the sum over its rows m of a[m] b[m]^T, [G, N, K].

a is [M, N] and b is [M, K], contracted in high precision. XLA computes it, as a loop over parts of groups like
nvfp4_grouped_dot, and never by cuDNN.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from .._core.mesh import Shape, axes_of, axes_of_dims, typed, ways
from ._base import Backend, Body, Partition, Proposal, make_primitive
from ._groups import Rows, chunks_of, map_examples, rows_of_device, without_shared
from ._products import ProductAxes, product


def _abstract(_: None, a: ShapedArray, b: ShapedArray, *of: ShapedArray) -> list[ShapedArray]:
    assert (a.ndim, b.ndim) == (2, 2)
    assert a.shape[0] == b.shape[0]
    axes = without_shared(axes_of_dims(a)[1], axes_of_dims(b)[1])
    return [typed(a, (*of[0].shape, a.shape[1], b.shape[1]), jnp.float32, [None, *axes])]


def _local(_: None, _backend: Backend, a: jax.Array, b: jax.Array, *of: jax.Array) -> Sequence[jax.Array]:
    chunks = chunks_of(Rows(*of), a.shape[0])

    def step(sums: jax.Array, turn: tuple) -> tuple[jax.Array, None]:
        group, begin, end = turn
        left, right = (chunks.take(v, begin, end)[0] for v in (a, b))
        before = lax.dynamic_index_in_dim(sums, group, keepdims=False)
        after = before + product(left, right, ((0,), (0,)))
        return lax.dynamic_update_index_in_dim(sums, after, group, 0), None

    zeros = jnp.zeros((*of[0].shape, a.shape[1], b.shape[1]), jnp.float32)
    return [lax.scan(step, zeros, chunks.turns)[0]]


def _partition(_: None, proposed: Proposal) -> Partition:
    (a_axes, b_axes, *_axes), ((rows, cols), (_rows, depth), (groups,), _groups) = proposed.operands, proposed.shapes
    split = ProductAxes(proposed)
    m = split.claim(a_axes[0] or b_axes[0], rows)
    n, k = split.claim(a_axes[1], cols), split.claim(b_axes[1], depth)
    # Over other axes that the result has for its groups, each device computes some of them.
    g = split.claim(proposed.results[0][0], groups)
    result = split.result([g, n, k], [groups, cols, depth], summed=axes_of(m))

    def wrap(local: Body) -> Body:
        def body(a, b, *of):
            own = (m, a.shape[0]), (g, groups // ways(proposed.mesh, g))
            return (result.sum(local(a, b, *rows_of_device(proposed.mesh, Rows(*of), *own))[0]),)

        return body

    return [[m, n], [m, k], [None], [None]], [result.axes], wrap


def _rule(_: None, *_shapes: Shape) -> tuple[list[list], list[list]]:
    return [["m", "n"], ["m", "k"], [None], [None]], [["g", "n", "k"]]


grouped_contract_p = make_primitive(
    "nvfp4_grouped_contract",
    abstract=_abstract,
    local=_local,
    batch=map_examples,
    partition=_partition,
    rule=_rule,
    sums=True,
)
