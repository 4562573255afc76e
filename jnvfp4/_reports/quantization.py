"""``quantization_report``: the errors that quantization makes in a tensor, in five numbers."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .. import reference
from .._core.softfloat import ABS, INF, Bits, clamp_max, constant, is_nan, mul, to_bits
from .._core.tensor import NVFP4Tensor
from .._ops.arguments import Checks
from .._ops.quantize import dequantize, quantize
from .._primitives._checks import check_operand
from .._primitives.measure import CLIP, TINY, inverse_power
from ..spec import BLOCK, NVFP4, QuantSpec

LARGEST_SCALE = np.uint8(0x7E)  # 448
INVERSE_MAX = np.uint32(1 << 21)  # 2^-128, the inverse of FLT_MAX


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class QuantizationReport:
    """Holds the result of ``quantization_report``: a pytree of float32 scalars; shares are from 0 to 1.

    Attributes:
      clip_share: of the elements, those that saturate: larger in magnitude than 6 (by more than rounding, a
        millionth) after the multiplication by the block's encode scale, where the block's stored scale is not 0.
      zero_scale_share: of the blocks of 16, those whose stored scale is 0, so that they dequantize to zeros:
        blocks of zeros, and blocks too small beside the amax.
      saturated_scale_share: of the blocks, those whose stored scale is 448, the largest.
      map_to_4_share: of the blocks, those where 4over6 chose another stored scale than that of map-to-6.
      relative_error: ||dequantize(quantize(x)) - x|| / ||x||, Frobenius norms.
    """

    clip_share: jax.Array
    zero_scale_share: jax.Array
    saturated_scale_share: jax.Array
    map_to_4_share: jax.Array
    relative_error: jax.Array


def quantization_report(
    x: ArrayLike,
    spec: QuantSpec = NVFP4,
    *,
    amax: ArrayLike | None = None,
    key: jax.Array | None = None,
    transpose: bool = False,
) -> QuantizationReport:
    """Measures what ``quantize(x, spec, amax=amax, key=key, transpose=transpose)`` changes in ``x``.

    Args and errors as in ``quantize``: x [..., M, K], float32, bfloat16 or float16.

    Returns:
      One report on all of ``x``; use vmap for one on each matrix. Inside shard_map it is on the device's part.

    Shares are counts in integers, exact for fewer than 2^31 elements, divided once. A block that holds part of a
    16x16 tile counts as a block. For a spec with ``rht`` they concern the rotated values, while the error is that
    of the values rotated back. The error's sums are in float32, in XLA's order; it is 0 where no element is a
    normal number, and NaN where one is NaN or infinite. NaN is never clipped, infinity always is unless its block
    scale is NaN; a NaN scale is neither zero nor saturated.
    """
    check = Checks("quantization_report")
    check.spec("spec", spec)
    array, given = check.array("x", x), None if amax is None else check.amax(amax)
    check.choice("transpose", transpose, (True, False))
    check_operand(check.op, jax.typeof(array), None if given is None else jax.typeof(given), spec, transpose)
    return _report(array, given, check.stochastic_key(key, spec), spec, transpose)


@partial(jax.jit, static_argnums=(3, 4))  # step by step, its operations would be compiled one by one
def _report(
    array: jax.Array, amax: jax.Array | None, key: jax.Array | None, spec: QuantSpec, transpose: bool
) -> QuantizationReport:
    t = quantize(array, spec, amax=amax, key=key, transpose=transpose)
    array = jnp.swapaxes(array, -1, -2) if transpose else array
    blocks = to_bits(array).reshape(*t.scale.shape, BLOCK)
    if spec.format.rht:
        blocks = reference.rht16(blocks)
    scale = lax.bitcast_convert_type(t.scale, jnp.uint8)
    amaxes = reference.per_block(to_bits(t.amax), array.ndim, spec.format.amax_scope)
    return QuantizationReport(
        clip_share=_share(_clipped(blocks, scale, amaxes, spec)),
        zero_scale_share=_share(scale == 0),
        saturated_scale_share=_share(scale == LARGEST_SCALE),
        map_to_4_share=_share(_maps_to_4(blocks, scale, amaxes, spec)),
        relative_error=_relative_error(array, t),
    )


def _share(chosen: jax.Array) -> jax.Array:
    return jnp.sum(chosen, dtype=jnp.int32).astype(jnp.float32) / np.float32(max(chosen.size, 1))


def _clipped(blocks: Bits, scale: jax.Array, amaxes: Bits, spec: QuantSpec) -> jax.Array:
    """Says which elements saturate. -> bool [..., K/16, 16]

    Where the quantizer divides (for the scale of the tensor, its inverse and the inverse of a block's scale), this
    multiplies, since XLA takes long to compile an exact division: an element times the encode scale is above 6 where
    the element is above 6 decode scales. Each encode scale ends at FLT_MAX, and so its inverse at INVERSE_MAX.
    """
    amaxes = amaxes & ABS
    decode = jnp.maximum(mul(amaxes, reference.reciprocal_max6(spec.format.e4m3_max)), INVERSE_MAX)
    decode = jnp.where((amaxes == 0) | (amaxes == INF), reference.ONE, decode)  # as encode_scale has it
    largest = mul(jnp.maximum(mul(reference.e4m3_decode(scale), decode), INVERSE_MAX), constant(CLIP))
    above = (blocks & ABS) > clamp_max(largest)[..., None]
    return above & ~is_nan(blocks) & (scale != 0)[..., None]


def _maps_to_4(blocks: Bits, scale: jax.Array, amaxes: Bits, spec: QuantSpec) -> jax.Array:
    """Says whether the stored scale of a block differs from the one that maps its amax to 6. -> bool [..., K/16]"""
    if spec.select not in ("mae", "mse"):
        return jnp.zeros(scale.shape, bool)
    block_amax = reference.amax_bits(blocks, axis=-1)
    if spec.block_rows == BLOCK:
        block_amax = reference.over_tiles(block_amax, lambda tiles: jnp.max(tiles, axis=-2))
    encode = reference.encode_scale(amaxes, spec.format.e4m3_max)
    return scale != reference.candidate_scales(block_amax, encode)[0]


def _relative_error(x: jax.Array, t: NVFP4Tensor) -> jax.Array:
    """Compares values times a power of two that brings the largest near 1: squares overflow and underflow early."""
    amax = reference.find_amax(x, "tensor")
    factor = inverse_power(amax)
    values = x.astype(jnp.float32)
    norm, error = (jnp.sqrt(jnp.sum(jnp.square(v * factor))) for v in (values, dequantize(t) - values))
    return jnp.where(amax < TINY, jnp.float32(0), error / norm)
