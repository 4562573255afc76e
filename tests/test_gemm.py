"""``matmul_nt`` against its formula in NumPy: bitwise where the order is pinned, else within a derived bound."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_bitwise, assert_gemm_close, bits, matmul_by_formula, random_tensor
from operands import normal
from products import (
    DTYPES,
    HALVES,
    NARROW,
    ROW,
    TENSOR,
    WINDOW,
    dense,
    every_left,
    every_out_dtype,
    order_free,
    order_free_operands,
    quantized,
    with_nan_scale,
)

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_RHT, Format, NVFP4Tensor

# M, N, K: one row, odd N, one block, more than one tile and panel in every direction, long K.
SHAPES = [(1, 1, 16), (1, 40, 64), (5, 7, 16), (17, 33, 48), (130, 65, 256), (3, 100, 4096)]
NARROW_SCALES, ROW_256 = Format(e4m3_max=256), Format("row", 256)
PAIRS = [
    *[(TENSOR, TENSOR), (TENSOR, ROW), (ROW, NARROW_SCALES), (NARROW_SCALES, TENSOR), (ROW, ROW)],
    *[(NARROW_SCALES, NARROW_SCALES), (ROW_256, ROW_256), (ROW_256, TENSOR), (ROW, ROW_256), (NARROW_SCALES, ROW_256)],
    *[(Format(rht=True), Format(rht=True)), (WINDOW, TENSOR), (ROW, WINDOW), (WINDOW, ROW_256)],
    *[(NARROW_SCALES, WINDOW), (WINDOW, WINDOW)],
]
every_accumulation = pytest.mark.parametrize("accumulation", ["fast", "pinned"])
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=["x".join(map(str, s)) for s in SHAPES])
every_half = pytest.mark.parametrize("half", list(HALVES.values()), ids=list(HALVES))


def name_of_pair(formats) -> str:
    return "-".join(f"{f.amax_scope}{f.e4m3_max}{'_rht' * f.rht}" for f in formats)


def multiply(backend, a, b, accumulation="fast", **options) -> jax.Array:
    options = {"out_dtype": np.float32, **options}
    return jnvfp4.matmul_nt(a, b, accumulation=accumulation, implementation=backend.implementation, **options)


def check(backend, a, b, bias=None, out=np.float32, accumulation="fast") -> None:
    """Windows of 64 in the pinned order, as kernels of Hopper for others have a test of their own."""
    if any(isinstance(t, NVFP4Tensor) and t.format.amax_scope == "window64" for t in (a, b)):
        accumulation = "pinned"
    got = multiply(backend, a, b, accumulation, bias=bias, out_dtype=out)
    compare(backend, got, a, b, bias, out, accumulation)


def compare(backend, got, a, b, bias=None, out=np.float32, accumulation="fast") -> None:
    """Tensor cores have no defined order; all else has that of the formula, also a GPU where it is asked for."""
    if backend.platform == "cuda" and backend.implementation == "native" and accumulation == "fast":
        assert got.dtype == out
        assert got.shape == (a.shape[0], b.shape[0])
        assert_gemm_close(got, a, b, bias)
    else:
        assert_bitwise(got, matmul_by_formula(a, b, bias, out))


def at(t, i: tuple[int, ...]):
    """A matrix of ``t``: itself, if it is one."""
    if not isinstance(t, NVFP4Tensor):
        return t[i] if t.ndim > 2 else t
    if t.data.ndim == 2:
        return t
    return NVFP4Tensor(t.data[i], t.scale[i], t.amax[i] if t.amax.ndim else t.amax, t.format)


# ---------------------------------------------------------------- two NVFP4 operands
@every_accumulation
@every_shape
@every_out_dtype
def test_native(native, shape, out, accumulation):
    check(native, *quantized(shape), out=out, accumulation=accumulation)


@every_accumulation
@pytest.mark.parametrize("formats", PAIRS, ids=name_of_pair)
def test_formats(native, formats, accumulation):
    """Two windows, and a part of a window where there are none."""
    check(native, *quantized((17, 33, 128 if WINDOW in formats else 80), *formats), accumulation=accumulation)


@pytest.mark.parametrize("formats", [(ROW, NARROW_SCALES), *PAIRS[-2:]], ids=name_of_pair)
def test_formats_by_every_backend(backend, formats):
    check(backend, *quantized((5, 7, 192 if WINDOW in formats else 32), *formats), accumulation="pinned")


@every_accumulation
@pytest.mark.parametrize("formats", [(ROW, TENSOR), (TENSOR, ROW)], ids=["a", "b"])
def test_the_operand_says_whose_rows_an_amax_scales(native, formats, accumulation):
    """As many rows as columns: no length tells them apart."""
    a, b = quantized((16, 16, 32), *formats)
    check(native, a, b, accumulation=accumulation)


@every_accumulation
@pytest.mark.parametrize("fmt", [TENSOR, WINDOW], ids=["tensor", "window64"])
def test_every_code_and_scale(native, fmt, accumulation):
    """Every product of codes, each pair of scales of a wide range, zero among them."""
    check(native, *quantized((64, 64, 512), fmt, fmt, scales=range(0x7F)), accumulation=accumulation)


@pytest.mark.parametrize("k", [16, 32, 48, 64, 80, 112, 144])
def test_a_depth_of_any_number_of_blocks(native, k):
    """Kernels go along K by 64: the last blocks may be fewer than four, and are followed by others in memory."""
    check(native, *quantized((70, 67, k), ROW, ROW), accumulation="pinned")
    check(native, dense((70, k), DTYPES["bf16"]), random_tensor(1, (67, k), ROW), accumulation="pinned")


def test_a_kernel_by_its_name(native):
    """The kernel that `supports` names runs when it is asked for by that name, and gives the same bits."""
    for a in (quantized((17, 33, 64))[0], dense((17, 64), DTYPES["bf16"])):
        b = quantized((17, 33, 64))[1]
        for accumulation in ("fast", "pinned"):
            chosen = jnvfp4.supports("matmul_nt", a, b, accumulation=accumulation, device=native.device)
            want = multiply(native, a, b, accumulation)
            got = jnvfp4.matmul_nt(a, b, accumulation=accumulation, implementation=chosen.kernel, out_dtype=np.float32)
            assert_bitwise(got, want, chosen.kernel)


def test_a_kernel_that_cannot(native):
    a, b = quantized((17, 33, 64), WINDOW, WINDOW)
    name = "decode_then_dot" if native.platform == "cuda" else "sm80_nvfp4_blocks"
    why = "window64" if native.platform == "cuda" else "runs on GPUs from compute capability 8.0, not on the CPU"
    with pytest.raises(NotImplementedError, match=f"matmul_nt: implementation='{name}' cannot run here: .*{why}"):
        jnvfp4.matmul_nt(a, b, implementation=name)
    with pytest.raises(ValueError, match="matmul_nt: implementation must be None, 'native', 'sm90_nvfp4_small_m'"):
        jnvfp4.matmul_nt(a, b, implementation="sm90_unheard_of")


# ---------------------------------------------------------------- a 16-bit left operand
@every_accumulation
@every_half
@every_shape
def test_weight_only(native, half, shape, accumulation):
    m, n, k = shape
    check(native, dense((m, k), half), random_tensor(1, (n, k)), out=half, accumulation=accumulation)


@every_accumulation
@every_half
@pytest.mark.parametrize("fmt", [TENSOR, ROW, Format(e4m3_max=256)], ids=["tensor", "row", "256"])
def test_weight_only_formats(backend, half, fmt, accumulation):
    check(backend, dense((5, 32), half), random_tensor(1, (7, 32), fmt), accumulation=accumulation)


@every_half
def test_weight_only_subnormal_input(backend, half):
    """The smallest products are multiples of 2^-143: subnormal, and exact."""
    tiny = {ml_dtypes.bfloat16: 1e-39, np.float16: 1e-7}[half]
    a = (np.random.default_rng(0).standard_normal((5, 32)) * tiny).astype(half)
    b = random_tensor(1, (7, 32), scales=range(1, 16), amax=2.0**40)
    assert np.any((a != 0) & (np.abs(a) < ml_dtypes.finfo(half).smallest_normal))
    check(backend, jnp.asarray(a), b, accumulation="pinned")


def test_weight_only_overflow(backend):
    """A product that overflows is infinite before it is added, which a fused multiply-add would not see."""
    b = random_tensor(1, (7, 16), scales=[0x38])
    b = NVFP4Tensor(jnp.full_like(b.data, 0x44), b.scale, b.amax, b.format)  # all weights are 2
    a = np.zeros((5, 16), ml_dtypes.bfloat16)
    a[:, :2] = -1e38, 2.5e38  # 2.5e38 * 2 overflows, -2e38 + 5e38 does not
    got = multiply(backend, jnp.asarray(a), b, "pinned")
    assert_bitwise(got, np.full((5, 7), np.inf, np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@every_half
def test_weight_only_special_input(backend, value, half):
    """NaN spreads over its row; Inf does where a weight is not zero, and is NaN where one is."""
    a = np.asarray(dense((5, 32), half)).copy()
    a[2, 7] = value
    b = random_tensor(1, (7, 32))
    check(backend, jnp.asarray(a), b, accumulation="pinned")
    got = np.asarray(multiply(backend, jnp.asarray(a), b, "pinned"))
    assert np.array_equal(np.isfinite(got).all(axis=1), np.arange(5) != 2)


# ---------------------------------------------------------------- one amax per window of 64
WINDOW_SHAPES = [(1, 1, 64), (5, 7, 128), (17, 33, 192), (130, 65, 256), (3, 100, 4096)]


@pytest.mark.parametrize("shape", WINDOW_SHAPES, ids=["x".join(map(str, s)) for s in WINDOW_SHAPES])
@every_out_dtype
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES.values()], ids=["none", *DTYPES])
def test_windows(native, shape, out, bias_dtype):
    bias = None if bias_dtype is None else dense(shape[1:2], bias_dtype)
    check(native, *quantized(shape, WINDOW, WINDOW), bias, out)


def reorder_blocks(t: NVFP4Tensor, order: np.ndarray) -> NVFP4Tensor:
    data = np.asarray(t.data).reshape(t.shape[0], -1, 8)[:, order].reshape(t.data.shape)
    return NVFP4Tensor(data, np.asarray(t.scale)[:, order], np.asarray(t.amax)[:, order[::4] // 4], t.format)


def test_the_order_of_windows_and_of_their_blocks_shows():
    """Neither another order of windows, nor of the blocks in one, gives the bits that the tests above demand."""
    with jax.default_device(jax.devices("cpu")[0]):
        a, b = quantized((17, 33, 192), WINDOW, WINDOW)
        right = matmul_by_formula(a, b)
        blocks = np.arange(12).reshape(3, 4)
        for order in (blocks[::-1].ravel(), blocks[:, ::-1].ravel()):
            got = matmul_by_formula(*(reorder_blocks(t, order) for t in (a, b)))
            np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-3)
            assert np.any(got != right)


@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan, 1e25, 1e-25], ids=str)
def test_window_amax_that_is_no_ordinary_number(native, amax):
    """In one window of one row of either operand; the product of both overflows or underflows."""
    a, b = quantized((5, 7, 192), WINDOW, WINDOW)
    a = NVFP4Tensor(a.data, a.scale, a.amax.at[2, 1].set(amax), WINDOW)
    b = NVFP4Tensor(b.data, b.scale, b.amax.at[4, 1].set(amax), WINDOW)
    check(native, a, b, out=DTYPES["bf16"])


def test_windows_with_equal_amax_are_close_to_one_amax(native):
    """The same numbers, in another order of roundings."""
    a, b = quantized((17, 33, 192), amax=1.5)
    windows = [NVFP4Tensor(t.data, t.scale, jnp.full((t.shape[0], 3), 1.5), WINDOW) for t in (a, b)]
    plain = multiply(native, a, b)
    np.testing.assert_allclose(multiply(native, *windows), plain, rtol=1e-4, atol=1e-6 * np.abs(plain).max())


def test_rotation_cancels(native):
    """The product of rotated operands is that of the operands rotated back, but for rounding in float32."""
    a, b = (jnvfp4.quantize(normal((rows, 128), rows), NVFP4_RHT) for rows in (24, 40))
    got = jnvfp4.matmul_nt(a, b, out_dtype=np.float32, implementation="native")
    back_a, back_b = (np.asarray(jnvfp4.dequantize(t), np.float64) for t in (a, b))
    np.testing.assert_allclose(got, back_a @ back_b.T, atol=4e-6 * np.max(np.abs(back_a) @ np.abs(back_b).T))


def test_rotated_product_is_the_unrotated_one_within_quantization_error(native):
    x, w = (normal((rows, 128), rows) for rows in (24, 40))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    for spec in (NVFP4, NVFP4_RHT):
        got = jnvfp4.matmul_nt(jnvfp4.quantize(x, spec), jnvfp4.quantize(w, spec), out_dtype=np.float32)
        assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 0.16


# ---------------------------------------------------------------- bias and output type
@every_accumulation
@pytest.mark.parametrize("bias_dtype", list(DTYPES.values()), ids=list(DTYPES))
@every_out_dtype
@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
def test_bias(native, bias_dtype, out, weight_only, accumulation):
    a, b = quantized((9, 21, 64))
    a = dense((9, 64), DTYPES["bf16"]) if weight_only else a
    check(native, a, b, dense((21,), bias_dtype), out, accumulation)


@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
def test_bias_by_every_backend(backend, weight_only):
    a, b = quantized((5, 7, 32))
    a = dense((5, 32), DTYPES["fp16"]) if weight_only else a
    check(backend, a, b, dense((7,), np.float32), DTYPES["bf16"], "pinned")


# ---------------------------------------------------------------- leading axes
AMAXES = {"one": TENSOR, "per matrix": TENSOR, "row": ROW, "window64": WINDOW}


def batched(seed: int, amaxes: str, lead: tuple[int, ...], rows: int) -> NVFP4Tensor:
    of = lead if amaxes == "per matrix" else ()
    amax = np.random.default_rng(seed + 5).uniform(0.5, 2, of) if AMAXES[amaxes] is TENSOR else None
    return random_tensor(seed, (*lead, rows, 128), AMAXES[amaxes], amax=amax)


MIXED = [*[(x, x) for x in AMAXES], ("window64", "per matrix"), ("row", "window64"), ("per matrix", "window64")]


@every_accumulation
@pytest.mark.parametrize("amaxes", MIXED, ids=" ".join)
@pytest.mark.parametrize("shared", [False, True], ids=["batched b", "shared b"])
def test_leading_axes(native, amaxes, shared, accumulation):
    a, b = batched(0, amaxes[0], (2, 3), 5), batched(1, amaxes[1], () if shared else (2, 3), 7)
    check_each_matrix(native, a, b, accumulation)


@every_accumulation
@every_half
@pytest.mark.parametrize("shared", [False, True], ids=["batched b", "shared b"])
def test_leading_axes_of_weight_only(native, half, shared, accumulation):
    b = random_tensor(1, (7, 32) if shared else (2, 3, 7, 32))
    check_each_matrix(native, dense((2, 3, 5, 32), half), b, accumulation)


@pytest.mark.parametrize("fmt", [ROW, WINDOW], ids=["row", "window64"])
def test_a_shared_b_by_the_reference(fmt):
    a, b = random_tensor(0, (2, 3, 192), fmt), random_tensor(1, (2, 192), fmt)
    got = jnvfp4.matmul_nt(a, b, out_dtype=np.float32, implementation="reference")
    for i in range(2):
        assert_bitwise(got[i], matmul_by_formula(at(a, (i,)), b))


def check_each_matrix(backend, a, b, accumulation) -> None:
    accumulation = "pinned" if WINDOW in (getattr(a, "format", None), b.format) else accumulation
    bias = dense(b.shape[-2:-1], np.float32)
    got = multiply(backend, a, b, accumulation, bias=bias)
    assert got.shape == (2, 3, 5, 7)
    for i in np.ndindex(2, 3):
        compare(backend, got[i], at(a, i), at(b, i), bias, accumulation=accumulation)


# ---------------------------------------------------------------- sums that no order can change
@every_out_dtype
@every_left
def test_order_free_sums_are_the_same_bits_everywhere(backend, out, left):
    a, b = order_free_operands(left, (33, 40, 512), a_format=ROW)
    assert order_free(a, b)
    bias = dense((40,), np.float32)
    got = multiply(backend, a, b, bias=bias, out_dtype=out)
    assert_bitwise(got, matmul_by_formula(a, b, bias, out))


@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
def test_runs_are_identical(native, weight_only):
    a, b = quantized((256, 192, 2048))
    a = dense((256, 2048), DTYPES["bf16"]) if weight_only else a
    run = jax.jit(lambda: jnvfp4.matmul_nt(a, b, out_dtype=np.float32, implementation="native"))
    first = np.asarray(run())
    for _ in range(5):
        assert_bitwise(run(), first)


# ---------------------------------------------------------------- edges
@pytest.mark.parametrize("shape", [(0, 8, 64), (8, 0, 64), (8, 8, 0), (0, 0, 0)])
@pytest.mark.parametrize("a_format", [TENSOR, WINDOW, None], ids=["w4a4", "windows", "w4a16"])
def test_no_elements(backend, shape, a_format):
    a, b = quantized(shape, a_format or TENSOR)
    a = a if a_format else dense((shape[0], shape[2]), DTYPES["bf16"])
    assert_bitwise(multiply(backend, a, b), np.zeros(shape[:2], np.float32))


def test_no_depth_leaves_the_bias(backend):
    """It is added to +0, so -0 becomes +0, NaN the canonical one, and a subnormal number stays."""
    bias = jnp.asarray(np.array([0x3F812345, 0x80000000, 0xFFABCDEF, 1], np.uint32).view(np.float32))
    for fmt in (TENSOR, WINDOW):
        got = multiply(backend, *quantized((5, 4, 0), fmt), bias=bias)
        assert_bitwise(bits(got), np.full((5, 4), [0x3F812345, 0, 0x7FC00000, 1], np.uint32))


@pytest.mark.parametrize("a_format", [TENSOR, WINDOW, None], ids=["w4a4", "windows", "w4a16"])
def test_a_sum_of_negative_zeros_is_positive(backend, a_format):
    """Of one block or window: XLA replaces 0 + x by x in a loop of one turn."""
    a, b = quantized((3, 5, 64 if a_format is WINDOW else 16), a_format or TENSOR)
    a = replace(a, data=jnp.full_like(a.data, 0xAA), scale=jnp.zeros_like(a.scale))  # codes of -1
    b = replace(b, data=jnp.full_like(b.data, 0x22))
    a = a if a_format else jnp.full(a.shape, -0.0, jnp.bfloat16)
    product = jax.jit(functools.partial(multiply, backend, accumulation="pinned"))
    assert_bitwise(product(a, b), np.zeros((3, 5), np.float32))


@every_accumulation
@pytest.mark.parametrize("fmt", [TENSOR, WINDOW], ids=["tensor", "window64"])
def test_nan_scales_reach_their_row_and_column(backend, fmt, accumulation):
    a, b = quantized((5, 7, 64), fmt, fmt)
    got = multiply(backend, with_nan_scale(a, 2), with_nan_scale(b, 4), accumulation)
    want = np.zeros((5, 7), bool)
    want[2], want[:, 4] = True, True
    assert np.array_equal(np.isnan(np.asarray(got)), want)
    assert (bits(got)[want] == 0x7FC00000).all()


@every_accumulation
@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan, 1e25], ids=str)
def test_amax_that_is_no_ordinary_number(backend, amax, accumulation):
    """alpha of 0, Inf and NaN, and an overflow of the product of both amaxes."""
    a, b = quantized((5, 7, 32), scales=NARROW, amax=amax)
    assert order_free(a, b)
    got = multiply(backend, a, b, accumulation, out_dtype=DTYPES["bf16"])
    assert_bitwise(got, matmul_by_formula(a, b, dtype=DTYPES["bf16"]))


@pytest.mark.parametrize("fmt", [TENSOR, WINDOW], ids=["tensor", "window64"])
def test_subnormal_results_survive_jit(native, fmt):
    amax = np.full((17, 2), 1e-18) if fmt is WINDOW else 1e-18
    a, b = quantized((17, 17, 128), fmt, fmt, scales=NARROW, amax=amax)
    got = jax.jit(lambda: multiply(native, a, b, "pinned"))()
    assert 0 < np.max(np.abs(np.asarray(got))) < 2.0**-126
    assert_bitwise(got, matmul_by_formula(a, b))


def test_the_bound_sees_one_wrong_code():
    """The bound that tensor cores are held to is tighter than the effect of any one code."""
    with jax.default_device(jax.devices("cpu")[0]):
        a, b = quantized((8, 8, 256), scales=NARROW)
        right = matmul_by_formula(a, b)
        assert_gemm_close(right, a, b)
        data = np.asarray(a.data).copy()
        data[3, 17] ^= 1
        wrong = NVFP4Tensor(jnp.asarray(data), a.scale, a.amax, a.format)
        with pytest.raises(AssertionError, match="outside the bound"):
            assert_gemm_close(right, wrong, b)
