// a b^T of two NVFP4 operands in the pinned order of docs/numerics.md, for any GPU and any number of rows: the same
// bits as the CPU. Both are decoded to float16 in scratch first, times the scales of their blocks. One mma of numbers
// of a block is s_a s_b dot16, exactly: all products are multiples of one unit and below 2^15 of it, and tensor cores
// keep 24 bits. Its sum with those before is one rounding, as the rule has it.
//
// A CTA has 128 x 128 outputs, a warp 64 x 32, in stages of 64 along K, which are the windows of window64.
#include "../../../plan/sm80_blocks.h"
#include "../decode.cuh"
#include "nvfp4_blocks.cuh"

namespace jnvfp4 {
namespace {

constexpr int kTile = 128, kWarps = 8, kGemmThreads = 32 * kWarps, kWarpCols = 32;
constexpr int kNumberBytes = kTile * 128, kAtAmaxes = 2 * kNumberBytes, kStageBytes = kAtAmaxes + 2 * kTile * 4;

// Copies 16 bytes, or zeros.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_word_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ float load_float(uint32_t at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}

using Fragments = uint32_t[2][4];  // of b: 32 columns of a block
// Sums of a lane in 16x8 fragments: rows g and g + 8, columns 2 t and 2 t + 1.
template <int kCount>
using SumsOf = float[kCount][4];
using Sums = SumsOf<4>;

// Multiplies by the columns from 8 * first on.
template <int kCount>
__device__ __forceinline__ void multiply(SumsOf<kCount>& d, const uint32_t (&a)[4], const Fragments& b, int first = 0) {
#pragma unroll
  for (int j = 0; j < kCount; ++j)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[j][0]), "=f"(d[j][1]), "=f"(d[j][2]), "=f"(d[j][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[(first + j) / 2][j % 2 * 2]),
          "r"(b[(first + j) / 2][j % 2 * 2 + 1]), "f"(0.0f));
}
template <int kCount>
__device__ __forceinline__ void add(Sums& y, const SumsOf<kCount>& d, int first = 0) {
#pragma unroll
  for (int j = 0; j < kCount; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(y[first + j][e]) : "f"(d[j][e]));
}

// Position of a CTA's tile, and of a thread in it.
struct Place {
  int64_t matrix, row, col;  // first row and column of the tile
  int warp_row, warp_col, group, pair;

  __device__ __forceinline__ Place(int64_t of, int64_t row0, int64_t col0)
      : matrix(of),
        row(row0),
        col(col0),
        warp_row(threadIdx.x / 32 % 2 * 64),
        warp_col(threadIdx.x / 64 * kWarpCols),
        group(threadIdx.x % 32 / 4),
        pair(threadIdx.x % 4) {}
  // Row and column, in the tile, of element e of a fragment.
  __device__ __forceinline__ int row_of(int i, int e) const { return warp_row + i * 16 + group + e / 2 * 8; }
  __device__ __forceinline__ int col_of(int j, int e) const { return warp_col + j * 8 + pair * 2 + e % 2; }
};

// Copies numbers of 128 rows; a thread has 16 bytes of every 32nd.
struct Loader {
  const __half *from, *first;
  int64_t step, left;  // elements from row to row, and to the end of K
  uint32_t dst;
  int rows;  // valid rows from the thread's first one on

  __device__ __forceinline__ Loader(const __half* x, int64_t first_row, int64_t count, int64_t depth, uint32_t at)
      : from(x),
        first(x + (first_row + threadIdx.x / 8) * depth + threadIdx.x % 8 * 8),
        step(32 * depth),
        left(depth - threadIdx.x % 8 * 8),
        dst(at + threadIdx.x / 8 * 128 + ((threadIdx.x % 8 ^ threadIdx.x / 8 % 8) << 4)),
        rows(static_cast<int>(min(count, int64_t{kTile})) - threadIdx.x / 8) {}
  __device__ __forceinline__ void load(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kTile / 32; ++i) {
      const bool valid = left > 0 && 32 * i < rows;
      copy_async(stage + dst + i * 32 * 128, valid ? first + i * step : from, valid);
    }
    first += kWindow, left -= kWindow;
  }
};

// Loads fragments of a stage.
struct Stage {
  uint32_t left, right;

  __device__ __forceinline__ Stage(uint32_t stage, const Place& at)
      : left(stage + (at.warp_row + threadIdx.x % 16) * 128 + ((threadIdx.x % 32 / 16 ^ threadIdx.x % 8) << 4)),
        right(stage + kNumberBytes + (at.warp_col + threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8) * 128 +
              ((threadIdx.x / 8 % 2 ^ threadIdx.x % 8) << 4)) {}
  __device__ __forceinline__ void load_a(uint32_t (&a)[4], int block, int i) const {
    load_matrices(a, (left ^ block * 32) + i * 16 * 128);
  }
  __device__ __forceinline__ void load_b(Fragments& b, int block) const {
    load_matrices(b[0], right ^ block * 32), load_matrices(b[1], (right ^ block * 32) + 16 * 128);
  }
};

// Adds the four blocks of a stage.
__device__ __forceinline__ void add_stage(Sums (&y)[4], const Stage& stage) {
  Fragments b[2];
  uint32_t a[2][4];
  SumsOf<2> d[2];
  stage.load_b(b[0], 0), stage.load_a(a[0], 0, 0);
#pragma unroll
  for (int q = 0; q <= 32; ++q) {
    const int block = q / 8, i = q / 2, half = q % 2 * 2;
    if (q < 32) multiply(d[q % 2], a[i % 2], b[block % 2], half);
    if (half == 0 && q < 30) stage.load_a(a[(i + 1) % 2], (i + 1) / 4, (i + 1) % 4);
    if (q % 8 == 3 && block < 3) stage.load_b(b[(block + 1) % 2], block + 1);
    if (q > 0) add(y[(q - 1) / 2 % 4], d[(q + 1) % 2], 2 - half);
  }
}

// Adds the window that a stage is: y = fl(y + fl(alpha sum)), with alpha as in sm90/pinned.cuh.
struct WindowSums {
  double reciprocal;
  float large, small;

  __device__ __forceinline__ explicit WindowSums(const MatmulArgs& g)
      : reciprocal(1.0 / (36.0 * double{g.a.e4m3_max} * double{g.b.e4m3_max})),
        large(static_cast<float>(reciprocal)),
        small(static_cast<float>(reciprocal - double{large})) {}
  template <class Alpha>
  static __device__ __forceinline__ void add_rows(Sums& y, const Sums& sums, const float* rows,
                                                  const float (&cols)[4][2], const Alpha& alpha) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        y[j][e] = add_rn(y[j][e], mul_rn(alpha(mul_rn(rows[e / 2], cols[j][e % 2])), sums[j][e]));
  }
  __device__ __forceinline__ void add(Sums (&y)[4], uint32_t at_stage, const Place& at, bool odd) const {
    const Stage stage(at_stage, at);
    const uint32_t amaxes = at_stage + kAtAmaxes;
    Fragments b[4];
    uint32_t a[2][4];
    Sums sums[2], d[2];
    float cols[4][2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      stage.load_b(b[j], j);
      for (int e = 0; e < 2; ++e) cols[j][e] = load_float(amaxes + (kTile + at.col_of(j, e)) * 4);
    }
    stage.load_a(a[0], 0, 0);
#pragma unroll
    for (int q = 0; q <= 16; ++q) {
      const int block = q % 4, i = q / 4;
      if (q < 16) multiply(block ? d[q % 2] : sums[i % 2], a[q % 2], b[block]);
      if (q < 15) stage.load_a(a[(q + 1) % 2], (q + 1) % 4, (q + 1) / 4);
      if (q == 0) continue;
      const int i_before = (q - 1) / 4;
      if (block != 1) jnvfp4::add(sums[i_before % 2], d[(q + 1) % 2]);
      if (block != 0) continue;
      const float rows[2] = {load_float(amaxes + at.row_of(i_before, 0) * 4),
                             load_float(amaxes + at.row_of(i_before, 2) * 4)};
      if (odd)
        add_rows(y[i_before], sums[i_before % 2], rows, cols,
                 [&](float product) { return div_by_float64(product, reciprocal); });
      else
        add_rows(y[i_before], sums[i_before % 2], rows, cols, [&](float product) {
          return div_by_pieces(product, large, small, [](float x, float y, float z) { return __fmaf_rn(x, y, z); });
        });
    }
  }
};

template <bool kWindows>
__device__ __forceinline__ void write(const MatmulArgs& g, const Sums (&y)[4], const Place& at) {
  const GemmShape& s = g.shape;
  const Operand left(g.a, s.depth), right(g.b, s.depth);
  const WindowAlpha alpha_of(g);
  float amaxes[4][2], biases[4][2];  // of columns
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int64_t col = min(at.col + at.col_of(j, e), s.cols - 1);
      amaxes[j][e] = right.amax_of(at.matrix * s.cols + col, 0);
      biases[j][e] = g.result.bias ? load_float(g.result.bias, g.result.bias_kind, col) : 0.0f;
    }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t row = at.row + at.row_of(i / 2, i % 2 * 2), to = (at.matrix * s.rows + row) * s.cols;
    if (row >= s.rows) break;
    const float amax = left.amax_of(at.matrix * s.rows + row, 0);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int64_t col = at.col + at.col_of(j, e);
        if (col >= s.cols) continue;
        const float alpha = kWindows ? 1.0f : alpha_of(amax, amaxes[j][e]);
        const float v = gemm_epilogue(y[i / 2][j][i % 2 * 2 + e], alpha, biases[j][e], g.result.bias != nullptr);
        store_output(g.result, to + col, v);
      }
  }
}

template <int kStages, bool kWindows>
__global__ void __launch_bounds__(kGemmThreads, kWindows ? 1 : 2)
    sm80_nvfp4_blocks_kernel(const __grid_constant__ MatmulArgs g, const __half* a, const __half* b) {
  extern __shared__ uint8_t any_shared[];
  const uint32_t shared = (shared_address(any_shared) + 127) & ~127u;
  const GemmShape& s = g.shape;
  const Operand left(g.a, s.depth), right(g.b, s.depth);
  const int64_t row_tiles = (s.rows + kTile - 1) / kTile, windows = (s.depth + kWindow - 1) / kWindow;
  // Groups of 8 tiles of rows go along all columns.
  const int64_t col_tiles = (s.cols + kTile - 1) / kTile, group = blockIdx.x / (8 * col_tiles);
  const int64_t in = blockIdx.x - group * 8 * col_tiles, width = min(int64_t{8}, row_tiles - group * 8);
  for (int64_t matrix = blockIdx.y; matrix < s.batch; matrix += gridDim.y) {
    const Place at(matrix, (group * 8 + in % width) * kTile, in / width * kTile);
    Loader of_a(a, matrix * s.rows + at.row, s.rows - at.row, s.depth, 0);
    Loader of_b(b, matrix * s.cols + at.col, s.cols - at.col, s.depth, kNumberBytes);
    // A thread copies amaxes of a row or column.
    const int of = threadIdx.x % kTile;
    const Operand& operand = threadIdx.x < kTile ? left : right;
    const float* const amaxes = threadIdx.x < kTile ? left.amax_at(matrix * s.rows + min(at.row + of, s.rows - 1), 0)
                                                    : right.amax_at(matrix * s.cols + min(at.col + of, s.cols - 1), 0);
    const auto load = [&](int64_t w) {
      const uint32_t stage = shared + static_cast<uint32_t>(w % kStages) * kStageBytes;
      if (w < windows) {
        of_a.load(stage), of_b.load(stage);
        if constexpr (kWindows)
          copy_word_async(stage + kAtAmaxes + threadIdx.x * 4, amaxes + (operand.windows ? w : 0));
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
    Sums y[4]{};
    for (int w = 0; w < kStages - 1; ++w) load(w);
#pragma unroll 1
    for (int64_t w = 0; w < windows; ++w) {
      const uint32_t stage = shared + static_cast<uint32_t>(w % kStages) * kStageBytes;
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
      // All copies have come, and the previous stage has been read.
      if constexpr (kWindows) {
        const bool odd = __syncthreads_or(kinds_of(load_float(stage + kAtAmaxes + threadIdx.x * 4)) & kOddAmax);
        load(w + kStages - 1);
        WindowSums(g).add(y, stage, at, odd);
      } else {
        __syncthreads();
        load(w + kStages - 1);
        add_stage(y, Stage(stage, at));
      }
    }
    write<kWindows>(g, y, at);
    __syncthreads();  // the stages are free
  }
}

template <int kStages, bool kWindows>
cudaError_t launch(const MatmulArgs& g, const __half* a, const __half* b, cudaStream_t stream) {
  constexpr int64_t kMost = 32768;  // of the 65535 that grid dimension y allows
  constexpr int kShared = kStages * kStageBytes + 128;
  const auto kernel = sm80_nvfp4_blocks_kernel<kStages, kWindows>;
  const cudaError_t status = allow_shared(reinterpret_cast<const void*>(kernel), kShared);
  if (status != cudaSuccess) return status;
  const int64_t tiles = (g.shape.rows + kTile - 1) / kTile * ((g.shape.cols + kTile - 1) / kTile);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(std::min(g.shape.batch, kMost)));
  kernel<<<grid, kGemmThreads, kShared, stream>>>(g, a, b);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_sm80_nvfp4_blocks(const MatmulArgs& g, void* scratch, cudaStream_t stream) {
  const BlocksScratch at = blocks_scratch(g.shape);
  auto* const bytes = static_cast<uint8_t*>(scratch);
  const auto decode = [&](const MatmulOperand& x, void* out, int64_t rows) {
    return launch_decode(
        {static_cast<const uint8_t*>(x.data), x.scale, out, Float::kF16, g.shape.batch * rows * g.shape.depth / kBlock},
        stream);
  };
  cudaError_t status = decode(g.a, bytes + at.a, g.shape.rows);
  if (status == cudaSuccess) status = decode(g.b, bytes + at.b, g.shape.cols);
  if (status != cudaSuccess) return status;
  const auto run = [&](auto kernel) {
    return kernel(g, reinterpret_cast<__half*>(bytes + at.a), reinterpret_cast<__half*>(bytes + at.b), stream);
  };
  const bool many = shared_memory() > 6 * kStageBytes;  // three stages of two CTAs
  if (g.windows()) return many ? run(launch<3, true>) : run(launch<2, true>);
  return many ? run(launch<3, false>) : run(launch<2, false>);
}

}  // namespace jnvfp4
