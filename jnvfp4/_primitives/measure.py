"""nvfp4_measure: (x, data, scale, amax, largest) -> counts and sums over x and the tensor that was made of it.

XLA computes it, in one loop over blocks: codes are decoded by shifts and masks, and no value is stored. It is a
primitive so that devices add their sums by one all-reduce; XLA gathers what a reduction of several operands makes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from .._core.mesh import Shape, axes_of, axes_of_dims, keep_blocks, part_shardings, typed
from .._core.softfloat import ABS, INF, Bits, to_bits
from ..spec import BLOCK, WINDOW, Format
from ._base import Backend, Body, Partition, Proposal, make_primitive
from ._batching import batch_size, batched

CLIP = np.float32(6 * (1 + 2**-20))  # 6, and room for the roundings of the quantizer and of what compares with it
COUNTS, SUMS = 5, 2
TINY = np.finfo(np.float32).tiny  # the smallest normal number
_LARGEST = np.finfo(np.float32).max


class MeasureParams(NamedTuple):
    """Holds the static parameters of ``nvfp4_measure``."""

    format: Format
    every: int  # one of so many rows along the axis before the last is looked at
    keep: int = 0  # leading axes that vmap has added, of all operands and results


def _abstract(p: MeasureParams, x: ShapedArray, *_parts: ShapedArray) -> list[ShapedArray]:
    lead, axes = x.shape[: p.keep], axes_of_dims(x)[: p.keep]
    return [typed(x, (*lead, n), d, [*axes, None]) for n, d in ((COUNTS, jnp.int32), (SUMS, jnp.float32))]


def _local(p: MeasureParams, _backend: Backend, *operands: jax.Array) -> Sequence[jax.Array]:
    """Counts nonzero elements, underflows, saturations, subnormal scales and blocks; sums squared errors and elements.

    Squares are in units of the power of two next to ``largest``. A factor of an amax is one too, so it rounds nothing.
    """
    *parts, largest = operands
    x, data, scale, amax = (_some_rows(p, part, parts[0].ndim - 2) for part in parts)
    blocks_seen = jnp.full(scale.shape[: p.keep], math.prod(scale.shape[p.keep :]), jnp.int32)
    own, largest, scale = _aligned(amax, scale), _aligned(largest, scale), scale[..., None]
    blocks, factor = x.reshape(*scale.shape[:-1], BLOCK).astype(jnp.float32), inverse_power(own)
    blocks = _rotated(blocks * factor) if p.format.rht else blocks
    value = jnp.abs(blocks if p.format.rht else blocks * factor)
    code, magnitude = _codes(data.reshape(*scale.shape[:-1], BLOCK // 2))
    decoded = lax.bitcast_convert_type(scale, jnp.float8_e4m3fn).astype(jnp.float32)
    step = decoded * (own * factor) * np.float32(1 / (6 * p.format.e4m3_max))
    limit = jnp.where(scale & 0x7F == 0, np.float32(np.inf), step * CLIP)
    error = jnp.square(magnitude * (step * np.float32(2**14)) - value)
    norm = value * jnp.minimum(value, _LARGEST)  # XLA takes (x f)^2 for x^2 f^2, and the square of a small x underflows
    if amax.ndim > p.keep:
        ratio = jnp.square(_power(_exponent(own) - _exponent(largest)))
        error, norm = error * ratio, norm * ratio
    nonzero = (to_bits(blocks) & ABS) + ABS >> 31  # a carry: XLA compares with 0 in float32, where subnormals are 0
    flags = nonzero.astype(jnp.int32), (nonzero > 0) & (code == 0), value > limit
    subnormal = jnp.broadcast_to((scale & 0x78 == 0) & (scale & 7 != 0), value.shape)
    of_rows = _sums([value.ndim - 2, value.ndim - 1], *(v.astype(jnp.int32) for v in (*flags, subnormal)), error, norm)
    *counts, of_subnormal, error, norm = _sums(range(p.keep, value.ndim - 2), *of_rows)
    return [jnp.stack([*counts, of_subnormal // BLOCK, blocks_seen], -1), jnp.stack([error, norm], -1)]


def _some_rows(p: MeasureParams, part: jax.Array, axis: int) -> jax.Array:
    """Takes the rows that are looked at of x, codes, block scales, or amaxes if each row has one."""
    return lax.slice_in_dim(part, 0, None, p.every, axis=axis) if part.ndim > axis else part


def _aligned(amax: jax.Array, scale: jax.Array) -> jax.Array:
    """Makes an amax broadcast with the elements of blocks, whose leading axes it has."""
    amax = jnp.abs(amax)
    if amax.ndim == scale.ndim:  # of windows
        return jnp.repeat(amax, WINDOW // BLOCK, axis=-1)[..., None]
    return amax.reshape(*amax.shape, *(1,) * (scale.ndim + 1 - amax.ndim))


def _sums(axes: Iterable[int], *operands: jax.Array) -> list[jax.Array]:
    """Sums all in one loop."""
    zeros = [np.zeros((), v.dtype) for v in operands]
    add = lambda a, b: tuple(p + q for p, q in zip(a, b, strict=True))  # noqa: E731
    return list(lax.reduce(operands, tuple(zeros), add, tuple(axes)))


def _rotated(blocks: jax.Array) -> jax.Array:
    """Rotates blocks [..., 16] as ``reference.rht16`` does, at any power of two."""
    v = [_bfloat16(blocks[..., i]) * (-1 if 0xD7E8 >> i & 1 else 1) for i in range(BLOCK)]
    for stride in (1, 2, 4, 8):
        v = [v[i ^ stride] - v[i] if i & stride else v[i] + v[i ^ stride] for i in range(BLOCK)]
    return _bfloat16(jnp.stack(v, axis=-1) * np.float32(0.25))


def _codes(data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the codes [..., 16] without signs of bytes [..., 8], and the magnitudes that they stand for times 2^-14.

    The three bits of a code are the last two of the exponent and the first of the fraction of a float16 number.
    """
    codes = data[..., None] >> (lax.broadcasted_iota(jnp.uint8, (*data.shape, 2), data.ndim) << 2) & 7
    codes = codes.reshape(*data.shape[:-1], BLOCK).astype(jnp.uint16)
    return codes, lax.bitcast_convert_type(codes << 9, jnp.float16).astype(jnp.float32)


def inverse_power(amax: jax.Array) -> jax.Array:
    """Returns the power of two that brings amax to [1, 2), or to [2, 4) if it is 2^127 or more; 2^127 for subnormals.

    Squares overflow and underflow early.
    """
    return _float(np.uint32(254 << 23) - jnp.minimum(to_bits(amax) & INF, np.uint32(253 << 23)))


def _exponent(x: jax.Array) -> jax.Array:
    return (lax.bitcast_convert_type(x, jnp.uint32) >> 23 & 0xFF).astype(jnp.int32)


def _power(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent; 0 below 2^-126."""
    return _float((jnp.maximum(exponent + 127, 0) << 23).astype(jnp.uint32))


def _float(bits: Bits) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bfloat16(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x, 8, 7)  # XLA may delete two casts


# ---------------------------------------------------------------- vmap and devices
def _batch(p: MeasureParams, bind: Callable, args, dims):
    size = batch_size(args, dims)
    return bind(p._replace(keep=p.keep + 1), *(batched(size, v, d) for v, d in zip(args, dims, strict=True))), [0, 0]


def _partition(p: MeasureParams, proposed: Proposal) -> Partition:
    shapes = proposed.shapes
    axes = keep_blocks(proposed.mesh, proposed.operands[0], shapes[0], (1, p.format.unit))
    kept, over = axes[: p.keep], tuple(axis for entry in axes[p.keep :] for axis in axes_of(entry))

    def wrap(local: Body) -> Body:
        return lambda *operands: tuple(lax.psum(local(*operands), over) if over else local(*operands))

    return [axes, *part_shardings(axes, shapes[3]), kept], 2 * [[*kept, None]], wrap


def _rule(p: MeasureParams, x: Shape, _data: Shape, _scale: Shape, amax: Shape, _largest: Shape) -> tuple[list, list]:
    dims = [f"d{i}" for i in range(len(x))]
    return [dims, *part_shardings(dims, amax), dims[: p.keep]], 2 * [[*dims[: p.keep], None]]


measure_p = make_primitive(
    "nvfp4_measure", abstract=_abstract, local=_local, batch=_batch, partition=_partition, rule=_rule
)
