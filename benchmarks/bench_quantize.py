"""The quantize suite: each operation against a copy in the same run, and against naive jnp code for the same."""

import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jnvfp4
from tests.cases import CASES, DTYPES, Case

from . import naive, peers
from .ops import BY_NAME, COMMON, FOUR_OVER_SIX, PLAIN, Input, Op
from .targets import ADVERSARIAL, EMPTY, FIT_CACHE, judge
from .timing import Job, Timing, cpus, rotations, time_jobs

COPIES = ("copy by memcpy", "copy by kernel")
SHAPES = ("4096x4096", "8192x2048", "256x8192", "4096x14336", "8192x8192", "2048x5120", "16383x6144", "4099x4096")

# What is timed by default: cases and their operations; none listed means all.
GPU_CASES: dict[str, tuple[str, ...]] = {
    "large": (),
    "large_fp32": PLAIN,
    "large_fp16": PLAIN,
    **dict.fromkeys(SHAPES, COMMON),
    "16384x16384": ("transpose nvfp4_2d",),
    **dict.fromkeys(FIT_CACHE, PLAIN),
    **dict.fromkeys(ADVERSARIAL, FOUR_OVER_SIX),
    "decode": (*PLAIN, "row_scaled amax found", "window64"),
}
CPU_CASES: dict[str, tuple[str, ...]] = {"cpu": ()}


@dataclass(frozen=True)
class Timed:
    """A job and what its row says beside the time."""

    case: Case
    name: str
    job: Job
    bytes_moved: float
    naive: str | None = None  # the row of naive code for the same


def case_named(name: str) -> Case:
    """A case of tests/cases.py, or normal bfloat16 data of a shape such as "4096x14336"."""
    by_name = {case.name: case for case in CASES if len(case.shape) == 2}
    if name in by_name:
        return by_name[name]
    if match := re.fullmatch(r"(\d+)x(\d+)", name):
        return Case(name, (int(match[1]), int(match[2])))
    raise ValueError(f"quantize: a case must be MxK or one of {sorted(by_name)}, got {name!r}")


def inputs_of(case: Case) -> list[Input]:
    """Different tensors with the case's distribution. Rows repeat after 4 M elements, since numpy is slow."""
    m, k = case.shape
    rows = min(m, max(16, (4 << 20) // k // 16 * 16))
    part = jnp.asarray(replace(case, shape=(rows, k)).make())
    x = jnp.tile(part, (-(-m // rows), 1))[:m]
    return [Input(jax.block_until_ready(jnp.roll(x, 16 * i, axis=0))) for i in range(rotations(x.nbytes))]


def _floors(case: Case, inputs: list[Input]) -> list[Timed]:
    xs = [(of.x,) for of in inputs]
    moved = 2 * inputs[0].x.nbytes
    # XLA makes the first a memory copy and the second a kernel; the faster one is the roof.
    copies = [Timed(case, name, Job(f, xs), moved) for name, f in zip(COPIES, (jnp.copy, jnp.negative), strict=True)]
    one = jnp.zeros(1)
    return [*copies, Timed(case, EMPTY, Job(lambda v: v + 1, [(one,)]), 2 * one.nbytes)]


def _operations(case: Case, inputs: list[Input], ops: list[Op], baselines: bool) -> list[Timed]:
    x, timed = inputs[0].x, []
    seen: dict[Op, str] = {}
    for op in ops:
        moved = op.bytes_per_element(x.dtype.itemsize) * x.size
        arguments = [op.arguments(of) for of in inputs]
        baseline = op.baseline()
        if baselines and baseline not in seen:
            seen[baseline] = f"naive {op.name}"
            timed.append(Timed(case, seen[baseline], Job(baseline.call(naive), arguments), moved))
        timed.append(Timed(case, op.name, Job(op.call(jnvfp4), arguments), moved, seen.get(baseline)))
    jax.block_until_ready([t.job.inputs for t in timed])
    return timed


def _peers(case: Case, inputs: list[Input]) -> tuple[list[Timed], list[tuple[Timed, Timing]]]:
    """Those to time like everything else, and those in torch with their times."""
    x = inputs[0].x
    found = peers.importable(x)

    def timed(peer: peers.Peer, f: Any) -> Timed:
        return Timed(case, peer.name, Job(f, [(of.x,) for of in inputs]), peer.bytes_per_element * x.size)

    in_jax = [timed(peer, f) for peer, f in found if peer.framework == "jax"]
    in_torch = [(timed(peer, None), timing) for peer, timing in peers.time_torch(found, x.shape)]
    return in_jax, in_torch


def _rows(timings: list[tuple[Timed, Timing]]) -> list[dict[str, Any]]:
    times = {(t.case.name, t.name): timing.median_us for t, timing in timings}
    return [_row(t, timing, times) for t, timing in timings]


def _row(t: Timed, timing: Timing, times: dict[tuple[str, str], float]) -> dict[str, Any]:
    case = t.case
    copied = 2 * case.shape[0] * case.shape[1] * np.dtype(DTYPES[case.dtype]).itemsize
    rate = copied / min(times[case.name, name] for name in COPIES)  # bytes a microsecond
    row: dict[str, Any] = {
        "case": case.name,
        "shape": "x".join(map(str, case.shape)),
        "dtype": case.dtype,
        "op": t.name,
    }
    row |= timing.json()
    row["bytes"] = round(t.bytes_moved)
    row["GB/s"] = round(t.bytes_moved / timing.median_us / 1e3, 1)
    row["floor_us"] = round(t.bytes_moved / rate, 2)
    row["share of copy"] = round(t.bytes_moved / timing.median_us / rate, 3)
    if t.naive:
        row["times naive"] = round(times[case.name, t.naive] / timing.median_us, 2)
    return row


def run(
    cases: list[str] | None = None, ops: list[str] | None = None, baselines: bool = True, with_peers: bool = False
) -> list[dict[str, Any]]:
    """Times the cases (all that suit the device if None), of each the operations named (its own list if None).

    Args:
      cases: names of tests/cases.py, or MxK.
      ops: names of ``OPS``; what the shape does not fit is left out.
      baselines: also naive code for each operation.
      with_peers: also other libraries, on the first case.
    """
    platform = jax.default_backend()
    defaults = CPU_CASES if platform == "cpu" else GPU_CASES
    if unknown := set(ops or ()) - set(BY_NAME):
        raise ValueError(f"quantize: an op must be one of {sorted(BY_NAME)}, got {sorted(unknown)}")
    timed: list[Timed] = []
    foreign: list[tuple[Timed, Timing]] = []
    for i, case in enumerate(map(case_named, cases or defaults)):
        inputs = inputs_of(case)
        wanted = [BY_NAME[name] for name in ops or defaults.get(case.name) or BY_NAME]
        timed += _floors(case, inputs)
        if with_peers and i == 0:
            in_jax, foreign = _peers(case, inputs)
            timed += in_jax
        # Naive code takes the same time whatever the data.
        fitting = [op for op in wanted if op.fits(case.shape)]
        timed += _operations(case, inputs, fitting, baselines and case.name not in ADVERSARIAL)
    timings = time_jobs([t.job for t in timed], threads=min(8, cpus()))
    return judge(_rows([*zip(timed, timings, strict=True), *foreign]), platform)
