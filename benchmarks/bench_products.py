"""Chains of products, as the layers of a model run them: ``matmul_nt`` against ``lax.dot_general`` in bfloat16.

One jitted program multiplies by many weights, each of them once and more than a cache holds in all, so dispatch does
not count, but gaps between kernels do. "Burst" is one program after a rest, and the programs of a case alternate.
"Steady" is the last half second of 2.5 in which one program runs again and again: the power limit of a GPU lowers its
clock then, which is logged.
"""

import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jnvfp4
from jnvfp4._native import plans

from .bench_gemm import parse
from .device_time import ClockLog, profile_calls
from .timing import CACHE_BYTES

WEIGHTS = ((14336, 4096), (4096, 14336), (8192, 8192))
# M: the least speed of w4a4 and of w4a16, in times that of bfloat16.
TARGETS = {
    **dict.fromkeys((1, 2, 4, 8), (2.4, 2.4)),
    16: (2.1, 2.1),
    32: (1.7, 1.7),
    64: (1.5, 1.5),
    128: (1.1, 1.0),
    256: (0.97, 0.92),
    **dict.fromkeys((512, 1024, 2048, 4096), (0.98, 0.95)),
    8192: (1.0, 0.98),
}
WINDOW_TARGETS = {"w4a4 window64 b": 0.94, "w4a4 window64": 0.70}
CASES = (*(f"{m}x{n}x{k}" for m in TARGETS if m < 8192 for n, k in WEIGHTS), "8192x8192x8192")
BURSTS, REST_S, LOAD_S, STEADY_S, IN_FLIGHT = 11, 12e-3, 2.0, 0.5, 4
CHAIN_S, MOST = 3e-3, 48  # the length of a program, and its products at most


class Chain(NamedTuple):
    """One left operand for all products and a right one for each; the kernel's name, or None for XLA's bfloat16."""

    a: Any
    weights: Sequence[Any]
    kernel: str | None

    def multiply(self, b: Any) -> jax.Array:
        if self.kernel:
            return jnvfp4.matmul_nt(self.a, b, implementation=self.kernel)
        return jax.lax.dot_general(self.a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)

    def compiled(self) -> Callable:
        program = jax.jit(lambda a, weights: [self._replace(a=a).multiply(b) for b in weights])
        return partial(program.lower(self.a, self.weights).compile(), self.a, self.weights)


def length(m: int, n: int, k: int) -> int:
    """Products of a chain: a few milliseconds, by the roofline of an H200, and packed weights beyond the cache."""
    seconds = max(2 * m * n * k / 8e14, 2 * n * k / 4e12)
    return min(MOST, max(1 + int(CHAIN_S / seconds), 1 + CACHE_BYTES * 16 // (n * k * 9)))


def chains(case: str, every: bool) -> dict[str, Chain]:
    """Makes the chains of a case by the planned kernels; with ``every`` also by each other one that can multiply."""
    m, n, k = parse(case)
    x = jax.random.normal(jax.random.key(0), (m, k), jnp.bfloat16)
    make = jax.jit(lambda key: jax.random.normal(key, (n, k), jnp.bfloat16))
    dense = [make(jax.random.key(i)) for i in range(1, 1 + length(m, n, k))]

    quantize = jax.jit(jnvfp4.quantize, static_argnums=1)
    xq, weights = quantize(x, jnvfp4.NVFP4), [quantize(w, jnvfp4.NVFP4) for w in dense]
    operands = {"w4a4": (xq, weights), "w4a16": (x, weights)}
    if m == n == k == 8192:
        windows = [quantize(w, jnvfp4.WINDOW64) for w in dense]
        operands["w4a4 window64 b"] = (xq, windows)
        operands["w4a4 window64"] = (quantize(x, jnvfp4.WINDOW64), windows)
    found = {"bf16": Chain(x, dense, None)}
    for name, (a, bs) in operands.items():
        planned, *others = kernels(a, bs[0])
        found[name] = Chain(a, bs, planned)
        if every:
            found |= {f"{name} {kernel}": Chain(a, bs, kernel) for kernel in others}
    return found


def kernels(a: Any, b: Any) -> list[str]:
    """Lists the planned kernel, then the others that can multiply here, but for those of the pinned order."""
    planned = jnvfp4.supports("matmul_nt", a, b).kernel
    names = [name for name in plans.matmul_kernels() if not re.match("sm80_|cpu_|.*pinned", name)]
    others = [name for name in names if name != planned]
    return [planned, *(name for name in others if jnvfp4.supports("matmul_nt", a, b, implementation=name))]


class Speed(NamedTuple):
    """Microseconds of a program in a burst and steady, and the mean SM clock meanwhile; None if it is not known."""

    median_us: float
    steady_us: float
    burst_mhz: int | None
    steady_mhz: int | None

    def columns(self, count: int, baseline: "Speed") -> dict[str, Any]:
        """Those of a row: of one of ``count`` products, and against a baseline of as many."""
        return {
            "median_us": round(self.median_us / count, 2),
            "speed of bf16": round(baseline.median_us / self.median_us, 3),
            "steady_us": round(self.steady_us / count, 2),
            "steady speed of bf16": round(baseline.steady_us / self.steady_us, 3),
            "burst_mhz": self.burst_mhz,
            "steady_mhz": self.steady_mhz,
            "clock": "cupti",
        }


def bursts(programs: Sequence[Callable]) -> list[float]:
    """Medians of the microseconds from a program's first kernel to its last, after a rest each."""

    def call(program: Callable) -> Any:
        time.sleep(REST_S)
        return program()

    found = profile_calls([partial(call, program) for _ in range(BURSTS) for program in programs])
    return [statistics.median(c.span_us for c in found[i :: len(programs)] if c) for i in range(len(programs))]


def steady(program: Callable) -> tuple[float, float]:
    """Microseconds of a program among others of its kind, by the wall clock, and when their count began.

    A few are in flight, so that the device never waits for the host.
    """
    running: deque[Any] = deque()

    def run(seconds: float) -> tuple[float, float]:
        begin, done = time.time(), 0
        while not done or time.time() - begin < seconds:
            running.append(program())
            if len(running) > IN_FLIGHT:
                jax.block_until_ready(running.popleft())
                done += 1
        return (time.time() - begin) / done * 1e6, begin

    run(LOAD_S)
    found = run(STEADY_S)
    jax.block_until_ready(list(running))
    return found


def burst_and_steady(programs: Sequence[Callable]) -> list[Speed]:
    for program in 2 * list(programs):
        jax.block_until_ready(program())
    with ClockLog() as log:
        begin = time.time()
        burst = bursts(programs)
        burst_mhz = log.mean(begin, time.time())
        found = []
        for program, cool in zip(programs, burst, strict=True):
            hot, begin = steady(program)
            found.append(Speed(cool, hot, burst_mhz, log.mean(begin, time.time())))
    return found


def measure(case: str, every: bool) -> list[dict[str, Any]]:
    m, _, _ = parse(case)
    found = chains(case, every)
    programs = [chain.compiled() for chain in found.values()]
    speeds = burst_and_steady(programs)
    targets = {**dict(zip(("w4a4", "w4a16"), TARGETS.get(m, ()), strict=False)), **WINDOW_TARGETS}
    rows = []
    for (name, chain), speed in zip(found.items(), speeds, strict=True):
        row: dict[str, Any] = {"case": case, "op": name, "kernel": chain.kernel or "XLA"}
        row |= speed.columns(len(chain.weights), speeds[0])
        if name in targets:
            row |= {"target": targets[name], "met": speeds[0].median_us / speed.median_us >= 0.98 * targets[name]}
        rows.append(row)
    return rows


def run(cases: list[str] | None, every: bool) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of a case when they are measured: all cases take minutes."""
    if jax.default_backend() != "gpu":
        raise ValueError("products are timed by the profiler of a GPU; python -m benchmarks gemm times them on a CPU")
    for case in cases or CASES:
        yield measure(case, every)
