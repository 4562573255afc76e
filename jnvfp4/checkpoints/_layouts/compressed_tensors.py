"""Layout compressed-tensors: of llm-compressor, read by transformers too."""

from collections.abc import Sequence
from importlib.util import find_spec

import ml_dtypes
import numpy as np

from ...spec import BLOCK
from .._files.safetensors import JSON
from .base import Layout, Parts, Peer, Quantization
from .loaders import Loader, by_expression

PACKED = "nvfp4-pack-quantized"
# By their names in Model Optimizer: the KV caches that are written, or taken over from a checkpoint.
_FLOAT: JSON = {"type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
KV_CACHES: dict[str, JSON] = {"FP8": {"num_bits": 8, **_FLOAT}, "NVFP4": {"num_bits": 4, **_FLOAT}}


class _CompressedTensors(Layout):
    def config(self, q: Quantization) -> JSON:
        weights = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "group_size": BLOCK,
            "strategy": "tensor_group",
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn",
        }
        activations = None if q.weight_only else {**weights, "dynamic": "local", "observer": "static_minmax"}
        group = {"targets": ["Linear"], "format": PACKED, "weights": weights, "input_activations": activations}
        return {
            "quant_method": "compressed-tensors",
            "format": PACKED,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": q.ignore,
            "kv_cache_scheme": KV_CACHES.get(q.kv_cache),
        }

    def weight_only(self, algorithms: object, groups: Sequence[JSON]) -> bool | None:
        return all(g.get("input_activations") is None for g in groups) if groups else None

    def peer(self, config: JSON | None) -> Peer | None:
        if not config or not all(map(find_spec, ("torch", "compressed_tensors"))):
            return None
        import torch
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig

        schemes = [*QuantizationConfig.model_validate(config).config_groups.values()]
        if len(schemes) != 1:  # this does not find out which weights have which scheme
            return None
        scheme = schemes[0]
        compressor = BaseCompressor.get_value_from_registry(scheme.format)

        def decode(codes: np.ndarray, scales: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
            state = {
                "weight_packed": torch.from_numpy(codes.copy()),
                "weight_scale": torch.from_numpy(scales.copy()).view(torch.float8_e4m3fn),
                "weight_global_scale": torch.from_numpy(global_scale.reshape(1).copy()),
            }
            decoded = compressor.decompress(state, scheme)["weight"].to(torch.bfloat16)
            return decoded.view(torch.int16).numpy().view(ml_dtypes.bfloat16)

        return decode


COMPRESSED_TENSORS = _CompressedTensors(
    name="compressed-tensors",
    suffixes=Parts(".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale"),
    meaning="encode",
    stacks=False,
    kv_caches=(*KV_CACHES,),
    quant_method="compressed-tensors",
    nvfp4={"format": (PACKED,)},
    loaders={
        "compressed-tensors": Loader(by_expression),
        "vLLM": Loader(by_expression, lints=False, linear="smallest", experts="first"),
        "SGLang": Loader(by_expression, lints=False, linear="smallest", experts="first", equal_if_weight_only=True),
    },
    targets=by_expression,
)
