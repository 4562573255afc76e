// The arithmetic of NVFP4: every rule that decides a bit, for the CPU and for CUDA.
//
// Each function is a fixed sequence of IEEE binary32 operations, round to nearest even, subnormals kept, nothing
// contracted. The reference has the same sections with the same functions in the same order: the first two after
// "representation" in jnvfp4/_core/softfloat.py, the others in jnvfp4/reference.py (tests/test_numerics.py compares the
// lists). docs/numerics.md states the rules in words. Kernels also use the forms of numerics_fast.h, which compute the
// same results otherwise. No XLA, no CUDA runtime, no I/O here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#define JNVFP4_HD __host__ __device__ __forceinline__
#define JNVFP4_UNROLL _Pragma("unroll")  // keeps arrays in registers
#else
#define JNVFP4_HD inline __attribute__((always_inline))
#if defined(__clang__)
#define JNVFP4_UNROLL _Pragma("unroll")
#else
#define JNVFP4_UNROLL _Pragma("GCC unroll 16")
#endif
#endif

namespace jnvfp4 {

inline constexpr int kBlock = 16;   // elements that share one E4M3 scale
inline constexpr int kWindow = 64;  // elements that share one amax under scope window64
inline constexpr uint32_t kSign = 0x80000000u;
inline constexpr uint32_t kMagnitude = 0x7fffffffu;
inline constexpr uint32_t kInf = 0x7f800000u;
inline constexpr uint32_t kNan = 0x7fc00000u;  // the one NaN that is ever stored
inline constexpr float kFloatMax = 3.40282347e38f;
inline constexpr uint8_t kScaleNan = 0x7f;
inline constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the last bits
inline constexpr int32_t kMagicBits = 0x4b400000;

// A block scale in a register. GCC takes the narrowest vectors for a loop with a byte in it.
#if defined(__CUDACC__)
using ScaleByte = uint8_t;
#else
using ScaleByte = uint32_t;
#endif

// ---------------------------------------------------------------- representation
JNVFP4_HD uint32_t bits_of(float v) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(v);
#else
  uint32_t b;
  std::memcpy(&b, &v, sizeof b);
  return b;
#endif
}

JNVFP4_HD float float_of(uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(b);
#else
  float v;
  std::memcpy(&v, &b, sizeof v);
  return v;
#endif
}

// ---------------------------------------------------------------- one IEEE operation each
// Intrinsics on the device, so that no flag can fuse or approximate them. The host is built with
// -ffp-contract=off, where plain operators are exactly these.
JNVFP4_HD float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

JNVFP4_HD float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

JNVFP4_HD float sub_rn(float a, float b) { return add_rn(a, -b); }

JNVFP4_HD float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

JNVFP4_HD float reciprocal_rn(float a) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(a);
#else
  return 1.0f / a;
#endif
}

// min(v, FLT_MAX) that keeps NaN, for v >= 0. On bits: g++ 13 was seen to fold the float comparison wrongly.
JNVFP4_HD float clamp_max(float v) { return bits_of(v) == kInf ? kFloatMax : v; }

// ---------------------------------------------------------------- casts
JNVFP4_HD float bf16_decode(uint16_t h) { return float_of(uint32_t{h} << 16); }

JNVFP4_HD float f16_decode(uint16_t h) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(h));
#else
  // Branch free, so that a loop over it vectorises.
  constexpr uint32_t exponent = 0x7c00u << 13;
  const uint32_t magnitude = (uint32_t{h} & 0x7fffu) << 13;
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t special = magnitude + (224u << 23);
  const uint32_t subnormal = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
  const uint32_t e = magnitude & exponent;
  const uint32_t b = e == exponent ? special : e == 0 ? subnormal : normal;
  return float_of(b | (uint32_t{h} & 0x8000u) << 16);
#endif
}

JNVFP4_HD uint32_t canonical_nan(uint32_t b) { return (b & kMagnitude) > kInf ? kNan : b; }

JNVFP4_HD float f32_encode(float v) { return float_of(canonical_nan(bits_of(v))); }

JNVFP4_HD uint16_t bf16_encode(float v) {
  const uint32_t b = bits_of(v);
  const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((b & kMagnitude) > kInf ? 0x7fc0u : rounded);
}

// Rounds to bfloat16. A NaN stays one, but not always the same one.
JNVFP4_HD float bf16_round(float v) {
#if defined(__CUDA_ARCH__)
  return __bfloat162float(__float2bfloat16_rn(v));
#else
  return bf16_decode(bf16_encode(v));
#endif
}

JNVFP4_HD uint16_t f16_encode(float v) {
  const uint32_t b = bits_of(v), a = b & kMagnitude;
  const uint32_t normal = ((a + 0xfffu + ((a >> 13) & 1u)) >> 13) - (112u << 10);
  // Below 2^-14 the grid step is 2^-24, that of the float32 numbers in [0.5, 1).
  const uint32_t subnormal = bits_of(add_rn(float_of(a), 0.5f)) - bits_of(0.5f);
  const uint32_t finite = a < (113u << 23) ? subnormal : normal;
  const uint32_t capped = finite > 0x7c00u ? 0x7c00u : finite;
  return static_cast<uint16_t>((a > kInf ? 0x7e00u : capped | (b >> 16 & 0x8000u)));
}

// ---------------------------------------------------------------- E4M3 (block scales, never negative)
// Clamps to 448, then rounds to nearest even. NaN gives 0x7f.
JNVFP4_HD ScaleByte e4m3_encode(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
#else
  const uint32_t b = bits_of(v);
  const uint32_t a = b > 0x43e00000u ? 0x43e00000u : b;  // 448
  const uint32_t normal = ((a + 0x7ffffu + ((a >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 the grid step is 2^-9, that of the float32 numbers in [2^14, 2^15).
  const uint32_t subnormal = bits_of(add_rn(float_of(a), 16384.0f)) - bits_of(16384.0f);
  const uint32_t code = a < 0x3c800000u ? subnormal : normal;
  return static_cast<ScaleByte>(b > kInf ? kScaleNan : code);
#endif
}

JNVFP4_HD float e4m3_decode(ScaleByte s) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __half2float(__nv_cvt_fp8_to_halfraw(s, __NV_E4M3));
#else
  const uint32_t k = s & 0x7fu;
  const float subnormal = mul_rn(static_cast<float>(static_cast<int32_t>(k)), 0.001953125f);  // 2^-9, exact
  const uint32_t magnitude = k == 0x7fu ? kNan : k < 8u ? bits_of(subnormal) : (k << 20) + (120u << 23);
  return float_of(magnitude | (uint32_t{s} & 0x80u) << 24);
#endif
}

// ---------------------------------------------------------------- E2M1 (values)
// Nearest, a tie to the even code, saturating; the sign is kept, so -0.0 gives 8. NaN gives 0.
JNVFP4_HD uint32_t e2m1_encode(float v) {
  const uint32_t b = bits_of(v);
  const float a = float_of(b & kMagnitude);
  const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return (b & kMagnitude) > kInf ? 0u : static_cast<uint32_t>(code) | (b & kSign) >> 28;
}

JNVFP4_HD float e2m1_decode(uint32_t code) {
  const uint32_t k = code & 7u;
  const uint32_t magnitude = k == 0 ? 0u : k == 1 ? 0x3f000000u : 0x3f800000u + ((k - 2u) << 22);
  return float_of(magnitude | (code & 8u) << 28);
}

// Twice the E2M1 value, an integer: 0 1 2 3 4 6 8 12. Block dot products are exact in it.
JNVFP4_HD constexpr int32_t e2m1_twice(uint32_t code) {
  const uint32_t k = code & 7u;
  const int32_t m = static_cast<int32_t>(k < 4u ? k : (2u + (k & 1u)) << (k / 2u - 1u));
  return code & 8u ? -m : m;
}

// Stochastic rounding with 8 random bits adds r/256 of a grid step to the magnitude, then truncates to the grid. This
// is that sum; r/256 of a step is exact, so it rounds once.
JNVFP4_HD uint32_t e2m1_stochastic_sum(uint32_t magnitude_bits, uint32_t r) {
  const float a = float_of(magnitude_bits);
  const float step256 = a >= 4.0f ? 0.0078125f : a >= 2.0f ? 0.00390625f : 0.001953125f;
  return bits_of(add_rn(a, mul_rn(static_cast<float>(static_cast<int32_t>(r)), step256)));
}

// The sign is kept. NaN gives 0.
JNVFP4_HD uint32_t e2m1_encode_stochastic(float v, uint32_t r) {
  const uint32_t b = bits_of(v);
  const float t = float_of(e2m1_stochastic_sum(b & kMagnitude, r));
  const int code = (t >= 0.5f) + (t >= 1.0f) + (t >= 1.5f) + (t >= 2.0f) + (t >= 3.0f) + (t >= 4.0f) + (t >= 6.0f);
  return (b & kMagnitude) > kInf ? 0u : static_cast<uint32_t>(code) | (b & kSign) >> 28;
}

// ---------------------------------------------------------------- random bits
inline constexpr int kPhiloxRounds = 10;

// Word w of the key of a round.
JNVFP4_HD uint32_t philox_round_key(const uint32_t (&key)[2], uint32_t round, int w) {
  return w ? key[1] + round * 0xbb67ae85u : key[0] + round * 0x9e3779b9u;
}

// Philox4x32-10 (Salmon et al., SC 2011) at counter (block low, block high, orientation, 0). `round_key(round, w)` is
// what philox_round_key gives, which a kernel may have stored.
template <class RoundKey>
JNVFP4_HD void philox(uint64_t block, bool transposed, const RoundKey& round_key, uint32_t (&word)[4]) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32), c2 = transposed, c3 = 0;
  JNVFP4_UNROLL
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{0xd2511f53u} * c0, p1 = uint64_t{0xcd9e8d57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ round_key(round, 0);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ round_key(round, 1);
    c1 = static_cast<uint32_t>(p1), c3 = static_cast<uint32_t>(p0);
  }
  word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}

// The random bits of a block: element i takes byte i % 4 of word i / 4.
JNVFP4_HD void random_bits(const uint32_t (&key)[2], uint64_t block, bool transposed, uint32_t (&word)[4]) {
  philox(block, transposed, [&](int round, int w) { return philox_round_key(key, round, w); }, word);
}

// ---------------------------------------------------------------- random Hadamard transform
inline constexpr uint32_t kRhtSigns = 0xd7e8u;  // bit i: element i is negated

JNVFP4_HD float flip_sign(float v, int i) { return kRhtSigns >> i & 1u ? -v : v; }

// Four stages of (a + b, a - b) with strides 1, 2, 4, 8. A quarter of it is orthogonal, its own inverse.
JNVFP4_HD void hadamard16(float* v) {
  JNVFP4_UNROLL
  for (int stage = 0; stage < 4; ++stage) JNVFP4_UNROLL
  for (int pair = 0; pair < kBlock / 2; ++pair) {
    const int stride = 1 << stage, i = 2 * pair - (pair & (stride - 1));
    const float a = v[i], b = v[i + stride];
    v[i] = add_rn(a, b);
    v[i + stride] = add_rn(a, -b);
  }
}

// Rotates 16 numbers, to bfloat16. Their sums are multiples of 2^-133, so a quarter of them is exact. Adding +0.0 makes
// a zero positive.
JNVFP4_HD void rht16(float* v) {
  JNVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) v[i] = bf16_round(v[i]);
  JNVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) v[i] = flip_sign(v[i], i);
  hadamard16(v);
  JNVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) v[i] = add_rn(mul_rn(v[i], 0.25f), 0.0f);
  JNVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) v[i] = bf16_round(v[i]);
}

// Rotates 16 dequantized values back, in float32.
JNVFP4_HD void rht16_inverse(float* v) {
  hadamard16(v);
  JNVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) v[i] = flip_sign(mul_rn(v[i], 0.25f), i);
}

// ---------------------------------------------------------------- scales
// fl(1 / (6 * e4m3_max)) for the two values there are.
JNVFP4_HD float reciprocal_max6(float e4m3_max) { return e4m3_max == 448.0f ? 1.0f / 2688.0f : 1.0f / 1536.0f; }

// S_enc of an amax, and values derived from both.
struct GlobalScale {
  float encode;      // S_enc
  float decode;      // S_dec = 1 / S_enc
  float block_mult;  // S_enc * (1/6)
  float amax;        // magnitude
  float max6;        // 6 * e4m3_max
  float inv_max6;    // 1 / max6
};

// S_enc = min(6 * e4m3_max / amax, FLT_MAX); 1 for a zero or infinite amax. NaN stays; the sign of amax is ignored.
JNVFP4_HD float encode_scale(float amax, float e4m3_max) {
  const uint32_t magnitude = bits_of(amax) & kMagnitude;
  const float s = clamp_max(div_rn(6.0f * e4m3_max, float_of(magnitude)));
  return magnitude == 0u || bits_of(s) == 0u ? 1.0f : s;
}

JNVFP4_HD GlobalScale global_scale(float amax, float e4m3_max) {
  const float s_enc = encode_scale(amax, e4m3_max);
  return {s_enc,
          reciprocal_rn(s_enc),
          mul_rn(s_enc, float_of(0x3e2aaaabu)),  // fl(1/6)
          float_of(bits_of(amax) & kMagnitude),
          6.0f * e4m3_max,
          reciprocal_max6(e4m3_max)};
}

// With this headroom a block scale is not rounded below what maps the largest magnitude to 6, if it is a normal number:
// rounding to nearest takes at most 1/17 off. Without headroom the factor is 1.
inline constexpr float kHeadroom = 1.0625f;

// The stored scale of a block by the plain rule, which maps the largest magnitude to 6, or below it with kHeadroom.
JNVFP4_HD ScaleByte block_scale(uint32_t block_amax_bits, GlobalScale g, float headroom) {
  return e4m3_encode(mul_rn(mul_rn(float_of(block_amax_bits), g.block_mult), headroom));
}

// The factor of a block's elements before E2M1.
JNVFP4_HD float block_encode_scale(ScaleByte scale, GlobalScale g) {
  return clamp_max(reciprocal_rn(mul_rn(e4m3_decode(scale), g.decode)));
}

// The larger of two magnitudes, as integers over sign-cleared bits: exact, the same in any order, and NaN is the
// largest. Callers apply canonical_nan to the result.
JNVFP4_HD uint32_t amax_bits(uint32_t a, uint32_t b) { return a > b ? a : b; }

// ---------------------------------------------------------------- 4over6: which of two block scales
// The scales that map the block's amax to 6 and to 4.
struct Candidates {
  ScaleByte six, four;
};

JNVFP4_HD Candidates candidate_scales(uint32_t block_amax_bits, float encode_scale) {
  const float base = mul_rn(div_rn(float_of(block_amax_bits), 6.0f), encode_scale);
  return {e4m3_encode(base), e4m3_encode(mul_rn(base, 1.5f))};
}

// The strict error of an element that rounds to q compares its decoded value fl(fl(fl(q * s) * amax) / max6) with x.
JNVFP4_HD float strict_difference(float q, float x, float scale, const GlobalScale& g) {
  return sub_rn(div_rn(mul_rn(mul_rn(q, scale), g.amax), g.max6), x);
}

// The fast error compares q * s, which fp16 holds exactly, with x * S_enc.
JNVFP4_HD float scaled_difference(float q, float x, float scale, float encode) {
  return sub_rn(mul_rn(q, scale), mul_rn(x, encode));
}

// Adds one element's error to the sum of a row of 16, which runs from element 0 to 15.
JNVFP4_HD float add_error(float sum, float difference, bool squared) {
  return add_rn(sum, squared ? mul_rn(difference, difference) : float_of(bits_of(difference) & kMagnitude));
}

JNVFP4_HD float row_error_strict(const float* x, const float* q, float scale, GlobalScale g, bool squared) {
  float sum = 0.0f;
  JNVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) sum = add_error(sum, strict_difference(q[i], x[i], scale, g), squared);
  return sum;
}

JNVFP4_HD float row_error_scaled(const float* x, const float* q, float scale, GlobalScale g, bool squared) {
  float sum = 0.0f;
  JNVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) sum = add_error(sum, scaled_difference(q[i], x[i], scale, g.encode), squared);
  return sum;
}

// The error of a tile from those of its 16 rows, halves first.
JNVFP4_HD float tile_error(const float* row) {
  float t[kBlock / 2];
  JNVFP4_UNROLL
  for (int k = 0; k < 8; ++k) t[k] = add_rn(row[k], row[k + 8]);
  JNVFP4_UNROLL
  for (int half = 4; half; half /= 2) JNVFP4_UNROLL
  for (int k = 0; k < half; ++k) t[k] = add_rn(t[k], t[k + half]);
  return t[0];
}

// A tie or a NaN chooses the scale that maps to 6.
JNVFP4_HD bool choose_four(float error_six, float error_four) { return error_four < error_six; }

// ---------------------------------------------------------------- search: which of eleven block scales
inline constexpr int kSearched = 11;

// How many codes the i-th scale that is tried is from the one of the plain rule: 0, -3..-1, 1..7.
JNVFP4_HD int search_offset(int i) { return i == 0 ? 0 : i < 4 ? i - 4 : i - 3; }

JNVFP4_HD ScaleByte search_candidate(ScaleByte rule, int offset) {
  const int code = static_cast<int>(rule) + offset;
  return static_cast<ScaleByte>(code < 0 ? 0 : code > 126 ? 126 : code);
}

// Whether an error is below the least so far; a tie or a NaN is not.
JNVFP4_HD bool improves(float error, float least) { return error < least; }

// ---------------------------------------------------------------- decoding and products
// value = cast(q * dequantize_factor)
JNVFP4_HD float dequantize_factor(ScaleByte scale, float amax, float e4m3_max) {
  return mul_rn(mul_rn(e4m3_decode(scale), amax), reciprocal_max6(e4m3_max));
}

// GEMM of two NVFP4 operands: the factor of the accumulated sum of q_a s_a q_b s_b. With window64 on a side, the factor
// of the sum over each window.
JNVFP4_HD float alpha_w4a4(float amax_a, float amax_b, float e4m3_max_a, float e4m3_max_b) {
  return div_rn(mul_rn(amax_a, amax_b), 36.0f * e4m3_max_a * e4m3_max_b);
}

// GEMM of a 16-bit operand and an NVFP4 one.
JNVFP4_HD float alpha_w4a16(float amax_b, float e4m3_max_b) { return div_rn(amax_b, 6.0f * e4m3_max_b); }

// Adds a block of two NVFP4 operands to an accumulator. Both products are exact, so the sum is the only rounding.
JNVFP4_HD float add_block(float y, float scale_a, float scale_b, float dot16) {
  return add_rn(y, mul_rn(mul_rn(scale_a, scale_b), dot16));
}

// Adds the next window to an accumulator.
JNVFP4_HD float add_window(float y, float window, float alpha) { return add_rn(y, mul_rn(alpha, window)); }

// Adds a 16-bit element a times an NVFP4 one, b = q * s, to an accumulator; b is exact.
JNVFP4_HD float add_element(float y, float a, float b) { return add_rn(y, mul_rn(a, b)); }

// One output element from its accumulator.
JNVFP4_HD float gemm_epilogue(float y, float alpha, float bias, bool has_bias) {
  const float scaled = mul_rn(alpha, y);
  return has_bias ? add_rn(scaled, bias) : scaled;
}

}  // namespace jnvfp4
