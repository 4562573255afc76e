"""Rewrites an NVFP4 checkpoint in another layout, or decodes it to an ordinary checkpoint."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from .._version import __version__
from ._files.companions import check_companions, copy_companions
from ._files.errors import CheckpointError, Exit, OptionError
from ._files.files import (
    CHUNK_BYTES,
    check_finite,
    check_free_space,
    checked_path,
    json_bytes,
    new_output,
    pieces,
    slices,
    write_file,
)
from ._files.safetensors import DTYPES, FLOATS, JSON, VERSION, Planned, writing
from ._files.source import CONFIG, Source, Warn, index_file, params_file, without_quantization
from ._layouts.base import Layout, Parts, Quantization, decode_scale
from ._layouts.layouts import LAYOUTS, LayoutName, layouts_with
from ._layouts.loaders import linear_modules
from ._layouts.names import is_kv_scale
from ._layouts.stored import Stored, Weight, open_stored
from ._layouts.unsupported import kv_cache

Pieces = Iterator[tuple[str, int, np.ndarray]]  # a tensor's name, the index of the first element, elements


# ---------------------------------------------------------------- another layout
def repack_checkpoint(source: Path | str, output: Path | str, layout: LayoutName, *, warn: Warn = warnings.warn) -> int:
    """Writes an NVFP4 checkpoint in another layout. Codes and block scales stay the same bytes, in the layout's order.

    The ignore list is made anew, since the loaders of each layout read it differently. An FP8 KV cache and its scales
    are taken over. FP8 weights are decoded to their dtype of origin, with a warning: the output has NVFP4 alone.

    Args:
      source: an NVFP4 checkpoint of any layout.
      output: a new or empty directory.
      layout: modelopt or compressed-tensors.
      warn: called with a sentence about each finding that is no error.

    Returns:
      how many global scales change in their last bit if the output is repacked back (1 / (1 / S) is not always S).

    Raises:
      CheckpointError: the checkpoint is damaged; it has an amax per row, or experts in one tensor, and the layout
        cannot store that; the layout is te, whose amax does not follow from a scale; it has factors of AWQ; loaders
        would disagree about what is quantized; or the disk is full.
    """
    stored, to = open_stored(Path(source)), LAYOUTS[layout]
    stored.source.warn_of_files(warn)
    if to.stores_amax:
        clause = f"is {layout}, which stores an amax, and an amax does not follow from a scale"
        raise OptionError({"layout": clause}, layouts_with(lambda x: not x.stores_amax))
    if stored.stacks and not to.stacks:
        expected, stack = f"one weight per expert, in {to.name}", min(stored.stacks)
        raise CheckpointError("is a stack of experts", expected, tensor=stack, code=Exit.USAGE)
    if factors := next(filter(None, map(stored.pre_quant_scale, stored.modules)), None):
        hint = "`jnvfp4 dequantize` multiplies the weights by the factors, and `jnvfp4 convert` quantizes them again"
        raise CheckpointError("multiplies activations", "no factors of AWQ", tensor=factors, hint=hint)
    if (cache := kv_cache(stored.source)) not in ("", *to.kv_caches):
        warn(f"the KV cache is {cache}, which {to.name} has not: its scales are kept, but no config asks for it")
    if in_fp8 := sum(map(stored.in_fp8, stored.modules)):
        warn(f"the activations of {in_fp8} weights are FP8, and FP4 in the output: their scales are divided by 6")
    if stored.fp8:
        tag = stored.source.entry(stored.name(min(stored.fp8))).tag
        _check_fp8_range(stored, tag)
        warn(f"{len(stored.fp8)} FP8 weights are decoded to {tag}")
    repacking = _Repacking(stored, to)
    changed = sum(map(repacking.changed_scales, stored.modules))
    _write(repacking, Path(output), warn)
    return changed


@dataclass(frozen=True)
class _Repacking:
    """Says what every quantized weight becomes; other tensors are copied."""

    stored: Stored
    to: Layout

    @property
    def kept(self) -> list[tuple[str, str]]:
        """Returns what else is written, by its old and new names."""
        return [(name, self.to.kv_scale_name(name)) for name in self.stored.kept]

    def outputs(self, module: str) -> list[Planned]:
        weight, old, new = self.stored.weight(module), self.stored.parts(module), self._parts(module)
        if weight.global_scale.size > 1 and not weight.stacked:
            raise CheckpointError("has an amax per row", "layout te", tensor=weight.name, code=Exit.USAGE)
        entry = self.stored.source.entry
        scale_shape = weight.global_scale.shape if weight.stacked else self.to.global_shape
        has_activation = self.stored.activation(module) is not None
        return self.to.planned(new, entry(old.codes).shape, entry(old.scales).shape, scale_shape, has_activation)

    def pieces(self, module: str) -> Pieces:
        old, new, source = self.stored.parts(module), self._parts(module), self.stored.source
        yield from copied(source, old.codes, new.codes)
        for name, first, data in copied(source, old.scales, new.scales):
            yield name, first, data.view(DTYPES[self.to.scales_tag])
        yield new.global_scale, 0, self._rescaled(source.read(old.global_scale))
        activation = self.stored.activation(module)
        if new.activation is not None and activation is not None:
            yield new.activation, 0, self._rescaled(activation)

    def changed_scales(self, module: str) -> int:
        """Counts the global scales that change if the weight is repacked to its layout and back."""
        if self.stored.layout.meaning in ("amax", self.to.meaning):
            return 0
        scale = self.stored.source.read(self.stored.parts(module).global_scale)
        return int((decode_scale(self._rescaled(scale)).reshape(-1) != scale.reshape(-1)).sum())

    def files(self) -> dict[str, JSON]:
        stored, source = self.stored, self.stored.source
        kept = linear_modules(map(source.entry, stored.others))
        ignore = self.to.ignore_list(kept, stored.modules)
        weight_only = all(stored.activation(m) is None for m in stored.modules)
        cache = name if (name := kv_cache(source)) in self.to.kv_caches else ""
        quantization = Quantization(ignore, weight_only, cache)
        files = self.to.config_files(source.config, quantization, source.params)
        scheme = ((source.config or {}).get("quantization_config") or {}).get("kv_cache_scheme")
        if cache and scheme and self.to is stored.layout and CONFIG in files:
            files[CONFIG]["quantization_config"]["kv_cache_scheme"] = scheme  # with its strategy
        return files

    def _parts(self, module: str) -> Parts:
        return self.to.parts(module, module in self.stored.stacks)

    def _rescaled(self, scale: np.ndarray) -> np.ndarray:
        """Computes a global or activation scale as the new layout stores it."""
        return self.to.from_other(np.asarray(scale, np.float32), self.stored.layout, self.stored.e4m3_max)


# ---------------------------------------------------------------- an ordinary checkpoint
def dequantize_checkpoint(
    source: Path | str, output: Path | str, dtype: str = "BF16", *, warn: Warn = warnings.warn
) -> None:
    """Decodes an NVFP4 checkpoint to an ordinary one: values q * (s * S_dec), rounded to ``dtype``.

    FP8 weights are decoded too, and weights are multiplied by the factors of AWQ that their modules have. Scales of a
    KV cache are left out, with a warning: without a config of the quantization, loaders have no parameters for them.

    Args:
      source: an NVFP4 checkpoint of any layout.
      output: a new or empty directory.
      dtype: the dtype of the decoded weights: BF16, F16 or F32; all others are copied.
      warn: called with a sentence about each finding that is no error.

    Raises:
      CheckpointError: the checkpoint is damaged, a value is too large for ``dtype``, or the disk is full.
    """
    if dtype not in FLOATS:
        raise OptionError({"dtype": f"is {dtype!r}"}, "BF16, F16 or F32")
    stored = open_stored(Path(source), fp8_tag=dtype)
    stored.source.warn_of_files(warn)
    for module in stored.modules:
        w = stored.weight(module)
        factor = 1.0 if w.pre_quant_scale is None else float(np.abs(w.pre_quant_scale).max())
        parts = (stored.weight(module, rows).values() for rows in _slices(w))
        _check_range(w.name, 6 * 448 * float(np.abs(w.decode).max()) * factor, parts, dtype)
    _check_fp8_range(stored, dtype)
    if scales := sum(map(is_kv_scale, stored.kept)):
        warn(f"{scales} scales of a KV cache are left out, for which an ordinary model has no parameters")
    _write(_Decoding(stored, dtype), Path(output), warn)


@dataclass(frozen=True)
class _Decoding:
    stored: Stored
    dtype: str

    @property
    def kept(self) -> list[tuple[str, str]]:
        return [(name, name) for name in self.stored.kept if not is_kv_scale(name)]

    def outputs(self, module: str) -> list[Planned]:
        w = self.stored.weight(module)
        shape = (w.shape[0], w.shape[2], w.shape[1]) if w.kn else w.shape
        return [Planned(w.name, self.dtype, shape)]

    def pieces(self, module: str) -> Pieces:
        w = self.stored.weight(module)
        row_size = math.prod(w.shape[1:])
        for rows in _slices(w):
            values = self.stored.weight(module, rows).values().astype(DTYPES[self.dtype])
            yield w.name, rows.start * row_size, values.transpose(0, 2, 1) if w.kn else values

    def files(self) -> dict[str, JSON]:
        config, params = self.stored.source.config, self.stored.source.params
        if params is not None:
            return params_file(params)
        return {} if config is None else {CONFIG: _ordinary_config(config, DTYPES[self.dtype].name)}


def _slices(w: Weight) -> Iterator[slice]:
    return (slice(e, e + 1) for e in range(w.shape[0])) if w.stacked else slices(w.shape, 4, CHUNK_BYTES)


def _check_fp8_range(stored: Stored, dtype: str) -> None:
    for fp8 in stored.fp8.values():
        parts = (fp8.values(rows) for rows in slices(fp8.entry.shape, 4, CHUNK_BYTES))
        _check_range(fp8.entry.name, 448 * float(np.abs(fp8.scales).max()), parts, dtype)


def _check_range(name: str, bound: float, parts: Iterator[np.ndarray], dtype: str) -> None:
    """Raises if values overflow in ``dtype``. They are decoded only if their ``bound`` makes that possible."""
    largest = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    if bound <= largest:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        count = sum(int((~np.isfinite(part.astype(DTYPES[dtype]))).sum()) for part in parts)
    if count:
        observed = f"has {count} values that are not finite in {dtype}"
        raise CheckpointError(observed, f"at most {largest:g}", tensor=name, hint="--dtype bf16 or f32")


def _ordinary_config(config: JSON, dtype: str) -> JSON:
    out = {**without_quantization(config), "torch_dtype": dtype}
    if "dtype" in config:
        out["dtype"] = dtype
    if isinstance(text := out.get("text_config"), dict):
        out["text_config"] = {**text, **{k: dtype for k in ("torch_dtype", "dtype") if k in text}}
    return out


# ---------------------------------------------------------------- writing
Rewriting = _Repacking | _Decoding
Task = tuple[str, list[Planned], Callable[[], Pieces]]  # a shard, tensors of it, and what gives them


def _write(rewriting: Rewriting, output: Path, warn: Warn) -> None:
    write_output(rewriting.stored.source, output, [*_tasks(rewriting)], rewriting.files(), warn)


def write_output(
    source: Source,
    output: Path,
    tasks: Sequence[Task],
    files: Mapping[str, JSON | bytes],
    warn: Warn,
    keep_metadata: bool = False,
) -> None:
    """Writes shard by shard, then the files beside them, as values of JSON or as bytes; the index is last.

    The metadata of shards say which version of jnvfp4 has written them, and are otherwise new unless they are kept.
    """
    checked_path(output)
    check_finite(source.config, source.directory / CONFIG)
    tensors = {shard: [p for name, planned, _ in tasks if name == shard for p in planned] for shard in source.files}
    tensors = {shard: planned for shard, planned in sorted(tensors.items()) if planned}
    check_free_space(output, [sum(p.nbytes for p in planned) for planned in tensors.values()])
    check_companions(source)
    with new_output(output):
        for shard, planned in tensors.items():
            kept = source.files[shard].metadata if keep_metadata else {}
            with writing(output / shard, planned, {"format": "pt", **kept, VERSION: __version__}) as file:
                for tensor, first, data in (piece for name, _, work in tasks if name == shard for piece in work()):
                    file.put(tensor, data, first)
        notcopied = copy_companions(source, output)
        source.check_unchanged()
        for name, value in {**files, **index_file(tensors, source.stem)}.items():
            write_file(output / name, value if isinstance(value, bytes) else json_bytes(value))
    for text in notcopied:
        warn(text)


def _tasks(rewriting: Rewriting) -> Iterator[Task]:
    """Lists what is written: the weights, in the files in which their codes were, and the other tensors."""
    stored, source = rewriting.stored, rewriting.stored.source
    for module in stored.modules:
        yield source.places[stored.parts(module).codes], rewriting.outputs(module), partial(rewriting.pieces, module)
    for old, new in [*rewriting.kept, *((name, name) for name in map(stored.name, stored.fp8))]:
        yield copying(source, old, new)


def copying(source: Source, name: str, to: str) -> Task:
    """Copies a tensor under another name."""
    entry = source.entry(name)
    return source.places[name], [Planned(to, entry.tag, entry.shape)], partial(copied, source, name, to)


def copied(source: Source, name: str, to: str) -> Pieces:
    """Gives a tensor under another name."""
    return ((to, first, data) for first, data in pieces(source.rows(name), CHUNK_BYTES))
