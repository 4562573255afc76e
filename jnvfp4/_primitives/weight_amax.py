"""nvfp4_weight_amax: the amaxes of many weights, over devices by one all-reduce.

XLA would reduce each weight by an all-reduce of its own, and in a loop over layers one in each iteration.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from .. import reference
from ._base import Axes, Backend, Body, Shape, axes_if_divisible, axes_of, make_primitive, typed, ways
from ._operands import FLOAT_DTYPES, batched, max_over_devices


def _abstract(*weights: ShapedArray, lead: tuple[int, ...]) -> list[ShapedArray]:
    for w in weights:
        if w.dtype not in FLOAT_DTYPES:
            raise TypeError(f"weight_amax: weights must be float32, bfloat16 or float16, got {w.dtype}")
    return [typed(w, w.shape[:kept], jnp.float32, [None] * kept) for w, kept in zip(weights, lead, strict=True)]


def _local(_backend: Backend, *weights: jax.Array, lead: tuple[int, ...]) -> Sequence[jax.Array]:
    rows = (w.reshape(*w.shape[:kept], -1) for w, kept in zip(weights, lead, strict=True))
    return [reference.find_amax(w, "row" if kept else "tensor") for w, kept in zip(rows, lead, strict=True)]


def _batch(args, dims, *, lead: tuple[int, ...], implementation: str | None):
    mapped = [dim is not None for dim in dims]
    moved = [batched(w.shape[d], w, d) if yes else w for w, d, yes in zip(args, dims, mapped, strict=True)]
    more = tuple(kept + yes for kept, yes in zip(lead, mapped, strict=True))
    found = weight_amax_p.bind(*moved, lead=more, implementation=implementation)
    return found, [0 if yes else None for yes in mapped]


def _partition(
    mesh: Any, operands: list[Axes], shapes: list[Shape], _results: list[Axes], *, lead: tuple[int, ...]
) -> tuple[list[Axes], list[Axes], Callable[[Body], Body]]:
    operands = [
        [axes_if_divisible(mesh, entry, size) for entry, size in zip(axes, shape, strict=True)]
        for axes, shape in zip(operands, shapes, strict=True)
    ]
    over = tuple(dict.fromkeys(axis for axes in operands for entry in axes for axis in axes_of(entry)))
    wholes = [shape[:kept] for shape, kept in zip(shapes, lead, strict=True)]

    def wrap(local: Body) -> Body:
        def reduced(*weights):
            found = [
                _in_whole(mesh, amax, axes[: len(whole)], whole)
                for amax, axes, whole in zip(local(*weights), operands, wholes, strict=True)
            ]
            every = max_over_devices(jnp.concatenate([amax.ravel() for amax in found]), over)
            ends = [sum(amax.size for amax in found[: i + 1]) for i in range(len(found))]
            return tuple(
                lax.slice_in_dim(every, end - amax.size, end).reshape(amax.shape)
                for end, amax in zip(ends, found, strict=True)
            )

        return reduced

    return operands, [[None] * len(whole) for whole in wholes], wrap


def _in_whole(mesh: Any, amax: jax.Array, axes: Axes, whole: Shape) -> jax.Array:
    """Puts the amaxes of the layers that a device has into zeros for all layers."""
    if amax.shape == whole:
        return amax
    starts = [
        lax.axis_index(axes_of(entry)) * size if ways(mesh, entry) > 1 else jnp.int32(0)
        for entry, size in zip(axes, amax.shape, strict=True)
    ]
    return lax.dynamic_update_slice(jnp.zeros(whole, amax.dtype), amax, starts)


def _rule(*shapes: Shape, lead: tuple[int, ...]) -> tuple[list[list], list[list]]:
    dims = [[f"w{i}d{j}" for j in range(len(shape))] for i, shape in enumerate(shapes)]
    return dims, [[None] * kept for kept in lead]


weight_amax_p = make_primitive(
    "nvfp4_weight_amax",
    abstract=_abstract,
    local=_local,
    batch=_batch,
    partition=_partition,
    rule=_rule,
)
