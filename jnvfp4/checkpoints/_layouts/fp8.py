"""Decodes FP8 weights, which most published checkpoints have beside NVFP4 ones.

A weight ``M.weight``, F8_E4M3 [N, K], has one scale, a scale per row or one per 128x128 block; decoded it is the code
times the scale. Its activations may have a scale, ``M.input_scale``. Shapes of the scales in files of Model Optimizer:
[], [N] and [N/128, 1, K/128, 1], as vLLM's ModelOptFp8LinearMethod, ModelOptFp8PcPtLinearMethod and
ModelOptFp8PbWoLinearMethod read them; of compressed-tensors: [1], [N, 1] and [N/128, K/128]
(CompressedTensorsW8A8Fp8); of DeepSeek-V3: [N/128, K/128], under the name ``M.weight_scale_inv``, of DeepSeek-V4
``M.scale``, F8_E8M0. MXFP8 has a power of 2 per 32 elements: U8 or F8_E8M0 [N, K/32]. A stack of experts ``NAME``,
[E, N, K], has scales of these shapes after an axis of E, ``NAME_weight_scale`` or ``NAME_scale_inv``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .._files.errors import CheckpointError
from .._files.files import Rows
from .._files.safetensors import FLOATS, Planned
from .._files.source import Source, View
from .names import WEIGHT, is_stack, module_of

_SCALES = (".weight_scale", ".weight_scale_inv", ".scale")
_SCALES_OF_STACKS = ("_weight_scale", "_scale_inv", "_weight_scale_inv", "_scale")
_BLOCK, _MX_BLOCK = 128, 32
POWERS = ("U8", "F8_E8M0")  # dtypes of exponents of 2
_TAGS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True)
class Fp8Weight:
    """Describes an FP8 weight [N, K], or a stack of them [E, N, K], of a source.

    Attributes:
      source: the source, in which the weight is not decoded.
      entry: the codes.
      scale: the scales, in any of the shapes above.
      unit: the rows and columns that share a scale.
      activation: the name of the scale of the activations, if there is one.
    """

    source: Source
    entry: Planned
    scale: Planned
    unit: tuple[int, int]
    activation: str | None

    @property
    def granularity(self) -> str:
        """What has a scale of its own: "per tensor", "per channel", "128x128", or "MXFP8", where 32 elements have."""
        *_, n, k = self.entry.shape
        names = {(_BLOCK, _BLOCK): "128x128", (1, _MX_BLOCK): "MXFP8", (1, k): "per channel", (n, k): "per tensor"}
        return names[self.unit]

    @property
    def scales(self) -> np.ndarray:
        """The scales in float32, with an axis of rows and one of columns, in a stack after the axis of experts."""
        stored, shape = self.source.read(self.scale.name), self.entry.shape
        units = [-(-size // unit) for size, unit in zip(shape[-2:], self.unit, strict=True)]
        scales = powers(stored) if self.scale.tag in POWERS else stored.astype(np.float32)
        lead = shape[:-2] if scales.size > 1 else [1] * len(shape[:-2])
        return np.broadcast_to(scales.reshape(*lead, *units), (*shape[:-2], *units))

    def values(self, rows: slice = slice(None)) -> np.ndarray:
        """Decodes some rows, or some experts of a stack, to float32."""
        *lead, n, k = self.entry.shape
        factors = self.scales[rows] if lead else self.scales
        factors = factors[..., np.arange(n)[slice(None) if lead else rows] // self.unit[0], :]
        if factors.shape[-1] > 1:
            factors = np.repeat(factors, self.unit[1], axis=-1)[..., :k]
        with np.errstate(invalid="ignore"):  # a scale may be a signaling NaN
            return self.source.read(self.entry.name, rows).astype(np.float32) * factors

    def view(self, tag: str) -> View:
        """Shows the weight in the dtype ``tag``, in place of the codes and of both scales."""
        decoded = Planned(self.entry.name, tag, self.entry.shape)
        parts = (self.entry.name, self.scale.name, *([self.activation] if self.activation else []))
        rows = Rows(decoded.shape, decoded.dtype, lambda rows: self.values(rows).astype(decoded.dtype))
        return View(decoded, self.source, parts, lambda: rows)


def fp8_weights(source: Source) -> Iterator[Fp8Weight]:
    """Finds the FP8 weights that have a scale.

    Raises:
      CheckpointError: a scale has another shape or dtype.
    """
    for entry in source.entries():
        stacked = len(entry.shape) == 3 and is_stack(entry.name)
        if entry.tag != "F8_E4M3" or not (stacked or (len(entry.shape) == 2 and entry.name.endswith(WEIGHT))):
            continue
        module, suffixes = module_of(entry.name), _SCALES_OF_STACKS if stacked else _SCALES
        if scale := next((module + s for s in suffixes if module + s in source.places), None):
            activation = f"{module}{'_' if stacked else '.'}input_scale"
            unit = _unit(entry, source.entry(scale))
            named = activation if activation in source.places else None
            yield Fp8Weight(source, entry, source.entry(scale), unit, named)


def _unit(entry: Planned, scale: Planned) -> tuple[int, int]:
    *experts, n, k = entry.shape
    blocks = -(-n // _BLOCK), -(-k // _BLOCK)
    shapes: dict[tuple[int, ...], tuple[int, int]] = {
        blocks: (_BLOCK, _BLOCK),
        (blocks[0], 1, blocks[1], 1): (_BLOCK, _BLOCK),
        (n, 1): (1, k),
        (n,): (1, k),
        (): (n, k),
        **({(1, 1): (n, k)} if experts else {(1,): (n, k)}),
    }
    shapes = {(*experts, *shape): unit for shape, unit in shapes.items()}
    if experts:
        shapes |= {(): (n, k), (1,): (n, k)}
    if scale.tag in POWERS:
        shapes = (shapes if scale.tag != "U8" else {}) | {(*experts, n, -(-k // _MX_BLOCK)): (1, _MX_BLOCK)}
    if scale.shape not in shapes or scale.tag not in (*FLOATS, *POWERS) or not math.prod(entry.shape):
        expected = f"a float, one, {n} for rows, or {list(blocks)}, one for {_BLOCK}x{_BLOCK}; or U8 for {_MX_BLOCK}"
        raise CheckpointError(f"is {scale.tag}, has shape {list(scale.shape)}", expected, tensor=scale.name)
    return shapes[scale.shape]


def powers(e8m0: np.ndarray) -> np.ndarray:
    """Decodes exponents of 2, plus 127, to float32; 255 is NaN."""
    exponents = e8m0.view(np.uint8).astype(int)
    return np.where(exponents == 255, np.float32(np.nan), np.ldexp(np.float32(1), np.minimum(exponents, 254) - 127))


def dtype_of_origin(source: Source) -> str:
    """Gives the safetensors dtype that the model had before quantization according to its config; else BF16."""
    named = (config.get(key) for config in source.configs for key in ("dtype", "torch_dtype"))
    return next((_TAGS[name] for name in named if isinstance(name, str) and name in _TAGS), "BF16")
