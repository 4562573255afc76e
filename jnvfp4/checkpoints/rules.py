"""Finds what breaks loaders of an NVFP4 checkpoint, of any software, from its headers, scales and configs.

Sources, as issues and pull requests: vLLM 29980, 42601, 45102, 45212, 49949, 52501, 54189, 54444 and 54974; SGLang
23625; TensorRT-LLM 18772; compressed-tensors 595; Model Optimizer 1397, 1633, 1858 and 2038.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..spec import BLOCK
from ._convert.views import has_blocks_along_n
from ._files.errors import CheckpointError
from ._files.source import CONFIG, HF_QUANT, Warn, open_source
from ._layouts.forms import values_of
from ._layouts.loaded import is_targeted, targets_of
from ._layouts.loaders import VERSIONS, listed
from ._layouts.names import (
    is_embedding,
    is_head,
    is_other,
    is_router,
    is_stack,
    is_unquantized_in_loaders,
    split_expert,
    split_role,
)
from ._layouts.stored import scale_shapes
from ._layouts.survey import Item, Survey, module_entries, survey
from ._layouts.unsupported import kv_caches

RANKS = (2, 4, 8)  # of tensor parallelism, about which there is a note
_SPLIT_ALONG_K = ("o_proj", "out_proj", "down_proj", "w2")  # what tensor parallelism splits between blocks of 16
_MOST_ROUNDED = 64.0  # by which block scales are divided at most: of 448, 7 is left, 448 times E4M3's smallest normal
_FAR = 8  # how many times as large as all its siblings a scale of 1.0 is no amax of 2688, but was never calibrated


@dataclass(frozen=True)
class Finding:
    """Reports what is wrong with a tensor, a module or a file of a checkpoint.

    Attributes:
      rule: the name of the rule in ``RULES``.
      where: the tensor, module or file.
      found: what is wrong, as a clause about it.
      fixable: whether ``fix_checkpoint`` mends it.
      note: whether it breaks no loader by itself.
    """

    rule: str
    where: str
    found: str
    fixable: bool = False
    note: bool = False


Found = tuple[str, str, bool] | tuple[str, str, bool, bool]  # the fields of a finding after its rule


@dataclass(frozen=True)
class Rule:
    """Describes a rule: what it finds, which loaders break and how, and what to do."""

    finds: str
    breaks: str
    do: str
    find: Callable[[Survey], Iterable[Found]]


def lint(source: Path | str, ranks: int | None = None, *, warn: Warn = warnings.warn) -> list[Finding]:
    """Finds what breaks loaders of an NVFP4 checkpoint. Codes are not read, only headers, scales and configs.

    Args:
      source: an NVFP4 checkpoint of any layout, complete or not; beside other formats its NVFP4 weights are checked.
      ranks: ranks of tensor parallelism that the model is to be split over. Without it, there are notes about 2, 4, 8.
      warn: called with a sentence about each file beside the checkpoint that may be no part of it.

    Raises:
      CheckpointError: a file is damaged, or there is no NVFP4 weight.
    """
    s = survey(open_source(Path(source)), ranks)
    s.source.warn_of_files(warn)
    return findings(s)


def findings(s: Survey) -> list[Finding]:
    """Applies all rules."""
    return [_finding(s, name, *fields) for name, rule in RULES.items() for fields in rule.find(s)]


def _finding(s: Survey, rule: str, where: str, found: str, fixable: bool, note: bool = False) -> Finding:
    return Finding(rule, where, found, fixable and not s.layout.stores_amax and not s.other_forms, note)


# ---------------------------------------------------------------- scales of activations
def usable_activations(s: Survey) -> dict[tuple[str, object], np.float32]:
    """Finds the largest scale of activations, as S_dec, by family. 1.0 counts unless it was never calibrated."""
    out: dict[tuple[str, object], np.float32] = {}
    with_ones, calibrated = set(), is_calibrated(s)
    for item in s.items.values():
        if (a := item.activation_decode) is not None:
            if (a == 1).any():
                with_ones.add(item.family)
            if (a := a[np.isfinite(a) & ((not calibrated) | (a != 1))]).size:
                out[item.family] = max(out.get(item.family, np.float32(0)), a.max())
    real = (f for f in with_ones if f in out and not is_far_from_one(out[f]))
    return out | {f: max(out[f], np.float32(1)) for f in real}


def is_far_from_one(largest: np.float32) -> bool:
    """Tells whether the largest scale of siblings is so small that 1.0 beside it was never calibrated."""
    return float(largest) < 1 / _FAR


def judged_activations(s: Survey) -> list[Item]:
    """Gives the weights for whose activations loaders look for a scale, or would if the config were right."""
    return [item for item in s.items.values() if not s.leaves_activations(item.module)]


def is_calibrated(s: Survey) -> bool:
    """Tells whether any scale of activations comes from data, so that others should."""
    scales = (a for item in s.items.values() if (a := item.activation_decode) is not None)
    return any((np.isfinite(a) & (a != 1)).any() for a in scales)


def needs_activations(s: Survey) -> bool:
    """Tells whether loaders look for scales of activations. Where no weight has one, the config is wrong instead."""
    some = any(item.activation is not None for item in s.items.values())
    return s.layout.suffixes.activation is not None and s.weight_only is not True and some


def _activation_missing(s: Survey) -> Iterator[Found]:
    known = usable_activations(s)
    for item in judged_activations(s) if needs_activations(s) else ():
        if item.activation is None:
            yield str(item.parts.activation), "is missing", item.family in known


def _activation_unusable(s: Survey) -> Iterator[Found]:
    known = usable_activations(s)
    for item in judged_activations(s):
        if (a := item.activation_decode) is not None and item.activation is not None and np.isnan(a).any():
            value = item.activation[np.isnan(a)].flat[0]
            yield str(item.parts.activation), f"is {value:.4g}", item.family in known


def _activation_one(s: Survey) -> Iterator[Found]:
    known, judged = usable_activations(s), judged_activations(s)
    experts = {i.module for i in judged if i.module in s.stored.stacks or split_expert(i.module)}
    ones = {m for m in experts if (a := s.items[m].activation_decode) is not None and (a == 1).all()}
    if is_calibrated(s) and len(experts) > 1 and ones == experts:
        text = f"is 1.0, as in all {len(experts)} weights of experts: they are not calibrated"
        yield str(s.items[min(experts)].parts.activation), text, False, True
        judged = [item for item in judged if item.module not in experts]
    for item in judged if is_calibrated(s) else ():
        if (a := item.activation_decode) is not None and (a == 1).any():
            if is_far_from_one(known.get(item.family, max(known.values()))):
                yield str(item.parts.activation), "is 1.0, while others are calibrated", item.family in known
            else:
                yield str(item.parts.activation), "is 1.0: an amax of 2688, or not calibrated", False, True
    scales = [a for item in judged if (a := item.activation_decode) is not None]
    if scales and all((a == 1).all() for a in scales):
        text = f"is 1.0 in all {len(scales)} weights: activations are not calibrated"
        yield str(s.layout.suffixes.activation), text, False, True


# ---------------------------------------------------------------- scales of weights
def shared_global(s: Survey, members: Sequence[str]) -> np.ndarray | None:
    """Finds the global scale, [1] or [E] as stored, that fused weights should share; None if theirs are the same."""
    stored, decode = _globals_of(s, members)
    if np.isclose(decode, decode[:1], rtol=1e-5, atol=0).all():
        return None
    return np.take_along_axis(stored, decode.argmax(axis=0)[None], axis=0)[0]


def _globals_of(s: Survey, members: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Gives the global scales of fused weights that can be compared, as stored and as S_dec; no scales of rows.

    Returns:
      float32 [weights, 1], or [weights, E] of stacks, twice; [1, 0] if they cannot be compared.
    """
    found = [(i.global_scale, i.decode) for m in members if not (i := s.items[m]).bad_globals]
    usable = [(g.reshape(-1), d.reshape(-1)) for g, d in found if g is not None and d is not None]
    same_size = len({d.size for _, d in usable}) == 1 and (usable[0][1].size == 1 or is_stack(members[0]))
    stored, decode = zip(*(usable if same_size else [(np.empty(0, np.float32),) * 2]), strict=True)
    return np.stack(stored), np.stack(decode)


def _fused(s: Survey) -> Iterator[Found]:
    for module, parts in s.unequal_globals.items():
        if not s.items[module].bad_globals:
            text = f"has {parts.shape[1]} different global scales for one weight, up to {_ratio(parts, 1):.4g}x"
            yield s.items[module].parts.global_scale, text, False
    for group in s.fused:
        if shared_global(s, group.members) is not None:
            _, decode = _globals_of(s, group.members)
            ratio = _ratio(decode, 0)
            roles = ", ".join(split_role(m)[1] for m in group.members[1:])
            whole = ratio <= _MOST_ROUNDED and all(is_whole(s, s.items[m]) for m in group.members)
            text = f"and {roles} have different global scales, up to {ratio:.4g}x"
            yield group.members[0], text, whole


def _ratio(decode: np.ndarray, axis: int) -> float:
    return float(np.divide(decode.max(axis), decode.min(axis), dtype=np.float64).max())


def _globals(s: Survey) -> Iterator[Found]:
    for item in s.items.values():
        if item.bad_globals and item.global_scale is not None:
            bad = next(v for v in item.global_scale.flat if not np.isfinite(v) or v <= 0)
            yield item.parts.global_scale, f"is {bad:.4g}", False
    for name in s.kv_scales:
        values = np.asarray(s.source.read(name), np.float32)
        if not (np.isfinite(values) & (values > 0)).all():
            yield name, f"is {values.flat[0]:.4g}" if values.size == 1 else "has values that are no scale", False


def _block_scales(s: Survey) -> Iterator[Found]:
    for module, (nan, negative, total) in s.block_scales.items():
        scales = s.items[module].parts.scales
        if nan:
            yield scales, f"has {nan} NaN of {total}", True
        if negative:
            yield scales, f"has {negative} negative values of {total}", False


def is_whole(s: Survey, item: Item) -> bool:
    """Tells whether the block scales [N, K/16] are known, also where they are stored with padding."""
    return item.module in s.block_scales


def _padded(s: Survey) -> Iterator[Found]:
    for item in s.items.values():
        if item.lie == "padded" and item.codes and item.scales:
            (shape,) = scale_shapes(item.codes.shape)
            text = f"is {item.scales.tag} {list(item.scales.shape)}; expected {s.layout.scales_tag} {list(shape)}"
            yield item.parts.scales, text, is_whole(s, item)
    if marked := [s.items[m].parts.scales for m, form in s.other_forms.items() if form == "tiles"]:
        text = f"is in ComfyUI's order of tiles, with swapped codes, as {len(marked)} weights are: repack changes it"
        yield marked[0], text, False, True
    tiles, clear = s.in_tiles
    if 2 * len(tiles) > clear:
        text = (
            f"seems to be in the order of tiles, as {len(tiles)} of {clear}: in it rows and columns explain over twice"
        )
        yield tiles[0], f"{text} the variance; read as rows, the error is about 100 %", False


def _parts(s: Survey) -> Iterator[Found]:
    if halved := [s.items[m].parts.scales for m, form in s.other_forms.items() if form == "blocks of 32"]:
        yield halved[0], f"has blocks of 32, as {len(halved)} weights have: repack makes two of 16", False
    for item in s.items.values():
        for name, what in ((item.parts.codes, item.codes), (item.parts.scales, item.scales)):
            if what is None:
                yield name, "is missing", False
        if item.lie == "wrong" and item.codes and item.scales:
            shapes = " and ".join(f"{e.tag} {list(e.shape)}" for e in (item.codes, item.scales))
            yield item.parts.codes, f"and its block scales are {shapes}", False
        if item.shape and has_blocks_along_n(item.module, item.shape, s.source.config):
            yield item.parts.codes, f"has blocks along N, by the sizes in {CONFIG}", False
        if item.global_scale is None:
            there = item.parts.global_scale in s.source.places
            yield item.parts.global_scale, "is no float" if there else "is missing", False


# ---------------------------------------------------------------- modules
def _experts(s: Survey) -> Iterator[Found]:
    """Compares the tensors of each expert with those of most others beside it."""
    layers: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for module, entry in module_entries(s.source):
        if parts := split_expert(module):
            parent, number, role = parts
            layers[parent][number][role] = f"{entry.tag} {list(entry.shape)}"
    for parent, experts in layers.items():
        for role in sorted({role for e in experts.values() for role in e}):
            kinds = Counter(e.get(role, "missing") for e in experts.values())
            usual = kinds.most_common(1)[0][0]
            for number, expert in experts.items():
                if (kind := expert.get(role, "missing")) != usual:
                    yield f"{parent}.{number}{role}", f"is {kind}, in other experts {usual}", False


def _by_mistake(is_wrong: Callable[[str], bool], s: Survey, note: bool = False) -> Iterator[Found]:
    yield from ((module, "is quantized", False, note) for module in s.items if is_wrong(module))


def _split(s: Survey) -> Iterator[Found]:
    """Finds the ranks between which blocks of 16 would be cut, once for all weights of the same role and K."""
    sizes: dict[tuple[str, int], list[str]] = defaultdict(list)
    for item in s.items.values():
        if (shape := item.shape) and (role := split_role(item.module)[1]) in _SPLIT_ALONG_K:
            sizes[role, shape[-1]].append(item.module)
    for (_, k), modules in sizes.items():
        if bad := [str(n) for n in (RANKS if s.ranks is None else (s.ranks,)) if k % (BLOCK * n)]:
            more = f", as {len(modules) - 1} more" if len(modules) > 1 else ""
            text = f"has K = {k}, which {', '.join(bad)} ranks cut within blocks of {BLOCK}{more}"
            yield modules[0], text, False, s.ranks is None


# ---------------------------------------------------------------- configs
def ignore_list_of(s: Survey) -> list[str] | None:
    """Makes the list of unquantized modules anew; None if configs cannot be made from the tensors."""
    if s.source.config is None or not s.plain_config:
        return None
    try:
        return s.layout.ignore_list(s.unquantized, list(s.items))
    except CheckpointError:  # loaders would read any list in different ways
        return None


def _config(s: Survey) -> Iterator[Found]:
    """Compares what the configs say with the tensors. Configs of mixed formats are not judged."""
    if s.mixed or (s.source.config is None and s.hf_quant is None):
        return
    found = [*_formats(s), *_activations(s), *_lists(s)]
    fixable = bool(found) and ignore_list_of(s) is not None
    yield from ((file, text, fixable) for file, text in found)
    yield from ((file, text, False, True) for file, text in _lists(s, routers=True))


def _formats(s: Survey) -> Iterator[tuple[str, str]]:
    method = (s.config or {}).get("quant_method")
    expected, hf_quant = s.layout.quant_method, s.hf_quant if s.layout.hf_quant_keys else None
    if s.config is None and hf_quant is None:
        yield CONFIG, f"does not say that weights are {s.layout.name}"
    elif s.config is not None and not str(method).startswith(expected):
        yield CONFIG, f"quant_method is {method!r}; the tensors are those of {expected}"
    for key, known in () if s.layout.hf_quant_keys else s.layout.nvfp4.items():
        if s.config is not None and s.config.get(key) is None:
            yield CONFIG, f"has no {key}; expected {known[0]!r}"
    if len(s.algorithms) > 1:
        yield HF_QUANT, f"and {CONFIG} name different algorithms: {', '.join(sorted(s.algorithms))}"
    for file, section in ((CONFIG, s.config), (HF_QUANT, s.hf_quant)):
        for size in values_of(section, "group_size"):
            if size not in (None, BLOCK) and not (size == 2 * BLOCK and "blocks of 32" in s.other_forms.values()):
                yield file, f"group_size is {size!r}; expected {BLOCK}"
    if hf_quant is not None:
        if absent := [key for key in s.layout.hf_quant_keys if key not in hf_quant]:
            yield HF_QUANT, f"has no {', '.join(absent)}"
        elif not hf_quant["exclude_modules"]:
            yield HF_QUANT, "exclude_modules is empty"


def _activations(s: Survey) -> Iterator[tuple[str, str]]:
    count = sum(item.activation is not None for item in s.items.values())
    file = HF_QUANT if s.config is None else CONFIG
    if s.layout.suffixes.activation is not None and s.weight_only is False and not count and not s.dynamic:
        yield file, "asks for activations in 4 bits, but no weight has a scale for them"
    if s.layout.targets is not None and s.weight_only and count:
        yield file, f"leaves activations in 16 bits, but {count} weights have a scale for them"


def _lists(s: Survey, routers: bool = False) -> Iterator[tuple[str, str]]:
    """Reads each list of unquantized modules as the layout's loaders do, about routers that it lacks or the others."""
    for file, section, key in ((CONFIG, s.config, "ignore"), (HF_QUANT, s.hf_quant, "exclude_modules")):
        if section is None:
            continue
        if s.layout.targets is None and key not in section and "exclude_modules" not in section:
            continue
        listed = section.get(key, section.get("exclude_modules"))
        entries = [e for e in listed if isinstance(e, str)] if isinstance(listed, list) else []
        yield from ((file, found) for found in _misread(s, entries, section, routers))


def _misread(s: Survey, entries: list[str], section: Mapping[str, Any], routers: bool) -> Iterator[str]:
    readings = {name: loader.reads for name, loader in s.layout.loaders.items() if loader.lints}
    loader, reads = next(iter(readings.items()))
    targets = targets_of(section)
    unless = ", unless the model loads gates in 16 bits" if routers else ""
    for module in s.unquantized:
        if (
            is_router(module) is routers
            and not is_other(module)
            and is_targeted(reads, targets, module)
            and not listed(reads, entries, module)
        ):
            yield f"does not list {module}, which is not quantized: {loader} would quantize it{unless}"
    for module in () if routers else s.items:
        for loader, reads in readings.items():
            if entry := listed(reads, entries, module):
                yield f"lists {entry!r}, but {module} is quantized: {loader} would leave it as it is"
                break


def _kv(s: Survey) -> Iterator[Found]:
    if s.kv_scales and not kv_caches(s.source):
        yield (
            s.kv_scales[0],
            f"is a KV scale, of {len(s.kv_scales)}, but no config asks for a quantized KV cache",
            ignore_list_of(s) is not None,
        )


# ---------------------------------------------------------------- the rules
_FROM_SIBLINGS = "--fix takes the largest of fused weights and of other experts; otherwise calibrate, or use W4A16"
_AGAIN = "quantize the weight again"
RULES: Mapping[str, Rule] = {
    "input-scale-missing": Rule(
        "some weights have no scale of activations",
        "vLLM, SGLang: memory that is not initialized is read as the scale (NaN, or output 0)",
        _FROM_SIBLINGS,
        _activation_missing,
    ),
    "input-scale-zero": Rule(
        "scale of activations that is 0, negative, infinite, NaN or subnormal",
        "vLLM, SGLang: 1 / scale is infinite, and tokens become NaN",
        _FROM_SIBLINGS,
        _activation_unusable,
    ),
    "input-scale-one": Rule(
        "scale of activations 1.0, over 8 times its siblings' (nearer ones, or 1.0 in all weights or experts: a note)",
        "vLLM, SGLang, TensorRT-LLM: small activations become 0",
        _FROM_SIBLINGS,
        _activation_one,
    ),
    "fused-globals": Rule(
        "different global scales of weights that loaders fuse, such as q, k, v or gate, up",
        "vLLM, SGLang, TensorRT-LLM (Cutlass): one scale is used for all",
        "--fix takes the largest, and rounds block scales of the others again (by up to 6 %, more if subnormal)",
        _fused,
    ),
    "bad-globals": Rule(
        "global scale, or KV scale, that is 0, negative, infinite or NaN",
        "all: the weight is NaN or 0",
        _AGAIN,
        _globals,
    ),
    "bad-block-scales": Rule(
        "block scales that are NaN or negative",
        "all: NaN; for negative ones GEMMs read E4M3 without a sign",
        f"--fix writes 448 for NaN, as casts that saturate do; if negative, {_AGAIN}",
        _block_scales,
    ),
    "padded-scales": Rule(
        "block scales in tiles of 128x4, padded or swizzled (a note where ComfyUI marks them)",
        "vLLM, SGLang: the shape is refused, or scales would be swizzled twice",
        "--fix stores [N, K/16], if the padding shows the order",
        _padded,
    ),
    "parts": Rule(
        "codes, block scales or global scale missing, or of another shape or dtype; blocks of 32",
        "vLLM: memory that is not initialized is read; others refuse",
        _AGAIN,
        _parts,
    ),
    "experts-differ": Rule(
        "experts of one layer differ in dtype or shape, or lack a weight",
        "vLLM, SGLang: a fused MoE layer has one format",
        "quantize all experts of the layer, or none",
        _experts,
    ),
    "quantized-router": Rule(
        "a router is quantized, indexer.wk or indexer.weights_proj, or eh_proj or mtp.fc",
        "vLLM, SGLang: most models load them in 16 bits",
        "take it from the original model",
        lambda s: _by_mistake(lambda m: is_router(m) or is_unquantized_in_loaders(m), s),
    ),
    "quantized-head": Rule(
        "an embedding is quantized, or lm_head (a note)",
        f"most loaders have no such parameters; vLLM {VERSIONS['vllm']} and SGLang {VERSIONS['sglang']} load lm_head",
        "take it from the original model",
        lambda s: [*_by_mistake(is_embedding, s), *_by_mistake(lambda m: is_head(m) and not is_embedding(m), s, True)],
    ),
    "ranks": Rule(
        "K of o_proj, down_proj or w2 that 2, 4 or 8 ranks cut within a block (a note, unless --ranks N)",
        "vLLM, SGLang: shapes are refused, or scales belong to other weights",
        "use fewer ranks, or expert parallelism",
        _split,
    ),
    "config": Rule(
        "the configs and the tensors disagree: layout, algorithm, keys, list of unquantized modules",
        "the loader that is named, or all",
        "--fix makes the configs anew from the tensors, if they describe plain NVFP4 alone",
        _config,
    ),
    "kv-scales": Rule(
        "scales of keys and values, but no config asks for a quantized KV cache",
        "vLLM: the scales are not used, and the cache stays in 16 bits",
        "--fix asks for the cache; otherwise remove the scales",
        _kv,
    ),
}
