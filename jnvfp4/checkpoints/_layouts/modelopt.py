"""Layout modelopt: of Model Optimizer, read by vLLM, SGLang and TensorRT-LLM."""

from ..._version import __version__
from ...spec import BLOCK
from .._files.safetensors import JSON
from .base import Layout, Parts, Quantization
from .loaders import Loader, by_ancestors, by_parts, by_prefix, by_substring, fused_entries, layer_entries

MIXED = "MIXED_PRECISION"
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")  # with activations in FP4, or in high precision
W4A8 = "W4A8_NVFP4_FP8"  # activations in FP8: their scale is amax / 448


class _ModelOpt(Layout):
    def config(self, q: Quantization) -> JSON:
        numbers = {"num_bits": 4, "type": "float", "group_size": BLOCK, "dynamic": False}
        inputs = {} if q.weight_only else {"input_activations": numbers}
        fp8 = {"num_bits": 8, "type": "float", "dynamic": False}
        cache = {"kv_cache_scheme": fp8 if q.kv_cache == "FP8" else q.kv_cache} if q.kv_cache else {}
        return {
            "quant_method": "modelopt",
            "quant_algo": ALGORITHMS[q.weight_only],
            "group_size": BLOCK,
            "ignore": q.ignore,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers, **inputs}},
            **cache,
        }

    def hf_quant(self, q: Quantization) -> JSON:
        return {
            "producer": {"name": "jnvfp4", "version": __version__},
            "quantization": {
                "quant_algo": ALGORITHMS[q.weight_only],
                "kv_cache_quant_algo": q.kv_cache or None,
                "group_size": BLOCK,
                "exclude_modules": q.ignore,
            },
        }

    def weight_only(self, algorithms: set[str], groups: object) -> bool | None:
        return algorithms == {ALGORITHMS[1]} if algorithms else None

    def ignore_entries(self, kept: set[str], quantized: set[str]) -> set[str]:
        return fused_entries(kept, quantized) | layer_entries(kept, quantized)


MODELOPT = _ModelOpt(
    name="modelopt",
    suffixes=Parts(".weight", ".weight_scale", ".weight_scale_2", ".input_scale"),
    meaning="decode",
    global_shape=(),
    kv_scale="{0}_proj.{0}_scale",  # by ``postprocess_state_dict`` in its export/quant_utils.py
    kv_caches=("FP8", "INT8", "NVFP4", "NVFP4_AFFINE"),
    unscaled_kv_cache=True,
    quant_method="modelopt",
    nvfp4={"quant_algo": ALGORITHMS},
    hf_quant_keys=("quant_algo", "group_size", "kv_cache_quant_algo", "exclude_modules"),
    loaders={
        "miles": Loader(by_prefix, lints=False),
        "vLLM": Loader(by_substring, asks_fused=True, linear="largest", experts="first"),
        "SGLang": Loader(by_parts, asks_fused=True, linear="largest", experts="first"),
        "TensorRT-LLM": Loader(by_ancestors, asks_fused=True),
    },
)
