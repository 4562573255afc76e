"""nvfp4_measure: (x, data, scale, amax, largest) -> counts and sums over x and the tensor that was made of it.

XLA computes it, in one loop over blocks: codes are decoded by shifts and masks, and no value is stored. It is a
primitive so that devices add their sums by one all-reduce; XLA gathers what a reduction of several operands makes.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from .. import reference
from .._core.mesh import Shape, axes_of, axes_of_dims, keep_blocks, part_shardings, typed
from .._core.softfloat import ABS, INF, SIGN, Bits, to_bits
from ..spec import BLOCK, WINDOW, Format
from ._base import Backend, Body, Partition, Proposal, make_primitive
from ._batching import batch_size, batched

CLIP = np.float32(6 * (1 + 2**-20))  # 6, and room for the roundings of the quantizer and of what compares with it
COUNTS, SUMS = 5, 2


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
    own, largest = _aligned(amax, scale), _aligned(largest, scale)
    blocks, factor = x.reshape(*scale.shape, BLOCK), inverse_power(own)
    values, nonzero = _rotated(blocks, factor) if p.format.rht else _magnitudes(blocks, factor)
    step = (_float(reference.e4m3_decode(scale)) * (own * factor)) * np.float32(1 / (6 * p.format.e4m3_max))
    codes, coded = _codes(data.reshape(*scale.shape, BLOCK // 2))
    limit = jnp.where(scale & 0x7F == 0, np.float32(np.inf), step * CLIP)
    saturated = _total((v > limit).astype(jnp.int32) for v in values)
    step *= np.float32(2**14)
    error = _total(jnp.square(code * step - v) for code, v in zip(codes, values, strict=True))
    norm = _total(map(jnp.square, values))
    if amax.ndim > p.keep:
        ratio = jnp.square(_power(_exponent(own) - _exponent(largest)))
        error, norm = error * ratio, norm * ratio
    subnormal = ((scale & 0x78 == 0) & (scale & 7 != 0)).astype(jnp.int32)
    found = _sums(range(p.keep, scale.ndim), nonzero, nonzero - coded, saturated, subnormal, error, norm)
    return [jnp.stack([*found[:-SUMS], blocks_seen], -1), jnp.stack(found[-SUMS:], -1)]


def _some_rows(p: MeasureParams, part: jax.Array, axis: int) -> jax.Array:
    """Takes the rows that are looked at of x, codes, block scales, or amaxes if each row has one."""
    return lax.slice_in_dim(part, 0, None, p.every, axis=axis) if part.ndim > axis else part


def _aligned(amax: jax.Array, scale: jax.Array) -> jax.Array:
    """Makes an amax broadcast with the blocks, whose leading axes it has."""
    amax = jnp.abs(amax)
    if amax.ndim == scale.ndim:  # of windows
        return jnp.repeat(amax, WINDOW // BLOCK, axis=-1)
    return amax.reshape(*amax.shape, *(1,) * (scale.ndim - amax.ndim))


def _total(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


def _sums(axes: range, *operands: jax.Array) -> list[jax.Array]:
    """Sums all in one loop."""
    zeros = [np.zeros((), v.dtype) for v in operands]
    add = lambda a, b: tuple(p + q for p, q in zip(a, b, strict=True))  # noqa: E731
    return list(lax.reduce(operands, tuple(zeros), add, tuple(axes)))


def _magnitudes(blocks: jax.Array, factor: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Returns the magnitudes of the 16 elements of each block times ``factor``, and how many are not zero."""
    bits = [to_bits(blocks[..., i]) & ABS for i in range(BLOCK)]
    return [_times_power(b, factor) for b in bits], _total((b != 0).astype(jnp.int32) for b in bits)


def _times_power(bits: Bits, factor: jax.Array) -> jax.Array:
    """Multiplies by a power of two, or 0, in integers: subnormal numbers become 0.

    XLA takes (x f)^2 for x^2 f^2, and the square of a small x underflows.
    """
    sign, exponent = bits & SIGN, (bits >> 23 & 0xFF).astype(jnp.int32)
    moved = exponent + (_exponent(factor) - 127)
    gone, huge = (exponent == 0) | (moved <= 0) | (factor == 0), moved > 254
    shifted = (bits.astype(jnp.int32) + ((moved - exponent) << 23)).astype(jnp.uint32)
    found = jnp.where(gone, sign, jnp.where(huge, sign | INF, shifted))
    return _float(jnp.where(exponent == 255, bits, found))


def _rotated(blocks: jax.Array, factor: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Does the same for the rotated values, as ``reference.rht16`` rotates; ``factor`` is a power of two."""
    v = [
        _bfloat16(_times_power(to_bits(blocks[..., i]), factor)) * (-1 if 0xD7E8 >> i & 1 else 1) for i in range(BLOCK)
    ]
    for stride in (1, 2, 4, 8):
        v = [v[i ^ stride] - v[i] if i & stride else v[i] + v[i ^ stride] for i in range(BLOCK)]
    v = [jnp.abs(_bfloat16(value * np.float32(0.25))) for value in v]
    return v, _total((value != 0).astype(jnp.int32) for value in v)


def _codes(data: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Decodes the magnitudes of the bytes [..., 8] of blocks times 2^-14, and counts codes that are not zero.

    The three bits of a magnitude are the last two of the exponent and the first of the fraction of a float16 number.
    """
    # Of bytes, which a compiler loads as words: XLA would store what a bitcast to words makes.
    words = [_total(data[..., 4 * h + i].astype(jnp.uint32) << 8 * i for i in range(4)) for h in range(2)]
    found = []
    for i in range(BLOCK):
        word, shift = words[i // 8], 4 * (i % 8) - 9
        placed = (word >> shift if shift > 0 else word << -shift) & 0xE00
        found.append(lax.bitcast_convert_type(placed.astype(jnp.uint16), jnp.float16).astype(jnp.float32))
    ones = ((word | word >> 1 | word >> 2) & 0x11111111 for word in words)
    return found, _total(lax.population_count(word).astype(jnp.int32) for word in ones)


def inverse_power(amax: jax.Array) -> jax.Array:
    """Returns the power of two that brings amax to [1, 2), or to [2, 4) if it is 2^127 or more; 0 for subnormals.

    Squares overflow and underflow early, and XLA may flush what is subnormal.
    """
    exponent = _exponent(amax)
    return jnp.where(exponent == 0, np.float32(0), _power(jnp.clip(127 - exponent, -126, 126)))


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
