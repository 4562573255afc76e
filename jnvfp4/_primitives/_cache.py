"""Shared by the primitives of a KV cache: its arrays by role, what is refused, and how devices split it.

A cache has room for C tokens of each sequence: arrays [*outer, B, Hkv, C, ...]. With a page table int32
[*outer, B, max_pages] it is a pool of pages that sequences share: arrays [*outer, P, Hkv, 64, ...]. vmap adds the outer
axes.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from .._core.mesh import Axes, Shape, check_explicit
from ..reference import CHUNK
from ..spec import ROW_SCALED
from ._base import Proposal
from ._checks import check_parts
from ._products import ProductAxes

HEAD_SIZES = (64, 128)


class Cache(NamedTuple):
    """Holds the operands that are a cache: arrays, or their shapes or shardings."""

    keys: tuple  # data, scale and amax
    values: tuple  # data, scale and amax
    pages: Any = None

    @property
    def outer(self) -> int:
        """Returns the number of axes that vmap has added, of arrays."""
        return self.keys[0].ndim - 4


def merged(cache: Cache, *, reads: bool) -> Cache:
    """Merges the outer axes of the arrays of one device into the sequences, or into the pages of the pool.

    Of pages that do not exist, ``reads`` takes the nearest of the example's own pool, as kernels do; else it is -1.
    """
    if not (outer := cache.outer):
        return cache
    keys, values = (tuple(merged_axes(part, outer + 1) for part in parts) for parts in (cache.keys, cache.values))
    if cache.pages is None:
        return Cache(keys, values)
    shape, pool = cache.pages.shape, cache.keys[0].shape[outer]
    first = pool * lax.broadcasted_iota(jnp.int32, (math.prod(shape[:outer]), *shape[outer:]), 0)
    pages = merged_axes(cache.pages, outer)
    nearest = jnp.clip(pages, 0, pool - 1)
    found = nearest + first if reads else jnp.where(nearest == pages, pages + first, -1)
    return Cache(keys, values, merged_axes(found, 2))


def merged_axes(x: jax.Array, count: int) -> jax.Array:
    """Merges the first axes of an array."""
    return x.reshape(math.prod(x.shape[:count]), *x.shape[count:])


def page_operand(cache: Cache) -> jax.Array:
    """Returns the page table that a kernel gets: one without elements says that there is none."""
    return jnp.zeros((0,), jnp.int32) if cache.pages is None else cache.pages


# ---------------------------------------------------------------- what is refused
def check_cache(op: str, cache: Cache, lead: Shape, heads: int, depth: int) -> None:
    """Refuses a cache that kernels do not read, or that is not one for ``lead`` sequences with these heads."""
    for name, parts in (("keys", cache.keys), ("values", cache.values)):
        check_parts(op, f"cache.{name}", parts, ROW_SCALED.format)
    (keys, *_), (values, *_) = cache.keys, cache.values
    if keys.shape != values.shape:
        raise ValueError(
            f"{op}: cache.keys and cache.values must have the same shape, got {_values(keys)} and {_values(values)}"
        )
    check_places(op, cache, _values(keys), lead)
    of_cache = 2 * keys.shape[-1]
    if depth != of_cache or depth not in HEAD_SIZES:
        raise ValueError(
            f"{op}: a head must have D={' or '.join(map(str, HEAD_SIZES))} elements, in the cache too, got new tokens "
            f"of D={depth} and cache.keys of shape {_values(keys)}"
        )
    for part in (keys, values):
        for axis in (part.ndim - 1, part.ndim - 2):
            check_explicit(op, part, axis, part.shape[axis])


def check_places(op: str, cache: Cache, shape: Shape, lead: Shape) -> None:
    """Refuses a cache of this shape that has no place for the tokens of ``lead`` sequences; 16-bit caches too."""
    outer, tokens = len(shape) - 4, shape[-2]
    if cache.pages is None:
        if len(shape) != len(lead) + 3 or shape[: outer + 1] != lead:
            raise ValueError(
                f"{op}: cache.keys must have shape [B, Hkv, capacity, D] with B={lead[-1]}, as the new tokens have it, "
                f"got {shape[outer:]}; a pool of pages needs cache.pages"
            )
        if tokens % CHUNK or not tokens:
            raise ValueError(
                f"{op}: the capacity of the cache must be a multiple of {CHUNK}, got {tokens}; make it "
                f"{max(1, -(-tokens // CHUNK)) * CHUNK}: what lies behind the end of a sequence is not read"
            )
        return
    if tokens != CHUNK or not shape[outer]:
        raise ValueError(
            f"{op}: the pages of cache.keys must have {CHUNK} tokens, and there must be one or more, got shape "
            f"{shape[outer:]}"
        )
    for part, *_ in (cache.keys, cache.values):
        check_explicit(op, part, outer, shape[outer])
    pages = cache.pages
    if pages.dtype != jnp.int32:
        raise TypeError(f"{op}: cache.pages must be int32, got {pages.dtype}")
    if pages.shape[:-1] != lead or not pages.shape[-1]:
        raise ValueError(
            f"{op}: cache.pages must have shape [B, max_pages] with B={lead[-1]}, got {pages.shape[outer:]}"
        )


def check_of_sequences(op: str, name: str, x: ShapedArray, lead: Shape) -> None:
    """Refuses what is not one int32 for each sequence."""
    if x.dtype != jnp.int32:
        raise TypeError(f"{op}: {name} must be int32, got {x.dtype}")
    if x.shape != lead:
        raise ValueError(f"{op}: {name} must have shape ({lead[-1]},), one for each sequence, got {x.shape}")


def _values(data: Any) -> Shape:
    return (*data.shape[:-1], 2 * data.shape[-1])


# ---------------------------------------------------------------- sharding
class Split(NamedTuple):
    """Says how sequences and KV heads are split: mesh axes, or names of a sharding rule."""

    lead: list  # outer axes, then that of sequences
    heads: Any

    def of_heads(self, rank: int) -> list:
        """Returns the sharding of an array [*outer, B, heads, ...] of this rank."""
        split = [*self.lead, self.heads]
        return [*split, *[None] * (rank - len(split))]

    def of_cache(self, cache: Cache) -> list[list]:
        """Returns the shardings of the arrays of a cache. No page is on one device alone."""
        split = self if cache.pages is None else Split([*self.lead[:-1], None], self.heads)
        return [split.of_heads(len(shape)) for shape in (*cache.keys, *cache.values)]

    def of_pages(self, cache: Cache) -> list[list]:
        return [] if cache.pages is None else [[*self.lead, None]]


def names(cache: Cache) -> Split:
    """Returns the names of a sharding rule."""
    return Split([*(f"o{i}" for i in range(len(cache.keys[0]) - 4)), "b"], "h")


def claimed(proposed: Proposal, cache: Cache, like: Axes, sizes: Cache, whole_batch: bool) -> Split:
    """Decides how devices split a cache that XLA proposes to split so; ``like`` are the axes of queries, or of keys.

    What moves is the smaller one: the cache stays as it is split, and where it is not, ``like`` decides.
    """
    of_cache, shape, split = cache.keys[0], sizes.keys[0], ProductAxes(proposed)
    outer = len(shape) - 4
    own = [*of_cache[:outer], None if cache.pages is not None else of_cache[outer], of_cache[outer + 1]]
    batch = shape[outer] if sizes.pages is None else sizes.pages[outer]
    wanted = [mine or other for mine, other in zip(own, like, strict=False)]
    if whole_batch:
        wanted[outer] = None
    heads = split.claim(wanted[-1], shape[outer + 1])
    lead = [split.claim(*of) for of in zip(wanted[:-1], (*shape[:outer], batch), strict=True)]
    return Split(lead, heads)


def unpack(flat: Sequence[Any], paged: bool) -> tuple[Cache, list]:
    """Splits six arrays and others, the last of which is the page table if there is one, by role."""
    rest = list(flat[6:])
    return Cache(tuple(flat[:3]), tuple(flat[3:6]), rest.pop() if paged else None), rest


def known_sizes(op: str, *shapes: Shape) -> None:
    """Raises where a size is symbolic: kernels and their scratch depend on all of them."""
    if not all(isinstance(size, int | np.integer) for shape in shapes for size in shape):
        raise NotImplementedError(
            f"{op}: all sizes must be known when a program is lowered, got {', '.join(map(str, shapes))}; export one "
            'program for each size, or pass implementation="reference", which is slower'
        )
