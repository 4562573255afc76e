"""nvfp4_grouped_contract: (a, b, starts, ends) -> for each group the sum over its rows m of a[m] b[m]^T, [G, N, K].

Two arrays are contracted in high precision; of two quantized tensors there are data and scale, decoded exactly. XLA
computes it, as a loop over parts of groups like nvfp4_grouped_dot, and never by cuDNN.
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
    axes_of,
    axes_of_dims,
    make_primitive,
    typed,
    ways,
)
from ._groups import Rows, chunks_of, claims, map_examples, product, rows_of_device, sum_over_devices, without_shared
from .matmul import scattered_over


class Contracted(NamedTuple):
    """Holds a flat operand list by role: each of a and b is an array, or data and scale along ``axis``."""

    a: tuple
    b: tuple
    of: tuple


def _contracted(flat: Sequence[Any], quantized: bool) -> Contracted:
    flat, parts = tuple(flat), 2 if quantized else 1
    return Contracted(flat[:parts], flat[parts : 2 * parts], flat[2 * parts :])


def _abstract(*flat: ShapedArray, axis: int, quantized: bool) -> list[ShapedArray]:
    ops = _contracted(flat, quantized)
    a, b = ops.a[0], ops.b[0]
    assert (a.ndim, b.ndim) == (2, 2)
    assert a.shape[axis] == b.shape[axis]
    axes = without_shared(axes_of_dims(a)[1 - axis], axes_of_dims(b)[1 - axis])
    return [typed(a, (*ops.of[0].shape, a.shape[1 - axis], b.shape[1 - axis]), jnp.float32, [None, *axes])]


def _local(_backend: Backend, *flat: jax.Array, axis: int, quantized: bool) -> Sequence[jax.Array]:
    ops = _contracted(flat, quantized)
    a, b = (reference.decode_16(*parts) if quantized else parts[0] for parts in (ops.a, ops.b))
    chunks = chunks_of(Rows(*ops.of), a.shape[axis])

    def step(sums: jax.Array, turn: tuple) -> tuple[jax.Array, None]:
        group, begin, end = turn
        left, right = (chunks.take(v, begin, end, axis)[0] for v in (a, b))
        before = lax.dynamic_index_in_dim(sums, group, keepdims=False)
        after = before + product(left, right, (axis, axis))
        return lax.dynamic_update_index_in_dim(sums, after, group, 0), None

    zeros = jnp.zeros((*ops.of[0].shape, a.shape[1 - axis], b.shape[1 - axis]), jnp.float32)
    return [lax.scan(step, zeros, chunks.turns)[0]]


def _partition(
    mesh: Any, operands: list[Axes], shapes: list[Shape], results: list[Axes], *, axis: int, quantized: bool
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    (a_axes, *_), (b_axes, *_), _ = _contracted(operands, quantized)
    (a_shape, *_), (b_shape, *_), ((groups,), _) = _contracted(shapes, quantized)
    claim = claims(mesh)
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


def _batch(args, dims, **params) -> tuple:
    return map_examples(grouped_contract_p, args, dims, params)


def _rule(*_: Shape, axis: int, quantized: bool) -> tuple[list[list], list[list]]:
    sides = [["m", name] if axis == 0 else [name, "m"] for name in ("n", "k")]
    return [*(side for side in sides for _ in range(2 if quantized else 1)), [None], [None]], [["g", "n", "k"]]


grouped_contract_p = make_primitive(
    "nvfp4_grouped_contract",
    abstract=_abstract,
    local=_local,
    batch=_batch,
    partition=_partition,
    rule=_rule,
    sums=True,
)
