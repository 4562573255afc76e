"""Makes the files beside the shards: the configs, which describe the quantized modules to loaders, and the index."""

from collections.abc import Iterable, Mapping

from .._files.safetensors import JSON, Planned
from .._files.source import CONFIG, HF_QUANT, INDEX
from .base import Layout, Quantization


def without_quantization(config: JSON) -> JSON:
    """Leaves out how a source was quantized, of a multimodal model also where it describes the language model."""
    out = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(text := out.get("text_config"), dict):
        out["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    return out


def config_files(layout: Layout, config: JSON | None, quantization: Quantization) -> dict[str, JSON]:
    """Makes the configs of a quantized model by file name; one without a ``config.json`` stays without."""
    files: dict[str, JSON] = {}
    if config is not None:
        files[CONFIG] = {**without_quantization(config), "quantization_config": layout.config(quantization)}
    if hf_quant := layout.hf_quant(quantization):
        files[HF_QUANT] = hf_quant
    return files


def index_file(shards: Mapping[str, Iterable[Planned]]) -> dict[str, JSON]:
    """Makes the index of the tensors in several shards, by file name; one shard has none."""
    if len(shards) == 1:
        return {}
    places = {p.name: (shard, p.nbytes) for shard, tensors in shards.items() for p in tensors}
    size = sum(nbytes for _, nbytes in places.values())
    return {INDEX: {"metadata": {"total_size": size}, "weight_map": {n: places[n][0] for n in sorted(places)}}}
