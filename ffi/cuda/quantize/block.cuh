// How a thread quantizes its block of 16 elements, by spec. Callers reduce over threads; choose.cuh has 4over6.
//
// Each step has a quick form, which gives the same bits wherever a test on the block allows it, and the form of
// numerics.h for all other blocks. docs/kernels.md says why the quick forms are exact.
#pragma once

#include <cuda_fp8.h>

#include "../../core/numerics_fast.h"
#include "../device.cuh"
#include "../kernels.h"
#include "codes.cuh"

namespace jnvfp4 {

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
// `encode` is over kOver, and NaN where a quick form is not proven exact, so that every test on it fails.
struct EncodeFactor {
  float encode;
};
// For a 4over6 candidate also the decoded values of 1 and 1.5, or the scale itself for the fast error; times kOver. And
// whether the difference of an element by one FMA is that of the rule.
struct alignas(16) ErrorFactors {
  float encode, one, one_and_half;
  uint32_t by_rule;
};
template <class S>
using Factors = std::conditional_t<kChooses<S>, ErrorFactors, EncodeFactor>;

template <class S>
__device__ __forceinline__ Factors<S> factors_of(uint32_t scale, const GlobalScale& g) {
  const float encode = block_encode_scale(scale, g);
  const float quick = encode >= 0x1p-119f ? encode * (1.0f / kOver) : float_of(kNan);
  if constexpr (!kChooses<S>) {
    return {quick};
  } else {
    // Away from under- and overflow of errors and of the amax, which is about six times the value of 1. A block of
    // zeros has no error.
    const float s = e4m3_decode(scale), one = mul_rn(s, g.decode);
    const bool safe = scale == 0 || (one > 0x1p-41f && one < 0x1p36f);
    if constexpr (!kStrict<S>) return {safe ? quick : float_of(kNan), s * kOver, 0.0f, true};
    const StrictValues values(s, g);
    return {safe && (values.apply || scale == 0) ? quick : float_of(kNan), values.one * kOver,
            values.one_and_half * kOver, values.linear()};
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

  // Fills the table by the 128 threads from `first` on; the CTA then synchronises.
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

// Encodes with a scale that is already chosen. `x` has the elements, `signs` is code_signs of them.
template <class X, class Scales>
__device__ __forceinline__ Encoded encode_with(const X& x, uint2 signs, uint32_t amax, uint32_t scale, float encode,
                                               const Scales& scales) {
  Values v;
  if (quick_below(amax, encode)) {
    x.finite_values(v);
    return {with_signs(nearest_codes(v, encode), signs), scale};
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
    if (quick_below<true>(amax, encode)) return {with_signs(stochastic_codes(v, encode, bits), signs), scale};
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

// Fills the scales that a matrix has one set of, by the threads from `first` on. The CTA then synchronises.
template <class S, class Args>
__device__ __forceinline__ void fill_scales(SharedScales<S>& shared, const Args& a, int64_t matrix, int first = 0) {
  if constexpr (kOneAmax<S>) shared.fill(given_amax<S>(a, matrix * a.shape.rows), a.e4m3_max, first);
  if constexpr (kStochastic<S>) shared.fill_random(a, matrix, first);
}

}  // namespace jnvfp4
