"""Stochastic rounding: the bits are Philox at the documented counter, and its results have the stated odds."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DTYPES
from helpers import (
    assert_bitwise,
    assert_same_tensor,
    block_bytes,
    e2m1_values,
    encode_scales,
    random_bytes,
    rotate,
    scale_values,
    unpack_codes,
)
from operands import normal

from jnvfp4 import dequantize, fake_quant, quantize, quantize_pair, reference
from jnvfp4._ops.arguments import random_stream
from jnvfp4._primitives import quantize as primitive
from jnvfp4._primitives._base import Backend, bind
from jnvfp4._primitives._sides import Side
from jnvfp4._primitives._sides import quantize as quantize_one_device
from jnvfp4.spec import NVFP4_RHT_SR, NVFP4_RHT_SR_UNBIASED, NVFP4_SR, NVFP4_SR_UNBIASED, name_of

KEY = jax.random.key(11)
UNIT_AMAX = np.float32(6 * 448)  # with it, a block whose amax is 6 has scale 1: values are codes as they are
SPECS = [NVFP4_SR, NVFP4_RHT_SR, NVFP4_SR_UNBIASED, NVFP4_RHT_SR_UNBIASED]


# ---------------------------------------------------------------- the rule of docs/numerics.md in NumPy
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


def codes_by_formula(x, t, key, transpose: bool) -> np.ndarray:
    """The codes that x rounds to, given the scales and the amax of t."""
    x = np.asarray(x).astype(np.float32)
    x = np.swapaxes(x, -1, -2) if transpose else x
    return round_stochastically(encoded(x, t), random_bytes(key, x.shape, transpose))


def encoded(x, t) -> np.ndarray:
    """What rounding sees of x: times the encode scales, rotated as t is."""
    x = np.asarray(x).astype(np.float32)
    return (rotate(x) if t.format.rht else x) * np.repeat(encode_scales(t.scale, t.amax, x.ndim), 16, -1)


def check_codes(x, spec, transpose, implementation="native"):
    t = quantize(x, spec, key=KEY, transpose=transpose, implementation=implementation)
    assert_bitwise(unpack_codes(t.data), codes_by_formula(x, t, KEY, transpose))


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_the_bits_are_philox_at_the_block_index(native, spec):
    """Rows of all leading axes count on."""
    for transpose in (False, True):
        check_codes(normal((3, 32, 48), 1, "fp32"), spec, transpose)


@pytest.mark.parametrize(("spec", "transpose"), [(NVFP4_SR, True), (NVFP4_SR_UNBIASED, False)], ids=str)
def test_the_bits_of_every_backend(backend, spec, transpose):
    check_codes(normal((3, 32, 48), 1, "fp32"), spec, transpose, backend.implementation)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_input_type_and_odd_row_counts(native, dtype):
    for transpose in (False, True):
        check_codes(normal((48, 37) if transpose else (37, 48), 2, dtype), NVFP4_SR, transpose)


def test_an_amax_per_matrix(native):
    """15 blocks each, so that kernels which take 16 at a time meet two matrices at once."""
    x, amax = normal((3, 5, 48), 3, "fp32"), jnp.asarray([1.0, 2.0, 3.0])
    t = quantize(x, NVFP4_SR, amax=amax, key=KEY)
    assert_bitwise(unpack_codes(t.data), codes_by_formula(x, t, KEY, False))


@pytest.mark.parametrize("row_blocks", [4, 2**31 - 1], ids=["rows_of_4", "long_rows"])
def test_a_64_bit_block_index(backend, row_blocks):
    """A part of a huge array: its first block, and the blocks of a whole row, as on one of many devices."""
    x, words = normal((32, 64), 5, "fp32"), [123, 456]
    amax = jnp.max(jnp.abs(x))
    code = Backend("reference" if backend.implementation == "reference" else backend.platform)
    sides = (Side(NVFP4_SR, transpose=False, has_amax=True, row_blocks=row_blocks),)
    on_one_device = jax.jit(partial(quantize_one_device, primitive._call_kernel, sides, code))
    for first in (0, 2**32 - 5, 2**32 + 7, 2**63 + 2**32 - 1):
        stream = jnp.asarray([*words, first & 0xFFFFFFFF, first >> 32], jnp.uint32)
        data, scale = on_one_device(x, amax, stream)
        index = first + np.arange(32, dtype=object)[:, None] * row_blocks + np.arange(4, dtype=object)
        random = block_bytes(words, (index % 2**64).astype(np.uint64), False).reshape(32, 64)
        v = np.asarray(x) * np.repeat(encode_scales(scale, amax, 2), 16, -1)
        assert_bitwise(unpack_codes(data), round_stochastically(v, random), hex(first))


def test_the_primitive_takes_the_first_block_of_every_matrix(native):
    x, first = normal((2, 16, 32), 6, "fp32"), [2**32 - 3, 9]
    stream = jnp.asarray([[7, 8, f & 0xFFFFFFFF, f >> 32] for f in first], jnp.uint32)
    params = {"params": (Side(NVFP4_SR, transpose=True, has_amax=True),), "implementation": None}
    data, _ = bind(primitive.quantize_p, x, jnp.float32(4), stream, **params)
    for i in range(2):
        alone, _ = bind(primitive.quantize_p, x[i], jnp.float32(4), stream[i], **params)
        assert_bitwise(data[i], alone)


def test_the_reference_takes_x_as_the_whole_array(monkeypatch):
    """Unless it is told how many blocks a row of the whole has."""
    asked, original = [], reference.block_bits
    monkeypatch.setattr(reference, "block_bits", lambda *args: asked.append(args[1:4]) or original(*args))
    x, stream = normal((32, 80)), random_stream(KEY, (32, 80))
    for transpose in (False, True):
        jax.eval_shape(lambda x, t=transpose: reference.quantize(x, NVFP4_SR, transpose=t, stream=stream), x)
    assert asked == [(32, 5, 5), (80, 2, 2)]


# ---------------------------------------------------------------- keys
def test_a_key_decides_the_bytes(native):
    """A legacy key is the typed key."""
    x = normal((16, 32), 7)
    keys = jax.random.key(3), jax.random.key(4), jax.random.PRNGKey(3)
    first, other, legacy = (quantize(x, NVFP4_SR, key=key) for key in keys)
    assert_same_tensor(legacy, first)
    assert_bitwise(other.scale, first.scale)
    assert (other.data != first.data).any()


def test_keys_of_another_generator(native):
    x, key = normal((16, 32), 7, "fp32"), jax.random.key(3, impl="rbg")
    t = quantize(x, NVFP4_SR, key=key)
    assert_bitwise(unpack_codes(t.data), codes_by_formula(x, t, key, False))


# ---------------------------------------------------------------- headroom of block scales
UNBIASED = [NVFP4_SR_UNBIASED, NVFP4_RHT_SR_UNBIASED]
plain_or_rotated = pytest.mark.parametrize("spec", UNBIASED, ids=["plain", "rotated"])


@plain_or_rotated
@pytest.mark.parametrize("exponent", [-108, 100], ids=lambda e: f"2^{e}")
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


DRAWS = 1 << 14


@partial(jax.jit, static_argnums=1)
def draws(x, spec) -> jax.Array:
    """x [16, n] quantized and dequantized with many keys -> [keys * 16, n]; rotated values stay so."""
    quantized = jax.vmap(lambda key: quantize(x, spec, amax=UNIT_AMAX, key=key))(jax.random.split(KEY, DRAWS // 16))
    return dequantize(quantized, rotate_back=False).reshape(DRAWS, -1)


@plain_or_rotated
def test_the_mean_over_keys_of_normal_data(native, spec):
    """It is x but for less than 1/256 of a step toward zero, which 8 random bits leave, and float32 rounding."""
    x = np.asarray(normal((1, 512), 8, "fp32"))[0] * np.float32(400)
    exact = rotate(x) if spec.format.rht else x
    for headroom in (True, False):
        own = dataclasses.replace(spec, scale_headroom=headroom)
        v = np.abs(encoded(x[None], quantize(x[None], own, amax=UNIT_AMAX, key=KEY)))[0]
        drawn = np.asarray(draws(jnp.tile(jnp.asarray(x), (16, 1)), own), np.float64)
        mean, error = drawn.mean(0), drawn.std(0) / math.sqrt(DRAWS)  # of the mean
        lost, room = 1 - mean / exact, 5 * error / np.abs(exact) + 1e-6
        biased = (lost < -room) | (lost > step(v) / 256 / v + room)
        assert (biased & (v > 6)).any() == (not headroom)
        assert not (biased & (v <= 6)).any()


# ---------------------------------------------------------------- a key without a use


@pytest.mark.parametrize("op", [quantize, quantize_pair, fake_quant])
def test_a_key_that_nothing_uses_is_ignored(op):
    x = np.ones((16, 16), np.float32)
    for key in (KEY, "no key"):
        assert str(jax.make_jaxpr(partial(op, key=key))(x)) == str(jax.make_jaxpr(op)(x))


# ---------------------------------------------------------------- where a matrix begins
@pytest.mark.parametrize("shape", [(5, 48, 64), (3, 2, 1 << 12, 1 << 16), (7, 1 << 18, 1 << 17), (3, 1 << 20, 1 << 20)])
def test_the_stream_of_a_matrix_begins_at_its_first_block(shape):
    """Of arrays with more blocks than 32 bits count, all matrices together or each."""
    *lead, rows, cols = shape
    stream = np.asarray(random_stream(KEY, shape)).reshape(-1, 4).astype(object)
    assert [low + (high << 32) for *_, low, high in stream] == [i * rows * cols // 16 for i in range(math.prod(lead))]
    assert (stream[:, :2] == np.asarray(jax.random.bits(KEY, (2,), jnp.uint32))).all()
