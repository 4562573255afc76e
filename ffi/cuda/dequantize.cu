// dequantize on CUDA: one thread per block of 16.
#include "device.cuh"
#include "kernels.h"

namespace jnvfp4 {
namespace {

// Rounds pairs of finite values with the conversion instruction, which has another NaN than the stored one.
template <class T>
__device__ __forceinline__ void set_block(Block<T>& out, const float (&v)[kBlock], bool finite) {
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    if (std::is_same_v<T, Bf16> && finite)
      out.part(i) = bf16_pair(v[2 * i], v[2 * i + 1]);
    else
      out.set_pair(i, v[2 * i], v[2 * i + 1]);
  }
}

// What a thread reads of a block.
struct Packed {
  uint2 codes;
  uint8_t scale;

  __device__ __forceinline__ void load(const DequantizeArgs& a, int64_t b) {
    codes = __ldg(reinterpret_cast<const uint2*>(a.data) + b);
    scale = __ldg(a.scale + b);
  }
};

template <class T, bool kRotateBack>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(DequantizeArgs a) {
  int64_t b = thread_index();
  Packed next;
  if (b < a.blocks) next.load(a, b);
  while (b < a.blocks) {  // the next block's codes on their way
    const Packed own = next;
    const int64_t block = b;
    b += thread_count();
    if (b < a.blocks) next.load(a, b);
    const float amax = a.amax[a.blocks_per_amax == a.blocks ? 0 : quotient(block, a.blocks_per_amax)];
    const float factor = dequantize_factor(own.scale, amax, a.e4m3_max);
    float v[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i)
      v[i] = mul_rn(e2m1_decode((i < 8 ? own.codes.x : own.codes.y) >> (4 * (i % 8)) & 15u), factor);
    if constexpr (kRotateBack) rht16_inverse(v);
    Block<T> out;
    if (fabsf(factor) < 1e36f)  // no NaN, even from sums
      set_block(out, v, true);
    else
      set_block(out, v, false);
    // Whole warps take part in the exchange of store_blocks.
    store_blocks<T>(static_cast<typename T::Stored*>(a.out), block, out, block - threadIdx.x % 32 + 32 <= a.blocks);
  }
}

}  // namespace

cudaError_t launch_dequantize(const DequantizeArgs& a, cudaStream_t stream) {
  const unsigned grid = resident_grid(a.blocks, kThreads, 6);
  with_float(a.kind, [&](auto t) {
    if (a.rotate_back)
      dequantize_kernel<decltype(t), true><<<grid, kThreads, 0, stream>>>(a);
    else
      dequantize_kernel<decltype(t), false><<<grid, kThreads, 0, stream>>>(a);
  });
  return cudaGetLastError();
}

}  // namespace jnvfp4
