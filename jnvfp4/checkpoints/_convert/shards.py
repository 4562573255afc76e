"""Carries out a plan: finds the amax of every group, quantizes the weights and writes the shards."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TypeVar

import jax
import numpy as np

from ...spec import BLOCK
from .._files.errors import CheckpointError
from .._files.files import Rows, pieces
from .._files.safetensors import DTYPES, writing
from .._layouts.base import Parts
from .._layouts.names import Group
from .encode import Amax, Implementation, encode, encode_by_gptq, find_amax
from .mxfp4 import count_inexact, encode_powers, find_power_amax
from .plan import Item, Plan

OnProgress = Callable[[str, int], None]  # a tensor's name, and how many bytes of the source are done with it
Pieces = Iterator[tuple[str, int, np.ndarray]]  # a tensor's name, the index of the first element, elements
Task = TypeVar("Task")
Outcome = TypeVar("Outcome")


def in_order(work: Callable[[Task], Outcome], tasks: Iterable[Task], workers: int) -> Iterator[Outcome]:
    """Works on several tasks at once and gives the results in the order of the tasks.

    On an exception or Ctrl-C, tasks that have not started are cancelled (``Executor.map`` does it). Threads are enough:
    kernels, copies and writes release Python's lock.
    """
    if workers == 1:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="jnvfp4-convert") as executor:
        yield from executor.map(work, tasks)


# ---------------------------------------------------------------- amaxes
def find_amaxes(plan: Plan, workers: int) -> tuple[dict[str, np.ndarray], list[Group], dict[str, int]]:
    """Finds the amax of every group.

    Returns:
      the amax of each module, which its group shares: [], [N] of rows, or [E] of experts; the groups with NaN or
      infinity, which have no amax; and for each module in MXFP4 how many blocks of 16 will have other values.

    Raises:
      CheckpointError: a weight has NaN or infinity, and the options do not keep its group; or a group is in MXFP4 only
        in part.
    """
    modules = [m for group in plan.groups for m in group.members]
    own = dict(zip(modules, in_order(lambda m: _amax_of(plan, plan.weights[m]), modules, workers), strict=True))
    by_module: dict[str, np.ndarray] = {}
    not_finite = []
    for group in plan.groups:
        other = next(
            (m for m in group.members if (own[m].lowest is None) != (own[group.members[0]].lowest is None)), None
        )
        if other is not None:
            observed = f"is in MXFP4, or shares its global scale with {group.members[0]!r}, which is"
            raise CheckpointError(observed, "all of a group in MXFP4", tensor=plan.weights[other].name)
        wrong = next((m for m in group.members if own[m].not_finite), None)
        if wrong is not None:
            if plan.options.on_nonfinite == "error":
                observed = f"has {own[wrong].not_finite} values that are not finite, the first at {own[wrong].first}"
                name, hint = plan.weights[wrong].name, "--on-nonfinite skip keeps its group"
                raise CheckpointError(observed, "finite values", tensor=name, hint=hint)
            not_finite.append(group)
        elif plan.options.row_scaled:
            by_module |= {m: own[m].value for m in group.members}
        else:
            shared = np.asarray(np.max([own[m].value for m in group.members], axis=0))
            by_module |= dict.fromkeys(group.members, shared)
    return by_module, not_finite, {m: _inexact(own[m], by_module[m]) for m in by_module if own[m].lowest is not None}


def _inexact(own: Amax, shared: np.ndarray) -> int:
    assert own.lowest is not None
    experts = zip(own.lowest.reshape(shared.size, -1), shared.reshape(-1), strict=True)
    return sum(count_inexact(lowest, amax) for lowest, amax in experts)


def _amax_of(plan: Plan, item: Item) -> Amax:
    """Finds the amax of a weight [], of each row [N], or of each expert of a stack [E]."""
    x, entry = plan.source.rows(item.name), item.choice.entry

    def find(x: np.ndarray | Rows) -> Amax:
        return find_power_amax(x, item.name) if entry.mxfp4 else find_amax(x, plan.options.row_scaled)

    if not item.choice.stacked:
        return find(x)
    experts = [find(expert.T if entry.kn and entry.mxfp4 else expert) for expert in x]
    first = next(((e, *a.first) for e, a in enumerate(experts) if a.first is not None), None)
    lowest = [a.lowest for a in experts if a.lowest is not None]  # of MXFP4, of every expert
    values = np.array([a.value for a in experts], np.float32)
    return Amax(values, sum(a.not_finite for a in experts), first, np.stack(lowest) if lowest else None)


# ---------------------------------------------------------------- shards
@dataclass(frozen=True)
class ShardWriter:
    """Quantizes the tensors of a plan by the amaxes of their modules, and writes them, ``workers`` at once."""

    plan: Plan
    amaxes: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]
    device: jax.Device
    implementation: Implementation
    workers: int
    on_progress: OnProgress
    _gptq: Lock = field(default_factory=Lock)  # one weight at a time, since its hessian may be larger than the weight

    def write(self, path: Path, items: Iterable[Item]) -> dict[str, float]:
        """Writes one file, and gives the seconds that each tensor took, by name."""
        seconds = {}
        with writing(path, [p for item in items for p in item.outputs], self.metadata) as file:

            def write_item(item: Item) -> tuple[Item, float]:
                begun = time.monotonic()
                for name, first, data in self._pieces(item):
                    file.put(name, data, first)
                return item, time.monotonic() - begun

            for item, took in in_order(write_item, items, self.workers):
                seconds[item.name] = took
                self.on_progress(item.name, item.choice.entry.nbytes)
        return seconds

    def _pieces(self, item: Item) -> Pieces:
        plan, parts, options = self.plan, item.parts, self.plan.options
        x = plan.source.rows(item.name)
        if parts is None:
            (kept,) = item.outputs
            for first, data in pieces(x, options.chunk_bytes):
                yield kept.name, first, data
            return
        amax, shapes = self.amaxes[item.module], {p.name: p.shape for p in item.outputs}
        scale = plan.layout.from_amax(amax, options.spec.format.e4m3_max)
        yield parts.global_scale, 0, scale.reshape(shapes[parts.global_scale])
        if parts.activation is not None and parts.activation in shapes:
            value = plan.layout.from_decode(plan.input_scales[item.module])
            yield parts.activation, 0, np.full(shapes[parts.activation], value, np.float32)
        stacked, kn = item.choice.stacked, item.choice.entry.kn
        for e, expert in enumerate(x if stacked else [x]):
            yield from self._encoded(item, parts, expert.T if kn else expert, amax[e] if stacked else amax, e)

    def _encoded(self, item: Item, parts: Parts, x: np.ndarray | Rows, amax: np.ndarray, expert: int) -> Pieces:
        """Gives codes and block scales of a weight or of one expert; in one piece if its axes are swapped."""
        (n, k), options = item.choice.matrix, self.plan.options
        dtype = DTYPES[self.plan.layout.scales_tag]
        if item.choice.entry.mxfp4:
            encoded = encode_powers(x, amax, options.chunk_bytes)
        elif (by_gptq := self._by_gptq(item, x, amax, expert)) is not None:
            encoded = iter([by_gptq])
        else:
            encoded = encode(x, amax, options.spec, self.device, options.chunk_bytes, self.implementation)
        if item.choice.entry.kn:
            _, all_codes, all_scales = zip(*encoded, strict=True)
            encoded = iter([(0, np.concatenate(all_codes).T, np.ascontiguousarray(np.concatenate(all_scales).T))])
        for first, codes, scales in encoded:
            yield parts.codes, (expert * n + first) * (k // 2), codes
            yield parts.scales, (expert * n + first) * (k // BLOCK), scales.view(dtype)

    def _by_gptq(
        self, item: Item, x: np.ndarray | Rows, amax: np.ndarray, expert: int
    ) -> tuple[int, np.ndarray, np.ndarray] | None:
        """Quantizes a weight or an expert as a whole, if its inputs were seen."""
        hessians = self.plan.hessians
        if hessians is None or item.module not in hessians.names:
            return None
        with self._gptq:
            h = hessians.read(item.module, expert)
            return None if h is None else encode_by_gptq(x, amax, h, self.plan.options.spec, self.device)
