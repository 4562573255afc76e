"""Writes tensors that are in memory as a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jnvfp4
from jnvfp4.convert.configs import hf_quant_config, quantization_config
from jnvfp4.convert.errors import CheckpointError, Exit
from jnvfp4.convert.files import write_whole
from jnvfp4.convert.layouts import LAYOUTS, TE, Layout, LayoutName, global_of
from jnvfp4.convert.loaders import check, ignore_list
from jnvfp4.convert.names import WEIGHT, groups_of, is_stack, module_of
from jnvfp4.convert.plan import HF_QUANT, json_bytes
from jnvfp4.convert.safetensors import DTYPES, TAGS, Planned, Writer
from jnvfp4.convert.source import CONFIG
from jnvfp4.tensor import NVFP4Tensor


def save_checkpoint(
    tensors: Mapping[str, NVFP4Tensor | jax.Array | np.ndarray],
    path: Path | str,
    format: LayoutName = "modelopt",
    *,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint of one file.

    Args:
      tensors: by their Hugging Face names; a weight that is an NVFP4Tensor is stored quantized. With none the
        checkpoint is an ordinary one.
      path: a new or empty directory.
      format: layout of the quantized weights.
      config: what `config.json` says, without a quantization_config.

    Raises:
      CheckpointError: a tensor that the format cannot store; weights that loaders fuse and that have other amaxes.
    """
    if format not in LAYOUTS:
        raise CheckpointError(f"format is {format!r}", f"one of {', '.join(LAYOUTS)}", code=Exit.USAGE)
    path, to = Path(path), LAYOUTS[format]
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError("is not empty", "an empty or new directory", file=path, code=Exit.USAGE)
    weights = {n: t for n, t in tensors.items() if isinstance(t, NVFP4Tensor)}
    stored: dict[str, np.ndarray] = {n: np.asarray(t) for n, t in tensors.items() if n not in weights}
    for name, t in weights.items():
        stored |= _parts(name, t, to)
    _check_groups(weights, to)
    files = _configs(tensors, weights, format, dict(config or {}))
    path.mkdir(parents=True, exist_ok=True)
    plan = [Planned(name, TAGS[a.dtype], a.shape) for name, a in stored.items()]
    with Writer(path / "model.safetensors", plan, {"format": "pt", "jnvfp4_version": jnvfp4.__version__}) as out:
        for name, a in sorted(stored.items()):
            out.put(name, a)
    for name, value in files.items():
        write_whole(path / name, json_bytes(value))


def _check_groups(weights: Mapping[str, NVFP4Tensor], layout: Layout) -> None:
    """Loaders fuse projections and take one global for all of them."""
    if layout is TE:
        return
    amaxes = {module_of(n): np.asarray(t.amax) for n, t in weights.items()}
    for group in groups_of(amaxes):
        first, *others = group.members
        other = next((m for m in others if amaxes[m].tobytes() != amaxes[first].tobytes()), None)
        if other is not None:
            raise CheckpointError(
                f"has another amax than {first!r}, with which loaders fuse it", "one amax for both",
                tensor=other, code=Exit.CONFLICT, hint="quantize both with amax= the larger one",
            )  # fmt: skip


def _configs(
    tensors: Mapping[str, Any], weights: Mapping[str, NVFP4Tensor], layout: LayoutName, config: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The JSON files; without a quantized weight only the config as it is."""
    if not weights:
        return {CONFIG: config}
    maxima = {t.format.e4m3_max for t in weights.values()}
    if layout == "te" and len(maxima) > 1:
        raise CheckpointError(f"tensors have e4m3_max {sorted(maxima)}", "one, in layout te", code=Exit.USAGE)
    quantized = [module_of(n) for n in weights]
    kept = [module_of(n) for n, t in tensors.items() if n.endswith(WEIGHT) and n not in weights and np.ndim(t) == 2]
    ignore = ignore_list(kept, quantized, layout)
    check(ignore, kept, quantized, layout)
    own = {"e4m3_max": max(maxima)}
    files = {CONFIG: {**config, "quantization_config": quantization_config(layout, ignore, weight_only=True, own=own)}}
    if layout == "modelopt":
        files[HF_QUANT] = hf_quant_config(ignore, jnvfp4.__version__, weight_only=True)
    return files


def _parts(name: str, t: NVFP4Tensor, layout: Layout) -> dict[str, np.ndarray]:
    stacked = t.ndim == 3 and is_stack(name)
    by_row = t.format.amax_scope == "row"
    if t.format.rht or t.format.amax_scope == "window64" or (by_row and (layout.name != "te" or stacked)):
        raise CheckpointError(f"has {t.format}", f"what {layout.name} can store", tensor=name, code=Exit.USAGE)
    if t.ndim != 2 and not (stacked and layout.stacks):
        raise CheckpointError(f"has shape {list(t.shape)}", "[N, K]", tensor=name, code=Exit.USAGE)
    parts, amax = layout.parts(module_of(name), stacked), np.asarray(t.amax)
    if stacked:
        amax = np.broadcast_to(amax, t.shape[:1])  # one for each expert, also where it is that of all
    value = global_of(layout, amax, t.format.e4m3_max)
    return {
        parts.codes: np.asarray(t.data),
        parts.scales: np.asarray(t.scale).view(DTYPES[layout.scales_tag]),
        parts.scale: value.reshape(amax.shape or layout.global_shape),
    }
