"""A KV cache in NVFP4 or 16-bit floats: attention of one new token of each sequence, and appending it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import AxisType
from jax.typing import ArrayLike, DTypeLike

from .. import reference
from .._core.tensor import NVFP4Tensor, parts_of
from .._primitives._base import bind
from .._primitives._cache import HEAD_SIZES, Cache, check_of_sequences, check_places
from .._primitives._products import DENSE_DTYPES
from .._primitives.append_kv import AppendParams, append_kv_p, check_rows
from .._primitives.decode_attention import AttentionParams, check_query, decode_attention_p
from ..spec import ROW_SCALED
from .arguments import Checks, Implementation, operation

KeysOrValues = NVFP4Tensor | jax.Array


class KVCache(NamedTuple):
    """Holds the keys and values of the tokens so far, of one layer: a pytree.

    Attributes:
      keys: [B, Hkv, capacity, D], an NVFP4Tensor of the spec ``ROW_SCALED``: each token and head has an amax of its
        own, so that a new token changes no other one. Or a bfloat16 or float16 array. The capacity is a multiple of 64.
      values: of the same kind, shape and dtype.
      pages: None, or int32 [B, max_pages]. Keys and values are then a pool [P, Hkv, 64, D] of pages of 64 tokens, and
        token t of sequence b is row t % 64 of the page ``pages[b, t // 64]``. Only the pages that a sequence has begun
        need a number in [0, P).
    """

    keys: KeysOrValues
    values: KeysOrValues
    pages: jax.Array | None = None

    @classmethod
    def zeros(
        cls, shape: Sequence[int], dtype: DTypeLike = jnp.float4_e2m1fn, *, pages: ArrayLike | None = None
    ) -> "KVCache":
        """Makes an empty cache.

        Args:
          shape: [B, Hkv, capacity, D], or [P, Hkv, 64, D] with a page table; axes before these are for vmap or scan.
          dtype: float4_e2m1fn for NVFP4, or bfloat16 or float16.
          pages: the page table, int32 [B, max_pages].

        Raises:
          ValueError, TypeError: sizes or dtypes that no operation takes; the message names them.
        """
        check = Checks("KVCache.zeros")
        table = None if pages is None else check.int32("pages", pages)
        kind = _cache_dtype(check, dtype)
        sizes = _check_sizes(check, shape, kind, table)
        return cls(_zeros(sizes, kind), _zeros(sizes, kind), table)


jax.export.register_namedtuple_serialization(KVCache, serialized_name="jnvfp4.KVCache")


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> KeysOrValues:
    if dtype != jnp.float4_e2m1fn:
        return jnp.zeros(shape, dtype)
    *rows, depth = shape
    return NVFP4Tensor(
        jnp.zeros((*rows, depth // 2), jnp.uint8),
        jnp.zeros((*rows, depth // 16), jnp.float8_e4m3fn),
        jnp.zeros(rows, jnp.float32),
        ROW_SCALED.format,
    )


# ---------------------------------------------------------------- checks
def _cache_dtype(check: Checks, dtype: DTypeLike) -> np.dtype:
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        pass
    else:
        if kind in (jnp.dtype(jnp.float4_e2m1fn), *map(jnp.dtype, DENSE_DTYPES)):
            return kind
    raise TypeError(f"{check.op}: dtype must be float4_e2m1fn, bfloat16 or float16, got {dtype}")


def _check_sizes(check: Checks, shape: Any, dtype: np.dtype, table: jax.Array | None) -> tuple[int, ...]:
    """Refuses a cache that no operation takes, by its last four axes."""
    quantized = dtype == jnp.float4_e2m1fn
    listed = isinstance(shape, Sequence) or np.ndim(shape) == 1
    sizes = tuple(shape) if listed and all(map(_is_size, shape)) else ()
    if len(sizes) < 4 or not sizes[-3] or not (sizes[-1] in HEAD_SIZES if quantized else sizes[-1]):
        depth = "D=64 or 128" if quantized else "D above 0"
        raise ValueError(
            f"{check.op}: shape must be [B, Hkv, capacity, D], or [P, Hkv, 64, D] with pages, of integers, with Hkv "
            f"above 0 and {depth}, got {shape!r}"
        )
    if table is not None and table.ndim < 2:
        raise ValueError(f"{check.op}: pages must have shape [B, max_pages], got {table.shape}")
    part = ShapedArray(sizes[-4:], dtype)
    pages = None if table is None else ShapedArray(table.shape[-2:], table.dtype)
    check_places(check.op, Cache((part,), (part,), pages), part.shape, (part if pages is None else pages).shape[:1])
    return sizes


def _is_size(size: Any) -> bool:
    return jax.export.is_symbolic_dim(size) or (isinstance(size, int | np.integer) and int(size) >= 0)


def _checked(check: Checks, cache: object) -> KVCache:
    """Returns the cache with arrays; refuses another type, and keys of another kind than values."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"{check.op}: cache must be a jnvfp4.attention.KVCache, got {type(cache).__name__}")
    kinds = [isinstance(part, NVFP4Tensor) for part in cache[:2]]
    if kinds[0] != kinds[1]:
        raise TypeError(f"{check.op}: cache.keys and cache.values must both be NVFP4Tensors or neither")
    pages = None if cache.pages is None else check.int32("cache.pages", cache.pages)
    if not kinds[0]:
        keys, values = (check.array(f"cache.{name}", getattr(cache, name)) for name in ("keys", "values"))
        return KVCache(keys, values, pages)
    for name in ("keys", "values"):
        part = getattr(cache, name)
        if part.format != ROW_SCALED.format:
            raise ValueError(
                f"{check.op}: cache.{name} must have the format of ROW_SCALED, {ROW_SCALED.format.name}, got "
                f"{part.format.name}; quantize it by that spec"
            )
        _check_rank(check, name, part.ndim)
    return cache._replace(pages=pages)


def _check_rank(check: Checks, name: str, ndim: int) -> None:
    if ndim != 4:
        raise ValueError(
            f"{check.op}: cache.{name} must have rank 4, [B, Hkv, capacity, D] or [P, Hkv, 64, D], got rank {ndim}; "
            "jax.vmap adds axes"
        )


def _dense(check: Checks, cache: KVCache, like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values of 16 bits; refuses those that are not for ``like`` [B, heads, D]."""
    keys, values = cache.keys, cache.values
    assert not isinstance(keys, NVFP4Tensor)
    assert not isinstance(values, NVFP4Tensor)
    for name in ("keys", "values"):
        _check_rank(check, name, getattr(cache, name).ndim)
    if keys.dtype not in DENSE_DTYPES or (keys.shape, keys.dtype) != (values.shape, values.dtype):
        raise TypeError(
            f"{check.op}: cache.keys and cache.values must be NVFP4Tensors, or bfloat16 or float16 arrays of the same "
            f"shape and dtype, got {keys.dtype} {keys.shape} and {values.dtype} {values.shape}"
        )
    places = Cache((jax.typeof(keys),), (jax.typeof(values),), cache.pages)
    check_places(check.op, places, keys.shape, like.shape[:1])
    if like.dtype != keys.dtype or like.shape[-1] != keys.shape[-1]:
        raise TypeError(
            f"{check.op}: beside a cache of {keys.dtype} with D={keys.shape[-1]} the dtype and D of the new token must "
            f"be the same, got {like.dtype} and D={like.shape[-1]}"
        )
    return keys, values


def _of_one_token(check: Checks, name: str, heads: str, x: object) -> jax.Array:
    x = check.array(name, x)
    if x.ndim != 3:
        raise ValueError(
            f"{check.op}: {name} must have shape [B, {heads}, D], one token of each sequence, got {x.shape}; several "
            "tokens of a sequence are not supported"
        )
    return x


# ---------------------------------------------------------------- operations
@operation
def decode_attention(
    q: ArrayLike,
    cache: KVCache,
    lengths: ArrayLike,
    *,
    sm_scale: float | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Mixes the values of a cache for one new token of each sequence: softmax(sm_scale q K^T) V.

    Args:
      q: [B, Hq, D], bfloat16 or float16; of a cache in 16 bits, its dtype. Hq is a multiple of Hkv: the query heads
        [h Hq / Hkv, (h + 1) Hq / Hkv) share KV head h. D is 64 or 128, in a cache of 16 bits anything.
      cache: a ``KVCache`` that holds the new token too.
      lengths: int32 [B], how many tokens of each sequence q sees, from the first. It stays on the device. A length
        below 0 counts as 0, one above the capacity as the capacity.
      sm_scale: a Python number; None is D**-0.5.
      implementation: as in ``quantize``; of NVFP4 caches only.

    Returns:
      [B, Hq, D] of the dtype of q; zeros for a length of 0. What lies behind the end of a sequence has no influence,
      whatever its bytes are (in a cache of 16 bits it must be finite). For an NVFP4 cache the bits of a sequence depend
      on that sequence alone, on one kind of device: not on the others, their number, the capacity, pages or sharding.
      docs/numerics.md has the order of sums and the bound of the error. An NVFP4 cache has no gradient.

    Raises:
      ValueError, TypeError: shapes, dtypes or formats do not fit; the message names them.
      NotImplementedError: a size of an NVFP4 cache is not known when the program is lowered, or too large for kernels.
    """
    check = Checks("decode_attention")
    check.lowering(implementation)
    cache, q = _checked(check, cache), _of_one_token(check, "q", "Hq", q)
    lengths = check.int32("lengths", lengths)
    if sm_scale is None:
        sm_scale = q.shape[-1] ** -0.5
    known = isinstance(sm_scale, int | float | np.floating) and not isinstance(sm_scale, bool)
    # NumPy would round 2^128 to the type of a scalar; an int may exceed float64.
    if not known or not abs(sm_scale if isinstance(sm_scale, int) else float(sm_scale)) < 2.0**128:
        raise TypeError(f"{check.op}: sm_scale must be None or a finite Python number, got {sm_scale!r}")
    if (parts := _parts(cache)) is None:
        return _attend_dense(check, q, cache, lengths, float(sm_scale))
    operands = [*parts, q, lengths, *_table(cache)]
    params = AttentionParams(float(sm_scale), cache.pages is not None)
    return bind(decode_attention_p, *operands, params=params, implementation=implementation)[0]


@operation
def append_kv(
    cache: KVCache, k: ArrayLike, v: ArrayLike, positions: ArrayLike, *, implementation: Implementation = None
) -> KVCache:
    """Appends the key and value of one token to each sequence.

    Args:
      cache: a ``KVCache``. Give it to ``jax.jit`` as a donated argument: its memory is then that of the result, and
        only the new rows are written.
      k: [B, Hkv, D], float32, bfloat16 or float16; of a cache in 16 bits, its dtype.
      v: of the same shape and dtype.
      positions: int32 [B], where the token of each sequence goes: its length so far. A token whose position is
        negative or beyond the capacity, or whose page does not exist, is dropped: give -1 for a sequence that has
        ended. Keep positions below the capacity yourself, and no two sequences at one place of one page.
      implementation: as in ``quantize``; of NVFP4 caches only.

    Returns:
      The cache with the new rows, which are those of ``quantize(k, ROW_SCALED)`` and ``quantize(v, ROW_SCALED)`` bit
      for bit.

    Raises:
      ValueError, TypeError: shapes, dtypes or formats do not fit; the message names them.
      NotImplementedError: a size of an NVFP4 cache is not known when the program is lowered, or too large for kernels.
    """
    check = Checks("append_kv")
    check.lowering(implementation)
    cache = _checked(check, cache)
    k, v = (_of_one_token(check, name, "Hkv", x) for name, x in (("k", k), ("v", v)))
    positions = check.int32("positions", positions)
    if (parts := _parts(cache)) is None:
        return _append_dense(check, cache, k, v, positions)
    params = AppendParams(cache.pages is not None)
    operands = [*parts, k, v, positions, *_table(cache)]
    new = iter(bind(append_kv_p, *operands, params=params, implementation=implementation))
    keys, values = (NVFP4Tensor(next(new), next(new), next(new), ROW_SCALED.format) for _ in range(2))
    return KVCache(keys, values, cache.pages)


def _parts(cache: KVCache) -> list[jax.Array] | None:
    """Returns the six arrays of an NVFP4 cache; None for one of 16 bits."""
    if isinstance(cache.keys, NVFP4Tensor) and isinstance(cache.values, NVFP4Tensor):
        return [*parts_of(cache.keys), *parts_of(cache.values)]
    return None


def _table(cache: KVCache) -> list[jax.Array]:
    return [] if cache.pages is None else [cache.pages]


# ---------------------------------------------------------------- caches of 16 bits
def _attend_dense(check: Checks, q: jax.Array, cache: KVCache, lengths: jax.Array, sm_scale: float) -> jax.Array:
    keys, values = _dense(check, cache, q)
    check_query(check.op, q, keys.shape[1])
    check_of_sequences(check.op, "lengths", jax.typeof(lengths), q.shape[:1])
    return _sharded_like(q, partial(_mixed, sm_scale=sm_scale), q, keys, values, cache.pages, lengths)


def _mixed(
    q: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array | None, lengths: jax.Array, sm_scale: float
) -> jax.Array:
    keys, values = (_by_token(part, pages) for part in (keys, values))
    seen = jnp.clip(lengths, 0, keys.shape[1])
    out = jax.nn.dot_product_attention(q[:, None], keys, values, scale=sm_scale, key_value_seq_lengths=seen)[:, 0]
    return jnp.where(seen[:, None, None] > 0, out, jnp.zeros((), q.dtype))


def _by_token(part: jax.Array, pages: jax.Array | None) -> jax.Array:
    """Returns keys or values as [B, tokens, Hkv, D]."""
    if pages is None:
        return part.swapaxes(1, 2)
    of_pages = part[jnp.clip(pages, 0, part.shape[0] - 1)].swapaxes(2, 3)  # [B, max_pages, 64, Hkv, D]
    return jax.lax.collapse(of_pages, 1, 3)


def _append_dense(check: Checks, cache: KVCache, k: jax.Array, v: jax.Array, positions: jax.Array) -> KVCache:
    keys, values = _dense(check, cache, k)
    check_rows(check.op, k, v, keys.shape[1])
    check_of_sequences(check.op, "positions", jax.typeof(positions), k.shape[:1])
    keys, values = (
        _sharded_like(part, reference.put_rows, part, row, cache.pages, positions)
        for part, row in ((keys, k), (values, v))
    )
    return KVCache(keys, values, cache.pages)


def _sharded_like(like: jax.Array, f: Callable, *operands: jax.Array | None) -> jax.Array:
    """Calls ``f``, whose indexing JAX does not shard on an Explicit mesh, as on an Auto one."""
    sharding = jax.typeof(like).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return f(*operands)
    return jax.sharding.auto_axes(f, out_sharding=sharding)(*operands)
