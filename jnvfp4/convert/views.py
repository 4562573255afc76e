"""A source seen otherwise: experts one by one or in one tensor, FP8 blocks decoded. Nothing is read or copied before a
slice is asked for.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jnvfp4.convert.errors import CheckpointError
from jnvfp4.convert.names import WEIGHT, is_stack
from jnvfp4.convert.safetensors import DTYPES, Entry
from jnvfp4.convert.source import Source

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_FUSED = "gate_up_proj"
# What makes gate and up, by the names of either convention.
_HALVES = (("gate_proj", "up_proj"), ("w1", "w3"))
_OF_STACKS = {"w2": "down_proj"}  # beside gate_up_proj
_INTERLEAVED_MODELS = ("gpt_oss",)  # gate and up are the even and the odd columns
FP8_SCALE = "_scale_inv"
FP8_BLOCK = 128


@dataclass(frozen=True)
class Rows:
    """A tensor that is made a slice of its first axis at a time."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[slice], np.ndarray]

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.make(rows)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.make(slice(i, i + 1))[0] for i in range(self.shape[0]))

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class View:
    """A tensor that is made of others.

    Attributes:
      entry: how it looks; its bytes are nowhere.
      parts: tensors of the source that are read for it.
      array: gives it.
    """

    entry: Entry
    parts: tuple[str, ...]
    array: Callable[[], np.ndarray | Rows]


class ViewedSource(Source):
    """A source in which some tensors are replaced by views of them."""

    def __init__(self, source: Source, views: Mapping[str, View], gone: set[str]):
        places = {n: f for n, f in source.places.items() if n not in gone}
        for name, view in views.items():
            if name in places:
                raise CheckpointError(f"is there, and would be made of {view.parts[0]!r}", "one of them", tensor=name)
            places[name] = source.places[view.parts[0]]
        super().__init__(source.directory, source.files, places, source.config, source.warnings, source.single_file)
        self._source, self._views = source, views

    def entry(self, name: str) -> Entry:
        return self._views[name].entry if name in self._views else self._source.entry(name)

    def array(self, name: str) -> Any:  # an array, or Rows
        return self._views[name].array() if name in self._views else self._source.array(name)

    def is_view(self, name: str) -> bool:
        return name in self._views

    def release(self, name: str) -> None:
        for part in self._views[name].parts if name in self._views else (name,):
            self._source.release(part)


def _entry(name: str, tag: str, shape: tuple[int, ...]) -> Entry:
    return Entry(name, tag, shape, 0, int(np.prod(shape, dtype=np.int64)) * DTYPES[tag].itemsize)


# ---------------------------------------------------------------- experts
def per_expert(source: Source, kn: Callable[[Entry], bool]) -> Source:
    """Every stack [E, N, K] as weights [N, K] of its experts, gate and up apart.

    Args:
      source: what has stacks.
      kn: whether a stack is [E, K, N].
    """
    model = (source.config or {}).get("model_type")
    views: dict[str, View] = {}
    gone = set()
    for entry in source.entries():
        if not is_stack(entry.name) or len(entry.shape) != 3:
            continue
        gone.add(entry.name)
        if f"{entry.name}_bias" in source.places:
            source.warnings.append(f"{entry.name}_bias stays one tensor for all experts")
        parent, _, role = entry.name.rpartition(".")
        turned = kn(entry)
        for expert in range(entry.shape[0]):
            for name, rows in _roles(role, entry.shape[1 + turned], model in _INTERLEAVED_MODELS):
                v = _part_of(source, entry, expert, turned, rows, f"{parent}.{expert}.{name}{WEIGHT}")
                views[v.entry.name] = v
    return ViewedSource(source, views, gone) if views else source


def _roles(role: str, n: int, interleaved: bool) -> list[tuple[str, slice]]:
    """What a projection is for one expert, and its rows."""
    if role != _FUSED:
        return [(role, slice(None))]
    if interleaved:
        return [("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))]
    return [("gate_proj", slice(0, n // 2)), ("up_proj", slice(n // 2, None))]


def _part_of(source: Source, entry: Entry, expert: int, turned: bool, rows: slice, name: str) -> View:
    def array() -> np.ndarray:
        x = source.array(entry.name)[expert]
        return (x.T if turned else x)[rows]

    n, k = entry.shape[2 if turned else 1], entry.shape[1 if turned else 2]
    return View(_entry(name, entry.tag, (len(range(n)[rows]), k)), (entry.name,), array)


def stacked(source: Source) -> Source:
    """The weights of experts as one tensor [E, N, K] for each projection; gate and up are one, gate first."""
    found: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in source.places:
        if match := _EXPERT.fullmatch(name):
            found[match[1]][match[3]][int(match[2])] = name
    views: dict[str, View] = {}
    gone = set()
    for parent, roles in found.items():
        halves = next((h for h in _HALVES if set(h) <= set(roles)), ())
        for role, parts in [
            (_FUSED, halves),
            *((_OF_STACKS.get(r, r), (r,)) for r in sorted(set(roles) - set(halves))),
        ]:
            if parts:
                view = _stack_of(source, f"{parent}.{role}", [roles[p] for p in parts])
                views[view.entry.name] = view
                gone |= set(view.parts)
    return ViewedSource(source, views, gone) if views else source


def _stack_of(source: Source, name: str, parts: list[dict[int, str]]) -> View:
    count = len(parts[0])
    for part in parts:
        if sorted(part) != list(range(count)):
            raise CheckpointError(f"experts are {sorted(part)}", f"0 to {count - 1}", tensor=name)
    entries = [[source.entry(part[e]) for part in parts] for e in range(count)]
    first = entries[0]
    for each in entries:
        for a, b in zip(each, first, strict=True):
            if (a.tag, a.shape) != (b.tag, b.shape):
                raise CheckpointError(
                    f"is {a.tag} {list(a.shape)}", f"{b.tag} {list(b.shape)}, as expert 0", tensor=a.name
                )
    if len({(e.tag, e.shape[1:]) for e in first}) > 1:
        raise CheckpointError(f"has {[list(e.shape) for e in first]} for gate and up", "one K", tensor=name)
    shape = (count, sum(e.shape[0] for e in first), *first[0].shape[1:])

    def make(experts: slice) -> np.ndarray:
        return np.stack([np.concatenate([source.array(e.name) for e in entries[i]]) for i in range(count)[experts]])

    parts_read = tuple(e.name for each in entries for e in each)
    return View(_entry(name, first[0].tag, shape), parts_read, lambda: Rows(shape, first[0].dtype, make))


# ---------------------------------------------------------------- FP8 blocks
def fp8_decoded(source: Source) -> Source:
    """Weights in FP8 with a scale for every 128x128 block (`M.weight_scale_inv`, as DeepSeek-V3 has) as bfloat16."""
    views: dict[str, View] = {}
    gone = set()
    for entry in source.entries():
        scale = f"{entry.name}{FP8_SCALE}"
        if entry.tag != "F8_E4M3" or scale not in source.places:
            continue
        gone |= {entry.name, scale}
        views[entry.name] = _decoded(source, entry, source.entry(scale))
    if views and source.config is not None:
        source.config = {k: v for k, v in source.config.items() if k != "quantization_config"}
    return ViewedSource(source, views, gone) if views else source


def _decoded(source: Source, entry: Entry, scale: Entry) -> View:
    blocks = tuple(-(-n // FP8_BLOCK) for n in entry.shape)
    if len(entry.shape) != 2 or scale.shape != blocks:
        raise CheckpointError(
            f"has shape {list(scale.shape)}", f"{list(blocks)}, one for {FP8_BLOCK}x{FP8_BLOCK}", tensor=scale.name
        )

    def make(rows: slice) -> np.ndarray:
        at = np.arange(entry.shape[0])[rows] // FP8_BLOCK
        factors = source.array(scale.name).astype(np.float32)[at]
        factors = np.repeat(factors, FP8_BLOCK, axis=1)[:, : entry.shape[1]]
        return (source.array(entry.name)[rows].astype(np.float32) * factors).astype(ml_dtypes.bfloat16)

    decoded = _entry(entry.name, "BF16", entry.shape)
    return View(decoded, (entry.name, scale.name), lambda: Rows(entry.shape, DTYPES["BF16"], make))
