"""NVFP4 in jnp: the oracle, and the lowering wherever no native kernel exists.

The functions of ffi/numerics.h under the same names, in the same order, on float32 bit patterns
(``softfloat``), followed by the whole operations. Bitwise equal to the kernels on every XLA backend, eager
and under jit. The rules in words: docs/numerics.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .softfloat import (
    ABS,
    INF,
    NAN,
    SIGN,
    Bits,
    add,
    clamp_max,
    constant,
    div,
    from_bits,
    is_nan,
    mul,
    round_off,
    to_bits,
    unpack,
)
from .spec import BLOCK, QuantSpec

ONE = constant(1.0)
SCALE_NAN = np.uint8(0x7F)


# ---------------------------------------------------------------- E4M3 (block scales; never negative)
def e4m3_encode(b: Bits) -> jax.Array:
    """Clamps to 448, then rounds to nearest even. NaN gives 0x7f. -> uint8"""
    a = jnp.minimum(b, constant(448.0))
    exponent, mantissa = unpack(a)
    normal = round_off(a, np.uint32(20)) - np.uint32(120 << 3)
    subnormal = round_off(mantissa, jnp.clip(141 - exponent, 1, 26).astype(jnp.uint32))
    code = jnp.where(a >= constant(2.0**-6), normal, jnp.where(exponent < 116, 0, subnormal))
    return jnp.where(is_nan(b), SCALE_NAN, code.astype(jnp.uint8))


def e4m3_decode(s: jax.Array) -> Bits:
    k = (s & 0x7F).astype(jnp.uint32)
    shift = lax.clz(k | 1) - 28  # brings the leading one of a subnormal to bit 3
    subnormal = jnp.where(k == 0, 0, ((k << shift) << 20) - np.uint32(1 << 23) + ((121 - shift) << 23))
    magnitude = jnp.where(k == 0x7F, NAN, jnp.where(k < 8, subnormal, (k << 20) + np.uint32(120 << 23)))
    return magnitude | (s.astype(jnp.uint32) & 0x80) << 24


# ---------------------------------------------------------------- E2M1 (values)
_TIES = tuple(constant(t) for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))


def e2m1_encode(b: Bits) -> jax.Array:
    """Nearest even, saturating; the sign is kept, so -0.0 gives 8. NaN gives 0. -> uint8"""
    a = b & ABS
    above = [(a >= t) if i % 2 else (a > t) for i, t in enumerate(_TIES)]  # a tie goes to the even code
    magnitude = sum(c.astype(jnp.uint32) for c in above)
    return jnp.where(is_nan(b), 0, magnitude | ((b & SIGN) >> 28)).astype(jnp.uint8)


def e2m1_decode(code: jax.Array) -> Bits:
    k = (code & 7).astype(jnp.uint32)
    magnitude = jnp.where(k == 0, 0, jnp.where(k == 1, constant(0.5), ONE + ((k - 2) << 22)))
    return magnitude | (code.astype(jnp.uint32) & 8) << 28


def e2m1_twice(code: jax.Array) -> jax.Array:
    """Twice the E2M1 value, an int32: block dot products are exact in it."""
    k = (code & 7).astype(jnp.int32)
    magnitude = jnp.where(k < 4, k, (2 + (k & 1)) << (jnp.maximum(k, 4) // 2 - 1))
    return jnp.where((code & 8) != 0, -magnitude, magnitude)


# ---------------------------------------------------------------- scales
def encode_scale(amax: Bits, e4m3_max: int) -> Bits:
    """S_enc = min(6 * e4m3_max / amax, FLT_MAX); 1 for a zero or infinite amax. NaN stays, the sign is ignored."""
    amax = amax & ABS
    s = clamp_max(div(constant(6.0 * e4m3_max), amax))
    return jnp.where((amax == 0) | (s == 0), ONE, s)


def global_scale(amax: Bits, e4m3_max: int) -> tuple[Bits, Bits]:
    """(S_dec = 1 / S_enc, S_enc * (1/6))"""
    s_enc = encode_scale(amax, e4m3_max)
    return div(ONE, s_enc), mul(s_enc, np.uint32(0x3E2AAAAB))


def block_scale(block_amax: Bits, block_mult: Bits) -> jax.Array:
    """The stored scale of a block, by the plain rule (map the largest magnitude to 6). -> uint8"""
    return e4m3_encode(clamp_max(mul(block_amax, block_mult)))


def block_encode_scale(scale: jax.Array, decode: Bits) -> Bits:
    """What a block's elements are multiplied by before E2M1."""
    return clamp_max(div(ONE, mul(e4m3_decode(scale), decode)))


def amax_bits(b: Bits, axis: int | tuple[int, ...] | None = None) -> Bits:
    """The largest magnitude, as an integer maximum: exact, order free, and NaN wins."""
    m = jnp.max(b & ABS, axis=axis, initial=np.uint32(0))
    return jnp.where(m > INF, NAN, m)


# ---------------------------------------------------------------- decoding
def dequantize_factor(scale: jax.Array, amax: Bits, e4m3_max: int) -> Bits:
    return mul(mul(e4m3_decode(scale), amax), constant(np.float32(1) / np.float32(6 * e4m3_max)))


def alpha_w4a4(amax_a: Bits, amax_b: Bits, e4m3_max_a: int, e4m3_max_b: int) -> Bits:
    return div(mul(amax_a, amax_b), constant(36.0 * e4m3_max_a * e4m3_max_b))


def alpha_w4a16(amax_b: Bits, e4m3_max_b: int) -> Bits:
    return div(amax_b, constant(6.0 * e4m3_max_b))


def gemm_epilogue(y: Bits, alpha: Bits, bias: Bits | None) -> Bits:
    scaled = mul(alpha, y)
    return scaled if bias is None else add(scaled, bias)


# ---------------------------------------------------------------- whole operations
def pack_codes(codes: jax.Array) -> jax.Array:
    """[..., K] codes -> [..., K/2] bytes, even k in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_codes(data: jax.Array) -> jax.Array:
    pairs = jnp.stack([data & 15, data >> 4], axis=-1)
    return pairs.reshape(*data.shape[:-1], 2 * data.shape[-1])


def _scale_bytes(scale: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(scale, jnp.uint8)


def per_row(amax: jax.Array, ndim: int) -> jax.Array:
    """amax of an array of rank ``ndim``, (), one per matrix or one per row, made to broadcast with [..., M, 1]."""
    if amax.ndim == ndim - 1:
        return amax[..., None]
    return amax[..., None, None] if amax.ndim else amax


def find_amax(x: jax.Array, scope: str) -> jax.Array:
    """The float32 amax of x [..., M, K]: () for scope "tensor", [..., M] for "row".

    ``amax_bits`` before widening: magnitudes order alike in 16 bits, and XLA reduces half as many bytes.
    """
    width = jnp.uint32 if x.dtype == jnp.float32 else jnp.uint16
    magnitudes = lax.bitcast_convert_type(x, width) & np.array(jnp.iinfo(width).max // 2, width)
    largest = jnp.max(magnitudes, axis=-1 if scope == "row" else None, initial=np.array(0, width))
    return from_bits(to_bits(lax.bitcast_convert_type(largest, x.dtype)))


def quantize(
    x: jax.Array, spec: QuantSpec, amax: jax.Array | None = None, transpose: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """-> data uint8 [..., M, K/2], scale float8_e4m3fn [..., M, K/16], amax. See ``jnvfp4.quantize``."""
    x = jnp.swapaxes(x, -1, -2) if transpose else x
    amax = find_amax(x, spec.format.amax_scope) if amax is None else amax
    blocks = to_bits(x).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    decode, block_mult = global_scale(per_row(to_bits(amax), x.ndim), spec.format.e4m3_max)
    block_amax = amax_bits(blocks, axis=-1)
    if spec.block_rows == BLOCK:
        *lead, rows, cols = block_amax.shape
        tiles = block_amax.reshape(*lead, rows // BLOCK, BLOCK, cols)
        tile_amax = jnp.max(tiles, axis=-2, keepdims=True)
        block_amax = jnp.broadcast_to(tile_amax, tiles.shape).reshape(block_amax.shape)
    scale = block_scale(block_amax, block_mult)
    codes = e2m1_encode(mul(blocks, block_encode_scale(scale, decode)[..., None]))
    data = pack_codes(codes.reshape(x.shape))
    return data, lax.bitcast_convert_type(scale, jnp.float8_e4m3fn), amax


def dequantize(data: jax.Array, scale: jax.Array, amax: jax.Array, e4m3_max: int, dtype=jnp.float32) -> jax.Array:
    """-> [..., M, K] of ``dtype``. See ``jnvfp4.dequantize``."""
    factor = dequantize_factor(_scale_bytes(scale), per_row(to_bits(amax), data.ndim), e4m3_max)
    codes = unpack_codes(data)
    values = mul(e2m1_decode(codes.reshape(*factor.shape, BLOCK)), factor[..., None])
    return from_bits(values.reshape(codes.shape), dtype)


def _align(b: jax.Array, ndim: int) -> jax.Array:
    """Gives [N, ...] the leading axes of a batched left operand."""
    return b.reshape((1,) * (ndim - b.ndim) + b.shape)


def sum_blocks(a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array) -> Bits:
    """y = fl(y + fl(fl(s_a * s_b) * dot16)) over blocks ascending along K. -> [..., M, N]

    Plain float32 is exact here: s_a * s_b * dot16 has at most 20 significant bits, so no product rounds and
    contraction changes nothing, and every sum is a multiple of 2^-20, so none is subnormal.
    """

    def steps(data, scale):
        twice = e2m1_twice(unpack_codes(data)).reshape(*scale.shape, BLOCK)
        s = lax.bitcast_convert_type(e4m3_decode(_scale_bytes(scale)), jnp.float32)
        return jnp.moveaxis(twice, -2, 0), jnp.moveaxis(s, -1, 0)

    b_data, b_scale = _align(b_data, a_data.ndim), _align(b_scale, a_data.ndim)

    def step(y, block):
        (qa, sa), (qb, sb) = block
        dot = jnp.sum(qa[..., :, None, :] * qb[..., None, :, :], axis=-1)  # 4 * dot16, exact
        return y + sa[..., :, None] * sb[..., None, :] * (dot.astype(jnp.float32) * np.float32(0.25)), None

    zero = jnp.zeros((*a_data.shape[:-1], b_data.shape[-2]), jnp.float32)
    return to_bits(lax.scan(step, zero, (steps(a_data, a_scale), steps(b_data, b_scale)))[0])


def sum_elements(a: jax.Array, b_data: jax.Array, b_scale: jax.Array) -> Bits:
    """y = fl(y + fl(a_k * (q_k * s_k))) over k ascending. -> [..., M, N]"""
    b_data, b_scale = _align(b_data, a.ndim), _align(b_scale, a.ndim)
    codes = unpack_codes(b_data)
    factor = jnp.repeat(e4m3_decode(_scale_bytes(b_scale)), BLOCK, axis=-1)
    weight = mul(e2m1_decode(codes), factor)  # exact

    def step(y, column):
        a_k, w_k = column
        return add(y, mul(a_k[..., :, None], w_k[..., None, :])), None

    zero = jnp.zeros((*a.shape[:-1], codes.shape[-2]), jnp.uint32)
    return lax.scan(step, zero, (jnp.moveaxis(to_bits(a), -1, 0), jnp.moveaxis(weight, -1, 0)))[0]


def matmul(
    a: jax.Array | tuple[jax.Array, jax.Array, jax.Array],
    b: tuple[jax.Array, jax.Array, jax.Array],
    bias: jax.Array | None,
    a_e4m3_max: int | None,
    b_e4m3_max: int,
    out_dtype=jnp.bfloat16,
) -> jax.Array:
    """a [..., M, K] (16-bit floats, or data, scale and amax) times b [N, K] or [..., N, K] -> [..., M, N]."""
    b_data, b_scale, b_amax = b
    per_col = to_bits(b_amax)
    if b_amax.ndim:
        per_col = jnp.swapaxes(per_row(per_col, b_data.ndim), -1, -2)
    if isinstance(a, tuple):
        a_data, a_scale, a_amax = a
        assert a_e4m3_max is not None
        y = sum_blocks(a_data, a_scale, b_data, b_scale)
        alpha = alpha_w4a4(per_row(to_bits(a_amax), a_data.ndim), per_col, a_e4m3_max, b_e4m3_max)
    else:
        y = sum_elements(a, b_data, b_scale)
        alpha = alpha_w4a16(per_col, b_e4m3_max)
    return from_bits(gemm_epilogue(y, alpha, None if bias is None else to_bits(bias)), out_dtype)
