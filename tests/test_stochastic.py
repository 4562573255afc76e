"""Stochastic rounding: the bits are Philox at the documented counter, and its results have the stated odds."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES
from helpers import assert_bitwise, assert_same_tensor, e2m1_values, encode_scales, scale_values, unpack_codes
from operands import normal

from jnvfp4 import (
    NVFP4,
    NVFP4_RHT,
    NVFP4_RHT_SR,
    NVFP4_RHT_SR_UNBIASED,
    NVFP4_SR,
    NVFP4_SR_UNBIASED,
    ROW_SCALED,
    dequantize,
    fake_quant,
    linear,
    quantize,
    quantize_pair,
    recipes,
)
from jnvfp4._ops.arguments import random_stream
from jnvfp4._primitives import quantize as primitive
from jnvfp4._primitives._base import Backend, bind
from jnvfp4._primitives._sides import Side
from jnvfp4._primitives._sides import quantize as quantize_one_device

KEY = jax.random.key(11)
UNIT_AMAX = np.float32(6 * 448)  # with it, a block whose amax is 6 has scale 1: values are codes as they are
transposed_or_not = pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transpose"])
SPECS = [NVFP4_SR, NVFP4_RHT_SR, NVFP4_SR_UNBIASED, NVFP4_RHT_SR_UNBIASED]
rotated_or_not = pytest.mark.parametrize("spec", SPECS, ids=["sr", "rht_sr", "sr_unbiased", "rht_sr_unbiased"])


# ---------------------------------------------------------------- the rule of docs/numerics.md in NumPy
def philox(counter, key) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., SC 2011) of four arrays of counter words -> uint32 [..., 4]."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c, k = [np.asarray(word, np.uint64) for word in counter], [np.uint64(word) for word in key]
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(q >> shift) ^ c[1] ^ k[0], q & mask, (p >> shift) ^ c[3] ^ k[1], p & mask]
        k = [(k[0] + np.uint64(0x9E3779B9)) & mask, (k[1] + np.uint64(0xBB67AE85)) & mask]
    return np.stack(np.broadcast_arrays(*c), -1).astype("<u4")


KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers_of_philox(counter, key, want):
    """Those of the authors' library, Random123: this file's formula is Philox."""
    assert " ".join(f"{word:08x}" for word in philox(counter, key)) == want


def random_bytes(key, block: np.ndarray, orientation: int) -> np.ndarray:
    """The 16 bytes of blocks by their 64-bit index -> uint8 [..., 16]."""
    words = philox((block & np.uint64(0xFFFFFFFF), block >> np.uint64(32), orientation, 0), key)
    return np.ascontiguousarray(words).view(np.uint8)


def step(z: np.ndarray) -> np.ndarray:
    """The distance from z to the next E2M1 value above."""
    return np.where(z >= 4, np.float32(2), np.where(z >= 2, np.float32(1), np.float32(0.5)))


def round_stochastically(v: np.ndarray, r: np.ndarray) -> np.ndarray:
    """E2M1 codes of float32 v for random bytes r."""
    a = np.abs(v)
    t = a + r.astype(np.float32) / np.float32(256) * step(a)
    m = np.minimum(np.floor(t / step(t)) * step(t), np.float32(6))
    code = np.searchsorted(e2m1_values(np.arange(8)), m).astype(np.uint8)
    assert (e2m1_values(code) == m).all()
    return code | (np.signbit(v).astype(np.uint8) << 3)


def rotate(x: np.ndarray) -> np.ndarray:
    """The rotation of the last axis by 16, in float32, rounded to bfloat16."""
    to_bf16 = lambda v: v.astype(ml_dtypes.bfloat16).astype(np.float32)  # noqa: E731
    v = to_bf16(x).reshape(*x.shape[:-1], -1, 16) * np.where(0xD7E8 >> np.arange(16) & 1, -1, 1).astype(np.float32)
    for stride in (1, 2, 4, 8):
        a, b = np.moveaxis(v.reshape(*v.shape[:-1], -1, 2, stride), -2, 0)
        v = np.stack([a + b, a - b], -2).reshape(v.shape)
    return to_bf16(v * np.float32(0.25) + np.float32(0)).reshape(x.shape)


def words_of(key) -> list[int]:
    return np.asarray(jax.random.bits(key, (2,), jnp.uint32)).tolist()


def codes_by_formula(x, t, key, transpose: bool) -> np.ndarray:
    """The codes that x rounds to, given the scales and the amax of t."""
    x = np.asarray(x).astype(np.float32)
    x = np.swapaxes(x, -1, -2) if transpose else x
    v = (rotate(x) if t.format.rht else x) * np.repeat(encode_scales(t.scale, t.amax, x.ndim), 16, -1)
    blocks = np.arange(x.size // 16, dtype=np.uint64)
    return round_stochastically(v, random_bytes(words_of(key), blocks, int(transpose)).reshape(x.shape))


@transposed_or_not
@rotated_or_not
def test_the_bits_are_philox_at_the_block_index(backend, spec, transpose):
    """Rows of all leading axes count on."""
    x = normal((3, 32, 48), 1, "fp32")
    t = quantize(x, spec, key=KEY, transpose=transpose, implementation=backend.implementation)
    assert_bitwise(unpack_codes(t.data), codes_by_formula(x, t, KEY, transpose))


@transposed_or_not
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_input_type_and_odd_row_counts(native, dtype, transpose):
    x = normal((48, 37) if transpose else (37, 48), 2, dtype)
    t = quantize(x, NVFP4_SR, key=KEY, transpose=transpose)
    assert_bitwise(unpack_codes(t.data), codes_by_formula(x, t, KEY, transpose))


def test_an_amax_per_matrix(native):
    """15 blocks each, so that kernels which take 16 at a time meet two matrices at once."""
    x, amax = normal((3, 5, 48), 3, "fp32"), jnp.asarray([1.0, 2.0, 3.0])
    t = quantize(x, NVFP4_SR, amax=amax, key=KEY)
    assert_bitwise(unpack_codes(t.data), codes_by_formula(x, t, KEY, False))


def test_scales_and_amax_are_rounded_to_nearest(native):
    x = normal((64, 128), 4)
    for stochastic, nearest in ((NVFP4_SR, NVFP4), (NVFP4_RHT_SR, NVFP4_RHT)):
        t, want = quantize(x, stochastic, key=KEY), quantize(x, nearest)
        assert_same_tensor((t.scale, t.amax), (want.scale, want.amax))
        assert t.format == want.format


@pytest.mark.parametrize("row_blocks", [4, 2**31 - 1], ids=["rows_of_4", "long_rows"])
@pytest.mark.parametrize("first", [0, 2**32 - 5, 2**32 + 7, 2**63 + 2**32 - 1], ids=hex)
def test_a_64_bit_block_index(backend, first, row_blocks):
    """A part of a huge array: its first block, and the blocks of a whole row, as on one of many devices."""
    x, words = normal((32, 64), 5, "fp32"), [123, 456]
    amax = jnp.max(jnp.abs(x))
    stream = jnp.asarray([*words, first & 0xFFFFFFFF, first >> 32], jnp.uint32)
    code = Backend("reference" if backend.implementation == "reference" else backend.platform)
    sides = (Side(NVFP4_SR, transpose=False, has_amax=True, row_blocks=row_blocks),)
    data, scale = _local(sides, code)(x, amax, stream)
    index = first + np.arange(32, dtype=object)[:, None] * row_blocks + np.arange(4, dtype=object)
    random = random_bytes(words, (index % 2**64).astype(np.uint64), 0).reshape(32, 64)
    v = np.asarray(x) * np.repeat(encode_scales(scale, amax, 2), 16, -1)
    assert_bitwise(unpack_codes(data), round_stochastically(v, random))


_JITTED = {}


def _local(sides, code):
    """The computation of one device, compiled once for each backend and ``row_blocks``."""
    return _JITTED.setdefault((sides, code), jax.jit(partial(quantize_one_device, primitive._call_kernel, sides, code)))


def test_the_primitive_takes_the_first_block_of_every_matrix(native):
    x, first = normal((2, 16, 32), 6, "fp32"), [2**32 - 3, 9]
    stream = jnp.asarray([[7, 8, f & 0xFFFFFFFF, f >> 32] for f in first], jnp.uint32)
    params = {"params": (Side(NVFP4_SR, transpose=True, has_amax=True),), "implementation": None}
    data, _ = bind(primitive.quantize_p, x, jnp.float32(4), stream, **params)
    for i in range(2):
        alone, _ = bind(primitive.quantize_p, x[i], jnp.float32(4), stream[i], **params)
        assert_bitwise(data[i], alone)


# ---------------------------------------------------------------- keys
def test_a_key_decides_the_bytes(native):
    x = normal((16, 32), 7)
    first, other, again = (quantize(x, NVFP4_SR, key=jax.random.key(i)) for i in (3, 4, 3))
    assert_same_tensor(again, first)
    assert (other.data != first.data).any()


def test_a_legacy_key_is_the_typed_key(native):
    x = normal((16, 32), 7)
    assert_same_tensor(quantize(x, NVFP4_SR, key=jax.random.PRNGKey(3)), quantize(x, NVFP4_SR, key=jax.random.key(3)))


def test_keys_of_another_generator(native):
    x, key = normal((16, 32), 7, "fp32"), jax.random.key(3, impl="rbg")
    t = quantize(x, NVFP4_SR, key=key)
    assert_bitwise(unpack_codes(t.data), codes_by_formula(x, t, key, False))


def halves(size: int) -> np.ndarray:
    """A symmetric matrix of 2.5, half way between 2 and 3, but for a 6 in every block of rows and of columns."""
    tile = np.arange(size) % 16 == 0
    return np.where(tile[:, None] | tile, 6, 2.5).astype(np.float32)


@pytest.mark.parametrize(
    "other",
    [{"key": jax.random.key(12)}, {"key": jax.random.fold_in(KEY, 0)}, {"key": KEY, "transpose": True}],
    ids=["key", "folded", "orientation"],
)
def test_other_keys_and_the_other_orientation_are_independent(native, other):
    """Two independent fair choices agree in half of n places, up to 5 sigma = 2.5 sqrt(n)."""
    x = halves(512)
    one, two = (
        unpack_codes(quantize(x, NVFP4_SR, amax=UNIT_AMAX, **args).data)[x == 2.5] for args in ({"key": KEY}, other)
    )
    assert set(np.unique(one)) == set(np.unique(two)) == {4, 5}  # 2 and 3
    assert abs(np.sum(one == two) - one.size / 2) < 2.5 * np.sqrt(one.size)


def test_blocks_are_independent(native):
    """Of the same rows, neighbours in either direction agree in half of the places, up to 5 sigma."""
    x = np.where(np.arange(512) % 16, 2.5, 6.0) * np.ones((512, 1))
    codes = unpack_codes(quantize(x, NVFP4_SR, amax=UNIT_AMAX, key=KEY).data)
    up = (codes == 5).reshape(512, 32, 16)[..., 1:]
    for one, two in ((up[1:], up[:-1]), (up[:, 1:], up[:, :-1]), (up[..., 1:], up[..., :-1])):
        assert abs(np.sum(one == two) - one.size / 2) < 2.5 * np.sqrt(one.size)


# ---------------------------------------------------------------- odds
FRACTIONS = (1 / 256, 0.1, 0.25, 0.3, 0.5, 2 / 3, 0.75, 0.9, 255 / 256, 0.999)


def test_the_odds_of_rounding_away(native):
    """floor(256 f) / 256 for a fraction f of the gap, over 2^24 draws in all the gaps of E2M1, up to 5 sigma."""
    grid = e2m1_values(np.arange(8))
    below = np.repeat(np.arange(7), len(FRACTIONS))
    f = np.tile(np.float32(FRACTIONS), 7)
    values = (grid[below] + f * (grid[below + 1] - grid[below])).astype(np.float32)
    f = (values - grid[below]) / (grid[below + 1] - grid[below])  # as rounded
    x = np.resize(values, (2**24 // 15 + 1, 15))  # 70 and 15 share 5: every value meets three places of the block
    x = np.concatenate([np.full((len(x), 1), 6, np.float32), x], 1)
    x[1::2] *= -1
    codes = unpack_codes(quantize(x, NVFP4_SR, amax=UNIT_AMAX, key=KEY).data)
    chosen = np.resize(np.arange(len(values)), codes[:, 1:].size)
    away = (codes[:, 1:] & 7).reshape(-1).astype(np.int64) - below[chosen]
    assert set(np.unique(away)) == {0, 1}
    count, total = np.bincount(chosen, away), np.bincount(chosen)
    p = np.floor(256 * f.astype(np.float64)) / 256
    assert (np.abs(count - total * p) <= 5 * np.sqrt(total * p * (1 - p))).all()
    assert (p <= f).all()
    assert (f - p < 1 / 256).all()


def test_values_on_the_grid_never_move(native):
    x = np.resize(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, -0.0], np.float32), (256, 256))
    t = quantize(x, NVFP4_SR, amax=UNIT_AMAX, key=KEY)
    assert_bitwise(t.data, quantize(x, NVFP4, amax=UNIT_AMAX).data)
    np.testing.assert_array_equal(dequantize(t), x)


def test_what_saturates_stays_at_six(native):
    """Above the largest block scale that amax allows, of either sign."""
    x = np.where(np.arange(128) % 2, np.float32(-3e4), np.float32(3e4)) * np.ones((64, 1), np.float32)
    codes = unpack_codes(quantize(x, NVFP4_SR, amax=np.float32(6), key=KEY).data)
    np.testing.assert_array_equal(codes, np.where(x > 0, 7, 15))


def test_signs_are_kept(native):
    """Negative zero too, and what is rounded to zero."""
    x = np.full((256, 16), -0.01, np.float32)
    x[:, 0], x[:, 1::2] = 6, -0.0
    codes = unpack_codes(quantize(x, NVFP4_SR, amax=UNIT_AMAX, key=KEY).data)
    assert set(np.unique(codes[:, 1:])) == {8, 9}
    assert (codes[:, 1::2] == 8).all()


def test_nan_gives_code_zero(native):
    """In its block alone, where amax is given."""
    x = np.full((16, 64), -5.0, np.float32)
    x[3, 20] = np.nan
    t = quantize(x, NVFP4_SR, amax=np.float32(6), key=KEY)
    codes = unpack_codes(t.data)
    assert not codes[3, 16:32].any()
    assert np.delete(codes.reshape(16, 4, 16), 1, 1).all()
    assert np.isnan(np.asarray(t.scale, np.float32)[3, 1])


# ---------------------------------------------------------------- headroom of block scales
UNBIASED = [NVFP4_SR_UNBIASED, NVFP4_RHT_SR_UNBIASED]
plain_or_rotated = pytest.mark.parametrize("spec", UNBIASED, ids=["plain", "rotated"])


def encoded(x, t) -> np.ndarray:
    """What rounding sees of x: times the encode scales, rotated as t is."""
    x = np.asarray(x).astype(np.float32)
    return (rotate(x) if t.format.rht else x) * np.repeat(encode_scales(t.scale, t.amax, x.ndim), 16, -1)


@transposed_or_not
@plain_or_rotated
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_with_headroom(native, dtype, spec, transpose):
    x = normal((64, 128), 5, dtype) * jnp.exp2(jnp.arange(64.0) / -3)[:, None].astype(DTYPES[dtype])
    t = quantize(x, spec, key=KEY, transpose=transpose)
    v = np.asarray(x.T if transpose else x).astype(np.float32)
    blocks = np.abs(rotate(v) if spec.format.rht else v).reshape(*t.scale.shape, 16).max(-1)
    mult = np.float32(UNIT_AMAX) / np.asarray(t.amax) * np.float32(1 / 6)
    want = np.minimum(blocks * mult * np.float32(1.0625), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    assert_bitwise(np.asarray(t.scale), want)


@plain_or_rotated
@pytest.mark.parametrize("exponent", [-108, -20, 0, 100], ids=lambda e: f"2^{e}")
def test_headroom_clips_nothing(native, spec, exponent):
    """Blocks of every size that have a normal scale: nothing is above 6 but by float32 rounding, as it is without."""
    size = jnp.exp2(exponent - jnp.linspace(0, 15, 512))[:, None].astype(jnp.float32)
    x = (normal((512, 512), 6, "fp32") * size).at[0, 0].set(8.0 * 2.0**exponent)
    largest = {}
    for headroom in (True, False):
        t = quantize(x, dataclasses.replace(spec, scale_headroom=headroom), key=KEY)
        is_normal = scale_values(t.scale) >= 2**-6
        assert is_normal.mean() > 0.7
        largest[headroom] = np.abs(encoded(x, t)).reshape(*t.scale.shape, 16).max(-1)[is_normal]
    assert largest[True].max() <= 6 * (1 + 2**-21)
    assert largest[True].min() >= 5.29
    assert largest[False].max() > 6.3
    assert (largest[False] > 6.01).mean() > 0.3


def test_the_smallest_scales_clip_with_headroom_too(native):
    """Where the exact scale is 1.4 times 2^-9, the smallest above 0, and where it rounds to 0."""
    x = np.zeros((2, 16), np.float32)
    x[:, 0] = 6 * 1.4 * 2**-9, 6 * 0.46 * 2**-9
    t = quantize(x, NVFP4_SR_UNBIASED, amax=UNIT_AMAX, key=KEY)
    np.testing.assert_array_equal(scale_values(t.scale)[:, 0], [2**-9, 0])
    np.testing.assert_array_equal(dequantize(t)[:, 0], [6 * 2**-9, 0])


def test_headroom_saturates_as_without_it(native):
    """A block of the tensor's amax, and one above a given amax."""
    x = np.ones((2, 16), np.float32) * np.float32([[UNIT_AMAX], [2 * UNIT_AMAX]])
    with_headroom, without = (quantize(x, s, amax=UNIT_AMAX, key=KEY) for s in (NVFP4_SR_UNBIASED, NVFP4_SR))
    assert_same_tensor(with_headroom, without)
    np.testing.assert_array_equal(dequantize(with_headroom), np.full((2, 16), UNIT_AMAX))


DRAWS = 1 << 16


@partial(jax.jit, static_argnums=1)
def draws(x, spec) -> jax.Array:
    """x [16, n] quantized and dequantized with many keys -> [keys * 16, n]; rotated values stay so."""
    quantized = jax.vmap(lambda key: quantize(x, spec, amax=UNIT_AMAX, key=key))(jax.random.split(KEY, DRAWS // 16))
    return dequantize(quantized, rotate_back=False).reshape(DRAWS, -1)


def mean_and_error(x, spec) -> tuple[np.ndarray, np.ndarray]:
    """The mean over keys of one row, repeated, and the standard error of that mean."""
    got = np.asarray(draws(jnp.tile(jnp.asarray(x), (16, 1)), spec), np.float64)
    return got.mean(0), got.std(0) / math.sqrt(DRAWS)


def test_the_mean_over_keys_is_x(native):
    """Of a block whose exact scale, 33/32, E4M3 rounds down. All odds are multiples of 1/256."""
    steps = np.array([704, 640, 560, 500, 384, 300, 250, 200, 129, 64, 63, 33, 17, 5, 1, 0])  # of 1/128, 704: 5.5
    x = np.where(np.arange(16) % 2, -1, 1) * np.float32(1.125) * (steps / 128).astype(np.float32)
    mean, error = mean_and_error(x, NVFP4_SR_UNBIASED)
    assert (np.abs(mean - x) <= 5 * error).all()
    mean, error = mean_and_error(x, NVFP4_SR)
    assert (mean[0], error[0]) == (6, 0)  # of 6.1875, with every key


@plain_or_rotated
def test_the_mean_over_keys_of_normal_data(native, spec):
    """It is x but for less than 1/256 of a step toward zero, which 8 random bits leave, and float32 rounding."""
    x = np.asarray(normal((1, 512), 8, "fp32"))[0] * np.float32(400)
    exact = rotate(x) if spec.format.rht else x
    for headroom in (True, False):
        own = dataclasses.replace(spec, scale_headroom=headroom)
        v = np.abs(encoded(x[None], quantize(x[None], own, amax=UNIT_AMAX, key=KEY)))[0]
        mean, error = mean_and_error(x, own)
        lost, room = 1 - mean / exact, 5 * error / np.abs(exact) + 1e-6
        biased = (lost < -room) | (lost > step(v) / 256 / v + room)
        assert (biased & (v > 6)).any() == (not headroom)
        assert not (biased & (v <= 6)).any()


# ---------------------------------------------------------------- one key, or none
WRONG_KEYS = {
    "none": (None, ValueError),
    "three_keys": (jax.random.split(KEY, 3), TypeError),
    "three_legacy_keys": (jax.random.split(jax.random.PRNGKey(0), 3), TypeError),
    "int": (7, TypeError),
    "floats": (np.zeros(2, np.float32), TypeError),
}
OPERATIONS = {
    "quantize": partial(quantize, spec=NVFP4_SR),
    "quantize_pair": partial(quantize_pair, col_spec=NVFP4_SR),
    "fake_quant": partial(fake_quant, spec=NVFP4_SR),
    "linear": partial(linear, w=np.ones((16, 16), np.float32), recipe=recipes.pretrain()),
}


@pytest.mark.parametrize(("key", "error"), WRONG_KEYS.values(), ids=WRONG_KEYS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_what_is_not_one_key_is_refused(op, key, error):
    with pytest.raises(error, match=r"\w+: key must be (a|one) JAX PRNG key"):
        OPERATIONS[op](np.ones((16, 16), np.float32), key=key)


@pytest.mark.parametrize("op", [quantize, quantize_pair, fake_quant])
@pytest.mark.parametrize("key", [KEY, "no key"], ids=["key", "text"])
def test_a_key_that_nothing_uses_is_ignored(op, key):
    x = np.ones((16, 16), np.float32)
    assert str(jax.make_jaxpr(partial(op, key=key))(x)) == str(jax.make_jaxpr(op)(x))


def test_a_pair_without_a_kernel_draws_for_one_side():
    """Two calls: the key is for the side that rounds stochastically."""
    x = normal((16, 32))
    assert_same_tensor(
        quantize_pair(x, ROW_SCALED, NVFP4_SR, key=KEY),
        (quantize(x, ROW_SCALED), quantize(x, NVFP4_SR, key=KEY, transpose=True)),
    )


# ---------------------------------------------------------------- where a matrix begins
@pytest.mark.parametrize("shape", [(5, 48, 64), (3, 2, 1 << 12, 1 << 16), (7, 1 << 18, 1 << 17), (3, 1 << 20, 1 << 20)])
def test_the_stream_of_a_matrix_begins_at_its_first_block(shape):
    """Of arrays with more blocks than 32 bits count, all matrices together or each."""
    *lead, rows, cols = shape
    stream = np.asarray(random_stream(KEY, shape)).reshape(-1, 4).astype(object)
    assert [low + (high << 32) for *_, low, high in stream] == [i * rows * cols // 16 for i in range(math.prod(lead))]
    assert (stream[:, :2] == np.asarray(jax.random.bits(KEY, (2,), jnp.uint32))).all()
