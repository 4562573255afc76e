"""nvfp4_grouped_contract: (a, b, starts, ends) -> for each group the sum over its rows m of a[m] b[m]^T, [G, N, K].

a is [M, N] and b is [M, K], contracted in high precision. XLA computes it, as a loop over parts of groups like
nvfp4_grouped_dot, and never by cuDNN.
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
    ways,
)
from ._groups import Rows, chunks_of, claims, map_examples, product, rows_of_device, sum_over_devices, without_shared
from .matmul import scattered_over


def _abstract(a: ShapedArray, b: ShapedArray, *of: ShapedArray) -> list[ShapedArray]:
    assert (a.ndim, b.ndim) == (2, 2)
    assert a.shape[0] == b.shape[0]
    axes = without_shared(axes_of_dims(a)[1], axes_of_dims(b)[1])
    return [typed(a, (*of[0].shape, a.shape[1], b.shape[1]), jnp.float32, [None, *axes])]


def _local(_backend: Backend, a: jax.Array, b: jax.Array, *of: jax.Array) -> Sequence[jax.Array]:
    chunks = chunks_of(Rows(*of), a.shape[0])

    def step(sums: jax.Array, turn: tuple) -> tuple[jax.Array, None]:
        group, begin, end = turn
        left, right = (chunks.take(v, begin, end)[0] for v in (a, b))
        before = lax.dynamic_index_in_dim(sums, group, keepdims=False)
        after = before + product(left, right, (0, 0))
        return lax.dynamic_update_index_in_dim(sums, after, group, 0), None

    zeros = jnp.zeros((*of[0].shape, a.shape[1], b.shape[1]), jnp.float32)
    return [lax.scan(step, zeros, chunks.turns)[0]]


def _partition(
    mesh: Any, operands: list[Axes], shapes: list[Shape], results: list[Axes]
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    (a_axes, b_axes, *_), ((rows, of_n), (_, of_k), (groups,), _) = operands, shapes
    claim = claims(mesh)
    m = claim(a_axes[0] or b_axes[0], rows)
    n, k = claim(a_axes[1], of_n), claim(b_axes[1], of_k)
    # Over other axes that the result has for its groups, each device computes some of them.
    g = claim(results[0][0], groups)
    of_y = g, n, k
    scattered = [
        scattered_over(mesh, *of, axes_of(m)) for of in zip(results[0], of_y, (groups, of_n, of_k), strict=True)
    ]
    y_axes = [(*axes_of(entry), *more) or None for entry, more in zip(of_y, scattered, strict=True)]

    def wrap(local: Body) -> Body:
        def body(a, b, *of):
            mine = rows_of_device(mesh, Rows(*of), (m, a.shape[0]), (g, groups // ways(mesh, g)))
            return (sum_over_devices(local(a, b, *mine)[0], (), axes_of(m), scattered),)

        return body

    return [[m, n], [m, k], [None], [None]], [y_axes], wrap


def _batch(args, dims, **params) -> tuple:
    return map_examples(grouped_contract_p, args, dims, params)


def _rule(*_: Shape) -> tuple[list[list], list[list]]:
    return [["m", "n"], ["m", "k"], [None], [None]], [["g", "n", "k"]]


grouped_contract_p = make_primitive(
    "nvfp4_grouped_contract",
    abstract=_abstract,
    local=_local,
    batch=_batch,
    partition=_partition,
    rule=_rule,
    sums=True,
)
