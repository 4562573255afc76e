// Epilogue of a GEMM whose sums XLA or cuBLASLt has made: alpha, bias and the cast.
#include "../device.cuh"
#include "../kernels.h"

namespace jnvfp4 {
namespace {

// The index of a row's amax. One for all and one for each row, the usual cases, need no division.
__device__ __forceinline__ int64_t amax_index(const AmaxMap& map, int64_t row, int64_t all_rows) {
  if (map.rows_per_amax == 1) return row;
  return map.rows_per_amax == all_rows ? 0 : quotient(row, map.rows_per_amax);
}

__device__ __forceinline__ float alpha_of(const EpilogueArgs& e, float a_amax, float b_amax) {
  return e.quantized_a ? alpha_w4a4(a_amax, b_amax, e.a.e4m3_max, e.b.e4m3_max) : alpha_w4a16(b_amax, e.b.e4m3_max);
}

// kVector neighbouring columns of one row. `b_amax` holds the amax of the first of them, and of the others if `each`
// column has its own.
template <class T, int kVector>
__device__ __forceinline__ void finish_row(const EpilogueArgs& e, int64_t row, int64_t col, float a_amax,
                                           const float* b_amax, bool each) {
  using Stored = typename T::Stored;
  const int64_t cols = e.shape.cols;
  float alpha = alpha_of(e, a_amax, b_amax[0]);
  float y[kVector];
  Stored out[kVector];
  if constexpr (kVector == 4) {
    const float4 v = __ldcs(reinterpret_cast<const float4*>(e.y + row * e.pitch + col));
    y[0] = v.x, y[1] = v.y, y[2] = v.z, y[3] = v.w;
  } else {
    y[0] = e.y[row * e.pitch + col];
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i && each) alpha = alpha_of(e, a_amax, b_amax[i]);
    const int64_t at = (e.result.whole_bias ? row * cols : 0) + col + i;
    const float bias = e.result.bias ? load_float(e.result.bias, e.result.bias_kind, at) : 0.0f;
    out[i] = T::store(gemm_epilogue(y[i], alpha, bias, e.result.bias != nullptr));
  }
  auto* p = static_cast<Stored*>(e.result.out) + row * cols + col;
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
__global__ void __launch_bounds__(kThreads) epilogue_kernel(EpilogueArgs e) {
  const GemmShape& s = e.shape;
  const int64_t col = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVector;
  if (col >= s.cols) return;
  const bool each = e.b.map.rows_per_amax == 1;
  for (int64_t matrix = blockIdx.z; matrix < s.batch; matrix += gridDim.z) {
    const float* b_amax = e.b.amax + amax_index(e.b.map, matrix * s.cols + (each ? col : 0), s.batch * s.cols);
    for (int64_t row = blockIdx.y; row < s.rows; row += gridDim.y) {
      const int64_t a_row = matrix * s.rows + row;
      const float a_amax = e.quantized_a ? e.a.amax[amax_index(e.a.map, a_row, s.batch * s.rows)] : 1.0f;
      finish_row<T, kVector>(e, a_row, col, a_amax, b_amax, each);
    }
  }
}

template <class T, int kVector>
void launch_rows(const EpilogueArgs& e, cudaStream_t stream) {
  constexpr int64_t kMost = 32768;  // of the 65535 that grid dimensions y and z allow
  const int64_t columns = (e.shape.cols / kVector + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(std::min(e.shape.rows, kMost)),
                  static_cast<unsigned>(std::min(e.shape.batch, kMost)));
  epilogue_kernel<T, kVector><<<grid, kThreads, 0, stream>>>(e);
}

}  // namespace

cudaError_t launch_epilogue(const EpilogueArgs& e, cudaStream_t stream) {
  with_float(e.result.kind, [&](auto t) {
    if (e.shape.cols % 4 == 0 && e.pitch % 4 == 0)
      launch_rows<decltype(t), 4>(e, stream);
    else
      launch_rows<decltype(t), 1>(e, stream);
  });
  return cudaGetLastError();
}

}  // namespace jnvfp4
