"""Shows a source in the form that is converted: experts apart or in one tensor, FP8 and MXFP4 decoded.

Nothing is read or copied before a slice is used.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Literal

import numpy as np

from ...spec import BLOCK
from .._files.errors import CheckpointError, OptionError
from .._files.files import Rows
from .._files.safetensors import JSON, Planned
from .._files.source import CONFIG, Source, View, without_quantization
from .._layouts.forms import without_marks
from .._layouts.fp8 import dtype_of_origin, fp8_weights
from .._layouts.loaders import is_expert_stack
from .._layouts.names import WEIGHT, is_other, module_of, split_expert, split_role
from .mxfp4 import mxfp4_views
from .options import ConvertOptions, ExpertLayout

_FUSED = "gate_up_proj"
_HALVES = (("gate_proj", "up_proj"), ("w1", "w3"))  # gate and up, in either convention of names
_ROLES = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
_STACK_NAMES = {"w2": "down_proj"}  # the name in a stack, where gate and up are gate_up_proj
_INTERLEAVED_MODELS = ("gpt_oss",)  # model types with gate and up in the even and the odd columns
# Where sizes say nothing, as of square experts: model types with stacks [E, K, N], and with [E, N, K].
_KN_MODELS = ("llama4", "llama4_text", "gpt_oss", "qwen3_vl_moe", "qwen3_vl_moe_text")
_NK_MODELS = ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "mixtral", "deepseek_v3", "glm4_moe", "nemotron_h")
# Entries of configs: what experts read and write, and what is between their projections.
_OUTER_SIZES = ("hidden_size", "moe_latent_size", "d_model", "n_embd", "dim")
_INNER_SIZES = ("moe_intermediate_size", "intermediate_size", "moe_ffn_hidden_size", "ffn_hidden_size", "hidden_dim")
_INTO_OUTER = ("down_proj", "w2")


def converted_view(source: Source, options: ConvertOptions) -> Source:
    """Shows a source in the form that is converted."""
    if options.dequantize_input != "none":
        source, encoded = decoded(source, options.dequantize_input), source
        if source is encoded:
            expected = "a weight in this format, with its scales"
            raise OptionError({"dequantize_input": f"is {options.dequantize_input}, and the source has none"}, expected)
    if options.experts == "per-expert":
        return per_expert(source, options.expert_layout)
    return stacked(source) if options.experts == "stacked" else source


# ---------------------------------------------------------------- experts
def is_kn(entry: Planned, source: Source, expert_layout: ExpertLayout) -> bool:
    """Returns whether a stack of experts is [E, K, N], by the sizes in the config, or else by the model type."""
    if entry.kn is not None:
        return entry.kn
    if expert_layout != "auto":
        return expert_layout == "kn"
    parent = split_role(entry.name)[0]
    beside = (e for e in source.entries() if is_expert_stack(e) and split_role(e.name)[0] == parent)
    for entries in ((entry,), beside):  # of square experts those beside it tell
        found = {turned for e in entries if (turned := _fits_kn(e, source.config)) is not None}
        if len(found) == 1:
            return found.pop()
    model = next((m for c in source.configs if (m := c.get("model_type"))), None)
    fits = [entry.shape[axis] % BLOCK == 0 for axis in (2, 1)]
    if model in (*_KN_MODELS, *_NK_MODELS) or not any(fits):
        return model in _KN_MODELS
    if all(fits):
        observed = f"may be [E, N, K] or [E, K, N]: neither sizes nor model_type in {CONFIG} tell"
        expected = "hidden_size and moe_intermediate_size that do"
        raise CheckpointError(observed, expected, tensor=entry.name, hint="--expert-layout nk or kn")
    return not fits[0]


def _fits_kn(entry: Planned, config: JSON | None) -> bool | None:
    """Returns whether the sizes in the config are those of a stack [E, K, N]; None if they do not tell."""
    nk, kn = (_fit(entry.name, entry.shape[axis], entry.shape[3 - axis], config) for axis in (1, 2))
    return None if nk == kn else kn > nk


def has_blocks_along_n(module: str, shape: tuple[int, ...], config: JSON | None) -> bool:
    """Tells whether N and K of quantized experts, apart or in a stack, are K and N by the sizes in the config."""
    n, k = shape[-2:]
    is_of_experts = len(shape) == 3 or split_expert(module) is not None
    return is_of_experts and _fit(module, n, k, config) < _fit(module, k, n, config)


def _fit(name: str, n: int, k: int, config: JSON | None) -> int:
    """Counts which of N and K are sizes that the config has for a projection of experts."""
    role = split_role(name)[1]
    outer, inner = (n, k) if role in _INTO_OUTER else (k, n)
    inner = inner // 2 if role == _FUSED else inner
    return (outer in _sizes(config, _OUTER_SIZES)) + (inner in _sizes(config, _INNER_SIZES))


def _sizes(config: object, keys: tuple[str, ...]) -> set[object]:
    """Gives the values of the entries of a config and of the parts of it that describe language models."""
    items = config.items() if isinstance(config, dict) else ()
    nested = (_sizes(v, keys) for k, v in items if not is_other(k))
    return {v for k, v in items if k in keys and isinstance(v, int)}.union(*nested)


def per_expert(source: Source, expert_layout: ExpertLayout) -> Source:
    """Shows every stack [E, N, K] or [E, K, N] as weights [N, K] of its experts, with gate and up apart."""
    model = (source.config or {}).get("model_type")
    views: list[View] = []
    warnings: list[str] = []
    for entry in filter(is_expert_stack, source.entries()):
        if f"{entry.name}_bias" in source.places:
            warnings.append(f"{entry.name}_bias stays one tensor for all experts")
        parent, _, role = entry.name.rpartition(".")
        kn = is_kn(entry, source, expert_layout)
        for expert in range(entry.shape[0]):
            for name, rows in _roles(role, entry.shape[1 + kn], model in _INTERLEAVED_MODELS):
                views.append(_expert_of(source, entry, expert, kn, rows, f"{parent}.{expert}.{name}{WEIGHT}"))
    return replace(source.with_views(views), warnings=(*source.warnings, *warnings)) if views else source


def _roles(role: str, n: int, interleaved: bool) -> list[tuple[str, slice]]:
    """Names the projections of one expert that a stack holds, each with its rows."""
    if role != _FUSED:
        return [(role, slice(None))]
    if interleaved:
        return [("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))]
    return [("gate_proj", slice(0, n // 2)), ("up_proj", slice(n // 2, None))]


def _expert_of(source: Source, entry: Planned, expert: int, kn: bool, rows: slice, name: str) -> View:
    def array() -> np.ndarray:
        (x,) = source.read(entry.name, slice(expert, expert + 1))
        return (x.T if kn else x)[rows]

    n, k = entry.shape[2 if kn else 1], entry.shape[1 if kn else 2]
    tensor = Planned(name, entry.tag, (len(range(n)[rows]), k), mxfp4=entry.mxfp4)
    return View(tensor, source, (entry.name,), array)


def stacked(source: Source) -> Source:
    """Shows each projection of all experts as one tensor [E, N, K]; gate and up are one, with gate first."""
    experts: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in source.places:
        expert = split_expert(module_of(name)) if name.endswith(WEIGHT) else None
        if expert and (role := expert[2][1:]) in _ROLES:
            experts[expert[0]][role][int(expert[1])] = name
    views = []
    for parent, roles in experts.items():
        halves = next((h for h in _HALVES if set(h) <= set(roles)), ())
        others = [(_STACK_NAMES.get(r, r), (r,)) for r in sorted(set(roles) - set(halves))]
        for role, parts in [(_FUSED, halves), *others] if halves else others:
            views.append(_stack_of(source, f"{parent}.{role}", [roles[p] for p in parts]))
    return source.with_views(views)


def _stack_of(source: Source, name: str, parts: list[dict[int, str]]) -> View:
    count = len(parts[0])
    for part in parts:
        if sorted(part) != list(range(count)):
            raise CheckpointError(f"experts are {sorted(part)}", f"0 to {count - 1}", tensor=name)
    experts = [[source.entry(part[e]) for part in parts] for e in range(count)]
    first = experts[0]
    for a, b in ((a, b) for entries in experts for a, b in zip(entries, first, strict=True)):
        if (a.tag, a.shape) != (b.tag, b.shape):
            expected = f"{b.tag} {list(b.shape)}, as expert 0"
            raise CheckpointError(f"is {a.tag} {list(a.shape)}", expected, tensor=a.name)
    if len({(e.tag, e.shape[1:]) for e in first}) > 1:
        raise CheckpointError(f"has {[list(e.shape) for e in first]} for gate and up", "one K", tensor=name)
    shape = (count, sum(e.shape[0] for e in first), *first[0].shape[1:])

    def compute(rows: slice) -> np.ndarray:
        return np.stack([np.concatenate([source.read(e.name) for e in experts[i]]) for i in range(count)[rows]])

    names = tuple(e.name for entries in experts for e in entries)
    tensor = Planned(name, first[0].tag, shape, kn=False)
    return View(tensor, source, names, lambda: Rows(shape, tensor.dtype, compute))


# ---------------------------------------------------------------- quantized sources
def decoded(source: Source, form: Literal["fp8", "mxfp4"]) -> Source:
    """Shows FP8 weights in their dtype of origin, with MXFP4 in bfloat16 or alone, in a model that is not quantized."""
    rows, tag = without_marks(source), dtype_of_origin(source)
    views = [*mxfp4_views(rows)] if form == "mxfp4" else []
    if views or form == "fp8":
        views += (w.view(tag) for w in fp8_weights(rows))
    if not views:
        return source
    config = None if source.config is None else without_quantization(source.config)
    return replace(rows.with_views(views), config=config)
