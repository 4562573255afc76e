"""Quantized weights as they are stored, whichever layout it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np

from jnvfp4.convert.errors import CheckpointError
from jnvfp4.convert.layouts import COMPRESSED_TENSORS, LAYOUTS, MODELOPT, TE, Layout, Parts, decode_scale_of
from jnvfp4.convert.names import WEIGHT
from jnvfp4.convert.source import CONFIG, Source, open_source
from jnvfp4.spec import BLOCK

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([E2M1, -E2M1])  # by code


@dataclass(frozen=True)
class Weight:
    """One quantized weight: views of the file, and what its layout makes of its global.

    Attributes:
      name: the weight it was made of, `M.weight`, or a stack of experts.
      codes: uint8 [N, K/2], of a stack [E, N, K/2].
      scales: uint8 [N, K/16] or [E, N, K/16], E4M3 bits.
      stored: the global as it is stored, float32.
      kn: whether a stack is stored [E, K, N]; codes and scales are views with K last.
      e4m3_max: what an amax in layout te was made for.
      decode: S_dec, float32: [], [N] where each row has one, [E].
    """

    name: str
    layout: Layout
    codes: np.ndarray
    scales: np.ndarray
    stored: np.ndarray
    kn: bool = False
    e4m3_max: Literal[448, 256] = 448

    @property
    def stacked(self) -> bool:
        return self.codes.ndim == 3

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def decode(self) -> np.ndarray:
        d = decode_scale_of(self.layout, self.stored, self.e4m3_max)
        return d.reshape(()) if d.size == 1 and not self.stacked else d

    def values(self, rows: slice = slice(None)) -> np.ndarray:
        """q * (s * S_dec) of some rows, of a stack some experts, float32."""
        codes, decode = self.codes[rows], self.decode
        q = np.empty((*codes.shape[:-1], 2 * codes.shape[-1]), np.float32)
        q[..., 0::2], q[..., 1::2] = VALUES[codes & 15], VALUES[codes >> 4]
        s = self.scales[rows].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # a damaged global may be of any size
            factor = s * (decode[rows].reshape(-1, *[1] * (codes.ndim - 1)) if decode.ndim else decode)
            return q * np.repeat(factor, BLOCK, axis=-1)


@dataclass
class Stored:
    """An NVFP4 checkpoint.

    Attributes:
      source: its files.
      layout: which one it is.
      modules: those with a quantized weight, sorted.
    """

    source: Source
    layout: Layout
    modules: list[str]
    stacks: frozenset[str] = frozenset()

    @property
    def e4m3_max(self) -> Literal[448, 256]:
        """What amaxes in layout te were made for; elsewhere scales are stored, and it is of no matter."""
        found = ((self.source.config or {}).get("quantization_config") or {}).get("e4m3_max", 448)
        if found not in (448, 256):
            raise CheckpointError(f"e4m3_max is {found!r}", "448 or 256", file=self.source.directory / CONFIG)
        return 256 if found == 256 and self.layout is TE else 448

    def parts(self, module: str) -> Parts:
        return self.layout.parts(module, module in self.stacks)

    def name(self, module: str) -> str:
        """Of the weight that it was made of."""
        return module if module in self.stacks else module + WEIGHT

    def weight(self, module: str) -> Weight:
        parts, get = self.parts(module), self.source.array
        codes, scales = get(parts.codes), get(parts.scales).view(np.uint8)
        kn = codes.ndim == 3 and codes.shape[2] == scales.shape[2]
        if kn:
            codes, scales = codes.transpose(0, 2, 1), scales.transpose(0, 2, 1)
        return Weight(self.name(module), self.layout, codes, scales, get(parts.scale), kn, self.e4m3_max)

    def release(self, module: str) -> None:
        """Lets the system forget the pages of a weight that was read."""
        parts = self.parts(module)
        self.source.release(parts.codes)
        self.source.release(parts.scales)

    @property
    def others(self) -> Iterator[str]:
        """Tensors that are no part of a quantized weight."""
        own = {name for m in self.modules for name in vars(self.parts(m)).values()}
        return (name for name in sorted(self.source.places) if name not in own)


def layout_of(source: Source) -> Layout | None:
    """The layout of a checkpoint by the names in it, or None if no weight is quantized."""
    for layout in (COMPRESSED_TENSORS, TE, MODELOPT):
        suffixes = (layout.scale, *([layout.scale.replace(".", "_", 1)] if layout.stacks else []))
        if any(name.endswith(suffixes) for name in source.places):
            return layout
    config = (source.config or {}).get("quantization_config")
    if isinstance(config, dict) and config.get("quant_method") == "jnvfp4":
        return LAYOUTS["te"]
    return None


def open_stored(path: Path) -> Stored:
    """Opens an NVFP4 checkpoint of any layout and checks that its weights are complete.

    Raises:
      CheckpointError: no weight is quantized, or a part of one is missing or has another shape or dtype.
    """
    return stored_of(open_source(path))


def stored_of(source: Source) -> Stored:
    """The same of a source that is open."""
    layout = layout_of(source)
    if layout is None:
        raise CheckpointError("has no NVFP4 weight", "a checkpoint of NVFP4 weights", file=source.directory / CONFIG)
    modules = {n.removesuffix(layout.scale) for n in source.places if n.endswith(layout.scale)}
    suffix = layout.scale.replace(".", "_", 1)
    stacks = {n.removesuffix(suffix) for n in source.places if n.endswith(suffix)} if layout.stacks else set()
    stored = Stored(source, layout, sorted(modules | stacks), frozenset(stacks))
    for module in stored.modules:
        _check(stored, module)
    return stored


def _check(stored: Stored, module: str) -> None:
    source, layout, parts = stored.source, stored.layout, stored.parts(module)
    for part in (parts.codes, parts.scales):
        if part not in source.places:
            raise CheckpointError("is missing", f"it beside {parts.scale!r}", tensor=part)
    codes, scales, scale = (source.entry(name) for name in (parts.codes, parts.scales, parts.scale))
    rank = 3 if module in stored.stacks else 2
    possible = [] if len(codes.shape) != rank or 0 in codes.shape else _scale_shapes(codes.shape)
    if codes.tag != "U8" or not possible:
        raise CheckpointError(
            f"is {codes.tag} {list(codes.shape)}", f"U8, {rank} axes, whole blocks, not empty", tensor=codes.name
        )
    if scales.tag != layout.scales_tag or scales.shape not in possible:
        expected = f"{layout.scales_tag} {' or '.join(str(list(p)) for p in possible)}"
        raise CheckpointError(f"is {scales.tag} {list(scales.shape)}", expected, tensor=scales.name)
    each = codes.shape[:1]
    shapes = [each] if rank == 3 else [(), (1,), *([each] if layout is TE else [])]
    if scale.tag != "F32" or scale.shape not in shapes:
        expected = f"F32 {' or '.join(str(list(p)) for p in shapes)}"
        raise CheckpointError(f"is {scale.tag} {list(scale.shape)}", expected, tensor=scale.name)


def _scale_shapes(codes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes that block scales of such codes may have: along the last axis, or the one before in a stack."""
    half = BLOCK // 2
    out = [(*codes[:-1], codes[-1] // half)] if codes[-1] % half == 0 else []
    if len(codes) == 3 and codes[1] % half == 0:
        out.append((codes[0], codes[1] // half, codes[2]))
    return out
