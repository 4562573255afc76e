"""NVFP4 in jnp: the oracle, and the lowering wherever no native kernel exists.

The rules of ffi/core/numerics.h under the same names, in the same sections and order, on float32 bit
patterns (``softfloat``, which has the operations and casts), followed by the whole operations. Bitwise equal to the
kernels on every XLA backend, eager and under jit; attention alone adds plain floats, in the same order and within the
same bound. The rules in words: docs/numerics.md.
"""

import functools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ._core.softfloat import (
    ABS,
    INF,
    NAN,
    SIGN,
    Bits,
    add,
    add_wide,
    bf16_round,
    canonical_nan,
    clamp_max,
    constant,
    div,
    from_bits,
    is_nan,
    mul,
    mul_wide,
    reciprocal,
    round_off,
    sub,
    to_bits,
    unpack,
)
from .spec import BLOCK, ROW_SCALED, WINDOW, Format, QuantSpec

ONE = constant(1.0)
SCALE_NAN = np.uint8(0x7F)
CHUNK = 64  # tokens of a cache that attention sums by themselves
LEAST_SEGMENT, MOST_SEGMENTS = 256, 32  # of what it merges these sums to: tokens, and how many of a sequence


# ---------------------------------------------------------------- E4M3 (block scales, never negative)
def e4m3_encode(b: Bits) -> jax.Array:
    """Clamps to 448, then rounds to nearest even. NaN gives 0x7f. -> uint8"""
    a = jnp.minimum(b, constant(448.0))
    exponent, mantissa = unpack(a)
    normal = round_off(a, np.uint32(20)) - np.uint32(120 << 3)
    subnormal = round_off(mantissa, jnp.clip(141 - exponent, 1, 26).astype(jnp.uint32))
    code = jnp.where(a >= constant(2.0**-6), normal, jnp.where(exponent < 116, 0, subnormal))
    return jnp.where(is_nan(b), SCALE_NAN, code.astype(jnp.uint8))


def e4m3_decode(s: jax.Array) -> Bits:
    """Decodes E4M3 bytes exactly, with their sign; 0x7f and 0xff give NaN."""
    k = (s & 0x7F).astype(jnp.uint32)
    shift = lax.clz(k | 1) - 28  # brings the leading one of a subnormal to bit 3
    subnormal = jnp.where(k == 0, 0, ((k << shift) << 20) - np.uint32(1 << 23) + ((121 - shift) << 23))
    magnitude = jnp.where(k == 0x7F, NAN, jnp.where(k < 8, subnormal, (k << 20) + np.uint32(120 << 23)))
    return magnitude | (s.astype(jnp.uint32) & 0x80) << 24


# ---------------------------------------------------------------- E2M1 (values)
_TIES = tuple(constant(t) for t in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))


def e2m1_encode(b: Bits) -> jax.Array:
    """Rounds to nearest, a tie to the even code, and saturates. Keeps the sign: -0.0 gives 8. NaN gives 0. -> uint8"""
    a = b & ABS
    above = [(a >= t) if i % 2 else (a > t) for i, t in enumerate(_TIES)]  # a tie goes to the even code
    magnitude = sum(c.astype(jnp.uint32) for c in above)
    return jnp.where(is_nan(b), 0, magnitude | ((b & SIGN) >> 28)).astype(jnp.uint8)


def e2m1_decode(code: jax.Array) -> Bits:
    """Decodes 4-bit codes exactly; 8 gives -0.0."""
    k = (code & 7).astype(jnp.uint32)
    magnitude = jnp.where(k == 0, 0, jnp.where(k == 1, constant(0.5), ONE + ((k - 2) << 22)))
    return magnitude | (code.astype(jnp.uint32) & 8) << 28


def e2m1_twice(code: jax.Array) -> jax.Array:
    """Returns twice the E2M1 value, an int32: block dot products are exact in it."""
    k = (code & 7).astype(jnp.int32)
    magnitude = jnp.where(k < 4, k, (2 + (k & 1)) << (jnp.maximum(k, 4) // 2 - 1))
    return jnp.where((code & 8) != 0, -magnitude, magnitude)


def e2m1_stochastic_sum(magnitude: Bits, r: jax.Array) -> Bits:
    """Adds r/256 of a grid step to a magnitude, r in 0..255."""
    step256 = jnp.where(
        magnitude >= constant(4.0),
        constant(2 / 256),
        jnp.where(magnitude >= constant(2.0), constant(1 / 256), constant(0.5 / 256)),
    )
    return add(magnitude, mul(to_bits(r.astype(jnp.float32)), step256))


def e2m1_encode_stochastic(b: Bits, r: jax.Array) -> jax.Array:
    """Adds r/256 of a grid step to the magnitude and truncates to the grid. NaN gives 0. -> uint8"""
    t = e2m1_stochastic_sum(b & ABS, r)
    grid = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    magnitude = sum((t >= constant(g)).astype(jnp.uint32) for g in grid)
    return jnp.where(is_nan(b), 0, magnitude | ((b & SIGN) >> 28)).astype(jnp.uint8)


# ---------------------------------------------------------------- random bits
def philox_round_key(key: tuple, i: int, w: int) -> jax.Array:
    """Returns word w of the key of round i."""
    return key[w] + np.uint32(i * (0x9E3779B9, 0xBB67AE85)[w] & 0xFFFFFFFF)


def philox(key: tuple, low: jax.Array, high: jax.Array, transposed: bool) -> tuple[jax.Array, ...]:
    """Runs Philox4x32-10 at counter (low, high, orientation, 0). -> four words"""
    c0, c1, c2, c3 = low, high, jnp.full_like(low, int(transposed)), jnp.zeros_like(low)
    for i in range(10):
        (h0, l0), (h1, l1) = mul_wide(0xD2511F53, c0), mul_wide(0xCD9E8D57, c2)
        c0, c1, c2, c3 = h1 ^ c1 ^ philox_round_key(key, i, 0), l1, h0 ^ c3 ^ philox_round_key(key, i, 1), l0
    return c0, c1, c2, c3


def random_bits(key: tuple, low: jax.Array, high: jax.Array, transposed: bool) -> jax.Array:
    """Returns the random bytes of blocks, [..., 16]: element i takes byte i % 4 of word i / 4."""
    words = jnp.stack(jnp.broadcast_arrays(*philox(key, low, high, transposed)), axis=-1)
    shifts = 8 * lax.broadcasted_iota(jnp.uint32, (*words.shape, 4), words.ndim)
    return ((words[..., None] >> shifts) & 0xFF).reshape(*words.shape[:-1], BLOCK)


# ---------------------------------------------------------------- random Hadamard transform
def flip_sign(v: Bits) -> Bits:
    """Negates elements of [..., 16]. The signs are computed, since custom_partitioning takes no array constants."""
    return v ^ ((np.uint32(0xD7E8) >> lax.broadcasted_iota(jnp.uint32, v.shape, v.ndim - 1)) << 31)


def hadamard16(v: Bits) -> Bits:
    """Applies stages of (a + b, a - b) with strides 1, 2, 4, 8 to [..., 16]. A quarter of it is its own inverse."""
    for stride in (1, 2, 4, 8):
        pairs = v.reshape(*v.shape[:-1], BLOCK // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = jnp.stack([add(a, b), sub(a, b)], axis=-2).reshape(v.shape)
    return v


def rht16(v: Bits) -> Bits:
    """Rotates [..., 16], to bfloat16. Adding +0.0 makes a zero positive."""
    sums = hadamard16(flip_sign(bf16_round(v)))
    return bf16_round(add(mul(sums, constant(0.25)), np.uint32(0)))


def rht16_inverse(v: Bits) -> Bits:
    """Rotates [..., 16] of dequantized values back, in float32."""
    return flip_sign(mul(hadamard16(v), constant(0.25)))


# ---------------------------------------------------------------- scales
def reciprocal_max6(e4m3_max: int) -> Bits:
    """Returns fl(1 / (6 * e4m3_max))."""
    return constant(np.float32(1) / np.float32(6 * e4m3_max))


def encode_scale(amax: Bits, e4m3_max: int) -> Bits:
    """Returns S_enc = min(6 * e4m3_max / amax, FLT_MAX); 1 for a zero or infinite amax. NaN stays."""
    amax = amax & ABS
    s = clamp_max(div(constant(6.0 * e4m3_max), amax))
    return jnp.where((amax == 0) | (s == 0), ONE, s)


def global_scale(amax: Bits, e4m3_max: int) -> tuple[Bits, Bits]:
    """Returns (S_dec = 1 / S_enc, S_enc * (1/6))."""
    s_enc = encode_scale(amax, e4m3_max)
    return reciprocal(s_enc), mul(s_enc, np.uint32(0x3E2AAAAB))


def block_scale(block_amax: Bits, block_mult: Bits, headroom: bool = False) -> jax.Array:
    """Returns the stored scale of a block by the plain rule, which maps the largest magnitude to 6. -> uint8

    ``headroom`` makes the scale larger by 1/16 before it is rounded, so that the rounding maps nothing above 6.
    """
    scale = mul(block_amax, block_mult)
    return e4m3_encode(mul(scale, constant(1.0625)) if headroom else scale)


def block_encode_scale(scale: jax.Array, decode: Bits) -> Bits:
    """Returns the factor of a block's elements before E2M1."""
    return clamp_max(reciprocal(mul(e4m3_decode(scale), decode)))


def amax_bits(b: Bits, axis: int | tuple[int, ...] | None = None) -> Bits:
    """Returns the largest magnitude, an integer maximum: exact, the same in any order, and NaN is the largest."""
    return canonical_nan(jnp.max(b & ABS, axis=axis, initial=np.uint32(0)))


# ---------------------------------------------------------------- 4over6: which of two block scales
def candidate_scales(block_amax: Bits, encode: Bits) -> tuple[jax.Array, jax.Array]:
    """Returns the scales that map the block's amax to 6 and to 4. -> uint8"""
    base = mul(div(block_amax, constant(6.0)), encode)
    return e4m3_encode(base), e4m3_encode(mul(base, constant(1.5)))


def strict_difference(q: Bits, x: Bits, scale: Bits, amax: Bits, e4m3_max: int) -> Bits:
    """Compares the decoded value of an element that rounds to q with x."""
    return sub(div(mul(mul(q, scale), amax), constant(6.0 * e4m3_max)), x)


def scaled_difference(q: Bits, x: Bits, scale: Bits, encode: Bits) -> Bits:
    """Compares q * s, which fp16 holds exactly, with x * S_enc."""
    return sub(mul(q, scale), mul(x, encode))


def add_error(total: Bits, difference: Bits, squared: bool) -> Bits:
    """Adds one element's error to the sum of a row of 16."""
    return add(total, mul(difference, difference) if squared else difference & ABS)


def _sum_errors(differences: Bits, squared: bool) -> Bits:
    """Sums the errors of [..., 16] from element 0 to 15. A loop, since sixteen unrolled steps take long to compile."""

    def step(i: jax.Array, total: Bits) -> Bits:
        return add_error(total, differences[..., i], squared)

    return lax.fori_loop(0, BLOCK, step, jnp.zeros(differences.shape[:-1], jnp.uint32))


def row_error_strict(x: Bits, q: Bits, scale: Bits, amax: Bits, e4m3_max: int, squared: bool) -> Bits:
    """Sums the strict errors of blocks [..., 16] that round to q; scale and amax are [...] or broadcast."""
    return _sum_errors(strict_difference(q, x, scale[..., None], amax[..., None], e4m3_max), squared)


def row_error_scaled(x: Bits, q: Bits, scale: Bits, encode: Bits, squared: bool) -> Bits:
    """Sums the fast errors of blocks [..., 16] that round to q; scale and encode are [...] or broadcast."""
    return _sum_errors(scaled_difference(q, x, scale[..., None], encode[..., None]), squared)


def tile_error(rows: Bits) -> Bits:
    """Sums the errors [..., 16, cols] of the rows of tiles, halves first. -> [..., cols]"""
    for half in (8, 4, 2, 1):
        rows = add(rows[..., :half, :], rows[..., half:, :])
    return rows[..., 0, :]


def choose_four(error_six: Bits, error_four: Bits) -> jax.Array:
    """Tells whether to map to 4; a tie or a NaN maps to 6. Errors are not negative, so their bits order as they do."""
    return (error_four < error_six) & ~is_nan(error_six)


# ---------------------------------------------------------------- search: which of eleven block scales
def search_offset(i: jax.Array) -> jax.Array:
    """Returns how many codes the i-th scale that is tried is from the one of the plain rule: 0, -3..-1, 1..7."""
    return jnp.where(i == 0, 0, jnp.where(i < 4, i - 4, i - 3))


def search_candidate(rule: jax.Array, offset: jax.Array) -> jax.Array:
    """Returns the scale that is so many E4M3 codes away; the ends are 0 and 448. -> uint8"""
    return jnp.clip(rule.astype(jnp.int32) + offset, 0, 126).astype(jnp.uint8)


def improves(error: Bits, least: Bits) -> jax.Array:
    """Tells whether an error is below the least so far; a tie or a NaN is not."""
    return (error < least) & ~is_nan(least)


# ---------------------------------------------------------------- decoding and products
def dequantize_factor(scale: jax.Array, amax: Bits, e4m3_max: int) -> Bits:
    """Computes what the decoded values of a block are multiplied by."""
    return mul(mul(e4m3_decode(scale), amax), reciprocal_max6(e4m3_max))


def alpha_w4a4(amax_a: Bits, amax_b: Bits, e4m3_max_a: int, e4m3_max_b: int) -> Bits:
    """Computes the factor of a product of two NVFP4 operands."""
    return div(mul(amax_a, amax_b), constant(36.0 * e4m3_max_a * e4m3_max_b))


def alpha_w4a16(amax_b: Bits, e4m3_max_b: int) -> Bits:
    """Computes the factor of a product of a 16-bit and an NVFP4 operand."""
    return div(amax_b, constant(6.0 * e4m3_max_b))


def add_block(y: jax.Array, scale_a: jax.Array, scale_b: jax.Array, dot16: jax.Array) -> jax.Array:
    """Adds a block of two NVFP4 operands to accumulators: fl(y + fl(fl(s_a * s_b) * dot16)).

    Plain float32 is exact here: s_a * s_b * dot16 has at most 20 significant bits, so no product rounds and
    contraction changes nothing, and every sum is a multiple of 2^-20, so none is subnormal. Only the sign of a zero
    needs care (``_sum_steps``).
    """
    return y + scale_a * scale_b * dot16


def add_window(y: Bits, window: Bits, alpha: Bits) -> Bits:
    """Adds the next window to accumulators."""
    return add(y, mul(alpha, window))


def add_element(y: Bits, a: Bits, b: Bits) -> Bits:
    """Adds a 16-bit element a times an NVFP4 one, b = q * s, to accumulators; b is exact."""
    return add(y, mul(a, b))


def gemm_epilogue(y: Bits, alpha: Bits, bias: Bits | None) -> Bits:
    """Multiplies accumulators by alpha, then adds the bias, in float32."""
    scaled = mul(alpha, y)
    return scaled if bias is None else add(scaled, bias)


# ---------------------------------------------------------------- whole operations
def pack_codes(codes: jax.Array) -> jax.Array:
    """Packs codes [..., K] into bytes [..., K/2], even k in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_codes(data: jax.Array) -> jax.Array:
    """Unpacks bytes [..., K/2] into codes [..., K], the low nibble first."""
    pairs = jnp.stack([data & 15, data >> 4], axis=-1)
    return pairs.reshape(*data.shape[:-1], 2 * data.shape[-1])


def block_bits(stream: jax.Array, rows: int, blocks: int, row_blocks: int, transposed: bool) -> jax.Array:
    """Returns the random bytes [..., rows, blocks, 16] of matrices; stream words [..., 4] are key and first block."""
    shape = (*stream.shape[:-1], rows, blocks)
    row, col = (lax.broadcasted_iota(jnp.uint32, shape, len(shape) - i) for i in (2, 1))
    key0, key1, low, high = (jnp.broadcast_to(stream[..., i][..., None, None], shape) for i in range(4))
    row_high, row_low = mul_wide(row_blocks, row)
    low, high = add_wide(low, high + row_high, row_low)
    low, high = add_wide(low, high, col)
    return random_bits((key0, key1), low, high, transposed)


def _scale_bytes(scale: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(scale, jnp.uint8)


def per_row(amax: jax.Array, ndim: int) -> jax.Array:
    """Makes the amax of an array of rank ``ndim``, (), one per matrix or one per row, broadcast with [..., M, 1]."""
    if amax.ndim == ndim - 1:
        return amax[..., None]
    return amax[..., None, None] if amax.ndim else amax


def per_block(amax: jax.Array, ndim: int, scope: str) -> jax.Array:
    """Makes an amax of any scope broadcast with the blocks [..., M, K/16]."""
    return jnp.repeat(amax, WINDOW // BLOCK, axis=-1) if scope == "window64" else per_row(amax, ndim)


@partial(jax.jit, static_argnums=1, inline=True)  # an eager call transfers no constants
def find_amax(x: jax.Array, scope: str) -> jax.Array:
    """Finds the float32 amax of x [..., M, K]: () for scope "tensor", [..., M] for "row", [..., M, K/64] for windows.

    ``amax_bits`` before widening: magnitudes order alike in 16 bits, and XLA reduces half as many bytes.
    """
    width = jnp.uint32 if x.dtype == jnp.float32 else jnp.uint16
    magnitudes = lax.bitcast_convert_type(x, width) & np.array(jnp.iinfo(width).max // 2, width)
    if scope == "window64":
        magnitudes = magnitudes.reshape(*x.shape[:-1], x.shape[-1] // WINDOW, WINDOW)
    largest = jnp.max(magnitudes, axis=None if scope == "tensor" else -1, initial=np.array(0, width))
    return from_bits(to_bits(lax.bitcast_convert_type(largest, x.dtype)))


def find_rht_amax(x: jax.Array, keep: int) -> jax.Array:
    """Finds the amax of the rotated x [..., M, K] for each index of its first ``keep`` axes. -> x.shape[:keep]"""
    blocks = to_bits(x).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    return from_bits(amax_bits(rht16(blocks), axis=tuple(range(keep, blocks.ndim))))


def over_tiles(rows: Bits, combine) -> Bits:
    """Applies ``combine`` ([..., 16, cols] -> [..., cols]) to each 16 rows of [..., M, cols]. -> the same shape"""
    *lead, count, cols = rows.shape
    tiles = rows.reshape(*lead, count // BLOCK, BLOCK, cols)
    return jnp.broadcast_to(combine(tiles)[..., None, :], tiles.shape).reshape(rows.shape)


def _encode(x: Bits, scale: jax.Array, decode: Bits, random: jax.Array | None = None) -> jax.Array:
    """Returns the codes of blocks [..., 16], rounded to nearest if there are no random bytes."""
    scaled = mul(x, block_encode_scale(scale, decode)[..., None])
    return e2m1_encode(scaled) if random is None else e2m1_encode_stochastic(scaled, random)


def _choose(x: Bits, block_amax: Bits, amax: Bits, decode: Bits, spec: QuantSpec) -> tuple[jax.Array, jax.Array]:
    """Chooses the 4over6 scale of blocks [..., M, K/16, 16]. -> scale, codes"""
    amax, encode = amax & ABS, encode_scale(amax, spec.format.e4m3_max)
    # Both candidates as one array, since every operation here is many instructions to compile.
    scales = jnp.stack(candidate_scales(block_amax, encode))
    x = x[None]
    amax, encode, decode = (jnp.broadcast_to(v, (1, *block_amax.shape)) for v in (amax, encode, decode))
    codes = _encode(x, scales, decode)
    q, s, squared = e2m1_decode(codes), e4m3_decode(scales), spec.select == "mse"
    if spec.error_math == "fp16":
        errors = row_error_scaled(x, q, s, encode, squared)
    else:
        errors = row_error_strict(x, q, s, amax, spec.format.e4m3_max, squared)
    if spec.block_rows == BLOCK:
        errors = over_tiles(errors, tile_error)
    four = choose_four(errors[0], errors[1])
    return jnp.where(four, scales[1], scales[0]), jnp.where(four[..., None], codes[1], codes[0])


def search_scales(x: Bits, amax: Bits) -> tuple[jax.Array, jax.Array]:
    """Searches the scales of blocks [..., 16]; amax is [...] or broadcasts. -> scale, codes"""
    encode, (decode, block_mult) = encode_scale(amax, 448), global_scale(amax, 448)
    rule = block_scale(amax_bits(x, axis=-1), block_mult)

    def try_one(i: jax.Array, best: tuple) -> tuple:
        scale = search_candidate(rule, search_offset(i))
        q = e2m1_decode(_encode(x, scale, decode))
        differences = scaled_difference(q, x, e4m3_decode(scale)[..., None], encode[..., None])
        error = _sum_errors(differences, True)
        lower = improves(error, best[0])
        return jnp.where(lower, error, best[0]), jnp.where(lower, scale, best[1])

    # A loop, since every operation here is many instructions to compile.
    _, scale = lax.fori_loop(0, 11, try_one, (jnp.full(rule.shape, INF), rule))
    return scale, _encode(x, scale, decode)


def quantize(
    x: jax.Array,
    spec: QuantSpec,
    amax: jax.Array | None = None,
    transpose: bool = False,
    stream: jax.Array | None = None,
    row_blocks: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantizes as ``jnvfp4.quantize``. -> data uint8 [..., M, K/2], scale float8_e4m3fn [..., M, K/16], amax

    ``stream`` are the words for ``block_bits``, ``row_blocks`` the blocks in a row of the whole array, if x is a part.
    """
    x = jnp.swapaxes(x, -1, -2) if transpose else x
    *lead, rows, cols = x.shape
    blocks = to_bits(x).reshape(*lead, rows, cols // BLOCK, BLOCK)
    if spec.format.rht:
        blocks = rht16(blocks)
    if amax is None:
        assert not spec.format.rht
        amax = find_amax(x, spec.format.amax_scope)
    amaxes = per_block(to_bits(amax), x.ndim, spec.format.amax_scope)
    decode, block_mult = global_scale(amaxes, spec.format.e4m3_max)
    block_amax = amax_bits(blocks, axis=-1)
    if spec.block_rows == BLOCK:
        block_amax = over_tiles(block_amax, lambda tiles: jnp.max(tiles, axis=-2))
    if spec.select == "search":
        scale, codes = search_scales(blocks, amaxes)
    elif spec.select != "max6":
        scale, codes = _choose(blocks, block_amax, amaxes, decode, spec)
    else:
        scale, random = block_scale(block_amax, block_mult, spec.scale_headroom), None
        if spec.rounding == "stochastic":
            assert stream is not None
            random = block_bits(stream, rows, cols // BLOCK, row_blocks or cols // BLOCK, transpose)
        codes = _encode(blocks, scale, decode, random)
    data = pack_codes(codes.reshape(x.shape))
    return data, lax.bitcast_convert_type(scale, jnp.float8_e4m3fn), amax


def dequantize(
    data: jax.Array, scale: jax.Array, amax: jax.Array, format: Format, dtype=jnp.float32, rotate_back: bool = True
) -> jax.Array:
    """Dequantizes as ``jnvfp4.dequantize``. -> [..., M, K] of ``dtype``"""
    amaxes = per_block(to_bits(amax), data.ndim, format.amax_scope)
    factor = dequantize_factor(_scale_bytes(scale), amaxes, format.e4m3_max)
    codes = unpack_codes(data)
    values = mul(e2m1_decode(codes.reshape(*factor.shape, BLOCK)), factor[..., None])
    if format.rht and rotate_back:
        values = rht16_inverse(values)
    return from_bits(values.reshape(codes.shape), dtype)


def transpose(data: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Transposes 16x16 tiles as ``jnvfp4.transpose``; scales are bytes. -> data [..., K, M/2], scale [..., K, M/16]"""
    *lead, rows, blocks = scale.shape
    tiles = scale.reshape(*lead, rows // BLOCK, BLOCK, blocks)
    of_tile = jnp.where(jnp.all(tiles == tiles[..., :1, :], axis=-2), tiles[..., 0, :], SCALE_NAN)
    data = pack_codes(jnp.swapaxes(unpack_codes(data), -1, -2))
    return data, jnp.repeat(jnp.swapaxes(of_tile, -1, -2), BLOCK, axis=-2)


def _align(b: jax.Array, ndim: int) -> jax.Array:
    """Adds the leading axes of a batched left operand to [N, ...], of size 1."""
    return b.reshape((1,) * (ndim - b.ndim) + b.shape)


def _block_steps(data: jax.Array, scale: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """Returns doubled codes [blocks / group, group, ..., M, 16] and float32 scales [blocks / group, group, ..., M]."""
    twice = jnp.moveaxis(e2m1_twice(unpack_codes(data)).reshape(*scale.shape, BLOCK), -2, 0)
    s = jnp.moveaxis(lax.bitcast_convert_type(e4m3_decode(_scale_bytes(scale)), jnp.float32), -1, 0)
    return twice.reshape(-1, group, *twice.shape[1:]), s.reshape(-1, group, *s.shape[1:])


def _block_step(y: jax.Array, block) -> tuple[jax.Array, None]:
    """Adds a block of the depth to all outputs [..., M, N]."""
    (qa, sa), (qb, sb) = block
    dot = jnp.sum(qa[..., :, None, :] * qb[..., None, :, :], axis=-1)  # 4 * dot16, exact
    return add_block(y, sa[..., :, None], sb[..., None, :], dot.astype(jnp.float32) * np.float32(0.25)), None


def _sum_steps(step, shape: tuple[int, ...], blocks: tuple) -> Bits:
    """Sums by ``add_block`` from +0. -> shape

    No such sum is -0. XLA replaces 0.0 + x by x where a loop has one turn, and a sum of -0 alone is then -0.
    """
    total = to_bits(lax.scan(step, jnp.zeros(shape, jnp.float32), blocks)[0])
    return jnp.where(total == SIGN, 0, total)


def sum_blocks(a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array) -> Bits:
    """Sums by ``add_block`` over blocks ascending along K. -> [..., M, N]"""
    a_steps, b_steps = (_block_steps(d, s, 1) for d, s in ((a_data, a_scale), (b_data, b_scale)))
    step = lambda y, group: _block_step(y, jax.tree.map(lambda v: v[0], group))  # noqa: E731
    return _sum_steps(step, (*a_data.shape[:-1], b_data.shape[-2]), (a_steps, b_steps))


def sum_windows(a: tuple, b: tuple, factor) -> Bits:
    """Sums by ``add_window`` over windows ascending along K, each the ``sum_blocks`` of its four blocks. -> [..., M, N]

    ``factor(w)`` is the window's ``alpha_w4a4``, broadcasting with [..., M, N]; the product's alpha is then 1.
    """
    shape = (*a[0].shape[:-1], b[0].shape[-2])

    def step(y, window):
        blocks, w = window
        return add_window(y, _sum_steps(_block_step, shape, blocks), factor(w)), None

    steps = tuple(_block_steps(data, scale, WINDOW // BLOCK) for data, scale in (a, b))
    windows = jnp.arange(steps[0][0].shape[0])
    return lax.scan(step, jnp.zeros(shape, jnp.uint32), (steps, windows))[0]


def sum_elements(a: jax.Array, b_data: jax.Array, b_scale: jax.Array) -> Bits:
    """Sums by ``add_element`` over k ascending. -> [..., M, N]"""
    b_data, b_scale = _align(b_data, a.ndim), _align(b_scale, a.ndim)
    codes = unpack_codes(b_data)
    factor = jnp.repeat(e4m3_decode(_scale_bytes(b_scale)), BLOCK, axis=-1)
    elements = mul(e2m1_decode(codes), factor)  # exact

    def step(y, column):
        a_k, b_k = column
        return add_element(y, a_k[..., :, None], b_k[..., None, :]), None

    zero = jnp.zeros((*a.shape[:-1], codes.shape[-2]), jnp.uint32)
    return lax.scan(step, zero, (jnp.moveaxis(to_bits(a), -1, 0), jnp.moveaxis(elements, -1, 0)))[0]


def _row_amax(amax: jax.Array, ndim: int, scope: str, window: ArrayLike) -> Bits:
    """Returns the amax of each row in a window, [..., M, 1]."""
    bits = to_bits(amax)
    if scope == "window64":
        return lax.dynamic_index_in_dim(bits, window, axis=-1)
    return per_row(bits, ndim)


def _col_amax(amax: jax.Array, ndim: int, scope: str, window: ArrayLike) -> Bits:
    rows = _row_amax(amax, ndim, scope, window)
    return jnp.swapaxes(rows, -1, -2) if rows.ndim else rows


def matmul(
    a: jax.Array | tuple[jax.Array, jax.Array, jax.Array],
    b: tuple[jax.Array, jax.Array, jax.Array],
    bias: jax.Array | None,
    a_format: Format | None,
    b_format: Format,
    out_dtype=jnp.bfloat16,
) -> jax.Array:
    """Multiplies a [..., M, K] (16-bit floats, or data, scale and amax) by b [N, K] or [..., N, K]. -> [..., M, N]"""
    b_data, b_scale, b_amax = b
    b_ndim = b_data.ndim
    first = np.int32(0)
    if not isinstance(a, tuple):
        y = sum_elements(a, b_data, b_scale)
        alpha = alpha_w4a16(_col_amax(b_amax, b_ndim, b_format.amax_scope, first), b_format.e4m3_max)
    else:
        assert a_format is not None
        a_data, a_scale, a_amax = a
        b_data, b_scale = _align(b_data, a_data.ndim), _align(b_scale, a_data.ndim)

        def factor(window):
            rows = _row_amax(a_amax, a_data.ndim, a_format.amax_scope, window)
            cols = _col_amax(b_amax, b_ndim, b_format.amax_scope, window)
            return alpha_w4a4(rows, cols, a_format.e4m3_max, b_format.e4m3_max)

        if "window64" in (a_format.amax_scope, b_format.amax_scope):
            y, alpha = sum_windows((a_data, a_scale), (b_data, b_scale), factor), ONE
        else:
            y, alpha = sum_blocks(a_data, a_scale, b_data, b_scale), factor(first)
    return from_bits(gemm_epilogue(y, alpha, None if bias is None else to_bits(bias)), out_dtype)


def _rows_of_chunk(part: jax.Array, pages: jax.Array | None, index: jax.Array) -> jax.Array:
    """Returns a chunk of [B, Hkv, C, ...], or that of the page that each sequence has there. -> [B, Hkv, 64, ...]

    What is not there is some other chunk, which is masked, or a page of a wrong table.
    """
    if pages is None:
        return lax.dynamic_slice_in_dim(part, index * CHUNK, CHUNK, axis=2)
    return part[jnp.clip(lax.dynamic_index_in_dim(pages, index, 1, keepdims=False), 0, part.shape[0] - 1)]


def _scaled_codes(parts: tuple) -> tuple[jax.Array, jax.Array]:
    """Decodes rows but for their amax: code * scale, which plain float32 computes exactly, and amax."""
    data, scale, amax = parts
    both = e2m1_decode(unpack_codes(data)), e4m3_decode(_scale_bytes(scale))
    q, s = (lax.bitcast_convert_type(b, jnp.float32) for b in both)
    return q * jnp.repeat(s, BLOCK, axis=-1), amax


def _sum_in_halves(x: jax.Array, axis: int) -> jax.Array:
    """Sums along an axis of 64 or 128, halves first: additions of arrays, whose order XLA cannot change."""
    while (n := x.shape[axis] // 2) > 0:
        x = lax.slice_in_dim(x, 0, n, axis=axis) + lax.slice_in_dim(x, n, 2 * n, axis=axis)
    return jnp.squeeze(x, axis)


def _two_to(n: jax.Array) -> jax.Array:
    """Computes 2^n exactly for whole numbers up to 127; 0 below -126."""
    return lax.bitcast_convert_type((jnp.clip(n, -127, 127) + 127).astype(jnp.uint32) << 23, jnp.float32)


class Sums(NamedTuple):
    """Holds the sums of query heads [B, Hkv, G] over some tokens: the result is acc / total 2^(v - m) / 2688.

    References are whole numbers, -inf where there are no tokens: what they multiply by is exact.
    """

    m: jax.Array  # reference of total
    v: jax.Array  # reference of acc
    total: jax.Array  # the sum of 2^(x - m)
    acc: jax.Array  # [B, Hkv, G, D], the sum of 2^(x - v) amax (code * scale)


def attend_chunk(q: jax.Array, keys: tuple, values: tuple, visible: jax.Array, factor: np.float32) -> Sums:
    """Sums over the visible [B, 64] of a chunk, for q [B, Hkv, G, D]; x = (q . code * scale) * (amax * factor)."""
    (k, k_amax), (v, v_amax) = _scaled_codes(keys), _scaled_codes(values)
    # XLA makes one value of what a barrier holds, not one for each use, contracted with what uses it.
    x = lax.optimization_barrier(_sum_in_halves(q[:, :, :, None, :] * k[:, :, None, :, :], 4))  # products are exact
    x = jnp.where(visible[:, None, None, :], x * (k_amax * factor)[:, :, None, :], -jnp.inf)
    x = lax.optimization_barrier(x)
    m = jnp.ceil(jnp.max(x, axis=3))
    p = lax.optimization_barrier(jnp.where(visible[:, None, None, :], jnp.exp2(x - m[..., None]), 0.0))
    v_amax = jnp.where(visible[:, None, :], v_amax, 0.0)
    largest = amax_bits(lax.bitcast_convert_type(v_amax, jnp.uint32), axis=2)
    e = jnp.clip((largest >> 23).astype(jnp.float32) - 127, -113, 127)[..., None]  # floor(log2(amax))
    half = jnp.floor(e / 2)  # 2^-127 is no normal number
    weights = p * (v_amax * _two_to(-half) * _two_to(half - e))[:, :, None, :]
    v = jnp.where(visible[:, None, :, None], v, 0.0)
    terms = lax.optimization_barrier(lax.optimization_barrier(weights)[..., None] * v[:, :, None, :, :])
    return Sums(m, m + e, _sum_in_halves(p, 3), _sum_in_halves(terms, 3))


def merge_sums(a: Sums, b: Sums) -> Sums:
    """Merges the sums over some tokens with those over later ones."""
    m, v = jnp.maximum(a.m, b.m), jnp.maximum(a.v, b.v)

    def down(to: jax.Array, reference: jax.Array) -> jax.Array:
        return _two_to(jnp.where(reference == to, 0.0, reference - to))

    total = a.total * down(m, a.m) + b.total * down(m, b.m)
    return Sums(m, v, total, a.acc * down(v, a.v)[..., None] + b.acc * down(v, b.v)[..., None])


def segment_tokens(lengths: jax.Array) -> jax.Array:
    """Returns how many tokens a segment of a sequence has: the least 256 * 2^i that leaves it at most 32 segments."""
    least = (lengths + MOST_SEGMENTS - 1) // MOST_SEGMENTS
    tokens = jnp.full_like(lengths, LEAST_SEGMENT)
    return lax.fori_loop(0, 18, lambda _, t: jnp.where(t < least, 2 * t, t), tokens)


def decode_attention(
    q: jax.Array, keys: tuple, values: tuple, pages: jax.Array | None, lengths: jax.Array, sm_scale: float
) -> jax.Array:
    """Attends as ``jnvfp4.attention.decode_attention`` for q [B, Hkv, G, D]. -> the shape and dtype of q

    Chunks of 64 tokens are merged in ascending order to segments, every fourth segment in ascending order to one of
    four sums, and these in order.
    """
    count = keys[0].shape[2] // CHUNK if pages is None else pages.shape[1]
    lengths = jnp.clip(lengths, 0, count * CHUNK)
    each = segment_tokens(lengths)
    wide, factor = q.astype(jnp.float32), np.float32(sm_scale * np.log2(np.e) / 2688)

    def only(where: jax.Array, sums: Sums, others: Sums) -> Sums:
        return jax.tree.map(lambda x, y: jnp.where(where.reshape(-1, *(1,) * (x.ndim - 1)), x, y), sums, others)

    def step(index: jax.Array, state: tuple[Sums, list[Sums]]) -> tuple[Sums, list[Sums]]:
        segment, results = state
        begin, end = index * CHUNK, (index + 1) * CHUNK
        of_keys, of_values = (tuple(_rows_of_chunk(part, pages, index) for part in parts) for parts in (keys, values))
        visible = begin + jnp.arange(CHUNK, dtype=jnp.int32) < lengths[:, None]
        chunk = attend_chunk(wide, of_keys, of_values, visible, factor)
        segment = only(begin % each == 0, chunk, merge_sums(segment, chunk))
        ends = (begin < lengths) & ((end >= lengths) | (end % each == 0))
        return segment, [
            only(ends & (begin // each % 4 == i), merge_sums(result, segment), result)
            for i, result in enumerate(results)
        ]

    none = jnp.full(q.shape[:-1], -jnp.inf)
    nothing = Sums(none, none, jnp.zeros(q.shape[:-1]), jnp.zeros(q.shape))
    _, results = lax.fori_loop(0, (jnp.max(lengths) + CHUNK - 1) // CHUNK, step, (nothing, [nothing] * 4))
    sums = functools.reduce(merge_sums, results)
    of_amax = _two_to(jnp.where(sums.total == 0, 0.0, sums.v - sums.m)) * np.float32(1 / 2688)
    out = jnp.where(sums.total[..., None] == 0, 0.0, sums.acc / sums.total[..., None] * of_amax[..., None])
    return jnp.where(out == 0, 0.0, out).astype(q.dtype)  # no zero is negative


def put_rows(part: jax.Array, rows: jax.Array, pages: jax.Array | None, positions: jax.Array) -> jax.Array:
    """Puts a row [B, Hkv, ...] of each sequence into an array of a cache; one without a place is dropped."""
    if part.dtype == jnp.float8_e4m3fn:  # as bytes, since XLA for CPUs would convert them
        bytes_of = lambda x: lax.bitcast_convert_type(x, jnp.uint8)  # noqa: E731
        put = put_rows(bytes_of(part), bytes_of(rows), pages, positions)
        return lax.bitcast_convert_type(put, jnp.float8_e4m3fn)
    nowhere = np.int32(2**31 - 1)
    if pages is None:  # by sequence, so that devices that have some of them need nothing of others
        places = jnp.where((positions >= 0) & (positions < part.shape[2]), positions, nowhere)
        return jax.vmap(lambda of, row, place: of.at[:, place].set(row, mode="drop"))(part, rows, places)
    of_table = pages.at[jnp.arange(positions.shape[0]), positions // CHUNK].get(mode="fill", fill_value=-1)
    page = jnp.where((positions >= 0) & (of_table >= 0), of_table, nowhere)
    return part.at[page, :, positions % CHUNK].set(rows, mode="drop")


def append_kv(
    keys: tuple, values: tuple, pages: jax.Array | None, k: jax.Array, v: jax.Array, positions: jax.Array
) -> list[jax.Array]:
    """Appends as ``jnvfp4.attention.append_kv`` rows k and v [B, Hkv, D]. -> six arrays"""
    both = quantize(jnp.stack([k, v]), ROW_SCALED)
    rows = (row[i] for i in range(2) for row in both)
    return [put_rows(part, row, pages, positions) for part, row in zip((*keys, *values), rows, strict=True)]
