"""Names and meaning of the tensors of a quantized weight in each layout.

modelopt: Model Optimizer, read by vLLM, SGLang and TensorRT-LLM. compressed-tensors: llm-compressor and transformers.
te: this library's own, with an amax for each row if need be. Codes and block scales are the same bytes in all three;
the global is S_dec, S_enc or the amax.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

FLOAT_MAX = np.float32(np.finfo(np.float32).max)
Global = Literal["decode", "encode", "amax"]
LayoutName = Literal["modelopt", "compressed-tensors", "te"]


@dataclass(frozen=True)
class Layout:
    """How one layout names and stores what a weight `M.weight` becomes.

    Attributes:
      codes, scales, scale: suffixes of packed codes, block scales and the global, after `M`.
      scales_tag: safetensors dtype of the block scales.
      meaning: what the global is.
      global_shape: its shape, where it is one number.
      activation: suffix of the activation's scale, or None.
    """

    name: LayoutName
    codes: str
    scales: str
    scale: str
    scales_tag: str
    meaning: Global
    global_shape: tuple[int, ...]
    activation: str | None

    @property
    def stacks(self) -> bool:
        """Whether experts may be one tensor."""
        return self.name != "compressed-tensors"

    def parts(self, module: str, stacked: bool = False) -> "Parts":
        """Names of what a weight becomes. A stack of experts has no `.weight` in its name."""
        if not stacked:
            return Parts(*(module + s for s in (self.codes, self.scales, self.scale, self.activation or "")))
        suffixes = (self.scales, self.scale, self.activation or "")
        return Parts(module, *(module + s.replace(".", "_", 1) for s in suffixes))


@dataclass(frozen=True)
class Parts:
    """Names of the tensors of one quantized weight; `activation` means nothing where the layout has none."""

    codes: str
    scales: str
    scale: str
    activation: str


MODELOPT = Layout("modelopt", ".weight", ".weight_scale", ".weight_scale_2", "F8_E4M3", "decode", (), ".input_scale")
COMPRESSED_TENSORS = Layout(
    "compressed-tensors",
    ".weight_packed",
    ".weight_scale",
    ".weight_global_scale",
    "F8_E4M3",
    "encode",
    (1,),
    ".input_global_scale",
)
TE = Layout("te", ".weight", ".weight_scale_inv", ".weight_amax", "U8", "amax", (1,), None)
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (MODELOPT, COMPRESSED_TENSORS, TE)}


# ---------------------------------------------------------------- globals, on the host: IEEE division, no XLA rewriting
def encode_scale(amax: np.ndarray | float, e4m3_max: int = 448) -> np.ndarray:
    """S_enc = min(6 * e4m3_max / amax, FLT_MAX), 1 for an amax of 0 or infinity; float32."""
    a = np.abs(np.asarray(amax, np.float32))
    with np.errstate(divide="ignore", over="ignore"):
        s = np.minimum(np.float32(6 * e4m3_max) / a, FLOAT_MAX)
    return np.where((a == 0) | (s == 0), np.float32(1), s).astype(np.float32)


def decode_scale(encode: np.ndarray | float) -> np.ndarray:
    """S_dec = 1 / S_enc, float32; also S_enc = 1 / S_dec. At most FLT_MAX: 1 / (1 / FLT_MAX) is beyond float32."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.minimum(np.float32(1) / np.asarray(encode, np.float32), FLOAT_MAX).astype(np.float32)


def global_of(
    layout: Layout, amax: np.ndarray | float, e4m3_max: int = 448, zero: np.floating | float = 1.0
) -> np.ndarray:
    """What the layout stores for an amax: a number in its shape, or one for each row. `zero` is S_enc of amax 0."""
    amax = np.asarray(amax, np.float32)
    if layout.meaning == "amax":
        value = amax
    else:
        encode = np.where(amax == 0, np.float32(zero), encode_scale(amax, e4m3_max))
        value = encode if layout.meaning == "encode" else decode_scale(encode)
    return value.reshape(layout.global_shape) if value.size == 1 else value


def decode_scale_of(layout: Layout, stored: np.ndarray, e4m3_max: int = 448) -> np.ndarray:
    """S_dec from what the layout stores; [] and [1] are one number."""
    stored = np.asarray(stored, np.float32)
    if layout.meaning == "decode":
        return stored
    if layout.meaning == "encode":
        return decode_scale(stored)
    return decode_scale(encode_scale(stored, e4m3_max))
