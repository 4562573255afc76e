"""Makes the configs beside the shards, which describe the layout and the quantized modules to loaders."""

from collections.abc import Iterable, Mapping

from ..._version import __version__
from ...spec import BLOCK
from .._files.safetensors import JSON, Planned
from .._files.source import CONFIG, HF_QUANT, INDEX
from .layouts import LayoutName

PACKED = "nvfp4-pack-quantized"  # the format of compressed-tensors
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")  # of Model Optimizer: with activations in FP4, or in high precision
# The only KV cache besides none that a compressed-tensors checkpoint is written with or taken over from.
FP8_KV_CACHE: JSON = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def quantization_config(
    layout: LayoutName, ignore: list[str], *, weight_only: bool, fp8_kv_cache: bool = False, te: JSON | None = None
) -> JSON:
    """Makes the ``quantization_config`` of config.json; ``te`` has the entries that only layout te has."""
    if layout == "te":
        return {"quant_method": "jnvfp4", "group_size": BLOCK, "ignore": ignore, **(te or {})}
    if layout == "modelopt":
        numbers = {"num_bits": 4, "type": "float", "group_size": BLOCK, "dynamic": False}
        inputs = {} if weight_only else {"input_activations": numbers}
        cache = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}} if fp8_kv_cache else {}
        return {
            "quant_method": "modelopt",
            "quant_algo": ALGORITHMS[weight_only],
            "group_size": BLOCK,
            "ignore": ignore,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers, **inputs}},
            **cache,
        }
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": BLOCK,
        "strategy": "tensor_group",
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    activations = None if weight_only else {**weights, "dynamic": "local", "observer": "static_minmax"}
    group = {"targets": ["Linear"], "format": PACKED, "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": FP8_KV_CACHE if fp8_kv_cache else None,
    }


def without_quantization(config: JSON) -> JSON:
    """Leaves out how a source was quantized, of a multimodal model also where it describes the language model."""
    out = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(text := out.get("text_config"), dict):
        out["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    return out


def config_files(
    layout: LayoutName,
    config: JSON | None,
    ignore: list[str],
    *,
    weight_only: bool,
    fp8_kv_cache: bool = False,
    te: JSON | None = None,
) -> dict[str, JSON]:
    """Makes the configs of a quantized model by file name; one without a ``config.json`` stays without."""
    files: dict[str, JSON] = {}
    if config is not None:
        quantization = quantization_config(layout, ignore, weight_only=weight_only, fp8_kv_cache=fp8_kv_cache, te=te)
        files[CONFIG] = {**without_quantization(config), "quantization_config": quantization}
    if layout == "modelopt":
        files[HF_QUANT] = {  # loaders need every key
            "producer": {"name": "jnvfp4", "version": __version__},
            "quantization": {
                "quant_algo": ALGORITHMS[weight_only],
                "kv_cache_quant_algo": "FP8" if fp8_kv_cache else None,
                "group_size": BLOCK,
                "exclude_modules": ignore,
            },
        }
    return files


def index_file(shards: Mapping[str, Iterable[Planned]]) -> dict[str, JSON]:
    """Makes the index of the tensors in several shards, by file name; one shard has none."""
    if len(shards) == 1:
        return {}
    places = {p.name: (shard, p.nbytes) for shard, tensors in shards.items() for p in tensors}
    size = sum(nbytes for _, nbytes in places.values())
    return {INDEX: {"metadata": {"total_size": size}, "weight_map": {n: places[n][0] for n in sorted(places)}}}
