// a b^T of a 16-bit array and an NVFP4 tensor in the pinned order of docs/numerics.md: the same bits as the CPU. Each
// output adds one product at a time, k ascending, two roundings each, so no tensor core and no fused multiply-add can
// serve. A plain kernel: a CTA has 64 x 64 outputs, a thread 4 x 4 of them.
#include "../../../core/numerics_fast.h"
#include "../../device.cuh"
#include "../launchers.h"

namespace jnvfp4 {
namespace {

constexpr int kTile = 64, kStep = 32, kEach = 4;  // outputs a side, elements of K at a time, outputs of a thread a side
constexpr int kPitch = kTile + 4;                 // floats a row: 16-byte words, spread over the banks
static_assert(kTile / kEach * (kTile / kEach) == kThreads, "each thread has its outputs");
static_assert(kTile * kStep / kBlock == kThreads / 2, "half of the threads load a block each");

using Slab = float[kStep][kPitch];

// A block of 16 of one row, k down the slab.
__device__ __forceinline__ void put(Slab& slab, int row, int first, const float (&v)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) slab[first + i][row] = v[i];
}

template <class A>
__device__ __forceinline__ void load_dense(const MatmulOperand& x, int64_t row, int64_t k, int64_t depth,
                                           float (&v)[kBlock]) {
  Block<A> block;
  block.load(static_cast<const typename A::Stored*>(x.data) + row * depth + k);
  block.values(v);
}

__device__ __forceinline__ void load_nvfp4(const MatmulOperand& x, int64_t row, int64_t k, int64_t depth,
                                           float (&v)[kBlock]) {
  const int64_t block = (row * depth + k) / kBlock;
  const uint2 codes = __ldg(static_cast<const uint2*>(x.data) + block);
  const float scale = e4m3_decode(__ldg(x.scale + block));
#pragma unroll
  for (int i = 0; i < kBlock; ++i)
    v[i] = mul_rn(e2m1_decode_subnormal((i < 8 ? codes.x : codes.y) >> (4 * (i % 8)) & 15u), scale);  // exact
}

// The next kStep elements of K, or the fewer that are left, of the rows that there are.
template <class A>
__device__ __forceinline__ void fill(Slab& a, Slab& b, const MatmulArgs& g, int64_t a_row0, int64_t a_left,
                                     int64_t b_row0, int64_t b_left, int64_t k) {
  const int i = threadIdx.x % (kThreads / 2), row = i / (kStep / kBlock), first = i % (kStep / kBlock) * kBlock;
  const bool left_side = threadIdx.x < kThreads / 2;
  if (k + first >= g.shape.depth || row >= (left_side ? a_left : b_left)) return;
  float v[kBlock];
  if (left_side)
    load_dense<A>(g.a, a_row0 + row, k + first, g.shape.depth, v);
  else
    load_nvfp4(g.b, b_row0 + row, k + first, g.shape.depth, v);
  put(left_side ? a : b, row, first, v);
}

template <class A, class T>
__global__ void __launch_bounds__(kThreads) sm80_dense_elements_kernel(MatmulArgs g) {
  __shared__ Slab a, b;
  const GemmShape& s = g.shape;
  const int row = threadIdx.x / (kTile / kEach) * kEach, col = threadIdx.x % (kTile / kEach) * kEach;
  const auto col_tiles = static_cast<unsigned>((s.cols + kTile - 1) / kTile);
  const int64_t row0 = static_cast<int64_t>(blockIdx.x / col_tiles) * kTile;
  const int64_t col0 = static_cast<int64_t>(blockIdx.x % col_tiles) * kTile;
  for (int64_t matrix = blockIdx.y; matrix < s.batch; matrix += gridDim.y) {
    const int64_t a_row0 = matrix * s.rows + row0, b_row0 = matrix * s.cols + col0;
    float y[kEach][kEach] = {};
    for (int64_t k = 0; k < s.depth; k += kStep) {
      __syncthreads();  // the last slabs have been read
      fill<A>(a, b, g, a_row0, s.rows - row0, b_row0, s.cols - col0, k);
      __syncthreads();
      const int count = static_cast<int>(s.depth - k < kStep ? s.depth - k : kStep);
      for (int i = 0; i < count; ++i) {
        const float4 left = *reinterpret_cast<const float4*>(&a[i][row]);
        const float4 right = *reinterpret_cast<const float4*>(&b[i][col]);
#pragma unroll
        for (int r = 0; r < kEach; ++r)
#pragma unroll
          for (int c = 0; c < kEach; ++c) y[r][c] = add_rn(y[r][c], mul_rn((&left.x)[r], (&right.x)[c]));
      }
    }
#pragma unroll
    for (int r = 0; r < kEach; ++r)
#pragma unroll
      for (int c = 0; c < kEach; ++c) {
        const int64_t m = row0 + row + r, n = col0 + col + c;
        if (m >= s.rows || n >= s.cols) continue;
        const float amax = g.b.amax[quotient(matrix * s.cols + n, g.b.map.rows_per_amax)];
        const float bias = g.result.bias ? load_float(g.result.bias, g.result.bias_kind, n) : 0.0f;
        static_cast<typename T::Stored*>(g.result.out)[(matrix * s.rows + m) * s.cols + n] =
            T::store(gemm_epilogue(y[r][c], alpha_w4a16(amax, g.b.e4m3_max), bias, g.result.bias != nullptr));
      }
  }
}

template <class A>
void launch(const MatmulArgs& g, cudaStream_t stream) {
  constexpr int64_t kMost = 32768;  // of the 65535 that grid dimension y allows
  const int64_t tiles = (g.shape.rows + kTile - 1) / kTile * ((g.shape.cols + kTile - 1) / kTile);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(std::min(g.shape.batch, kMost)));
  with_float(g.result.kind,
             [&](auto t) { sm80_dense_elements_kernel<A, decltype(t)><<<grid, kThreads, 0, stream>>>(g); });
}

}  // namespace

cudaError_t launch_sm80_dense_elements(const MatmulArgs& g, cudaStream_t stream) {
  if (g.a.kind == Float::kBf16)
    launch<Bf16>(g, stream);
  else
    launch<F16>(g, stream);
  return cudaGetLastError();
}

}  // namespace jnvfp4
