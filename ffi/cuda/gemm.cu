// What surrounds the 16-bit GEMM that XLA runs: exact decode of the operands before it, alpha, bias and
// the cast after it.
#include "../numerics_fast.h"
#include "device.cuh"
#include "kernels.h"

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

__device__ __forceinline__ float alpha_of(const EpilogueArgs& a, float a_amax, float b_amax) {
  return a.a_max == 0.0f ? alpha_w4a16(b_amax, a.b_max) : alpha_w4a4(a_amax, b_amax, a.a_max, a.b_max);
}

// kVector neighbouring columns of one row.
template <class T, int kVector>
__device__ __forceinline__ void finish_row(const EpilogueArgs& a, int64_t row, int64_t col, float a_amax,
                                           const float* b_amax) {
  using Stored = typename T::Stored;
  float alpha = alpha_of(a, a_amax, b_amax[col * a.b_stride.per_row]);
  float y[kVector];
  Stored out[kVector];
  if constexpr (kVector == 4) {
    const float4 v = __ldcs(reinterpret_cast<const float4*>(a.y + row * a.cols + col));
    y[0] = v.x, y[1] = v.y, y[2] = v.z, y[3] = v.w;
  } else {
    y[0] = a.y[row * a.cols + col];
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i && a.b_stride.per_row) alpha = alpha_of(a, a_amax, b_amax[col + i]);
    out[i] = T::store(
        gemm_epilogue(y[i], alpha, a.bias ? load_float(a.bias, a.bias_kind, col + i) : 0.0f, a.bias != nullptr));
  }
  auto* p = static_cast<Stored*>(a.out) + row * a.cols + col;
  if constexpr (kVector == 4 && sizeof(Stored) == 2) {
    *reinterpret_cast<uint2*>(p) = make_uint2(out[0] | uint32_t{out[1]} << 16, out[2] | uint32_t{out[3]} << 16);
  } else if constexpr (kVector == 4) {
    *reinterpret_cast<uint4*>(p) = make_uint4(out[0], out[1], out[2], out[3]);
  } else {
    *p = out[0];
  }
}

// Grid: columns, rows, matrices; the last two are strided over.
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads) epilogue_kernel(EpilogueArgs a) {
  const int64_t col = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVector;
  if (col >= a.cols) return;
  for (int64_t matrix = blockIdx.z; matrix < a.batch; matrix += gridDim.z) {
    const float* b_amax = a.b_amax + matrix * a.b_stride.per_matrix;
    for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
      const float a_amax = a.a_max == 0.0f ? 1.0f : a.a_amax[matrix * a.a_stride.per_matrix + row * a.a_stride.per_row];
      finish_row<T, kVector>(a, matrix * a.rows + row, col, a_amax, b_amax);
    }
  }
}

template <class T, int kVector>
void launch_epilogue_rows(const EpilogueArgs& a, cudaStream_t stream) {
  constexpr int64_t kMost = 32768;  // of the 65535 that grid dimensions y and z allow
  const int64_t columns = (a.cols / kVector + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(std::min(a.rows, kMost)),
                  static_cast<unsigned>(std::min(a.batch, kMost)));
  epilogue_kernel<T, kVector><<<grid, kThreads, 0, stream>>>(a);
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

cudaError_t launch_epilogue(const EpilogueArgs& a, cudaStream_t stream) {
  with_float(a.out_kind, [&](auto t) {
    if (a.cols % 4 == 0)
      launch_epilogue_rows<decltype(t), 4>(a, stream);
    else
      launch_epilogue_rows<decltype(t), 1>(a, stream);
  });
  return cudaGetLastError();
}

}  // namespace jnvfp4
