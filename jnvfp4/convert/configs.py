"""What the configs beside the shards say of each layout."""

from typing import Any

from jnvfp4.convert.layouts import LayoutName
from jnvfp4.spec import BLOCK

JSON = dict[str, Any]


def quantization_config(
    layout: LayoutName, ignore: list[str], *, weight_only: bool, fp8_kv_cache: bool = False, own: JSON | None = None
) -> JSON:
    """`quantization_config` of config.json.

    Args:
      layout: of the checkpoint.
      ignore: modules that loaders must not take for quantized ones.
      weight_only: whether activations stay in high precision.
      fp8_kv_cache: whether the config asks for an FP8 KV cache.
      own: further entries of layout te.
    """
    if layout == "te":
        return {"quant_method": "jnvfp4", "group_size": BLOCK, "ignore": ignore, **(own or {})}
    if layout == "modelopt":
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
    name = "nvfp4-pack-quantized"
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
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "format": name, "weights": weights, "input_activations": inputs}
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _algorithm(weight_only: bool) -> str:
    return "W4A16_NVFP4" if weight_only else "NVFP4"


def hf_quant_config(ignore: list[str], version: str, *, weight_only: bool, fp8_kv_cache: bool = False) -> JSON:
    """`hf_quant_config.json` of layout modelopt; loaders demand every key of it."""
    return {
        "producer": {"name": "jnvfp4", "version": version},
        "quantization": {
            "quant_algo": _algorithm(weight_only),
            "kv_cache_quant_algo": "FP8" if fp8_kv_cache else None,
            "group_size": BLOCK,
            "exclude_modules": ignore,
        },
    }
