// The arithmetic of the producers: RMS norm and SiLU gate, from float32 to one rounding to bfloat16.
//
// As in numerics.h each function is a fixed sequence of IEEE binary32 operations, nothing contracted, and
// jnvfp4/reference.py has the same sections with the same functions. docs/producers.md states the rules in words, with
// the error bounds.
#pragma once

#include <cstdint>

#include "arrays.h"
#include "numerics.h"

namespace jnvfp4 {

enum class Producer : uint8_t { kRmsNorm, kSiluMul };

// The operands of a producer, for batch x rows x cols results: x and the weights of `cols`, or gate and up.
struct ProducerOperands {
  Producer producer;
  Float a_kind, b_kind;
  const void* a;
  const void* b;
  int64_t batch, rows, cols;
  int64_t rows_per_weight;  // consecutive rows, over all matrices
  float eps;
};

// ---------------------------------------------------------------- RMS norm
// The sum of t[0] to t[n - 1], n a power of two: element k plus element k + n/2, then n/4, ..., 1 apart.
JNVFP4_HD float sum_by_halves(float* t, int64_t n) {
  for (int64_t half = n / 2; half; half /= 2)
    for (int64_t k = 0; k < half; ++k) t[k] = add_rn(t[k], t[k + half]);
  return t[0];
}

// The sum by halves of a block's squares.
JNVFP4_HD float block_squares(const float* v) {
  float t[kBlock / 2];
  JNVFP4_UNROLL
  for (int k = 0; k < kBlock / 2; ++k) t[k] = add_rn(mul_rn(v[k], v[k]), mul_rn(v[k + 8], v[k + 8]));
  JNVFP4_UNROLL
  for (int half = kBlock / 4; half; half /= 2) JNVFP4_UNROLL
  for (int k = 0; k < half; ++k) t[k] = add_rn(t[k], t[k + half]);
  return t[0];
}

// The smallest power of two that is not below `blocks`. The sums of a row's blocks, followed by zeros up to it, are
// added by halves too, so that a power of two of threads, or of vector lanes, gives the same sum.
JNVFP4_HD int64_t padded_blocks(int64_t blocks) {
  int64_t p = 1;
  while (p < blocks) p *= 2;
  return p;
}

// The factor of a row, from the sum of its `cols` squares.
JNVFP4_HD float norm_factor(float squares, int64_t cols, float eps) {
  return reciprocal_rn(sqrt_rn(add_rn(div_rn(squares, static_cast<float>(cols)), eps)));
}

JNVFP4_HD float norm_scale(float v, float factor, float weight) { return mul_rn(mul_rn(v, factor), weight); }

// ---------------------------------------------------------------- SiLU gate
// 2^f for |f| <= 1/2, within 7.5e-5 of it. Degree 2 would reach 1.7e-3, which leaves a bfloat16 result 0.94 of a unit
// in the last place from the exact one; this leaves it 0.53.
JNVFP4_HD float exp2_fraction(float f) {
  float p = float_of(0x3d61fbb0u);
  p = add_rn(mul_rn(p, f), float_of(0x3e786f0du));
  p = add_rn(mul_rn(p, f), float_of(0x3f31798du));
  return add_rn(mul_rn(p, f), float_of(0x3f7ffb49u));
}

inline constexpr float kTinyGate = -80.0f;  // below it, e^-g or the gated value leaves the normal numbers

// 2^(t + shift), for t in [-64, 275] and a normal result: t is rounded by adding 1.5 * 2^23, whose last bits then
// are the exponent, and f = t - n is exact.
JNVFP4_HD float exp2_shifted(float t, int32_t shift) {
  const float m = add_rn(t, kMagic);
  const uint32_t n = bits_of(m) + static_cast<uint32_t>(shift - kMagicBits);
  return float_of(bits_of(exp2_fraction(add_rn(t, -add_rn(m, -kMagic)))) + (n << 23));
}

// -g * log2(e), at least -64, where 1 + 2^t is 1. NaN stays.
JNVFP4_HD float gate_exponent(float g) {
  const float t = mul_rn(g, -1.44269502f);
#if defined(__CUDA_ARCH__)
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(t), "f"(-64.0f));
  return r;
#else
  return t < -64.0f ? -64.0f : t;
#endif
}

// g / (1 + e^-g) * u. Below kTinyGate 1 + e^-g is e^-g, and powers of two that cancel keep e^-g in range and
// g * e^g from losing bits before u is multiplied. Below -190 the product is 0 for every finite u.
JNVFP4_HD float silu_mul(float g, float u) {
  const bool tiny = g < kTinyGate;
  const float c = g < -190.0f ? -190.0f : g, power = tiny ? 0x1p-75f : 1.0f;
  const float r = reciprocal_rn(add_rn(tiny ? 0.0f : 1.0f, exp2_shifted(gate_exponent(c), tiny ? -150 : 0)));
  return mul_rn(mul_rn(mul_rn(c, r), mul_rn(u, power)), power);
}

}  // namespace jnvfp4
