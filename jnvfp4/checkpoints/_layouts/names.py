"""Finds out from a tensor's name what it is, and which modules share one global scale.

Loaders keep one global scale for projections that they fuse, so those are quantized with one amax.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

WEIGHT = ".weight"
_STACK = re.compile(r"(?:^|\.)experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)$")
_EXPERT = re.compile(r"((?:.*\.)?experts)\.(\d+)((?:\..*)?)")
KV_BIAS = re.compile(r"(?:.*\.)?([kv])_proj\.\1_bias")  # what an affine KV cache of Model Optimizer adds
KV_SCALE = re.compile(r"((?:.*?\.)?)(?:[kv]_proj\.)?([kv])_scale")  # what it is in, and k or v

# Projections that a loader fuses, by the ends of the modules' names. Every map of vLLM and SGLang (packed modules,
# stacked parameters, names of diffusion models) is a part of a row, or of rows that overlap.
_QKV = ("q_proj", "k_proj", "v_proj")
FUSED: tuple[tuple[str, ...], ...] = (
    _QKV,
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
    ("query", "key", "value"),
    ("query_net", "key_net", "value_net"),
    ("key_proj", "value_proj"),
    ("c_fc_0", "c_fc_1"),
    ("fc1", "fc3"),
    ("gate_proj", "dense_h_to_4h"),
    ("wq_a", "wkv"),
    ("wkv", "wgate"),
    ("wk", "weights_proj"),
    ("wq_du", "wk_dv", "wv_dv", "wr_du"),
    ("b_proj", "f_a_proj", "g_a_proj"),
    ("f_b_proj", "g_b_proj"),
    ("index_q_proj", "index_k_proj", "index_v_proj"),
    ("input_mix_weight_down", "block_inject_weight"),
    (*_QKV, "g_proj"),
    (*_QKV, "gate_proj"),
    (*_QKV, "o_gate_proj"),
    (*_QKV, "output_gate_proj"),
    (*_QKV, "index_q_proj", "index_k_proj"),
    (*_QKV, "indexer.index_qk_proj"),
    (*_QKV, "sparse_indexer_q", "sparse_indexer_k", "sparse_indexer_z", "g_proj"),
    (*_QKV, "b_proj", "f_a_proj", "g_a_proj"),
    (*_QKV, "b_proj", "f_proj", "g_proj"),
    (*_QKV, "a_proj", "b_proj", "g_proj"),
    (*_QKV, "mlp_in"),
    ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
)
# What loaders look up in lists of modules, where they do not look up the parts.
FUSED_NAMES = dict(
    zip(FUSED, ("qkv_proj", "gate_up_proj", "", "in_proj_qkvz", "in_proj_ba", "to_qkv", "to_added_qkv"), strict=False)
)
# A model that has only one of these is incomplete, while k and v may be missing where layers share them.
INSEPARABLE = FUSED[1:3]
# The query of cross-attention multiplies other activations than key and value, which loaders fuse without it.
_CROSS = re.compile(r"attn2\.|cross_?att|encoder_attn|encdecatt", re.IGNORECASE)
# So does that of modules which read out another sequence by queries of their own.
_OTHER_QUERIES = re.compile(rf"{_CROSS.pattern}|cross|perceiver|resampler|q_?former|latent|pool", re.IGNORECASE)
_QUERIES = ("q_proj", "to_q", "wq", "q", "query", "query_net")
_ENDS: dict[str, list[tuple[str, tuple[str, ...]]]] = {}  # of the rows' parts, by the last part of the module's name
_FAMILIES: dict[str, frozenset[str]] = {}  # the parts of all rows that overlap with those of a part
for _row in FUSED:
    for _end in _row:
        _ENDS.setdefault(_end.rpartition(".")[2], []).append((_end, _row))
    _parts = frozenset(_row).union(*(_FAMILIES.get(_end, ()) for _end in _row))
    _FAMILIES |= dict.fromkeys(_parts, _parts)

_LAYER = re.compile(r"((?:.*?\.)?layers\.(\d{1,9})\.)([^.]*)")
_OF_MTP = ("eh_proj", "enorm", "hnorm", "shared_head")  # what only layers for multi-token prediction have

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


def mtp_layers(modules: Iterable[str], first: int | None) -> tuple[str, ...]:
    """Gives the beginnings of the names in layers for multi-token prediction (MTP) that are numbered like others.

    ``first`` is the number of the first one, if the config says that there are any.
    """
    found = filter(None, map(_LAYER.match, modules))
    return tuple({m[1] for m in found if m[3] in _OF_MTP or (first is not None and int(m[2]) >= first)})


def is_mtp(module: str, layers: tuple[str, ...]) -> bool:
    """Tells whether a module predicts tokens after the next one; ``layers`` are those of ``mtp_layers``."""
    return module.startswith(layers) or any(part.startswith(("mtp", "nextn")) for part in module.split("."))


def is_unquantized_in_loaders(module: str) -> bool:
    """Tells whether loaders have no scales for a projection: of attention's indexer, or at the start of MTP."""
    parent, role = split_role(module)
    indexer = parent.endswith("indexer.") and role in ("wk", "weights_proj")
    return indexer or role == "eh_proj" or (role == "fc" and is_mtp(module, ()))


def is_in_16_bits(module: str) -> bool:
    """Tells whether a projection stays in 16 bits: loaders have no scales, or it makes gates of linear attention."""
    return is_unquantized_in_loaders(module) or split_role(module)[1] in ("in_proj_a", "in_proj_b", "in_proj_ba")


def without_numbers(module: str) -> str:
    """Gives the name that a module has in common with those of other layers and experts."""
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))


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


def groups_of(
    modules: Iterable[str], share: Iterable[str] = (), k: Callable[[str], int | None] = lambda module: None
) -> list[Group]:
    """Puts modules that share a global scale into groups, in the order of their names; most groups have one member.

    Args:
      modules: names without ``.weight``.
      share: regular expressions of modules that share too. Modules share if they match the same expression and its
        first group, the parent, has the same text.
      k: gives K of a module. Loaders do not fuse weights of different K, whatever their names; q, k, v and gate, up
        are a group all the same, since such a model is damaged.
    """
    modules, patterns = {*modules}, [re.compile(p.removeprefix("re:")) for p in share]
    group: dict[str, list[str]] = {}  # by module; all members of a group have the same list object
    first: dict[tuple[object, ...], str] = {}  # the first module with each key; modules with a common key share
    for module in sorted(modules):
        group[module] = [module]
        rows = ((parent, row) for parent, row in fused_rows(module) if _applies(parent, row, modules))
        keys = [(parent, row, None if row in FUSED[:3] else k(module)) for parent, row in rows]
        for key in (*keys, *_keys(module, patterns)):
            other = group[first.setdefault(key, module)]
            if other is not group[module]:
                other += group[module]
                group |= dict.fromkeys(group[module], other)
    return [_group(members) for members in {id(g): g for g in group.values()}.values()]


def _applies(parent: str, row: tuple[str, ...], modules: set[str]) -> bool:
    """Tells whether a row is about a model: those that add to q, k and v are where q is."""
    return row[:3] != _QKV or row == _QKV or f"{parent}{row[0]}" in modules


def _keys(module: str, patterns: Iterable[re.Pattern[str]]) -> Iterator[tuple[object, ...]]:
    for i, pattern in enumerate(patterns):
        if (match := pattern.fullmatch(module)) and match[1] is not None:
            yield match[1], i


def fused_rows(module: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Gives the rows of ``FUSED`` that a module is a part of, each with the module that all parts are in."""
    for end, row in _ENDS.get(split_role(module)[1], ()):
        parent = module.removesuffix(end)
        is_part = not parent or parent.endswith(".")
        if is_part and not (end in _QUERIES and _CROSS.search(parent)):
            yield parent, row


def inputs_of(module: str) -> object:
    """Gives what modules have in common that surely multiply the same activations; the module, if none other does.

    Those are q_proj, k_proj and v_proj, except where the name tells of queries of other activations; gate_proj and
    up_proj; w1 and w3. Other rows of ``FUSED`` share a global scale, but some of them, such as f_b_proj and g_b_proj,
    multiply activations of their own.
    """
    parent, role = split_role(module)
    row = next((row for row in FUSED[:3] if role in row), ())
    return (parent, row) if row and not (row is _QKV and _OTHER_QUERIES.search(parent)) else module


def family_of(module: str) -> tuple[str, object]:
    """Gives what modules have in common whose global scales are related: parent, and rows of ``FUSED``."""
    parent, role = split_role(module)
    return next(((p, _FAMILIES[row[0]]) for p, row in fused_rows(module)), (parent, role))


def _group(members: list[str]) -> Group:
    if len({split_role(m)[0] for m in members}) > 1:
        return Group(tuple(sorted(members)))
    by_role = {split_role(m)[1]: m for m in members}
    rows = list(dict.fromkeys(row for m in members for _, row in fused_rows(m)))
    order = [role for row in FUSED if row in rows for role in row if role in by_role]
    whole = {role for row in rows if by_role.keys() >= {*row} for role in row}
    lacking = [row for row in FUSED[:3] if any(role in by_role and role not in whole for role in row)]
    missing = [role for row in lacking for role in row if role not in by_role]
    if _CROSS.search(members[0]):
        missing = [role for role in missing if role not in _QUERIES]
    return Group(tuple(by_role[r] for r in dict.fromkeys((*order, *sorted(by_role)))), tuple(missing))
