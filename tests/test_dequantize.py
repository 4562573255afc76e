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
    key_for,
    per_block,
    random_tensor,
    rotate,
    rotate_back,
    round_to,
    scale_values,
    unpack_codes,
)

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_RHT_SR, ROW_SCALED, WINDOW64, Format, NVFP4Tensor, four_over_six

SPECS = {
    "1d": NVFP4,
    "2d": NVFP4_2D,
    "row": ROW_SCALED,
    "256": four_over_six(),
    "row256": four_over_six("mse", amax_scope="row"),
    "window64": WINDOW64,
    "rht": NVFP4_RHT,
}
QUICK = cases.tagged("quick")
ROW, WINDOW, RHT = Format(amax_scope="row"), Format(amax_scope="window64"), Format(rht=True)
FORMATS = {name: spec.format for name, spec in SPECS.items() if name != "2d"}  # 2d decodes as 1d
every_spec = pytest.mark.parametrize("spec", list(SPECS.values()), ids=list(SPECS))
every_format = pytest.mark.parametrize("fmt", list(FORMATS.values()), ids=list(FORMATS))
every_out_dtype = pytest.mark.parametrize("dtype", list(cases.DTYPES.values()), ids=list(cases.DTYPES))


def formula(t: NVFP4Tensor, dtype=np.float32, turn_back: bool = True) -> np.ndarray:
    if not (t.format.rht and turn_back):
        return dequantize_by_formula(t.data, t.scale, t.amax, t.format.e4m3_max, dtype)
    return round_to(rotate_back(dequantize_by_formula(t.data, t.scale, t.amax)), dtype)


def check(t: NVFP4Tensor, dtype=np.float32, implementation: str = "native") -> None:
    assert_bitwise(jnvfp4.dequantize(t, dtype, implementation=implementation), formula(t, dtype))


def every_byte(fmt: Format, amax) -> NVFP4Tensor:
    """Every scale byte (NaN and negative ones too) with every pair of codes that have the same row of data."""
    data = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(256, axis=0)
    scale = np.arange(256, dtype=np.uint8).reshape(256, 1).repeat(32, axis=1).view(ml_dtypes.float8_e4m3fn)
    return NVFP4Tensor(jnp.asarray(data), jnp.asarray(scale), jnp.asarray(amax, jnp.float32), fmt)


# ---------------------------------------------------------------- bits
FITTING = [(case, name) for name, spec in SPECS.items() for case in QUICK if case.shape[-1] % spec.unit == 0]


@pytest.mark.parametrize(("case", "spec"), FITTING, ids=[f"{case.name}-{name}" for case, name in FITTING])
def test_quantized_cases(native, case, spec):
    check(jnvfp4.quantize(case.make(), SPECS[spec]))


@every_format
@every_out_dtype
def test_every_backend(backend, fmt, dtype):
    check(random_tensor(0, (2, 3, 5, 64), fmt), dtype, backend.implementation)


@every_format
def test_amax_shapes(native, fmt):
    """Every shape of amax that the format takes."""
    shapes = {"tensor": [(), (2, 3)], "row": [(2, 3, 5)], "window64": [(2, 3, 5, 2)]}[fmt.amax_scope]
    for shape in shapes:
        check(random_tensor(0, (2, 3, 5, 128), fmt, amax=np.random.default_rng(0).uniform(0.5, 2, shape)))


@every_out_dtype
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 3e-36, 0.37, 7e5, 7.7e35, float(FLOAT_MAX), np.inf, np.nan])
@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_every_scale_and_code(native, dtype, amax, e4m3_max):
    check(every_byte(Format(e4m3_max=e4m3_max), amax), dtype)


@every_out_dtype
def test_every_scale_and_code_by_row(backend, dtype):
    amax = np.ldexp(1 + np.arange(256) / 256, np.arange(256) - 128).astype(np.float32)
    check(every_byte(ROW, amax), dtype, backend.implementation)


@every_out_dtype
def test_every_scale_and_code_by_window(backend, dtype):
    """Windows of all magnitudes, zero, infinite and NaN ones among them."""
    amax = np.ldexp(1 + np.arange(2048) / 2048, np.arange(2048) % 256 - 128).astype(np.float32)
    amax[:3] = 0, np.inf, np.nan
    check(every_byte(WINDOW, amax.reshape(256, 8)), dtype, backend.implementation)


@pytest.mark.parametrize("rows", [1, 3, 17, 130])
@pytest.mark.parametrize("fmt", [Format(), WINDOW, RHT], ids=["tensor", "window64", "rht"])
def test_any_number_of_rows(native, rows, fmt):
    check(random_tensor(rows, (rows, 192), fmt))


@pytest.mark.parametrize("shape", [(0, 64), (16, 0), (0, 16, 64)])
@pytest.mark.parametrize("fmt", [Format(), WINDOW, RHT], ids=["tensor", "window64", "rht"])
@every_out_dtype
def test_no_elements(backend, shape, fmt, dtype):
    got = jnvfp4.dequantize(random_tensor(0, shape, fmt), dtype, implementation=backend.implementation)
    assert_bitwise(got, np.zeros(shape, dtype))


def test_subnormals_survive_jit(native):
    t = random_tensor(0, (16, 32), amax=1e-38, scales=range(1, 8))
    got = jax.jit(lambda t: jnvfp4.dequantize(t, implementation="native"))(t)
    values = np.asarray(got)
    assert np.all(np.abs(values) < 2.0**-126)
    assert values.any()
    assert_bitwise(got, dequantize_by_formula(t.data, t.scale, t.amax))


# ---------------------------------------------------------------- rotated tensors
@every_out_dtype
@pytest.mark.parametrize("amax", [0.0, 1e-38, 0.37, 7e5, float(FLOAT_MAX), np.inf, np.nan])
def test_every_scale_and_code_rotated_back(native, dtype, amax):
    check(every_byte(RHT, amax), dtype)


@every_out_dtype
@pytest.mark.parametrize("rotated", [True, False], ids=["rht", "plain"])
def test_without_rotating_back(backend, dtype, rotated):
    t = random_tensor(0, (2, 5, 48), Format(rht=rotated))
    got = jnvfp4.dequantize(t, dtype, rotate_back=False, implementation=backend.implementation)
    assert_bitwise(got, formula(t, dtype, turn_back=False))


def test_subnormals_survive_rotating_back(native):
    t = random_tensor(0, (16, 32), RHT, amax=1e-38, scales=range(1, 8))
    got = jax.jit(lambda t: jnvfp4.dequantize(t, implementation="native"))(t)
    assert 0 < np.max(np.abs(np.asarray(got))) < 2.0**-126
    assert_bitwise(got, formula(t))


def test_rotating_back_rounds_once(native):
    """A 16-bit result is that of the float32 transform: rounding the rotated values first gives others."""
    t = random_tensor(0, (16, 64), RHT)
    early = rotate_back(np.asarray(formula(t, ml_dtypes.bfloat16, turn_back=False)).astype(np.float32))
    got = jnvfp4.dequantize(t, ml_dtypes.bfloat16, implementation="native")
    assert np.any(np.asarray(got) != early.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transpose"])
@pytest.mark.parametrize(("spec", "bound"), [(NVFP4_RHT, 0.12), (NVFP4_RHT_SR, 0.17)], ids=["rht", "rht_sr"])
def test_rotated_round_trip_is_close(native, spec, bound, transpose):
    x = next(case for case in QUICK if case.name == "normal_bf16").make()
    t = jnvfp4.quantize(x, spec, key=key_for(spec), transpose=transpose)
    got, want = np.asarray(jnvfp4.dequantize(t)), (x.T if transpose else x).astype(np.float64)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < bound


# ---------------------------------------------------------------- error of a round trip
@pytest.mark.parametrize("name", ["normal_fp32", "heavy_bf16", "powers_fp32", "outlier_rows_fp16"])
@every_spec
def test_round_trip_is_within_half_a_step(native, name, spec):
    """Where the block scale is normal: half an E2M1 step (1/4, 1/2 or 1) times the block scale."""
    x = next(case for case in QUICK if case.name == name).make().astype(np.float32)
    t = jnvfp4.quantize(x, spec)
    x = rotate(x) if spec.format.rht else x
    q = np.abs(e2m1_values(unpack_codes(t.data)))
    scale = scale_values(t.scale).astype(np.float64)
    amax = find_amax(x, spec.format.amax_scope).astype(np.float64)
    step = np.repeat(scale * per_block(amax, 2) / (6 * spec.format.e4m3_max), 16, axis=-1)
    half = np.where(q < 2, 0.25, np.where(q < 4, 0.5, 1.0)) * step
    error = np.abs(np.asarray(jnvfp4.dequantize(t, rotate_back=False)).astype(np.float64) - x)
    normal = np.repeat(scale >= 2.0**-6, 16, axis=-1)
    assert normal.mean() > 0.5
    assert (error <= half * (1 + 1e-6))[normal].all()
