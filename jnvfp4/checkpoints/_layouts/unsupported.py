"""Finds what a checkpoint holds that no reader here applies, besides NVFP4 and FP8 weights and high precision.

Software that mixes formats stores scales, factors and orders of columns beside weights. To ignore them gives wrong
values without an error.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from .._files.errors import CheckpointError
from .._files.safetensors import BITS, JSON
from .._files.source import CONFIG, HF_QUANT, Source, read_hf_quant
from .compressed_tensors import KV_CACHES
from .layouts import nvfp4_values
from .modelopt import MIXED, W4A8

_HINT = "export the model again with NVFP4 and FP8 alone, or read it with the software that wrote it"
# By the bits of a group's weights: the values of its entries, in compressed-tensors and in what Model Optimizer makes
# alike. The activations of a group have as many bits as its weights, but for W4A8, or are in high precision.
_GROUPS: Mapping[int, Mapping[str, tuple[object, ...]]] = {
    4: {"strategy": ("tensor_group",), "format": nvfp4_values("format"), "input_strategy": ("tensor_group",)},
    8: {
        "strategy": ("tensor", "channel", "block", "group"),
        "format": ("float-quantized", "naive-quantized", "mxfp8-quantized"),
        "input_strategy": ("tensor", "token", "group"),
        "block_structure": ([128, 128], "128x128"),
    },
}
# The values of entries that say how tensors are stored, wherever they are in a config, in any case. null is known too.
_KNOWN: Mapping[str, tuple[object, ...]] = {
    "quant_algo": (*nvfp4_values("quant_algo"), W4A8, "NVFP4_AWQ", MIXED),
    "num_bits": (4, 8),
    "type": ("float",),
    "strategy": tuple(s for known in _GROUPS.values() for s in (*known["strategy"], *known["input_strategy"])),
    # dense: of sparsity_config; mixed-precision: of groups with different formats
    "format": (*(f for known in _GROUPS.values() for f in known["format"]), "dense", "mixed-precision"),
    "pre_quant_scale": (False, True),
    "transform_config": ({}, {"config_groups": {}}),
}
# What Model Optimizer calls the formats of FP8 weights, which only ``quantized_layers`` of mixed precision names.
_FP8_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "MXFP8")
_LAYERS = "quantized_layers"
_KV_CACHE = ("kv_cache_quant_algo", "kv_cache_scheme")
# Ends of names. Shorter ones would match parameters of models, such as ``layer_scale`` or ``v_bias``.
_FACTOR = re.compile(
    r"(?:^|[._])(?:weight_scale(?:_inv)?|input_scale|pre_quant_scale|weight_zero_point|weight_g_idx)$"
    r"|(?:^|\.)(?:output_scale|q_scale|kv_scale|svdquant_lora_[ab])$"
)
_CODES = ("U8", "I8", "I32", "F8_E4M3", "F8_E5M2", *BITS)  # dtypes of numbers that a tensor beside them may scale


# ---------------------------------------------------------------- configs
def config_refusal(source: Source) -> CheckpointError | None:
    """Makes the error about the first entry of the configs that says a format that is not read; None without one.

    No weight depends on the format of a KV cache.
    """
    if refusal := mlx_refusal(source):
        return refusal
    for file, path, section in _sections(source):
        if not isinstance(section, dict):
            return _refusal(source, file, path, section, "an object")
        for name, key, value in _entries(section, path):
            known = _KNOWN.get(key, (value,))
            if key == "quant_algo" and f".{_LAYERS}." in name:
                known += _FP8_ALGORITHMS
            if value is not None and value not in known and in_capitals(value) not in map(in_capitals, known):
                return _refusal(source, file, name, value, " or ".join(map(repr, known)))
        # Where layers are named one by one, Model Optimizer makes the groups of them, with 8 bits for AWQ's 4.
        for name, value, known in () if section.get(_LAYERS) else _group_entries(section, path):
            if value is not None and value not in known:
                return _refusal(source, file, name, value, " or ".join(map(repr, known)))
    return None


def mlx_refusal(source: Source) -> CheckpointError | None:
    """Makes the error about a config of MLX, whose weights have other names and packing; None without one."""
    keys = ("quantization", "quantization_config")
    found = (s for c in source.configs for key in keys if isinstance(s := c.get(key), dict) and "bits" in s)
    for section in (s for s in found if "quant_method" not in s):
        observed, hint = (
            f"quantization is MLX's, mode {section.get('mode', 'affine')!r:.200}",
            "convert the original model",
        )
        return CheckpointError(observed, "a format of other software", file=source.directory / CONFIG, hint=hint)
    return None


def in_capitals(value: object) -> object:
    """Gives a name as it is compared: writers use both cases."""
    return value.upper() if isinstance(value, str) else value


def algorithms_in(source: Source) -> tuple[dict[str, object], list[object]]:
    """Gives the algorithms that configs of mixed formats name for modules and all below them, and those for all."""
    sections = [s for _, _, s in _sections(source) if isinstance(s, dict)]
    layers = (item for s in sections for item in _object(s.get(_LAYERS)).items())
    of = {n.rstrip("*").rstrip("."): in_capitals(_object(v).get("quant_algo")) for n, v in layers}
    return of, [in_capitals(s.get("quant_algo")) for s in sections]


def _object(value: object) -> JSON:
    return value if isinstance(value, dict) else {}


def _group_entries(section: JSON, path: str) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Gives path, value and known values of the entries of groups that depend on the bits of the weights."""
    for group_name, group in _object(section.get("config_groups")).items():
        weights, inputs = (_object(_object(group).get(key)) for key in ("weights", "input_activations"))
        bits = weights.get("num_bits")
        if bits not in (4, 8):
            continue
        name, known = f"{path}.config_groups.{group_name}", _GROUPS[bits]
        w4a8 = bits == 4 and in_capitals(section.get("quant_algo")) == W4A8
        yield f"{name}.format", group.get("format"), known["format"]
        yield f"{name}.input_activations.num_bits", inputs.get("num_bits"), (8,) if w4a8 else (bits,)
        yield f"{name}.input_activations.strategy", inputs.get("strategy"), known["input_strategy"]
        for key in ("strategy", "block_structure"):
            yield f"{name}.weights.{key}", weights.get(key), known.get(key, (None,))


def kv_caches(source: Source) -> list[object]:
    """Gives the entries of the configs that ask for a quantized KV cache, of any format."""
    sections = ((path, section) for _, path, section in _sections(source) if isinstance(section, dict))
    entries = (e for path, section in sections for e in _entries(section, path))
    return [value for _, key, value in entries if key in _KV_CACHE and value]


def _refusal(source: Source, file: str, name: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{name} is {value!r:.200}", expected, file=source.directory / file, hint=_HINT)


def _sections(source: Source) -> Iterator[tuple[str, str, Any]]:
    """Gives the parts of the configs that describe the quantization, each with its file and its path there."""
    for prefix, config in zip(("", "text_config."), source.configs, strict=False):
        if config.get("quantization_config") is not None:
            yield CONFIG, f"{prefix}quantization_config", config["quantization_config"]
    if (section := read_hf_quant(source).get("quantization")) is not None:
        yield HF_QUANT, "quantization", section


def _entries(section: JSON, path: str) -> Iterator[tuple[str, str, object]]:
    """Gives path, key and value of every entry, nested entries first, since they name a module or group."""
    for key, value in section.items():
        if isinstance(value, dict) and key not in (*_KNOWN, *_KV_CACHE):
            yield from _entries(value, f"{path}.{key}")
    yield from ((f"{path}.{key}", key, value) for key, value in section.items())


def kv_cache(source: Source) -> str:
    """Names the KV cache that the configs ask for, as Model Optimizer does; "" for none. No weight depends on it."""
    return " and ".join(sorted({*map(_cache_name, kv_caches(source))}))


def _cache_name(claim: object) -> str:
    scheme = _object(claim)
    for name, known in KV_CACHES.items() if {"num_bits", "type"} <= scheme.keys() else ():
        if all(scheme.get(k) in (None, v) for k, v in known.items() if k != "strategy" or name == "FP8"):
            return name
    return claim.upper() if isinstance(claim, str) else f"{claim!r:.200}"


def other_kv_cache(source: Source) -> str:
    """Says which KV cache the configs ask for if it is not FP8; or ""."""
    return f"the KV cache is {name}, which changes no weight" if (name := kv_cache(source)) not in ("", "FP8") else ""


# ---------------------------------------------------------------- tensors
def tensor_refusal(source: Source, others: Iterable[str]) -> CheckpointError | None:
    """Makes the error about the first tensor that decodes another, among those that are no part of known weights."""
    found = next(factors(source, list(others)), None)
    if found is None:
        return None
    name, module = found
    observed = f"belongs to module {module!r:.200}, and readers would ignore it"
    expected, file = "NVFP4 and FP8 weights, and others in high precision", source.directory / source.places[name]
    return CheckpointError(observed, expected, file=file, tensor=name, hint=_HINT)


def factors(source: Source, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Finds the tensors by which others are scaled or ordered, each with its module."""
    coded = {name.rpartition(".")[0] for name in names if source.entry(name).tag in _CODES}
    for name in names:
        parent, _, last = name.rpartition(".")
        if match := _FACTOR.search(name):
            yield name, name[: match.start()]
        elif "scale" in last and parent in coded:
            yield name, parent
