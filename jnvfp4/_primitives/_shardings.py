"""How arrays and the parts of a tensor are sharded, and where on a mesh a device is."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import softfloat
from ._base import Axes, Shape, axes_if_divisible, axes_of, ways


def names_of_dims(shape: Sequence[int]) -> list[str]:
    """Names the leading dimensions of x, its rows and its columns for a sharding rule."""
    return [*(f"b{i}" for i in range(len(shape) - 2)), "r", "c"]


def keep_blocks(mesh: Any, axes: Axes, shape: Sequence[int], *units: Sequence[int]) -> Axes:
    """Drops the axes that would split a block; ``units`` are pairs of what ``Side.units`` says."""
    least = [1] * (len(shape) - 2) + [max(n) for n in zip((1, 1), *units, strict=True)]
    return [axes_if_divisible(mesh, *entry) for entry in zip(axes, shape, least, strict=True)]


def part_shardings(dims: Sequence[Any], amax: Shape) -> list[list]:
    """Returns the shardings of data, scale and an amax of this shape for that of the values."""
    return [list(dims), list(dims), list(dims[: len(amax)])]


def shard_index(mesh: Any, entry: Any) -> jax.Array:
    """Returns which part of a dimension sharded over ``entry`` this device has."""
    index = jnp.uint32(0)
    for axis in axes_of(entry):
        index = index * jnp.uint32(mesh.shape[axis]) + lax.axis_index(axis).astype(jnp.uint32)
    return index


def first_rows(mesh: Any, axes: Axes, sizes: Sequence[int]) -> jax.Array:
    """Returns where this device's part of the merged rows begins: uint32, a number or one for each index of some axes.

    The indices of a part follow each other from the last axis that is split on. If this device has several indices of
    the axes before it, each of them begins anew.
    """
    local = [size // ways(mesh, entry) for entry, size in zip(axes, sizes, strict=True)]
    last = max((i for i, entry in enumerate(axes) if ways(mesh, entry) > 1), default=0)
    apart = last if math.prod(local[:last]) > 1 else 0
    first = jnp.zeros(local[:apart], jnp.uint32)
    for i, entry in enumerate(axes):
        index = shard_index(mesh, entry) * jnp.uint32(local[i])
        if i < apart:
            index = index + jnp.arange(local[i], dtype=jnp.uint32).reshape(-1, *(1,) * (apart - 1 - i))
        first = first + index * jnp.uint32(math.prod(sizes[i + 1 :]))
    return first


def max_over_devices(amax: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Takes the largest amax over mesh axes.

    It compares bits: they order like magnitudes, NaN is the largest, and no subnormal number is flushed.
    """
    return softfloat.from_bits(lax.pmax(softfloat.to_bits(amax), axes)) if axes else amax
