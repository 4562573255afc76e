"""Timing jitted functions, and what a result must say to be worth keeping."""

import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

import jnvfp4


@dataclass(frozen=True)
class Timing:
    """Microseconds for one call: median, and the 20th and 80th percentile."""

    median_us: float
    p20_us: float
    p80_us: float

    def json(self) -> dict[str, float]:
        return {k: round(v, 2) for k, v in asdict(self).items()}


def time_calls(f: Callable, inputs: Sequence[tuple], samples: int = 15, budget_s: float = 4.0) -> Timing:
    """Times ``f`` on each of ``inputs``: all in one jitted program, several programs in flight.

    Different inputs keep a cache from serving the next call; one program keeps dispatch out of the time.
    """
    program = jax.jit(lambda args: [f(*a) for a in args])
    start = time.perf_counter()
    jax.block_until_ready(program(inputs))
    jax.block_until_ready(program(inputs))
    once = time.perf_counter()
    jax.block_until_ready(program(inputs))
    once = time.perf_counter() - once
    in_flight = max(1, min(20, int(0.02 / max(once, 1e-6))))
    times: list[float] = []
    while len(times) < samples and (len(times) < 3 or time.perf_counter() - start < budget_s):
        begin = time.perf_counter()
        results = [program(inputs) for _ in range(in_flight)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - begin) / in_flight / len(inputs) * 1e6)
        del results
    times.sort()
    return Timing(statistics.median(times), times[len(times) // 5], times[-1 - len(times) // 5])


def environment(commit: str | None = None) -> dict[str, Any]:
    """Hardware, versions and commit of a result; ``commit`` where there is no git checkout to ask."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else platform.processor() or _cpu_name(),
        "platform": device.platform,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jnvfp4": jnvfp4.__version__,
        "commit": commit or _output("git", "rev-parse", "--short", "HEAD"),
        "cpus": len(_affinity()),
    }


def _affinity() -> Sequence[int]:
    import os

    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
