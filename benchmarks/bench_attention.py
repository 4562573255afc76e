"""Decode attention of one token per sequence: over an NVFP4 cache, and over a bfloat16 one by JAX and by PyTorch.

Llama 3 8B's heads: 8 KV heads of 128 elements with four query heads each. One jitted program attends to many caches,
each of them once and more than the GPU's own cache holds in all, so dispatch does not count, but gaps between kernels
do. ``jax.nn.dot_product_attention`` and PyTorch's ``scaled_dot_product_attention`` know the lengths, which ours reads
on the device. PyTorch's calls are in a CUDA graph, timed by events.
"""

import importlib
import re
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jnvfp4
from jnvfp4.attention import KVCache, decode_attention

from .bench_products import bursts

KV_HEADS, GROUP, DEPTH, PAGE = 8, 4, 128, 64
TARGETS = {  # the speed of the fastest bfloat16 attention
    "1x2048": 1.2, "1x8192": 1.7, "1x32768": 2.3, "8x2048": None, "8x8192": 2.6, "8x32768": 2.7, "32x2048": None,
    "32x8192": 2.7, "32x32768": 2.85, "32x131072": 2.9,
}  # fmt: skip
MOST_BYTES, MOST_CALLS = 400 << 20, 48  # of the caches of a program


def parse(case: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"(\d+)x(\d+)", case)) or int(match[2]) % PAGE:
        raise ValueError(f"a case must be SEQUENCESxTOKENS, with tokens a multiple of {PAGE}, got {case!r}")
    return int(match[1]), int(match[2])


def row_bytes(op: str) -> float:
    """Returns the bytes of a token of a KV head: of its key and of its value."""
    return 2 * DEPTH * 2 if "bf16" in op else 2 * (DEPTH * 9 / 16 + 4)


def calls_of(op: str, sequences: int, tokens: int) -> int:
    """Returns how many caches, and so calls, a program has."""
    return min(MOST_CALLS, max(2, 1 + int(MOST_BYTES / (sequences * tokens * KV_HEADS * row_bytes(op)))))


@partial(jax.jit, static_argnums=(0, 1, 2))
def make_cache(op: str, sequences: int, tokens: int, key: jax.Array) -> Any:
    """Draws a sequence, which all are copies of; "paged" has its pages in descending order."""
    rows = [jax.random.normal(part, (KV_HEADS, tokens, DEPTH), jnp.bfloat16) for part in jax.random.split(key)]
    if "bf16" in op:
        return [jnp.broadcast_to(part.swapaxes(0, 1), (sequences, tokens, KV_HEADS, DEPTH)) for part in rows]
    quantized = [jnvfp4.quantize(part, jnvfp4.ROW_SCALED) for part in rows]
    if "paged" not in op:
        keys, values = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (sequences, *leaf.shape)), quantized)
        return KVCache(keys, values)
    pages = sequences * (tokens // PAGE)

    def paged(leaf: jax.Array) -> jax.Array:
        of_sequence = jnp.moveaxis(leaf.reshape(KV_HEADS, tokens // PAGE, PAGE, *leaf.shape[2:]), 0, 1)
        return jnp.tile(of_sequence, (sequences, *(1,) * (of_sequence.ndim - 1)))

    keys, values = jax.tree.map(paged, quantized)
    return KVCache(keys, values, jnp.arange(pages, dtype=jnp.int32)[::-1].reshape(sequences, -1))


def attend(op: str, q: jax.Array, cache: Any, lengths: jax.Array) -> jax.Array:
    if "bf16" not in op:
        return decode_attention(q, cache, lengths)
    implementation: Any = op.removeprefix("bf16 ")
    return jax.nn.dot_product_attention(q[:, None], *cache, implementation=implementation)[:, 0]


def program(op: str, sequences: int, tokens: int) -> Callable:
    """Returns a compiled program that attends to each of several caches."""
    keys = jax.random.split(jax.random.key(0), calls_of(op, sequences, tokens))
    caches = [make_cache(op, sequences, tokens, key) for key in keys]
    q = jax.random.normal(jax.random.key(1), (sequences, KV_HEADS * GROUP, DEPTH), jnp.bfloat16)
    lengths = jnp.full(sequences, tokens, jnp.int32)
    every = jax.jit(lambda q, caches, lengths: [attend(op, q, cache, lengths) for cache in caches])
    return partial(every.lower(q, caches, lengths).compile(), q, caches, lengths)


def in_torch(backend: str, sequences: int, tokens: int) -> float:
    """Returns the microseconds of a call of PyTorch's attention by a backend, the median of several graphs."""
    torch, kernels = importlib.import_module("torch"), importlib.import_module("torch.nn.attention")
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    calls = calls_of("bf16", sequences, tokens)
    caches = [[draw(sequences, KV_HEADS, tokens, DEPTH) for _ in range(2)] for _ in range(calls)]
    q = draw(sequences, KV_HEADS * GROUP, 1, DEPTH)
    attention = torch.nn.functional.scaled_dot_product_attention
    with kernels.sdpa_kernel(getattr(kernels.SDPBackend, backend)):
        with torch.cuda.stream(torch.cuda.Stream()):
            attention(q, *caches[0], enable_gqa=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for cache in caches:
                attention(q, *cache, enable_gqa=True)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(7):
        begin.record(), graph.replay(), end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    del graph, caches
    torch.cuda.empty_cache()
    return statistics.median(times[1:])


def in_jax(op: str, sequences: int, tokens: int) -> float:
    """Returns the microseconds of a call, the median of several programs."""
    compiled = program(op, sequences, tokens)
    for _ in range(2):
        jax.block_until_ready(compiled())
    (span,) = bursts([compiled])
    return span / calls_of(op, sequences, tokens)


def measure(case: str, peers: bool) -> list[dict[str, Any]]:
    sizes = parse(case)
    timed: dict[str, Callable] = {op: partial(in_jax, op) for op in ("nvfp4", "nvfp4 paged", "bf16 xla", "bf16 cudnn")}
    if peers:
        timed |= {f"bf16 torch {name}": partial(in_torch, f"{name.upper()}_ATTENTION") for name in ("flash", "cudnn")}
    times: dict[str, float] = {}
    for op, time in timed.items():
        try:
            times[op] = time(*sizes)
        except Exception as error:  # whatever another library does when it does not fit this machine
            if "nvfp4" in op:
                raise
            print(f"{case}: {op} is left out: {str(error).splitlines()[0]}")
    fastest = min(us for op, us in times.items() if "bf16" in op)
    rows = []
    for op, us in times.items():
        gigabytes = sizes[0] * sizes[1] * KV_HEADS * row_bytes(op) / 1e9
        clock = "cuda events" if "torch" in op else "cupti"
        row = {"case": case, "op": op, "median_us": round(us, 2), "GB/s": round(1e6 * gigabytes / us), "clock": clock}
        row["speed of the fastest bf16"] = round(fastest / us, 3)
        if op == "nvfp4" and (target := TARGETS.get(case)):
            row |= {"target": target, "met": fastest / us >= target}
        rows.append(row)
    return rows


def run(cases: list[str] | None, peers: bool) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of a case when they are measured."""
    if jax.default_backend() != "gpu":
        raise ValueError("the attention suite is timed by the profiler of a GPU")
    for case in cases or TARGETS:
        yield measure(case, peers)
