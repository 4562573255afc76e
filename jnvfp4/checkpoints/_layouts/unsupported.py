"""Finds what a checkpoint holds besides NVFP4 weights and tensors in high precision, which no reader here applies.

Software that mixes formats stores FP8 weights with a scale beside each, factors of AWQ, or scales of a KV cache. To
ignore them gives wrong values without an error.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from .._files.errors import CheckpointError
from .._files.safetensors import JSON
from .._files.source import CONFIG, HF_QUANT, Source, read_hf_quant
from .configs import ALGORITHMS, FP8_KV_CACHE, PACKED

_HINT = "export the model again with NVFP4 alone, or read it with the software that wrote it"
# The values of entries that say how tensors are stored, wherever they are in a config. null is known too.
_KNOWN: Mapping[str, tuple[object, ...]] = {
    "quant_algo": ALGORITHMS,
    "num_bits": (4,),
    "type": ("float",),
    "strategy": ("tensor_group",),
    "format": (PACKED, "dense"),  # dense: of sparsity_config
    "pre_quant_scale": (False,),
    "transform_config": ({}, {"config_groups": {}}),
}
_KV_CACHE = ("kv_cache_quant_algo", "kv_cache_scheme")
# Ends of names. Shorter ones would match parameters of models, such as ``layer_scale`` or ``v_bias``.
_FACTOR = re.compile(
    r"(?:^|[._])(?:weight_scale(?:_inv)?|input_scale|pre_quant_scale|weight_zero_point|weight_g_idx)$"
    r"|(?:^|\.)(?:output_scale|[qkv]_scale|kv_scale|svdquant_lora_[ab])$"
)
_CODES = ("U8", "I8", "F8_E4M3", "F8_E5M2")  # dtypes of numbers that a tensor beside them may scale


# ---------------------------------------------------------------- configs
def config_refusal(source: Source) -> CheckpointError | None:
    """Makes the error about the first entry of the configs that says another format than NVFP4; None without one."""
    for file, path, section in _sections(source):
        if not isinstance(section, dict):
            return _refusal(source, file, path, section, "an object")
        for name, key, value in _entries(section, path):
            if key in _KV_CACHE and not _is_known_cache(value):
                return _refusal(source, file, name, value, "FP8 or none")
            if value is not None and key in _KNOWN and value not in _KNOWN[key]:
                return _refusal(source, file, name, value, " or ".join(map(repr, _KNOWN[key])))
    return None


def has_fp8_kv_cache(source: Source) -> bool:
    """Tells whether the configs ask for an FP8 KV cache; ``config_refusal`` is about those that ask for another."""
    sections = ((path, section) for _, path, section in _sections(source) if isinstance(section, dict))
    entries = (e for path, section in sections for e in _entries(section, path))
    return any(key in _KV_CACHE and value for _, key, value in entries)


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


def _is_known_cache(claim: object) -> bool:
    """Tells whether an entry asks for no KV cache, or for one that both layouts can describe."""
    if not isinstance(claim, dict) or not claim:
        return not claim or claim == "FP8"
    return {"num_bits", "type"} <= claim.keys() and all(claim.get(k) in (None, v) for k, v in FP8_KV_CACHE.items())


# ---------------------------------------------------------------- tensors
def tensor_refusal(source: Source, others: Iterable[str]) -> CheckpointError | None:
    """Makes the error about the first tensor that decodes another, among those that are no part of NVFP4 weights."""
    found = next(factors(source, list(others)), None)
    if found is None:
        return None
    name, module = found
    observed = f"belongs to module {module!r:.200}, and readers would ignore it"
    expected, file = "NVFP4 weights, and others in high precision", source.directory / source.places[name]
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
