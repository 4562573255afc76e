"""Describes the layouts: the names, shapes and meaning of the tensors that store a quantized weight.

modelopt: of Model Optimizer, read by vLLM, SGLang and TensorRT-LLM. compressed-tensors: of llm-compressor, read by
transformers too. te: of this library alone, where a weight may have an amax per row. Codes and block scales are
the same bytes in all three; the global scale is stored as S_dec, S_enc or the amax.
"""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

FLOAT_MAX = np.float32(np.finfo(np.float32).max)
Global = Literal["decode", "encode", "amax"]
LayoutName = Literal["modelopt", "compressed-tensors", "te"]


@dataclass(frozen=True)
class Layout:
    """Describes how one layout stores the weight ``M.weight`` of a module ``M``.

    Attributes:
      name: the layout's name.
      codes, scales, global_scale: suffixes of the packed codes, the block scales and the global scale, after ``M``.
      scales_tag: safetensors dtype of the block scales.
      meaning: what number is stored as the global scale: S_dec, S_enc or the amax.
      global_shape: the shape of a global scale that is one number.
      activation: suffix of the activations' scale, or None if the layout stores none.
    """

    name: LayoutName
    codes: str
    scales: str
    global_scale: str
    scales_tag: str
    meaning: Global
    global_shape: tuple[int, ...]
    activation: str | None

    @property
    def stacks(self) -> bool:
        """Whether the layout can store all experts in one tensor."""
        return self.name != "compressed-tensors"

    @property
    def global_suffixes(self) -> tuple[str, ...]:
        """What names of global scales end in: of a weight, and of a stack of experts if the layout has them."""
        return (self.global_scale, *([self.global_scale.replace(".", "_", 1)] if self.stacks else []))

    def parts(self, module: str, stacked: bool = False) -> "Parts":
        """Names the tensors that store a module's weight. A stack of experts has no ``.weight`` in its name."""
        prefix = f"{module}_" if stacked else f"{module}."
        activation = self.activation and prefix + self.activation[1:]
        codes = module if stacked else module + self.codes
        return Parts(codes, prefix + self.scales[1:], prefix + self.global_scale[1:], activation)


@dataclass(frozen=True)
class Parts:
    """Names the tensors of one quantized weight; ``activation`` is None if the layout stores no activation scale."""

    codes: str
    scales: str
    global_scale: str
    activation: str | None


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


def names_global_scale(name: str) -> bool:
    """Tells whether a reader takes a tensor with this name for a global scale, in any layout."""
    return any(name.endswith(layout.global_suffixes) for layout in LAYOUTS.values())


_KV_SCALE = re.compile(r"((?:.*?\.)?)(?:[kv]_proj\.)?([kv])_scale")


def is_kv_scale(name: str) -> bool:
    """Tells whether a tensor is a scale of the KV cache."""
    return _KV_SCALE.fullmatch(name) is not None


def kv_scale_in(layout: Layout, name: str) -> str:
    """Names a scale of the KV cache as a layout does; another name is unchanged.

    Model Optimizer has ``self_attn.k_proj.k_scale`` (``postprocess_state_dict`` in its export/quant_utils.py),
    compressed-tensors ``self_attn.k_scale``; in both it is a decode scale.
    """
    if (match := _KV_SCALE.fullmatch(name)) is None:
        return name
    return f"{match[1]}{match[2]}_proj.{match[2]}_scale" if layout is MODELOPT else f"{match[1]}{match[2]}_scale"


# ---------------------------------------------------------------- global scales
# Computed with NumPy: XLA replaces divisions by multiplications with a reciprocal, which rounds differently. A stored
# scale may be a signaling NaN, which is an invalid operand.
def encode_scale(amax: np.ndarray | float, e4m3_max: int = 448) -> np.ndarray:
    """Computes S_enc = min(6 * e4m3_max / amax, FLT_MAX) in float32; 1 for an amax of 0 or infinity."""
    a = np.abs(np.asarray(amax, np.float32))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        s = np.minimum(np.float32(6 * e4m3_max) / a, FLOAT_MAX)
    return np.where((a == 0) | (s == 0), np.float32(1), s).astype(np.float32)


def decode_scale(encode: np.ndarray | float) -> np.ndarray:
    """Computes S_dec = 1 / S_enc in float32, or S_enc = 1 / S_dec; at most FLT_MAX, as 1 / (1 / FLT_MAX) overflows."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return np.minimum(np.float32(1) / np.asarray(encode, np.float32), FLOAT_MAX).astype(np.float32)


def global_scale_of(layout: Layout, amax: np.ndarray | float, e4m3_max: int = 448) -> np.ndarray:
    """Computes the global scale that a layout stores for an amax of a weight with block scales up to ``e4m3_max``.

    Returns:
      float32: the layout's shape for one number, otherwise the shape of ``amax``, [N] of rows or [E] of experts.
    """
    value = np.asarray(amax, np.float32)
    if layout.meaning != "amax":
        encode = encode_scale(value, e4m3_max)
        value = encode if layout.meaning == "encode" else decode_scale(encode)
    return value.reshape(layout.global_shape) if value.size == 1 else value


def decode_scale_of(layout: Layout, global_scale: np.ndarray, e4m3_max: int = 448) -> np.ndarray:
    """Computes S_dec from the global scale that a layout stores."""
    global_scale = np.asarray(global_scale, np.float32)
    if layout.meaning == "decode":
        return global_scale
    if layout.meaning == "encode":
        return decode_scale(global_scale)
    return decode_scale(encode_scale(global_scale, e4m3_max))
