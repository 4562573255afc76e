// dequantize on CUDA: one thread per block of 16.
#include "../../core/numerics_fast.h"
#include "../device.cuh"
#include "../kernels.h"

namespace jnvfp4 {
namespace {

__device__ __forceinline__ float factor_of(const DequantizeArgs& a, int64_t b) {
  const float amax = a.amax[a.blocks_per_amax == a.blocks ? 0 : quotient(b, a.blocks_per_amax)];
  return dequantize_factor(__ldg(a.scale + b), amax, a.e4m3_max);
}

constexpr int kHalf = kBlock / 2;

// A thread has half a block, so that lanes write one contiguous piece.
template <class T>
__global__ void __launch_bounds__(kThreads) dequantize_halves_kernel(DequantizeArgs a) {
  for (int64_t half = thread_index(); half < 2 * a.blocks; half += thread_count()) {
    const uint32_t codes = __ldg(reinterpret_cast<const uint32_t*>(a.data) + half);
    const float factor = factor_of(a, half >> 1);
    float v[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) v[i] = mul_rn(e2m1_decode_subnormal(codes >> (4 * i) & 15u), factor);
    if constexpr (Block<T>::kPairs) {
      uint32_t w[kHalf / 2];
      round_values<T>(v, factor, w);
      static_cast<uint4*>(a.out)[half] = make_uint4(w[0], w[1], w[2], w[3]);
    } else {
      auto* out = static_cast<float4*>(a.out) + 2 * half;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) v[i] = f32_encode(v[i]);
      out[0] = make_float4(v[0], v[1], v[2], v[3]);
      out[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
  }
}

// Rotated blocks are whole.
template <class T>
__global__ void __launch_bounds__(kThreads) dequantize_rotated_kernel(DequantizeArgs a) {
  for (int64_t b = thread_index(); b < a.blocks; b += thread_count()) {
    const uint2 packed = __ldg(reinterpret_cast<const uint2*>(a.data) + b);
    const float factor = factor_of(a, b);
    float v[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i)
      v[i] = mul_rn(e2m1_decode_subnormal((i < 8 ? packed.x : packed.y) >> (4 * (i % 8)) & 15u), factor);
    rht16_inverse(v);
    // Whole warps take part in the exchange of store_blocks.
    store_blocks<T>(static_cast<typename T::Stored*>(a.out), b, rounded_block<T>(v, factor),
                    b - threadIdx.x % 32 + 32 <= a.blocks);
  }
}

}  // namespace

cudaError_t launch_dequantize(const DequantizeArgs& a, cudaStream_t stream) {
  with_float(a.kind, [&](auto t) {
    using T = decltype(t);
    if (a.rotate_back)
      dequantize_rotated_kernel<T><<<grid_for(a.blocks, kThreads), kThreads, 0, stream>>>(a);
    else
      dequantize_halves_kernel<T><<<grid_for(2 * a.blocks, kThreads), kThreads, 0, stream>>>(a);
  });
  return cudaGetLastError();
}

}  // namespace jnvfp4
