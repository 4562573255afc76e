"""The quantizers one would write in float jnp: the speed baseline. Not exact: see docs/numerics.md.

Signatures as in ``jnvfp4``, every spec; a quantized tensor is (data, scale, amax).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jnvfp4 import Format, NVFP4Tensor, QuantSpec

Quantized = tuple[jax.Array, jax.Array, jax.Array]
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
HADAMARD16 = np.array([[(-1.0) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)], np.float32)


def quantize(x: jax.Array, spec: QuantSpec, *, amax: Any = None, key: Any = None, transpose: bool = False) -> Quantized:
    """x [M, K]: data uint8 [M, K/2], scale float8_e4m3fn [M, K/16], amax as in ``NVFP4Tensor``."""
    x = (x.T if transpose else x).astype(jnp.float32)
    blocks = x.reshape(x.shape[0], -1, 16)
    if spec.format.rht:
        blocks = blocks @ HADAMARD16
    amax = _amax(blocks, spec.format) if amax is None else amax
    encode = 6.0 * spec.format.e4m3_max / _per_block(amax, spec.format)
    base = _block_amax(blocks, spec.block_rows) * (encode * (1 / 6))
    index, scale = _map(blocks, base, encode, key)
    if spec.select != "max6":
        index4, scale4 = _map(blocks, 1.5 * base, encode, None)
        target = jnp.abs(blocks) * encode
        four = _error(index4, scale4, target, spec) < _error(index, scale, target, spec)
        index, scale = jnp.where(four, index4, index), jnp.where(four, scale4, scale)
    codes = (index | (jnp.signbit(blocks).astype(jnp.uint8) << 3)).reshape(x.shape)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale[..., 0], amax


def quantize_pair(x: jax.Array, row: QuantSpec, col: QuantSpec, *, amax: Any = None, key: Any = None) -> tuple:
    """x and its transpose."""
    row_amax, col_amax = amax or (None, None)
    return quantize(x, row, amax=row_amax, key=key), quantize(x, col, amax=col_amax, key=key, transpose=True)


def dequantize(t: NVFP4Tensor, dtype: Any) -> jax.Array:
    return _decode(t.data, t.scale, t.amax, t.format).astype(dtype)


def transpose(t: NVFP4Tensor, spec: QuantSpec) -> Quantized:
    """A tensor of 16x16 tiles."""
    assert spec.block_rows == 16
    codes = jnp.stack([t.data & 15, t.data >> 4], -1).reshape(t.shape).T
    return codes[:, 0::2] | codes[:, 1::2] << 4, jnp.repeat(t.scale[::16].T, 16, axis=0), t.amax


def _decode(data: jax.Array, scale: jax.Array, amax: jax.Array, fmt: Format) -> jax.Array:
    codes = jnp.stack([data & 15, data >> 4], -1).reshape(data.shape[0], -1, 16)
    values = _value(codes & 7) * jnp.where(codes > 7, -1.0, 1.0)
    decode = _per_block(amax, fmt) / (6.0 * fmt.e4m3_max)
    values = values * (scale.astype(jnp.float32)[..., None] * decode)
    if fmt.rht:
        values = values @ HADAMARD16
    return values.reshape(data.shape[0], -1)


def _amax(blocks: jax.Array, fmt: Format) -> jax.Array:
    magnitude = jnp.abs(blocks)
    if fmt.amax_scope == "tensor":
        return jnp.max(magnitude)
    if fmt.amax_scope == "row":
        return jnp.max(magnitude, (1, 2))
    return jnp.max(magnitude.reshape(blocks.shape[0], -1, 64), -1)


def _per_block(amax: jax.Array, fmt: Format) -> jax.Array:
    """In a shape that broadcasts with [M, K/16, 1]."""
    if fmt.amax_scope == "window64":
        return jnp.repeat(amax, 4, -1)[..., None]
    return amax.reshape(-1, 1, 1)


def _block_amax(blocks: jax.Array, rows: int) -> jax.Array:
    found = jnp.max(jnp.abs(blocks), -1, keepdims=True)
    if rows == 1:
        return found
    tiles = jnp.max(found.reshape(-1, rows, *found.shape[1:]), 1)
    return jnp.repeat(tiles, rows, 0)


def _map(blocks: jax.Array, base: jax.Array, encode: jax.Array, key: Any) -> tuple[jax.Array, jax.Array]:
    """Indices into the grid 0, 0.5, ... 6 and the scale."""
    scale = jnp.minimum(base, 448.0).astype(jnp.float8_e4m3fn)
    magnitude = jnp.abs(blocks / (scale.astype(jnp.float32) / encode))
    if key is not None:
        step = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
        jitter = jax.random.bits(key, blocks.shape, jnp.uint8).astype(jnp.float32) / 256
        magnitude = jnp.floor(magnitude / step + jitter) * step
    above = [(magnitude >= t) if i % 2 else (magnitude > t) for i, t in enumerate(TIES)]
    return sum(above[1:], above[0].astype(jnp.uint8)), scale


def _value(index: jax.Array) -> jax.Array:
    i = index.astype(jnp.float32)
    return jnp.where(i < 5, 0.5 * i, jnp.where(i < 7, i - 2.0, 6.0))


def _error(index: jax.Array, scale: jax.Array, target: jax.Array, spec: QuantSpec) -> jax.Array:
    """Of a candidate, over the elements that share a scale, in the scaled domain."""
    difference = _value(index) * scale.astype(jnp.float32) - target
    error = jnp.sum(jnp.abs(difference) if spec.select == "mae" else difference**2, -1, keepdims=True)
    if spec.block_rows == 1:
        return error
    tiles = jnp.sum(error.reshape(-1, spec.block_rows, *error.shape[1:]), 1)
    return jnp.repeat(tiles, spec.block_rows, 0)
