// Loads, stores and launch geometry shared by the kernels. The arithmetic is in numerics.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
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

// ---------------------------------------------------------------- two numbers of 16 bits in a word
// The larger magnitude of either half, with some sign; NaN wins.
template <class T>
__device__ __forceinline__ uint32_t max_of_pairs(uint32_t a, uint32_t b) {
  uint32_t m;
#if __CUDA_ARCH__ >= 860  // takes the magnitudes itself
  if constexpr (std::is_same_v<T, Bf16>)
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  else
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
#else
  m = __vmaxu2(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
  return m;
}

__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <class T>
__device__ __forceinline__ float low_half(uint32_t pair) {
  return T::load(static_cast<uint16_t>(pair));
}
template <class T>
__device__ __forceinline__ float high_half(uint32_t pair) {
  if constexpr (std::is_same_v<T, Bf16>)
    return float_of(pair & 0xffff0000u);
  else
    return T::load(static_cast<uint16_t>(pair >> 16));
}

// ---------------------------------------------------------------- blocks
// 16 consecutive elements as 16-byte words.
template <class T>
struct Block {
  static constexpr bool kPairs = sizeof(typename T::Stored) == 2;
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
  __device__ __forceinline__ uint32_t part(int i) const { return (&word[i / 4].x)[i % 4]; }
  __device__ __forceinline__ float value(int i) const {
    if constexpr (kPairs)
      return i % 2 ? high_half<T>(part(i / 2)) : low_half<T>(part(i / 2));
    else
      return T::load(part(i));
  }
  __device__ __forceinline__ void values(float (&v)[kBlock]) const {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = value(i);
  }
  // The bits of the largest magnitude, as a float32; some NaN if there is one.
  __device__ __forceinline__ uint32_t amax() const {
    if constexpr (kPairs) {
      uint32_t m = max_of_pairs<T>(part(0), part(1));
#pragma unroll
      for (int i = 2; i < kBlock / 2; ++i) m = max_of_pairs<T>(m, part(i));
      m &= 0x7fff7fffu;
      return amax_bits(bits_of(low_half<T>(m)), bits_of(high_half<T>(m)));
    } else {
      uint32_t m = 0;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) m = amax_bits(m, part(i) & kMagnitude);
      return m;
    }
  }
  __device__ __forceinline__ void set_pair(int i, float low, float high) {  // elements 2i, 2i + 1
    if constexpr (kPairs) {
      part(i) = T::store(low) | uint32_t{T::store(high)} << 16;
    } else {
      part(2 * i) = T::store(low);
      part(2 * i + 1) = T::store(high);
    }
  }
};

// Stores block `b` of each lane; consecutive lanes have consecutive blocks. Lane pairs exchange halves of 16-bit
// blocks, so that a store instruction writes whole sectors. `all` says that every lane of the warp is here.
template <class T>
__device__ __forceinline__ void store_blocks(typename T::Stored* p, int64_t b, Block<T> block, bool all) {
  if (!Block<T>::kPairs || !all) {
    block.store(p + b * kBlock);
  } else {
    const bool odd = threadIdx.x % 2;
    uint4 own = odd ? block.word[1] : block.word[0], other = odd ? block.word[0] : block.word[1];
#pragma unroll
    for (int i = 0; i < 4; ++i) (&other.x)[i] = __shfl_xor_sync(0xffffffffu, (&other.x)[i], 1);
    auto* q = reinterpret_cast<uint4*>(p + (b - odd) * kBlock) + odd;
    q[0] = odd ? other : own;  // the even lane's block
    q[2] = odd ? own : other;
  }
}

// ---------------------------------------------------------------- launch geometry
inline int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    return 1;  // the launch that follows reports what is wrong
  return count;
}

// Grid for a grid-stride loop over `items`, `per_block` a thread block.
inline unsigned grid_for(int64_t items, int64_t per_block) {
  constexpr int64_t kMost = 1 << 20;  // beyond this, more blocks only cost launches
  return static_cast<unsigned>(std::max<int64_t>(1, std::min((items + per_block - 1) / per_block, kMost)));
}

// Grid of as many thread blocks as are resident at once.
inline unsigned resident_grid(int64_t items, int64_t per_block, int blocks_per_multiprocessor) {
  const int64_t most = static_cast<int64_t>(multiprocessors()) * blocks_per_multiprocessor;
  return static_cast<unsigned>(std::max<int64_t>(1, std::min((items + per_block - 1) / per_block, most)));
}

}  // namespace jnvfp4
