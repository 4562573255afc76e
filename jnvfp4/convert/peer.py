"""Weights as compressed-tensors decodes them, where it is installed."""

from collections.abc import Callable
from importlib.util import find_spec

import ml_dtypes
import numpy as np

from jnvfp4.convert.layouts import COMPRESSED_TENSORS
from jnvfp4.convert.stored import Stored

Decoder = Callable[[str], np.ndarray]  # of a module, to bfloat16


def peer_decoder(stored: Stored) -> Decoder | None:
    """None if the layout or the config is not theirs, or they are not installed."""
    config = (stored.source.config or {}).get("quantization_config")
    if (
        stored.layout is not COMPRESSED_TENSORS
        or not config
        or not all(map(find_spec, ("torch", "compressed_tensors")))
    ):
        return None
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    schemes = [*QuantizationConfig.model_validate(config).config_groups.values()]
    if len(schemes) != 1:  # which weights have which is not looked into
        return None
    scheme = schemes[0]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)

    def decode(module: str) -> np.ndarray:
        w = stored.weight(module)
        state = {
            "weight_packed": torch.from_numpy(w.codes.copy()),
            "weight_scale": torch.from_numpy(w.scales.copy()).view(torch.float8_e4m3fn),
            "weight_global_scale": torch.from_numpy(w.stored.reshape(1).copy()),
        }
        decoded = compressor.decompress(state, scheme)["weight"].to(torch.bfloat16)
        return decoded.view(torch.int16).numpy().view(ml_dtypes.bfloat16)

    return decode
