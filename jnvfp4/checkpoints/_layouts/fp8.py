"""Decodes FP8 weights, which most published checkpoints have beside NVFP4 ones.

A weight ``M.weight``, F8_E4M3 [N, K], has one scale, a scale per row or one per 128x128 block; decoded it is the code
times the scale. Its activations may have a scale, ``M.input_scale``. Shapes of the scales in files of Model Optimizer:
[], [N] and [N/128, 1, K/128, 1], as vLLM's ModelOptFp8LinearMethod, ModelOptFp8PcPtLinearMethod and
ModelOptFp8PbWoLinearMethod read them; of compressed-tensors: [1], [N, 1] and [N/128, K/128]
(CompressedTensorsW8A8Fp8); of DeepSeek-V3: [N/128, K/128], under the name ``M.weight_scale_inv``.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from .._files.errors import CheckpointError
from .._files.files import Rows
from .._files.safetensors import FLOATS, Planned
from .._files.source import Source, View
from .names import WEIGHT, module_of

FP8_SCALE_INV = ".weight_scale_inv"
_SCALES = (".weight_scale", FP8_SCALE_INV)
_BLOCK = 128
_TAGS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True)
class Fp8Weight:
    """Describes an FP8 weight [N, K] of a source.

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
        """What has a scale of its own: "per tensor", "per channel" or "128x128"."""
        n, k = self.entry.shape
        return "per tensor" if self.unit == (n, k) else "per channel" if self.unit == (1, k) else "128x128"

    @property
    def scales(self) -> np.ndarray:
        """The scales in float32, with an axis of rows and one of columns."""
        n, k = (-(-size // unit) for size, unit in zip(self.entry.shape, self.unit, strict=True))
        return self.source.read(self.scale.name).astype(np.float32).reshape(n, k)

    def values(self, rows: slice = slice(None)) -> np.ndarray:
        """Decodes some rows to float32."""
        factors = self.scales[np.arange(self.entry.shape[0])[rows] // self.unit[0]]
        if factors.shape[1] > 1:
            factors = np.repeat(factors, self.unit[1], axis=1)[:, : self.entry.shape[1]]
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
        if entry.tag != "F8_E4M3" or len(entry.shape) != 2 or not entry.name.endswith(WEIGHT):
            continue
        module = module_of(entry.name)
        if scale := next((module + s for s in _SCALES if module + s in source.places), None):
            activation = f"{module}.input_scale"
            unit = _unit(entry, source.entry(scale))
            named = activation if activation in source.places else None
            yield Fp8Weight(source, entry, source.entry(scale), unit, named)


def _unit(entry: Planned, scale: Planned) -> tuple[int, int]:
    n, k = entry.shape
    blocks = -(-n // _BLOCK), -(-k // _BLOCK)
    shapes: dict[tuple[int, ...], tuple[int, int]] = {
        blocks: (_BLOCK, _BLOCK),
        (blocks[0], 1, blocks[1], 1): (_BLOCK, _BLOCK),
        (n, 1): (1, k),
        (n,): (1, k),
        (): (n, k),
        (1,): (n, k),
    }
    if scale.shape not in shapes or scale.tag not in FLOATS or not math.prod(entry.shape):
        expected = f"a float, one, {n} for rows, or {list(blocks)}, one for {_BLOCK}x{_BLOCK}"
        raise CheckpointError(f"is {scale.tag}, has shape {list(scale.shape)}", expected, tensor=scale.name)
    return shapes[scale.shape]


def dtype_of_origin(source: Source) -> str:
    """Gives the safetensors dtype that the model had before quantization according to its config; else BF16."""
    named = (config.get(key) for config in source.configs for key in ("dtype", "torch_dtype"))
    return next((_TAGS[name] for name in named if isinstance(name, str) and name in _TAGS), "BF16")


def fp8_decoded(source: Source, weights: Iterable[Fp8Weight], tag: str | None = None) -> Source:
    """Shows FP8 weights in the dtype ``tag``, by default that of origin."""
    tag = dtype_of_origin(source) if tag is None else tag
    return source.with_views(w.view(tag) for w in weights)
