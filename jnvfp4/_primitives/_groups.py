"""Shared by grouped products: the rows of a group, on one device and on many, and loops over parts of groups."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.mesh import (
    AnyMesh,
    Axes,
    Entry,
    axes_of,
    axes_of_dims,
    match_varying,
    resharded,
    shard_index,
    without_axes,
)
from ._batching import batch_size


def check_sizes(op: str, sizes: Any, groups: int) -> None:
    """Refuses group sizes that are not int32 [G]."""
    if sizes.dtype != jnp.int32:
        remedy = "if all of them fit, pass group_sizes.astype(jnp.int32)"
        raise TypeError(f"{op}: group_sizes must be int32, got {sizes.dtype}; {remedy}")
    if sizes.shape != (groups,):
        raise ValueError(f"{op}: group_sizes must have shape (G,)=({groups},), got {sizes.shape}")


class Rows(NamedTuple):
    """Says which rows each group has: [starts[g], ends[g]); int32 [G]. The groups follow each other."""

    starts: jax.Array
    ends: jax.Array

    @property
    def sizes(self) -> jax.Array:
        """Returns the rows of each group."""
        return self.ends - self.starts

    def group_of(self, rows: int) -> jax.Array:
        """Returns the group of each of ``rows`` rows; the last group where no group holds the row. -> int32 [rows]"""
        return _place_in(self.ends, jnp.arange(rows, dtype=jnp.int32))

    def held(self, rows: int) -> jax.Array:
        """Says which of ``rows`` rows a group holds. -> bool [rows, 1]"""
        return jnp.arange(rows, dtype=jnp.int32)[:, None] < self.ends[-1]


def _place_in(ends: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the first index whose end is beyond a value, or the last one."""
    at = jnp.searchsorted(ends, values, side="right", method="compare_all").astype(jnp.int32)
    return jnp.minimum(at, np.int32(ends.shape[0] - 1))


@partial(jax.jit, static_argnums=1, inline=True)  # an eager call transfers no constants
def rows_of(sizes: jax.Array, rows: int) -> Rows:
    """Finds the rows of groups that follow each other in [0, rows): a negative size counts as 0, the rest is cut."""
    limit = jnp.asarray(rows, jnp.int32)  # which may be symbolic
    counts = jnp.clip(sizes, np.int32(0), limit)
    ends = lax.associative_scan(lambda a, b: a + jnp.minimum(b, limit - a), counts)  # no sum exceeds int32
    return Rows(jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])[:-1], ends)


# ---------------------------------------------------------------- on one device
class Chunks(NamedTuple):
    """Holds parts of groups, of at most ``size`` rows each: the group of each part, and its rows [begin, end)."""

    size: int
    group: jax.Array
    begin: jax.Array
    end: jax.Array

    @property
    def turns(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns what a loop goes through."""
        return self.group, self.begin, self.end

    def take(self, x: jax.Array, begin: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns ``size`` rows of x among which are [begin, end), with zeros for the others, and the first of them."""
        at = jnp.minimum(begin, np.int32(x.shape[0] - self.size))
        part = lax.dynamic_slice_in_dim(x, at, self.size)
        return jnp.where(self.within(at, begin, end), part, jnp.zeros((), x.dtype)), at

    def within(self, at: jax.Array, begin: jax.Array, end: jax.Array) -> jax.Array:
        """Says which of the rows from ``at`` are within [begin, end), as a column."""
        index = at + jnp.arange(self.size, dtype=jnp.int32)
        return ((index >= begin) & (index < end))[:, None]


MOST_ROWS_OF_A_CHUNK = 2048


def chunks_of(of: Rows, rows: int) -> Chunks:
    """Divides groups into parts, whose number depends on shapes alone: a loop over them has no condition to wait for.

    Each group has one part at most that is not whole. Parts have at least a quarter and at most half as many rows as
    a group of middle size, so that a loop computes three halves of the rows or less; where such a group has fewer than
    32 rows, parts have 16, and a loop computes 16 more rows for each group.

    Raises:
      NotImplementedError: a size is symbolic.
    """
    groups = of.starts.shape[0]
    if not (isinstance(rows, int) and isinstance(groups, int)):
        raise NotImplementedError(
            "grouped_linear: the numbers of rows and groups must be known when a program is lowered, got "
            f"{rows} rows and {groups} groups; export one program for each size"
        )
    size = min(rows, MOST_ROWS_OF_A_CHUNK, max(16, 1 << max(0, (rows // (2 * groups)).bit_length() - 1)))
    counts = -(-of.sizes // np.int32(size))
    lasts = jnp.cumsum(counts, dtype=jnp.int32)
    turn = jnp.arange(rows // size + groups, dtype=jnp.int32)
    group = _place_in(lasts, turn)
    begin = of.starts[group] + (turn - (lasts - counts)[group]) * np.int32(size)
    none = turn >= lasts[-1]
    begin = jnp.where(none, 0, begin)
    return Chunks(size, group, begin, jnp.where(none, 0, jnp.minimum(begin + np.int32(size), of.ends[group])))


# ---------------------------------------------------------------- vmap
def map_examples(params: Any, bind: Callable, args: Sequence[Any], dims: Sequence[Any]) -> tuple:
    """Computes the examples of a vmap one after another: each has its own groups of rows.

    Examples that an Explicit mesh splits are gathered, because no loop goes through a split axis; results are split
    as they were.
    """
    size = batch_size(args, dims)
    moved = [v if d is None else jnp.moveaxis(v, d, 0) for v, d in zip(args, dims, strict=True)]
    of_example = [v for v, d in zip(moved, dims, strict=True) if d is not None]
    over = next((axes[0] for axes in map(_axes, of_example) if axes[0] is not None), None)
    of_example = [resharded(v, [None, *_axes(v)[1:]]) for v in of_example]

    def one(mine: Sequence[jax.Array]) -> jax.Array:
        rest = iter(mine)
        operands = [v if d is None else next(rest) for v, d in zip(moved, dims, strict=True)]
        return bind(params, *match_varying(*operands))[0]

    y = one([v[0] for v in of_example])[None] if size == 1 else lax.map(one, of_example)
    return [resharded(y, [over, *(without_axes(entry, set(axes_of(over))) for entry in _axes(y)[1:])])], [0]


def _axes(x: jax.Array) -> Axes:
    return axes_of_dims(jax.typeof(x))


# ---------------------------------------------------------------- sharding
def without_shared(first: Entry, second: Entry) -> Axes:
    """Returns two entries of a sharding, without axes in the second that the first has."""
    return [first, without_axes(second, set(axes_of(first)))]


def rows_of_device(mesh: AnyMesh, of: Rows, rows: tuple[Entry, int], groups: tuple[Entry, int]) -> Rows:
    """Returns the rows that a device has of the groups that it has, counted from its first row.

    ``rows`` and ``groups`` say over which mesh axes they are split, and how many a device has.
    """
    (over_rows, count), (over_groups, own) = rows, groups
    if axes_of(over_groups):
        first = shard_index(mesh, over_groups).astype(jnp.int32) * np.int32(own)
        of = Rows(*(lax.dynamic_slice_in_dim(v, first, own) for v in of))
    if axes_of(over_rows):
        begin = shard_index(mesh, over_rows).astype(jnp.int32) * np.int32(count)
        of = Rows(*(jnp.clip(v - begin, np.int32(0), np.int32(count)) for v in of))
    return of
