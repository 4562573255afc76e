"""Grouped products, as a layer of experts runs them, against bfloat16: a loop over the groups, and ``lax.ragged_dot``.

The loop knows the sizes of the groups when it is compiled, and does not join its results. ``grouped_matmul_nt`` and
``ragged_dot`` get them as an array on the device. Chains, bursts and steady times are those of bench_products.py. On a
CPU each call is timed by the wall clock, of the small cases that are named.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jnvfp4

from .bench_products import CHAIN_S, burst_and_steady
from .timing import Job, time_jobs

EXPERTS = ("8x14336x4096", "64x2048x7168")  # groups, N and K
TOKENS = (16, 128, 1024, 4096, 32768)
CASES = tuple(f"{tokens}:{experts}" for tokens in TOKENS for experts in EXPERTS)
DOT = 8192  # its rate in bfloat16 is what those of many tokens are compared with
LOOP, RAGGED = "bf16 loop", "bf16 ragged_dot"
SPEEDS = {LOOP: "speed of loop", RAGGED: "speed of ragged_dot"}
# Tokens: what the w4a16 and w4a4 products must reach.
TARGETS = {
    16: {SPEEDS[LOOP]: 2.0, SPEEDS[RAGGED]: 1.0},
    128: {SPEEDS[LOOP]: 2.0, SPEEDS[RAGGED]: 1.0},
    1024: {SPEEDS[LOOP]: 1.0},
    4096: {SPEEDS[LOOP]: 1.0},
    32768: {"share of dot": 0.60},
}
PINNED, PINNED_TARGETS = "w4a4 pinned", {32768: {"share of dot": 0.50}}
MOST = 8  # products of a chain, whose weights have gigabytes


class Case(NamedTuple):
    """Tokens in all, number of experts, N and K."""

    tokens: int
    groups: int
    cols: int
    depth: int

    @property
    def sizes(self) -> np.ndarray:
        """Returns sizes proportional to 1 / (i + 1), rounded down, with the rest in group 0; the last 1/8 is empty."""
        used = self.groups - self.groups // 8
        share = 1 / np.arange(1, used + 1)
        sizes = np.zeros(self.groups, np.int32)
        sizes[:used] = np.floor(self.tokens * share / share.sum())
        sizes[0] += self.tokens - sizes.sum()
        return sizes

    @property
    def flops(self) -> float:
        return 2.0 * self.tokens * self.cols * self.depth

    @property
    def length(self) -> int:
        """Returns the products of a chain: a few milliseconds by the roofline of an H200."""
        used = np.count_nonzero(self.sizes) * self.cols * self.depth
        return max(1, min(MOST, int(CHAIN_S / max(self.flops / 8e14, 2 * used / 4e12))))


def parse(case: str) -> Case:
    if not (match := re.fullmatch(r"(\d+):(\d+)x(\d+)x(\d+)", case)):
        raise ValueError(f"a case must be TOKENS:GxNxK, got {case!r}")
    return Case(*map(int, match.groups()))


class Chain(NamedTuple):
    """One left operand, and weights for each product; ``multiply(a, b, sizes)``."""

    multiply: Callable
    a: Any
    weights: Sequence[Any]
    kernel: str

    def job(self, sizes: jax.Array) -> Job:
        def program(a: Any, weights: Sequence[Any], sizes: jax.Array) -> list[Any]:
            return [self.multiply(a, b, sizes) for b in weights]

        return Job(program, [(self.a, self.weights, sizes)])


def loop(sizes: Sequence[int], a: jax.Array, b: jax.Array, _: jax.Array) -> list[jax.Array]:
    """Multiplies group by group, of sizes that the compiler knows."""
    ends = np.cumsum(sizes)
    groups = [(g, int(end - size), int(end)) for g, (size, end) in enumerate(zip(sizes, ends, strict=True)) if size]
    dims = (((1,), (1,)), ((), ()))
    return [jax.lax.dot_general(a[begin:end], b[g], dims, preferred_element_type=a.dtype) for g, begin, end in groups]


def ragged_dot(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies by weights [G, K, N], the order that it is made for."""
    return jax.lax.ragged_dot(a, b, sizes, preferred_element_type=a.dtype)


def grouped(kernel: str | None) -> Callable:
    return partial(jnvfp4.grouped_matmul_nt, implementation=kernel)


def path_of(text: str, case: Case) -> str:
    """Names what XLA made of a ragged_dot, from its compiled HLO."""
    kinds = [*re.findall(r'custom_call_target="([^"]+)"', text), *re.findall(r'"kind":"(__[^"]+)"', text)]
    names = [name for name in dict.fromkeys(kinds) if re.search("gemm|dot|cudnn|cublas|triton|matmul", name, re.I)]
    if re.search(r" ragged-dot\(", text):
        names.append("ragged-dot")
    if re.search(r" dot\(", text):
        names.append("dot")
    expanded = any(f"[{dims}]" in text for dims in _expanded(case))
    return " + ".join(names or ["unknown"]) + (f" of all rows for each of {case.groups} groups" if expanded else "")


def _expanded(case: Case) -> Iterator[str]:
    """Shapes that only an operand with all rows for each group has."""
    for shape in ((case.groups, case.tokens, case.depth), (case.tokens, case.groups, case.depth)):
        yield ",".join(map(str, shape))
    yield f"{case.tokens},{case.groups * case.depth}"
    yield f"{case.groups * case.tokens},{case.depth}"


def chains(case: Case, every: bool) -> dict[str, Chain]:
    """Makes the chains of a case; with ``every`` also NVFP4 by XLA's ragged_dot of decoded operands."""
    dtype = jnp.bfloat16
    x = jax.random.normal(jax.random.key(0), (case.tokens, case.depth), dtype)
    make = jax.jit(lambda key: jax.random.normal(key, (case.groups, case.cols, case.depth), dtype))
    dense = [make(jax.random.key(1 + i)) for i in range(case.length)]
    xq = jax.jit(jnvfp4.quantize)(x)
    quantized = [jax.jit(jax.vmap(jnvfp4.quantize))(w) for w in dense]
    sizes = jnp.asarray(case.sizes)
    found = {
        LOOP: Chain(partial(loop, case.sizes.tolist()), x, dense, "XLA"),
        RAGGED: Chain(ragged_dot, x, [jnp.swapaxes(w, 1, 2) for w in dense], "XLA"),
    }
    for name, a in (("w4a4", xq), ("w4a16", x)):
        kernel = jnvfp4.supports("grouped_matmul_nt", a, quantized[0], sizes).kernel
        found[name] = Chain(grouped(None), a, quantized, kernel)
        other = "decode_then_ragged_dot"
        if (
            every
            and kernel != other
            and jnvfp4.supports("grouped_matmul_nt", a, quantized[0], sizes, implementation=other)
        ):
            found[f"{name} {other}"] = Chain(grouped(other), a, quantized, other)
    kernel = jnvfp4.supports("grouped_matmul_nt", xq, quantized[0], sizes, accumulation="pinned").kernel
    found[PINNED] = Chain(partial(jnvfp4.grouped_matmul_nt, accumulation="pinned"), xq, quantized, kernel)
    return found


def _times(programs: Sequence[Job]) -> list[dict[str, Any]]:
    """Times programs: bursts and in a row on a GPU, single calls on a CPU. -> median_us and clock of each"""
    if jax.default_backend() != "gpu":
        return [timing.json() for timing in time_jobs(programs)]
    compiled = [partial(jax.jit(job.f).lower(*job.inputs[0]).compile(), *job.inputs[0]) for job in programs]
    return [{**speed._asdict(), "clock": "cupti"} for speed in burst_and_steady(compiled)]


def dot_row(size: int = DOT) -> dict[str, Any]:
    """Times the bfloat16 dot whose rate is the peak that this run reaches."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)

    def dot(a, b):
        return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=a.dtype)

    (time,) = _times([Job(dot, [(a, b)])])
    return _row(f"{size}x{size}x{size}", "bf16 dot", "XLA", time, 1, 2.0 * size**3)


def _row(case: str, op: str, kernel: str, time: dict[str, Any], count: int, flops: float) -> dict[str, Any]:
    microseconds = {k: round(v / count, 2) for k, v in time.items() if k.endswith("_us")}
    others = {k: v for k, v in time.items() if not k.endswith("_us")}
    rate = round(flops * count / time["median_us"] / 1e6, 2)
    return {"case": case, "op": op, "kernel": kernel, **microseconds, "TFLOP/s": rate, **others}


def measure(name: str, every: bool, dot: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a case; a baseline for which the memory is too small is left out, and said."""
    case = parse(name)
    sizes = jnp.asarray(case.sizes)
    found = {}
    for op, chain in chains(case, every).items():
        job = chain.job(sizes)
        try:
            compiled = jax.jit(job.f).lower(*job.inputs[0]).compile()
            jax.block_until_ready(compiled(*job.inputs[0]))
        except jax.errors.JaxRuntimeError as error:
            print(f"{name}: {op} skipped: {str(error).splitlines()[0]}")
            continue
        kernel = path_of(compiled.as_text() or "", case) if op == RAGGED else chain.kernel
        found[op] = job, kernel
    times = dict(zip(found, _times([job for job, _ in found.values()]), strict=True))
    count = case.length
    return [
        _row(name, op, kernel, times[op], count, case.flops) | _judged(case, op, times, count, dot)
        for op, (_, kernel) in found.items()
    ]


def _judged(case: Case, op: str, times: dict[str, Any], count: int, dot: dict[str, Any]) -> dict[str, Any]:
    """Compares a row with the baselines and with the dot of the run; says whether it reaches its targets."""
    own, columns = times[op], {}
    for baseline, column in SPEEDS.items():
        if baseline in times and op != baseline:
            columns[column] = round(times[baseline]["median_us"] / own["median_us"], 3)
            if "steady_us" in own:
                columns[f"steady {column}"] = round(times[baseline]["steady_us"] / own["steady_us"], 3)
    columns["share of dot"] = round(case.flops * count / own["median_us"] / 1e6 / dot["TFLOP/s"], 3)
    of_op = PINNED_TARGETS if op == PINNED else TARGETS if op in ("w4a4", "w4a16") else {}
    targets = of_op.get(case.tokens, {})
    targets = {column: value for column, value in targets.items() if column in columns}
    if not targets:
        return columns
    met = all(columns[column] >= value for column, value in targets.items())
    return {**columns, **{f"target {column}": value for column, value in targets.items()}, "met": met}


def run(cases: list[str] | None, every: bool = False, size: int | None = None) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of a case when they are measured; first that of the dot of ``size``."""
    on_gpu = jax.default_backend() == "gpu"
    if not cases and not on_gpu:
        raise ValueError("the cases of grouped are made for a GPU; name a small one, --cases 64:4x64x64")
    for case in cases or ():
        parse(case)
    dot = dot_row(size or (DOT if on_gpu else 256))
    yield [dot]
    for case in cases or CASES:
        yield measure(case, every, dot)
