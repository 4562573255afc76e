// How a thread quantizes its block of 16 elements, by spec. Callers reduce over threads; choose.cuh has 4over6.
//
// Each step has a quick form, which gives the same bits wherever a test on the block allows it, and the form of
// numerics.h for all other blocks. docs/kernels.md says why the quick forms are exact.
#pragma once

#include <cuda_fp8.h>

#include "../../numerics_fast.h"
#include "../device.cuh"
#include "../kernels.h"

namespace jnvfp4 {

using Values = float[kBlock];

template <class S>
inline constexpr bool kChooses = S::spec.select != Select::kMax6;
template <class S>
inline constexpr bool kStrict = S::spec.error_math == ErrorMath::kFp32;
template <class S>
inline constexpr bool kSquared = S::spec.select == Select::kMse;
template <class S>
inline constexpr bool kStochastic = S::spec.rounding == Rounding::kStochastic;
template <class S>
inline constexpr bool kWindows = S::spec.amax_scope == AmaxScope::kWindow64;
template <class S>
inline constexpr bool kOneAmax = S::spec.amax_scope == AmaxScope::kTensor;
template <class S>
inline constexpr bool kTiles = S::spec.block_rows == kBlock;

// A block rotated, before the rounding to bfloat16.
template <class T>
__device__ __forceinline__ void rotate(Values& v) {
  if constexpr (!std::is_same_v<T, Bf16>) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = bf16_round(v[i]);
  }
  rht16_sums(v);
}

template <class T>
__device__ __forceinline__ Block<Bf16> rotated(const Block<T>& block) {
  Values v;
  block.values(v);
  rotate<T>(v);
  Block<Bf16> out;
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) out.part(i) = bf16_pair(v[2 * i], v[2 * i + 1]);
  return out;
}

// The block that a thread quantizes: x, or x rotated.
template <class S, class X>
__device__ __forceinline__ auto source_of(const X& x) {
  if constexpr (S::spec.rht)
    return rotated(x);
  else
    return x;
}

// ---------------------------------------------------------------- factors of a block scale
// Quick forms work on elements times the encode scale over 64: there the E2M1 grid lies on the first 29 codes of E4M3,
// whose conversion instruction then packs it. `encode` is NaN where a quick form is not proven exact, so that every
// test on it fails.
struct EncodeFactor {
  float encode;
};
// For a 4over6 candidate also the decoded values of 1 and 1.5, or the scale itself for the fast error; times 64.
struct alignas(16) ErrorFactors {
  float encode, one, one_and_half;
};
template <class S>
using Factors = std::conditional_t<kChooses<S>, ErrorFactors, EncodeFactor>;

template <class S>
__device__ __forceinline__ Factors<S> factors_of(uint32_t scale, const GlobalScale& g) {
  const float encode = block_encode_scale(scale, g);
  const float quick = encode >= 0x1p-119f ? encode * 0x1p-6f : float_of(kNan);
  if constexpr (!kChooses<S>) {
    return {quick};
  } else {
    // Away from under- and overflow of errors and of the amax, which is about six times the value of 1. A block of
    // zeros has no error.
    const float s = e4m3_decode(scale), one = mul_rn(s, g.decode);
    const bool safe = scale == 0 || (one > 0x1p-41f && one < 0x1p36f);
    if constexpr (!kStrict<S>) return {safe ? quick : float_of(kNan), s * 64.0f, 0.0f};
    const StrictValues values(s, g);
    return {safe && (values.apply || scale == 0) ? quick : float_of(kNan), values.one * 64.0f,
            values.one_and_half * 64.0f};
  }
}

// For many blocks under one amax: the factors of all scales, and of stochastic specs the headroom and the round keys of
// their random bits, in shared memory.
template <class S>
struct SharedScales {
  Factors<S> entry[kScaleNan + 1];
  float amax, e4m3_max, block_mult, encode;
  alignas(16) uint32_t round_key[kStochastic<S> ? 2 * kPhiloxRounds : 4];
  uint64_t first_block;
  float headroom;

  // By the 128 threads from `first` on; the thread block then synchronises.
  __device__ __forceinline__ void fill(float tensor_amax, float scale_max, int first = 0) {
    const uint32_t scale = threadIdx.x - first;
    if (scale > kScaleNan) return;
    const GlobalScale g = global_scale(tensor_amax, scale_max);
    entry[scale] = factors_of<S>(scale, g);
    if (scale == 0) amax = tensor_amax, e4m3_max = scale_max, block_mult = g.block_mult, encode = g.encode;
  }
  template <class Args>
  __device__ __forceinline__ void fill_random(const Args& a, int64_t matrix, int first = 0) {
    const uint32_t* words = a.stream.words + 4 * matrix;
    const uint32_t key[2] = {words[0], words[1]};
    const uint32_t at = threadIdx.x - first;
    if (at < 2 * kPhiloxRounds) round_key[at] = philox_round_key(key, at / 2, at % 2);
    if (at == 0) first_block = words[2] | uint64_t{words[3]} << 32, headroom = a.headroom;
  }
  __device__ __forceinline__ Factors<S> factors(uint32_t scale) const { return entry[scale]; }
  __device__ __forceinline__ GlobalScale global() const { return global_scale(amax, e4m3_max); }
  __device__ __forceinline__ void random(uint64_t block, bool transposed, uint32_t (&word)[4]) const {
    philox(first_block + block, transposed, [&](int round, int w) { return round_key[2 * round + w]; }, word);
  }
};

template <class S>
struct OwnScales : GlobalScale {
  __device__ __forceinline__ OwnScales(float amax, float e4m3_max) : GlobalScale(global_scale(amax, e4m3_max)) {}
  __device__ __forceinline__ Factors<S> factors(uint32_t scale) const { return factors_of<S>(scale, *this); }
  __device__ __forceinline__ const GlobalScale& global() const { return *this; }
};

// ---------------------------------------------------------------- codes
struct Encoded {
  uint2 codes;     // packed two a byte
  uint32_t scale;  // a byte

  __device__ __forceinline__ void store(uint8_t* all_codes, uint8_t* all_scales, int64_t block) const {
    all_scales[block] = static_cast<uint8_t>(scale);
    *reinterpret_cast<uint2*>(all_codes + block * (kBlock / 2)) = codes;
  }
  __device__ __forceinline__ void store(const QuantizeArgs& a, int64_t block) const { store(a.data, a.scale, block); }
};

// `signs` as code_signs of device.cuh gives them.
__device__ __forceinline__ uint2 with_signs(uint2 codes, uint2 signs) {
  return make_uint2(codes.x | (signs.x & 0x88888888u), codes.y | (signs.y & 0x88888888u));
}

// The 16 codes of a block, packed two a byte, from `magnitude(i)` plus `bias`. A NaN scale has only codes 0.
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
  return scale == kScaleNan ? make_uint2(0, 0) : with_signs(make_uint2(half[0], half[1]), signs);
}

__device__ __forceinline__ uint2 encode_nearest(const Values& v, uint2 signs, float encode, uint32_t scale) {
  return pack(signs, scale, kMagicBits, [&](int i) {
    return static_cast<uint32_t>(e2m1_magnitude_plus_magic(bits_of(mul_rn(fabsf(v[i]), encode))));
  });
}

__device__ __forceinline__ uint2 encode_stochastic(const Values& v, uint2 signs, float encode, uint32_t scale,
                                                   const uint32_t (&random)[4]) {
  return pack(signs, scale, 0, [&](int i) {
    return e2m1_magnitude_stochastic(bits_of(mul_rn(fabsf(v[i]), encode)), random[i / 4] >> (8 * (i % 4)) & 0xffu);
  });
}

// ---------------------------------------------------------------- codes, the quick form
#if __CUDA_ARCH__ >= 890  // has the conversion to E4M3
constexpr bool kQuick = true;
#else
constexpr bool kQuick = false;
#endif

// Whether all elements of a block with this amax are below 7 when encoded; false for NaN.
__device__ __forceinline__ bool below_seven(uint32_t amax, float encode) {
  return kQuick && mul_rn(float_of(amax), encode) < 7.0f / 64.0f;
}

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
  uint32_t r;
  asm("{.reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, %2, %1; cvt.rn.satfinite.e4m3x2.f32 y, %4, %3; mov.b32 %0, {x, "
      "y};}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// The magnitudes of a block's codes: of its halves, the E4M3 codes of elements 0 2 4 6 and of 1 3 5 7. Those of grid
// magnitudes over 64 are four times the E2M1 codes.
struct Magnitudes {
  uint32_t even[2], odd[2];
};

__device__ __forceinline__ Magnitudes magnitudes_over_64(const Values& r) {
  Magnitudes m;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float* half = r + 8 * h;
    m.even[h] = e4m3_codes(half[0], half[2], half[4], half[6]);
    m.odd[h] = e4m3_codes(half[1], half[3], half[5], half[7]);
  }
  return m;
}

__device__ __forceinline__ uint2 codes_of(const Magnitudes& m) {
  return make_uint2((m.even[0] >> 2) + 4 * m.odd[0], (m.even[1] >> 2) + 4 * m.odd[1]);
}

__device__ __forceinline__ float round_over_64(float a) { return e2m1_round_below_7(a, 1.0f / 64.0f); }

__device__ __forceinline__ void nearest_over_64(const Values& v, float encode, Values& r) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) r[i] = round_over_64(mul_rn(fabsf(v[i]), encode));
}

// Grid values over 64 as e2m1_magnitude_stochastic gives them, but 8 where that saturates at 6. `binade` is the power
// of two of a magnitude, at least that of 1, times 2^124: a random byte in the third byte of a float32 is r * 2^-133,
// so the product is r / 512 of it, which is r / 256 of a grid step. The step is that before the addition; the sum stays
// within one, so it truncates to the same grid value.
__device__ __forceinline__ void stochastic_over_64(const Values& v, float encode, const uint32_t (&random)[4],
                                                   Values& r) {
  constexpr int kUp = 124 << 23;
  constexpr float kMagicDown = 6291456.0f * 0x1p-124f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float a = mul_rn(fabsf(v[i]), encode);
    const int32_t power = static_cast<int32_t>(bits_of(a) & kInf);
    const float binade = float_of(add_max(power, kUp, kUp + static_cast<int32_t>(bits_of(1.0f / 64.0f))));
    const float random_byte = float_of(__byte_perm(random[i / 4], 0, 0x4044u | i % 4 << 8));
    const float t = __fmaf_rn(random_byte, binade, a);
    r[i] = __fmaf_rn(binade, -kMagicDown, __fmaf_rz(binade, kMagicDown, t));
  }
}
// Codes from such magnitudes: 8 becomes 7.
__device__ __forceinline__ uint32_t saturated(uint32_t codes) { return codes - ((codes & 0x88888888u) >> 3); }

// Encodes with a scale that is already chosen. `x` has the elements, `signs` is code_signs of them.
template <class X, class Scales>
__device__ __forceinline__ Encoded encode_with(const X& x, uint2 signs, uint32_t amax, uint32_t scale, float encode,
                                               const Scales& scales) {
  Values v;
  if (below_seven(amax, encode)) {
    Values r;
    x.finite_values(v);
    nearest_over_64(v, encode, r);
    return {with_signs(codes_of(magnitudes_over_64(r)), signs), scale};
  }
  x.values(v);
  return {encode_nearest(v, signs, block_encode_scale(scale, scales.global()), scale), scale};
}

// ---------------------------------------------------------------- plain block scale
// = block_scale
template <class S, class Scales>
__device__ __forceinline__ uint32_t plain_scale(uint32_t amax, const Scales& scales) {
  float scale = mul_rn(float_of(amax), scales.block_mult);
  if constexpr (kStochastic<S>) scale = mul_rn(scale, scales.headroom);
  return e4m3_codes(scale, 0.0f);
}

// `random` gives the random bits of the block.
template <class S, class X, class Scales, class Random>
__device__ __forceinline__ Encoded encode_plain(const X& x, uint2 signs, uint32_t amax, const Scales& scales,
                                                const Random& random) {
  const uint32_t scale = plain_scale<S>(amax, scales);
  const float encode = scales.factors(scale).encode;
  if constexpr (kStochastic<S>) {
    uint32_t bits[4];
    random(bits);
    Values v;
    x.values(v);
    if (below_seven(amax, encode)) {
      Values r;
      stochastic_over_64(v, encode, bits, r);
      const uint2 codes = codes_of(magnitudes_over_64(r));
      return {with_signs(make_uint2(saturated(codes.x), saturated(codes.y)), signs), scale};
    }
    return {encode_stochastic(v, signs, block_encode_scale(scale, scales.global()), scale, bits), scale};
  } else {
    return encode_with(x, signs, amax, scale, encode, scales);
  }
}

// The maximum over the four neighbouring lanes that hold a window; every lane is here.
__device__ __forceinline__ uint32_t window_max(uint32_t m) {
  m = amax_bits(m, __shfl_xor_sync(0xffffffffu, m, 1));
  return amax_bits(m, __shfl_xor_sync(0xffffffffu, m, 2));
}

// ---------------------------------------------------------------- what a matrix or a row has
// The amax of a row over all matrices, unless it has windows.
template <class S, class Args>
__device__ __forceinline__ float given_amax(const Args& a, int64_t row) {
  if constexpr (S::spec.amax_scope == AmaxScope::kRow) return a.amax[row];
  return a.amax[a.shape.amax.rows_per_amax == all_rows(a.shape) ? 0 : quotient(row, a.shape.amax.rows_per_amax)];
}

// What a matrix has one of, by the threads from `first` on. The thread block then synchronises.
template <class S, class Args>
__device__ __forceinline__ void fill_scales(SharedScales<S>& shared, const Args& a, int64_t matrix, int first = 0) {
  if constexpr (kOneAmax<S>) shared.fill(given_amax<S>(a, matrix * a.shape.rows), a.e4m3_max, first);
  if constexpr (kStochastic<S>) shared.fill_random(a, matrix, first);
}

}  // namespace jnvfp4
