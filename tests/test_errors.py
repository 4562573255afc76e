"""Bad input: the exception and the text, at trace time."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FLOAT_MAX, assert_bitwise, refused
from operands import exact_tensor

from jnvfp4 import (
    NVFP4,
    NVFP4_2D,
    NVFP4_RHT,
    NVFP4_SR,
    ROW_SCALED,
    WINDOW64,
    Format,
    NVFP4Tensor,
    Recipe,
    dequantize,
    dot_general,
    fake_quant,
    four_over_six,
    linear,
    matmul_nt,
    quantization_report,
    quantize,
    quantize_pair,
    recipes,
    transpose,
)

F32, BF16, U8, E4M3 = jnp.float32, jnp.bfloat16, jnp.uint8, jnp.float8_e4m3fn
RHT, WINDOW = Format(rht=True), Format("window64")
SR_RECIPE = Recipe(dgrad=(NVFP4_SR, NVFP4_2D))


def a(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def t(rows, k, fmt=NVFP4.format, *, lead=(), data=U8, scale=E4M3, amax=(), amax_dtype=F32, scale_k=None):
    """The shape of an NVFP4Tensor, as wrong as the arguments say."""
    blocks = k // 16 if scale_k is None else scale_k
    return NVFP4Tensor(
        a(*lead, rows, k // 2, dtype=data), a(*lead, rows, blocks, dtype=scale), a(*amax, dtype=amax_dtype), fmt
    )


# name: (operation of the operands, operands, text)
QUANTIZE = {
    "k": (quantize, [a(4, 100)], r"quantize: K must be a multiple of 16, got x.shape=\(4, 100\); pad it to 112"),
    "transpose": (
        partial(quantize, transpose="no"),
        [a(16, 64)],
        "quantize: transpose must be True or False, got 'no'",
    ),
    "m_transposed": (
        partial(quantize, transpose=True),
        [a(20, 64)],
        r"quantize: M \(the quantized axis, since it is transposed\) must .* 16, got x.shape=\(20, 64\); pad it to 32",
    ),
    "rows_of_2d": (
        partial(quantize, spec=NVFP4_2D),
        [a(20, 64)],
        r"block_rows=16 needs both M and K to be multiples of 16, got x.shape=\(20, 64\)",
    ),
    "rank_1": (quantize, [a(64)], r"quantize: x must have rank 2 or more, \[..., M, K\], got x.shape=\(64,\)"),
    "rank_0": (quantize, [a()], "x must have rank 2 or more"),
    "int": (quantize, [a(16, 16, dtype=jnp.int32)], "TypeError: x must be float32, bfloat16 or float16, got int32"),
    "float8": (quantize, [a(16, 16, dtype=E4M3)], "TypeError: x must be .*, got float8_e4m3fn"),
    "row_int": (partial(quantize, spec=ROW_SCALED), [a(16, 16, dtype=jnp.int8)], "TypeError: got int8"),
    "amax_shape": (
        lambda x, m: quantize(x, amax=m),
        [a(4, 16, 32), a(16)],
        r"must have shape \(\) or \(4,\) for amax_scope=\"tensor\" and x.shape=\(4, 16, 32\), got \(16,\)",
    ),
    "row_amax_shape": (
        lambda x, m: quantize(x, ROW_SCALED, amax=m),
        [a(8, 32), a(32)],
        r"amax must have shape \(8,\) for amax_scope=\"row\"",
    ),
    "row_amax_shape_transposed": (
        lambda x, m: quantize(x, ROW_SCALED, amax=m, transpose=True),
        [a(16, 32), a(16)],
        r"amax must have shape \(32,\)",
    ),
    "row_amax_scalar": (lambda x, m: quantize(x, ROW_SCALED, amax=m), [a(8, 32), a()], "amax must have shape"),
    "amax_dtype": (
        lambda x, m: quantize(x, amax=m),
        [a(8, 32), a(dtype=BF16)],
        "TypeError: quantize: amax must be float32, got bfloat16",
    ),
    "amax_array_of_ints": (
        lambda x: quantize(x, amax=np.array(3)),
        [a(8, 32)],
        "TypeError: amax must be float32, got int",
    ),
    "spec": (
        partial(quantize, spec=Format()),
        [a(8, 32)],
        r"TypeError: quantize: spec must be a QuantSpec, got Format\(",
    ),
    "key_missing": (
        partial(quantize, spec=NVFP4_SR),
        [a(8, 32)],
        r'quantize: key must be a JAX PRNG key for rounding="stochastic", got None',
    ),
    "key_that_is_none": (
        lambda x: quantize(x, NVFP4_SR, key=3),
        [a(8, 32)],
        "TypeError: quantize: key must be one JAX PRNG key, as jax.random.key gives, got 3",
    ),
    "several_keys": (
        lambda x: quantize(x, NVFP4_SR, key=jax.random.split(jax.random.key(0))),
        [a(8, 32)],
        "TypeError: quantize: key must be one JAX PRNG key, ",
    ),
    "rht_k": (
        partial(quantize, spec=NVFP4_RHT),
        [a(4, 20)],
        r"quantize: K must be a multiple of 16, got x.shape=\(4, 20\); pad it to 32",
    ),
    "window64_k": (
        partial(quantize, spec=WINDOW64),
        [a(8, 80)],
        r'quantize: K must be a multiple of 64 for amax_scope="window64", got x.shape=\(8, 80\); pad it to 128',
    ),
    "window64_m_transposed": (
        partial(quantize, spec=WINDOW64, transpose=True),
        [a(80, 64)],
        r"quantize: M \(.* transposed\) must be a multiple of 64 for .*, got x.shape=\(80, 64\); pad it to 128",
    ),
    "window64_amax_shape": (
        lambda x, m: quantize(x, WINDOW64, amax=m),
        [a(8, 128), a(8)],
        r'amax must have shape \(8, 2\) for amax_scope="window64" and x.shape=\(8, 128\), got \(8,\)',
    ),
    "window64_amax_shape_transposed": (
        lambda x, m: quantize(x, WINDOW64, amax=m, transpose=True),
        [a(128, 8), a(128, 1)],
        r"amax must have shape \(8, 2\) for .*, got \(128, 1\)",
    ),
    "window64_amax_scalar": (
        partial(quantize, spec=WINDOW64, amax=1.0),
        [a(8, 64)],
        r"amax must have shape \(8, 1\) for .*, got \(\)",
    ),
    "implementation": (
        partial(quantize, implementation="fast"),
        [a(8, 32)],
        "quantize: implementation must be None, 'native' or 'reference', got 'fast'",
    ),
    "a_tensor": (quantize, [t(16, 32)], "TypeError: quantize: x must be an array, got an NVFP4Tensor"),
    "pair_amax": (
        lambda x, m: quantize_pair(x, amax=m),
        [a(16, 32), a()],
        r"quantize_pair: amax must be None or a pair \(row_amax, col_amax\)",
    ),
    "pair_k": (quantize_pair, [a(16, 40)], "quantize_pair: K must be a multiple of 16"),
    "pair_m": (quantize_pair, [a(40, 16)], "quantize_pair: M .* must be a multiple of 16"),
    "pair_rht_m": (
        partial(quantize_pair, col_spec=NVFP4_RHT),
        [a(20, 16)],
        r"quantize_pair: M .* must be a multiple of 16, got x.shape=\(20, 16\)",
    ),
    "pair_of_two_calls_k": (
        partial(quantize_pair, col_spec=ROW_SCALED),
        [a(16, 20)],
        r"quantize_pair: K must be a multiple of 16, got x.shape=\(16, 20\)",
    ),
    "pair_of_two_calls_m": (
        partial(quantize_pair, col_spec=WINDOW64),
        [a(16, 16)],
        r'quantize_pair: M .* must be a multiple of 64 for amax_scope="window64", got x.shape=\(16, 16\)',
    ),
    "pair_2d_m": (
        partial(quantize_pair, row_spec=NVFP4_2D, col_spec=ROW_SCALED),
        [a(20, 16)],
        r"quantize_pair: block_rows=16 needs both M and K to be multiples of 16, got x.shape=\(20, 16\)",
    ),
    "pair_amax_shape": (
        lambda x, m: quantize_pair(x, amax=(None, m)),
        [a(16, 32), a(32)],
        r'quantize_pair: amax must have shape \(\) for amax_scope="tensor" and x.shape=\(16, 32\), got \(32,\)',
    ),
    "pair_window64_amax_shape": (
        lambda x, m: quantize_pair(x, WINDOW64, WINDOW64, amax=(None, m)),
        [a(64, 128), a(128)],
        r"quantize_pair: amax must have shape \(128, 1\) for .*, got \(128,\)",
    ),
    "pair_amax_dtype": (
        lambda x, m: quantize_pair(x, NVFP4, ROW_SCALED, amax=(m, None)),
        [a(16, 32), a(dtype=BF16)],
        "TypeError: quantize_pair: amax must be float32, got bfloat16",
    ),
    "pair_dtype": (
        partial(quantize_pair, col_spec=NVFP4_RHT),
        [a(16, 16, dtype=jnp.int32)],
        "TypeError: quantize_pair: x must be float32, bfloat16 or float16, got int32",
    ),
    "pair_rank": (quantize_pair, [a(16)], "quantize_pair: x must have rank 2 or more"),
    "pair_a_tensor": (quantize_pair, [t(16, 32)], "TypeError: quantize_pair: x must be an array, got an NVFP4Tensor"),
    "pair_implementation": (
        partial(quantize_pair, implementation="fast"),
        [a(16, 16)],
        "quantize_pair: implementation must be None, 'native' or 'reference', got 'fast'",
    ),
    "pair_spec": (
        partial(quantize_pair, col_spec=None),
        [a(16, 16)],
        "TypeError: quantize_pair: col_spec must be a QuantSpec, got None",
    ),
    "pair_row_spec": (
        partial(quantize_pair, row_spec="nvfp4"),
        [a(16, 16)],
        "TypeError: quantize_pair: row_spec must be a QuantSpec, got 'nvfp4'",
    ),
    "amax_that_is_no_array": (
        partial(quantize, amax="large"),
        [a(16, 16)],
        "TypeError: quantize: amax must be an array, got 'large'",
    ),
    "pair_key": (
        partial(quantize_pair, col_spec=NVFP4_SR),
        [a(16, 16)],
        'quantize_pair: key must be a JAX PRNG key for rounding="stochastic", got None',
    ),
    "pair_key_that_is_none": (
        lambda x: quantize_pair(x, NVFP4_SR, key="key"),
        [a(16, 16)],
        "TypeError: quantize_pair: key must be one JAX PRNG key, as jax.random.key gives, got 'key'",
    ),
}

DEQUANTIZE = {
    "not_a_tensor": (dequantize, [a(16, 16)], r"TypeError: dequantize: t must be an NVFP4Tensor, got \w+"),
    "dtype": (
        partial(dequantize, dtype=jnp.int8),
        [t(16, 32)],
        "TypeError: dequantize: dtype must be float32, bfloat16 or float16, got int8",
    ),
    "no_dtype": (
        partial(dequantize, dtype=None),
        [t(16, 32)],
        "TypeError: dequantize: dtype must be float32, bfloat16 or float16, got None",
    ),
    "dtype_that_is_none": (
        partial(dequantize, dtype="fp4"),
        [t(16, 32)],
        "TypeError: dequantize: dtype must be float32, bfloat16 or float16, got fp4",
    ),
    "rotate_back": (
        partial(dequantize, rotate_back=1),
        [t(16, 32)],
        "dequantize: rotate_back must be True or False, got 1",
    ),
    "data_dtype": (dequantize, [t(16, 32, data=jnp.int8)], r"TypeError: t\.data must be uint8, got int8"),
    "scale_dtype": (dequantize, [t(16, 32, scale=U8)], r"TypeError: t\.scale must be float8_e4m3fn, got uint8"),
    "amax_dtype": (dequantize, [t(16, 32, amax_dtype=BF16)], r"TypeError: t\.amax must be float32, got bfloat16"),
    "k": (dequantize, [t(16, 40, scale_k=2)], "dequantize: K of t must be a multiple of 16, got K=40"),
    "scale_shape": (
        dequantize,
        [t(16, 32, scale_k=3)],
        r"t\.scale must have shape \(16, 2\) for data \(16, 16\), got \(16, 3\)",
    ),
    "amax_shape": (dequantize, [t(16, 32, amax=(4,))], r"t\.amax must have shape \(\) or \(16,\)"),
    "row_amax": (dequantize, [t(16, 32, Format("row"))], r'must have shape \(16,\) .*amax_scope="row"'),
    "rank": (
        lambda d, s, m: dequantize(NVFP4Tensor(d, s, m)),
        [a(8, dtype=U8), a(1, dtype=E4M3), a()],
        "t must have rank 2 or more",
    ),
    "window64_k": (
        dequantize,
        [t(16, 96, WINDOW, amax=(16, 1))],
        'dequantize: K of t must be a multiple of 64 for "window64", got K=96',
    ),
    "window64_amax": (
        dequantize,
        [t(16, 128, WINDOW, amax=(16,))],
        r't\.amax must have shape \(16, 2\) for data \(16, 64\) and amax_scope="window64", got \(16,\)',
    ),
    "window64_amax_scalar": (dequantize, [t(16, 64, WINDOW)], r"t\.amax must have shape \(16, 1\) for"),
    "amax_of_windows": (
        dequantize,
        [t(16, 64, amax=(16, 1))],
        r't\.amax must have shape \(\) or \(16,\) for data \(16, 32\) and amax_scope="tensor", got \(16, 1\)',
    ),
    "implementation": (partial(dequantize, implementation=1), [t(16, 32)], "dequantize: implementation"),
}

MATMUL = {
    "k_differs": (matmul_nt, [t(8, 32), t(8, 48)], "a and b must have the same K, got K=32 and K=48"),
    "dense_k_differs": (matmul_nt, [a(8, 48, dtype=BF16), t(8, 32)], "got K=48 and K=32"),
    "float32_a": (
        matmul_nt,
        [a(8, 32), t(8, 32)],
        "TypeError: matmul_nt: an unquantized a must be bfloat16 or float16, got float32",
    ),
    "dense_rank": (matmul_nt, [a(32, dtype=BF16), t(8, 32)], "matmul_nt: a must have rank 2 or more"),
    "dense_b": (
        matmul_nt,
        [t(8, 32), a(8, 32, dtype=BF16)],
        r"TypeError: matmul_nt: b must be an NVFP4Tensor, got \w+",
    ),
    "rht": (
        matmul_nt,
        [t(8, 32, RHT), t(8, 32)],
        r"a and b must both be rotated \(format.rht\) or neither, got a.rht=True, b.rht=False",
    ),
    "rht_weight_only": (matmul_nt, [a(8, 32, dtype=BF16), t(8, 32, RHT)], "got a.rht=False, b.rht=True"),
    "rht_of_b": (matmul_nt, [t(8, 32), t(8, 32, RHT)], "got a.rht=False, b.rht=True"),
    "rht_and_window64": (matmul_nt, [t(8, 64, RHT), t(8, 64, WINDOW, amax=(8, 1))], "a and b must both be rotated"),
    "window64_weight_only": (
        matmul_nt,
        [a(8, 64, dtype=BF16), t(8, 64, WINDOW, amax=(8, 1))],
        r'matmul_nt: b must have amax_scope "tensor" or "row" where a is not quantized, got "window64"; quantize a',
    ),
    "window64_k": (
        matmul_nt,
        [t(8, 96), t(8, 96, WINDOW, amax=(8, 1))],
        'matmul_nt: K of b must be a multiple of 64 for "window64", got K=96',
    ),
    "window64_a_amax": (
        matmul_nt,
        [t(8, 128, WINDOW, amax=(8, 1)), t(8, 128)],
        r'a\.amax must have shape \(8, 2\) for data \(8, 64\) and amax_scope="window64", got \(8, 1\)',
    ),
    "window64_b_amax": (
        matmul_nt,
        [t(8, 128), t(4, 128, WINDOW, amax=(4,))],
        r"b\.amax must have shape \(4, 2\) for .*, got \(4,\)",
    ),
    "leading_axes": (
        matmul_nt,
        [t(8, 32, lead=(2,)), t(8, 32, lead=(3,))],
        r"b must be \[N, K\] or have the leading axes of a, got a \[\(2,\), M, K\] and b \[\(3,\), N, K\]",
    ),
    "more_axes_of_b": (matmul_nt, [t(8, 32), t(8, 32, lead=(3,))], "leading axes of a"),
    "a_scale": (matmul_nt, [t(8, 32, scale_k=1), t(8, 32)], r"a\.scale must have shape \(8, 2\)"),
    "b_amax": (matmul_nt, [t(8, 32), t(8, 32, amax=(2,))], r"b\.amax must have shape \(\) or \(8,\)"),
    "b_row_amax": (matmul_nt, [t(8, 32), t(8, 32, Format("row"))], r"b\.amax must have shape \(8,\)"),
    "b_data": (matmul_nt, [t(8, 32), t(8, 32, data=jnp.int8)], r"TypeError: b\.data must be uint8"),
    "bias_shape": (
        lambda x, y, b: matmul_nt(x, y, bias=b),
        [t(8, 32), t(4, 32), a(8)],
        r"matmul_nt: bias must have shape \(N,\)=\(4,\), got \(8,\)",
    ),
    "bias_dtype": (
        lambda x, y, b: matmul_nt(x, y, bias=b),
        [t(8, 32), t(4, 32), a(4, dtype=jnp.int32)],
        "TypeError: matmul_nt: bias must be float32, bfloat16 or float16, got int32",
    ),
    "out_dtype": (
        partial(matmul_nt, out_dtype=jnp.float64),
        [t(8, 32), t(4, 32)],
        "TypeError: matmul_nt: out_dtype must be float32, bfloat16 or float16, got float64",
    ),
    "implementation": (
        partial(matmul_nt, implementation="x"),
        [t(8, 32), t(8, 32)],
        "matmul_nt: implementation must be None, 'native'.* or 'reference', got 'x'",
    ),
    "accumulation": (
        partial(matmul_nt, accumulation="exact"),
        [t(8, 32), t(8, 32)],
        "matmul_nt: accumulation must be 'fast' or 'pinned', got 'exact'",
    ),
}

LINEAR = {
    "w_rank": (linear, [a(8, 32), a(2, 16, 32)], r"linear: w must have rank 2, \[N, K\], got w.shape=\(2, 16, 32\)"),
    "k_differs": (
        linear,
        [a(8, 32), a(16, 48)],
        r"linear: the last axis of x and the last axis of w must have the same size K, got x.shape=\(8, 32\), w",
    ),
    "x_scalar": (linear, [a(), a(16, 48)], "same size K"),
    "k": (
        linear,
        [a(8, 40), a(16, 40)],
        r"linear: K must be a multiple of 16, got K=40 in w.shape=\(16, 40\); pad K of x and w to 48",
    ),
    "kn_w_rank": (
        partial(linear, w_axes="kn"),
        [a(8, 32), a(32)],
        r"linear: w must have rank 2, \[K, N\], got w.shape=\(32,\)",
    ),
    "kn_k_differs": (
        partial(linear, w_axes="kn"),
        [a(8, 32), a(48, 32)],
        r"linear: the last axis of x and the first axis of w must have the same size K, .* w.shape=\(48, 32\)",
    ),
    "kn_n": (
        partial(linear, w_axes="kn"),
        [a(8, 32), a(32, 20)],
        r"N must be a multiple of 16, since recipe.dgrad contracts over it, got N=20 in w.shape=\(32, 20\); pad N to",
    ),
    "kn_bias": (
        lambda x, w, b: linear(x, w, bias=b, w_axes="kn"),
        [a(8, 32), a(32, 16), a(32)],
        r"linear: bias must have shape \(N,\)=\(16,\), got \(32,\)",
    ),
    "w_axes": (partial(linear, w_axes="NK"), [a(8, 32), a(16, 32)], "linear: w_axes must be 'nk' or 'kn', got 'NK'"),
    "accumulation": (
        partial(linear, accumulation=None),
        [a(8, 32), a(16, 32)],
        "linear: accumulation must be 'fast' or 'pinned', got None",
    ),
    "implementation": (
        partial(linear, implementation="cuda"),
        [a(8, 32), a(16, 32)],
        "linear: implementation must be None, 'native'.* or 'reference', got 'cuda'",
    ),
    "out_dtype": (
        partial(linear, out_dtype=jnp.int8),
        [a(8, 32), a(16, 32)],
        "TypeError: linear: out_dtype must be float32, bfloat16 or float16, got int8",
    ),
    "n_dgrad": (
        partial(linear, recipe=Recipe(fprop=(NVFP4, NVFP4))),
        [a(8, 32), a(20, 32)],
        "N must be a multiple of 16, since recipe.dgrad contracts over it, .* pad N to 32 or",
    ),
    "n_2d": (
        partial(linear, recipe=Recipe(dgrad=None)),
        [a(8, 32), a(20, 32)],
        "N must be a multiple of 16, since recipe.fprop quantizes w in 16x16 tiles",
    ),
    "recipe": (
        partial(linear, recipe=NVFP4),
        [a(8, 32), a(16, 32)],
        "TypeError: linear: recipe must be a Recipe, got NVFP4",
    ),
    "key": (
        partial(linear, recipe=SR_RECIPE),
        [a(8, 32), a(16, 32)],
        "linear: key must be a JAX PRNG key, since the recipe rounds stochastically, got None",
    ),
    "x_dtype": (
        linear,
        [a(8, 32, dtype=jnp.int32), a(16, 32)],
        "TypeError: x must be float32, bfloat16 or float16, got int32",
    ),
    "w_dtype": (
        linear,
        [a(8, 32), a(16, 32, dtype=jnp.int8)],
        "TypeError: must be float32, bfloat16 or float16, got int8",
    ),
    "tensor_x": (linear, [t(8, 32), a(16, 32)], "TypeError: linear: x must be an array, got an NVFP4Tensor"),
    "bias_shape": (lambda x, w, b: linear(x, w, bias=b), [a(8, 32), a(16, 32), a(8)], "bias must have shape"),
    "weight_only_float32": (
        partial(linear, recipe=Recipe(fprop=(None, NVFP4_2D))),
        [a(8, 32), a(16, 32)],
        "TypeError: linear: x must be bfloat16 or float16 for a weight-only recipe, got float32",
    ),
    "n_wgrad_2d": (
        partial(linear, recipe=Recipe(fprop=(NVFP4, NVFP4), dgrad=None, wgrad=(NVFP4_2D, NVFP4))),
        [a(16, 32), a(20, 32)],
        "N must be a multiple of 16, since recipe.wgrad quantizes dy in 16x16 tiles",
    ),
    "several_keys": (
        lambda x, w: linear(x, w, SR_RECIPE, key=jax.random.split(jax.random.key(0))),
        [a(8, 32), a(16, 32)],
        "TypeError: linear: key must be one JAX PRNG key, as jax.random.key gives, got ",
    ),
    "window64_k": (
        partial(linear, recipe=recipes.window64(stochastic_rounding=False)),
        [a(8, 80), a(16, 80)],
        r"linear: K must be a multiple of 64, got K=80 in w.shape=\(16, 80\); pad K of x and w to 128",
    ),
    "window64_n": (
        partial(linear, recipe=Recipe(dgrad=(WINDOW64, NVFP4))),
        [a(8, 32), a(16, 32)],
        "linear: N must be a multiple of 64, since recipe.dgrad contracts over it, .* pad N to 64",
    ),
    "weight_only_recipe_float32": (
        partial(linear, recipe=recipes.inference(weight_only=True)),
        [a(8, 32), a(16, 32)],
        "TypeError: linear: x must be bfloat16 or float16 for a weight-only recipe, got float32",
    ),
    "dot_recipe": (
        partial(dot_general, dimension_numbers=(((1,), (0,)), ((), ())), recipe=None),
        [a(8, 32), a(32, 16)],
        "TypeError: dot_general: recipe must be a Recipe, got None",
    ),
    "dot_key": (
        partial(dot_general, dimension_numbers=(((1,), (1,)), ((), ())), recipe=SR_RECIPE),
        [a(8, 32), a(16, 32)],
        "dot_general: key must be a JAX PRNG key, since the recipe rounds stochastically, got None",
    ),
    "dot_key_of_batch": (
        partial(dot_general, dimension_numbers=(((2,), (2,)), ((0,), (0,))), recipe=SR_RECIPE),
        [a(2, 8, 32), a(2, 16, 32)],
        "dot_general: key must be a JAX PRNG key",
    ),
    "dot_precision": (
        partial(dot_general, dimension_numbers=(((1,), (1,)), ((), ())), precision="highest"),
        [a(16, 32), a(16, 32)],
        "dot_general: precision must be None or 'default', got 'highest'",
    ),
    "dot_precision_pair": (
        partial(dot_general, dimension_numbers=(((1,), (1,)), ((), ())), precision=("default", "high")),
        [a(16, 32), a(16, 32)],
        "precision must be None or 'default'",
    ),
    "dot_out_sharding": (
        partial(dot_general, dimension_numbers=(((1,), (1,)), ((), ())), out_sharding="x"),
        [a(16, 32), a(16, 32)],
        "TypeError: dot_general: out_sharding must be a NamedSharding, a PartitionSpec or None, got 'x'",
    ),
    "dot_contracting_sizes": (
        partial(dot_general, dimension_numbers=(((1,), (1,)), ((), ()))),
        [a(16, 32), a(16, 48)],
        r"dot_general: contracting axes must have the same sizes, got axes \(1,\) of lhs.shape=\(16, 32\)",
    ),
    "dot_k": (
        partial(dot_general, dimension_numbers=(((1,), (1,)), ((), ()))),
        [a(16, 20), a(16, 20)],
        "dot_general: K must be a multiple of 16",
    ),
    "dot_axis_twice": (
        partial(dot_general, dimension_numbers=(((1,), (1,)), ((1,), (1,)))),
        [a(16, 32), a(16, 32)],
        r"dot_general: contracting \(1,\) and batch \(1,\) axes must be distinct axes of lhs",
    ),
    "dot_batch_sizes": (
        partial(dot_general, dimension_numbers=(((2,), (2,)), ((0,), (0,)))),
        [a(2, 16, 32), a(3, 16, 32)],
        r"batch axes must have the same sizes, got axes \(0,\) of lhs.shape=\(2, 16, 32\) and axes \(0,\) of rhs",
    ),
    "dot_preferred": (
        partial(dot_general, dimension_numbers=(((1,), (1,)), ((), ())), preferred_element_type=jnp.int32),
        [a(16, 32), a(16, 32)],
        "TypeError: dot_general: preferred_element_type must be float32, bfloat16 or float16, got int32",
    ),
    "dot_lhs": (
        partial(dot_general, dimension_numbers=(((1,), (1,)), ((), ()))),
        [a(16, 32, dtype=jnp.int32), a(16, 32)],
        "TypeError: dot_general: lhs must be float32, bfloat16 or float16, got int32",
    ),
    "dot_rhs": (
        partial(dot_general, dimension_numbers=(((1,), (1,)), ((), ()))),
        [a(16, 32), t(16, 32)],
        "TypeError: dot_general: rhs must be an array, got an NVFP4Tensor",
    ),
    "fake_quant_int": (fake_quant, [a(16, 16, dtype=jnp.int32)], "TypeError: fake_quant: x must be float32"),
    "fake_quant_k": (fake_quant, [a(16, 20)], "fake_quant: K must be a multiple of 16"),
    "fake_quant_k_rotated": (partial(fake_quant, spec=NVFP4_RHT), [a(16, 20)], "fake_quant: K must be"),
    "fake_quant_rows": (
        partial(fake_quant, spec=NVFP4_2D),
        [a(20, 16)],
        "fake_quant: block_rows=16 needs both M and K to be multiples of 16",
    ),
    "fake_quant_rank": (fake_quant, [a(16)], "fake_quant: x must have rank 2 or more"),
    "fake_quant_spec": (partial(fake_quant, spec="nvfp4"), [a(16, 16)], "TypeError: fake_quant: spec must be a"),
    "fake_quant_implementation": (
        partial(fake_quant, implementation="cuda"),
        [a(16, 16)],
        "fake_quant: implementation must be None, 'native' or 'reference', got 'cuda'",
    ),
    "fake_quant_amax": (lambda x, m: fake_quant(x, amax=m), [a(16, 32), a(3)], "fake_quant: amax must have shape"),
    "fake_quant_amax_dtype": (
        lambda x, m: fake_quant(x, amax=m),
        [a(16, 32), a(dtype=BF16)],
        "TypeError: fake_quant: amax must be float32, got bfloat16",
    ),
    "fake_quant_tensor": (fake_quant, [t(16, 32)], "TypeError: fake_quant: x must be an array, got an NVFP4Tensor"),
    "fake_quant_key": (
        partial(fake_quant, spec=NVFP4_SR),
        [a(16, 32)],
        'fake_quant: key must be a JAX PRNG key for rounding="stochastic", got None',
    ),
    "fake_quant_window64": (partial(fake_quant, spec=WINDOW64), [a(16, 32)], "fake_quant: K must be"),
}

TRANSPOSE = {
    "not_a_tensor": (transpose, [a(16, 16)], r"TypeError: transpose: q must be an NVFP4Tensor, got \w+"),
    "not_a_spec": (
        partial(transpose, spec="2d"),
        [t(16, 16)],
        "TypeError: transpose: spec must be a QuantSpec, got '2d'",
    ),
    "blocks": (
        partial(transpose, spec=NVFP4),
        [t(16, 32)],
        r"transpose: spec must have block_rows=16, got NVFP4 with block_rows=1; make .* quantize\(..., ",
    ),
    "format": (
        transpose,
        [t(16, 32, Format(e4m3_max=256))],
        r"transpose: spec must have the format of q, Format\(.*256, .*\), got NVFP4_2D with Format\(.*448, .*\)",
    ),
    "format_of_spec": (
        partial(transpose, spec=four_over_six(block_rows=16)),
        [t(16, 32)],
        "transpose: spec must have the format of q, .*448, .*, got FOUR_OVER_SIX_2D_MAE_256 with",
    ),
    "rows": (transpose, [t(16, 32, Format("row"), amax=(16,))], "transpose: spec must have the format of q"),
    "rotated": (
        transpose,
        [t(16, 32, Format(rht=True))],
        "format of q, .*rht=True.*, got NVFP4_2D with .*; pass the spec that made q, or make the transpose from",
    ),
    "m": (transpose, [t(24, 32)], r"transpose: M and K of q must be multiples of 16, got q.shape=\(24, 32\)"),
    "k": (transpose, [t(16, 40, scale_k=2)], "transpose: K of q must be a multiple of 16, got K=40"),
    "rank": (
        lambda d, s, m: transpose(NVFP4Tensor(d, s, m)),
        [a(16, dtype=U8), a(2, dtype=E4M3), a()],
        r"transpose: q must have rank 2 or more, \[..., M, K\], got data \(16,\)",
    ),
    "data_dtype": (transpose, [t(16, 32, data=jnp.int8)], r"TypeError: transpose: q\.data must be uint8, got int8"),
    "scale_dtype": (transpose, [t(16, 32, scale=U8)], r"TypeError: q\.scale must be float8_e4m3fn, got uint8"),
    "scale_shape": (transpose, [t(16, 32, scale_k=3)], r"q\.scale must have shape \(16, 2\) for data"),
    "amax_of_rows": (
        transpose,
        [t(16, 32, lead=(2,), amax=(2, 16))],
        r"transpose: q\.amax must have shape \(\) or \(2,\) for data .*, got \(2, 16\); the rows of a tile share one",
    ),
    "implementation": (
        partial(transpose, implementation="cuda"),
        [t(16, 32)],
        "transpose: implementation must be None, 'native' or 'reference', got 'cuda'",
    ),
}

TABLES = {"quantize": QUANTIZE, "dequantize": DEQUANTIZE, "transpose": TRANSPOSE, "matmul": MATMUL, "linear": LINEAR}
ERRORS = {f"{op}-{name}": row for op, table in TABLES.items() for name, row in table.items()}
every_error = pytest.mark.parametrize(("f", "operands", "text"), ERRORS.values(), ids=ERRORS)


@every_error
def test_errors_come_at_trace_time(f, operands, text):
    """`<op>: <what> must <rule>, got <value>`: no message prints braces of a forgotten f-string."""
    with refused(text) as raised:
        jax.eval_shape(f, *operands)
    assert not re.search(r"\{\w+[.!:}]", str(raised.value))


@every_error
def test_errors_of_eager_calls(f, operands, text):
    arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), operands)
    with refused(text):
        f(*arrays)


# ---------------------------------------------------------------- implementation
def test_native_without_a_kernel_for_the_platform_fails_when_lowered():
    f = jax.jit(partial(quantize, implementation="native"))
    with pytest.raises(NotImplementedError, match=r"nvfp4_quantize: implementation='native' has no kernel .*built: "):
        f.trace(jnp.ones((16, 16))).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_platforms_without_kernels_use_the_reference(implementation):
    f = jax.jit(partial(quantize, implementation=implementation))
    text = f.trace(jnp.ones((16, 16))).lower(lowering_platforms=("tpu",)).as_text()
    assert "nvfp4_quantize" not in text
    assert "stablehlo.multiply" not in re.sub(r".*ui32.*", "", text)  # integers only


# ---------------------------------------------------------------- values that no array holds
X = np.ones((16, 32), np.float32)


@pytest.mark.parametrize("amax", [1e39, -1e39, 2**128, 10**400, -(10**5000)], ids=lambda v: str(type(v).__name__))
@pytest.mark.parametrize("f", [quantize, fake_quant, quantization_report], ids=lambda f: f.__name__)
def test_a_number_beyond_float32_is_no_amax(f, amax):
    with pytest.raises(
        ValueError, match=r"^\w+: amax must be within float32, whose largest number is 3.4\d+e\+38, got "
    ):
        f(X, amax=amax)


def test_the_largest_float32_and_infinity_are_an_amax():
    assert [float(quantize(X, amax=v).amax) for v in (3.4028235e38, -3.4028235e38, np.inf)] == [FLOAT_MAX] * 2 + [
        np.inf
    ]


@pytest.mark.parametrize(
    ("f", "operands", "name"),
    [
        (quantize, [X.astype(">f4")], "quantize: x"),
        (quantize_pair, [X.astype(">f2")], "quantize_pair: x"),
        (linear, [X, X.astype(">f4")], "linear: w"),
        (matmul_nt, [X.astype(">f2"), exact_tensor((16, 32))], "matmul_nt: a"),
        (lambda x: quantize(x, amax=np.array(3, ">f4")), [X], "quantize: amax"),
    ],
    ids=["quantize", "pair", "weight", "matmul", "amax"],
)
def test_an_array_of_foreign_byte_order(f, operands, name):
    message = r' must be of native byte order, got dtype >f\d; convert it with .astype\(.*dtype.newbyteorder\("="\)\)$'
    with pytest.raises(TypeError, match="^" + name + message):
        f(*operands)


@pytest.mark.parametrize("dtype", ["M8[s]", object, np.longdouble], ids=str)
def test_a_dtype_that_jax_has_not(dtype):
    x = X.astype(dtype)
    message = f"quantize: x must be of a dtype that JAX has (float32, bfloat16 or float16 for floats), got {x.dtype}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        quantize(x)


def test_a_masked_array():
    x = np.ma.masked_array(X, X > 0)
    message = r"quantize: x must have no mask, got a NumPy masked array; x.filled\(0\) is .*, x.data is "
    with pytest.raises(TypeError, match="^" + message):
        quantize(x)
    assert_bitwise(quantize(x.filled(0)).data, quantize(np.where(x.mask, 0, X)).data)


@pytest.mark.parametrize(
    ("x", "got"),
    [([[10**400] * 16], r"\[\[1000.*\]\]"), (None, "None")],
    ids=["integer", "None"],
)
def test_what_is_no_array_is_named_in_short(x, got):
    with pytest.raises(TypeError, match=f"^quantize: x must be an array, got {got}$") as raised:
        quantize(x)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("x", "options", "text"),
    [
        (np.zeros((4, 100), np.float32), {}, "K must be a multiple of 16"),
        (np.zeros(16, np.float32), {}, "x must have rank 2 or more"),
        (np.zeros((4, 16), np.int32), {}, "x must be float32, bfloat16 or float16, got int32"),
        (X, {"amax": jnp.ones(3)}, "amax must have shape"),
        (X, {"spec": None}, "spec must be a QuantSpec"),
        (X, {"spec": NVFP4_SR}, "key must be a JAX PRNG key"),
        (X, {"transpose": 1}, "transpose must be True or False"),
        (None, {}, "x must be an array"),
    ],
    ids=["k", "rank", "dtype", "amax", "spec", "key", "transpose", "None"],
)
def test_a_report_names_itself(x, options, text):
    with pytest.raises((TypeError, ValueError), match=f"^quantization_report: {text}"):
        quantization_report(x, **options)


def test_dot_general_of_a_quantized_weight_advises_linear():
    with pytest.raises(TypeError, match=r"^dot_general: rhs must be an array, got an NVFP4Tensor; .*\.linear takes"):
        dot_general(X, exact_tensor((16, 32)), (((1,), (1,)), ((), ())))
