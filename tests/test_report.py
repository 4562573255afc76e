"""``quantization_report``: counts on tensors made by hand, errors against NumPy, every transform."""

import re
from dataclasses import fields
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import Case
from helpers import FLOAT_MAX, amax_for, amax_shape, find_amax, key_for, scale_values
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jnvfp4 import NVFP4, dequantize, quantize, reference
from jnvfp4._core.softfloat import from_bits, to_bits
from jnvfp4.spec import NVFP4_2D, NVFP4_RHT, NVFP4_SR, NVFP4_SR_UNBIASED, ROW_SCALED, WINDOW64, four_over_six, name_of
from jnvfp4.stats import QuantizationReport, quantization_report

# One shape almost everywhere, so that each spec compiles once.
SHAPE = (32, 64)
NUM_BLOCKS = 128
report = jax.jit(quantization_report, static_argnames=("spec", "transpose"))

ONE_OF_EACH_KIND = [
    NVFP4,
    NVFP4_SR_UNBIASED,
    NVFP4_RHT,
    ROW_SCALED,
    WINDOW64,
    four_over_six("mse", e4m3_max=448, fast=True, block_rows=16),
    four_over_six("mae", amax_scope="row"),
]
every_kind = pytest.mark.parametrize("spec", ONE_OF_EACH_KIND, ids=name_of)


def unit_amax(spec):
    """The amax that makes the encode scale of the tensor 1, in the shape of the spec's scope."""
    return jnp.full(amax_shape(spec.format.amax_scope, SHAPE), 6.0 * spec.format.e4m3_max, jnp.float32)


def make_report(x, spec, **arguments):
    return report(jnp.asarray(x), spec, key=key_for(spec), **arguments)


def shares(r) -> tuple[float, ...]:
    return tuple(float(getattr(r, f.name)) for f in fields(r)[:4])


def assert_same_report(got, want):
    """Equal counts; an error is a sum of floats."""
    assert shares(got) == shares(want)
    np.testing.assert_allclose(got.relative_error, want.relative_error, rtol=1e-5)


def normal(seed=0, shape=SHAPE, scale=1.0) -> np.ndarray:
    return Case("normal", shape, "fp32").make(seed) * np.float32(scale)


# ---------------------------------------------------------------- tensors made by hand
# The only nonzero element of a block. With encode scale 1 its block scale is E4M3(value / 6).
LONE = [
    6.0,  # scale 1: just not clipped
    6.25,  # 1.04 rounds to 1: clipped
    -6.25,
    1.5,
    2688.0,  # scale 448, whose reciprocal is rounded: not clipped by that
    5376.0,  # scale 448: clipped
    0.0,
    2.0**-9,  # scale 0, and not counted as clipped
]
CLIPPED, ZERO, SATURATED = 3, 2, 2  # of the eight


def lone_values(spec) -> np.ndarray:
    """SHAPE, float32: each block (each tile, if the spec has tiles) holds one of LONE and zeros."""
    x = np.zeros(SHAPE, np.float32)
    step = spec.block_rows
    places = x[::step, ::16]
    places[...] = np.resize(LONE, places.shape)
    if spec.format.rht:
        signs = np.array([-1 if 0xD7E8 >> i & 1 else 1 for i in range(16)], np.float32)
        x = x[:, ::16].repeat(16, axis=1) / 4 * np.tile(signs, 4)  # the first row of the rotation, exact in bfloat16
    return x


@every_kind
def test_counts_of_lone_values(native, spec):
    got = make_report(lone_values(spec), spec, amax=unit_amax(spec))
    per_block = spec.block_rows * 16  # elements that share a scale
    clipped = 1 if spec.scale_headroom else CLIPPED  # 5376 alone
    assert shares(got) == (clipped / 8 / per_block, ZERO / 8, SATURATED / 8, 0)


@partial(jax.jit, static_argnums=2)
def encode_scales(scale, amax, e4m3_max):
    """In one program: one by one its operations take four times as long to compile."""
    decode, _ = reference.global_scale(to_bits(amax).reshape(-1, 1), e4m3_max)
    return from_bits(reference.block_encode_scale(scale, decode))


@pytest.mark.parametrize("amax", [0, 1e-45, 8e-36, 1, FLOAT_MAX, np.inf])
@pytest.mark.parametrize("spec", [NVFP4, ROW_SCALED, four_over_six("mae", amax_scope="row")], ids=name_of)
def test_clipped_elements_are_those_that_the_quantizer_scales_beyond_6(native, spec, amax):
    """The report divides nowhere; the oracle does as the quantizer."""
    with np.errstate(over="ignore", under="ignore"):
        x = normal() * np.float32(min(max(amax, 1e-30), 1e30)) * np.exp2(np.arange(-80, 48, 2)).astype(np.float32)
    t = quantize(x, spec, amax=jnp.full(unit_amax(spec).shape, amax, jnp.float32))
    scale = np.asarray(t.scale).view(np.uint8)
    encode = np.asarray(encode_scales(scale, t.amax, spec.format.e4m3_max), np.float64)
    scaled = np.abs(x.reshape(*scale.shape, 16)) * encode[..., None]
    count = int(((scaled > 6 * (1 + 2**-20)) & (scale != 0)[..., None]).sum())
    assert float(make_report(x, spec, amax=t.amax).clip_share) == count / x.size


@pytest.mark.parametrize("spec", [s for s in ONE_OF_EACH_KIND if s.select != "max6"], ids=name_of)
def test_map_to_4_equals_a_numpy_count(native, spec):
    x = normal()
    t = quantize(x, spec)
    block_amax = np.abs(x).reshape(32, 4, 16).max(-1)
    if spec.block_rows == 16:
        block_amax = block_amax.reshape(2, 16, 4).max(1).repeat(16, 0)
    amax = find_amax(x, spec.format.amax_scope).reshape(-1, 1)
    base = block_amax / np.float32(6) * np.minimum(np.float32(6 * spec.format.e4m3_max) / amax, FLOAT_MAX)
    to_6 = np.minimum(base, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    count = int((scale_values(t.scale) != to_6).sum())
    assert 0 < count < NUM_BLOCKS
    assert float(make_report(x, spec).map_to_4_share) == count / NUM_BLOCKS


# ---------------------------------------------------------------- relative error
@every_kind
def test_relative_error_is_that_of_the_dequantized_tensor(native, spec):
    x = normal()
    amax = jnp.asarray(amax_for(x, spec))  # given, for which each spec is compiled already
    t = quantize(x, spec, amax=amax, key=key_for(spec))
    error = np.asarray(dequantize(t), np.float64) - x
    want = np.linalg.norm(error) / np.linalg.norm(x.astype(np.float64))
    assert 0.05 < want < 0.2
    np.testing.assert_allclose(make_report(x, spec, amax=amax).relative_error, want, rtol=1e-5)


@pytest.mark.parametrize("scale", [2.0**-90, 2.0**110])
def test_relative_error_does_not_depend_on_the_magnitude(native, scale):
    got, want = make_report(normal(scale=scale), NVFP4), make_report(normal(), NVFP4)
    np.testing.assert_allclose(got.relative_error, want.relative_error, rtol=1e-5)


def test_relative_error_is_zero_on_the_grid_and_without_normal_numbers(native):
    grid = np.resize(np.array([6, 4, 3, -2, 1.5, 1, -0.5, 0], np.float32), SHAPE)
    for x in (grid, np.zeros_like(grid), np.full_like(grid, 1e-40)):
        assert float(make_report(x, NVFP4, amax=unit_amax(NVFP4)).relative_error) == 0


# ---------------------------------------------------------------- special values
@pytest.mark.parametrize("spec", [NVFP4, NVFP4_RHT, ROW_SCALED], ids=name_of)
def test_a_tensor_of_zeros_has_no_error(native, spec):
    got = make_report(np.zeros(SHAPE, np.float32), spec)
    assert isinstance(got, QuantizationReport)
    assert [(v.shape, v.dtype) for v in jax.tree.leaves(got)] == [((), jnp.float32)] * 5
    assert (*shares(got), float(got.relative_error)) == (0, 1, 0, 0, 0)


def test_nan_makes_every_scale_nan_which_counts_as_nothing(native):
    x = normal()
    x[3, 5] = np.nan
    got = make_report(x, NVFP4)
    assert shares(got) == (0, 0, 0, 0)
    assert np.isnan(got.relative_error)


def test_nan_under_a_given_amax_takes_its_block_out_of_the_counts(native):
    x = lone_values(NVFP4)
    whole = make_report(x, NVFP4, amax=unit_amax(NVFP4))
    assert x[0, 16] == 6.25
    x[0, 17] = np.nan
    got = make_report(x, NVFP4, amax=unit_amax(NVFP4))
    assert float(got.clip_share) == float(whole.clip_share) - 1 / x.size
    assert shares(got)[1:] == shares(whole)[1:]
    assert np.isnan(got.relative_error)


def test_infinity_is_clipped_under_a_given_amax(native):
    x = np.zeros(SHAPE, np.float32)
    x[0, :3] = [np.inf, -np.inf, 1]
    got = make_report(x, NVFP4, amax=unit_amax(NVFP4))
    assert shares(got) == (2 / x.size, 1 - 1 / NUM_BLOCKS, 1 / NUM_BLOCKS, 0)
    assert np.isnan(got.relative_error)


# ---------------------------------------------------------------- arguments and transforms
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "fp16"])
def test_sixteen_bit_input_counts_as_its_float32_values(native, dtype):
    x = jnp.asarray(normal()).astype(dtype)
    assert_same_report(make_report(x, NVFP4), make_report(x.astype(jnp.float32), NVFP4))


@pytest.mark.parametrize("spec", [NVFP4_2D, WINDOW64], ids=name_of)
def test_transpose_reports_on_the_swapped_array(native, spec):
    x = normal(shape=(64, 64))
    x[:16] *= 3
    assert_same_report(make_report(x, spec, transpose=True), make_report(x.T, spec))


@pytest.mark.parametrize("spec", [NVFP4, ROW_SCALED], ids=name_of)
def test_an_eager_call_compiles_one_program(native, spec, caplog):
    x = jnp.asarray(normal(shape=(48, 192)))  # a shape that nothing else compiles
    with jax.log_compiles():
        quantization_report(x, spec, amax=1 if spec.format.amax_scope == "tensor" else None)
    assert len(re.findall("Finished XLA compilation", caplog.text)) == 1


def test_vmap_gives_each_matrix_its_report(native):
    x = np.stack([normal(i, scale=2.0**i) for i in range(3)])
    x[1] = 0
    got = jax.jit(jax.vmap(quantization_report))(x)
    for i, matrix in enumerate(x):
        assert_same_report(jax.tree.map(lambda v, i=i: v[i], got), make_report(matrix, NVFP4))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
@pytest.mark.parametrize("spec", [NVFP4, four_over_six("mae", block_rows=16)], ids=name_of)
def test_sharded_counts_equal_those_of_one_device(devices, spec, kind):
    mesh = jax.make_mesh((2, len(devices) // 2), ("x", "y"), axis_types=(kind,) * 2, devices=devices)
    x = Case("x", (64, 256), "fp32", "heavy").make()
    with jax.default_device(devices[0]):
        want = make_report(x, spec)
    with jax.set_mesh(mesh):
        got = make_report(jax.device_put(x, NamedSharding(mesh, P("x", "y"))), spec)
    assert_same_report(got, want)


def test_random_rounding_changes_only_the_error(native):
    x = normal()
    rounded, random = make_report(x, NVFP4), make_report(x, NVFP4_SR)
    assert shares(rounded) == shares(random)
    assert float(random.relative_error) > 1.2 * float(rounded.relative_error)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 16, 64)])
def test_a_report_without_elements_is_zero(shape):
    for spec in (NVFP4, four_over_six(block_rows=16)):
        got = quantization_report(jnp.zeros(shape), spec)
        assert all(float(v) == 0 for v in jax.tree.leaves(got))
