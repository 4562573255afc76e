"""Device time of single calls, from the profiler that comes with JAX (CUPTI on NVIDIA GPUs)."""

import bisect
import itertools
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

MARK = "jnvfp4 benchmark call "
PAUSE_S = 2e-4  # between calls: far longer than host and device clocks disagree


class NoDeviceTimeError(RuntimeError):
    """The profile holds nothing of the device."""


@dataclass(frozen=True)
class Call:
    """What the device did during one call. Copies and memsets count as kernels."""

    busy_us: float  # kernel time, overlap counted once
    span_us: float  # from the start of the first kernel to the end of the last
    kernels: int


class ClockLog:
    """The SM clock of the first GPU in MHz, every 20 ms while the context lasts, by nvidia-smi where there is one."""

    def __enter__(self) -> "ClockLog":
        self._samples: list[tuple[float, float]] = []
        query = ["nvidia-smi", "-i", "0", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-lms", "20"]
        self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True) if shutil.which(query[0]) else None
        if self._process:
            self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
            self._reader.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if not self._process:
            return
        with self._process:  # which closes its output
            self._process.kill()
            self._reader.join()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            if line.strip().isdigit():
                self._samples.append((time.time(), float(line)))

    def mean(self, begin: float, end: float) -> int | None:
        found = [mhz for at, mhz in list(self._samples) if begin <= at <= end]
        return round(statistics.fmean(found)) if found else None


def profile_calls(calls: Sequence[Callable[[], Any]]) -> list[Call | None]:
    """Makes the calls one after another, each waited for; None for a call of which the profile shows nothing."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 1  # only the annotations below, so that tracing costs little
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for i, call in enumerate(calls):
                time.sleep(PAUSE_S)
                with jax.profiler.TraceAnnotation(f"{MARK}{i}"):
                    jax.block_until_ready(call())
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise NoDeviceTimeError("the profiler wrote no xplane file")
        return split_calls(jax.profiler.ProfileData.from_file(str(files[0])), len(calls))


def device_events(call: Callable[[], Any]) -> list[tuple[float, float, str]]:
    """Makes a call and returns the kernels of the first device: start and end in nanoseconds, and name."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise NoDeviceTimeError("the profiler wrote no xplane file")
        return _kernels(jax.profiler.ProfileData.from_file(str(files[0])), "/device:GPU:0")


def split_calls(profile: Any, count: int) -> list[Call | None]:
    """The kernels of a profile, by the annotated call in which they ran."""
    marks, kernels = _marks(profile), _kernels(profile)
    if not kernels:
        raise NoDeviceTimeError("the profile has no GPU stream with an event on it")
    if [index for _, _, index in marks] != list(range(count)):
        raise NoDeviceTimeError(f"the profile shows {len(marks)} of {count} annotated calls")
    # A kernel belongs to the call whose annotation is nearest: halfway through the pause before it.
    borders = [(end + start) / 2 for (_, end, _), (start, _, _) in itertools.pairwise(marks)]
    groups: list[list[tuple[float, float, str]]] = [[] for _ in marks]
    for kernel in kernels:
        groups[bisect.bisect(borders, kernel[0])].append(kernel)
    return [_call(group) if group else None for group in groups]


def _marks(profile: Any) -> list[tuple[float, float, int]]:
    events = [
        e for plane in profile.planes if plane.name.startswith("/host") for line in plane.lines for e in line.events
    ]
    own = [e for e in events if e.name.startswith(MARK)]
    return sorted((e.start_ns, e.start_ns + e.duration_ns, int(e.name.removeprefix(MARK))) for e in own)


def _kernels(profile: Any, device: str = "/device:GPU") -> list[tuple[float, float, str]]:
    # Other lines of a device ("XLA Ops", "XLA Modules") repeat what the streams hold.
    streams = [
        line
        for plane in profile.planes
        if plane.name.startswith(device)
        for line in plane.lines
        if line.name.startswith("Stream")
    ]
    return sorted((e.start_ns, e.start_ns + e.duration_ns, e.name) for line in streams for e in line.events)


def _call(kernels: list[tuple[float, float, str]]) -> Call:
    busy, reached = 0.0, kernels[0][0]
    for start, end, _ in kernels:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return Call(busy / 1e3, (reached - kernels[0][0]) / 1e3, len(kernels))
