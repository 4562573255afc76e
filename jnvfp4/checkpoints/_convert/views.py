"""Shows a source in the form that is converted: experts apart or in one tensor, FP8 blocks decoded.

Nothing is read or copied before a slice is used.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ...spec import BLOCK
from .._files.errors import CheckpointError
from .._files.files import Rows
from .._files.safetensors import DTYPES, JSON, Entry
from .._files.source import CONFIG, Source
from .._layouts.loaders import is_expert_stack
from .._layouts.names import WEIGHT
from .options import ConvertOptions, ExpertLayout

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_FUSED = "gate_up_proj"
_HALVES = (("gate_proj", "up_proj"), ("w1", "w3"))  # gate and up, in either convention of names
_STACK_NAMES = {"w2": "down_proj"}  # the name in a stack, where gate and up are gate_up_proj
_INTERLEAVED_MODELS = ("gpt_oss",)  # model types with gate and up in the even and the odd columns
_KN_MODELS = ("llama4", "llama4_text", "gpt_oss")  # model types with stacks [E, K, N]; those of others are [E, N, K]
FP8_SCALE = "_scale_inv"
FP8_BLOCK = 128


@dataclass(frozen=True)
class View:
    """Describes a tensor that is computed from tensors of a source.

    Attributes:
      entry: its name, dtype and shape; its bytes are in no file.
      parts: the names of the tensors that are read for it.
      array: computes it.
    """

    entry: Entry
    parts: tuple[str, ...]
    array: Callable[[], np.ndarray | Rows]


@dataclass(frozen=True, kw_only=True)
class ViewedSource(Source):
    """Shows another source with some of its tensors replaced by views.

    Attributes:
      origin: the other source.
      views: the views, by name.
    """

    origin: Source
    views: Mapping[str, View]

    def entry(self, name: str) -> Entry:
        """Describes a tensor."""
        return self.views[name].entry if name in self.views else self.origin.entry(name)

    def array(self, name: str) -> Any:
        """Gives a tensor as an array or as ``Rows``."""
        return self.views[name].array() if name in self.views else self.origin.array(name)

    def rows(self, name: str) -> np.ndarray | Rows:
        """Gives a tensor whose rows are read when they are used, or the array that a view computes."""
        return self.views[name].array() if name in self.views else self.origin.rows(name)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Reads or computes a tensor, or some rows of it."""
        return self.rows(name)[rows]

    def release(self, name: str) -> None:
        """Drops the pages of everything that is read for a tensor."""
        for part in self.views[name].parts if name in self.views else (name,):
            self.origin.release(part)


def converted_view(source: Source, options: ConvertOptions) -> Source:
    """Shows a source in the form that is converted."""
    if options.dequantize_input == "fp8-block":
        source = fp8_decoded(source)
    if options.experts == "per-expert":
        return per_expert(source, options.expert_layout)
    return stacked(source) if options.experts == "stacked" else source


def _with_views(
    source: Source, views: Mapping[str, View], *, config: JSON | None, warnings: tuple[str, ...] = ()
) -> Source:
    """Shows ``source`` with views in place of the tensors that they are made of; warnings are added to its own."""
    if not views:
        return source
    replaced = {part for view in views.values() for part in view.parts}
    places = {n: f for n, f in source.places.items() if n not in replaced}
    for name, view in views.items():
        if name in places:
            raise CheckpointError(
                f"is in the source, and would be made of {view.parts[0]!r}", "one of them", tensor=name
            )
        places[name] = source.places[view.parts[0]]
    return ViewedSource(
        source.directory,
        source.files,
        places,
        config,
        source.warnings + warnings,
        source.single_file,
        origin=source,
        views=views,
    )


def _entry(name: str, tag: str, shape: tuple[int, ...]) -> Entry:
    return Entry(name, tag, shape, 0, int(np.prod(shape, dtype=np.int64)) * DTYPES[tag].itemsize)


# ---------------------------------------------------------------- experts
def is_kn(entry: Entry, source: Source, expert_layout: ExpertLayout) -> bool:
    """Tells whether a stack of experts is [E, K, N]."""
    if isinstance(source, ViewedSource) and entry.name in source.views:
        return False
    if expert_layout != "auto":
        return expert_layout == "kn"
    model = next((m for c in source.configs if (m := c.get("model_type"))), None)
    if model is not None:
        return model in _KN_MODELS
    fits = [entry.shape[axis] % BLOCK == 0 for axis in (2, 1)]
    if all(fits):
        raise CheckpointError(
            f"may be [E, N, K] or [E, K, N], and {CONFIG} has no model_type",
            "a model_type",
            tensor=entry.name,
            hint="--expert-layout nk or kn",
        )
    return not fits[0]


def per_expert(source: Source, expert_layout: ExpertLayout) -> Source:
    """Shows every stack [E, N, K] or [E, K, N] as weights [N, K] of its experts, with gate and up apart."""
    model = (source.config or {}).get("model_type")
    views: dict[str, View] = {}
    warnings = []
    for entry in source.entries():
        if not is_expert_stack(entry):
            continue
        if f"{entry.name}_bias" in source.places:
            warnings.append(f"{entry.name}_bias stays one tensor for all experts")
        parent, _, role = entry.name.rpartition(".")
        kn = is_kn(entry, source, expert_layout)
        for expert in range(entry.shape[0]):
            for name, rows in _roles(role, entry.shape[1 + kn], model in _INTERLEAVED_MODELS):
                view = _expert_of(source, entry, expert, kn, rows, f"{parent}.{expert}.{name}{WEIGHT}")
                views[view.entry.name] = view
    return _with_views(source, views, config=source.config, warnings=tuple(warnings))


def _roles(role: str, n: int, interleaved: bool) -> list[tuple[str, slice]]:
    """Names the projections of one expert that a stack holds, each with its rows."""
    if role != _FUSED:
        return [(role, slice(None))]
    if interleaved:
        return [("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))]
    return [("gate_proj", slice(0, n // 2)), ("up_proj", slice(n // 2, None))]


def _expert_of(source: Source, entry: Entry, expert: int, kn: bool, rows: slice, name: str) -> View:
    def array() -> np.ndarray:
        (x,) = source.read(entry.name, slice(expert, expert + 1))
        return (x.T if kn else x)[rows]

    n, k = entry.shape[2 if kn else 1], entry.shape[1 if kn else 2]
    return View(_entry(name, entry.tag, (len(range(n)[rows]), k)), (entry.name,), array)


def stacked(source: Source) -> Source:
    """Shows each projection of all experts as one tensor [E, N, K]; gate and up are one, with gate first."""
    experts: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in source.places:
        if match := _EXPERT.fullmatch(name):
            experts[match[1]][match[3]][int(match[2])] = name
    views: dict[str, View] = {}
    for parent, roles in experts.items():
        halves = next((h for h in _HALVES if set(h) <= set(roles)), ())
        others = [(_STACK_NAMES.get(r, r), (r,)) for r in sorted(set(roles) - set(halves))]
        for role, parts in [(_FUSED, halves), *others] if halves else others:
            view = _stack_of(source, f"{parent}.{role}", [roles[p] for p in parts])
            views[view.entry.name] = view
    return _with_views(source, views, config=source.config)


def _stack_of(source: Source, name: str, parts: list[dict[int, str]]) -> View:
    count = len(parts[0])
    for part in parts:
        if sorted(part) != list(range(count)):
            raise CheckpointError(f"experts are {sorted(part)}", f"0 to {count - 1}", tensor=name)
    experts = [[source.entry(part[e]) for part in parts] for e in range(count)]
    first = experts[0]
    for entries in experts:
        for a, b in zip(entries, first, strict=True):
            if (a.tag, a.shape) != (b.tag, b.shape):
                raise CheckpointError(
                    f"is {a.tag} {list(a.shape)}", f"{b.tag} {list(b.shape)}, as expert 0", tensor=a.name
                )
    if len({(e.tag, e.shape[1:]) for e in first}) > 1:
        raise CheckpointError(f"has {[list(e.shape) for e in first]} for gate and up", "one K", tensor=name)
    shape = (count, sum(e.shape[0] for e in first), *first[0].shape[1:])

    def compute(rows: slice) -> np.ndarray:
        return np.stack([np.concatenate([source.read(e.name) for e in experts[i]]) for i in range(count)[rows]])

    names = tuple(e.name for entries in experts for e in entries)
    return View(_entry(name, first[0].tag, shape), names, lambda: Rows(shape, first[0].dtype, compute))


# ---------------------------------------------------------------- FP8 blocks
def fp8_decoded(source: Source) -> Source:
    """Shows FP8 weights as bfloat16. They have a scale for every 128x128 block, as in DeepSeek-V3."""
    views: dict[str, View] = {}
    for entry in source.entries():
        scale = f"{entry.name}{FP8_SCALE}"
        if entry.tag == "F8_E4M3" and scale in source.places:
            views[entry.name] = _decoded(source, entry, source.entry(scale))
    config = None if source.config is None else {k: v for k, v in source.config.items() if k != "quantization_config"}
    return _with_views(source, views, config=config)


def _decoded(source: Source, entry: Entry, scale: Entry) -> View:
    blocks = tuple(-(-n // FP8_BLOCK) for n in entry.shape)
    if len(entry.shape) != 2 or scale.shape != blocks:
        raise CheckpointError(
            f"has shape {list(scale.shape)}", f"{list(blocks)}, one for {FP8_BLOCK}x{FP8_BLOCK}", tensor=scale.name
        )

    def compute(rows: slice) -> np.ndarray:
        block_rows = np.arange(entry.shape[0])[rows] // FP8_BLOCK
        factors = source.read(scale.name).astype(np.float32)[block_rows]
        factors = np.repeat(factors, FP8_BLOCK, axis=1)[:, : entry.shape[1]]
        return (source.read(entry.name, rows).astype(np.float32) * factors).astype(ml_dtypes.bfloat16)

    decoded = _entry(entry.name, "BF16", entry.shape)
    return View(decoded, (entry.name, scale.name), lambda: Rows(entry.shape, DTYPES["BF16"], compute))
