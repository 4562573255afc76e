"""Finds the weights that a loader reads otherwise than they are stored, from names, scales and configs alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from .._files.errors import CheckpointError, Exit
from .._files.source import CONFIG
from .forms import values_of
from .loaders import TITLES, Loader, LoaderName, Merge, Reading, experts_of, fused_module, listed
from .modelopt import ALGORITHMS, MIXED
from .names import FUSED, fused_rows, is_other, is_router, split_role
from .survey import Item, Survey


@dataclass(frozen=True)
class Loaded:
    """Describes a weight that is loaded otherwise than it is stored, or not at all.

    Attributes:
      reason: why, as a clause about it.
      global_scale: the global scale that the loader takes, as the layout stores it; None if nothing useful is loaded.
      in_rows: whether codes and block scales in another form are taken for those of the layout.
    """

    reason: str
    global_scale: np.ndarray | None = None
    in_rows: bool = False


def loaded_otherwise(s: Survey, name: LoaderName) -> dict[str, Loaded]:
    """Gives the modules that a loader reads otherwise than they are stored, sorted; also unquantized ones.

    Raises:
      CheckpointError: the loader does not read the layout.
    """
    loader = s.layout.loaders.get(TITLES[name])
    if loader is None:
        observed, expected = f"is in layout {s.layout.name}", f"a layout that {TITLES[name]} reads"
        raise CheckpointError(observed, expected, file=s.source.directory, code=Exit.USAGE)
    found = [*_merged(s, loader), *_in_other_forms(s, name, loader), *_by_configs(s, name, loader)]
    return dict(sorted(found, key=lambda item: item[0]))  # of several reasons the last


# ---------------------------------------------------------------- scales
def _merged(s: Survey, loader: Loader) -> Iterator[tuple[str, Loaded]]:
    for group in s.fused:
        items = [s.items[m] for m in group.members if s.items[m].decode is not None]
        decodes = [np.asarray(i.decode).reshape(-1) for i in items]
        if len(items) < 2 or len({d.size for d in decodes}) > 1 or (np.stack(decodes) == decodes[0]).all():
            continue
        how = loader.experts if experts_of(group.members[0]) else loader.linear
        how = "equal" if s.weight_only and loader.equal_if_weight_only else how
        chosen = _choice(how, np.stack(decodes))
        roles = ", ".join(split_role(m)[1] for m in group.members)
        for item, own in zip(items, decodes, strict=True):
            if chosen is None:
                yield item.module, Loaded(f"{roles} have different global scales, which is refused")
            elif (own != (merged := np.take_along_axis(np.stack(decodes), chosen[None], 0)[0])).any():
                ratio = (merged / own)[np.abs(np.log(merged / own)).argmax()]
                text = f"gets {_CHOSEN[how]} of {roles}, {ratio:.4g} times its own S_dec"
                yield item.module, Loaded(text, _global(items, chosen, item))


_CHOSEN: dict[Merge, str] = {"largest": "the largest", "smallest": "the smallest", "first": "the first"}


def _choice(how: Merge, decodes: np.ndarray) -> np.ndarray | None:
    """Chooses of S_dec [members, 1 or experts] the member whose number all members get; None if they must be equal."""
    if how == "equal":
        return None
    if how == "first":
        return np.zeros(decodes.shape[1], np.intp)
    return decodes.argmax(0) if how == "largest" else decodes.argmin(0)


def _global(items: list[Item], chosen: np.ndarray, item: Item) -> np.ndarray:
    assert item.global_scale is not None
    stored = np.stack([np.asarray(i.global_scale).reshape(-1) for i in items])
    return np.take_along_axis(stored, chosen[None], 0)[0].reshape(item.global_scale.shape)


# In layout modelopt; that of compressed-tensors has a scheme for blocks of 16 alone.
_OF_32: dict[LoaderName, str] = {
    "vllm": "whose scales are loaded, while kernels have blocks of 16",
    "sglang": "which Marlin refuses, while other kernels have blocks of 16",
    "trtllm": "which are refused but in W4A16",
}


def _in_other_forms(s: Survey, name: LoaderName, loader: Loader) -> Iterator[tuple[str, Loaded]]:
    for module, parts in s.unequal_globals.items():
        gate = loader.experts == "first" and module in s.stored.stacks  # the others take one number per fused weight
        what = "the first is used for all its rows" if gate else "which is refused"
        yield module, Loaded(f"has {parts.shape[1]} different global scales: {what}")
    for module, form in s.other_forms.items():
        if form == "blocks of 32":
            if name != "trtllm" or not (s.weight_only or s.stored.algorithm(module) == ALGORITHMS[1]):
                how = _OF_32[name] if s.layout.targets is None else "which are refused"
                yield module, Loaded(f"has blocks of 32, {how}")
        elif form == "tiles" and name != "sglang":  # which knows ComfyUI's marks
            fits = s.source.views[(scales := s.items[module].parts.scales)].source.entry(scales).shape
            same = s.items[module].scales is not None and fits == s.source.entry(scales).shape
            text = "block scales in tiles and swapped codes are taken for rows"
            yield module, Loaded(text, s.items[module].global_scale if same else None, same)


# ---------------------------------------------------------------- configs
def targets_of(section: object) -> list[str]:
    """Gives the targets of all groups of a config."""
    lists = (found for found in values_of(section, "targets") if isinstance(found, list))
    return [t for found in lists for t in found if isinstance(t, str)]


def is_targeted(reads: Reading, targets: list[str], module: str) -> bool:
    """Tells whether a config with these targets is about a module."""
    return not targets or "Linear" in targets or listed(reads, targets, module) is not None


def _by_configs(s: Survey, name: LoaderName, loader: Loader) -> Iterator[tuple[str, Loaded]]:
    sections = [c for c in (s.hf_quant, s.config)[:: 1 if name == "trtllm" else -1] if c]
    if not sections:
        yield from ((m, Loaded(f"no {CONFIG} or other config says that it is quantized")) for m in s.items)
        return
    section = next((c for c in sections if "ignore" in c or "exclude_modules" in c), sections[0])
    entries = [e for e in section.get("ignore", section.get("exclude_modules")) or () if isinstance(e, str)]
    targets = targets_of(section)
    mixed = MIXED in s.algorithms

    @cache
    def keeps(module: str) -> str | None:
        """Says why a module, or that of all experts, is left in high precision; None if it is not."""
        if entry := listed(loader.reads, entries, module):
            return f"is left in high precision because of {entry!r}"
        return (
            None if is_targeted(loader.reads, targets, module) else "is left in high precision, as no target names it"
        )

    def unnamed(module: str) -> str | None:
        known = not mixed or any(s.stored.algorithm(m) for m in (module, fused_module(module)))
        return None if known else "is left in high precision, as quantized_layers do not name it"

    asked = {m: (loader.asks_fused and experts_of(m)) or m for m in (*s.items, *s.unquantized)}
    for module in s.items:
        if reason := keeps(asked[module]) or unnamed(module):
            yield module, Loaded(reason)
    parts = {key for m in s.items for key in fused_rows(m) if key[1] in FUSED[:5]}
    for module in s.unquantized:
        if any(key in parts for key in fused_rows(module)):
            yield module, Loaded("is not quantized, but other parts of its layer are")
        elif not (is_router(module) or is_other(module) or mixed or keeps(asked[module])):
            yield module, Loaded("would be quantized, and has no scales")
