"""Arrays without elements: the mathematically right result."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import amax_shape, assert_bitwise, assert_same_tensor, key_for
from operands import exact_tensor, normal

from jnvfp4 import dequantize, fake_quant, linear, matmul_nt, quantize, quantize_pair, transpose
from jnvfp4.spec import NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_SR, ROW_SCALED, WINDOW64, four_over_six, name_of

BF16 = jnp.bfloat16
SPECS = [NVFP4, NVFP4_2D, ROW_SCALED, NVFP4_RHT, NVFP4_SR, WINDOW64, four_over_six()]


every_shape = pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (2, 0, 64), (0, 64, 64)], ids=str)


@every_shape
def test_quantizers_of_nothing(backend, shape):
    """All in one program: either orientation, dequantized again or at once, and a pair."""

    def f(x):
        options = {"implementation": backend.implementation}
        found = {}
        for spec in SPECS:
            ways = {t: quantize(x, spec, key=key_for(spec), transpose=t, **options) for t in (False, True)}
            values = {t: dequantize(q, BF16, **options) for t, q in ways.items()}
            found[name_of(spec)] = ways, values, fake_quant(x, spec, key=key_for(spec), **options)
        return found, quantize_pair(x, WINDOW64, WINDOW64, **options)

    found, pair = jax.jit(f)(jnp.zeros(shape, BF16))
    turned = (*shape[:-2], shape[-1], shape[-2])
    for spec in SPECS:
        tensors, values, fake = found[name_of(spec)]
        assert_bitwise(fake, np.zeros(shape, BF16))
        for t, q in tensors.items():
            *lead, rows, k = turned if t else shape
            assert [v.shape for v in (q, q.data, q.scale)] == [(*lead, rows, k // n) for n in (1, 2, 16)]
            assert_bitwise(values[t], np.zeros(q.shape, BF16))
            assert_bitwise(q.amax, np.zeros(amax_shape(spec.format.amax_scope, q.shape), np.float32))
    assert_same_tensor(pair, tuple(found["WINDOW64"][0].values()))


@every_shape
def test_transpose_of_nothing(backend, shape):
    x, implementation = jnp.zeros(shape), backend.implementation
    got = jax.jit(partial(transpose, implementation=implementation))(quantize(x, NVFP4_2D))
    assert_same_tensor(got, quantize(x, NVFP4_2D, transpose=True))
    assert_same_tensor(got, transpose(quantize(x, NVFP4_2D), implementation=implementation))


@pytest.mark.parametrize("quantized", [True, False], ids=["tensor", "dense"])
def test_matmul_of_nothing(backend, quantized):
    """Without rows, or over nothing, which leaves the bias."""
    make = exact_tensor if quantized else partial(jnp.zeros, dtype=BF16)
    f = jax.jit(partial(matmul_nt, implementation=backend.implementation))
    for m, n in ((0, 8), (8, 0), (0, 0)):
        assert f(make((m, 32)), exact_tensor((n, 32))).shape == (m, n)
    x, w, bias = make((4, 0)), exact_tensor((8, 0)), normal((8,))
    assert_bitwise(f(x, w), jnp.zeros((4, 8), BF16))
    assert_bitwise(f(x, w, bias=bias), jnp.broadcast_to(bias, (4, 8)))
    assert f(make((0, 4, 32)), exact_tensor((8, 32))).shape == (0, 4, 8)


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
