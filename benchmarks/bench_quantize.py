"""Quantize, dequantize and fake_quant against a copy in the same run, and against the naive jnp quantizer."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jnvfp4
from jnvfp4 import NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_RHT_SR, NVFP4_SR, ROW_SCALED, WINDOW64, QuantSpec, four_over_six
from tests.cases import CASES, Case

from . import naive
from .timing import Job, Timing, cpus, rotations, time_jobs

Rows = list[dict[str, Any]]
COPY, EMPTY = "copy", "empty kernel"


@dataclass(frozen=True)
class Op:
    """Something to time, through ``jnvfp4`` or ``naive``.

    Attributes:
      specs: of x, and of its transpose.
      given: the amax; otherwise found, at the cost of another read for a tensor scope.
      what: of the operations of these specs.
      target: the share of the copy's rate to reach on 16384 x 6144.
    """

    name: str
    specs: tuple[QuantSpec | None, QuantSpec | None]
    given: bool = True
    what: Literal["quantize", "fake_quant", "dequantize"] = "quantize"
    target: float | None = None

    def fits(self, case: Case) -> bool:
        units = [(s.block_rows, s.unit) for s in self.specs if s]
        row, col = self.specs
        shape = case.shape if row else case.shape[::-1]
        need = [max(r for r, _ in units), max(u for _, u in units)]
        if row and col:
            need = [max(row.block_rows, col.unit), max(row.unit, col.block_rows)]
        return all(n % unit == 0 for n, unit in zip(shape, need, strict=True))

    def arguments(self, x: jax.Array, amaxes: "Amaxes") -> tuple:
        if self.what == "dequantize":
            assert self.specs[0]
            return (jax.jit(jnvfp4.quantize, static_argnums=1)(x, self.specs[0]),)
        stochastic = any(s and s.rounding == "stochastic" for s in self.specs)
        # The key is an argument, so that XLA cannot compute the random bits while compiling.
        return x, amaxes.of(x, self), jax.random.key(0) if stochastic else None

    def call(self, api: Any) -> Callable:
        """The operation by ``api``, the module jnvfp4 or naive."""
        row, col = self.specs
        spec = row or col
        assert spec
        if self.what == "dequantize":
            return lambda t: api.dequantize(t, jnp.bfloat16, *([spec] if api is naive else []))
        if self.what == "fake_quant":
            return lambda x, amax, key: api.fake_quant(x, spec, amax=amax and amax[0], key=key)
        if row and col:
            return lambda x, amax, key: api.quantize_pair(x, row, col, amax=amax, key=key)
        side = 0 if row else 1
        return lambda x, amax, key: api.quantize(x, spec, amax=amax and amax[side], key=key, transpose=bool(side))

    def bytes_per_element(self, size: int) -> float:
        """Of the floor: every byte of x read once (twice to find a tensor's amax), 0.5625 an orientation."""
        windows = sum(4 / 64 for s in self.specs if s and s.format.amax_scope == "window64")
        if self.what == "dequantize":
            return 0.5625 + 2 + windows
        if self.what == "fake_quant":
            return 2 * size
        reads = 1 if self.given or all(s is None or s.finds_amax for s in self.specs) else 2
        return reads * size + 0.5625 * sum(s is not None for s in self.specs) + windows

    def baseline(self) -> "Op":
        """Naive code takes the same time for either error math, so it is timed once."""
        plain = tuple(s and replace(s, error_math="fp32") for s in self.specs)
        return replace(self, specs=plain, name="", target=None)  # type: ignore[arg-type]


class Amaxes:
    """The amax of an input by what it is the amax of, found once."""

    def __init__(self) -> None:
        self.found: dict[tuple, jax.Array] = {}

    def of(self, x: jax.Array, op: Op) -> tuple | None:
        """What the specs of ``op`` take: of the tensor, of rows, or nothing, since windows are always found."""
        if not op.given or any(s and s.format.amax_scope == "window64" for s in op.specs):
            return None
        return tuple(spec and self._one(x, spec, bool(side)) for side, spec in enumerate(op.specs))

    def _one(self, x: jax.Array, spec: QuantSpec, transpose: bool) -> jax.Array:
        scope, rht = spec.format.amax_scope, spec.format.rht
        key = (id(x), scope, rht, transpose and (rht or scope == "row"))
        if key not in self.found:
            find = jax.jit(lambda v: jnvfp4.quantize(v, replace(spec, rounding="nearest"), transpose=transpose).amax)
            self.found[key] = find(x)
        return self.found[key]


def _four_over_six() -> list[Op]:
    ops = [
        Op(f"4over6 {error}{' fast' * fast}", (four_over_six(error, fast=fast), None), target=0.67)
        for error in ("mae", "mse")
        for fast in (False, True)
    ]
    for error in ("mae", "mse"):
        one, tile = four_over_six(error), four_over_six(error, block_rows=16)
        ops.append(Op(f"4over6 {error} pair", (one, one), target=0.45))
        ops.append(Op(f"4over6_2d {error} pair", (tile, tile), target=0.70))
    return ops


def _fake_quant() -> list[Op]:
    specs = {"nvfp4": NVFP4, "nvfp4_2d": NVFP4_2D, "nvfp4_sr": NVFP4_SR, "nvfp4_rht": NVFP4_RHT}
    specs |= {"row_scaled": ROW_SCALED, "window64": WINDOW64}
    specs |= {op.name: op.specs[0] for op in _four_over_six() if op.specs[0] and not op.specs[1]}
    specs["4over6_2d mae"] = four_over_six(block_rows=16)
    return [Op(f"fake_quant {name}", (spec, None), what="fake_quant", target=0.88) for name, spec in specs.items()]


OPS = [
    Op("nvfp4", (NVFP4, None), target=0.97),
    Op("nvfp4 amax included", (NVFP4, None), given=False, target=0.88),
    Op("nvfp4 transposed", (None, NVFP4), target=0.88),
    Op("nvfp4 pair", (NVFP4, NVFP4), target=0.88),
    Op("nvfp4 pair amax included", (NVFP4, NVFP4), given=False),
    Op("nvfp4_2d", (NVFP4_2D, None)),
    Op("nvfp4_2d transposed", (None, NVFP4_2D)),
    Op("nvfp4_2d pair", (NVFP4_2D, NVFP4_2D), target=0.88),
    Op("row_scaled", (ROW_SCALED, None)),
    Op("row_scaled amax found", (ROW_SCALED, None), given=False, target=0.85),
    Op("row_scaled transposed amax found", (None, ROW_SCALED), given=False),
    Op("row_scaled pair", (ROW_SCALED, ROW_SCALED)),
    Op("window64", (WINDOW64, None), target=0.85),
    Op("window64 pair", (WINDOW64, WINDOW64), target=0.85),
    Op("nvfp4_sr", (NVFP4_SR, None), target=0.80),
    Op("nvfp4_sr pair", (NVFP4_SR, NVFP4_SR)),
    Op("nvfp4_rht transposed", (None, NVFP4_RHT), target=0.80),
    Op("nvfp4_rht transposed amax included", (None, NVFP4_RHT), given=False),
    Op("nvfp4_rht_sr transposed", (None, NVFP4_RHT_SR)),
    Op("pretrain x pair", (NVFP4, NVFP4_RHT), target=0.75),
    Op("pretrain dy pair", (NVFP4_SR, NVFP4_RHT_SR), target=0.55),
    *_four_over_six(),
    Op("dequantize to bf16", (NVFP4, None), what="dequantize", target=0.95),
    Op("dequantize row_scaled to bf16", (ROW_SCALED, None), what="dequantize"),
    Op("dequantize window64 to bf16", (WINDOW64, None), what="dequantize"),
    Op("dequantize rotated to bf16", (NVFP4_RHT, None), what="dequantize"),
    *_fake_quant(),
]

PLAIN = ("nvfp4", "nvfp4 amax included")
SHAPE_OPS = (*PLAIN, "nvfp4 transposed", "nvfp4 pair", "nvfp4_2d pair", "row_scaled amax found", "dequantize to bf16")
ADVERSARIAL_OPS = tuple(op.name for op in _four_over_six())
FIT_CACHE = ("4096x3584", "2048x4096")
SHAPES = ("4096x4096", "8192x2048", "256x8192", "4096x14336", "8192x8192", "2048x5120", "16383x6144", "4099x4096")

# What is timed by default: cases and their operations; none listed means all.
GPU_CASES: dict[str, tuple[str, ...]] = {
    "large": (),
    "large_fp32": PLAIN,
    "large_fp16": PLAIN,
    **dict.fromkeys(SHAPES, SHAPE_OPS),
    **dict.fromkeys(FIT_CACHE, PLAIN),
    **dict.fromkeys(("same46", "even46", "sparse"), ADVERSARIAL_OPS),
    "decode": (*PLAIN, "row_scaled amax found", "window64"),
}
CPU_CASES: dict[str, tuple[str, ...]] = {"cpu": ()}


def case_named(name: str) -> Case:
    """A case of tests/cases.py, or normal bfloat16 data of a shape such as "4096x14336"."""
    by_name = {case.name: case for case in CASES if len(case.shape) == 2}
    if name in by_name:
        return by_name[name]
    if match := re.fullmatch(r"(\d+)x(\d+)", name):
        return Case(name, (int(match[1]), int(match[2])))
    raise ValueError(f"quantize: a case must be MxK or one of {sorted(by_name)}, got {name!r}")


def inputs_of(case: Case) -> list[jax.Array]:
    """Different tensors with the case's distribution. Rows repeat after 4 M elements: numpy is slow."""
    m, k = case.shape
    rows = min(m, max(16, (4 << 20) // k // 16 * 16))
    part = jnp.asarray(replace(case, shape=(rows, k)).make())
    base = jnp.tile(part, (-(-m // rows), 1))[:m]
    return [jax.block_until_ready(jnp.roll(base, 16 * i, axis=0)) for i in range(rotations(base.nbytes))]


@dataclass(frozen=True)
class _Timed:
    """A job and what its row says beside the time."""

    case: Case
    name: str
    job: Job
    bytes_moved: float
    naive: str | None = None


def _jobs(case: Case, ops: list[Op], baselines: bool) -> list[_Timed]:
    xs, amaxes = inputs_of(case), Amaxes()
    size, elements = xs[0].dtype.itemsize, xs[0].size
    one = jnp.zeros(1)
    timed = [
        # XLA turns the first into a memory copy and the second into a kernel; the faster one is the floor.
        _Timed(case, f"{COPY} by memcpy", Job(jnp.copy, [(x,) for x in xs]), 2 * size * elements),
        _Timed(case, f"{COPY} by kernel", Job(jnp.negative, [(x,) for x in xs]), 2 * size * elements),
        _Timed(case, EMPTY, Job(lambda v: v + 1, [(one,)]), 2 * one.nbytes),
    ]
    seen: dict[Op, str] = {}
    for op in ops:
        inputs = [op.arguments(x, amaxes) for x in xs]
        moved = op.bytes_per_element(size) * elements
        baseline = op.baseline()
        if baselines and baseline not in seen:
            seen[baseline] = f"naive {op.name}"
            timed.append(_Timed(case, seen[baseline], Job(baseline.call(naive), inputs), moved))
        timed.append(_Timed(case, op.name, Job(op.call(jnvfp4), inputs), moved, seen.get(baseline)))
    jax.block_until_ready([t.job.inputs for t in timed])
    return timed


def _rows(timed: list[_Timed], timings: list[Timing]) -> Rows:
    """One for each job. Needs the copies and baselines of its case among them."""
    times = {(t.case.name, t.name): timing.median_us for t, timing in zip(timed, timings, strict=True)}
    rows: Rows = []
    for t, timing in zip(timed, timings, strict=True):
        copies = [times[t.case.name, f"{COPY} by {how}"] for how in ("memcpy", "kernel")]
        copied = next(o.bytes_moved for o in timed if o.case == t.case and o.name.startswith(COPY))
        copy_rate = copied / min(copies)  # bytes a microsecond
        row: dict[str, Any] = {
            "case": t.case.name,
            "shape": "x".join(map(str, t.case.shape)),
            "dtype": t.case.dtype,
            "op": t.name,
        }
        row |= timing.json()
        row["bytes"] = round(t.bytes_moved)
        row["GB/s"] = round(t.bytes_moved / timing.median_us / 1e3, 1)
        row["floor_us"] = round(t.bytes_moved / copy_rate, 2)
        row["share of copy"] = round(t.bytes_moved / timing.median_us / copy_rate, 3)
        if t.naive:
            row["times naive"] = round(times[t.case.name, t.naive] / timing.median_us, 2)
        rows.append(row)
    return rows


def judge(rows: Rows, platform: str) -> Rows:
    """The rows with targets beside the measured values, and whether all of a row's are met."""
    times = {(row["case"], row["op"]): row["median_us"] for row in rows}
    return [row | _verdict(row, _gpu_target(row, times) if platform == "gpu" else _cpu_target(row)) for row in rows]


def _verdict(row: dict[str, Any], target: dict[str, float]) -> dict[str, Any]:
    if "times naive" not in row and not target:
        return {}
    met = [row["share of copy"] >= target.get("target share", 0)]
    met.append(row["median_us"] <= target.get("target us", float("inf")))
    met.append(row.get("times naive", 1) >= target.get("target times naive", 1))
    return {**target, "met": all(met)}


def _gpu_target(row: dict[str, Any], times: dict[tuple[str, str], float]) -> dict[str, float]:
    case, op = row["case"], next((op for op in OPS if op.name == row["op"]), None)
    if op is None:
        return {}
    m, k = map(int, row["shape"].split("x"))
    if case == "decode":
        return {"target us": round(times[case, EMPTY] + 2, 2)}
    if case in ("same46", "even46", "sparse"):
        normal = times.get(("large", row["op"]))
        return {} if normal is None else {"target us": round(1.6 * normal, 2)}
    if case == "large":
        return {} if op.target is None else {"target share": op.target}
    if row["dtype"] != "bf16":
        return {"target share": 0.85} if op.name == "nvfp4" else {}
    if case in FIT_CACHE and not op.given:
        return {"target share": 0.75}
    return {"target share": min(0.70, op.target or 1)} if m * k > 8 << 20 else {}


def _cpu_target(row: dict[str, Any]) -> dict[str, float]:
    if row["case"] not in CPU_CASES:
        return {}
    if row["op"] == "nvfp4":
        return {"target times naive": 15}
    return {"target times naive": 10} if re.fullmatch("4over6 (mae|mse)( fast)?", row["op"]) else {}


def run(
    cases: list[str] | None = None, ops: list[str] | None = None, baselines: bool = True, peers: bool = False
) -> Rows:
    """Times the cases (all that suit the device if None), of each the operations named (its default list if None)."""
    platform = jax.default_backend()
    defaults = CPU_CASES if platform == "cpu" else GPU_CASES
    by_name = {op.name: op for op in OPS}
    if unknown := set(ops or ()) - set(by_name):
        raise ValueError(f"quantize: an op must be one of {sorted(by_name)}, got {sorted(unknown)}")
    timed: list[_Timed] = []
    for case in map(case_named, cases or defaults):
        wanted = ops or defaults.get(case.name) or list(by_name)
        timed += _jobs(case, [op for op in map(by_name.__getitem__, wanted) if op.fits(case)], baselines)
    timings = time_jobs([t.job for t in timed], threads=min(8, cpus()))
    return judge(_rows(timed, timings), platform)
