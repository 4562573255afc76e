"""Saves tensors in memory as a checkpoint."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .._core.tensor import NVFP4Tensor
from .._version import __version__
from ._files.errors import CheckpointError, Exit, OptionError
from ._files.files import check_finite, checked_path, json_bytes, new_output, write_file
from ._files.safetensors import DTYPES, JSON, TAGS, VERSION, Planned, writing
from ._files.source import CONFIG
from ._layouts.base import Layout, Quantization
from ._layouts.layouts import LAYOUTS, LayoutName
from ._layouts.names import WEIGHT, groups_of, is_stack, module_of
from .trees import Tensor


def save_checkpoint(
    tensors: Mapping[str, Tensor],
    output: Path | str,
    layout: LayoutName = "modelopt",
    *,
    config: Mapping[str, object] | None = None,
) -> None:
    """Saves tensors as a checkpoint of one file.

    Args:
      tensors: the tensors by their Hugging Face names. Weights that are NVFP4Tensors, [N, K] or stacks of experts
        [E, N, K], are stored quantized; without any the checkpoint is an ordinary one.
      output: a new or empty directory.
      layout: the layout of the quantized weights.
      config: the content of ``config.json``, without a quantization_config.

    Raises:
      CheckpointError: the layout cannot store a tensor, weights that loaders fuse have different amaxes, the output is
        not empty or another writer has it, the config has NaN or infinity, or a file cannot be written.
    """
    if layout not in LAYOUTS:
        raise OptionError({"layout": f"is {layout!r}"}, " or ".join(LAYOUTS))
    output, to = checked_path(output), LAYOUTS[layout]
    check_finite(config, "config")
    weights = {n: t for n, t in tensors.items() if isinstance(t, NVFP4Tensor)}
    arrays: dict[str, np.ndarray] = {n: np.asarray(t) for n, t in tensors.items() if n not in weights}
    for name, t in weights.items():
        arrays |= _arrays_of(name, t, to)
    _check_groups(weights, to)
    files = {n: json_bytes(v) for n, v in _configs(tensors, weights, to, dict(config or {})).items()}
    planned = [Planned(name, TAGS[a.dtype], a.shape) for name, a in arrays.items()]
    metadata = {"format": "pt", VERSION: __version__}
    with new_output(output):
        with writing(output / "model.safetensors", planned, metadata) as file:
            for name, a in sorted(arrays.items()):
                file.put(name, a)
        for name, data in files.items():
            write_file(output / name, data)


def _check_groups(weights: Mapping[str, NVFP4Tensor], layout: Layout) -> None:
    """Raises if weights that loaders fuse have different amaxes: loaders keep one global scale for all of them."""
    if layout.stores_amax:
        return
    amaxes = {module_of(n): np.asarray(t.amax) for n, t in weights.items()}
    k_of = {module_of(n): t.shape[-1] for n, t in weights.items()}
    for group in groups_of(amaxes, k=lambda m: k_of[m]):
        first, *others = group.members
        other = next((m for m in others if amaxes[m].tobytes() != amaxes[first].tobytes()), None)
        if other is not None:
            observed = f"has another amax than {first!r}, with which loaders fuse it"
            hint = "quantize both with amax= the larger one"
            raise CheckpointError(observed, "one amax for both", tensor=other, code=Exit.CONFLICT, hint=hint)


def _configs(
    tensors: Mapping[str, Tensor], weights: Mapping[str, NVFP4Tensor], layout: Layout, config: JSON
) -> dict[str, JSON]:
    """Makes the JSON files; without a quantized weight that is only the config, unchanged."""
    if not weights:
        return {CONFIG: config}
    maxima = {t.format.e4m3_max for t in weights.values()}
    if layout.stores_amax and len(maxima) > 1:
        expected = f"one, in layout {layout.name}"
        raise CheckpointError(f"tensors have e4m3_max {sorted(maxima)}", expected, code=Exit.USAGE)
    quantized = [module_of(n) for n in weights]
    kept = [module_of(n) for n, t in tensors.items() if n.endswith(WEIGHT) and n not in weights and np.ndim(t) == 2]
    ignore = layout.ignore_list(kept, quantized)
    return layout.config_files(config, Quantization(ignore, weight_only=True, spec={"e4m3_max": max(maxima)}))


def _arrays_of(name: str, t: NVFP4Tensor, layout: Layout) -> dict[str, np.ndarray]:
    stacked = t.ndim == 3 and is_stack(name)
    if not layout.stores(t.format, stacked):
        raise CheckpointError(f"has {t.format}", f"what {layout.name} can store", tensor=name, code=Exit.USAGE)
    if t.ndim != 2 and not (stacked and layout.stacks):
        raise CheckpointError(f"has shape {list(t.shape)}", "[N, K]", tensor=name, code=Exit.USAGE)
    parts, amax = layout.parts(module_of(name), stacked), np.asarray(t.amax)
    if stacked:
        amax = np.broadcast_to(amax, t.shape[:1])  # one per expert, also if all are equal
    scale = layout.from_amax(amax, t.format.e4m3_max)
    return {
        parts.codes: np.asarray(t.data),
        parts.scales: np.asarray(t.scale).view(DTYPES[layout.scales_tag]),
        parts.global_scale: scale.reshape(amax.shape or layout.global_shape),
    }
