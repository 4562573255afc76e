"""IEEE binary32 arithmetic in integers: every result is the correctly rounded one on every XLA backend.

Float jnp is no exactness oracle: XLA flushes subnormals and contracts multiply-add on CPUs, divides
inexactly on GPUs, and deletes narrow round trips under jit. XLA has no such freedom with integers.

A value is its uint32 bit pattern. The functions of the sections after "representation" are those of ffi/core/numerics.h
(where the operation ``mul`` is ``mul_rn``), rounded to nearest even, subnormals kept. A NaN result of an operation is
always ``NAN``. Everything broadcasts and works under every transform.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Bits = Any  # uint32 array or constant, a float32 bit pattern

SIGN = np.uint32(0x80000000)
ABS = np.uint32(0x7FFFFFFF)
INF = np.uint32(0x7F800000)
NAN = np.uint32(0x7FC00000)
FLOAT_MAX = np.uint32(0x7F7FFFFF)


# ---------------------------------------------------------------- representation
def constant(value: float | np.floating) -> np.uint32:
    """Returns the bit pattern of a float32 constant."""
    return np.uint32(np.float32(value).view(np.uint32))


def is_nan(b: Bits) -> Bits:
    return (b & ABS) > INF


def to_bits(x: jax.Array) -> Bits:
    """Widens float32, bfloat16 or float16 values exactly."""
    if x.dtype == jnp.float32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise TypeError(f"to_bits: x must be float32, bfloat16 or float16, got {x.dtype}")
    half = lax.bitcast_convert_type(x, jnp.uint16)
    return bf16_decode(half) if x.dtype == jnp.bfloat16 else f16_decode(half)


def from_bits(b: Bits, dtype=jnp.float32) -> jax.Array:
    """Rounds to ``dtype`` (float32, bfloat16 or float16), nearest even. NaN becomes the canonical one."""
    if dtype == jnp.float32:
        return lax.bitcast_convert_type(f32_encode(b), jnp.float32)
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise TypeError(f"from_bits: dtype must be float32, bfloat16 or float16, got {dtype}")
    half = bf16_encode(b) if dtype == jnp.bfloat16 else f16_encode(b)
    return lax.bitcast_convert_type(half, dtype)


def unpack(b: Bits) -> tuple[jax.Array, jax.Array]:
    """Splits a finite b into its biased exponent (int32, below 1 for subnormals) and 24-bit mantissa."""
    magnitude = b & ABS
    exponent, fraction = (magnitude >> 23).astype(jnp.int32), magnitude & 0x7FFFFF
    shift = lax.clz(fraction) - 8
    subnormal = exponent == 0
    return (
        jnp.where(subnormal, 1 - shift.astype(jnp.int32), exponent),
        jnp.where(subnormal, fraction << shift, fraction | 0x800000),
    )


def round_off(m: Bits, n: Bits) -> Bits:
    """Divides m by 2^n and rounds to nearest even, for 1 <= n <= 26."""
    return (m + ((np.uint32(1) << (n - 1)) - 1) + ((m >> n) & 1)) >> n


def mul_wide(a: int, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Multiplies two uint32 to 64 bits, (high, low)."""
    al, ah, bl, bh = np.uint32(a & 0xFFFF), np.uint32(a >> 16), b & 0xFFFF, b >> 16
    low, middle, middle2 = al * bl, ah * bl, al * bh
    carry = (low >> 16) + (middle & 0xFFFF) + (middle2 & 0xFFFF)
    return ah * bh + (middle >> 16) + (middle2 >> 16) + (carry >> 16), np.uint32(a) * b


def add_wide(low: jax.Array, high: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds a uint32 to a 64-bit number in two of them, (low, high)."""
    total = low + n
    return total, high + (total < low).astype(jnp.uint32)


# ---------------------------------------------------------------- one IEEE operation each
def _jam(m: jax.Array, n: jax.Array) -> jax.Array:
    """Shifts right by n and ORs what is lost into the last bit."""
    n = jnp.clip(n, 0, 31).astype(jnp.uint32)
    return (m >> n) | ((m & ((np.uint32(1) << n) - 1)) != 0).astype(jnp.uint32)


def _pack(sign: jax.Array, exponent: jax.Array, m: jax.Array) -> Bits:
    """Rounds m, in [2^26, 2^27): 24 bits and then guard, round and sticky."""
    m = _jam(m, 1 - exponent)
    rest, m = m & 7, m >> 3
    m = m + ((rest > 4) | ((rest == 4) & ((m & 1) == 1))).astype(jnp.uint32)
    base = (jnp.clip(exponent, 1, 255) - 1).astype(jnp.uint32) << 23
    return sign | jnp.minimum(base + m, INF)


def mul(a: Bits, b: Bits) -> Bits:
    a, b = jnp.asarray(a, jnp.uint32), jnp.asarray(b, jnp.uint32)
    sign = (a ^ b) & SIGN
    (ea, ma), (eb, mb) = unpack(a), unpack(b)
    ah, al, bh, bl = ma >> 12, ma & 0xFFF, mb >> 12, mb & 0xFFF
    middle = ah * bl + al * bh
    low = ((middle & 0xFFF) << 12) + al * bl
    high = ah * bh + (middle >> 12) + (low >> 24)
    low = low & 0xFFFFFF
    big = high >= np.uint32(1 << 23)
    m = jnp.where(big, (high << 3) | (low >> 21), (high << 4) | (low >> 20))
    m = m | (jnp.where(big, low & 0x1FFFFF, low & 0xFFFFF) != 0).astype(jnp.uint32)
    finite = _pack(sign, ea + eb - 127 + big.astype(jnp.int32), m)
    a, b = a & ABS, b & ABS
    zero, inf = (a == 0) | (b == 0), (a >= INF) | (b >= INF)
    nan = is_nan(a) | is_nan(b) | (zero & inf)
    return jnp.where(nan, NAN, jnp.where(inf, sign | INF, jnp.where(zero, sign, finite)))


def add(a: Bits, b: Bits) -> Bits:
    a, b = jnp.broadcast_arrays(jnp.asarray(a, jnp.uint32), jnp.asarray(b, jnp.uint32))
    swap = (a & ABS) < (b & ABS)
    a, b = jnp.where(swap, b, a), jnp.where(swap, a, b)
    (ea, ma), (eb, mb) = unpack(a), unpack(b)
    sign, same = a & SIGN, ((a ^ b) & SIGN) == 0
    x, y = ma << 3, _jam(mb << 3, ea - eb)
    m = jnp.where(same, x + y, x - y)
    shift = lax.clz(m).astype(jnp.int32) - 5  # -1: one bit too long
    aligned = jnp.where(shift < 0, _jam(m, jnp.int32(1)), m << jnp.clip(shift, 0, 31).astype(jnp.uint32))
    finite = jnp.where(m == 0, jnp.where(same, sign, 0), _pack(sign, ea - shift, aligned))
    nan = is_nan(a) | (((b & ABS) == INF) & ~same)
    return jnp.where(nan, NAN, jnp.where((a & ABS) == INF, a, finite))


def sub(a: Bits, b: Bits) -> Bits:
    return add(a, jnp.asarray(b, jnp.uint32) ^ SIGN)


def div(a: Bits, b: Bits) -> Bits:
    a, b = jnp.broadcast_arrays(jnp.asarray(a, jnp.uint32), jnp.asarray(b, jnp.uint32))
    sign = (a ^ b) & SIGN
    (ea, ma), (eb, mb) = unpack(a), unpack(b)
    less = ma < mb
    mb = jnp.maximum(mb, 1)
    rest = jnp.where(less, ma << 1, ma) - mb
    quotient = jnp.ones_like(rest)
    for bits in (8, 8, 8, 2):  # long division, as many bits as fit 32
        digit = lax.div(rest << bits, mb)
        rest = (rest << bits) - digit * mb
        quotient = (quotient << bits) | digit
    m = quotient | (rest != 0).astype(jnp.uint32)
    finite = _pack(sign, ea - eb + 127 - less.astype(jnp.int32), m)
    a, b = a & ABS, b & ABS
    nan = is_nan(a) | is_nan(b) | ((a == 0) & (b == 0)) | ((a == INF) & (b == INF))
    zero = (a == 0) | (b == INF)
    inf = (a == INF) | (b == 0)
    return jnp.where(nan, NAN, jnp.where(inf, sign | INF, jnp.where(zero, sign, finite)))


def reciprocal(a: Bits) -> Bits:
    """1 / a"""
    return div(constant(1.0), a)


def clamp_max(b: Bits) -> Bits:
    """Returns min(v, FLT_MAX) for v >= 0. Keeps NaN."""
    return jnp.where(b == INF, FLOAT_MAX, b)


# ---------------------------------------------------------------- casts
def bf16_decode(half: jax.Array) -> Bits:
    """Widens the stored bits of bfloat16 numbers, uint16."""
    return half.astype(jnp.uint32) << 16


def f16_decode(half: jax.Array) -> Bits:
    """Widens the stored bits of float16 numbers, uint16."""
    half = half.astype(jnp.uint32)
    magnitude, sign = half & 0x7FFF, (half & 0x8000) << 16
    shift = lax.clz(magnitude | 1) - 21  # brings the leading one of a subnormal to bit 10
    subnormal = ((magnitude << shift) << 13) - np.uint32(1 << 23) + ((113 - shift) << 23)
    subnormal = jnp.where(magnitude == 0, 0, subnormal)
    normal = (magnitude << 13) + np.uint32(112 << 23)
    special = (magnitude << 13) | INF
    wide = jnp.where(magnitude >= 0x7C00, special, jnp.where(magnitude < 0x400, subnormal, normal))
    return wide | sign


def canonical_nan(b: Bits) -> Bits:
    """Replaces every NaN by the one that is stored."""
    return jnp.where(is_nan(b), NAN, b)


def f32_encode(b: Bits) -> Bits:
    """Returns the stored bits of float32 numbers."""
    return canonical_nan(b)


def bf16_encode(b: Bits) -> jax.Array:
    """Rounds to bfloat16. NaN becomes the canonical one. -> uint16"""
    return jnp.where(is_nan(b), jnp.uint32(0x7FC0), round_off(b, np.uint32(16))).astype(jnp.uint16)


def bf16_round(b: Bits) -> Bits:
    """Rounds to bfloat16 and widens again."""
    return bf16_decode(bf16_encode(b))


def f16_encode(b: Bits) -> jax.Array:
    """Rounds to float16. NaN becomes the canonical one. -> uint16"""
    magnitude, sign = b & ABS, (b & SIGN) >> 16
    exponent, mantissa = unpack(b)
    subnormal = round_off(mantissa, jnp.clip(126 - exponent, 1, 26).astype(jnp.uint32))
    normal = jnp.minimum(round_off(magnitude, np.uint32(13)) - np.uint32(112 << 10), 0x7C00)
    half = jnp.where(exponent >= 113, normal, jnp.where(exponent < 101, 0, subnormal))
    half = jnp.where(magnitude >= constant(65520.0), 0x7C00, half) | sign
    return jnp.where(is_nan(b), 0x7E00, half).astype(jnp.uint16)
