"""nvfp4_decode_attention: (keys, values, q, lengths, pages?) -> the mixed values of each query head.

Keys and values are three operands each: data, scale, amax (``_cache.py``). q is [*outer, B, Hq, D].
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from .. import reference
from .._core.mesh import Shape, axes_of_dims, check_explicit, typed
from .._native import plans
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
from ._products import DENSE_DTYPES

OP = "decode_attention"


class AttentionParams(NamedTuple):
    """Holds the static parameters of ``nvfp4_decode_attention``."""

    sm_scale: float
    paged: bool


# ---------------------------------------------------------------- types
def check_query(op: str, q: Any, heads: int) -> None:
    """Refuses queries [*outer, B, Hq, D] that do not go with KV heads; for 16-bit caches too."""
    if q.dtype not in DENSE_DTYPES:
        raise TypeError(f"{op}: q must be bfloat16 or float16, got {q.dtype}; cast it")
    if not heads or q.shape[-2] % heads or not q.shape[-2]:
        raise ValueError(
            f"{op}: the query heads of q must be a multiple of the KV heads of the cache, got {q.shape[-2]} and {heads}"
        )


def _abstract(p: AttentionParams, *flat: ShapedArray) -> list[ShapedArray]:
    cache, (q, lengths) = unpack(flat, p.paged)
    lead, heads = q.shape[:-2], cache.keys[0].shape[-3]
    check_cache(OP, cache, lead, heads, q.shape[-1])
    check_query(OP, q, heads)
    check_of_sequences(OP, "lengths", lengths, lead)
    check_explicit(OP, q, q.ndim - 1, q.shape[-1])
    check_explicit(OP, q, q.ndim - 2, q.shape[-2] // heads)
    return [typed(q, q.shape, q.dtype, axes_of_dims(q))]


# ---------------------------------------------------------------- on one device
def _local(p: AttentionParams, backend: Backend, *flat: jax.Array) -> Sequence[jax.Array]:
    cache, (q, lengths) = unpack(flat, p.paged)
    shape, lead = q.shape, q.ndim - 2
    cache, q, lengths = merged(cache, reads=True), merged_axes(q, lead), merged_axes(lengths, lead)
    heads = cache.keys[0].shape[1]
    q = q.reshape(q.shape[0], heads, q.shape[1] // heads, q.shape[2])
    return [_attend(p, backend, q, cache, lengths).reshape(shape)]


def _attend(p: AttentionParams, backend: Backend, q: jax.Array, cache: Cache, lengths: jax.Array) -> jax.Array:
    """Attends for q [B, Hkv, G, D]."""
    if backend.name == "reference":
        return reference.decode_attention(q, *cache, lengths, p.sm_scale)
    known_sizes(OP, q.shape, cache.keys[0].shape, *([] if cache.pages is None else [cache.pages.shape]))
    tokens = cache.keys[0].shape[2] if cache.pages is None else reference.CHUNK * cache.pages.shape[1]
    plan = plans.plan_decode_attention(shape=(*q.shape, tokens), capability=backend.capability)
    if plan.reason:
        raise NotImplementedError(
            f'{OP}: no kernel runs here: {plan.reason}; pass implementation="reference", which is slower'
        )
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((plan.scratch_bytes,), jnp.uint8)]
    call = jax.ffi.ffi_call("nvfp4_decode_attention", results)
    operands = (q, *cache.keys, *cache.values, lengths, page_operand(cache))
    return call(*operands, sm_scale=np.float32(p.sm_scale))[0]


# ---------------------------------------------------------------- vmap
def _batch(p: AttentionParams, bind: Callable, args, dims):
    size, (cache, (q, lengths)), (of_cache, (of_q, of_lengths)) = (
        batch_size(args, dims),
        unpack(args, p.paged),
        unpack(dims, p.paged),
    )
    if size and {*of_cache.keys, *of_cache.values, of_cache.pages, of_lengths} == {None}:
        return [_as_heads(p, bind, size, args, jnp.moveaxis(q, of_q, 0))], [0]
    if size and p.paged and {*of_cache.keys, *of_cache.values} == {None}:
        q, lengths, pages = (
            batched(size, *of) for of in ((q, of_q), (lengths, of_lengths), (cache.pages, of_cache.pages))
        )
        return [_as_sequences(p, bind, args[:6], q, lengths, pages)], [0]
    return bind(p, *(batched(size, *of) for of in zip(args, dims, strict=True))), [0]


def _as_heads(p: AttentionParams, bind: Callable, size: int, args: Sequence[jax.Array], q: jax.Array) -> jax.Array:
    """Makes examples that share a cache more query heads of it: it is read once, and not repeated."""
    *lead, heads, depth = q.shape[1:]
    kv_heads = args[0].shape[-3]
    grouped = jnp.moveaxis(q.reshape(size, *lead, kv_heads, heads // kv_heads, depth), 0, -3)
    out = bind(p, *args[:6], grouped.reshape(*lead, size * heads, depth), *args[7:])[0]
    return jnp.moveaxis(out.reshape(grouped.shape), -3, 0).reshape(q.shape)


def _as_sequences(
    p: AttentionParams,
    bind: Callable,
    pool: Sequence[jax.Array],
    q: jax.Array,
    lengths: jax.Array,
    pages: jax.Array,
) -> jax.Array:
    """Makes the sequences of examples that share a pool of pages more sequences of it."""
    axis = lengths.ndim - 1  # that of sequences, when the axis of examples is moved before it
    shape = jnp.moveaxis(q, 0, axis - 1).shape

    def joined(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, axis - 1)
        return x.reshape(*x.shape[: axis - 1], -1, *x.shape[axis + 1 :])

    out = bind(p, *pool, joined(q), joined(lengths), joined(pages))[0]
    return jnp.moveaxis(out.reshape(shape), axis - 1, 0)


# ---------------------------------------------------------------- sharding
def _shardings(split: Any, sizes: Cache, rank: int) -> tuple[list[list], list]:
    """Returns the shardings of the operands and of the result: mesh axes, or names of a rule."""
    q = split.of_heads(rank)
    return [*split.of_cache(sizes), q, split.lead, *split.of_pages(sizes)], q


def _partition(p: AttentionParams, proposed: Proposal) -> Partition:
    axes, (of_q, _) = unpack(proposed.operands, p.paged)
    sizes, (q, _) = unpack(proposed.shapes, p.paged)
    split = claimed(proposed, axes, of_q, sizes, whole_batch=False)
    operands, result = _shardings(split, sizes, len(q))
    return operands, [result], lambda local: local


def _rule(p: AttentionParams, *shapes: Shape) -> tuple[list[list], list[list]]:
    """Hq and Hkv share a factor, which has the size of Hkv: the query heads of a KV head stay together."""
    sizes, (q, _) = unpack(shapes, p.paged)
    operands, result = _shardings(names(sizes), sizes, len(q))
    return operands, [result]


decode_attention_p = make_primitive(
    "nvfp4_decode_attention", abstract=_abstract, local=_local, batch=_batch, partition=_partition, rule=_rule
)
