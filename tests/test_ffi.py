"""The handlers refuse buffers that do not fit, even when nothing checked them before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jnvfp4 import NVFP4, matmul_nt, quantize

U8, F8, F32 = jnp.uint8, jnp.float8_e4m3fn, jnp.float32


def like(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def zeros(shape, dtype):
    return jnp.zeros(shape, dtype)


DATA, SCALE, AMAX = zeros((16, 16), U8), zeros((16, 2), F8), zeros((), F32)
QUANTIZE = {"transpose": False, "spec": NVFP4.ffi_attrs()}
MAX = np.int32(448)
CALLS = {
    "quantize data": ("quantize", [like((16, 8), U8), like((16, 2), F8)], [zeros((16, 32), F32), AMAX], QUANTIZE),
    "quantize scale": ("quantize", [like((16, 16), U8), like((16, 1), F8)], [zeros((16, 32), F32), AMAX], QUANTIZE),
    "quantize amax": (
        "quantize",
        [like((16, 16), U8), like((16, 2), F8)],
        [zeros((16, 32), F32), zeros((3,), F32)],
        QUANTIZE,
    ),
    "dequantize out": ("dequantize", [like((16, 16), F32)], [DATA, SCALE, AMAX], {"e4m3_max": MAX}),
}
CPU_CALLS = {
    name: (
        "matmul",
        [like(out, F32)],
        [DATA, a_scale, AMAX, DATA, b_scale, AMAX, bias],
        {"a_e4m3_max": MAX, "b_e4m3_max": MAX},
    )
    for name, a_scale, b_scale, bias, out in (
        ("matmul a scale", zeros((16, 1), F8), SCALE, zeros((0,), F32), (16, 16)),
        ("matmul b scale", SCALE, zeros((16, 1), F8), zeros((0,), F32), (16, 16)),
        ("matmul bias", SCALE, SCALE, zeros((3,), F32), (16, 16)),
        ("matmul out", SCALE, SCALE, zeros((0,), F32), (16, 8)),
    )
}


def assert_refused(target, results, operands, attrs):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT: .*(must hold|does not fit)"):
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
