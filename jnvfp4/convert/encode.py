"""Amax, codes and block scales of a weight, a slice of its rows at a time.

Rows are independent once the amax is known, so slices change no byte. The kernels are those of `jnvfp4.quantize`; what
the globals need is computed on the host, since XLA rewrites divisions by constants.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from jnvfp4 import quantize
from jnvfp4.convert.errors import CheckpointError
from jnvfp4.spec import BLOCK, QuantSpec

CHUNK_BYTES = 64 << 20  # of a tensor at once, where nothing else is asked for


@dataclass(frozen=True)
class Where:
    """A device, and whether its native kernels or the jnp reference quantize. The bytes are the same."""

    device: jax.Device
    by: Literal["native", "reference"] | None = None

    def put(self, x: np.ndarray) -> jax.Array:
        return jax.device_put(x, self.device)


def slices(shape: tuple[int, ...], itemsize: int, most_bytes: int) -> Iterator[slice]:
    """Slices of the first axis of about `most_bytes`; of a matrix at multiples of 16 rows, since blocks are whole."""
    row_bytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * itemsize)
    step = BLOCK if len(shape) == 2 else 1
    rows = max(step, most_bytes // row_bytes // step * step)
    for first in range(0, shape[0], rows):
        yield slice(first, min(first + rows, shape[0]))


def _float32_or_16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # infinity is found with what else is not finite
        return x.astype(np.float32) if x.dtype == np.float64 else x


@dataclass(frozen=True)
class Amax:
    """The largest magnitude of a weight, or of each of its rows, float32; and where it is not finite, if anywhere."""

    value: np.ndarray
    not_finite: int = 0
    first: tuple[int, ...] | None = None


# Of a weight whose magnitudes are looked at together: what stays in a cache.
_AMAX_BYTES = 1 << 20


def find_amax(x: np.ndarray, each_row: bool) -> Amax:
    """The amax of a weight [N, K], exact: the order of magnitudes is that of their bits, where NaN and Inf are last."""
    found, bad, first = np.zeros(x.shape[0], np.float32), 0, None
    for rows in slices(x.shape, x.dtype.itemsize, _AMAX_BYTES):
        part = np.ascontiguousarray(_float32_or_16(x[rows]))
        bits = part.view(f"u{part.dtype.itemsize}")
        largest = (bits & (np.iinfo(bits.dtype).max >> 1)).max(axis=1, initial=0)
        found[rows] = largest.view(part.dtype).astype(np.float32)
        if not np.isfinite(found[rows]).all():
            wrong = np.argwhere(~np.isfinite(part.astype(np.float32)))
            bad += len(wrong)
            first = first or (rows.start + int(wrong[0][0]), int(wrong[0][1]))
    return Amax(found if each_row else np.asarray(found.max(initial=0)), bad, first)


def encode(
    x: np.ndarray, amax: np.ndarray, spec: QuantSpec, where: Where, most_bytes: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """First row, packed codes [n, K/2] uint8 and block scales [n, K/16] uint8 of one slice after the other.

    Args:
      x: a weight [N, K], finite.
      amax: float32, [] or [N], as the spec's scope says.
      spec: how it is quantized.
      where: it is quantized.
      most_bytes: of a slice of x.
    """
    if not np.all(np.isfinite(amax)):
        raise CheckpointError(f"amax is {amax}", "finite")
    for rows in slices(x.shape, x.dtype.itemsize, most_bytes):
        part = np.ascontiguousarray(_float32_or_16(x[rows]))
        short = -part.shape[0] % spec.block_rows  # 16x16 blocks are whole; rows of zeros change none of them
        if short:
            part = np.concatenate([part, np.zeros((short, part.shape[1]), part.dtype)])
        own = amax[rows] if amax.ndim else amax
        t = quantize(where.put(part), spec, amax=where.put(np.asarray(own, np.float32)), implementation=where.by)
        n = rows.stop - rows.start
        yield rows.start, np.asarray(t.data)[:n], np.asarray(t.scale)[:n].view(np.uint8)
