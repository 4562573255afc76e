"""Describes what is asked of a layout: how it stores a weight, what its numbers mean, and how its loaders read configs.

Codes and block scales are the same bytes in all layouts; the global scale is stored as S_dec, S_enc or the amax.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from ...spec import Format
from .._files.errors import CheckpointError, Exit
from .._files.safetensors import JSON, Planned
from .._files.source import CONFIG, HF_QUANT, params_file, without_quantization
from .loaders import Loader, Reading, fused_module
from .names import KV_SCALE

FLOAT_MAX = np.float32(np.finfo(np.float32).max)
Meaning = Literal["decode", "encode", "amax"]
Shape = tuple[int, ...]
Peer = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # decodes codes, block scales and a global scale


class Parts(NamedTuple):
    """Names the tensors of one quantized weight; ``activation`` is None if the layout stores no activation scale."""

    codes: str
    scales: str
    global_scale: str
    activation: str | None = None


class Quantization(NamedTuple):
    """Says what a config is made for; only a layout that stores amaxes has the entries ``spec``.

    ``kv_cache`` is a name of Model Optimizer for the format, or "".
    """

    ignore: list[str]
    weight_only: bool
    kv_cache: str = ""
    spec: Mapping[str, object] = {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout(ABC):
    """Describes how one layout stores the weight ``M.weight`` of a module ``M``, and what its loaders expect.

    Attributes:
      name: the layout's name.
      suffixes: what the names of the tensors have after ``M``.
      scales_tag: safetensors dtype of the block scales.
      meaning: what number is stored as the global scale: S_dec, S_enc or the amax.
      global_shape: the shape of a global scale that is one number.
      kv_scale: the name of a scale of the KV cache in its attention module, with ``{0}`` for k or v.
      stacks: whether the layout can store all experts in one tensor.
      kv_caches: the KV caches that its configs can ask for, by their names in Model Optimizer.
      unscaled_kv_cache: whether its loaders have an FP8 KV cache without scales for it.
      quant_method: its name in ``quantization_config``, or the start of it.
      nvfp4: the entries of configs that say that weights are NVFP4, with their values.
      hf_quant_keys: the entries that loaders need in ``hf_quant_config.json``; none if they do not read that file, and
        need those of ``nvfp4`` in ``quantization_config``.
      loaders: its loaders by name.
      targets: how its loaders read the targets of the groups in a config, which alone decide what is quantized and how;
        None if an algorithm and the ignore list do.
    """

    name: str
    suffixes: Parts
    scales_tag: str = "F8_E4M3"
    meaning: Meaning
    global_shape: Shape = (1,)
    kv_scale: str = "{0}_scale"
    stacks: bool = True
    kv_caches: tuple[str, ...] = ()
    unscaled_kv_cache: bool = False
    quant_method: str
    nvfp4: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hf_quant_keys: tuple[str, ...] = ()
    loaders: Mapping[str, Loader]
    targets: Reading | None = None

    # ------------------------------------------------------------ tensors
    def stores(self, format: Format, stacked: bool) -> bool:
        """Tells whether the layout can store a weight, or a stack of experts, of this format."""
        rows = self.stores_amax and not stacked
        return not format.rht and format.amax_scope in (("tensor", "row") if rows else ("tensor",))

    @property
    def global_suffixes(self) -> tuple[str, ...]:
        """What names of global scales end in: of a weight, and of a stack of experts if the layout has them."""
        suffix = self.suffixes.global_scale
        return (suffix, suffix.replace(".", "_", 1)) if self.stacks else (suffix,)

    def parts(self, module: str, stacked: bool = False) -> Parts:
        """Names the tensors that store a module's weight. A stack of experts has no ``.weight`` in its name."""
        end = "_" if stacked else "."
        codes, scales, global_scale, activation = (s and module + end + s[1:] for s in self.suffixes)
        return Parts(module if stacked else str(codes), str(scales), str(global_scale), activation)

    def planned(self, parts: Parts, codes: Shape, scales: Shape, numbers: Shape, activation: bool) -> list[Planned]:
        """Describes these tensors, by the shapes of the codes, the block scales, and the global scale or another."""
        out = [
            Planned(parts.codes, "U8", codes),
            Planned(parts.scales, self.scales_tag, scales),
            Planned(parts.global_scale, "F32", numbers),
        ]
        return [*out, Planned(parts.activation, "F32", numbers)] if activation and parts.activation else out

    def kv_scale_name(self, name: str) -> str:
        """Names a scale of the KV cache as the layout does; another name is unchanged."""
        match = KV_SCALE.fullmatch(name)
        return match[1] + self.kv_scale.format(match[2]) if match else name

    # ------------------------------------------------------------ numbers
    @property
    def stores_amax(self) -> bool:
        """Whether global scales are amaxes, one per weight or row. Only this library reads them."""
        return self.meaning == "amax"

    def from_amax(self, amax: np.ndarray | float, e4m3_max: int = 448) -> np.ndarray:
        """Computes the global scale for an amax of a weight with block scales up to ``e4m3_max``.

        Returns:
          float32: the layout's shape for one number, otherwise the shape of ``amax``, [N] of rows or [E] of experts.
        """
        value = np.asarray(amax, np.float32)
        if not self.stores_amax:
            encode = encode_scale(value, e4m3_max)
            value = encode if self.meaning == "encode" else decode_scale(encode)
        return value.reshape(self.global_shape) if value.size == 1 else value

    def from_decode(self, decode: np.ndarray | float) -> np.ndarray:
        """Computes the scale of activations that is stored for S_dec."""
        return decode_scale(decode) if self.meaning == "encode" else np.asarray(decode, np.float32)

    def from_other(self, stored: np.ndarray, other: "Layout", e4m3_max: int = 448) -> np.ndarray:
        """Computes the scale that is stored for one of another layout."""
        if other.stores_amax:
            return self.from_amax(stored, e4m3_max)
        return stored if other.meaning == self.meaning else decode_scale(stored)

    def to_decode(self, stored: np.ndarray, e4m3_max: int = 448) -> np.ndarray:
        """Computes S_dec from what is stored."""
        stored = np.asarray(stored, np.float32)
        if self.meaning == "decode":
            return stored
        return decode_scale(encode_scale(stored, e4m3_max) if self.stores_amax else stored)

    def to_amax(self, stored: np.ndarray) -> np.ndarray:
        """Computes an amax with this S_dec, whatever E4M3 maximum the weight was quantized for."""
        if self.stores_amax:
            return np.asarray(stored, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # a damaged scale may have any size, or be a signaling NaN
            return self.to_decode(stored) * np.float32(2688)

    # ------------------------------------------------------------ configs
    def config_files(self, config: JSON | None, q: Quantization, params: JSON | None = None) -> dict[str, JSON]:
        """Makes the configs of a quantized model by file name; one without a ``config.json`` stays without.

        Beside Mistral's ``params.json`` vLLM takes any ``config.json`` for that of the model, so there is none.
        """
        files: dict[str, JSON] = {}
        if params is not None and not self.stores_amax:
            files |= params_file(params, None if self.hf_quant_keys else self.config(q))
        elif config is not None:
            files[CONFIG] = {**without_quantization(config), "quantization_config": self.config(q)}
        hf_quant = self.hf_quant(q)
        return files if hf_quant is None else {**files, HF_QUANT: hf_quant}

    @abstractmethod
    def config(self, q: Quantization) -> JSON:
        """Makes the ``quantization_config`` of config.json."""

    def hf_quant(self, q: Quantization) -> JSON | None:
        """Makes ``hf_quant_config.json``, if the loaders read it."""
        return None

    def is_named_by(self, config: JSON) -> bool:
        """Tells whether a ``quantization_config`` says that weights are stored so."""
        named = all(str(config.get(key)).upper() in map(str.upper, known) for key, known in self.nvfp4.items())
        return named and config.get("quant_method") == self.quant_method

    def weight_only(self, algorithms: set[str], groups: Sequence[JSON]) -> bool | None:
        """Tells whether configs with these algorithms and groups leave all activations in high precision.

        None if they do not say it.
        """
        return None

    def ignore_entries(self, kept: set[str], quantized: set[str]) -> set[str]:
        """Chooses the entries of the ignore list."""
        return kept

    def ignore_list(self, kept: Collection[str], quantized: Collection[str]) -> list[str]:
        """Makes the ignore list, which names the unquantized modules to loaders.

        It has ``lm_head`` unless that is quantized: a loader rejects an empty list, and a tied head has no tensor.

        Raises:
          CheckpointError: a loader would keep a module that is quantized, or quantize a kept one.
        """
        listed = {*kept} | {"lm_head"} - {*quantized} or {"lm_head"}
        entries = sorted(self.ignore_entries(listed, {*quantized}))
        readings = {loader[:2]: name for name, loader in reversed([*self.loaders.items()])}  # each once
        for (reads, asks_fused), name in reversed([*readings.items()]):
            for module, wanted in [*((m, True) for m in kept), *((m, False) for m in quantized)]:
                asked = fused_module(module) if asks_fused else module
                entry = next((e for e in entries if reads(e, asked)), None)
                if (entry is not None) == wanted:
                    continue
                does = "would quantize it" if wanted else f"would keep it because of {entry!r}"
                observed = f"module {module!r} is {'kept' if wanted else 'quantized'}, but {name} {does}"
                hint = "keep or quantize both, or choose another --format"
                raise CheckpointError(observed, "the same reading by every loader", code=Exit.CONFLICT, hint=hint)
        return entries

    # ------------------------------------------------------------ other readers
    def peer(self, config: JSON | None) -> Peer | None:
        """Returns what decodes a weight to bfloat16 in software of others; None if it cannot, or is not installed."""
        return None


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
