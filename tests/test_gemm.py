"""``matmul_nt`` against its formula in NumPy, by every implementation. Kernels by their names: test_gemm_kernels.py."""

import functools
import re
from dataclasses import replace
from itertools import cycle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import (
    assert_bitwise,
    assert_gemm_close,
    bits,
    matmul_by_formula,
    random_tensor,
)
from operands import (
    DTYPES,
    NARROW,
    ROW,
    TENSOR,
    WINDOW,
    dense,
    every_left,
    every_out_dtype,
    identity,
    norm_operands,
    normal,
    order_free,
    order_free_operands,
    quantized,
    with_nan_scale,
)

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_RHT, Format, NVFP4Tensor
from jnvfp4._native import plans

F32, BF16, F16 = DTYPES.values()
NARROW_SCALES = Format(e4m3_max=256)


def multiply(backend, a, b, accumulation="fast", **options) -> jax.Array:
    options = {"out_dtype": F32, **options}
    return jnvfp4.matmul_nt(a, b, accumulation=accumulation, implementation=backend.implementation, **options)


# ---------------------------------------------------------------- the pinned order
def weight_only(half, fmt=TENSOR):
    return dense((5, 32), half), random_tensor(1, (7, 32), fmt)


def with_element(half, value):
    """NaN spreads over its row; Inf does where a weight is not zero, and is NaN where one is."""
    a, b = weight_only(half)
    return a.at[2, 7].set(value), b


def subnormal(half, size: float):
    """The smallest products are multiples of 2^-143: subnormal, and exact."""
    a = (np.random.default_rng(0).standard_normal((5, 32)) * size).astype(half)
    assert np.any((a != 0) & (np.abs(a) < ml_dtypes.finfo(half).smallest_normal))
    return jnp.asarray(a), random_tensor(1, (7, 32), scales=range(1, 16), amax=2.0**40)


def with_nan_scales(fmt):
    a, b = quantized((5, 7, 64), fmt, fmt)
    return with_nan_scale(a, 2), with_nan_scale(b, 4)


# Operands, and where they are given a bias and the type of the result.
PROBLEMS = {
    "rows and 256": lambda: quantized((5, 7, 32), ROW, NARROW_SCALES),
    "256 and windows": lambda: quantized((5, 7, 192), NARROW_SCALES, WINDOW),
    "windows": lambda: quantized((5, 7, 192), WINDOW, WINDOW),
    "a bias": lambda: (*quantized((5, 7, 32)), dense((7,), F32), BF16),
    "w4a16, a bias": lambda: (*weight_only(F16), dense((7,), F32), BF16),
    "a residual": lambda: (*quantized((5, 7, 32)), dense((5, 7), BF16), BF16),
    "w4a16, a residual": lambda: (*weight_only(F16), dense((5, 7), F16), F16),
    "residuals": lambda: (random_tensor(0, (2, 5, 32)), random_tensor(1, (7, 32)), dense((2, 5, 7), F32), BF16),
    "w4a16, rows": lambda: weight_only(BF16, ROW),
    "w4a16, 256": lambda: weight_only(F16, NARROW_SCALES),
    "w4a16, subnormal bf16": lambda: subnormal(BF16, 1e-39),
    "w4a16, subnormal fp16": lambda: subnormal(F16, 1e-7),
    "w4a16, NaN": lambda: with_element(BF16, np.nan),
    "w4a16, Inf": lambda: with_element(F16, np.inf),
    "w4a16, -Inf": lambda: with_element(BF16, -np.inf),
    **{f"a NaN scale, {fmt.amax_scope}": functools.partial(with_nan_scales, fmt) for fmt in (TENSOR, WINDOW)},
    # alpha of 0, Inf and NaN, and an overflow of the product of both amaxes.
    **{
        f"amax {amax}": lambda amax=amax: (*quantized((5, 7, 32), amax=amax), None, BF16)
        for amax in (0.0, np.inf, np.nan, 1e25)
    },
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_pinned_order_has_the_bits_of_the_formula(backend, problem):
    a, b, bias, out = (*PROBLEMS[problem](), None, F32)[:4]
    got = multiply(backend, a, b, "pinned", bias=bias, out_dtype=out)
    assert_bitwise(got, matmul_by_formula(a, b, bias, out))


@pytest.mark.parametrize("out", DTYPES.values(), ids=DTYPES)
def test_a_kernel_that_takes_no_residual_makes_float32_sums(cpu, monkeypatch, out):
    """As those of GPUs for many rows do; each type of result has a shape of its own, which nothing else compiles."""
    original = plans.plan_matmul
    monkeypatch.setattr(plans, "plan_matmul", lambda **problem: original(**problem)._replace(whole_bias=False))
    m = 20 + list(DTYPES.values()).index(out)
    (a, b), residual = quantized((m, 7, 32)), dense((m, 7), BF16)
    f = jax.jit(lambda *of: jnvfp4.matmul_nt(*of[:2], bias=of[2], out_dtype=out))
    assert re.search(rf"nvfp4_matmul.* -> \(tensor<{m}x7xf32>", f.lower(a, b, residual).as_text())
    assert_bitwise(f(a, b, residual), matmul_by_formula(a, b, residual, out))


# ---------------------------------------------------------------- the norm of a
@pytest.mark.parametrize("half", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("k", [512, 80])
def test_a_norm_has_the_bits_of_the_formula(backend, half, k):
    """Of numbers of rows that kernels normalize and that XLA does, with a residual and without."""
    shapes = [(1,), (2,), (3,), (5,), (16,), (17,), (64,), (2, 3)]
    for (*lead, m), gain, kind in zip(shapes, cycle(DTYPES.values()), cycle([half, F32])):
        a, norm, normed, b = norm_operands(half, (m, 24, k), gain, lead)
        residual = None if m == 1 else dense((*lead, m, 24), kind)
        got = multiply(backend, a, b, norm=norm, bias=residual, out_dtype=half)
        assert_bitwise(got, matmul_by_formula(normed, b, residual, half))


@pytest.mark.parametrize("half", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("accumulation", ["fast", "pinned"])
def test_the_norm_of_ordinary_data(backend, half, accumulation):
    """Each element is rounded once, after the gain; the sum of squares may err by 2^-16, and its root by less."""
    a, b, gain, epsilon = 3 * dense((4, 256), half), identity(None, 256), 1 + dense((256,), F32, 5), 0.5
    got = np.asarray(multiply(backend, a, b, accumulation, norm=(gain, epsilon)))
    x = np.asarray(a, np.float64)
    normed = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + epsilon) * np.asarray(gain, np.float64)
    low, high = (np.float32(normed * (1 + error)).astype(half).astype(F32) for error in (-(2.0**-16), 2.0**-16))
    assert ((got == low) | (got == high)).all()
    assert (low == high).mean() > 0.9


def test_an_infinite_product_stays_infinite(backend):
    """A product that overflows is infinite before it is added, which a fused multiply-add would not see."""
    b = random_tensor(1, (7, 16), scales=[0x38])
    b = NVFP4Tensor(jnp.full_like(b.data, 0x44), b.scale, b.amax, b.format)  # all weights are 2
    a = np.zeros((5, 16), ml_dtypes.bfloat16)
    a[:, :2] = -1e38, 2.5e38  # 2.5e38 * 2 overflows, -2e38 + 5e38 does not
    got = multiply(backend, jnp.asarray(a), b, "pinned")
    assert_bitwise(got, np.full((5, 7), np.inf, np.float32))


@pytest.mark.parametrize("fmt", [ROW, WINDOW], ids=["row", "window64"])
def test_a_shared_b_by_the_reference(fmt):
    a, b = random_tensor(0, (2, 3, 192), fmt), random_tensor(1, (2, 192), fmt)
    got = jnvfp4.matmul_nt(a, b, out_dtype=F32, implementation="reference")
    assert_bitwise(got, matmul_by_formula(a, b))


@pytest.mark.parametrize("a_format", [TENSOR, WINDOW, None], ids=["w4a4", "windows", "w4a16"])
def test_a_sum_of_negative_zeros_is_positive(backend, a_format):
    """Of one block or window: XLA replaces 0 + x by x in a loop of one turn."""
    a, b = quantized((3, 5, 64 if a_format is WINDOW else 16), a_format or TENSOR)
    a = replace(a, data=jnp.full_like(a.data, 0xAA), scale=jnp.zeros_like(a.scale))  # codes of -1
    b = replace(b, data=jnp.full_like(b.data, 0x22))
    a = a if a_format else jnp.full(a.shape, -0.0, jnp.bfloat16)
    product = jax.jit(functools.partial(multiply, backend, accumulation="pinned"))
    assert_bitwise(product(a, b), np.zeros((3, 5), np.float32))


@pytest.mark.parametrize("fmt", [TENSOR, WINDOW], ids=["tensor", "window64"])
def test_subnormal_results_survive_jit(native, fmt):
    amax = np.full((17, 2), 1e-18) if fmt is WINDOW else 1e-18
    a, b = quantized((17, 17, 128), fmt, fmt, scales=NARROW, amax=amax)
    got = jax.jit(lambda: multiply(native, a, b, "pinned"))()
    assert 0 < np.max(np.abs(np.asarray(got))) < 2.0**-126
    assert_bitwise(got, matmul_by_formula(a, b))


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


# ---------------------------------------------------------------- either order
def test_the_kernel_that_supports_names_runs_by_its_name(native):
    """The kernel that `supports` names runs when it is asked for by that name, and gives the same bits."""
    for a in (quantized((17, 33, 64))[0], dense((17, 64), DTYPES["bf16"])):
        b = quantized((17, 33, 64))[1]
        for accumulation in ("fast", "pinned"):
            chosen = jnvfp4.supports("matmul_nt", a, b, accumulation=accumulation, device=native.device)
            want = multiply(native, a, b, accumulation)
            got = jnvfp4.matmul_nt(a, b, accumulation=accumulation, implementation=chosen.kernel, out_dtype=np.float32)
            assert_bitwise(got, want, chosen.kernel)


def test_a_kernel_that_cannot_run_here_is_refused(native):
    a, b = quantized((17, 33, 64), WINDOW, WINDOW)
    name = "decode_then_dot" if native.platform == "cuda" else "sm80_nvfp4_blocks"
    why = "window64" if native.platform == "cuda" else "runs on GPUs from compute capability 8.0, not on the CPU"
    with pytest.raises(NotImplementedError, match=f"matmul_nt: implementation='{name}' cannot run here: .*{why}"):
        jnvfp4.matmul_nt(a, b, implementation=name)
    with pytest.raises(ValueError, match="matmul_nt: implementation must be None, 'native', 'sm90_nvfp4_small_m'"):
        jnvfp4.matmul_nt(a, b, implementation="sm90_unheard_of")


@every_out_dtype
@every_left
def test_order_free_sums_are_the_same_bits_everywhere(backend, out, left):
    a, b = order_free_operands(left, (33, 40, 512), a_format=ROW)
    assert order_free(a, b)
    bias = dense((40,), np.float32)
    got = multiply(backend, a, b, bias=bias, out_dtype=out)
    assert_bitwise(got, matmul_by_formula(a, b, bias, out))


@pytest.mark.parametrize("shape", [(0, 8, 64), (8, 0, 64), (8, 8, 0), (0, 0, 0)])
@pytest.mark.parametrize("a_format", [TENSOR, WINDOW, None], ids=["w4a4", "windows", "w4a16"])
def test_a_product_without_elements_is_zero(backend, shape, a_format):
    a, b = quantized(shape, a_format or TENSOR)
    a = a if a_format else dense((shape[0], shape[2]), DTYPES["bf16"])
    assert_bitwise(multiply(backend, a, b), np.zeros(shape[:2], np.float32))


def test_no_depth_leaves_the_bias(backend):
    """It is added to +0, so -0 becomes +0, NaN the canonical one, and a subnormal number stays."""
    bias = jnp.asarray(np.array([0x3F812345, 0x80000000, 0xFFABCDEF, 1], np.uint32).view(np.float32))
    for fmt in (TENSOR, WINDOW):
        got = multiply(backend, *quantized((5, 4, 0), fmt), bias=bias)
        assert_bitwise(bits(got), np.full((5, 4), [0x3F812345, 0, 0x7FC00000, 1], np.uint32))


def test_windows_with_equal_amax_are_close_to_one_amax(native):
    """The same numbers, in another order of roundings."""
    a, b = quantized((17, 33, 192), amax=1.5)
    windows = [NVFP4Tensor(t.data, t.scale, jnp.full((t.shape[0], 3), 1.5), WINDOW) for t in (a, b)]
    plain = multiply(native, a, b)
    np.testing.assert_allclose(multiply(native, *windows), plain, rtol=1e-4, atol=1e-6 * np.abs(plain).max())


# ---------------------------------------------------------------- what products mean
def test_rotations_of_both_operands_cancel(native):
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
