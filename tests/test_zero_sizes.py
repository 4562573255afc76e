"""Arrays without elements: the mathematically right result."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bitwise, assert_same_tensor, key_for
from operands import exact_tensor, normal

from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_SR,
    ROW_SCALED,
    WINDOW64,
    dequantize,
    four_over_six,
    linear,
    matmul_nt,
    quantize,
    quantize_pair,
    transpose,
)
from jnvfp4.spec import name_of

BF16 = jnp.bfloat16


@pytest.mark.parametrize("shape", [(0, 32), (16, 0), (0, 0), (2, 0, 32), (0, 16, 32)], ids=str)
@pytest.mark.parametrize("spec", [NVFP4, NVFP4_2D, ROW_SCALED, NVFP4_RHT, NVFP4_SR, four_over_six()], ids=name_of)
@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transpose"])
def test_quantize_of_nothing(backend, shape, spec, transpose):
    f = partial(quantize, spec=spec, key=key_for(spec), transpose=transpose, implementation=backend.implementation)
    got = jax.jit(f)(jnp.zeros(shape))
    turned = (*shape[:-2], shape[-1], shape[-2]) if transpose else shape
    assert got.shape == turned
    assert got.scale.shape == (*turned[:-1], turned[-1] // 16)
    assert_bitwise(got.amax, jnp.zeros(turned[:-1] if spec is ROW_SCALED else ()))
    assert dequantize(got).shape == turned


@pytest.mark.parametrize("shape", [(0, 32), (16, 0), (0, 0), (2, 0, 32), (0, 16, 32)], ids=str)
def test_transpose_of_nothing(backend, shape):
    x, implementation = jnp.zeros(shape), backend.implementation
    got = jax.jit(partial(transpose, implementation=implementation))(quantize(x, NVFP4_2D))
    assert_same_tensor(got, quantize(x, NVFP4_2D, transpose=True))
    assert_same_tensor(got, transpose(quantize(x, NVFP4_2D), implementation=implementation))


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (2, 0, 64)], ids=str)
def test_windows_of_nothing(backend, shape):
    row, col = jax.jit(
        partial(quantize_pair, row_spec=WINDOW64, col_spec=WINDOW64, implementation=backend.implementation)
    )(jnp.zeros(shape))
    *lead, rows, k = shape
    assert_bitwise(row.amax, jnp.zeros((*lead, rows, k // 64)))
    assert_bitwise(col.amax, jnp.zeros((*lead, k, rows // 64)))
    assert (dequantize(row).shape, dequantize(col).shape) == (shape, (*lead, k, rows))


@pytest.mark.parametrize(("m", "n"), [(0, 8), (8, 0), (0, 0)])
@pytest.mark.parametrize("quantized", [True, False], ids=["tensor", "dense"])
def test_matmul_with_no_rows(backend, m, n, quantized):
    x = exact_tensor((m, 32)) if quantized else jnp.zeros((m, 32), BF16)
    f = partial(matmul_nt, implementation=backend.implementation)
    assert jax.jit(f)(x, exact_tensor((n, 32))).shape == (m, n)


@pytest.mark.parametrize("quantized", [True, False], ids=["tensor", "dense"])
def test_matmul_over_nothing_is_the_bias(backend, quantized):
    x = exact_tensor((4, 0)) if quantized else jnp.zeros((4, 0), BF16)
    f = jax.jit(partial(matmul_nt, implementation=backend.implementation))
    w, bias = exact_tensor((8, 0)), normal((8,))
    assert_bitwise(f(x, w), jnp.zeros((4, 8), BF16))
    assert_bitwise(f(x, w, bias=bias), jnp.broadcast_to(bias, (4, 8)))


def test_matmul_with_an_empty_leading_axis(backend):
    f = partial(matmul_nt, implementation=backend.implementation)
    assert f(exact_tensor((0, 4, 32)), exact_tensor((8, 32))).shape == (0, 4, 8)


def test_vmap_over_no_rows(native):
    t = jax.vmap(quantize)(jnp.zeros((3, 0, 32)))
    assert t.shape == (3, 0, 32)
    assert jax.vmap(matmul_nt)(t, jax.vmap(quantize)(jnp.ones((3, 16, 32)))).shape == (3, 0, 16)


@pytest.mark.parametrize(("tokens", "k", "n"), [(0, 32, 16), (8, 0, 16), (8, 32, 0)])
def test_linear_of_nothing(native, tokens, k, n):
    x, w = jnp.ones((tokens, k), BF16), jnp.ones((n, k), BF16)
    y, pull = jax.vjp(linear, x, w)
    dx, dw = pull(jnp.ones_like(y))
    assert (y.shape, dx.shape, dw.shape) == ((tokens, n), x.shape, w.shape)
    assert not any(np.asarray(value, np.float32).any() for value in (y, dx, dw))
