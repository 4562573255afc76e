"""Which modules loaders leave unquantized, from a list of entries that each of them reads in its own way.

A list that means something else to one of them loads without a word and gives wrong numbers. So names are written out,
and every reading is simulated before anything is written.
"""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.convert.layouts import LayoutName
from jnvfp4.convert.names import FUSED, FUSED_NAMES, layer_of

Reading = Callable[[str, str], bool]  # of an entry, for a module


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
    return re.match(entry[3:], module) is not None if entry.startswith("re:") else module == entry


# For each layout the loaders by name: how they read an entry, and whether they ask for fused modules.
READINGS: Mapping[LayoutName, Mapping[str, tuple[Reading, bool]]] = {
    "modelopt": {"miles": (_prefix, False), "vLLM": (_substring, True), "SGLang": (_full, True)},
    "compressed-tensors": {"compressed-tensors": (_expression, False)},
    "te": {"jnvfp4": (_prefix, False)},
}
_EXPERTS = re.compile(r"^(.*\.experts)\.(?:\d+\..*|[^.]*)$")


def fused(module: str) -> str:
    """The module that a loader makes of it: q, k and v are one, gate and up are one, experts are one."""
    if found := _EXPERTS.match(module):
        return found[1]
    parent, _, role = module.rpartition(".")
    name = next((FUSED_NAMES[f] for f in FUSED if role in f and f in FUSED_NAMES), role)
    return f"{parent}.{name}" if parent else name


def ignore_list(kept: Iterable[str], quantized: Iterable[str], layout: LayoutName) -> list[str]:
    """Entries for the kept modules: their names, those of fused modules that are kept whole, and of whole layers.

    `lm_head` is there unless it is quantized: a loader rejects an empty list, and a tied head has no tensor.
    """
    kept, quantized = set(kept), set(quantized)
    kept = sorted(kept | {"lm_head"} - quantized) or ["lm_head"]
    if layout == "compressed-tensors":
        return kept
    fused_quantized = {fused(m) for m in quantized}
    entries = set()
    for module in kept:
        whole = fused(module)
        if whole not in fused_quantized:
            entries.add(whole)
        if whole in fused_quantized or not _EXPERTS.match(module):
            entries.add(module)
    layers: dict[str, bool] = defaultdict(lambda: True)
    for module in [*kept, *quantized]:
        if layer_of(module + ".") is not None:
            prefix = re.match(r"^(.*?layers\.\d+)\.", module + ".")
            assert prefix is not None
            layers[prefix[1]] &= module not in quantized
    entries |= {f"{prefix}.*" for prefix, all_kept in layers.items() if all_kept and layout == "modelopt"}
    return sorted(entries)


def check(entries: Iterable[str], kept: Iterable[str], quantized: Iterable[str], layout: LayoutName) -> None:
    """Raises where a loader of the layout would take a kept module for a quantized one, or the other way round."""
    entries = list(entries)
    for loader, (reads, asks_fused) in READINGS[layout].items():
        for modules, wanted in ((kept, True), (quantized, False)):
            for module in modules:
                asked = fused(module) if asks_fused else module
                entry = next((e for e in entries if reads(e, asked)), None)
                if (entry is not None) == wanted:
                    continue
                raise CheckpointError(
                    f"module {module!r} is {'kept' if wanted else 'quantized'}, but {loader} "
                    + ("would quantize it" if wanted else f"would keep it because of {entry!r}"),
                    "one meaning for every loader",
                    code=Exit.CONFLICT,
                    hint="keep or quantize both, or choose another --format",
                )
