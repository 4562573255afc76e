"""What a tensor's name says: layer, module, role, and the group whose members share one global.

Loaders keep one global for projections that they fuse, so those are quantized with one amax.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

WEIGHT = ".weight"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_STACK = re.compile(r"(?:^|\.)experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)$")
_EXPERT = re.compile(r"(?:^|\.)experts(?:\.(\d+))?(?:\.|$)")

MEGATRON = re.compile(r"(?:decoder|mtp)\.layers\.\d+\.")
# Projections that loaders fuse, by the last part of the module's name.
FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
FUSED_NAMES = {FUSED[0]: "qkv_proj", FUSED[1]: "gate_up_proj"}
# Without the other one there is nothing to fuse with; q, k and v may be shared between layers.
INSEPARABLE = (FUSED[1], FUSED[2])
# Parts of a module's name that stand for something else than a projection of the language model.
_HEADS = ("lm_head", "embed_out", "output_layer", "score", "classifier", "head")
_TABLES = ("wte", "wpe", "word_embeddings", "shared")
_OTHERS = (
    "norm",
    "rotary",
    "vision",
    "visual",
    "image",
    "audio",
    "conv",
    "lora",
    "adapter",
    "patch_embed",
    "projector",
)


def module_of(name: str) -> str:
    """The module a weight belongs to: without the last `.weight` only. A stack of experts is its own."""
    return name.removesuffix(WEIGHT)


def is_stack(name: str) -> bool:
    """Whether a tensor of this name holds one projection of all experts, if it has three axes."""
    return _STACK.search(name) is not None


def layer_of(name: str) -> int | None:
    """The decoder layer in a name, whatever comes before `layers.`, as a number; MTP layers have none."""
    found = _LAYER.search(name)
    return int(found[1]) if found and "mtp" not in name[: found.start()].split(".") else None


def is_expert(name: str) -> bool:
    return _EXPERT.search(name) is not None or ".shared_experts." in name or ".shared_expert." in name


def is_router(module: str) -> bool:
    """What chooses experts, whatever it is called: `mlp.gate`, `mlp.gate.wg`, `router.layer`, `shared_expert_gate`."""
    parts = module.split(".")
    gates = (p == "gate" and "att" not in before for before, p in zip(["", *parts], parts, strict=False))
    return any(gates) or any("router" in p or p.endswith("expert_gate") for p in parts)


def is_head(module: str) -> bool:
    """What makes logits."""
    parts = module.split(".")
    return parts[-1] in _HEADS or parts == ["output"] or "shared_head" in parts


def is_embedding(module: str) -> bool:
    role = module.rpartition(".")[2]
    return role in _TABLES or role.startswith(("embed", "tok_embed"))


def is_other(module: str) -> bool:
    """No projection of the language model: a norm, a vision tower, an adapter."""
    parts = module.split(".")
    return "vit" in parts or any(o in part for part in parts for o in _OTHERS)


@dataclass(frozen=True)
class Group:
    """Modules that share one global: the parent's name and the roles that are there, or full names without a parent."""

    parent: str
    roles: tuple[str, ...]
    missing: tuple[str, ...] = ()  # of projections that loaders fuse with one of these

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(f"{self.parent}.{role}" if self.parent else role for role in self.roles)


def groups_of(modules: Iterable[str], share: Iterable[str] = (), share_qkv: bool = True) -> list[Group]:
    """Puts modules into groups, in the order of their names; most have one member.

    Args:
      modules: names without `.weight`.
      share: regular expressions of further modules that share, with those whose first group, the parent, is the same.
      share_qkv: whether q, k and v do.
    """
    patterns = [re.compile(p.removeprefix("re:")) for p in share]
    group: dict[str, list[str]] = {}  # by module; members of one group have the same list
    first: dict[tuple[str, object], str] = {}  # that a key, which makes a group, was seen with
    for module in sorted(modules):
        group[module] = [module]
        for key in _keys(module, patterns, share_qkv):
            other = group[first.setdefault(key, module)]
            if other is not group[module]:
                other += group[module]
                group |= dict.fromkeys(group[module], other)
    return [_group(members, share_qkv) for members in {id(g): g for g in group.values()}.values()]


def _keys(module: str, patterns: Iterable[re.Pattern[str]], share_qkv: bool) -> Iterator[tuple[str, object]]:
    parent, _, role = module.rpartition(".")
    fused = next((f for f in FUSED if role in f and (share_qkv or f != FUSED[0])), None)
    if fused:
        yield parent, fused
    for i, pattern in enumerate(patterns):
        if (match := pattern.fullmatch(module)) and match[1] is not None:
            yield match[1], i


def _group(members: list[str], share_qkv: bool) -> Group:
    parents = {m.rpartition(".")[0] for m in members}
    if len(parents) > 1:
        return Group("", tuple(sorted(members)))
    roles = [m.rpartition(".")[2] for m in members]
    fused = [f for f in FUSED if any(r in f for r in roles) and (share_qkv or f != FUSED[0])]
    order = [r for f in fused for r in f if r in roles]
    missing = tuple(r for f in fused for r in f if r not in roles)
    return Group(parents.pop(), (*order, *sorted(r for r in roles if r not in order)), missing)
