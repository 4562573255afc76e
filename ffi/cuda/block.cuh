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

// The sign bits of eight values in the places of eight codes' signs.
__device__ __forceinline__ uint32_t signs_of(const float* v) {
  const auto bytes = [](float a, float b) {  // of each, its sign in all bits of a byte
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"(0x00fbu));
    return r;
  };
  const uint32_t even = __byte_perm(bytes(v[0], v[2]), bytes(v[4], v[6]), 0x5410);
  const uint32_t odd = __byte_perm(bytes(v[1], v[3]), bytes(v[5], v[7]), 0x5410);
  return (even & 0x08080808u) | (odd & 0x80808080u);
}

// The 16 codes of a block, packed two a byte, from `magnitude(i)` plus `bias`. A NaN scale has only codes 0.
template <class F>
__device__ __forceinline__ uint2 pack(const Values& v, uint8_t scale, uint32_t bias, const F& magnitude) {
  uint32_t half[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) packed = packed * 16u + magnitude(8 * h + i);
    half[h] = (packed - bias * 0x11111111u) | signs_of(v + 8 * h);
  }
  return scale == kScaleNan ? make_uint2(0, 0) : make_uint2(half[0], half[1]);
}

__device__ __forceinline__ uint2 encode_nearest(const Values& v, float enc, uint8_t scale) {
  return pack(v, scale, kMagicBits, [&](int i) {
    return static_cast<uint32_t>(e2m1_magnitude_plus_magic(bits_of(mul_rn(fabsf(v[i]), enc))));
  });
}

__device__ __forceinline__ uint2 encode_stochastic(const Values& v, float enc, uint8_t scale,
                                                   const uint32_t (&random)[4]) {
  return pack(v, scale, 0, [&](int i) {
    return e2m1_magnitude_stochastic(bits_of(mul_rn(fabsf(v[i]), enc)), random[i / 4] >> (8 * (i % 4)) & 0xffu);
  });
}

// Plain block scale. (matrix, row, col) is the block's place in the local array.
template <class S>
__device__ __forceinline__ Encoded encode_plain(const Values& v, uint32_t amax, const GlobalScale& g,
                                                const QuantizeArgs& a, int64_t matrix, int64_t row, int64_t col) {
  const uint8_t scale = block_scale(amax, g);
  const float enc = block_encode_scale(scale, g);
  if constexpr (S::spec.rounding == Rounding::kStochastic) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(a.stream.words) + matrix);
    const uint32_t key[2] = {words.x, words.y};
    const uint64_t first = words.z | uint64_t{words.w} << 32;
    uint32_t random[4];
    random_bits(key, first + static_cast<uint64_t>(row * a.stream.row_blocks + col), a.shape.transposed, random);
    return {encode_stochastic(v, enc, scale, random), scale};
  } else {
    return {encode_nearest(v, enc, scale), scale};
  }
}

// 4over6: both candidates and their errors over this row of 16.
struct Both {
  Candidates scales;
  float error_six, error_four;

  __device__ __forceinline__ Encoded better(const Values& v, const GlobalScale& g) const {
    const uint8_t scale = choose_four(error_six, error_four) ? scales.four : scales.six;
    return {encode_nearest(v, block_encode_scale(scale, g), scale), scale};
  }
};

template <class S>
__device__ __forceinline__ float candidate_error(const Values& v, uint8_t scale, const GlobalScale& g) {
  constexpr bool squared = S::spec.select == Select::kMse;
  const float s = e4m3_decode(scale), enc = block_encode_scale(scale, g);
  Values q;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) q[i] = e2m1_round(mul_rn(v[i], enc));
  return S::spec.error_math == ErrorMath::kFp16 ? row_error_scaled(v, q, s, g, squared)
                                                : row_error_strict(v, q, s, g, squared);
}

template <class S>
__device__ __forceinline__ Both try_both(const Values& v, uint32_t amax, const GlobalScale& g) {
  Both both{candidate_scales(amax, g), 0.0f, 0.0f};
  if (both.scales.six != both.scales.four) {  // one scale would have one error: a tie
    both.error_six = candidate_error<S>(v, both.scales.six, g);
    both.error_four = candidate_error<S>(v, both.scales.four, g);
  }
  return both;
}

}  // namespace jnvfp4
