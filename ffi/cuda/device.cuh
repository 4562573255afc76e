// Loads, stores and launch geometry shared by the kernels. The arithmetic is in numerics.h.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../types.h"

namespace jnvfp4 {

constexpr int kThreads = 256;

__device__ __forceinline__ int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ __forceinline__ int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * kThreads; }

// a / b for numbers that are not negative. A 64-bit division is about a hundred instructions.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  return (a | b) >> 32 ? a / b : static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}

__host__ __device__ __forceinline__ int64_t all_rows(const QuantShape& s) { return s.batch * s.rows; }

// 16 consecutive elements as 16-byte words.
template <class T>
struct Block {
  static constexpr int kWords = kBlock * sizeof(typename T::Stored) / 16;
  uint4 word[kWords];

  __device__ __forceinline__ void load(const typename T::Stored* p) {
    const auto* q = reinterpret_cast<const uint4*>(p);
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = __ldg(q + i);
  }
  __device__ __forceinline__ void store(typename T::Stored* p) const {
    auto* q = reinterpret_cast<uint4*>(p);
#pragma unroll
    for (int i = 0; i < kWords; ++i) q[i] = word[i];
  }
  __device__ __forceinline__ uint32_t& part(int i) { return (&word[i / 4].x)[i % 4]; }
  __device__ __forceinline__ float value(int i) {
    if constexpr (sizeof(typename T::Stored) == 4)
      return T::load(part(i));
    else
      return T::load(static_cast<uint16_t>(part(i / 2) >> (16 * (i % 2))));
  }
  __device__ __forceinline__ void set_pair(int i, float low, float high) {  // elements 2i, 2i + 1
    if constexpr (sizeof(typename T::Stored) == 4) {
      part(2 * i) = T::store(low);
      part(2 * i + 1) = T::store(high);
    } else {
      part(i) = T::store(low) | uint32_t{T::store(high)} << 16;
    }
  }
};

// Grid for a grid-stride loop over `items` of `threads` each.
inline unsigned grid_for(int64_t items, int64_t per_block) {
  constexpr int64_t kMost = 132 * 64;  // beyond this, more blocks only cost launches
  return static_cast<unsigned>(std::max<int64_t>(1, std::min((items + per_block - 1) / per_block, kMost)));
}

}  // namespace jnvfp4
