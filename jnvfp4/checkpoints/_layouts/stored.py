"""Opens NVFP4 checkpoints of any layout, and gives their quantized weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np

from ...spec import BLOCK
from .._files.errors import CheckpointError
from .._files.safetensors import FLOATS
from .._files.source import CONFIG, Source, open_source, read_hf_quant
from .base import Layout, Parts
from .forms import in_layout_form
from .fp8 import Fp8Weight, dtype_of_origin, fp8_weights
from .layouts import LAYOUTS
from .modelopt import W4A8
from .names import WEIGHT, Group, groups_of, module_of
from .te import TE
from .unsupported import algorithms_in, config_refusal, mlx_refusal, tensor_refusal

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([E2M1, -E2M1])  # the value of each code


@dataclass(frozen=True)
class Weight:
    """Holds one quantized weight, or some of its rows, as views of the file or as copies.

    Attributes:
      name: the name before quantization: ``M.weight``, or the name of a stack of experts.
      layout: the layout of the checkpoint.
      codes: uint8 [N, K/2], of a stack [E, N, K/2].
      scales: uint8 [N, K/16] or [E, N, K/16], E4M3 bits.
      global_scale: float32 as stored: S_dec, S_enc or the amax, by layout.
      kn: whether a stack is stored [E, K, N]; ``codes`` and ``scales`` are views with K last.
      e4m3_max: the largest block scale that an amax in layout te was found for.
      pre_quant_scale: AWQ's factors [K] of the activations, float32, or None; see ``Stored``.
    """

    name: str
    layout: Layout
    codes: np.ndarray
    scales: np.ndarray
    global_scale: np.ndarray
    kn: bool = False
    e4m3_max: Literal[448, 256] = 448
    pre_quant_scale: np.ndarray | None = None

    @property
    def stacked(self) -> bool:
        """Whether the weight is a stack of experts."""
        return self.codes.ndim == 3

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K], or [E, N, K] of a stack."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def decode(self) -> np.ndarray:
        """S_dec in float32: [], [N] if each row has its own, or [E] of a stack."""
        d = self.layout.to_decode(self.global_scale, self.e4m3_max)
        return d.reshape(()) if d.size == 1 and not self.stacked else d

    def values(self, rows: slice = slice(None)) -> np.ndarray:
        """Decodes some rows, or some experts of a stack: q * (s * S_dec) in float32, times AWQ's factors if any."""
        codes, decode = self.codes[rows], self.decode
        q = np.empty((*codes.shape[:-1], 2 * codes.shape[-1]), np.float32)
        q[..., 0::2], q[..., 1::2] = VALUES[codes & 15], VALUES[codes >> 4]
        s = self.scales[rows].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # a damaged global scale or factor may have any size
            factor = s * (decode[rows].reshape(-1, *[1] * (codes.ndim - 1)) if decode.ndim else decode)
            w = q * np.repeat(factor, BLOCK, axis=-1)
            return w if self.pre_quant_scale is None else w * self.pre_quant_scale


@dataclass(frozen=True)
class Stored:
    """Holds an NVFP4 checkpoint.

    A module with ``M.pre_quant_scale`` [K] (AWQ) computes (x * pre_quant_scale) @ W^T: Model Optimizer divides the
    weight by the factors before it is quantized, and leaves them to the activations (``_update_pre_quant_scale`` and
    ``postprocess_state_dict`` in modelopt/torch/export/quant_utils.py). Those that it folds into the layer before have
    no such tensor. So the factors belong to the activations where the weight stays quantized; a weight that is decoded
    is multiplied by them.

    Attributes:
      source: the tensors, in which FP8 weights are decoded.
      layout: the layout of the NVFP4 weights.
      modules: the modules with an NVFP4 weight, sorted.
      stacks: those among them that are stacks of experts.
      fp8: the FP8 weights, by module.
      unfit: what is wrong with weights that are damaged or in another form, by module; these are not in ``modules``.
    """

    source: Source
    layout: Layout
    modules: list[str]
    stacks: frozenset[str] = frozenset()
    fp8: Mapping[str, Fp8Weight] = field(default_factory=dict)
    unfit: Mapping[str, CheckpointError] = field(default_factory=dict)

    @property
    def e4m3_max(self) -> Literal[448, 256]:
        """The largest block scale that amaxes in layout te were found for. The other layouts store scales: 448."""
        section = (self.source.config or {}).get("quantization_config")
        e4m3_max = section.get("e4m3_max", 448) if isinstance(section, dict) else 448
        if e4m3_max not in (448, 256):
            raise CheckpointError(f"e4m3_max is {e4m3_max!r}", "448 or 256", file=self.source.directory / CONFIG)
        return 256 if e4m3_max == 256 and self.layout.stores_amax else 448

    @property
    def fused(self) -> list[Group]:
        """The groups of NVFP4 weights that loaders fuse."""
        return groups_of(self.modules, k=lambda m: self.source.entry(self.parts(m).codes).shape[-1])

    def parts(self, module: str) -> Parts:
        """Names the tensors of a quantized weight."""
        return self.layout.parts(module, module in self.stacks)

    def name(self, module: str) -> str:
        """Gives the name that a module's weight had before quantization."""
        if module in self.fp8:
            return self.fp8[module].entry.name
        return module if module in self.stacks else module + WEIGHT

    def weight(self, module: str, rows: slice | None = None) -> Weight:
        """Gives a quantized weight as views of the file, or a copy of some rows or experts of it."""
        parts, source = self.parts(module), self.source

        def read(name: str) -> np.ndarray:
            whole = rows is None and name not in source.views
            return source.array(name) if whole else source.read(name, rows or slice(None))

        codes, scales = read(parts.codes), read(parts.scales)
        scales, global_scale = scales.view(np.uint8), source.read(parts.global_scale)
        if rows is not None and global_scale.size > 1:
            global_scale = global_scale[rows]
        kn = codes.ndim == 3 and codes.shape[2] == scales.shape[2]
        if kn:
            codes, scales = codes.transpose(0, 2, 1), scales.transpose(0, 2, 1)
        factors = self.pre_quant_scale(module)
        pre = None if factors is None else source.read(factors).astype(np.float32)
        return Weight(self.name(module), self.layout, codes, scales, global_scale, kn, self.e4m3_max, pre)

    def pre_quant_scale(self, module: str) -> str | None:
        """Names the factors [K] by which a module multiplies its activations; None if it has none."""
        name = f"{module}.pre_quant_scale"
        if name not in self.source.places or module in self.stacks:
            return None
        entry, k = self.source.entry(name), 2 * self.source.entry(self.parts(module).codes).shape[1]
        return name if entry.tag in FLOATS and entry.shape == (k,) else None

    def activation(self, module: str) -> np.ndarray | None:
        """Gives the scale of a module's activations as the layout stores it, for FP4; None if there is none."""
        name = self.parts(module).activation
        if name is None or name not in self.source.places:
            return None
        scale = self.source.read(name)
        return scale / np.float32(6) if self.in_fp8(module) else scale  # amax / 448, and not amax / 2688

    @cached_property
    def _algorithms(self) -> tuple[dict[str, object], list[object]]:
        return algorithms_in(self.source)

    def algorithm(self, module: str) -> object:
        """Gives the algorithm that a config of mixed formats names for a module, or for one that it is in."""
        of, parts = self._algorithms[0], module.split(".")
        above = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((of[p] for p in above if p in of), None)

    def in_fp8(self, module: str) -> bool:
        """Tells whether a module's activations are FP8."""
        return W4A8 in (self.algorithm(module), *self._algorithms[1])

    def release(self, module: str) -> None:
        """Drops a weight's pages from memory."""
        parts = self.parts(module)
        self.source.release(parts.codes)
        self.source.release(parts.scales)

    @property
    def others(self) -> Iterator[str]:
        """The names of the tensors that are no part of a quantized weight, sorted."""
        parts = {name for m in (*self.modules, *self.unfit) for name in self.parts(m)}
        return (name for name in sorted(self.source.places) if name not in parts)

    @property
    def kept(self) -> list[str]:
        """The names of the tensors that are no part of a decoded weight, and no FP8 weight; sorted."""
        names = {self.pre_quant_scale(m) for m in self.modules} | {self.name(m) for m in self.fp8}
        return [name for name in self.others if name not in names]

    @property
    def names(self) -> list[str]:
        """The names of all tensors before quantization, sorted."""
        return sorted([*(self.name(m) for m in (*self.modules, *self.unfit)), *self.others])


def layout_of(source: Source) -> Layout | None:
    """Finds the layout of a checkpoint from the names in it, or from its config; None if it is no NVFP4 checkpoint."""
    for layout in reversed(LAYOUTS.values()):
        if any(name.endswith(layout.global_suffixes) for name in source.places):
            return layout
    config = (source.config or {}).get("quantization_config")
    named = next((x for x in LAYOUTS.values() if isinstance(config, dict) and x.is_named_by(config)), None)
    # The config decides without global scales: a conversion may quantize nothing. Other weights that are quantized are
    # damaged, or of another format.
    return named if named and (named.stores_amax or not _has_codes(source)) else None


def named_modules(source: Source, layout: Layout) -> tuple[set[str], frozenset[str]]:
    """Names the modules that have a global scale, and those among them that are stacks of experts."""
    modules, *stacks = ({n.removesuffix(s) for n in source.places if n.endswith(s)} for s in layout.global_suffixes)
    return modules.union(*stacks), frozenset().union(*stacks)


def _has_codes(source: Source) -> bool:
    return any(name.endswith((".weight_packed", ".weight_scale")) for name in source.places)


def open_stored(path: Path, *, ordinary: bool = False, fp8_tag: str | None = None, all_fit: bool = True) -> Stored:
    """Opens an NVFP4 checkpoint of any layout and checks that its weights are complete, and that no others are coded.

    ``ordinary`` accepts a checkpoint without quantized tensors, which has no modules and counts as one of layout te.
    FP8 weights are decoded to the dtype ``fp8_tag``, by default that of origin. Without ``all_fit``, weights may be
    damaged or in another form: ``Stored.unfit``.

    Raises:
      CheckpointError: it is no NVFP4 checkpoint, or a part of one is missing or has another shape or dtype; or it has
        weights in another format, or factors that are not applied.
    """
    source = open_source(path)
    if refusal := config_refusal(source):
        raise refusal
    ordinary = ordinary and layout_of(source) is None and not _has_codes(source) and not _names_quantization(source)
    stored = Stored(source, TE, []) if ordinary else stored_of(source, fp8_tag, all_fit)
    if refusal := tensor_refusal(stored.source, stored.kept):
        raise refusal
    return stored


def _names_quantization(source: Source) -> bool:
    in_config = any(config.get("quantization_config") is not None for config in source.configs)
    return in_config or bool(read_hf_quant(source).get("quantization"))


def stored_of(source: Source, fp8_tag: str | None = None, all_fit: bool = True) -> Stored:
    """Finds the weights of an open checkpoint and checks that they are complete; see ``open_stored``."""
    layout = layout_of(source)
    if layout is None:
        raise no_nvfp4(source)
    modules, stacks = named_modules(source, layout)
    source = in_layout_form(source, layout, modules, stacks)
    fp8 = {module_of(w.entry.name): w for w in fp8_weights(source)}
    viewed = source.with_views(w.view(fp8_tag or dtype_of_origin(source)) for w in fp8.values())
    stored = Stored(viewed, layout, sorted(modules), stacks, fp8)
    unfit: dict[str, CheckpointError] = {}
    for module in stored.modules:
        try:
            _check_weight(stored, module)
        except CheckpointError as e:
            if all_fit:
                raise
            unfit[module] = e
    return replace(stored, modules=[m for m in stored.modules if m not in unfit], unfit=unfit)


def no_nvfp4(source: Source) -> CheckpointError:
    """Makes the error about a checkpoint that has no layout."""
    other = _names_quantization(source)
    hint = "read it with the software that wrote it" if other else "`jnvfp4 convert` makes one of it"
    hint = "`jnvfp4 convert --dequantize-input fp8` makes one of it" if any(fp8_weights(source)) else hint
    error = CheckpointError(
        "has no NVFP4 weight", "a checkpoint of NVFP4 weights", file=source.directory / CONFIG, hint=hint
    )
    return mlx_refusal(source) or error


def _check_weight(stored: Stored, module: str) -> None:
    source, layout, parts = stored.source, stored.layout, stored.parts(module)
    for part in (parts.codes, parts.scales):
        if part not in source.places:
            raise CheckpointError("is missing", f"it beside {parts.global_scale!r}", tensor=part)
    codes, scales, scale = (source.entry(name) for name in (parts.codes, parts.scales, parts.global_scale))
    rank = 3 if module in stored.stacks else 2
    possible = [] if len(codes.shape) != rank or 0 in codes.shape else scale_shapes(codes.shape)
    if codes.tag != "U8" or not possible:
        expected = f"U8, {rank} axes, whole blocks, not empty"
        raise CheckpointError(f"is {codes.tag} {list(codes.shape)}", expected, tensor=codes.name)
    vector = codes.shape[:1]  # a global scale per expert or per row
    shapes = [vector] if rank == 3 else [(), (1,), *([vector] if layout.stores_amax else [])]
    for entry, tag, fitting in ((scales, layout.scales_tag, possible), (scale, "F32", shapes)):
        if entry.tag != tag or entry.shape not in fitting:
            expected = f"{tag} {' or '.join(str(list(p)) for p in fitting)}"
            of_32 = entry is scales and scales.shape == (*codes.shape[:-1], codes.shape[-1] // BLOCK)
            hint = "blocks of 32 are read where a config has group_size 32" if of_32 else ""
            if entry is scale and entry.tag == tag:
                hint = "several numbers are read where they are equal: quantize the fused weights again with one"
            raise CheckpointError(f"is {entry.tag} {list(entry.shape)}", expected, tensor=entry.name, hint=hint)


def scale_shapes(codes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Lists the shapes that the block scales of such codes may have: blocks lie along the last axis of a matrix, and
    along either of the last two axes of a stack.
    """
    half = BLOCK // 2
    out = [(*codes[:-1], codes[-1] // half)] if codes[-1] % half == 0 else []
    if len(codes) == 3 and codes[1] % half == 0:
        out.append((codes[0], codes[1] // half, codes[2]))
    return out
