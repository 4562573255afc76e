"""Makes the configs beside the shards, which tell loaders the layout and what is quantized."""

from ...spec import BLOCK
from .._files.safetensors import JSON
from .layouts import LayoutName

PACKED = "nvfp4-pack-quantized"  # the format of compressed-tensors
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")  # of Model Optimizer: with activations in FP4, or in high precision


def quantization_config(
    layout: LayoutName, ignore: list[str], *, weight_only: bool, fp8_kv_cache: bool = False, te: JSON | None = None
) -> JSON:
    """Makes the ``quantization_config`` of config.json.

    Args:
      layout: the layout of the checkpoint.
      ignore: the entries of the ignore list.
      weight_only: whether activations stay in high precision.
      fp8_kv_cache: whether the config asks for an FP8 KV cache.
      te: the further entries that layout te has.
    """
    if layout == "te":
        return {"quant_method": "jnvfp4", "group_size": BLOCK, "ignore": ignore, **(te or {})}
    if layout == "modelopt":
        return _modelopt(ignore, weight_only, fp8_kv_cache)
    return _compressed_tensors(ignore, weight_only, fp8_kv_cache)


def _modelopt(ignore: list[str], weight_only: bool, fp8_kv_cache: bool) -> JSON:
    numbers: JSON = {"num_bits": 4, "type": "float", "group_size": BLOCK, "dynamic": False}
    group: JSON = {"targets": ["Linear"], "weights": numbers}
    if not weight_only:
        group["input_activations"] = numbers
    config: JSON = {
        "quant_method": "modelopt",
        "quant_algo": _algorithm(weight_only),
        "group_size": BLOCK,
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }
    if fp8_kv_cache:
        config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    return config


# The only KV cache besides none that a compressed-tensors checkpoint is written with or taken over from.
FP8_KV_CACHE: JSON = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def _compressed_tensors(ignore: list[str], weight_only: bool, fp8_kv_cache: bool) -> JSON:
    weights: JSON = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": BLOCK,
        "strategy": "tensor_group",
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    inputs = None if weight_only else {**weights, "dynamic": "local", "observer": "static_minmax"}
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "format": PACKED, "weights": weights, "input_activations": inputs}
        },
        "ignore": ignore,
        "kv_cache_scheme": FP8_KV_CACHE if fp8_kv_cache else None,
    }


def _algorithm(weight_only: bool) -> str:
    return ALGORITHMS[weight_only]


def hf_quant_config(ignore: list[str], version: str, *, weight_only: bool, fp8_kv_cache: bool = False) -> JSON:
    """Makes the ``hf_quant_config.json`` of layout modelopt, of which loaders need every key."""
    return {
        "producer": {"name": "jnvfp4", "version": version},
        "quantization": {
            "quant_algo": _algorithm(weight_only),
            "kv_cache_quant_algo": "FP8" if fp8_kv_cache else None,
            "group_size": BLOCK,
            "exclude_modules": ignore,
        },
    }
