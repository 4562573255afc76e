"""Writes an NVFP4 checkpoint again with scales and configs mended, and codes and everything else unchanged."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from ..spec import BLOCK
from ._files.errors import reading
from ._files.safetensors import DTYPES, JSON, Planned
from ._files.source import CONFIG, HF_QUANT, Warn, open_source
from ._layouts.base import Quantization
from ._layouts.survey import NAN, Item, Survey, survey
from ._layouts.unsupported import kv_cache
from .rewrite import Pieces, copying, write_output
from .rules import (
    findings,
    ignore_list_of,
    is_far_from_one,
    is_whole,
    judged_activations,
    needs_activations,
    shared_global,
    usable_activations,
)

_MOST = 0x7E  # 448 as E4M3


@dataclass
class _Fixes:
    """Collects what changes: tensors by name, configs by file name, and in words what was done to each."""

    tensors: dict[str, tuple[Planned, Callable[[], np.ndarray]]] = field(default_factory=dict)
    files: dict[str, JSON | bytes] = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)  # for a tensor that is new: one in whose file it goes


def fix_checkpoint(source: Path | str, output: Path | str, *, warn: Warn = warnings.warn) -> dict[str, str]:
    """Writes a checkpoint in which the findings of ``lint`` are mended that need no other codes.

    Scales and configs change; codes and all other tensors and files stay the same bytes.

    Args:
      source: an NVFP4 checkpoint in layout modelopt or compressed-tensors.
      output: a new or empty directory. If nothing can be mended, it is not written.
      warn: called with a sentence about each file that is not copied, or may be no part of the source.

    Returns:
      what was done, by tensor or file.

    Raises:
      CheckpointError: a file is damaged, there is no NVFP4 weight, or the disk is full.
    """
    s, fixes = survey(open_source(Path(source))), _Fixes()
    s.source.warn_of_files(warn)
    fixable = [f for f in findings(s) if f.fixable]
    if fixable:
        _fix_activations(s, fixes)
        _fix_weights(s, {(f.rule, f.where) for f in fixable}, fixes)
        if any(f.rule in ("config", "kv-scales") for f in fixable):
            _fix_configs(s, fixes)
    if fixes.done:
        _write(s, fixes, Path(output), warn)
    return fixes.done


# ---------------------------------------------------------------- scales of activations
def _fix_activations(s: Survey, fixes: _Fixes) -> None:
    known, needed = usable_activations(s), needs_activations(s)
    for item in judged_activations(s):
        name, value = item.parts.activation, known.get(item.family)
        if name is None or value is None or item.codes is None:
            continue
        old = item.activation_decode
        if old is None:
            if not needed:
                continue
            like = item.global_scale if item.module in s.stored.stacks else None
            new = np.full(s.layout.global_shape if like is None else like.shape, value, np.float32)
        else:
            new = np.where(np.isnan(old) | (is_far_from_one(value) & (old == 1)), value, old)
            if np.array_equal(new, old):
                continue
        stored = s.layout.from_decode(new)
        planned = Planned(name, "F32", stored.shape)
        fixes.tensors[name] = planned, partial(np.asarray, stored)
        fixes.beside[name] = item.parts.codes
        fixes.done[name] = f"{value:.4g} as S_dec, the largest of its siblings"


# ---------------------------------------------------------------- scales of weights
def _fix_weights(s: Survey, fixable: set[tuple[str, str]], fixes: _Fixes) -> None:
    """Mends block scales and global scales of fused weights, by the rules and places of findings."""
    for group in s.fused:
        items = [s.items[m] for m in group.members]
        mended = [is_whole(s, item) for item in items]
        shared = shared_global(s, group.members) if ("fused-globals", group.members[0]) in fixable else None
        for item, whole in zip(items, mended, strict=True):
            if whole:
                nan = ("bad-block-scales", item.parts.scales) in fixable
                _fix_weight(s, item, None if item.bad_globals else shared, nan, fixes)


def _fix_weight(s: Survey, item: Item, shared: np.ndarray | None, nan: bool, fixes: _Fixes) -> None:
    assert item.scales is not None
    assert item.codes is not None
    done = ["stored as [N, K/16]"] if item.lie == "padded" else []
    done += ["448 for NaN"] if nan else []
    ratio = None
    if shared is not None and item.decode is not None and item.global_scale is not None:
        stored, name = shared.reshape(item.global_scale.shape), item.parts.global_scale
        if (stored != item.global_scale).any():  # two S_enc may give the same S_dec
            fixes.tensors[name] = Planned(name, "F32", stored.shape), partial(np.asarray, stored)
            fixes.done[name] = "the largest of the fused weights"
        factor = (item.decode / s.layout.to_decode(stored)).astype(np.float32)
        if (factor != 1).any():
            ratio = factor
            done.append(f"rounded again after a factor of {float(ratio.min()):.4g}")
    if done:
        name, rows = item.parts.scales, item.codes.shape[:-1]
        shape = item.scales.shape if item.lie == "plain" else (*rows, item.codes.shape[-1] // (BLOCK // 2))
        planned = Planned(name, s.layout.scales_tag, shape)
        fixes.tensors[name] = planned, partial(_block_scales, s, item, ratio)
        fixes.done[name] = ", ".join(done)


def _block_scales(s: Survey, item: Item, ratio: np.ndarray | None) -> np.ndarray:
    """Computes the mended block scales of a weight, as the layout stores them."""
    x = s.unpadded(item) if item.lie == "padded" else s.source.read(item.parts.scales).view(np.uint8)
    assert x is not None
    x = np.where((x & NAN) == NAN, np.uint8(_MOST), x)
    e4m3 = DTYPES["F8_E4M3"]
    if ratio is not None:
        factor = ratio.reshape(-1, *[1] * (x.ndim - 1))
        x = (x.view(e4m3).astype(np.float32) * factor).astype(e4m3).view(np.uint8)
    return x.view(DTYPES[s.layout.scales_tag])


# ---------------------------------------------------------------- configs and files
def _fix_configs(s: Survey, fixes: _Fixes) -> None:
    ignore = ignore_list_of(s)
    assert ignore is not None
    weight_only = not any(item.parts.activation in s.source.places for item in s.items.values())
    cache = "FP8" if s.kv_scales else kv_cache(s.source)
    quantization = Quantization(ignore, weight_only, cache)
    fixes.files = {**s.layout.config_files(s.source.config, quantization, s.source.params)}
    fixes.done |= dict.fromkeys(fixes.files, "made anew from the tensors")


def _write(s: Survey, fixes: _Fixes, output: Path, warn: Warn) -> None:
    source = s.source
    tasks = [copying(source, name, name) for name in sorted(source.places) if name not in fixes.tensors]
    for name, (planned, compute) in fixes.tensors.items():
        file = source.places.get(name, source.places[fixes.beside.get(name, name)])
        tasks.append((file, [planned], partial(_computed, name, compute)))
    for name in (CONFIG, HF_QUANT):
        path = source.directory / name
        if name not in fixes.files and path.is_file():
            with reading(path):
                fixes.files[name] = path.read_bytes()
    write_output(source, output, tasks, fixes.files, warn, keep_metadata=True)


def _computed(name: str, compute: Callable[[], np.ndarray]) -> Pieces:
    yield name, 0, compute()
