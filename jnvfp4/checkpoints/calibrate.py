"""Measures activations, for the scales that a conversion writes for them."""

import math
import warnings
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ._convert.options import is_amax, is_number
from ._files.errors import CheckpointError, Exit
from ._files.files import checked_path, write_json
from ._layouts.names import module_of

Activations = jax.Array | np.ndarray
_ACCEPTED = "a number above 1e-30 and below 1e30"
_SAFE_PERCENTILE = 99.999


def write_input_amaxes(
    batches: Iterable[tuple[str, Activations]],
    output: Path | str,
    *,
    headroom: float = 1.0,
    percentile: float | None = None,
) -> dict[str, float]:
    """Finds the amax of each module's activations and writes the file that ``ConvertOptions.input_amax`` takes.

    ``jnvfp4.flax.calibrate`` makes the pairs from a Flax model.

    Args:
      batches: pairs of the name of a module or of its weight, such as ``model.layers.0.mlp.down_proj``, and the
        activations that its weight multiplies: a float array of any shape. A module may have any number of batches.
      output: the JSON file. An older file of this name is replaced.
      headroom: 1 or more. The amaxes are multiplied by it, so that activations larger than those of the batches are
        not clipped where the model runs.
      percentile: above 0, at most 100. If it is given, the amax of a batch is this percentile of the magnitudes.
        Magnitudes above it are clipped where the model runs, so one below 99.999 is warned of: the 99th to 99.99th
        lost 1 to 25 dB in https://github.com/NVIDIA/Model-Optimizer/pull/1545.

    Returns:
      the amax of each module: the largest of its batches, times ``headroom``. A module without an activation other than
      0 is left out, with a warning.

    Raises:
      CheckpointError: ``output`` is a directory or in none (found before the first batch), a batch is no pair of a
        name and an array of floats, activations are not finite, an amax is not above 1e-30 and below 1e30, no module
        has activations, or ``headroom`` or ``percentile`` is out of its range. Nothing is written.
    """
    path = _checked_output(output)
    if percentile is not None and not (is_number(percentile) and 0 < percentile <= 100):
        raise CheckpointError(f"percentile is {percentile!r}", "a number above 0, at most 100", code=Exit.USAGE)
    if not (is_number(headroom) and 1 <= headroom < math.inf):
        raise CheckpointError(f"headroom is {headroom!r}", "a finite number, 1 or more", code=Exit.USAGE)
    if percentile is not None and percentile < _SAFE_PERCENTILE:
        text = f"percentile is {percentile}: below {_SAFE_PERCENTILE} clipped activations lose up to 25 dB"
        warnings.warn(f"{text}; the default is the amax", stacklevel=2)
    amaxes: dict[str, float] = {}
    for i, batch in enumerate(batches):
        name, x = _checked(batch, i)
        amax = _amax(x, percentile) if x.size else 0.0
        if not math.isfinite(amax):
            count = int((~np.isfinite(np.asarray(x))).sum())
            raise CheckpointError(f"{_subject(name, i)} have {count} values that are not finite", "finite values")
        if amax >= 1 and not is_amax(amax):
            raise CheckpointError(f"{_subject(name, i)} have the amax {amax:.3g}", _ACCEPTED)
        amaxes[module_of(name)] = max(amaxes.get(module_of(name), 0.0), amax)
    found = {module: amax * headroom for module, amax in sorted(amaxes.items()) if amax > 0}
    if not found:
        raise CheckpointError("no module has activations", "batches of names and arrays that are not all 0")
    for module, amax in found.items():
        if not is_amax(amax):
            raise CheckpointError(f"activations of {module!r:.200} have the amax {amax:.3g}", _ACCEPTED)
    for module in sorted(amaxes.keys() - found.keys()):
        warnings.warn(f"{module}: no activation other than 0, so {path.name} has no amax for it", stacklevel=2)
    write_json(path, found)
    return found


def _checked_output(output: Path | str) -> Path:
    path = checked_path(output)
    if path.is_dir():
        raise CheckpointError("is a directory", "a file", file=path, code=Exit.USAGE)
    if not path.parent.is_dir():
        observed = "is a file" if path.parent.exists() else "is missing"
        raise CheckpointError(observed, "a directory", file=path.parent, code=Exit.USAGE)
    return path


def _checked(batch: object, i: int) -> tuple[str, Activations]:
    if not isinstance(batch, tuple) or len(batch) != 2 or not isinstance(batch[0], str):
        kind = type(batch).__name__
        of = f" of {' and '.join(type(b).__name__ for b in batch)}" if isinstance(batch, tuple) else ""
        raise CheckpointError(f"batch {i} is a {kind}{of}", "a name and an array", code=Exit.USAGE)
    name, x = batch
    if not module_of(name):
        raise CheckpointError(f"batch {i} has the name {name!r}", "the name of a module", code=Exit.USAGE)
    is_array = isinstance(x, Activations)
    if not is_array or not jnp.issubdtype(x.dtype, jnp.floating):
        kind = str(x.dtype) if is_array else type(x).__name__
        raise CheckpointError(f"{_subject(name, i)} are {kind}", "an array of floats", code=Exit.USAGE)
    if isinstance(x, jax.core.Tracer):
        expected = "an array with values, outside of jit"
        raise CheckpointError(f"{_subject(name, i)} are traced", expected, code=Exit.USAGE)
    return name, x


def _subject(name: str, i: int) -> str:
    return f"activations of {name!r:.200} in batch {i}"


def _amax(x: Activations, percentile: float | None) -> float:
    """Returns the largest magnitude, or a percentile of the magnitudes, rounded up to one of them. NaN stays NaN."""
    if percentile is None:
        xp = jnp if isinstance(x, jax.Array) else np
        return float(xp.abs(x).max())
    magnitudes = np.abs(np.asarray(x).astype(np.float64))
    if not np.isfinite(magnitudes).all():
        return math.nan
    return float(np.percentile(magnitudes, percentile, method="higher"))
