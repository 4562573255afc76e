"""``dequantize`` against the formula in NumPy."""

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import FLOAT_MAX, assert_bitwise, dequantize_by_formula, random_tensor, rotate_back, round_to

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_2D, NVFP4_RHT, ROW_SCALED, WINDOW64, Format, NVFP4Tensor
from jnvfp4.spec import four_over_six

SPECS = {
    "1d": NVFP4,
    "2d": NVFP4_2D,
    "row": ROW_SCALED,
    "256": four_over_six(),
    "row256": four_over_six("mse", amax_scope="row"),
    "window64": WINDOW64,
    "rht": NVFP4_RHT,
}
ROW, WINDOW, RHT = Format(amax_scope="row"), Format(amax_scope="window64"), Format(rht=True)
FORMATS = {name: spec.format for name, spec in SPECS.items() if name != "2d"}  # 2d decodes as 1d
every_format = pytest.mark.parametrize("fmt", list(FORMATS.values()), ids=list(FORMATS))
every_out_dtype = pytest.mark.parametrize("dtype", list(cases.DTYPES.values()), ids=list(cases.DTYPES))


def formula(t: NVFP4Tensor, dtype=np.float32, turn_back: bool = True) -> np.ndarray:
    if not (t.format.rht and turn_back):
        return dequantize_by_formula(t.data, t.scale, t.amax, t.format.e4m3_max, dtype)
    return round_to(rotate_back(dequantize_by_formula(t.data, t.scale, t.amax)), dtype)


def check(t: NVFP4Tensor, dtype=np.float32, implementation: str = "native", what: str = "array") -> None:
    assert_bitwise(jnvfp4.dequantize(t, dtype, implementation=implementation), formula(t, dtype), what)


def every_byte(fmt: Format, amax) -> NVFP4Tensor:
    """Every scale byte (NaN and negative ones too) with every pair of codes that have the same row of data."""
    data = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(256, axis=0)
    scale = np.arange(256, dtype=np.uint8).reshape(256, 1).repeat(32, axis=1).view(ml_dtypes.float8_e4m3fn)
    return NVFP4Tensor(jnp.asarray(data), jnp.asarray(scale), jnp.asarray(amax, jnp.float32), fmt)


# ---------------------------------------------------------------- bits
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_quantize_makes_has_the_values_of_the_formula(native, spec):
    for case in cases.tagged("quick"):
        if case.shape[-1] % spec.unit == 0:
            check(jnvfp4.quantize(case.make(), spec), what=case.name)


@pytest.mark.parametrize(
    ("fmt", "dtype"), [*zip(FORMATS.values(), 2 * [*cases.DTYPES.values()], strict=True)], ids=FORMATS
)
def test_every_backend_has_the_values_of_the_formula(backend, fmt, dtype):
    check(random_tensor(0, (2, 3, 5, 64), fmt), dtype, backend.implementation)


@every_format
def test_every_shape_of_amax_is_taken(native, fmt):
    """Every shape of amax that the format takes."""
    shapes = {"tensor": [(), (2, 3)], "row": [(2, 3, 5)], "window64": [(2, 3, 5, 2)]}[fmt.amax_scope]
    for shape in shapes:
        check(random_tensor(0, (2, 3, 5, 128), fmt, amax=np.random.default_rng(0).uniform(0.5, 2, shape)))


ODD_AMAXES = [0.0, 1e-45, 1e-38, 3e-36, 0.37, 7e5, 7.7e35, float(FLOAT_MAX), np.inf, np.nan]


@every_out_dtype
@pytest.mark.parametrize("fmt", [Format(), Format(e4m3_max=256), RHT], ids=["448", "256", "rht"])
def test_every_scale_and_code(native, dtype, fmt):
    for amax in ODD_AMAXES:
        check(every_byte(fmt, amax), dtype, what=f"amax {amax}")


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(ROW, ml_dtypes.bfloat16), (WINDOW, np.float16), (WINDOW, np.float32)],
    ids=["row", "half", "window"],
)
def test_every_scale_and_code_by_row_or_window(backend, fmt, dtype):
    """Amaxes of all magnitudes, zero, infinite and NaN ones among them."""
    count = 256 if fmt is ROW else 2048
    amax = np.ldexp(1 + np.arange(count) / count, np.arange(count) % 256 - 128).astype(np.float32)
    amax[:3] = 0, np.inf, np.nan
    check(every_byte(fmt, amax if fmt is ROW else amax.reshape(256, 8)), dtype, backend.implementation)


@pytest.mark.parametrize("fmt", [Format(), WINDOW, RHT], ids=["tensor", "window64", "rht"])
def test_any_number_of_rows(native, fmt):
    for rows in (1, 3, 17, 130):
        check(random_tensor(rows, (rows, 192), fmt), what=f"{rows} rows")


@pytest.mark.parametrize("fmt", [Format(), RHT], ids=["plain", "rht"])
def test_subnormals_survive_jit(native, fmt):
    t = random_tensor(0, (16, 32), fmt, amax=1e-38, scales=range(1, 8))
    got = jax.jit(lambda t: jnvfp4.dequantize(t, implementation="native"))(t)
    assert 0 < np.max(np.abs(np.asarray(got))) < 2.0**-126
    assert_bitwise(got, formula(t))


# ---------------------------------------------------------------- rotated tensors
@pytest.mark.parametrize("rotated", [True, False], ids=["rht", "plain"])
def test_without_rotating_back(backend, rotated):
    t = random_tensor(0, (2, 5, 48), Format(rht=rotated))
    got = jnvfp4.dequantize(t, ml_dtypes.bfloat16, rotate_back=False, implementation=backend.implementation)
    assert_bitwise(got, formula(t, ml_dtypes.bfloat16, turn_back=False))
