"""matmul_nt against XLA's own dot of the unquantized operands."""

from typing import Any

import jax
import jax.numpy as jnp

import jnvfp4

from .timing import Timing, time_calls

GPU_SHAPES = {
    "8192": (8192, 8192, 8192),
    "4096x14336x4096": (4096, 14336, 4096),
    "256x14336x4096": (256, 14336, 4096),
    "16x14336x4096": (16, 14336, 4096),
    "1x14336x4096": (1, 14336, 4096),
}
CPU_SHAPES = {"1024": (1024, 1024, 1024), "1x4096x4096": (1, 4096, 4096)}


def _row(name: str, what: str, timing: Timing, flops: float, baseline_us: float) -> dict[str, Any]:
    return {
        "shape MxNxK": name,
        "op": what,
        **timing.json(),
        "TFLOP/s": round(flops / timing.median_us / 1e6, 2),
        "speed of dot": round(baseline_us / timing.median_us, 3),
    }


def _bench_shape(name: str, m: int, n: int, k: int) -> list[dict[str, Any]]:
    on_cpu = jax.default_backend() == "cpu"
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
    count = 2 if on_cpu else (2 if m >= 4096 else 8)  # rotated, so that no cache holds the weights
    keys = jax.random.split(jax.random.key(0), 2 * count)
    dense = [
        (jax.random.normal(a, (m, k), dtype), jax.random.normal(b, (n, k), dtype))
        for a, b in zip(keys[:count], keys[count:], strict=True)
    ]
    w4a4 = [(jnvfp4.quantize(a), jnvfp4.quantize(b)) for a, b in dense]
    row_scaled = [(jnvfp4.quantize(a, jnvfp4.ROW_SCALED), jnvfp4.quantize(b)) for a, b in dense]
    windows = [(jnvfp4.quantize(a, jnvfp4.WINDOW64), jnvfp4.quantize(b)) for a, b in dense]
    w4a16 = [(a.astype(jnp.bfloat16), q) for (a, _), (_, q) in zip(dense, w4a4, strict=True)]
    jax.block_until_ready((w4a4, row_scaled, windows, w4a16))

    def dot(a, b):
        return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=dtype)

    def matmul(a, b):
        return jnvfp4.matmul_nt(a, b, out_dtype=dtype)

    def decode_dot(a, b):  # what one would write without the library's GEMM
        return dot(jnvfp4.dequantize(a, dtype), jnvfp4.dequantize(b, dtype))

    baseline = time_calls(dot, dense)
    rows = [_row(name, f"dot {jnp.dtype(dtype).name}", baseline, 2 * m * n * k, baseline.median_us)]
    for what, f, args in (
        ("matmul_nt w4a4", matmul, w4a4),
        ("matmul_nt w4a4 row-scaled", matmul, row_scaled),
        ("matmul_nt w4a4 window64", matmul, windows),
        ("matmul_nt w4a16", matmul, w4a16),
        ("dequantize + dot", decode_dot, w4a4),
    ):
        rows.append(_row(name, what, time_calls(f, args), 2 * m * n * k, baseline.median_us))
    return rows


def run(names: list[str] | None) -> list[dict[str, Any]]:
    shapes = CPU_SHAPES if jax.default_backend() == "cpu" else GPU_SHAPES
    return [row for name in names or shapes for row in _bench_shape(name, *shapes[name])]
