"""NVFP4 in jnp: the oracle, and the lowering wherever no native kernel exists.

The functions of ffi/numerics.h under the same names, in the same order, on float32 bit patterns
(``softfloat``), followed by the whole operations. Bitwise equal to the kernels on every XLA backend, eager
and under jit. The rules in words: docs/numerics.md.
"""

from typing import Any

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
    sqrt,
    sub,
    to_bits,
    unpack,
)
from .spec import BLOCK, WINDOW, Format, QuantSpec

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


def e2m1_encode_stochastic(b: Bits, r: jax.Array) -> jax.Array:
    """Adds r/256 of a grid step to the magnitude, r in 0..255, and truncates to the grid. NaN gives 0. -> uint8"""
    a = b & ABS
    step256 = jnp.where(
        a >= constant(4.0), constant(2 / 256), jnp.where(a >= constant(2.0), constant(1 / 256), constant(0.5 / 256))
    )
    t = add(a, mul(to_bits(r.astype(jnp.float32)), step256))
    grid = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    magnitude = sum((t >= constant(g)).astype(jnp.uint32) for g in grid)
    return jnp.where(is_nan(b), 0, magnitude | ((b & SIGN) >> 28)).astype(jnp.uint8)


# ---------------------------------------------------------------- random bits
def mul_wide(a: int, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The 64-bit product of two uint32 as (high, low)."""
    al, ah, bl, bh = np.uint32(a & 0xFFFF), np.uint32(a >> 16), b & 0xFFFF, b >> 16
    low, middle, middle2 = al * bl, ah * bl, al * bh
    carry = (low >> 16) + (middle & 0xFFFF) + (middle2 & 0xFFFF)
    return ah * bh + (middle >> 16) + (middle2 >> 16) + (carry >> 16), np.uint32(a) * b


def add_wide(low: jax.Array, high: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(low, high) + n, for a 64-bit number in two uint32 and a uint32."""
    total = low + n
    return total, high + (total < low).astype(jnp.uint32)


def random_bits(key: tuple, low: jax.Array, high: jax.Array, transposed: bool) -> jax.Array:
    """Philox4x32-10 at counter (low, high, orientation, 0) -> [..., 16] bytes, element i from word i / 4."""
    c0, c1, c2, c3 = low, high, jnp.full_like(low, int(transposed)), jnp.zeros_like(low)
    k0, k1 = key
    for _ in range(10):
        (h0, l0), (h1, l1) = mul_wide(0xD2511F53, c0), mul_wide(0xCD9E8D57, c2)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = k0 + np.uint32(0x9E3779B9), k1 + np.uint32(0xBB67AE85)
    words = jnp.stack(jnp.broadcast_arrays(c0, c1, c2, c3), axis=-1)
    shifts = 8 * lax.broadcasted_iota(jnp.uint32, (*words.shape, 4), words.ndim)
    return ((words[..., None] >> shifts) & 0xFF).reshape(*words.shape[:-1], BLOCK)


def block_bits(stream: jax.Array, rows: int, blocks: int, row_blocks: int, transposed: bool) -> jax.Array:
    """The random bytes [..., rows, blocks, 16] of matrices whose stream words are [..., 4]: key, first block."""
    shape = (*stream.shape[:-1], rows, blocks)
    row, col = (lax.broadcasted_iota(jnp.uint32, shape, len(shape) - i) for i in (2, 1))
    key0, key1, low, high = (jnp.broadcast_to(stream[..., i][..., None, None], shape) for i in range(4))
    row_high, row_low = mul_wide(row_blocks, row)
    low, high = add_wide(low, high + row_high, row_low)
    low, high = add_wide(low, high, col)
    return random_bits((key0, key1), low, high, transposed)


# ---------------------------------------------------------------- random Hadamard transform
def flip_signs(v: Bits) -> Bits:
    """[..., 16]. The signs are computed, since custom_partitioning takes no array constants."""
    return v ^ ((np.uint32(0xD7E8) >> lax.broadcasted_iota(jnp.uint32, v.shape, v.ndim - 1)) << 31)


def _bf16_round(b: Bits) -> Bits:
    return to_bits(from_bits(b, jnp.bfloat16))


def hadamard16(v: Bits) -> Bits:
    """[..., 16]: stages of (a + b, a - b) with strides 1, 2, 4, 8, then a quarter."""
    for stride in (1, 2, 4, 8):
        pairs = v.reshape(*v.shape[:-1], BLOCK // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = jnp.stack([add(a, b), sub(a, b)], axis=-2).reshape(v.shape)
    return mul(v, constant(0.25))


def rht16(v: Bits) -> Bits:
    """[..., 16]: bfloat16 in, bfloat16 out. Adding +0.0 makes a zero positive."""
    return _bf16_round(add(hadamard16(flip_signs(_bf16_round(v))), np.uint32(0)))


def rht16_inverse(v: Bits) -> Bits:
    """[..., 16] of dequantized values, in float32."""
    return flip_signs(hadamard16(v))


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


# ---------------------------------------------------------------- 4over6: which of two block scales
def candidate_scales(block_amax: Bits, encode: Bits) -> tuple[jax.Array, jax.Array]:
    """The scales that map the block's amax to 6 and to 4. -> uint8"""
    base = mul(div(block_amax, constant(6.0)), encode)
    return e4m3_encode(base), e4m3_encode(mul(base, constant(1.5)))


def row_error(x: Bits, codes: jax.Array, scale: jax.Array, amax: Bits, encode: Bits, spec: QuantSpec) -> Bits:
    """The error of a candidate over blocks [..., 16], summed from element 0 to 15; the rest is [...] or broadcasts."""
    products = mul(e2m1_decode(codes), e4m3_decode(scale)[..., None])
    if spec.error_math == "fp16":
        difference = sub(products, mul(x, encode[..., None]))
    else:
        difference = sub(div(mul(products, amax[..., None]), constant(6.0 * spec.format.e4m3_max)), x)
    terms = mul(difference, difference) if spec.select == "mse" else difference & ABS
    # A loop, since sixteen unrolled additions take long to compile.
    return lax.fori_loop(0, BLOCK, lambda i, s: add(s, terms[..., i]), jnp.zeros(terms.shape[:-1], jnp.uint32))


def tile_error(rows: Bits) -> Bits:
    """[..., 16, cols] errors of the rows of tiles -> [..., cols], halves first."""
    for half in (8, 4, 2, 1):
        rows = add(rows[..., :half, :], rows[..., half:, :])
    return rows[..., 0, :]


def choose_four(error_six: Bits, error_four: Bits) -> jax.Array:
    """Ties and NaN are map-to-6. Errors are not negative, so their bits order as they do."""
    return (error_four < error_six) & ~is_nan(error_six)


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


# ---------------------------------------------------------------- producers (ffi/producers.h)
def sum_by_halves(t: Bits) -> Bits:
    """[..., n] -> [...]: element k plus element k + n/2, then n/4, ..., 1 apart; n a power of two."""
    n = t.shape[-1]

    def halve(i: jax.Array, t: Bits) -> Bits:  # what is beyond the sums is never read again
        return add(t, jnp.roll(t, -(n >> (i + 1)), axis=-1))

    return lax.fori_loop(0, n.bit_length() - 1, halve, t)[..., 0]


def norm_factor(v: Bits, eps: float) -> Bits:
    """[..., K] -> [...]: fl(1 / fl(sqrt(fl(fl(sum of squares / K) + eps))))"""
    *lead, cols = v.shape
    blocks = sum_by_halves(mul(v, v).reshape(*lead, cols // BLOCK, BLOCK))
    padded = 1 << (cols // BLOCK - 1).bit_length()
    squares = sum_by_halves(jnp.pad(blocks, [(0, 0)] * len(lead) + [(0, padded - cols // BLOCK)]))
    return div(ONE, sqrt(add(div(squares, constant(cols)), constant(eps))))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., M, K], weight [K] or [..., K] -> bfloat16 [..., M, K]"""
    v, w = to_bits(x), to_bits(weight)
    w = w.reshape(*w.shape[:-1], *(1,) * (v.ndim - w.ndim), w.shape[-1])
    return from_bits(mul(mul(v, norm_factor(v, eps)[..., None]), w), jnp.bfloat16)


def less(a: Bits, bound: float) -> jax.Array:
    """a < bound, for a negative bound; False for NaN."""
    return (a > constant(bound)) & (a <= (SIGN | INF))


def exp2_fraction(f: Bits) -> Bits:
    """2^f for |f| <= 1/2, within 7.5e-5 of it."""
    p = np.uint32(0x3D61FBB0)
    for c in (0x3E786F0D, 0x3F31798D, 0x3F7FFB49):
        p = add(mul(p, f), np.uint32(c))
    return p


_MAGIC = 12582912.0  # 1.5 * 2^23


def silu_mul(gate: jax.Array, up: jax.Array) -> jax.Array:
    """g / (1 + e^-g) * u -> bfloat16. See ``silu_mul`` in ffi/producers.h."""
    g, u = to_bits(gate), to_bits(up)
    tiny = less(g, -80.0)
    c = jnp.where(less(g, -190.0), constant(-190.0), g)
    t = mul(c, constant(-1.44269502))
    t = jnp.where(less(t, -64.0), constant(-64.0), t)
    m = add(t, constant(_MAGIC))
    n = m - constant(_MAGIC) - jnp.where(tiny, np.uint32(150), np.uint32(0))
    e = exp2_fraction(sub(t, sub(m, constant(_MAGIC)))) + (n << 23)
    r = div(ONE, add(jnp.where(tiny, np.uint32(0), ONE), e))
    power = jnp.where(tiny, constant(2.0**-75), ONE)
    return from_bits(mul(mul(mul(c, r), mul(u, power)), power), jnp.bfloat16)


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


def per_block(amax: jax.Array, ndim: int, scope: str) -> jax.Array:
    """amax of any scope, made to broadcast with the blocks [..., M, K/16]."""
    return jnp.repeat(amax, WINDOW // BLOCK, axis=-1) if scope == "window64" else per_row(amax, ndim)


def find_amax(x: jax.Array, scope: str) -> jax.Array:
    """The float32 amax of x [..., M, K]: () for scope "tensor", [..., M] for "row", [..., M, K/64] for "window64".

    ``amax_bits`` before widening: magnitudes order alike in 16 bits, and XLA reduces half as many bytes.
    """
    width = jnp.uint32 if x.dtype == jnp.float32 else jnp.uint16
    magnitudes = lax.bitcast_convert_type(x, width) & np.array(jnp.iinfo(width).max // 2, width)
    if scope == "window64":
        magnitudes = magnitudes.reshape(*x.shape[:-1], x.shape[-1] // WINDOW, WINDOW)
    largest = jnp.max(magnitudes, axis=None if scope == "tensor" else -1, initial=np.array(0, width))
    return from_bits(to_bits(lax.bitcast_convert_type(largest, x.dtype)))


def find_rht_amax(x: jax.Array, keep: int) -> jax.Array:
    """The amax of the rotated x [..., M, K], one for each index of its first ``keep`` axes. -> x.shape[:keep]"""
    blocks = to_bits(x).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    return from_bits(amax_bits(rht16(blocks), axis=tuple(range(keep, blocks.ndim))))


def over_tiles(rows: Bits, combine) -> Bits:
    """[..., M, cols] -> the same shape, with ``combine`` ([..., 16, cols] -> [..., cols]) over each 16 rows."""
    *lead, count, cols = rows.shape
    tiles = rows.reshape(*lead, count // BLOCK, BLOCK, cols)
    return jnp.broadcast_to(combine(tiles)[..., None, :], tiles.shape).reshape(rows.shape)


def _encode(x: Bits, scale: jax.Array, decode: Bits, random: jax.Array | None = None) -> jax.Array:
    """The codes of blocks [..., 16], rounded to nearest without random bytes."""
    scaled = mul(x, block_encode_scale(scale, decode)[..., None])
    return e2m1_encode(scaled) if random is None else e2m1_encode_stochastic(scaled, random)


def _choose(x: Bits, block_amax: Bits, amax: Bits, decode: Bits, spec: QuantSpec) -> tuple[jax.Array, jax.Array]:
    """4over6: the chosen scale and codes of blocks [..., M, K/16, 16]."""
    amax, encode = amax & ABS, encode_scale(amax, spec.format.e4m3_max)
    # Both candidates as one array, since every operation here is many instructions to compile.
    scales = jnp.stack(candidate_scales(block_amax, encode))
    x = x[None]
    amax, encode, decode = (jnp.broadcast_to(v, (1, *block_amax.shape)) for v in (amax, encode, decode))
    codes = _encode(x, scales, decode)
    errors = row_error(x, codes, scales, amax, encode, spec)
    if spec.block_rows == BLOCK:
        errors = over_tiles(errors, tile_error)
    four = choose_four(errors[0], errors[1])
    return jnp.where(four, scales[1], scales[0]), jnp.where(four[..., None], codes[1], codes[0])


def quantize(
    x: jax.Array,
    spec: QuantSpec,
    amax: jax.Array | None = None,
    transpose: bool = False,
    stream: jax.Array | None = None,
    row_blocks: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """-> data uint8 [..., M, K/2], scale float8_e4m3fn [..., M, K/16], amax. See ``jnvfp4.quantize``.

    ``stream`` is what ``block_bits`` takes; ``row_blocks`` the blocks in a row of the whole array, if x is a part.
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
    if spec.select != "max6":
        scale, codes = _choose(blocks, block_amax, amaxes, decode, spec)
    else:
        scale, random = block_scale(block_amax, block_mult), None
        if spec.rounding == "stochastic":
            assert stream is not None
            random = block_bits(stream, rows, cols // BLOCK, row_blocks or cols // BLOCK, transpose)
        codes = _encode(blocks, scale, decode, random)
    data = pack_codes(codes.reshape(x.shape))
    return data, lax.bitcast_convert_type(scale, jnp.float8_e4m3fn), amax


def dequantize(
    data: jax.Array, scale: jax.Array, amax: jax.Array, format: Format, dtype=jnp.float32, rotate_back: bool = True
) -> jax.Array:
    """-> [..., M, K] of ``dtype``. See ``jnvfp4.dequantize``."""
    amaxes = per_block(to_bits(amax), data.ndim, format.amax_scope)
    factor = dequantize_factor(_scale_bytes(scale), amaxes, format.e4m3_max)
    codes = unpack_codes(data)
    values = mul(e2m1_decode(codes.reshape(*factor.shape, BLOCK)), factor[..., None])
    if format.rht and rotate_back:
        values = rht16_inverse(values)
    return from_bits(values.reshape(codes.shape), dtype)


def _align(b: jax.Array, ndim: int) -> jax.Array:
    """Gives [N, ...] the leading axes of a batched left operand."""
    return b.reshape((1,) * (ndim - b.ndim) + b.shape)


def _block_steps(data: jax.Array, scale: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """Doubled codes [blocks / group, group, ..., M, 16] and float32 scales [blocks / group, group, ..., M]."""
    twice = jnp.moveaxis(e2m1_twice(unpack_codes(data)).reshape(*scale.shape, BLOCK), -2, 0)
    s = jnp.moveaxis(lax.bitcast_convert_type(e4m3_decode(_scale_bytes(scale)), jnp.float32), -1, 0)
    return twice.reshape(-1, group, *twice.shape[1:]), s.reshape(-1, group, *s.shape[1:])


def _add_block(y: jax.Array, block) -> tuple[jax.Array, None]:
    """y = fl(y + fl(fl(s_a * s_b) * dot16)).

    Plain float32 is exact here: s_a * s_b * dot16 has at most 20 significant bits, so no product rounds and
    contraction changes nothing, and every sum is a multiple of 2^-20, so none is subnormal.
    """
    (qa, sa), (qb, sb) = block
    dot = jnp.sum(qa[..., :, None, :] * qb[..., None, :, :], axis=-1)  # 4 * dot16, exact
    return y + sa[..., :, None] * sb[..., None, :] * (dot.astype(jnp.float32) * np.float32(0.25)), None


def sum_blocks(a_data: jax.Array, a_scale: jax.Array, b_data: jax.Array, b_scale: jax.Array) -> Bits:
    """``_add_block`` over blocks ascending along K. -> [..., M, N]"""
    zero = jnp.zeros((*a_data.shape[:-1], b_data.shape[-2]), jnp.float32)
    a_steps, b_steps = (_block_steps(d, s, 1) for d, s in ((a_data, a_scale), (b_data, b_scale)))
    step = lambda y, group: _add_block(y, jax.tree.map(lambda v: v[0], group))  # noqa: E731
    return to_bits(lax.scan(step, zero, (a_steps, b_steps))[0])


def sum_windows(a: tuple, b: tuple, factor) -> Bits:
    """y = fl(y + fl(factor * sum of a window's four blocks)) over windows ascending along K. -> [..., M, N]

    ``factor(w)`` is the window's ``alpha_w4a4``, broadcasting with [..., M, N]; the product's alpha is then 1.
    """
    zero = jnp.zeros((*a[0].shape[:-1], b[0].shape[-2]), jnp.float32)

    def step(y, window):
        blocks, w = window
        total = lax.scan(_add_block, zero, blocks)[0]
        return add(y, mul(to_bits(total), factor(w))), None

    steps = tuple(_block_steps(data, scale, WINDOW // BLOCK) for data, scale in (a, b))
    windows = jnp.arange(steps[0][0].shape[0])
    return lax.scan(step, jnp.zeros(zero.shape, jnp.uint32), (steps, windows))[0]


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


def _row_amax(amax: jax.Array, ndim: int, scope: str, window: Any) -> Bits:
    """The amax of each row, [..., M, 1], that holds in a window."""
    bits = to_bits(amax)
    if scope == "window64":
        return lax.dynamic_index_in_dim(bits, window, axis=-1)
    return per_row(bits, ndim)


def _col_amax(amax: jax.Array, ndim: int, scope: str, window: Any) -> Bits:
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
    """a [..., M, K] (16-bit floats, or data, scale and amax) times b [N, K] or [..., N, K] -> [..., M, N]."""
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
