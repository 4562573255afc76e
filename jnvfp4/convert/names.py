"""What a tensor's name says: layer, module, role, and the group whose members share one global.

Loaders keep one global for projections that they fuse, so those are quantized with one amax.
"""

import re
from collections.abc import Iterable
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
ROUTERS = ("mlp.gate", "router", "shared_expert_gate", "block_sparse_moe.gate")
EMBEDDINGS = ("embed_tokens", "wte", "wpe", "embeddings", "word_embeddings", "embed_positions")


def module_of(name: str) -> str:
    """The module a weight belongs to: without the last `.weight` only. A stack of experts is its own."""
    return name.removesuffix(WEIGHT)


def is_stack(name: str) -> bool:
    """Whether a tensor of this name holds one projection of all experts, if it has three axes."""
    return _STACK.search(name) is not None


def layer_of(name: str) -> int | None:
    """The decoder layer in a name, whatever comes before `layers.`; never part of another number."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def is_expert(name: str) -> bool:
    return _EXPERT.search(name) is not None or ".shared_experts." in name or ".shared_expert." in name


def is_routed_expert(name: str) -> bool:
    return _EXPERT.search(name) is not None


@dataclass(frozen=True)
class Group:
    """Modules that share one global: the parent's name and the roles that are there."""

    parent: str
    roles: tuple[str, ...]

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(f"{self.parent}.{role}" if self.parent else role for role in self.roles)

    @property
    def missing(self) -> tuple[str, ...]:
        fused = next((f for f in FUSED if self.roles[0] in f), self.roles)
        return tuple(role for role in fused if role not in self.roles)


def groups_of(modules: Iterable[str], share: Iterable[str] = (), share_qkv: bool = True) -> list[Group]:
    """Puts modules into groups, in the order of their names; most have one member.

    Args:
      modules: names without `.weight`.
      share: regular expressions with two groups, the parent and the role, of further modules that share.
      share_qkv: whether q, k and v do.
    """
    patterns = [re.compile(p.removeprefix("re:")) for p in share]
    found: dict[tuple[str, object], list[str]] = {}
    for module in sorted(modules):
        parent, _, role = module.rpartition(".")
        fused: object = next((f for f in FUSED if role in f and (share_qkv or f != FUSED[0])), role)
        for i, pattern in enumerate(patterns):
            if match := pattern.fullmatch(module):
                parent, fused, role = match[1], i, module.removeprefix(match[1]).lstrip(".")
        found.setdefault((parent, fused), []).append(role)
    return [
        Group(parent, tuple(sorted(roles, key=fused.index) if isinstance(fused, tuple) else roles))
        for (parent, fused), roles in found.items()
    ]
