"""Finds the amax of a weight and quantizes it, a slice of its rows at a time.

Once the amax is known the rows are independent, so the size of the slices changes no byte. The kernels are the same as
in ``jnvfp4.quantize``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from ..._ops.arguments import Implementation
from ..._ops.quantize import quantize
from ...calibration import gptq
from ...spec import QuantSpec
from .._files.errors import CheckpointError
from .._files.files import Rows, slices


@dataclass(frozen=True)
class Amax:
    """Holds the amax of a weight [], per row [N] or per expert [E], in float32.

    ``not_finite`` elements are NaN or infinite; ``first`` is the index of the first of them. Of a weight from MXFP4,
    ``lowest`` counts blocks of 16 by the exponent of their lowest bit, [512] or [E, 512].
    """

    value: np.ndarray
    not_finite: int = 0
    first: tuple[int, ...] | None = None
    lowest: np.ndarray | None = None


_AMAX_BYTES = 1 << 20  # of a weight whose magnitudes are compared at once, so that they stay in a cache


def find_amax(x: np.ndarray | Rows, by_row: bool) -> Amax:
    """Finds the amax of a weight [N, K] exactly.

    Magnitudes are compared as integers: their bits have the same order, with NaN and infinity above all numbers.
    """
    amax, not_finite, first = np.zeros(x.shape[0], np.float32), 0, None
    for rows in slices(x.shape, x.dtype.itemsize, _AMAX_BYTES):
        part = np.ascontiguousarray(x[rows])
        bits = part.view(f"u{part.dtype.itemsize}")
        largest = (bits & (np.iinfo(bits.dtype).max >> 1)).max(axis=1, initial=0)
        amax[rows] = largest.view(part.dtype).astype(np.float32)
        if not np.isfinite(amax[rows]).all():
            wrong = np.argwhere(~np.isfinite(part.astype(np.float32)))
            not_finite += len(wrong)
            first = first or (rows.start + int(wrong[0][0]), int(wrong[0][1]))
    return Amax(amax if by_row else np.asarray(np.max(amax, initial=0)), not_finite, first)


def encode(
    x: np.ndarray | Rows,
    amax: np.ndarray,
    spec: QuantSpec,
    device: jax.Device,
    max_bytes: int,
    implementation: Implementation = None,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Quantizes a finite weight [N, K] by its amax, float32 [] or [N], in slices of ``max_bytes``.

    The bytes are the same on every device and with every implementation.

    Yields:
      the first row of a slice, its codes uint8 [n, K/2] and its block scales uint8 [n, K/16].
    """
    if not np.all(np.isfinite(amax)):
        raise CheckpointError(f"amax is {amax}", "a finite amax")
    for rows in slices(x.shape, x.dtype.itemsize, max_bytes):
        part = np.ascontiguousarray(x[rows])
        missing = -part.shape[0] % spec.block_rows
        if missing:  # rows of zeros complete a 16x16 tile and change no scale in it
            part = np.concatenate([part, np.zeros((missing, part.shape[1]), part.dtype)])
        part_amax = np.asarray(amax[rows] if amax.ndim else amax, np.float32)
        on_device, amax_on_device = jax.device_put((part, part_amax), device)
        t = quantize(on_device, spec, amax=amax_on_device, implementation=implementation)
        n = rows.stop - rows.start
        yield rows.start, np.asarray(t.data)[:n], np.asarray(t.scale)[:n].view(np.uint8)


def encode_by_gptq(
    x: np.ndarray | Rows, amax: np.ndarray, hessian: np.ndarray, spec: QuantSpec, device: jax.Device
) -> tuple[int, np.ndarray, np.ndarray]:
    """Quantizes a finite weight [N, K] as a whole by its amax, float32 [] or [N], and the hessian [K, K] of its inputs.

    Returns:
      0, the first row, the codes uint8 [N, K/2] and the block scales uint8 [N, K/16].
    """
    w, h, amax_on_device = jax.device_put((np.ascontiguousarray(x[:]), hessian, np.asarray(amax, np.float32)), device)
    t = gptq(w, h, spec, amax=amax_on_device)
    return 0, np.asarray(t.data), np.asarray(t.scale).view(np.uint8)
