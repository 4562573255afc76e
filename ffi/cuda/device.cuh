// Loads, stores and launch geometry shared by the kernels. The arithmetic is in numerics.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "../core/arrays.h"

namespace jnvfp4 {

constexpr int kThreads = 256;

// With a smaller factor, what 16 grid values times it sum up to is finite.
constexpr float kFiniteFactor = 1e36f;

__device__ __forceinline__ int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ __forceinline__ int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * kThreads; }

// a / b for numbers that are not negative. A 64-bit division is about a hundred instructions.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  return (a | b) >> 32 ? a / b : static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}

__host__ __device__ __forceinline__ int64_t all_rows(const QuantShape& s) { return s.batch * s.rows; }

// ---------------------------------------------------------------- element types that kernels are compiled for
// float32, or float16 that is widened when it is read: two instances of a kernel, with
// bfloat16's, compile sooner than three.
struct Wide : F32 {};

template <class F>
void with_bf16_or_wide(Float kind, const F& f) {
  if (kind == Float::kBf16)
    f(Bf16{});
  else
    f(Wide{});
}
// Whether such a kernel has float16 in memory.
template <class T>
__device__ __forceinline__ bool widens(Float kind) {
  return std::is_same_v<T, Wide> && kind == Float::kF16;
}

// A value of which the compiler knows nothing. So it keeps it in a register instead of computing it again, and computes
// what follows from it again instead of keeping it.
__device__ __forceinline__ int pin_register(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

// Lanes that arrive at an mbarrier for a warp. One is enough after __syncwarp, but racecheck does not see that it
// stands for all, which therefore arrive in its build (.ci/run_gpu).
#if defined(JNVFP4_RACECHECK)
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif

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

__device__ __forceinline__ uint32_t f16_pair(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
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

template <class T>
__device__ __forceinline__ float half_of(uint32_t pair, bool high) {
  return high ? high_half<T>(pair) : low_half<T>(pair);
}

// half_of for finite numbers, except that -0 may become 0. For bfloat16 the high half is the pair times (0, 1): a
// multiplication, so that not all conversions wait for the ALU.
template <class T>
__device__ __forceinline__ float finite_half_of(uint32_t pair, bool high) {
  if constexpr (std::is_same_v<T, Bf16>)
    if (high) {
      uint32_t r;
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(0x3f800000u), "r"(0u));
      return float_of(r);
    }
  return half_of<T>(pair, high);
}

// Puts signs, bytes that have the sign of an even or odd element in all bits, where eight codes have theirs; other bits
// are arbitrary.
__device__ __forceinline__ uint32_t code_signs(uint32_t even, uint32_t odd) {
  return (even & 0x0f0f0f0fu) | (odd & 0xf0f0f0f0u);
}
// The signs of the halves of two words, each in all bits of a byte: the low halves first.
__device__ __forceinline__ uint32_t half_signs(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0xfbd9u));
  return r;
}
// The signs of two words, each in all bits of a byte.
__device__ __forceinline__ uint32_t word_signs(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x00fbu));
  return r;
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
      return half_of<T>(part(i / 2), i % 2);
    else
      return T::load(part(i));
  }
  __device__ __forceinline__ void values(float (&v)[kBlock]) const {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = value(i);
  }
  // If all are finite, and but for the sign of zeros.
  __device__ __forceinline__ void finite_values(float (&v)[kBlock]) const {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = kPairs ? finite_half_of<T>(part(i / 2), i % 2) : value(i);
  }
  __device__ __forceinline__ void magnitudes(float (&v)[kBlock]) const {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = kPairs ? half_of<T>(part(i / 2) & 0x7fff7fffu, i % 2) : fabsf(value(i));
  }
  // `code_signs` of the halves.
  __device__ __forceinline__ uint2 signs() const {
    const auto half = [&](int h) {
      uint32_t low, high;  // of elements 0 2 1 3 and 4 6 5 7
      if constexpr (kPairs) {
        low = half_signs(part(4 * h), part(4 * h + 1)), high = half_signs(part(4 * h + 2), part(4 * h + 3));
      } else {
        const auto two = [&](int i) { return word_signs(part(8 * h + i), part(8 * h + i + 2)); };
        low = __byte_perm(two(0), two(1), 0x5410), high = __byte_perm(two(4), two(5), 0x5410);
      }
      return code_signs(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
    };
    return make_uint2(half(0), half(1));
  }
  // The bits of the largest magnitude, as a float32; some NaN if there is one.
  __device__ __forceinline__ uint32_t amax() const {
    if constexpr (kPairs) {
      uint32_t m = max_of_pairs<T>(part(0), part(1));
#pragma unroll
      for (int i = 2; i < kBlock / 2; ++i) m = max_of_pairs<T>(m, part(i));
      return bits_of(fabsf(high_half<T>(max_of_pairs<T>(m, __byte_perm(m, 0, 0x1032)))));
    } else {
      uint32_t m = 0;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) m = amax_bits(m, part(i) & kMagnitude);
      return m;
    }
  }
};

// Block first + i of x.
template <class T>
__device__ __forceinline__ Block<T> load_block(const void* x, Float kind, int64_t first, int i) {
  Block<T> b;
  if (widens<T>(kind)) {
    const auto half = load_block<F16>(x, kind, first, i);
    if constexpr (std::is_same_v<T, Wide>)
#pragma unroll
      for (int k = 0; k < kBlock; ++k) b.part(k) = bits_of(half.value(k));
  } else {
    b.load(static_cast<const typename T::Stored*>(x) + first * kBlock + i * kBlock);
  }
  return b;
}
template <class T>
__device__ __forceinline__ float load_element(const void* x, Float kind, int64_t i) {
  return widens<T>(kind) ? load_float(x, Float::kF16, i) : T::load(static_cast<const typename T::Stored*>(x)[i]);
}

// Rounds values by a block's factor to T. Where it is not too large all of them are finite, even rotated back, and the
// conversion instructions may do it, which have another NaN than the stored one.
template <class T, int kCount>
__device__ __forceinline__ void round_values(const float (&v)[kCount], float factor, uint32_t (&out)[kCount / 2]) {
  const auto round = [&](const auto& pair) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) out[i] = pair(v[2 * i], v[2 * i + 1]);
  };
  if (fabsf(factor) < kFiniteFactor)
    round([](float low, float high) { return std::is_same_v<T, Bf16> ? bf16_pair(low, high) : f16_pair(low, high); });
  else
    round([](float low, float high) { return T::store(low) | uint32_t{T::store(high)} << 16; });
}

template <class T>
__device__ __forceinline__ Block<T> rounded_block(const float (&v)[kBlock], float factor) {
  Block<T> out;
  if constexpr (Block<T>::kPairs) {
    uint32_t w[kBlock / 2];
    round_values<T>(v, factor, w);
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) out.part(i) = w[i];
  } else {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) out.part(i) = T::store(v[i]);
  }
  return out;
}

// Stores block `b` of each lane; each even lane has the block before that of the next lane. The two exchange words, so
// that a store instruction writes whole sectors. `all` says that every lane of the warp is here.
template <class T>
__device__ __forceinline__ void store_blocks(typename T::Stored* p, int64_t b, Block<T> block, bool all) {
  if (!all) return block.store(p + b * kBlock);
  const bool odd = threadIdx.x % 2;
  auto* q = reinterpret_cast<uint4*>(p + (b - odd) * kBlock) + odd;
#pragma unroll
  for (int w = 0; w < Block<T>::kWords; w += 2) {
    uint4 own = odd ? block.word[w + 1] : block.word[w], other = odd ? block.word[w] : block.word[w + 1];
#pragma unroll
    for (int i = 0; i < 4; ++i) (&other.x)[i] = __shfl_xor_sync(0xffffffffu, (&other.x)[i], 1);
    q[w] = odd ? other : own;  // the even lane's block
    q[Block<T>::kWords + w] = odd ? own : other;
  }
}

// ---------------------------------------------------------------- shared memory
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// Loads four 8 x 8 matrices of 16-bit numbers, as mma has its left operand of 16 rows.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// ---------------------------------------------------------------- launch geometry
// Returns an attribute of the current device, or `otherwise`: the launch that follows reports what is wrong.
inline int attribute_or(cudaDeviceAttr attribute, int otherwise) {
  int device = 0, value = 0;
  const bool found =
      cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess;
  return found ? value : otherwise;
}
// Lets CTAs of a kernel have so many bytes of shared memory: the runtime is told once on each device.
inline cudaError_t allow_shared(const void* kernel, int bytes) {
  static auto& mutex = *new std::mutex;
  static auto& allowed = *new std::map<std::pair<int, const void*>, int>;
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  const std::lock_guard<std::mutex> lock(mutex);
  int& most = allowed[{device, kernel}];
  if (bytes <= most) return cudaSuccess;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess) most = bytes;
  return status;
}
inline int multiprocessors() { return attribute_or(cudaDevAttrMultiProcessorCount, 1); }
// Before the point: 9 of 9.0.
inline int major_capability() { return attribute_or(cudaDevAttrComputeCapabilityMajor, 0); }
// The most that a CTA may have, in bytes.
inline int shared_memory() { return attribute_or(cudaDevAttrMaxSharedMemoryPerBlockOptin, 0); }

// Grid for a grid-stride loop over `items`, `per_block` a CTA.
inline unsigned grid_for(int64_t items, int64_t per_block) {
  constexpr int64_t kMost = 1 << 20;  // below the 2^31 - 1 that a grid allows; the loop does the rest
  return static_cast<unsigned>(std::max<int64_t>(1, std::min((items + per_block - 1) / per_block, kMost)));
}

// Grid of as many CTAs as are resident at once.
inline unsigned resident_grid(int64_t items, int64_t per_block, int blocks_per_multiprocessor) {
  const int64_t most = static_cast<int64_t>(multiprocessors()) * blocks_per_multiprocessor;
  return static_cast<unsigned>(std::max<int64_t>(1, std::min((items + per_block - 1) / per_block, most)));
}

}  // namespace jnvfp4
