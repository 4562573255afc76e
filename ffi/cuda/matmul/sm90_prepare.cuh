// The order in which the fused kernels of Hopper have the left operand, and how eight of its elements come into it.
#pragma once

#include "sm90_decode.cuh"

namespace jnvfp4 {

// Fragment order, inside a window of 64 along K: position 16 j + 8 q + 2 t + b holds element 16 t + 8 (j / 2) +
// 2 (j % 2) + q + 4 b. Lane t of a quad then needs for the four k16 steps j of wgmma exactly the elements of block t: 8
// neighbouring bytes of codes and one scale of a row of b.

// Exchanges words among the four threads whose numbers in a group of eight are two apart: thread t of them gets, of all
// four, the word t. A transpose of 4 x 4.
__device__ __forceinline__ void transpose_words(uint32_t (&p)[4], int t) {
  const bool odd = t & 1, up = t & 2;
  uint32_t x = __shfl_xor_sync(~0u, odd ? p[0] : p[1], 2), y = __shfl_xor_sync(~0u, odd ? p[2] : p[3], 2);
  if (odd)
    p[0] = x, p[2] = y;
  else
    p[1] = x, p[3] = y;
  x = __shfl_xor_sync(~0u, up ? p[0] : p[2], 4), y = __shfl_xor_sync(~0u, up ? p[1] : p[3], 4);
  if (up)
    p[0] = x, p[1] = y;
  else
    p[2] = x, p[3] = y;
}

// Eight elements as the pairs (k, k + 4) of fragment order.
struct Codes {
  const uint32_t* data;
  const uint8_t* scale;

  struct Raw {
    uint32_t codes, scale;
  };
  __device__ __forceinline__ Raw load(int64_t i) const { return {__ldcs(data + i), __ldg(scale + i / 2)}; }
  __device__ __forceinline__ void advance(int64_t i) { data += i, scale += i / 2; }
  static __device__ __forceinline__ void pairs(const Raw& raw, uint32_t (&p)[4]) {
    uint32_t scale, unused;
    Decode<F16>::scales(raw.scale, scale, unused);
    Decode<F16>::eight(raw.codes, scale, p);
  }
};
struct Halves {
  const uint4* data;

  using Raw = uint4;
  __device__ __forceinline__ Raw load(int64_t i) const { return __ldcs(data + i); }
  __device__ __forceinline__ void advance(int64_t i) { data += i; }
  static __device__ __forceinline__ void pairs(const Raw& raw, uint32_t (&p)[4]) { permute8(raw, p); }
};

// Eight threads with neighbouring eights of a row have a window. After transpose_words each has 16 bytes of the window,
// one pair of each block: where they belong.
__device__ __forceinline__ int64_t place_of_words(int64_t eight) {
  return (eight & ~int64_t{7}) + ((eight & 1) * 4 + (eight >> 1 & 3));
}

}  // namespace jnvfp4
