"""``dequantize`` against the formula in NumPy, and the error of a round trip."""

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import (
    FLOAT_MAX,
    assert_bitwise,
    dequantize_by_formula,
    e2m1_values,
    find_amax,
    random_tensor,
    scale_values,
    unpack_codes,
)

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_2D, ROW_SCALED, Format, NVFP4Tensor

SPECS = {"1d": NVFP4, "2d": NVFP4_2D, "row": ROW_SCALED}
QUICK = cases.tagged("quick")
ROW = Format(amax_scope="row")
every_spec = pytest.mark.parametrize("spec", list(SPECS.values()), ids=list(SPECS))
every_out_dtype = pytest.mark.parametrize("dtype", list(cases.DTYPES.values()), ids=list(cases.DTYPES))


def check(t: NVFP4Tensor, dtype=np.float32, implementation: str = "native") -> None:
    got = jnvfp4.dequantize(t, dtype, implementation=implementation)
    assert_bitwise(got, dequantize_by_formula(t.data, t.scale, t.amax, t.format.e4m3_max, dtype))


def every_byte(fmt: Format, amax) -> NVFP4Tensor:
    """Every scale byte (NaN and negative ones too) with every pair of codes that have the same row of data."""
    data = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(256, axis=0)
    scale = np.arange(256, dtype=np.uint8).reshape(256, 1).repeat(32, axis=1).view(ml_dtypes.float8_e4m3fn)
    return NVFP4Tensor(jnp.asarray(data), jnp.asarray(scale), jnp.asarray(amax, jnp.float32), fmt)


# ---------------------------------------------------------------- bits
@pytest.mark.parametrize("case", QUICK, ids=[case.name for case in QUICK])
@every_spec
def test_quantized_cases(native, case, spec):
    check(jnvfp4.quantize(case.make(), spec))


@every_spec
@every_out_dtype
def test_every_backend(backend, spec, dtype):
    x = next(case for case in QUICK if case.name == "batched").make()
    t = jnvfp4.quantize(x, spec, implementation=backend.implementation)
    check(t, dtype, backend.implementation)


@every_out_dtype
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 3e-36, 0.37, 7e5, 7.7e35, float(FLOAT_MAX), np.inf, np.nan])
@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_every_scale_and_code(native, dtype, amax, e4m3_max):
    check(every_byte(Format(e4m3_max=e4m3_max), amax), dtype)


@every_out_dtype
def test_every_scale_and_code_by_row(backend, dtype):
    amax = np.ldexp(1 + np.arange(256) / 256, np.arange(256) - 128).astype(np.float32)
    check(every_byte(ROW, amax), dtype, backend.implementation)


@pytest.mark.parametrize("shape", [(), (2, 3), (2, 3, 5)], ids=["one", "per matrix", "per row"])
def test_amax_shapes(native, shape):
    amax = np.random.default_rng(0).uniform(0.5, 2, shape)
    check(random_tensor(0, (2, 3, 5, 32), ROW if len(shape) == 3 else Format(), amax=amax))


@pytest.mark.parametrize("rows", [1, 3, 17, 130])
def test_any_number_of_rows(native, rows):
    check(random_tensor(rows, (rows, 48)))


@pytest.mark.parametrize("shape", [(0, 32), (16, 0), (0, 16, 32)])
@every_out_dtype
def test_no_elements(backend, shape, dtype):
    got = jnvfp4.dequantize(random_tensor(0, shape), dtype, implementation=backend.implementation)
    assert_bitwise(got, np.zeros(shape, dtype))


def test_subnormals_survive_jit(native):
    t = random_tensor(0, (16, 32), amax=1e-38, scales=range(1, 8))
    got = jax.jit(lambda t: jnvfp4.dequantize(t, implementation="native"))(t)
    values = np.asarray(got)
    assert np.all(np.abs(values) < 2.0**-126)
    assert values.any()
    assert_bitwise(got, dequantize_by_formula(t.data, t.scale, t.amax))


# ---------------------------------------------------------------- error of a round trip
@pytest.mark.parametrize("name", ["normal_fp32", "heavy_bf16", "powers_fp32", "outlier_rows_fp16"])
@every_spec
def test_round_trip_is_within_half_a_step(native, name, spec):
    """Where the block scale is normal: half an E2M1 step (1/4, 1/2 or 1) times the block scale."""
    x = next(case for case in QUICK if case.name == name).make().astype(np.float32)
    t = jnvfp4.quantize(x, spec)
    q = np.abs(e2m1_values(unpack_codes(t.data)))
    scale = scale_values(t.scale).astype(np.float64)
    amax = find_amax(x, spec.format.amax_scope).astype(np.float64)
    step = np.repeat(scale * (amax[..., None] if amax.ndim else amax) / 2688, 16, axis=-1)
    half = np.where(q < 2, 0.25, np.where(q < 4, 0.5, 1.0)) * step
    error = np.abs(np.asarray(jnvfp4.dequantize(t)).astype(np.float64) - x)
    normal = np.repeat(scale >= 2.0**-6, 16, axis=-1)
    assert normal.mean() > 0.5
    assert (error <= half * (1 + 1e-6))[normal].all()
