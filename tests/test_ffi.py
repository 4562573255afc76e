"""The handlers refuse buffers that do not fit, even when nothing checked them before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jnvfp4 import NVFP4, NVFP4_2D, NVFP4_SR, ROW_SCALED, WINDOW64, matmul_nt, quantize

U8, U32, F8, F32 = jnp.uint8, jnp.uint32, jnp.float8_e4m3fn, jnp.float32


def like(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def zeros(shape, dtype):
    return jnp.zeros(shape, dtype)


DATA, SCALE, AMAX = zeros((16, 16), U8), zeros((16, 2), F8), zeros((), F32)
X, NONE, STREAM = zeros((16, 32), F32), zeros((0,), U32), zeros((4,), U32)
OUT = [like((16, 16), U8), like((16, 2), F8)]
OUT_T = [like((32, 8), U8), like((32, 1), F8)]
ATTRS, SR_ATTRS, ROW_ATTRS, WINDOW_ATTRS = (s.ffi_attrs() for s in (NVFP4, NVFP4_SR, ROW_SCALED, WINDOW64))
QUANTIZE = {"transpose": False, "spec": ATTRS, "row_blocks": np.int32(2)}
STOCHASTIC = {**QUANTIZE, "spec": SR_ATTRS}
WINDOWS = {**QUANTIZE, "spec": WINDOW_ATTRS}
PAIR = {"row_spec": ATTRS, "col_spec": ATTRS, "row_blocks": np.int32(2), "col_blocks": np.int32(1)}
WINDOW_PAIR = {"row_spec": WINDOW_ATTRS, "col_spec": WINDOW_ATTRS}
FAKE_QUANT = {"spec": ATTRS, "row_blocks": np.int32(2)}
TILES = {**QUANTIZE, "spec": NVFP4_2D.ffi_attrs()}
MAX = np.int32(448)
DEQUANTIZE = {"e4m3_max": MAX, "windows": False, "rotate_back": False}


def found(m, k, *amax):
    return [like((m, k // 2), U8), like((m, k // 16), F8), like(amax, F32)]


# name -> target, results, operands, attributes
CALLS = {
    "quantize data": ("quantize", [like((16, 8), U8), OUT[1]], [X, AMAX, NONE], QUANTIZE),
    "quantize scale": ("quantize", [OUT[0], like((16, 1), F8)], [X, AMAX, NONE], QUANTIZE),
    "quantize amax": ("quantize", OUT, [X, zeros((3,), F32), NONE], QUANTIZE),
    "quantize stream missing": ("quantize", OUT, [X, AMAX, NONE], STOCHASTIC),
    "quantize stream short": ("quantize", OUT, [X, AMAX, zeros((2,), U32)], STOCHASTIC),
    "quantize stream unused": ("quantize", OUT, [X, AMAX, STREAM], QUANTIZE),
    "quantize K": ("quantize", OUT, [zeros((16, 24), F32), AMAX, NONE], QUANTIZE),
    "quantize windows of 32": ("quantize", OUT, [X, zeros((16,), F32), NONE], WINDOWS),
    "quantize tiles of 8": (
        "quantize",
        [like((8, 16), U8), like((8, 2), F8)],
        [zeros((8, 32), F32), AMAX, NONE],
        TILES,
    ),
    "quantize amax of windows": (
        "quantize",
        [like((16, 64), U8), like((16, 8), F8)],
        [zeros((16, 128), F32), zeros((16,), F32), NONE],
        WINDOWS,
    ),
    "found amax of rows": (
        "quantize_find_amax",
        found(16, 32, 3),
        [X],
        {"transpose": False, "spec": ROW_ATTRS},
    ),
    "found amax of windows": (
        "quantize_find_amax",
        found(16, 128, 16),
        [zeros((16, 128), F32)],
        {"transpose": False, "spec": WINDOW_ATTRS},
    ),
    "pair row data": ("quantize_pair", [like((16, 8), U8), OUT[1], *OUT_T], [X, AMAX, AMAX, NONE, NONE], PAIR),
    "pair col scale": (
        "quantize_pair",
        [*OUT, OUT_T[0], like((16, 1), F8)],
        [X, AMAX, AMAX, NONE, NONE],
        PAIR,
    ),
    "pair col amax": ("quantize_pair", [*OUT, *OUT_T], [X, AMAX, zeros((3,), F32), NONE, NONE], PAIR),
    "pair stream": (
        "quantize_pair",
        [*OUT, *OUT_T],
        [X, AMAX, AMAX, STREAM, NONE],
        {**PAIR, "row_spec": SR_ATTRS, "col_spec": SR_ATTRS},
    ),
    "pair windows": (
        "quantize_pair_find_amax",
        [*found(64, 64, 64, 1), *found(64, 64, 3)],
        [zeros((64, 64), F32)],
        WINDOW_PAIR,
    ),
    "rht amax": ("rht_amax", [like((3,), F32)], [X], {"transpose": False, "keep": np.int32(0)}),
    "rht amax K": ("rht_amax", [like((), F32)], [zeros((16, 24), F32)], {"transpose": False, "keep": np.int32(0)}),
    "dequantize out": ("dequantize", [like((16, 16), F32)], [DATA, SCALE, AMAX], DEQUANTIZE),
    "dequantize amax": ("dequantize", [like((16, 32), F32)], [DATA, SCALE, zeros((3,), F32)], DEQUANTIZE),
    "dequantize windows": (
        "dequantize",
        [like((16, 32), F32)],
        [DATA, SCALE, zeros((16,), F32)],
        {**DEQUANTIZE, "windows": True},
    ),
    "fake_quant out": ("fake_quant", [like((16, 16), F32)], [X, AMAX, NONE], FAKE_QUANT),
    "fake_quant dtype": ("fake_quant", [like((16, 32), jnp.bfloat16)], [X, AMAX, NONE], FAKE_QUANT),
    "fake_quant amax": ("fake_quant", [like((16, 32), F32)], [X, zeros((3,), F32), NONE], FAKE_QUANT),
    "fake_quant no amax": ("fake_quant", [like((16, 32), F32)], [X, zeros((0,), F32), NONE], FAKE_QUANT),
    "fake_quant amax of windows": (
        "fake_quant",
        [like((16, 128), F32)],
        [zeros((16, 128), F32), zeros((16,), F32), NONE],
        {**FAKE_QUANT, "spec": WINDOW_ATTRS},
    ),
    "fake_quant K": ("fake_quant", [like((16, 24), F32)], [zeros((16, 24), F32), AMAX, NONE], FAKE_QUANT),
    "fake_quant stream": ("fake_quant", [like((16, 32), F32)], [X, AMAX, NONE], {**FAKE_QUANT, "spec": SR_ATTRS}),
}
CPU_CALLS = {
    name: (
        "matmul",
        [like(out, F32)],
        [DATA, a_scale, AMAX, DATA, b_scale, AMAX, bias],
        {"a_e4m3_max": MAX, "b_e4m3_max": MAX, "a_windows": False, "b_windows": False},
    )
    for name, a_scale, b_scale, bias, out in (
        ("matmul a scale", zeros((16, 1), F8), SCALE, zeros((0,), F32), (16, 16)),
        ("matmul b scale", SCALE, zeros((16, 1), F8), zeros((0,), F32), (16, 16)),
        ("matmul bias", SCALE, SCALE, zeros((3,), F32), (16, 16)),
        ("matmul out", SCALE, SCALE, zeros((0,), F32), (16, 8)),
    )
}


def assert_refused(target, results, operands, attrs):
    text = "(must hold|does not fit|must be a multiple|to be multiples|must be given|must have the dtype)"
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: .*{text}"):
        jax.block_until_ready(jax.ffi.ffi_call(f"nvfp4_{target}", results)(*operands, **attrs))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_buffers_that_do_not_fit(native, call):
    assert_refused(*call)


@pytest.mark.parametrize("call", CPU_CALLS.values(), ids=CPU_CALLS)
def test_cpu_matmul_buffers_that_do_not_fit(call):
    with jax.default_device(jax.devices("cpu")[0]):
        assert_refused(*call)


@pytest.mark.parametrize("precision", ["highest", "F16_F16_F16", "BF16_BF16_F32"])
def test_default_matmul_precision_leaves_the_gpu_product_alone(precision):
    from conftest import skip_or_fail

    from jnvfp4 import _native

    if not _native.available("cuda"):
        skip_or_fail("cuda", "no CUDA kernels in this build")
    a = quantize(jnp.ones((16, 32)))
    lowered = jax.jit(matmul_nt).trace(a, a).lower(lowering_platforms=("cuda",)).as_text()
    with jax.default_matmul_precision(precision):
        changed = jax.jit(lambda a, b: matmul_nt(a, b)).trace(a, a).lower(lowering_platforms=("cuda",)).as_text()
    dots = [
        [line.split("dot_general")[1] for line in t.splitlines() if "dot_general" in line] for t in (lowered, changed)
    ]
    assert dots[0]
    assert dots[0] == dots[1]
