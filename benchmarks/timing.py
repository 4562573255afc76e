"""Timing jitted functions, and what a result must say to be worth keeping."""

import datetime
import itertools
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import jnvfp4

from .device_time import NoDeviceTimeError, profile_calls

WARM_UP, CALLS = 5, 30
CACHE_BYTES = 60 << 20  # the last-level cache that inputs must not stay in: L2 of an H200


@dataclass(frozen=True)
class Job:
    """A function to time on each of its inputs in turn, so that no cache holds the next one."""

    f: Callable
    inputs: Sequence[tuple]


@dataclass(frozen=True)
class Timing:
    """Microseconds for one call.

    Attributes:
      median_us, p20_us, p80_us: over the calls.
      clock: "cupti", time in kernels on the device, or "wall", which includes dispatch.
      span_us: median from the start of the first kernel to the end of the last, launch gaps included.
      kernels: that one call runs, copies and memsets included.
    """

    median_us: float
    p20_us: float
    p80_us: float
    clock: str = "wall"
    span_us: float | None = None
    kernels: int | None = None

    def json(self) -> dict[str, Any]:
        times = {"median_us": self.median_us, "p20_us": self.p20_us, "p80_us": self.p80_us, "span_us": self.span_us}
        rounded = {k: round(v, 2) for k, v in times.items() if v is not None}
        return {**rounded, **({} if self.kernels is None else {"kernels": self.kernels}), "clock": self.clock}


def summary(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    p20, p80 = np.percentile(times, [20, 80])
    return statistics.median(times), float(p20), float(p80)


def rotations(nbytes: int) -> int:
    """How many inputs of this size overflow the cache three times, within reason: tiny ones stay in it."""
    if jax.default_backend() == "cpu":
        return 2
    return min(16, max(2, 1 + 3 * CACHE_BYTES // nbytes))


def time_jobs(jobs: Sequence[Job], threads: int = 1) -> list[Timing]:
    """Times every job: on the device if its profiler works, otherwise by the wall clock, which the result says.

    ``threads`` compile at once. XLA chooses GEMM kernels by timing them, so not where there are any.
    """
    with ThreadPoolExecutor(threads) as pool:
        programs = list(pool.map(lambda job: jax.jit(job.f).lower(*job.inputs[0]).compile(), jobs))
    timings: list[Timing | None] = [None] * len(jobs)
    if jax.default_backend() == "gpu":
        try:
            timings = _device_timings(programs, jobs)
        except NoDeviceTimeError as error:
            print(f"no device time: {error}")
        if missing := timings.count(None):
            print(f"wall clock instead for {missing} of {len(jobs)} functions")
    return [t or _wall_timing(p, job.inputs) for t, p, job in zip(timings, programs, jobs, strict=True)]


def _device_timings(programs: Sequence[Callable], jobs: Sequence[Job]) -> list[Timing | None]:
    each = WARM_UP + CALLS
    calls = [
        (lambda program=program, args=args: program(*args))
        for program, job in zip(programs, jobs, strict=True)
        for args in itertools.islice(itertools.cycle(job.inputs), each)
    ]
    found = profile_calls(calls)
    timings: list[Timing | None] = []
    for i in range(len(jobs)):
        timed = [call for call in found[i * each + WARM_UP : (i + 1) * each] if call is not None]
        if len(timed) < CALLS:
            timings.append(None)
            continue
        span = statistics.median(call.span_us for call in timed)
        kernels = round(statistics.median(call.kernels for call in timed))
        timings.append(Timing(*summary([call.busy_us for call in timed]), "cupti", span, kernels))
    return timings


def _wall_timing(program: Callable, inputs: Sequence[tuple]) -> Timing:
    """One call a sample on a CPU; on an accelerator several in flight, so that dispatch overlaps with work."""
    in_flight, budget_s = (1, 1.0) if jax.default_backend() == "cpu" else (20, 0.2)
    rotated = itertools.cycle(inputs)
    for _ in range(2):
        jax.block_until_ready(program(*next(rotated)))
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < CALLS and (len(times) < 5 or time.perf_counter() - start < budget_s):
        begin = time.perf_counter()
        jax.block_until_ready([program(*next(rotated)) for _ in range(in_flight)])
        times.append((time.perf_counter() - begin) / in_flight * 1e6)
    return Timing(*summary(times))


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
        "cpus": cpus(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
