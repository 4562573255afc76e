// The operands of XLA's 16-bit GEMM: exact decode of NVFP4 tensors.
#include "../../core/numerics_fast.h"
#include "../device.cuh"
#include "../kernels.h"

namespace jnvfp4 {
namespace {

// Every finite q * s has at most 6 significant bits and lies in 2^-10 .. 2688: exact in bf16 and fp16.
template <class T>
__global__ void __launch_bounds__(kThreads) decode_kernel(DecodeArgs a) {
  for (int64_t b = thread_index(); b < a.blocks; b += thread_count()) {
    const uint2 packed = __ldg(reinterpret_cast<const uint2*>(a.data) + b);
    const float scale = e4m3_decode(a.scale[b]);
    Block<T> out;
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) {
      const uint32_t codes = (i < 4 ? packed.x : packed.y) >> (8 * (i % 4));
      const float low = mul_rn(e2m1_decode_subnormal(codes & 15u), scale),
                  high = mul_rn(e2m1_decode_subnormal(codes >> 4 & 15u), scale);
      out.part(i) = T::store(low) | uint32_t{T::store(high)} << 16;
    }
    out.store(static_cast<typename T::Stored*>(a.out) + b * kBlock);
  }
}

}  // namespace

cudaError_t launch_decode(const DecodeArgs& a, cudaStream_t stream) {
  const unsigned grid = grid_for(a.blocks, kThreads);
  if (a.kind == Float::kBf16)
    decode_kernel<Bf16><<<grid, kThreads, 0, stream>>>(a);
  else
    decode_kernel<F16><<<grid, kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace jnvfp4
