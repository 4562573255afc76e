"""Reads the ignore list, which names the unquantized modules, and the targets of configs as loaders do.

Loaders read the entries differently: as prefixes, substrings, patterns or expressions. A list that one of them reads in
another way loads without an error and gives wrong numbers. So the entries are full names, and all readings are
simulated before anything is written.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Literal, NamedTuple

from ..._core.patterns import layer_of
from ...spec import BLOCK
from .._files.safetensors import FLOATS, Planned
from .names import (
    FUSED_NAMES,
    WEIGHT,
    fused_rows,
    is_embedding,
    is_expert,
    is_other,
    is_stack,
    module_of,
    split_expert,
    split_role,
)

# The releases whose sources say how loaders read checkpoints.
VERSIONS = {
    "vllm": "0.33",
    "sglang": "0.5.23",
    "trtllm": "main at 00bbf71 with pull request 19091",
    "compressed-tensors": "0.20",
    "nvidia-modelopt": "0.47",
    "llmcompressor": "0.14",
}

LoaderName = Literal["vllm", "sglang", "trtllm"]
TITLES: Mapping[LoaderName, str] = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
}

# Which S_dec of the weights that a loader fuses all of them get; "equal" refuses different ones.
Merge = Literal["largest", "smallest", "first", "equal"]
Reading = Callable[[str, str], bool]  # whether an entry of the list keeps a module


def by_prefix(entry: str, module: str) -> bool:
    return module == entry or module.startswith(entry if entry.endswith(".") else f"{entry}.")


def by_substring(entry: str, module: str) -> bool:
    """Reads as vLLM; one expert in the list stands for all."""
    of_expert = module.endswith("experts") and module in entry
    return entry in module or of_expert or fnmatch.fnmatchcase(module, entry)


@cache
def _wildcards(entry: str) -> re.Pattern[str]:
    return re.compile(re.escape(entry).replace(r"\*", ".*"))


def by_parts(entry: str, module: str) -> bool:
    """Reads as SGLang: a path within the module's, or a pattern of all of it or of one part."""
    pattern = _wildcards(entry)
    return f".{entry.rstrip('.')}." in f".{module}." or any(map(pattern.fullmatch, (module, *module.split("."))))


def by_ancestors(entry: str, module: str) -> bool:
    """Reads as TensorRT-LLM: a pattern or an expression of the module, or of one that it is in."""
    parts = module.split(".")
    above = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    if entry.startswith("re:"):
        return any(by_expression(f"re:(?:{entry[3:]})$", m) for m in above)
    return any(fnmatch.fnmatchcase(m, pattern) for m in above for pattern in {entry, entry.removesuffix(".*")})


def by_expression(entry: str, module: str) -> bool:
    if not entry.startswith("re:"):
        return module == entry
    try:
        return re.match(entry[3:], module) is not None
    except re.error:  # the name of a module that begins like an expression
        return False


class Loader(NamedTuple):
    """Describes how a loader reads an entry, whether it looks up fused modules, and whether ``lint`` asks it.

    ``linear`` says which global scale the parts of a fused layer get, ``experts`` that of gate and up of an expert;
    ``equal_if_weight_only`` that both must be equal in W4A16. Of several kernels, it is the one that merges most.
    """

    reads: Reading
    asks_fused: bool = False
    lints: bool = True
    linear: Merge = "equal"
    experts: Merge = "equal"
    equal_if_weight_only: bool = False


def listed(reads: Reading, entries: Iterable[str], module: str) -> str | None:
    """Finds the first entry that keeps a module, or the one that it is fused into."""
    fused = fused_module(module)
    return next((e for e in entries if reads(e, module) or reads(e, fused)), None)


def fused_module(module: str) -> str:
    """Names the module that a loader fuses this one into: q, k and v; gate and up; or all experts."""
    named = (parent + FUSED_NAMES[row] for parent, row in fused_rows(module) if FUSED_NAMES.get(row))
    return experts_of(module) or next(named, module)


def experts_of(module: str) -> str | None:
    """Names the module of all experts that a module, or a stack, is part of."""
    expert, parent = split_expert(module), split_role(module)[0]
    return expert[0] if expert else parent[:-1] if parent.endswith(".experts.") else None


def fused_entries(kept: set[str], quantized: set[str]) -> set[str]:
    """Lists kept modules and the fused ones of which every part is kept, which stand for experts."""
    fused_quantized = {fused_module(m) for m in quantized}
    whole = {fused for m in kept if (fused := fused_module(m)) not in fused_quantized}
    return whole | {m for m in kept if fused_module(m) not in whole or experts_of(m) is None}


def layer_entries(kept: set[str], quantized: set[str]) -> set[str]:
    """Lists the layers that are kept completely."""
    return {f"{layer}.*" for layer in _layers(kept) - _layers(quantized)}


def _layers(modules: Iterable[str]) -> set[str]:
    """Names the decoder layers of modules, such as ``model.layers.3``."""
    found = (re.match(r"^(.*?layers\.\d+)\.", m + ".") for m in modules if layer_of(m + ".") is not None)
    return {match[1] for match in found if match}


def linear_modules(entries: Iterable[Planned]) -> list[str]:
    """Names the modules of the weights that a linear layer may have, which loaders look up in the ignore list."""
    weights = [e for e in entries if _is_matrix(e) or is_expert_stack(e) or is_other_stack(e)]
    modules = [m for e in weights if not is_embedding(m := module_of(e.name))]
    return [*modules, *sorted({_experts_beside(module_of(e.name)) for e in weights if is_other_stack(e)})]


def _is_matrix(entry: Planned) -> bool:
    return entry.name.endswith(WEIGHT) and len(entry.shape) == 2


def _experts_beside(module: str) -> str:
    """Names the module of all experts that loaders make of another stack: ``moe.up_proj`` is in ``moe.experts``."""
    before, experts, _ = f".{module}.".partition(".experts.")
    return f"{before[1:]}.experts" if experts else f"{split_role(module)[0]}experts"


def is_other_stack(entry: Planned) -> bool:
    """Tells whether a tensor seems to be a stack of experts of a form that no reader has in NVFP4.

    Such are ``input_linear.weight`` [E, N, K] of Granite, and ``experts.mlp.w1`` [E * N, K] of DBRX.
    """
    module, weight, rank = module_of(entry.name), entry.name.endswith(WEIGHT), len(entry.shape)
    named = is_expert(entry.name) and not any(word in split_role(module)[1] for word in ("bias", "scale"))
    shaped = (rank == 3 and (weight or named or _is_of_mlp(module))) or (rank == 2 and named and not weight)
    large = shaped and min(entry.shape[-2:]) >= BLOCK and entry.tag in FLOATS
    return large and not (is_expert_stack(entry) or is_other(module) or is_embedding(module))


def _is_of_mlp(module: str) -> bool:
    """Tells whether a parameter may be one of an MLP: ``mlp.gate_up_proj``, ``feed_forward.w13``, ``mlp1_weight``."""
    own = split_role(module)[1]
    words = ("bias", "scale", "norm", "conv", "pos", "table", "query", "token")
    return not any(word in own for word in words) and any(w in module for w in ("mlp", "moe", "ffn", "feed_forward"))


def is_expert_stack(entry: Planned) -> bool:
    """Tells whether a tensor is a stack: one projection of all experts."""
    return len(entry.shape) == 3 and is_stack(entry.name)
