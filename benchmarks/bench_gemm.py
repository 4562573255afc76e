"""matmul_nt against XLA's own dot of the unquantized operands."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jnvfp4
from jnvfp4._native import plans

from .timing import Job, rotations, time_jobs

GPU_CASES = ("8192x8192x8192", "4096x14336x4096", "256x14336x4096", "16x14336x4096", "1x14336x4096")
CPU_CASES = ("1024x1024x1024", "1x4096x4096")


def parse(case: str) -> tuple[int, int, int]:
    if not (match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", case)):
        raise ValueError(f"a case must be MxNxK, got {case!r}")
    m, n, k = map(int, match.groups())
    return m, n, k


def compute_dtype() -> Any:
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def operands(m: int, n: int, k: int, count: int) -> list[tuple[jax.Array, jax.Array]]:
    dtype = compute_dtype()
    make = jax.jit(lambda key, rows: jax.random.normal(key, (rows, k), dtype), static_argnums=1)
    return [(make(jax.random.key(2 * i), m), make(jax.random.key(2 * i + 1), n)) for i in range(count)]


def _jobs(case: str) -> dict[str, Job]:
    m, n, k = parse(case)
    dtype = compute_dtype()
    dense = operands(m, n, k, rotations((n * k + m * k) * 9 // 16))  # no cache holds even the packed ones

    def quantized(spec: jnvfp4.QuantSpec) -> list[tuple]:
        both = jax.jit(lambda a, b: (jnvfp4.quantize(a, spec), jnvfp4.quantize(b)))
        return [both(a, b) for a, b in dense]

    def dot(a, b):
        return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=dtype)

    def matmul(a, b, accumulation="fast", implementation=None):
        return jnvfp4.matmul_nt(a, b, out_dtype=dtype, accumulation=accumulation, implementation=implementation)

    pinned = partial(matmul, accumulation="pinned")

    def decode_dot(a, b):  # what one would write without the library's GEMM
        return dot(jnvfp4.dequantize(a, dtype), jnvfp4.dequantize(b, dtype))

    w4a4, windows = quantized(jnvfp4.NVFP4), quantized(jnvfp4.WINDOW64)
    w4a16 = [(a.astype(jnp.bfloat16), q) for (a, _), (_, q) in zip(dense, w4a4, strict=True)]
    return {
        "dot": Job(dot, dense),
        "matmul_nt w4a4": Job(matmul, w4a4),
        "matmul_nt w4a4 row-scaled": Job(matmul, quantized(jnvfp4.ROW_SCALED)),
        "matmul_nt w4a4 window64": Job(matmul, windows),
        "matmul_nt w4a16": Job(matmul, w4a16),
        "matmul_nt w4a4 pinned": Job(pinned, w4a4),
        "matmul_nt w4a4 window64 pinned": Job(pinned, windows),
        "matmul_nt w4a16 pinned": Job(pinned, w4a16),
        "dequantize + dot": Job(decode_dot, w4a4),
        **{
            f"matmul_nt {name} {kernel}": Job(partial(matmul, implementation=kernel), inputs)
            for name, inputs in {"w4a4": w4a4, "w4a16": w4a16}.items()
            for kernel in _named_kernels(*inputs[0])
        },
    }


def _named_kernels(a: Any, b: Any) -> list[str]:
    """Lists the kernels of one architecture that can multiply here but are not planned."""
    planned = jnvfp4.supports("matmul_nt", a, b).kernel
    kernels = [name for name in plans.matmul_kernels() if re.match("sm(?!80_|.*pinned)", name)]
    return [name for name in kernels if name != planned and jnvfp4.supports("matmul_nt", a, b, implementation=name)]


def against(baseline: str, cases: dict[str, dict[str, Job]], flops: Any) -> list[dict[str, Any]]:
    """Times all jobs; rows with TFLOP/s and with the speed relative to the job called ``baseline`` of the case."""
    labels = [(case, op) for case, jobs in cases.items() for op in jobs]
    timings = dict(zip(labels, time_jobs([cases[case][op] for case, op in labels]), strict=True))
    return [
        {
            "case": case,
            "op": op,
            **timing.json(),
            "TFLOP/s": round(flops(case, op) / timing.median_us / 1e6, 2),
            f"speed of {baseline}": round(timings[case, baseline].median_us / timing.median_us, 3),
        }
        for (case, op), timing in timings.items()
    ]


def run(cases: list[str] | None = None) -> list[dict[str, Any]]:
    def flops(case: str, _op: str) -> float:
        m, n, k = parse(case)
        return 2.0 * m * n * k

    names = cases or (CPU_CASES if jax.default_backend() == "cpu" else GPU_CASES)
    return against("dot", {case: _jobs(case) for case in names}, flops)
