"""The kernels of the pinned order that take few rows, by name, on any GPU: the CPU's bits for all data."""

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
    if kernel == PINNED:
        kernel = pinned_kernel(device, fmt)
    check(device, *quantized((m, n, k), fmt, fmt), kernel=kernel)


def pinned_kernel(device, fmt) -> str:
    if device.compute_capability != "9.0":
        pytest.skip(f"{PINNED} runs on Hopper")
    return f"{PINNED}_prepared" if fmt is WINDOW else PINNED


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(300, 520, 272), (4097, 70, 336), (1000, 4200, 80), (129, 8192, 64)])
@every_a
@every_b
def test_many_rows(device, a_format, b_format, shape, out):
    """By each tile, and with b decoded in the kernel and before it."""
    if WINDOW in (a_format, b_format):
        shape = (*shape[:2], 320)
    pinned_kernel(device, a_format)
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


@pytest.mark.parametrize("fmt", [TENSOR, WINDOW], ids=["tensor", "window64"])
def test_every_code_and_scale(device, fmt):
    """Each pair of scales of the whole range of E4M3, and every product of codes."""
    check(device, *quantized((64, 128, 2048), fmt, fmt, scales=range(0x7F)))


@pytest.mark.parametrize("fmt", [ROW, WINDOW], ids=["row", "window64"])
@pytest.mark.parametrize("shared", [False, True], ids=["batched b", "shared b"])
@pytest.mark.parametrize("lead", [(2, 3), (300,)], ids=["6", "300"])
@pytest.mark.parametrize("m", [5, 13, 40])
def test_leading_axes(device, fmt, shared, lead, m):
    """300 matrices keep every SM busy with any tile."""
    m = max(1, m // int(np.prod(lead))) if shared else m  # leading axes of a are rows
    if shared and m * np.prod(lead) > 64:
        lead = (2, 3)
    a = random_tensor(0, (*lead, m, 320), fmt)
    check(device, a, random_tensor(1, (7, 320) if shared else (*lead, 7, 320), fmt), dense((7,), np.float32))


@every_tile
def test_nan_scales_of_windows_reach_their_row_and_column(device, shape):
    a, b = quantized((*shape[:2], 320), WINDOW, WINDOW)
    check(device, with_nan_scale(a, -1), with_nan_scale(with_nan_scale(b, 4), -1))


@every_tile
@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan, 1e25, 1e-25, 1e-38], ids=str)
def test_amax_of_a_window_that_is_no_ordinary_number(device, shape, amax):
    """In one window of either operand: alpha of 0, Inf, NaN and subnormal numbers."""
    a, b = quantized((*shape[:2], 320), WINDOW, WINDOW)
    a = NVFP4Tensor(a.data, a.scale, a.amax.at[2, 1].set(amax), WINDOW)
    b = NVFP4Tensor(b.data, b.scale, b.amax.at[4, 3].set(amax), WINDOW)
    check(device, a, b)


@every_tile
def test_zeros_are_positive(device, shape):
    """Codes of -0 on a side: no sum is -0."""
    a, b = quantized(shape)
    check(device, NVFP4Tensor(jnp.full_like(a.data, 0x88), a.scale, a.amax), b)
    check(device, a, NVFP4Tensor(jnp.full_like(b.data, 0x88), b.scale, b.amax))


def test_runs_are_identical(device):
    a, b = quantized((33, 9001, 1040), ROW, ROW)
    first = multiply(device, a, b)
    for _ in range(5):
        assert_bitwise(multiply(device, a, b), first)


def test_the_sums_of_a_block_are_exact_in_float32():
    """What the kernel gives to tensor cores is exact in float16, and every partial sum has at most 24 bits."""
    codes, scales = np.arange(16, dtype=np.uint8), np.arange(0x7F, dtype=np.uint8)
    q, s = e2m1_values(codes).astype(np.float64), scale_values(scales).astype(np.float64)
    left, right = np.outer(s, q) * 2.0**-14, q * 2.0**-14
    for values in (left, right):
        assert np.array_equal(values.astype(np.float16).astype(np.float64), values)
    for of_scale, scale in zip(left, s, strict=True):
        if scale == 0:
            continue
        odd = scale / 2.0 ** np.floor(np.log2(scale)) * 8  # 8 to 15: the scale without its power of two
        unit = scale / odd * 2.0**-30
        products = np.abs(np.outer(of_scale, right)) / unit
        assert np.array_equal(products, np.round(products))
        assert 16 * products.max() < 2.0**16
