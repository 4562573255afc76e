"""Makes the ignore list, which names the unquantized modules to loaders, and checks how each loader reads it.

Loaders read the entries differently: as prefixes, substrings, patterns or expressions. A list that one of them reads in
another way loads without an error and gives wrong numbers. So the entries are full names, and all readings are
simulated before anything is written.
"""

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache

from ..._core.patterns import layer_of
from .._files.errors import CheckpointError, Exit
from .._files.safetensors import Planned
from .layouts import LayoutName
from .names import FUSED, FUSED_NAMES, WEIGHT, is_embedding, is_stack, module_of, split_expert, split_role

Reading = Callable[[str, str], bool]  # whether an entry of the list keeps a module


def _prefix(entry: str, module: str) -> bool:
    return module == entry or module.startswith(entry if entry.endswith(".") else f"{entry}.")


def _substring(entry: str, module: str) -> bool:
    return entry in module or fnmatch.fnmatchcase(module, entry)


@cache
def _wildcards(entry: str) -> re.Pattern[str]:
    return re.compile(re.escape(entry).replace(r"\*", ".*"))


def _full(entry: str, module: str) -> bool:
    return _wildcards(entry).fullmatch(module) is not None


def _expression(entry: str, module: str) -> bool:
    if not entry.startswith("re:"):
        return module == entry
    try:
        return re.match(entry[3:], module) is not None
    except re.error:  # the name of a module that begins like an expression
        return False


# For each layout its loaders by name: how the loader reads an entry, and whether it looks up fused modules.
READINGS: Mapping[LayoutName, Mapping[str, tuple[Reading, bool]]] = {
    "modelopt": {"miles": (_prefix, False), "vLLM": (_substring, True), "SGLang": (_full, True)},
    "compressed-tensors": {"compressed-tensors": (_expression, False)},
    "te": {"jnvfp4": (_prefix, False)},
}


def fused_module(module: str) -> str:
    """Names the module that a loader fuses this one into: q, k and v; gate and up; or all experts."""
    parent, role = split_role(module)
    return _experts_of(module) or parent + next((FUSED_NAMES[f] for f in FUSED if role in f and f in FUSED_NAMES), role)


def _experts_of(module: str) -> str | None:
    """Names the module of all experts that a module, or a stack, is part of."""
    expert, parent = split_expert(module), split_role(module)[0]
    return expert[0] if expert else parent[:-1] if parent.endswith(".experts.") else None


def ignore_list(kept: Iterable[str], quantized: Iterable[str], layout: LayoutName) -> list[str]:
    """Lists the kept modules, the fused modules of which every part is kept, and the layers that are kept completely.

    ``lm_head`` is in the list unless it is quantized: a loader rejects an empty list, and a tied head has no tensor.
    """
    kept, quantized = set(kept), set(quantized)
    kept = sorted(kept | {"lm_head"} - quantized) or ["lm_head"]
    if layout == "compressed-tensors":
        return kept
    fused_quantized = {fused_module(m) for m in quantized}
    entries = set()
    for module in kept:
        fused = fused_module(module)
        if fused not in fused_quantized:
            entries.add(fused)
        if fused in fused_quantized or _experts_of(module) is None:
            entries.add(module)
    if layout == "modelopt":
        entries |= {f"{layer}.*" for layer in _layers(kept) - _layers(quantized)}
    return sorted(entries)


def _layers(modules: Iterable[str]) -> set[str]:
    """Names the decoder layers of modules, such as ``model.layers.3``."""
    found = (re.match(r"^(.*?layers\.\d+)\.", m + ".") for m in modules if layer_of(m + ".") is not None)
    return {match[1] for match in found if match}


def checked_ignore_list(kept: Collection[str], quantized: Collection[str], layout: LayoutName) -> list[str]:
    """Makes the ignore list, and raises if a loader would keep a module that is quantized, or quantize a kept one."""
    entries = ignore_list(kept, quantized, layout)
    for loader, (reads, asks_fused) in READINGS[layout].items():
        for modules, wanted in ((kept, True), (quantized, False)):
            for module in modules:
                asked = fused_module(module) if asks_fused else module
                entry = next((e for e in entries if reads(e, asked)), None)
                if (entry is not None) == wanted:
                    continue
                does = "would quantize it" if wanted else f"would keep it because of {entry!r}"
                observed = f"module {module!r} is {'kept' if wanted else 'quantized'}, but {loader} {does}"
                hint = "keep or quantize both, or choose another --format"
                raise CheckpointError(observed, "the same reading by every loader", code=Exit.CONFLICT, hint=hint)
    return entries


def linear_modules(entries: Iterable[Planned]) -> list[str]:
    """Names the modules of the weights that a linear layer may have, which loaders look up in the ignore list."""
    weights = (e.name for e in entries if (e.name.endswith(WEIGHT) and len(e.shape) == 2) or is_expert_stack(e))
    return [m for m in map(module_of, weights) if not is_embedding(m)]


def is_expert_stack(entry: Planned) -> bool:
    """Tells whether a tensor is a stack: one projection of all experts."""
    return len(entry.shape) == 3 and is_stack(entry.name)
