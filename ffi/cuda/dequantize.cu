// dequantize on CUDA: one thread per block of 16.
#include "device.cuh"
#include "kernels.h"

namespace jnvfp4 {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(DequantizeArgs a) {
  for (int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; b < a.blocks;
       b += static_cast<int64_t>(gridDim.x) * kThreads) {
    const uint2 packed = __ldg(reinterpret_cast<const uint2*>(a.data) + b);
    const float amax = a.amax[a.blocks_per_amax == a.blocks ? 0 : b / a.blocks_per_amax];
    const float factor = dequantize_factor(a.scale[b], amax, a.e4m3_max);
    Block<T> out;
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) {
      const uint32_t codes = (i < 4 ? packed.x : packed.y) >> (8 * (i % 4));
      out.set_pair(i, mul_rn(e2m1_decode(codes & 15u), factor), mul_rn(e2m1_decode(codes >> 4 & 15u), factor));
    }
    out.store(static_cast<typename T::Stored*>(a.out) + b * kBlock);
  }
}

}  // namespace

cudaError_t launch_dequantize(const DequantizeArgs& a, cudaStream_t stream) {
  with_float(a.kind,
             [&](auto t) { dequantize_kernel<decltype(t)><<<grid_for(a.blocks, kThreads), kThreads, 0, stream>>>(a); });
  return cudaGetLastError();
}

}  // namespace jnvfp4
