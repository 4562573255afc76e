// Fast forms of the rules of numerics.h: the same results, computed otherwise.
//
// The comment of each begins with the rule it equals and the test that proves it: `tests/file::name`, a test function
// or a check of cpp/exhaustive.cc. tests/test_numerics.py holds every function and struct of this file to that.
#pragma once

#include "numerics.h"

namespace jnvfp4 {

// ---------------------------------------------------------------- operations
// = add_rn(mul_rn(a, b), c), proven by tests/test_numerics.py::test_fused_multiply_add
// where a * b is exact, or too small or too large to matter, so that fusing changes nothing.
JNVFP4_HD float mul_exact_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

// = max(a + b, c), proven by tests/test_numerics.py::test_add_max
// One instruction on Hopper.
JNVFP4_HD int32_t add_max(int32_t a, int32_t b, int32_t c) {
#if defined(__CUDA_ARCH__)
  return __viaddmax_s32(a, b, c);
#else
  return a + b > c ? a + b : c;
#endif
}

// = div_rn(a, d), proven by tests/cpp/exhaustive.cc::div_by_steps
// for the constants d of the rules, given fl(1 / d) and a fused multiply-add. The correctly rounded quotient costs
// three operations: an estimate, its exact remainder, a correction. It is right for every mantissa, so for every a
// whose exponent keeps the steps normal.
template <class Fma>
JNVFP4_HD float div_by_steps(float a, float d, float reciprocal, Fma fma) {
  const float q = mul_rn(a, reciprocal);
  return fma(fma(-d, q, a), reciprocal, q);
}

// = div_rn(a, d), proven by tests/cpp/exhaustive.cc::div_by_pieces
// for the divisors d of alpha_w4a4 and a from 2^-76 to 2^98, given the reciprocal as the sum of two floats.
template <class Fma>
JNVFP4_HD float div_by_pieces(float a, float large, float small, Fma fma) {
  return fma(a, large, mul_rn(a, small));
}

// = div_rn(a, d), proven by tests/cpp/exhaustive.cc::div_by_float64
// for the divisors d of alpha_w4a4 and every a, given the reciprocal in float64: a quotient by an odd number below 2^9
// is far from the middle between two floats, or is it exactly.
JNVFP4_HD float div_by_float64(float a, double reciprocal) {
  return static_cast<float>(static_cast<double>(a) * reciprocal);
}

// = div_rn(a, d), proven by tests/test_numerics.py::test_division_by_a_constant
// for the constants d of the rules, given fl(1 / d).
JNVFP4_HD float div_constant(float a, float d, float reciprocal) {
#if defined(__CUDA_ARCH__)
  const uint32_t exponent = bits_of(a) >> 23 & 0xffu;
  if (exponent - 67u <= 120u || bits_of(a) == 0u)  // 2^-60 to 2^60, and 0
    return div_by_steps(a, d, reciprocal, [](float x, float y, float z) { return __fmaf_rn(x, y, z); });
#else
  (void)reciprocal;
#endif
  return div_rn(a, d);
}

// ---------------------------------------------------------------- E2M1
// = e2m1_encode(a), proven by tests/cpp/exhaustive.cc::e2m1_magnitude_plus_magic
// but plus kMagicBits, of the bits of a magnitude a, and 7 for NaN: encoders test the block's scale, which is then NaN.
// E2M1 rounding is integer rounding of a concave, piecewise linear map of the magnitude: slopes 2, 1 and 1/2, then the
// constant 7. Adding kMagic rounds to an integer, ties to even, and ties of the map are ties of E2M1.
JNVFP4_HD int32_t e2m1_magnitude_plus_magic(uint32_t magnitude_bits) {
  const float a = float_of(magnitude_bits);
  const int32_t t2 = static_cast<int32_t>(bits_of(mul_exact_add(a, 2.0f, kMagic)));
  const int32_t t1 = static_cast<int32_t>(bits_of(add_rn(a, kMagic + 2.0f)));
  const int32_t t05 = static_cast<int32_t>(bits_of(mul_exact_add(a, 0.5f, kMagic + 4.0f)));
  const int32_t low = t2 < t1 ? t2 : t1;
  const int32_t high = t05 < kMagicBits + 7 ? t05 : kMagicBits + 7;
  return low < high ? low : high;
}

// = e2m1_encode(a), proven by tests/cpp/exhaustive.cc::e2m1_magnitude
// of the bits of a magnitude a; 7 for NaN.
JNVFP4_HD uint32_t e2m1_magnitude(uint32_t magnitude_bits) {
  return static_cast<uint32_t>(e2m1_magnitude_plus_magic(magnitude_bits) - kMagicBits);
}

// = e2m1_decode(code), proven by tests/test_numerics.py::test_decode_e2m1
// The code's bits are those of a float32 2^126 times smaller. Not where subnormals may be flushed, as on a CPU.
JNVFP4_HD float e2m1_decode_subnormal(uint32_t code) {
  return mul_rn(float_of((code & 7u) << 22 | (code & 8u) << 28), 0x1p126f);
}

// = e2m1_decode(e2m1_encode(a)), proven by tests/cpp/exhaustive.cc::e2m1_round_below_7
// for magnitudes a below 7, where both a and the result are times `one`, a power of two. a is taken off 2^22 a, or off
// 1.5 * 2^22 for what is below 1.5, and the rest off that again: float32 numbers there are a grid step apart, so the
// first difference rounds to the grid. Its ties are to even because a tie has so few bits that 2^22 a is an even number
// of steps. Just above a power of two the first difference lies in the binade below and rounds to half a step, but then
// to that power.
JNVFP4_HD float e2m1_round_below_7(float a, float one) {
  const int32_t least = static_cast<int32_t>(bits_of(6291456.0f * one));
  const float k = float_of(static_cast<uint32_t>(add_max(static_cast<int32_t>(bits_of(a)), 22 << 23, least)));
  return add_rn(k, -add_rn(k, -a));
}

// = e2m1_decode(e2m1_encode(v)), proven by tests/cpp/exhaustive.cc::e2m1_round
// but 6 for NaN.
JNVFP4_HD float e2m1_round(float v) {
  const uint32_t b = bits_of(v), a = b & kMagnitude, m = a > 0x40c00000u ? 0x40c00000u : a;  // 6
  return float_of(bits_of(e2m1_round_below_7(float_of(m), 1.0f)) | (b & kSign));
}

// = e2m1_encode_stochastic(a, r), proven by tests/cpp/exhaustive.cc::e2m1_magnitude_stochastic
// of the bits of a magnitude a; 7 for NaN. Above 1 the grid is exponent and first bit of the mantissa, so truncation is
// a shift.
JNVFP4_HD uint32_t e2m1_magnitude_stochastic(uint32_t magnitude_bits, uint32_t r) {
  const uint32_t t = e2m1_stochastic_sum(magnitude_bits, r), above_one = (t >> 22) - 252u;
  const uint32_t code = t >= 0x3f800000u ? above_one : t >= 0x3f000000u ? 1u : 0u;
  return code > 7u ? 7u : code;
}

// ---------------------------------------------------------------- rotation and scales
// = rht16(v), proven by tests/test_numerics.py::test_rotation
// for v already rounded to bfloat16, before the results are.
JNVFP4_HD void rht16_sums(float* v) {
  JNVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) v[i] = flip_sign(v[i], i);
  hadamard16(v);
  JNVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) v[i] = mul_exact_add(v[i], 0.25f, 0.0f);
}

// = block_scale(block_amax_bits, g, headroom), proven by tests/test_numerics.py::test_block_scale
// The clamp changes no result, since e4m3_encode saturates. With it GCC makes vectors of a loop over lanes, without it
// branches.
JNVFP4_HD ScaleByte block_scale_of_lane(uint32_t block_amax_bits, GlobalScale g, float headroom) {
  return e4m3_encode(clamp_max(mul_rn(mul_rn(float_of(block_amax_bits), g.block_mult), headroom)));
}

// = candidate_scales(block_amax_bits, encode_scale), proven by tests/test_numerics.py::test_candidate_scales
// before they are rounded: this is the first, and 1.5 times it the second.
JNVFP4_HD float candidate_base(uint32_t block_amax_bits, float encode_scale) {
  return mul_rn(div_constant(float_of(block_amax_bits), 6.0f, 1.0f / 6.0f), encode_scale);
}

// = alpha_w4a4(amax_a, amax_b, e4m3_max_a, e4m3_max_b), proven by tests/test_numerics.py::test_alpha_w4a4
// for a kernel that needs many; `divisor` is 36 * e4m3_max_a * e4m3_max_b.
JNVFP4_HD float alpha_w4a4_by_steps(float amax_a, float amax_b, float divisor, float reciprocal) {
  return div_constant(mul_rn(amax_a, amax_b), divisor, reciprocal);
}

// = alpha_w4a4(amax_a, amax_b, e4m3_max_a, e4m3_max_b), proven by tests/cpp/exhaustive.cc::AlphasOfRow
// for many amax_b, where both amaxes have at most 12 bits, so that their product is exact, and are from 2^-38 to 2^49.
struct AlphasOfRow {
  float large, small;  // amax_a / divisor

  template <class Fma>
  JNVFP4_HD AlphasOfRow(float amax_a, float reciprocal, float rest, Fma fma)
      : large(mul_rn(amax_a, reciprocal)), small(fma(amax_a, rest, fma(amax_a, reciprocal, -large))) {}
  template <class Fma>
  JNVFP4_HD float operator()(float amax_b, Fma fma) const {
    return fma(amax_b, large, mul_rn(amax_b, small));
  }
};

// ---------------------------------------------------------------- the errors of 4over6
// = scaled_difference(q, x, scale, encode), proven by tests/test_numerics.py::test_row_error
// since q * scale is exact.
JNVFP4_HD float scaled_difference_fused(float q, float x, float scale, float encode) {
  return mul_exact_add(q, scale, -mul_rn(x, encode));
}

// = strict_difference(q, x, scale, g), proven by tests/test_numerics.py::test_row_error
// without a division, given the decoded values of 1 and of 1.5. q * scale is exact and powers of two commute with
// rounding, so the decoded value of q is a power of two times one of these, where nothing under- or overflows.
JNVFP4_HD float strict_difference_by_values(float q, float x, float one, float one_and_half) {
  const uint32_t b = bits_of(q);
  return mul_exact_add(float_of(b & 0xff800000u), b & 0x00400000u ? one_and_half : one, -x);
}

// = strict_difference(q, x, scale, g), proven by tests/cpp/exhaustive.cc::row_error_by_values
// The two decoded values of a scale, and whether they apply to it.
struct StrictValues {
  float one, one_and_half;
  bool apply;

  JNVFP4_HD StrictValues(float scale, const GlobalScale& g) {
    const float product = mul_rn(scale, g.amax);
    one = div_constant(product, g.max6, g.inv_max6);
    one_and_half = div_constant(mul_rn(mul_rn(scale, 1.5f), g.amax), g.max6, g.inv_max6);
    apply = product >= 7.7e-34f && product <= 1.3e36f;  // about 2^-110 and 2^120
  }
  JNVFP4_HD float difference(float q, float x) const { return strict_difference_by_values(q, x, one, one_and_half); }
  // Whether 1.5 is 1.5 times 1, as it often is of amaxes with few bits: then q times the one is the decoded value, and
  // an FMA gives the difference. These two subtract exactly.
  JNVFP4_HD bool linear() const { return sub_rn(one_and_half, one) == mul_rn(one, 0.5f); }
};

// = row_error_strict(x, q, scale, g, squared), proven by tests/cpp/exhaustive.cc::row_error_by_values
// where the values of the scale apply.
JNVFP4_HD float row_error_by_values(const float* x, const float* q, const StrictValues& values, bool squared) {
  float sum = 0.0f;
  JNVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) sum = add_error(sum, values.difference(q[i], x[i]), squared);
  return sum;
}

}  // namespace jnvfp4
