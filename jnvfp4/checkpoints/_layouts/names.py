"""Finds out from a tensor's name what it is, and which modules share one global scale.

Loaders keep one global scale for projections that they fuse, so those are quantized with one amax.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

WEIGHT = ".weight"
_STACK = re.compile(r"(?:^|\.)experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)$")
_EXPERT = re.compile(r"((?:.*\.)?experts)\.(\d+)((?:\..*)?)")
KV_BIAS = re.compile(r"(?:.*\.)?([kv])_proj\.\1_bias")  # what an affine KV cache of Model Optimizer adds
KV_SCALE = re.compile(r"((?:.*?\.)?)(?:[kv]_proj\.)?([kv])_scale")  # what it is in, and k or v

# Projections that loaders fuse, by the last part of the module's name.
FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
FUSED_NAMES = {FUSED[0]: "qkv_proj", FUSED[1]: "gate_up_proj"}
# A model that has only one of these is incomplete, while k and v may be missing where layers share them.
INSEPARABLE = (FUSED[1], FUSED[2])
# Parts of a module's name that a projection of the language model does not have.
_HEADS = ("lm_head", "embed_out", "output_layer", "score", "classifier", "head")
_TABLES = ("wte", "wpe", "word_embeddings", "shared")
_OTHER = ("norm", "rotary", "vision", "visual", "image", "audio", "conv", "lora", "adapter", "patch_embed", "projector")


def module_of(name: str) -> str:
    """Gives the module of a weight: its name without ``.weight``. The name of a stack of experts is unchanged."""
    return name.removesuffix(WEIGHT)


def split_role(module: str) -> tuple[str, str]:
    """Splits a module's name after its last dot. Without a dot, the module is in "", and not in a module "."."""
    parent, dot, role = module.rpartition(".")
    return parent + dot, role


def is_stack(name: str) -> bool:
    """Tells whether a tensor with three axes and this name is a stack: one projection of all experts."""
    return _STACK.search(name) is not None


def is_expert(name: str) -> bool:
    """Tells whether a tensor belongs to an expert, shared or not."""
    return "experts" in name.split(".") or ".shared_experts." in name or ".shared_expert." in name


def split_expert(module: str) -> tuple[str, str, str] | None:
    """Splits the name of an expert's module at its number: ("mlp.experts", "3", ".w1"); None if it is no expert's."""
    match = _EXPERT.fullmatch(module)
    return (match[1], match[2], match[3]) if match else None


def sibling_experts(module: str) -> str | None:
    """Gives the name that a module has in common with the same projection of its sibling experts; None if no expert."""
    parts = split_expert(module)
    return f"{parts[0]}.*{parts[2]}" if parts else None


def is_router(module: str) -> bool:
    """Tells whether a module chooses experts, such as ``mlp.gate``, ``router.layer`` or ``shared_expert_gate``."""
    parts = module.split(".")
    gates = (p == "gate" and "att" not in before for before, p in zip(["", *parts], parts, strict=False))
    return any(gates) or any("router" in p or p.endswith("expert_gate") for p in parts)


def is_head(module: str) -> bool:
    """Tells whether a module computes logits."""
    parts = module.split(".")
    return parts[-1] in _HEADS or parts == ["output"] or "shared_head" in parts


def is_embedding(module: str) -> bool:
    """Tells whether a module is a table of embeddings."""
    role = module.rpartition(".")[2]
    return role in _TABLES or role.startswith(("embed", "tok_embed"))


def is_other(module: str) -> bool:
    """Tells whether a module is no projection of the language model: a norm, a vision tower, an adapter."""
    parts = module.split(".")
    return "vit" in parts or any(o in part for part in parts for o in _OTHER)


def is_kv_scale(name: str) -> bool:
    """Tells whether a tensor is a scale of the KV cache, which is a decode scale in every layout, or a bias of it."""
    return KV_SCALE.fullmatch(name) is not None or KV_BIAS.fullmatch(name) is not None


@dataclass(frozen=True)
class Group:
    """Names the modules that share one global scale.

    Attributes:
      members: the full names of the modules.
      missing: the roles beside the members that loaders fuse with them and that the model lacks.
    """

    members: tuple[str, ...]
    missing: tuple[str, ...] = ()


def groups_of(modules: Iterable[str], share: Iterable[str] = ()) -> list[Group]:
    """Puts modules that share a global scale into groups, in the order of their names; most groups have one member.

    Args:
      modules: names without ``.weight``.
      share: regular expressions of modules that share too. Modules share if they match the same expression and its
        first group, the parent, has the same text.
    """
    patterns = [re.compile(p.removeprefix("re:")) for p in share]
    group: dict[str, list[str]] = {}  # by module; all members of a group have the same list object
    first: dict[tuple[str, object], str] = {}  # the first module with each key; modules with a common key share
    for module in sorted(modules):
        group[module] = [module]
        for key in _keys(module, patterns):
            other = group[first.setdefault(key, module)]
            if other is not group[module]:
                other += group[module]
                group |= dict.fromkeys(group[module], other)
    return [_group(members) for members in {id(g): g for g in group.values()}.values()]


def _keys(module: str, patterns: Iterable[re.Pattern[str]]) -> Iterator[tuple[str, object]]:
    parent, role = split_role(module)
    fused = next((f for f in FUSED if role in f), None)
    if fused:
        yield parent, fused
    for i, pattern in enumerate(patterns):
        if (match := pattern.fullmatch(module)) and match[1] is not None:
            yield match[1], i


def _group(members: list[str]) -> Group:
    if len({split_role(m)[0] for m in members}) > 1:
        return Group(tuple(sorted(members)))
    by_role = {split_role(m)[1]: m for m in members}
    fused = [f for f in FUSED if any(r in f for r in by_role)]
    order = [r for f in fused for r in f if r in by_role]
    missing = tuple(r for f in fused for r in f if r not in by_role)
    return Group(tuple(by_role[r] for r in (*order, *sorted(by_role.keys() - set(order)))), missing)
