// dequantize on CUDA: one thread per block of 16.
#include "device.cuh"
#include "kernels.h"

namespace jnvfp4 {
namespace {

template <class T, bool kRotateBack>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(DequantizeArgs a) {
  for (int64_t b = thread_index(); b < a.blocks; b += thread_count()) {
    const uint2 packed = __ldg(reinterpret_cast<const uint2*>(a.data) + b);
    const float amax = a.amax[a.blocks_per_amax == a.blocks ? 0 : quotient(b, a.blocks_per_amax)];
    const float factor = dequantize_factor(a.scale[b], amax, a.e4m3_max);
    float v[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i)
      v[i] = mul_rn(e2m1_decode((i < 8 ? packed.x : packed.y) >> (4 * (i % 8)) & 15u), factor);
    if constexpr (kRotateBack) rht16_inverse(v);
    Block<T> out;
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) out.set_pair(i, v[2 * i], v[2 * i + 1]);
    out.store(static_cast<typename T::Stored*>(a.out) + b * kBlock);
  }
}

}  // namespace

cudaError_t launch_dequantize(const DequantizeArgs& a, cudaStream_t stream) {
  const unsigned grid = grid_for(a.blocks, kThreads);
  with_float(a.kind, [&](auto t) {
    if (a.rotate_back)
      dequantize_kernel<decltype(t), true><<<grid, kThreads, 0, stream>>>(a);
    else
      dequantize_kernel<decltype(t), false><<<grid, kThreads, 0, stream>>>(a);
  });
  return cudaGetLastError();
}

}  // namespace jnvfp4
