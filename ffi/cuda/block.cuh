// What a thread does with the 16 elements of its block, by spec. Reductions over threads are the caller's.
#pragma once

#include "device.cuh"
#include "kernels.h"

namespace jnvfp4 {

using Values = float[kBlock];

template <class S>
inline constexpr bool kChooses = S::spec.select != Select::kMax6;
template <class S>
inline constexpr bool kWindows = S::spec.amax_scope == AmaxScope::kWindow64;

__device__ __forceinline__ uint32_t block_amax(const Values& v) {
  uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) m = amax_bits(m, bits_of(v[i]) & kMagnitude);
  return m;
}

// The maximum over the four neighbouring lanes that hold a window.
__device__ __forceinline__ uint32_t window_max(uint32_t m) {
  const unsigned mask = 0xfu << (threadIdx.x & 28u);
  m = amax_bits(m, __shfl_xor_sync(mask, m, 1));
  return amax_bits(m, __shfl_xor_sync(mask, m, 2));
}

struct Encoded {
  uint2 codes;  // packed two a byte
  uint8_t scale;

  __device__ __forceinline__ void store(const QuantizeArgs& a, int64_t block) const {
    a.scale[block] = scale;
    *reinterpret_cast<uint2*>(a.data + block * (kBlock / 2)) = codes;
  }
};

// A NaN scale has only codes 0.
__device__ __forceinline__ uint2 pack(const uint32_t (&code)[kBlock], uint8_t scale) {
  uint32_t half[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kBlock; ++i) half[i / 8] |= code[i] << (4 * (i % 8));
  return scale == kScaleNan ? make_uint2(0, 0) : make_uint2(half[0], half[1]);
}

__device__ __forceinline__ void encode_codes(const Values& v, float enc, uint32_t (&code)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t b = bits_of(mul_rn(v[i], enc));
    code[i] = e2m1_magnitude(b & kMagnitude) | (b & kSign) >> 28;
  }
}

__device__ __forceinline__ void encode_codes_stochastic(const Values& v, float enc, const uint32_t (&random)[4],
                                                        uint32_t (&code)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t b = bits_of(mul_rn(v[i], enc)), r = random[i / 4] >> (8 * (i % 4)) & 0xffu;
    code[i] = e2m1_magnitude_stochastic(b & kMagnitude, r) | (b & kSign) >> 28;
  }
}

// Plain block scale. (matrix, row, col) is the block's place in the local array.
template <class S>
__device__ __forceinline__ Encoded encode_plain(const Values& v, uint32_t amax, const GlobalScale& g,
                                                const QuantizeArgs& a, int64_t matrix, int64_t row, int64_t col) {
  const uint8_t scale = block_scale(amax, g);
  const float enc = block_encode_scale(scale, g);
  uint32_t code[kBlock];
  if constexpr (S::spec.rounding == Rounding::kStochastic) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(a.stream.words) + matrix);
    const uint32_t key[2] = {words.x, words.y};
    const uint64_t first = words.z | uint64_t{words.w} << 32;
    uint32_t random[4];
    random_bits(key, first + static_cast<uint64_t>(row * a.stream.row_blocks + col), a.shape.transposed, random);
    encode_codes_stochastic(v, enc, random, code);
  } else {
    encode_codes(v, enc, code);
  }
  return {pack(code, scale), scale};
}

// 4over6: both candidates and their errors over this row of 16.
struct Both {
  Encoded six, four;
  float error_six, error_four;

  __device__ __forceinline__ Encoded better() const { return choose_four(error_six, error_four) ? four : six; }
};

template <class S>
__device__ __forceinline__ Encoded encode_candidate(const Values& v, uint8_t scale, const GlobalScale& g,
                                                    float* error) {
  constexpr bool squared = S::spec.select == Select::kMse;
  const float s = e4m3_decode(scale);
  uint32_t code[kBlock];
  encode_codes(v, block_encode_scale(scale, g), code);
  if (error)
    *error = S::spec.error_math == ErrorMath::kFp16 ? row_error_scaled(v, code, s, g, squared)
                                                    : row_error_strict(v, code, s, g, squared);
  return {pack(code, scale), scale};
}

template <class S>
__device__ __forceinline__ Both encode_both(const Values& v, uint32_t amax, const GlobalScale& g) {
  const Candidates scales = candidate_scales(amax, g);
  Both both{};
  if (scales.six == scales.four) {  // one scale, one error: a tie
    both.six = encode_candidate<S>(v, scales.six, g, nullptr);
  } else {
    both.six = encode_candidate<S>(v, scales.six, g, &both.error_six);
    both.four = encode_candidate<S>(v, scales.four, g, &both.error_four);
  }
  return both;
}

}  // namespace jnvfp4
