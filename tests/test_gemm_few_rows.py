"""The kernels of the pinned order, by name, on any GPU: the CPU's bits for all data."""

import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import gpus, skip_or_fail
from helpers import assert_bitwise, e2m1_values, random_tensor, scale_values
from products import ROW, TENSOR, WINDOW, dense, hang_guard, multiply_on, quantized, with_nan_scale

import jnvfp4
from jnvfp4 import Format, NVFP4Tensor

KERNEL, PINNED = "sm80_nvfp4_blocks_small_m", "sm90_nvfp4_pinned"
every_kernel = pytest.mark.parametrize("kernel", [KERNEL, "sm80_nvfp4_blocks", PINNED])
ROWS = (1, 7, 8, 9, 16, 17, 33, 64)
# N, K. CTAs have 16 to 112 columns and 8 to 64 rows: what lets all SMs end soonest. They go along
# K by 128 or 256, through seven stages. A K of 1600 or more uses some of these again.
WIDTHS = [(1, 16), (8, 48), (40, 272), (64, 4096), (130, 1600), (1000, 4112), (9001, 272), (9024, 1280)]
# M, N, K with 8, 16, 16, 32 and 64 rows per CTA on an H200; columns that do not fill the last one, and that do.
TILES = [(5, 70, 336), (16, 9001, 320), (33, 9024, 320), (31, 9001, 320), (63, 9024, 336)]
FORMATS = {"tensor": TENSOR, "row": ROW, "256": Format(e4m3_max=256), "window64": WINDOW}
every_a = pytest.mark.parametrize("a_format", FORMATS.values(), ids=FORMATS)
every_b = pytest.mark.parametrize("b_format", FORMATS.values(), ids=FORMATS)
every_tile = pytest.mark.parametrize("shape", TILES, ids=["x".join(map(str, s)) for s in TILES])


@pytest.fixture
def device():
    """A GPU. A kernel that never ends stops the process, since nothing else can."""
    found = [device for device in gpus() if float(device.compute_capability) >= 8.0]
    if not found:
        skip_or_fail("cuda", "no GPU of compute capability 8.0 or newer")
    with hang_guard():
        yield found[0]


def multiply(device, a, b, bias=None, out=np.float32, kernel=KERNEL) -> np.ndarray:
    return multiply_on(device, kernel, a, b, bias, out)


def check(device, a, b, bias=None, out=np.float32, kernel=KERNEL) -> None:
    assert_bitwise(multiply(device, a, b, bias, out, kernel), jnvfp4.matmul_nt(a, b, bias=bias, out_dtype=out))


WIDTHS_OF_WINDOWS = [(1, 64), (40, 192), (64, 4096), (130, 1600), (1000, 4160), (9024, 256)]
SHAPES = [(ROW, *shape) for shape in WIDTHS] + [(WINDOW, *shape) for shape in WIDTHS_OF_WINDOWS]


@every_kernel
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("fmt", "n", "k"), SHAPES, ids=lambda v: getattr(v, "amax_scope", v))
def test_shapes(device, fmt, m, n, k, kernel):
    check(device, *quantized((m, n, k), fmt, fmt), kernel=named(device, kernel, fmt))


def named(device, kernel, *formats) -> str:
    """The kernel of Hopper for these formats; a skip elsewhere."""
    if kernel == PINNED and device.compute_capability != "9.0":
        pytest.skip(f"{PINNED} runs on Hopper")
    return f"{PINNED}_prepared" if kernel == PINNED and WINDOW in formats else kernel


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(300, 520, 272), (4097, 70, 336), (1000, 4200, 80), (129, 8192, 64)])
@every_a
@every_b
def test_many_rows(device, a_format, b_format, shape, out):
    """By each tile, and with b decoded in the kernel and before it."""
    if WINDOW in (a_format, b_format):
        shape = (*shape[:2], 320)
    named(device, PINNED)
    a, b = quantized(shape, a_format, b_format)
    kernel = jnvfp4.supports("matmul_nt", a, b, accumulation="pinned", device=device).kernel
    check(device, a, b, dense((shape[1],), np.float32), out, kernel)


@every_a
@every_b
@pytest.mark.parametrize(
    "shape", [(5, 70, 320), (16, 9001, 320), (64, 9024, 256), (64, 14336, 192)], ids=["8", "16", "32 or 64", "64"]
)
def test_formats(device, a_format, b_format, shape):
    check(device, *quantized(shape, a_format, b_format))


@every_kernel
@pytest.mark.parametrize("fmt", [TENSOR, WINDOW], ids=["tensor", "window64"])
def test_every_code_and_scale(device, fmt, kernel):
    """Each pair of scales of the whole range of E4M3, and every product of codes."""
    operands = quantized((64, 128, 2048), fmt, fmt, scales=range(0x7F))
    check(device, *operands, kernel=named(device, kernel, fmt))


@pytest.mark.parametrize("fmt", [ROW, WINDOW], ids=["row", "window64"])
@pytest.mark.parametrize("shared", [False, True], ids=["batched b", "shared b"])
@pytest.mark.parametrize("lead", [(2, 3), (300,)], ids=["6", "300"])
@pytest.mark.parametrize("m", [5, 13, 40])
@every_kernel
def test_leading_axes(device, fmt, shared, lead, m, kernel):
    """300 matrices keep every SM busy with any tile."""
    m = max(1, m // int(np.prod(lead))) if shared else m  # leading axes of a are rows
    if shared and m * np.prod(lead) > 64:
        lead = (2, 3)
    a = random_tensor(0, (*lead, m, 320), fmt)
    b = random_tensor(1, (7, 320) if shared else (*lead, 7, 320), fmt)
    check(device, a, b, dense((7,), np.float32), kernel=named(device, kernel, fmt))


@every_kernel
@every_tile
@pytest.mark.parametrize("fmt", [ROW, WINDOW], ids=["row", "window64"])
def test_nan_scales_reach_their_row_and_column(device, shape, fmt, kernel):
    a, b = quantized((*shape[:2], 320), fmt, fmt)
    a, b = with_nan_scale(a, -1), with_nan_scale(with_nan_scale(b, 4), -1)
    check(device, a, b, kernel=named(device, kernel, fmt))


@every_kernel
@every_tile
@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan, 1e25, 1e-25, 1e-38], ids=str)
def test_amax_of_a_window_that_is_no_ordinary_number(device, shape, amax, kernel):
    """In one window of either operand: alpha of 0, Inf, NaN and subnormal numbers."""
    a, b = quantized((*shape[:2], 320), WINDOW, WINDOW)
    a = NVFP4Tensor(a.data, a.scale, a.amax.at[2, 1].set(amax), WINDOW)
    b = NVFP4Tensor(b.data, b.scale, b.amax.at[4, 3].set(amax), WINDOW)
    check(device, a, b, kernel=named(device, kernel, WINDOW))


@every_kernel
@every_tile
def test_amaxes_of_16_bit_arrays(device, shape, kernel):
    """Their products are exact, which sm90_nvfp4_pinned_prepared makes use of."""
    shorter = [
        NVFP4Tensor(t.data, t.scale, t.amax.astype(jnp.bfloat16).astype(jnp.float32), WINDOW)
        for t in quantized((*shape[:2], 320), WINDOW, WINDOW)
    ]
    check(device, *shorter, kernel=named(device, kernel, WINDOW))


def with_smaller_fourth_blocks(t: NVFP4Tensor, places: int, largest: bool) -> NVFP4Tensor:
    """The scales of every fourth block are so many binary places below the others; codes are 6 or -6 if ``largest``."""
    mantissas = np.random.default_rng(places).integers(0, 8, t.scale.shape, np.uint8)
    exponents = np.where(np.arange(t.scale.shape[-1]) % 4 == 3, max(14 - places, 0), 14).astype(np.uint8)
    scale = (exponents << 3 | mantissas).view(t.scale.dtype)
    return NVFP4Tensor(t.data | 0x77 if largest else t.data, jnp.asarray(scale), t.amax, t.format)


@every_kernel
@pytest.mark.parametrize("places", [(0, 0), (1, 1), (2, 0), (0, 2), (2, 1), (2, 2), (4, 0), (7, 7), (14, 1)], ids=str)
@pytest.mark.parametrize("largest", [False, True], ids=["any codes", "largest codes"])
@pytest.mark.parametrize("a_format", [TENSOR, WINDOW], ids=["tensor", "window64"])
def test_windows_whose_sums_are_exact_and_some_that_are_not(device, places, largest, a_format, kernel):
    """sm90_nvfp4_pinned_prepared lets tensor cores add up the former: with the largest codes the first four here."""
    a, b = quantized((64, 300, 576), a_format, WINDOW)
    a, b = (with_smaller_fourth_blocks(t, p, largest) for t, p in zip((a, b), places, strict=True))
    for signs in (0xFF, 0x77):  # and without
        operands = [NVFP4Tensor(t.data & signs, t.scale, t.amax, t.format) for t in (a, b)]
        check(device, *operands, kernel=named(device, kernel, WINDOW))


@every_kernel
@every_tile
def test_zeros_are_positive(device, shape, kernel):
    """Codes of -0 on a side: no sum is -0."""
    a, b = quantized(shape)
    kernel = named(device, kernel)
    check(device, NVFP4Tensor(jnp.full_like(a.data, 0x88), a.scale, a.amax), b, kernel=kernel)
    check(device, a, NVFP4Tensor(jnp.full_like(b.data, 0x88), b.scale, b.amax), kernel=kernel)


def test_runs_are_identical(device):
    a, b = quantized((33, 9001, 1040), ROW, ROW)
    first = multiply(device, a, b)
    for _ in range(5):
        assert_bitwise(multiply(device, a, b), first)


def test_the_sums_of_a_block_are_exact_in_float32():
    """What kernels give to tensor cores is exact in float16, and products have few bits below the largest exponent."""
    codes, scales = np.arange(16, dtype=np.uint8), np.arange(1, 0x7F, dtype=np.uint8)
    q, s = e2m1_values(codes).astype(np.float64), scale_values(scales).astype(np.float64)
    numbers = np.outer(s, q) * 2.0**-14
    assert np.array_equal(numbers.astype(np.float16).astype(np.float64), numbers)
    steps = (s * 2.0**9).astype(np.int64)  # of 2^-9, the least scale
    unit = (steps & -steps) * 2.0 ** (-9 - 1 - 14)  # of the numbers of a block
    products = np.abs(numbers[:, None, :, None] * numbers[None, :, None, :]) / np.outer(unit, unit)[:, :, None, None]
    assert np.array_equal(products, np.round(products))
    assert 16 * products.max() < 2.0**20
    exponent = np.maximum(np.floor(np.log2(np.abs(numbers).max(axis=1))), -14)  # tensor cores count subnormals so
    assert np.max(np.add.outer(exponent, exponent) + 1 - np.log2(np.outer(unit, unit))) <= 21


def test_sums_of_windows_that_are_taken_for_exact(tmp_path):
    """By sm90_nvfp4_pinned_prepared, on a model of tensor cores."""
    root, program = Path(__file__).parents[1], tmp_path / "window_sums"
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", f"-I{root / 'ffi'}"]
    subprocess.run(["g++", *flags, root / "tests/cpp/window_sums.cc", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
