"""nvfp4_append_kv: (keys, values, k, v, positions, pages?) -> keys and values with a new row of each sequence.

Keys and values are three operands each: data, scale, amax (``_cache.py``). k and v are [*outer, B, Hkv, D]. The results
are the operands with other bytes in the new rows: XLA gives them the same memory where nothing else reads it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray

from .. import reference
from .._core.mesh import Shape, axes_of_dims, check_explicit, typed
from ._base import Backend, Partition, Proposal, make_primitive
from ._batching import batch_size, batched
from ._cache import (
    Cache,
    check_cache,
    check_of_sequences,
    claimed,
    known_sizes,
    merged,
    merged_axes,
    names,
    page_operand,
    unpack,
)
from ._checks import check_float

OP = "append_kv"


class AppendParams(NamedTuple):
    """Holds the static parameters of ``nvfp4_append_kv``."""

    paged: bool


# ---------------------------------------------------------------- types
def check_rows(op: str, k: Any, v: Any, heads: int) -> None:
    """Refuses new rows [*outer, B, Hkv, D] that are not one key and one value of each; for 16-bit caches too."""
    check_float(op, "k", k.dtype)
    if (k.shape, k.dtype) != (v.shape, v.dtype):
        raise ValueError(
            f"{op}: k and v must have the same shape and dtype, got {k.dtype} {k.shape} and {v.dtype} {v.shape}"
        )
    if k.shape[-2] != heads:
        raise ValueError(f"{op}: k must have the KV heads of the cache, {heads}, got shape {k.shape}")


def _abstract(p: AppendParams, *flat: ShapedArray) -> list[ShapedArray]:
    cache, (k, v, positions) = unpack(flat, p.paged)
    lead = k.shape[:-2]
    check_cache(OP, cache, lead, k.shape[-2], k.shape[-1])
    check_rows(OP, k, v, cache.keys[0].shape[-3])
    check_of_sequences(OP, "positions", positions, lead)
    check_explicit(OP, k, k.ndim - 1, k.shape[-1])
    return [typed(part, part.shape, part.dtype, axes_of_dims(part)) for part in flat[:6]]


def _empty(_: AppendParams, *flat: jax.Array) -> Sequence[jax.Array]:
    """Returns the cache as it is: there are no new rows, or it has no place for one."""
    return flat[:6]


# ---------------------------------------------------------------- on one device
def _local(p: AppendParams, backend: Backend, *flat: jax.Array) -> Sequence[jax.Array]:
    cache, (k, v, positions) = unpack(flat, p.paged)
    lead = k.ndim - 2
    cache, k, v, positions = merged(cache, reads=False), *(merged_axes(x, lead) for x in (k, v, positions))
    parts = _append(backend, cache, k, v, positions)
    return [part.reshape(old.shape) for part, old in zip(parts, flat[:6], strict=True)]


def _append(backend: Backend, cache: Cache, k: jax.Array, v: jax.Array, positions: jax.Array) -> Sequence[jax.Array]:
    if backend.name == "reference":
        return reference.append_kv(*cache, k, v, positions)
    parts = (*cache.keys, *cache.values)
    known_sizes(OP, k.shape, parts[0].shape, *([] if cache.pages is None else [cache.pages.shape]))
    results = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in parts]
    call = jax.ffi.ffi_call("nvfp4_append_kv", results, input_output_aliases={i: i for i in range(6)})
    return call(*parts, k, v, positions, page_operand(cache))


# ---------------------------------------------------------------- vmap and sharding
def _batch(p: AppendParams, bind: Callable, args, dims):
    size = batch_size(args, dims)
    return bind(p, *(batched(size, *of) for of in zip(args, dims, strict=True))), 6 * [0]


def _shardings(split: Any, sizes: Cache, rank: int) -> tuple[list[list], list[list]]:
    """Returns the shardings of the operands and results: mesh axes, or names of a rule."""
    cache, rows = split.of_cache(sizes), split.of_heads(rank)
    return [*cache, rows, rows, split.lead, *split.of_pages(sizes)], cache


def _partition(p: AppendParams, proposed: Proposal) -> Partition:
    """Each device that has pages needs the new rows of all sequences."""
    axes, (of_k, *_) = unpack(proposed.operands, p.paged)
    sizes, (k, *_) = unpack(proposed.shapes, p.paged)
    split = claimed(proposed, axes, of_k, sizes, whole_batch=p.paged)
    operands, results = _shardings(split, sizes, len(k))
    return operands, results, lambda local: local


def _rule(p: AppendParams, *shapes: Shape) -> tuple[list[list], list[list]]:
    sizes, (k, *_) = unpack(shapes, p.paged)
    return _shardings(names(sizes), sizes, len(k))


append_kv_p = make_primitive(
    "nvfp4_append_kv",
    abstract=_abstract,
    local=_local,
    batch=_batch,
    partition=_partition,
    rule=_rule,
    empty=_empty,
)
