"""decode_attention and append_kv: the bound of docs/numerics.md, bits that no other sequence changes, transforms.

The bits of attention differ between kinds of device, those of the cache do not.
"""

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import (
    assert_bitwise,
    assert_same_tensor,
    assert_vmap_is_a_loop,
    bits,
    dequantize_by_formula,
    half_ulp,
    properties,
    random_tensor,
)
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, elements, every_kind, make_mesh
from operands import ROW

from jnvfp4 import ROW_SCALED, NVFP4Tensor, dequantize, export_checks, quantize
from jnvfp4._native import plans
from jnvfp4.attention import KVCache, append_kv, decode_attention

FLOAT16 = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}


# ---------------------------------------------------------------- problems
class Problem(NamedTuple):
    """Queries, the NVFP4 cache that they see, in which all is NaN behind the ends, and the lengths."""

    q: np.ndarray  # [B, Hq, D]
    cache: KVCache
    lengths: np.ndarray

    def of(self, *sequences: int) -> "Problem":
        """Some of the sequences, in this order; of pages the table alone."""
        chosen = list(sequences)
        keys_and_values, pages = self.cache[:2], self.cache.pages
        if pages is None:
            keys_and_values = jax.tree.map(lambda x: x[np.array(chosen)], keys_and_values)
        cache = KVCache(*keys_and_values, None if pages is None else pages[np.array(chosen)])
        return Problem(self.q[chosen], cache, self.lengths[chosen])

    def run(self, implementation=None, **options) -> np.ndarray:
        cache, q, lengths = jax.tree.map(jnp.asarray, (self.cache, self.q, self.lengths))
        return np.asarray(_attend(cache, q, lengths, implementation, **options))


@partial(jax.jit, static_argnums=3, static_argnames="sm_scale")
def _attend(cache, q, lengths, implementation, sm_scale=None):
    return decode_attention(q, cache, lengths, sm_scale=sm_scale, implementation=implementation)


def with_nan(t: NVFP4Tensor, where: np.ndarray) -> NVFP4Tensor:
    """NaN scales and amaxes in the rows [B, Hkv, C] that ``where`` [B, C] names."""
    scale, amax = bits(t.scale).copy(), np.array(t.amax)
    rows = np.broadcast_to(where[:, None], amax.shape)
    scale[rows], amax[rows] = 0x7F, np.nan
    return NVFP4Tensor(np.asarray(t.data), scale.view(ml_dtypes.float8_e4m3fn), amax, t.format)


def make(lengths, heads=2, group=4, depth=64, capacity=None, dtype="fp16", seed=0, spread=6, size=1.0) -> Problem:
    """Rows whose amaxes are up to 2^spread times larger or smaller than others."""
    rng, lengths = np.random.default_rng(seed), np.asarray(lengths, np.int32)
    capacity = capacity or max(64, -(-int(lengths.max(initial=0)) // 64) * 64)
    shape = (len(lengths), heads, capacity, depth)
    behind = np.arange(capacity) >= lengths[:, None]

    def tensor(i):
        amax = np.float32(3) * 2.0 ** rng.uniform(-spread, spread, shape[:-1])
        return with_nan(random_tensor(2 * seed + i, shape, ROW, amax=amax), behind)

    q = size * rng.standard_normal((len(lengths), heads * group, depth))
    return Problem(q.astype(FLOAT16[dtype]), KVCache(tensor(0), tensor(1)), lengths)


def paged(problem: Problem, spare: int = 3, seed: int = 5) -> Problem:
    """The same sequences in a pool, whose pages are in any order, and the table ends in nonsense."""
    rng = np.random.default_rng(seed)
    batch, heads, capacity = problem.cache.keys.amax.shape
    count = batch * capacity // 64
    order = rng.permutation(count + spare)[:count]
    poison = {1: 0xFF, 4: np.nan}

    def pool(part):
        part = np.asarray(part)
        cut = part.reshape(batch, heads, capacity // 64, 64, *part.shape[3:])
        pages = np.moveaxis(cut, 2, 1).reshape(count, heads, 64, *part.shape[3:])
        whole = np.empty((count + spare, *pages.shape[1:]), part.dtype)
        whole.view(np.uint8 if part.itemsize == 1 else part.dtype)[...] = poison[part.itemsize]
        whole[order] = pages
        return whole

    table = order.reshape(batch, -1).astype(np.int32)
    unused = np.arange(table.shape[1]) * 64 >= np.clip(problem.lengths, 0, None)[:, None]
    table = np.where(unused, rng.choice([-1, 2**31 - 1, -(2**31), count + spare], table.shape), table).astype(np.int32)
    return problem._replace(cache=KVCache(*jax.tree.map(pool, tuple(problem.cache[:2])), table))


def rows_of(codes: np.ndarray, amax: np.ndarray) -> NVFP4Tensor:
    """Codes [..., D] and amaxes [...] with scales of 448: a code of 6 is its row's amax."""
    scale = np.full((*codes.shape[:-1], codes.shape[-1] // 16), 448, ml_dtypes.float8_e4m3fn)
    codes = codes.astype(np.uint8)
    return NVFP4Tensor(codes[..., ::2] | codes[..., 1::2] << 4, scale, amax.astype(np.float32), ROW)


# ---------------------------------------------------------------- the bound
def values_of(t: NVFP4Tensor) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        parts = (np.asarray(part) for part in (t.data, t.scale, t.amax))
        return dequantize_by_formula(*parts).astype(np.float64)


def exact_and_bound(problem: Problem, sm_scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The formula in float64, and the bound of docs/numerics.md before the cast."""
    q, (keys, values) = problem.q.astype(np.float64), map(values_of, problem.cache[:2])
    batch, heads, capacity, depth = keys.shape
    scale = (depth**-0.5 if sm_scale is None else sm_scale) * np.log2(np.e)
    grouped = q.reshape(batch, heads, -1, depth)
    out, bound = np.zeros_like(grouped), np.zeros_like(grouped)
    for b, length in enumerate(np.clip(problem.lengths, 0, capacity)):
        if not length:
            continue
        k, v, amax = keys[b, :, :length], values[b, :, :length], problem.cache.values.amax[b, :, None, :length]
        x = np.einsum("hgd,htd->hgt", grouped[b], k) * scale
        terms = np.max(np.einsum("hgd,htd->hgt", abs(grouped[b]), abs(k)), -1, keepdims=True) * abs(scale)
        p = np.exp2(x - x.max(-1, keepdims=True))
        total = p.sum(-1, keepdims=True)
        out[b] = np.einsum("hgt,htd->hgd", p, v) / total
        relative = 2.0**-11 + 2.0**-20 + 2.0**-21 * terms
        bound[b] = relative * np.einsum("hgt,htd->hgd", p, abs(v)) / total
        chunks = np.arange(0, length, 64)
        largest = np.maximum.reduceat(p, chunks, axis=-1) * np.maximum.reduceat(amax, chunks, axis=-1)
        bound[b] += length * 2.0**-37 * np.max(largest, -1, keepdims=True) / total + 2.0**-120
    return out.reshape(q.shape), bound.reshape(q.shape)


def assert_in_bound(got, problem: Problem, sm_scale: float | None = None) -> None:
    exact, bound = exact_and_bound(problem, sm_scale)
    error = np.abs(np.asarray(got).astype(np.float64) - exact)
    wrong = np.argwhere(~(error <= bound + half_ulp(np.abs(exact) + bound, np.asarray(got).dtype)))
    assert not wrong.size, f"{len(wrong)} of {got.size} outside the bound, first at {tuple(wrong[0])}"


def with_smaller_values(problem: Problem, power: int) -> Problem:
    problem.cache.values.amax[...] *= np.float32(2.0**-power)
    return problem


def with_largest_amax(problem: Problem) -> Problem:
    values = problem.cache.values
    values.scale[:, 0, 0], values.amax[:, 0, 0] = 1, 2.0**127  # the formula multiplies these two first
    return problem


PROBLEMS = {
    "few tokens": make([0, 1, 15, 16, 17, 33, 63]),
    "ends of chunks and groups": make([64, 65, 127, 128, 255, 256, 257, 320], dtype="bf16"),
    "128 elements": make([300, 1, 0, 511], heads=1, group=2, depth=128),
    "one query head": make([100, 64], heads=3, group=1, depth=128, dtype="bf16"),
    "nine query heads": make([70, 5], group=9),
    "flat": make([400, 130], size=1e-4),
    "peaked": make([400, 130], size=8.0, spread=3),
    "equal rows": make([256, 100], spread=0, dtype="bf16"),
    "room that is not used": make([3, 64], capacity=1024),
    "tiny amaxes": make([90], spread=60, size=1e-3, dtype="bf16"),
    "the smallest amaxes of values": with_smaller_values(make([90, 70], spread=3, size=1e-3, dtype="bf16"), 110),
    "the largest exponent of an amax": with_largest_amax(make([70, 1], size=0.0, dtype="bf16")),
    "long": make([2050], heads=1, group=8, depth=128, spread=2),
    "segments of 512 tokens": make([8260], heads=1, group=1, spread=2),
}
every_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


@every_problem
def test_attention_is_within_the_bound(backend, problem):
    """NaN behind the ends has no influence, in capacity and in pages."""
    assert_in_bound(problem.run(backend.implementation), problem)


@pytest.mark.parametrize("sm_scale", [0.0, -0.3, 1, 1e-30, 0.7, np.float32(0.125), np.float16(0.125)])
def test_the_scale_of_scores(backend, sm_scale):
    problem = make([90, 3], spread=1)
    assert_in_bound(problem.run(backend.implementation, sm_scale=sm_scale), problem, sm_scale)
    got, want = (problem.run(backend.implementation, sm_scale=scale) for scale in (None, 64**-0.5))
    assert_bitwise(got, want)


def test_decoding_loses_nothing(backend):
    """A sequence of one token gets its value, for every code under every scale; signs of zeros may differ."""
    scales, codes = np.arange(127, dtype=np.uint8), np.arange(16, dtype=np.uint8)
    row = np.concatenate([codes[::2] | codes[1::2] << 4] * 8)
    scale = np.zeros((16, 64, 8), np.uint8)
    scale[:, 0] = np.resize(scales, (16, 8))
    data = np.broadcast_to(row, (16, 64, 64))
    amax = np.broadcast_to(np.ldexp(2688.0, np.arange(16) - 8).astype(np.float32)[:, None], (16, 64))
    t = NVFP4Tensor(data[:, None], scale[:, None].view(ml_dtypes.float8_e4m3fn), amax[:, None], ROW)
    problem = Problem(np.ones((16, 1, 128), ml_dtypes.bfloat16), KVCache(t, t), np.ones(16, np.int32))
    want = dequantize(jax.tree.map(jnp.asarray, t), jnp.bfloat16)[:, :, 0]
    np.testing.assert_array_equal(problem.run(backend.implementation).astype(np.float32), want.astype(np.float32))


# ---------------------------------------------------------------- bits
def assert_alone(problem: Problem, implementation) -> None:
    """Every sequence has the same bits in the batch, in a second run, alone, in another order, and in pages."""
    want, count = problem.run(implementation), len(problem.lengths)
    assert_bitwise(problem.run(implementation), want, "again")
    pages = paged(problem)
    assert_bitwise(pages.run(implementation), want, "pages")
    order = [*range(1, count), 0, 0]
    assert_bitwise(problem.of(*order).run(implementation), want[order], "in another order")
    for b in range(count):
        assert_bitwise(problem.of(b).run(implementation), want[b : b + 1], f"{b} alone")
        assert_bitwise(pages.of(b).run(implementation), want[b : b + 1], f"{b} alone in pages")


@every_problem
def test_a_sequence_has_its_own_bits(native, problem):
    assert_alone(problem, "native")


def test_a_sequence_has_its_own_bits_by_the_reference(cpu):
    assert_alone(make([64, 65, 0, 320]), "reference")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(50))
def test_random_sequences_have_their_own_bits(native, seed):
    rng = np.random.default_rng(seed)
    lengths = [int(2 ** rng.uniform(0, 9.5)) - 1 for _ in range(4)]
    options = {"heads": int(rng.integers(1, 4)), "group": int(rng.integers(1, 10)), "depth": int(rng.choice([64, 128]))}
    problem = make(lengths, **options, seed=seed, dtype=str(rng.choice(["bf16", "fp16"])))
    assert_in_bound(problem.run("native"), problem)
    assert_alone(problem, "native")


def test_more_sequences_than_a_launch_has(native):
    problem = make([n % 5 for n in range(513)], heads=1, group=1)
    got = problem.run()
    assert_in_bound(got, problem)
    some = [512, 1, 511, 3]
    assert_bitwise(problem.of(*some).run(), got[some])


def three_chunks(rng, count: int, of_segment: int, level: int) -> np.ndarray:
    """Three of ``count`` chunks: of one segment, of segments that one of the four sums has, or of three of these."""
    lane = rng.choice(4, 3, replace=False) if level == 2 else rng.integers(4)
    segments = lane + 4 * rng.choice(count // of_segment // 4, 3, replace=level != 1) * (level > 0)
    return of_segment * segments + rng.choice(of_segment, 3, replace=False)


def sum_in_order(chunks: np.ndarray, of_segment: int) -> np.ndarray:
    """The sums of chunks [C, D] in float32, in the order of docs/numerics.md."""
    ascending = partial(reduce, np.add)
    segments = [ascending(chunks[i : i + of_segment]) for i in range(0, len(chunks), of_segment)]
    return ascending([ascending(segments[i::4]) for i in range(4)])


@pytest.mark.parametrize(("count", "of_segment"), [(52, 4), (132, 8)], ids=["256 tokens", "512 tokens"])
def test_the_order_of_sums(backend, count, of_segment):
    """With equal weights: an element adds 2^26, -2^26 and 1, of which one chunk each has a token; the first eat 1."""
    rng = np.random.default_rng(0)
    codes, chunks = np.zeros((count, 64, 64), int), np.zeros((count, 64), np.float32)
    for element in range(64):
        at = three_chunks(rng, count, of_segment, element % 3)
        codes[at, [9, 9, 10], element] = 7, 15, 7
        chunks[at, element] = np.float32(2688) * np.float32([2**26, -(2**26), 1])  # the factor of sums
    amax = np.zeros((count, 64))
    amax[:, 9], amax[:, 10] = 2**26, 1
    values = rows_of(codes.reshape(1, 1, -1, 64), amax.reshape(1, 1, -1))
    problem = Problem(np.zeros((1, 1, 64), ml_dtypes.bfloat16), KVCache(values, values), np.int32([64 * count]))
    want = sum_in_order(chunks, of_segment) / np.float32(2688 * 64 * count)
    assert 9 < np.count_nonzero(want) < 55
    assert_bitwise(problem.run(backend.implementation)[0, 0], want.astype(ml_dtypes.bfloat16))


def test_capacity_and_other_heads_change_no_bit(backend):
    problem = make([5, 64, 100])
    want = problem.run(backend.implementation)

    def larger(x):
        wider = np.zeros((*x.shape[:2], 512, *x.shape[3:]), x.dtype)
        wider[:, :, : x.shape[2]] = x
        return wider

    more = jax.tree.map(larger, problem.cache)
    assert_bitwise(problem._replace(cache=more).run(backend.implementation), want)
    second = jax.tree.map(lambda x: x[:, 1:], problem.cache)
    alone = problem._replace(cache=second, q=problem.q[:, 4:])
    assert_bitwise(alone.run(backend.implementation), want[:, 4:])
    one = alone._replace(q=problem.q[:, 5:6])
    assert_bitwise(one.run(backend.implementation), want[:, 5:6])


def test_lengths_beyond_the_capacity_and_below_zero(backend):
    problem = make([128, 128, 128, 128])
    got = problem._replace(lengths=np.array([-1, -(2**31), 129, 2**31 - 1], np.int32)).run(backend.implementation)
    want = problem.run(backend.implementation)
    assert_bitwise(got[:2], np.zeros_like(got[:2]))
    assert_bitwise(got[2:], want[2:])


NAN_SPREADS = {
    "scale of a key": ("keys", 0x7F, None, (1, 0), slice(None)),
    "amax of a key": ("keys", None, np.nan, (1, 0), slice(None)),
    "amax of a value": ("values", None, np.nan, (1, 0), slice(None)),
    "scale of a value": ("values", 0x7F, None, (1, 0), slice(32, 48)),
}


@pytest.mark.parametrize(("name", "scale", "amax", "at", "elements"), NAN_SPREADS.values(), ids=NAN_SPREADS)
def test_where_nan_goes(backend, name, scale, amax, at, elements):
    problem = make([70, 70, 70])
    t = getattr(problem.cache, name)
    scales, amaxes = bits(t.scale).copy(), np.array(t.amax)
    if scale is not None:
        scales[(*at, 66, 2)] = scale
    if amax is not None:
        amaxes[(*at, 66)] = amax
    t = NVFP4Tensor(t.data, scales.view(ml_dtypes.float8_e4m3fn), amaxes, t.format)
    got = problem._replace(cache=problem.cache._replace(**{name: t})).run(backend.implementation)
    want = problem.run(backend.implementation).copy()
    want.reshape(3, 2, 4, 64)[1, 0, :, elements] = np.nan
    np.testing.assert_array_equal(got, want)


def test_nan_of_a_query_is_of_its_head(backend):
    problem, q = make([70, 9]), make([70, 9]).q.copy()
    q[1, 3, 5] = np.nan
    want = problem.run(backend.implementation).copy()
    want[1, 3] = np.nan
    np.testing.assert_array_equal(problem._replace(q=q).run(backend.implementation), want)


def test_where_infinity_goes(backend):
    """A score of -inf has no weight, unless a chunk has no other; one of inf makes its head NaN."""
    values = make([128] * 3, heads=1, spread=1).cache.values
    q, amax = np.zeros((3, 2, 64), ml_dtypes.bfloat16), np.full((3, 1, 128), 1e-30)
    q[0, 0, 0], q[1, 0, 0], q[2, :, 0], amax[2, 0, 70:90] = -np.inf, np.inf, -1e34, 1e38

    def run():
        keys = rows_of(np.full((3, 1, 128, 64), 7), amax)
        return Problem(q, KVCache(keys, values), np.int32([128] * 3)).run(backend.implementation).astype(np.float64)

    got, mixed = run(), values_of(values)[:, 0]
    assert np.isnan(got[:2, 0]).all()
    np.testing.assert_allclose(got[:2, 1], mixed[:2].mean(1), rtol=0.02, atol=0.02)
    np.testing.assert_allclose(got[2, 0], np.delete(mixed[2], np.s_[70:90], 0).mean(0), rtol=0.02, atol=0.02)
    amax[2, 0, 64:] = 1e38  # a chunk of -inf alone
    assert np.isnan(run()[2]).all()


# ---------------------------------------------------------------- appending
@partial(jax.jit, static_argnums=4)
def _append(cache, k, v, positions, implementation):
    return append_kv(cache, k, v, positions, implementation=implementation)


def rows_to_append(batch, heads, depth, dtype, seed=0):
    """Rows of any size, and of zeros, NaN and infinity."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((batch, heads, depth)) * np.ldexp(1.0, rng.integers(-12, 12, (batch, heads, 1)))
    rows[0, 0], rows[1, 0, 3], rows[2, 0, 5], rows[2, 1] = 0, np.nan, -np.inf, -0.0
    return rows.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("in_pages", [False, True], ids=["contiguous", "pages"])
def test_appended_rows_are_quantized_rows(backend, dtype, depth, in_pages):
    """Nothing else is written: the first and last places, and those that do not exist."""
    problem = make([128] * 8, heads=2, depth=depth)
    k, v = (rows_to_append(8, 2, depth, dtype, seed) for seed in (0, 1))
    positions = np.array([0, 127, 64, 63, -1, 128, 2**31 - 1, -(2**31)], np.int32)
    cache = paged(problem).cache if in_pages else problem.cache
    if in_pages:  # the pages of some sequences do not exist
        positions[2:4], table = 5, np.array(cache.pages)
        table[2, 0], table[3, 0] = -1, len(cache.keys.data)
        cache = cache._replace(pages=table)
    written = [0, 1] if in_pages else [0, 1, 2, 3]
    cache = jax.tree.map(jnp.asarray, cache)
    want = jax.tree.map(np.array, cache)
    got = _append(cache, k, v, positions, backend.implementation)
    assert_same_tensor(cache, want)  # it is not donated
    for t, x in ((want.keys, k), (want.values, v)):
        rows = quantize(jnp.asarray(x), ROW_SCALED, implementation="reference")
        for part, new in zip((t.data, t.scale, t.amax), (rows.data, rows.scale, rows.amax), strict=True):
            for b in written:
                first, place = (
                    (cache.pages[b, positions[b] // 64], positions[b] % 64) if in_pages else (b, positions[b])
                )
                part[first, :, place] = new[b]
    assert_same_tensor(got, want)


def test_a_cache_of_appended_tokens_is_the_quantized_one(backend):
    x = np.random.default_rng(3).normal(size=(2, 2, 64, 64)) * np.geomspace(1e-3, 1e3, 64)[:, None]
    x = jnp.asarray(x, jnp.bfloat16)
    cache = KVCache.zeros(x.shape)
    for t in range(64):
        cache = _append(cache, x[:, :, t], -x[:, :, t], np.full(2, t, np.int32), backend.implementation)
    assert_same_tensor(cache, KVCache(quantize(x, ROW_SCALED), quantize(-x, ROW_SCALED)))


def pointers(tree) -> list[int]:
    return [s.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]


def test_a_donated_cache_stays_where_it_is(native):
    """Alone, and through the steps of a loop, in which attention reads it too."""
    x = jnp.ones((2, 2, 64), jnp.bfloat16)

    def one(cache):
        return append_kv(cache, x, x, jnp.zeros(2, jnp.int32), implementation="native"), jnp.float32(1)

    def steps(cache):
        def step(carry, i):
            cache = append_kv(carry, x, x, jnp.full(2, i, jnp.int32), implementation="native")
            return cache, decode_attention(x, cache, jnp.full(2, i + 1, jnp.int32), implementation="native")

        return jax.lax.scan(step, cache, jnp.arange(3))

    for f in (one, steps):
        cache = KVCache.zeros((2, 2, 128, 64))
        before = pointers(cache)
        new, out = jax.jit(f, donate_argnums=0)(cache)
        assert pointers(new) == before
        assert jax.tree.leaves(cache)[0].is_deleted()
        assert bool((out == 1).all())


# ---------------------------------------------------------------- transforms
EXAMPLE = make([64, 64, 64], capacity=128)
PAGED = paged(EXAMPLE, spare=0)._replace(lengths=np.array([64, 0, 30], np.int32))
PAGED.cache.pages[2, 0] = 2**31 - 1  # the nearest page is read, and no row is written
EXAMPLE = EXAMPLE._replace(lengths=PAGED.lengths)


AXES = {
    "all": (0, 0, 0, 0),
    "queries": (None, 0, None, None),
    "queries and lengths": (None, 0, 0, None),
    "cache": (0, None, None, None),
    "tables": (None, 0, 0, 0),
    "all but pages": (0, 0, 0, None),
}


@pytest.mark.parametrize("in_pages", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_vmap_of_attention_is_a_loop(backend, axes, in_pages):
    one = PAGED if in_pages else EXAMPLE
    parts = tuple(jax.tree.leaves(one.cache[:2]))
    args = [*parts, one.q, one.lengths, *([one.cache.pages] if in_pages else [])]
    axes = [axes[0]] * 6 + [axes[1], axes[2]] + ([axes[3]] if in_pages else [])
    if not any(axis == 0 for axis in axes):
        pytest.skip("nothing is mapped")
    structure = jax.tree.structure(tuple(one.cache[:2]))

    def f(*flat):
        cache = KVCache(*jax.tree.unflatten(structure, flat[:6]), *flat[8:])
        return decode_attention(flat[6], cache, flat[7], implementation=backend.implementation)

    def examples(x, axis):
        x = jnp.asarray(x)
        return x if axis is None else jnp.stack([x, jnp.roll(x, 1, 0)])

    assert_vmap_is_a_loop(f, map(examples, args, axes), axes)


@pytest.mark.parametrize("in_pages", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize("axes", [(1, None), (0, 0)], ids=["queries", "queries and lengths"])
def test_vmap_over_no_examples_is_empty(backend, axes, in_pages):
    one = jax.tree.map(jnp.asarray, PAGED if in_pages else EXAMPLE)
    q = jnp.zeros(np.insert(one.q.shape, axes[0], 0), one.q.dtype)
    lengths = one.lengths if axes[1] is None else jnp.zeros((0, 3), jnp.int32)
    attend = partial(decode_attention, implementation=backend.implementation)
    out = jax.vmap(lambda q, lengths: attend(q, one.cache, lengths), in_axes=axes)(q, lengths)
    assert (out.shape, out.dtype) == ((0, *one.q.shape), q.dtype)


@pytest.mark.parametrize("in_pages", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize("of_cache", [0, None])
def test_vmap_of_append_is_a_loop(backend, in_pages, of_cache):
    one = PAGED if in_pages else EXAMPLE
    structure = jax.tree.structure(tuple(one.cache[:2]))
    k = rows_to_append(3, 2, 64, np.float16)
    args = [*jax.tree.leaves(one.cache[:2]), k, -k, np.array([0, 4, -1], np.int32)]
    axes = [of_cache] * 6 + [0, 0, 0]
    if in_pages:
        args, axes = [*args, one.cache.pages], [*axes, of_cache]

    def f(*flat):
        cache = KVCache(*jax.tree.unflatten(structure, flat[:6]), *flat[9:])
        return append_kv(cache, *flat[6:9], implementation=backend.implementation)[:2]

    def examples(x, axis):
        x = jnp.asarray(x)
        return x if axis is None else jnp.stack([x, jnp.roll(x, 1, 0)])

    assert_vmap_is_a_loop(f, map(examples, args, axes), axes)


def step(cache, q, k, positions):
    cache = append_kv(cache, k, -k, positions)
    return decode_attention(q, cache, positions + 1), cache


def test_export(native):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    for problem in (EXAMPLE, PAGED):
        k = np.ones((3, 2, 64), np.float16)
        args = jax.tree.map(jnp.asarray, (problem.cache, problem.q, k, np.array([63, 4, 40], np.int32)))
        exported = jax.export.export(jax.jit(step), disabled_checks=export_checks(), platforms=[native.platform])(*args)
        restored = jax.export.deserialize(exported.serialize())
        assert_same_tensor(jax.jit(restored.call)(*args), jax.jit(step)(*args))


@pytest.mark.parametrize("symbol", ["sequences", "pages of a sequence"])
def test_sizes_of_an_exported_program_are_known(native, symbol):
    """The reference, which the error names, takes those that are not."""
    n = jax.export.symbolic_shape("n")[0]
    in_pages = symbol != "sequences"
    batch = 3 if in_pages else n
    cache = jax.eval_shape(lambda: KVCache.zeros((2, 2, 64, 64)))
    if in_pages:
        cache = cache._replace(pages=jax.ShapeDtypeStruct((batch, n), jnp.int32))
    else:
        cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), cache)
    q, rows = (jax.ShapeDtypeStruct((batch, heads, 64), jnp.bfloat16) for heads in (4, 2))
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    for f, operands in ((decode_attention, (q, cache, lengths)), (append_kv, (cache, rows, rows, lengths))):
        with pytest.raises(NotImplementedError, match=rf"{f.__name__}: all sizes must be known .*reference"):
            jax.export.export(jax.jit(f), platforms=[native.platform])(*operands)
        jax.export.export(jax.jit(partial(f, implementation="reference")), platforms=[native.platform])(*operands)


def test_what_no_kernel_takes_is_refused(native, monkeypatch):
    monkeypatch.setattr(plans, "plan_decode_attention", lambda **_: plans.AttentionPlan(0, "it is too large"))
    problem = jax.tree.map(jnp.asarray, make([5], heads=3, group=7))  # which no other test has lowered
    with pytest.raises(NotImplementedError, match='no kernel runs here: it is too large; pass implementation="ref'):
        jax.jit(lambda *v: decode_attention(*v)).lower(problem.q, problem.cache, problem.lengths)


LARGEST = {  # an axis of the shape, the most, one step, the other sizes, the first capability that has the limit, why
    "tokens": (4, 2**30, 64, (1, 1, 1, 64), 0, "it takes at most 2^30 tokens of a sequence"),
    "query heads": (0, 2**24, 1, (2, 1, 64, 64), 80, "it takes at most 2^25 query heads over all sequences"),
    "rows": (4, 2**22, 64, (2**13, 2, 1, 64), 80, "at most 2^25 query heads over all sequences, and 2^36 rows of the"),
}


@pytest.mark.parametrize(("axis", "most", "step", "others", "first", "reason"), LARGEST.values(), ids=LARGEST)
def test_sizes_that_a_kernel_does_not_count_are_refused(axis, most, step, others, first, reason):
    for capability in (0, 80, 90):
        largest, larger = (
            plans.plan_decode_attention(shape=(*others[:axis], size, *others[axis:]), capability=capability).reason
            for size in (most, most + step)
        )
        assert largest == ""
        assert (reason in larger) == (capability >= first)


def test_there_is_no_gradient(backend):
    problem = jax.tree.map(jnp.asarray, EXAMPLE)

    def loss(q):
        out = decode_attention(q, problem.cache, problem.lengths, implementation=backend.implementation)
        return out.astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match="nvfp4_decode_attention has no derivative"):
        jax.grad(loss)(problem.q)


# ---------------------------------------------------------------- sharding
SPLITS = {  # mesh, sharding of sequences and of heads, whether that is possible
    "sequences": ("x", "x", None),
    "heads": ("x", None, "x"),
    "both": ("xy", "x", "y"),
    "both of one": ("xy", ("x", "y"), None),
    "neither": ("xy", None, None),
}


def placed(problem: Problem, mesh, batch, heads) -> tuple:
    """The operands of ``step``: the pool of pages is split by heads alone."""
    in_pages = problem.cache.pages is not None

    def put(x, *spec):
        return jax.device_put(np.asarray(x), NamedSharding(mesh, P(*spec)))

    keys, values = (jax.tree.map(lambda x: put(x, None if in_pages else batch, heads), t) for t in problem.cache[:2])
    pages = put(problem.cache.pages, batch) if in_pages else None
    k = np.random.default_rng(1).standard_normal((len(problem.q), keys.shape[1], 64)).astype(problem.q.dtype)
    positions = problem.lengths - 1
    return KVCache(keys, values, pages), put(problem.q, batch, heads), put(k, batch, heads), put(positions, batch)


@every_kind
@pytest.mark.parametrize("in_pages", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize(("axes", "batch", "heads"), SPLITS.values(), ids=SPLITS)
def test_sharded_steps_have_the_bits_of_one_device(devices, kind, axes, batch, heads, in_pages):
    """There is no collective; of pages only the new rows are gathered, which every device with pages needs."""
    problem = make([70, 5, 64, 1, 33, 128, 2, 100], heads=8, group=2)
    problem = paged(problem) if in_pages else problem
    mesh = make_mesh(devices, axes, kind)
    args = placed(problem, mesh, batch, heads)
    compiled = jax.jit(step).lower(*args).compile()
    found = collectives(compiled.as_text())
    if in_pages:
        largest = 8 * 8 * 64
        assert {op for op, _ in found} <= {"all-gather"}
        assert all(elements(shape) <= largest for _, shape in found), found
        assert found or batch is None
    else:
        assert not found
    out, cache = compiled(*args)
    want = jax.jit(step)(*jax.tree.map(lambda x: jax.device_put(np.asarray(x), devices[0]), args))
    assert_same_tensor((out, cache), want)
    assert out.sharding.is_equivalent_to(args[1].sharding, 3)
    for got, given_ in zip(jax.tree.leaves(cache), jax.tree.leaves(args[0]), strict=True):
        assert got.sharding.is_equivalent_to(given_.sharding, got.ndim)


def dense_cache(problem: Problem, dtype) -> KVCache:
    """The values of the NVFP4 cache, with zeros behind the ends."""
    return problem.cache._replace(
        **{name: np.nan_to_num(values_of(getattr(problem.cache, name))).astype(dtype) for name in ("keys", "values")}
    )


@every_kind
@pytest.mark.parametrize("in_pages", [False, True], ids=["contiguous", "pages"])
def test_a_sharded_cache_of_16_bits_moves_rows_alone(devices, kind, in_pages):
    problem = make([70, 5, 64, 1, 33, 128, 2, 100], heads=8, group=2, dtype="bf16")
    problem = paged(problem) if in_pages else problem
    args = placed(
        problem._replace(cache=dense_cache(problem, ml_dtypes.bfloat16)), make_mesh(devices, "xy", kind), "x", "y"
    )
    compiled = jax.jit(step).lower(*args).compile()
    found = [shape for _, shape in collectives(compiled.as_text())]
    assert all(elements(shape) <= 8 * 8 * 64 for shape in found), found
    assert in_pages or not found
    got = compiled(*args)
    one_device = jax.tree.map(lambda x: jax.device_put(np.asarray(x), devices[0]), args)
    out, cache = jax.jit(step)(*one_device)
    assert_same_tensor(got[1], cache)
    np.testing.assert_allclose(got[0].astype(jnp.float32), out.astype(jnp.float32), rtol=2**-7, atol=2**-9)
    assert got[0].sharding.is_equivalent_to(args[1].sharding, 3)
    assert all(
        part.sharding.is_equivalent_to(old.sharding, 4) for part, old in zip(got[1][:2], args[0][:2], strict=True)
    )


@pytest.mark.parametrize("bits_of", [4, 16])
@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_pool_split_by_pages_is_refused(devices, name, bits_of):
    """On an Explicit mesh; an Auto mesh tells nobody while a program is traced, and gathers it."""
    problem = paged(make([100, 128], heads=8), spare=4)
    problem = problem if bits_of == 4 else problem._replace(cache=dense_cache(problem, np.float16))
    mesh = make_mesh(devices, "xy", "explicit")
    cache, q, k, positions = placed(problem, mesh, None, None)
    put = partial(jax.device_put, device=NamedSharding(mesh, P("x")))
    cache = cache._replace(**{name: jax.tree.map(put, getattr(cache, name))})
    for f in (lambda: append_kv(cache, k, k, positions), lambda: decode_attention(q, cache, positions)):
        with pytest.raises(ValueError, match=r"axis 0 of shape .* is sharded over 'x' \(2 ways\).*; reshard it first"):
            f()


def test_a_sharded_donated_cache_stays_where_it_is(devices):
    mesh = make_mesh(devices, "xy")
    args = placed(make([70, 5, 64, 1, 33, 128, 2, 100], heads=8, group=2), mesh, "x", "y")
    before = pointers(args[0])
    assert pointers(jax.jit(step, donate_argnums=0)(*args)[1]) == before


def test_kv_heads_that_devices_do_not_divide_are_gathered(devices):
    """Three KV heads of two query heads each; the queries alone are split, and come as they must."""
    problem, mesh = make([70, 5], heads=3, group=len(devices)), make_mesh(devices, "x")
    cache, q, _, positions = placed(problem, mesh, None, None)
    q = jax.device_put(np.asarray(q), NamedSharding(mesh, P(None, "x")))
    got = jax.jit(lambda q, cache, n: decode_attention(q, cache, n))(q, cache, positions + 1)
    args = [jax.tree.map(lambda x: jax.device_put(np.asarray(x), devices[0]), v) for v in (q, cache, positions + 1)]
    assert_bitwise(got, decode_attention(*args))


def test_inside_shard_map(devices):
    mesh = make_mesh(devices, "xy")
    args = placed(make([70, 5, 64, 1, 33, 128, 2, 100], heads=8, group=2), mesh, "x", "y")
    specs = jax.tree.map(lambda x: x.sharding.spec, args)
    split = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(specs[1], specs[0])))
    want = jax.jit(step)(*jax.tree.map(lambda x: jax.device_put(np.asarray(x), devices[0]), args))
    assert_same_tensor(split(*args), want)


# ---------------------------------------------------------------- caches of 16 bits
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("in_pages", [False, True], ids=["contiguous", "pages"])
def test_a_cache_of_16_bits_does_the_same(cpu, dtype, in_pages):
    """A model is written once: the same calls, and results as near as the type of the cache allows."""
    problem = make([128, 70, 1], spread=1, dtype="fp16")
    dense = jax.tree.map(jnp.asarray, dense_cache(paged(problem) if in_pages else problem, dtype))
    q, lengths = jnp.asarray(problem.q, dtype), jnp.array([128, 70, 0], jnp.int32)
    got = decode_attention(q, dense, lengths)
    exact, _ = exact_and_bound(problem._replace(q=np.asarray(q), lengths=np.asarray(lengths)))
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, atol=0.05 * np.abs(exact).max())
    assert_bitwise(got[2], jnp.zeros_like(got[2]))
    rows = jnp.ones((3, 2, 64), dtype)
    new = append_kv(dense, rows, 2 * rows, jnp.array([127, -1, 128], jnp.int32))
    changed = [np.argwhere(np.asarray(a != b).any((1, 3))) for a, b in zip(new[:2], dense[:2], strict=True)]
    first = int(dense.pages[0, 1]) if in_pages else 0
    assert [c.tolist() for c in changed] == [[[first, 63 if in_pages else 127]]] * 2


@properties
@given(st.data())
def test_any_lengths(data):
    lengths = data.draw(st.lists(st.integers(-1, 200), min_size=1, max_size=3))
    problem = make(
        lengths, heads=1, group=data.draw(st.integers(1, 9)), seed=data.draw(st.integers(0, 9)), capacity=256
    )
    with jax.default_device(jax.devices("cpu")[0]):
        assert_in_bound(problem.run(), problem)


def test_a_wrong_page_is_the_nearest(backend):
    pages = jnp.asarray(PAGED.cache.pages)
    attend = partial(decode_attention, PAGED.q, lengths=PAGED.lengths, implementation=backend.implementation)
    right, wrong = (attend(PAGED.cache._replace(pages=pages.at[0, 0].set(number))) for number in (0, -1))
    assert_bitwise(right, wrong)


def test_zeros_are_an_empty_cache():
    cache = KVCache.zeros((2, 3, 64, 128))
    assert (cache.keys.shape, cache.keys.format, cache.pages) == ((2, 3, 64, 128), ROW_SCALED.format, None)
    assert_same_tensor(cache.keys, quantize(jnp.zeros((2, 3, 64, 128)), ROW_SCALED))
    assert pointers(cache.keys) != pointers(cache.values)  # each can be donated
    pages = KVCache.zeros((4, 3, 64, 128), jnp.bfloat16, pages=[[0, 1]])
    assert (pages.values.dtype, pages.pages.dtype) == (jnp.bfloat16, jnp.int32)
    for dtype in (jnp.float4_e2m1fn, jnp.bfloat16):
        none = KVCache.zeros((4, 3, 64, 128), dtype, pages=jnp.zeros((0, 2), jnp.int32))
        out = decode_attention(jnp.zeros((0, 6, 128), jnp.bfloat16), none, jnp.zeros(0, jnp.int32))
        assert (out.shape, out.dtype) == ((0, 6, 128), jnp.bfloat16)
    assert KVCache.zeros(np.array([2, 3, 64, 128])).keys.shape == (2, 3, 64, 128)
    with pytest.raises(TypeError, match=r"KVCache.zeros: dtype must be .*, got float32|got <class"):
        KVCache.zeros((2, 3, 64, 128), jnp.float32)
