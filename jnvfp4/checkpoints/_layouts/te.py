"""Layout te: of this library alone, where a weight may have an amax per row."""

from ...spec import BLOCK
from .._files.safetensors import JSON
from .base import Layout, Parts, Quantization
from .loaders import Loader, by_prefix, fused_entries


class _Te(Layout):
    def config(self, q: Quantization) -> JSON:
        return {"quant_method": "jnvfp4", "group_size": BLOCK, "ignore": q.ignore, **q.spec}

    def ignore_entries(self, kept: set[str], quantized: set[str]) -> set[str]:
        return fused_entries(kept, quantized)


TE = _Te(
    name="te",
    suffixes=Parts(".weight", ".weight_scale_inv", ".weight_amax"),
    scales_tag="U8",
    meaning="amax",
    quant_method="jnvfp4",
    loaders={"jnvfp4": Loader(by_prefix)},
)
