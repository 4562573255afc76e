// How the elements of a block become codes, given its encode scale. A test compiles this file for a CPU too.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../core/numerics_fast.h"

namespace jnvfp4 {

using Values = float[kBlock];

// ---------------------------------------------------------------- conversion instructions
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890  // has the conversion to E4M3
constexpr bool kQuick = true;
#else
constexpr bool kQuick = false;
#endif

// Blackwell converts to E2M1: the code of every magnitude, NaN's is 7, as e2m1_magnitude gives it. Which targets can
// is a matter of this instruction: plain sm_100 cannot, and not every target that can has cvt.rs.
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000 || defined(__CUDA_ARCH_FEAT_SM100_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM101_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)  // nvcc 12.8 defines no family
constexpr bool kE2M1 = true;
__device__ __forceinline__ uint32_t e2m1_codes(const float* a) {
  uint32_t r;
  asm("{.reg .b8 x, y, z, w; cvt.rn.satfinite.e2m1x2.f32 x, %2, %1; cvt.rn.satfinite.e2m1x2.f32 y, %4, %3; "
      "cvt.rn.satfinite.e2m1x2.f32 z, %6, %5; cvt.rn.satfinite.e2m1x2.f32 w, %8, %7; mov.b32 %0, {x, y, z, w};}"
      : "=r"(r)
      : "f"(a[0]), "f"(a[1]), "f"(a[2]), "f"(a[3]), "f"(a[4]), "f"(a[5]), "f"(a[6]), "f"(a[7]));
  return r;
}
#elif defined(JNVFP4_E2M1_MODEL)  // a test's function in place of the instruction
constexpr bool kE2M1 = true;
#include JNVFP4_E2M1_MODEL
#else
constexpr bool kE2M1 = false;
__device__ __forceinline__ uint32_t e2m1_codes(const float* a) {
  uint32_t r = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) r = r * 16u + e2m1_magnitude(bits_of(a[i]));
  return r;
}
#endif

__device__ __forceinline__ uint32_t e4m3_codes(float a, float b) {
#if __CUDA_ARCH__ >= 890
  uint32_t r;
  asm("{.reg .b16 x; cvt.rn.satfinite.e4m3x2.f32 x, %2, %1; mov.b32 %0, {x, 0};}" : "=r"(r) : "f"(a), "f"(b));
  return r;
#else
  return e4m3_encode(a) | e4m3_encode(b) << 8;
#endif
}
__device__ __forceinline__ uint32_t e4m3_codes(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  uint32_t r;
  asm("{.reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, %2, %1; cvt.rn.satfinite.e4m3x2.f32 y, %4, %3; mov.b32 %0, {x, "
      "y};}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
#else
  return e4m3_codes(a, b) | e4m3_codes(c, d) << 16;
#endif
}

// ---------------------------------------------------------------- by the rule
// `signs` as code_signs of device.cuh gives them.
__device__ __forceinline__ uint2 with_signs(uint2 codes, uint2 signs) {
  return make_uint2(codes.x | (signs.x & 0x88888888u), codes.y | (signs.y & 0x88888888u));
}
// A NaN scale has only codes 0.
__device__ __forceinline__ uint2 finished(uint2 codes, uint2 signs, uint32_t scale) {
  return scale == kScaleNan ? make_uint2(0, 0) : with_signs(codes, signs);
}

// The 16 codes of a block, packed two a byte, from `magnitude(i)` plus `bias`.
template <class F>
__device__ __forceinline__ uint2 pack(uint2 signs, uint32_t scale, uint32_t bias, const F& magnitude) {
  uint32_t half[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) packed = packed * 16u + magnitude(8 * h + i);
    half[h] = packed - bias * 0x11111111u;
  }
  return finished(make_uint2(half[0], half[1]), signs, scale);
}

// The magnitudes that are rounded.
__device__ __forceinline__ void encoded_magnitudes(const Values& v, float encode, Values& a) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) a[i] = mul_rn(fabsf(v[i]), encode);
}

__device__ __forceinline__ uint2 encode_nearest(const Values& v, uint2 signs, float encode, uint32_t scale) {
  if constexpr (kE2M1) {
    Values a;
    encoded_magnitudes(v, encode, a);
    return finished(make_uint2(e2m1_codes(a), e2m1_codes(a + 8)), signs, scale);
  } else {
    return pack(signs, scale, kMagicBits, [&](int i) {
      return static_cast<uint32_t>(e2m1_magnitude_plus_magic(bits_of(mul_rn(fabsf(v[i]), encode))));
    });
  }
}

__device__ __forceinline__ uint2 encode_stochastic(const Values& v, uint2 signs, float encode, uint32_t scale,
                                                   const uint32_t (&random)[4]) {
  return pack(signs, scale, 0, [&](int i) {
    return e2m1_magnitude_stochastic(bits_of(mul_rn(fabsf(v[i]), encode)), random[i / 4] >> (8 * (i % 4)) & 0xffu);
  });
}

// ---------------------------------------------------------------- the quick form
// Quick forms work on elements times the encode scale over kOver. That is 1 where an instruction converts to E2M1. It
// is 64 elsewhere: there the E2M1 grid lies on the first 29 codes of E4M3, whose conversion instruction then packs it.
constexpr float kOver = kE2M1 ? 1.0f : 64.0f;

// Whether all elements of a block with this amax are below 7 when encoded, or below 16 where they round
// stochastically; false for NaN.
template <bool kStochastic = false>
__device__ __forceinline__ bool quick_below(uint32_t amax, float encode) {
  return kQuick && mul_rn(float_of(amax), encode) < (kStochastic ? 16.0f : 7.0f) / kOver;
}

// The magnitudes of a block's codes, packed by the conversion to E2M1: codes without signs.
struct CodeMagnitudes {
  static constexpr int kWords = 2;
  static constexpr uint32_t kLast = 0x11111111u;  // bit of each magnitude
  uint32_t word[kWords];

  CodeMagnitudes() = default;
  __device__ __forceinline__ explicit CodeMagnitudes(const Values& r) : word{e2m1_codes(r), e2m1_codes(r + 8)} {}
  __device__ __forceinline__ uint2 codes() const { return make_uint2(word[0], word[1]); }
};

// Packed by the conversion to E4M3: of both halves the E4M3 codes of elements 0 2 4 6, then those of 1 3 5 7. Those of
// grid magnitudes over 64 are four times the E2M1 codes.
struct QuarterMagnitudes {
  static constexpr int kWords = 4;
  static constexpr uint32_t kLast = 0x04040404u;
  uint32_t word[kWords];

  QuarterMagnitudes() = default;
  __device__ __forceinline__ explicit QuarterMagnitudes(const Values& r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* half = r + 8 * h;
      word[h] = e4m3_codes(half[0], half[2], half[4], half[6]);
      word[2 + h] = e4m3_codes(half[1], half[3], half[5], half[7]);
    }
  }
  __device__ __forceinline__ uint2 codes() const {
    return make_uint2((word[0] >> 2) + 4 * word[2], (word[1] >> 2) + 4 * word[3]);
  }
};

using Magnitudes = std::conditional_t<kE2M1, CodeMagnitudes, QuarterMagnitudes>;

// Whether some code does not stand for 3/2 of the value of the other: 0 stays, and 1, 2 and 4 become 1.5, 3 and 6,
// which is the next code.
template <class M>
__device__ __forceinline__ bool differ_by_half(const M& larger, const M& smaller) {
  const auto differ = [](uint32_t l, uint32_t s) {
    const uint32_t not_zero = (s >> 1 | s) & 2 * M::kLast;
    return (s & M::kLast) | (l ^ (s + (not_zero >> 1)));
  };
  uint32_t any = differ(larger.word[0], smaller.word[0]) | differ(larger.word[1], smaller.word[1]);
  if constexpr (M::kWords == 4)
    any = any | differ(larger.word[2], smaller.word[2]) | differ(larger.word[3], smaller.word[3]);
  return any != 0;
}

__device__ __forceinline__ float round_over(float a) { return e2m1_round_below_7(a, 1.0f / kOver); }

__device__ __forceinline__ void nearest_over(const Values& v, float encode, Values& r) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) r[i] = round_over(mul_rn(fabsf(v[i]), encode));
}
// The conversion to E2M1 rounds by itself.
__device__ __forceinline__ uint2 nearest_codes(const Values& v, float encode) {
  Values r;
  if constexpr (kE2M1)
    encoded_magnitudes(v, encode, r);
  else
    nearest_over(v, encode, r);
  return Magnitudes(r).codes();
}

// Grid values over kOver as e2m1_magnitude_stochastic gives them, but 8, 12 or 16 where that saturates at 6. `binade`
// is the power of two of a magnitude, at least that of 1, times 2^124: a random byte in the third byte of a float32 is
// r * 2^-133, so the product is r / 512 of it, which is r / 256 of a grid step. The step is that before the addition;
// the sum stays within one, so it truncates to the same grid value.
__device__ __forceinline__ void stochastic_over(const Values& v, float encode, const uint32_t (&random)[4], Values& r) {
  constexpr int kUp = 124 << 23;
  constexpr float kMagicDown = 6291456.0f * 0x1p-124f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float a = mul_rn(fabsf(v[i]), encode);
    const int32_t power = static_cast<int32_t>(bits_of(a) & kInf);
    const float binade = float_of(add_max(power, kUp, kUp + static_cast<int32_t>(bits_of(1.0f / kOver))));
    const float random_byte = float_of(__byte_perm(random[i / 4], 0, 0x4044u | i % 4 << 8));
    const float t = __fmaf_rn(random_byte, binade, a);
    r[i] = __fmaf_rn(binade, -kMagicDown, __fmaf_rz(binade, kMagicDown, t));
  }
}
// The conversion to E2M1 saturates by itself; else codes from 8 on become 7.
__device__ __forceinline__ uint2 stochastic_codes(const Values& v, float encode, const uint32_t (&random)[4]) {
  Values r;
  stochastic_over(v, encode, random, r);
  const uint2 codes = Magnitudes(r).codes();
  if constexpr (kE2M1) return codes;
  const auto saturated = [](uint32_t c) {
    const uint64_t sevens = uint64_t{c & 0x88888888u} * 0xe0000000u >> 32;  // of the eights, by one instruction
    return (c | static_cast<uint32_t>(sevens)) & 0x77777777u;
  };
  return make_uint2(saturated(codes.x), saturated(codes.y));
}

}  // namespace jnvfp4
