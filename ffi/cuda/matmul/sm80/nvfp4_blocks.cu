// a b^T of two NVFP4 operands in the pinned order of docs/numerics.md, for any GPU and any number of rows: the same
// bits as the CPU. sm90/pinned.cuh says why: one mma of float16 numbers, of which those of b are times the scales of
// their blocks, gives s_b dot16 exactly, and one FMA by s_a rounds as the rule does, with everything times 2^-28.
//
// A kernel ahead decodes both operands to scratch. A CTA has 128 x 128 outputs, a warp 64 x 32, in stages of 64 along
// K, which are the windows of window64. The FMAs of a group of mma follow the next group: all of one row, then all of
// the other, so that s_a stays in the operand cache.
#include "../../../plan/sm80_blocks.h"
#include "../decode.cuh"
#include "nvfp4_blocks.cuh"

namespace jnvfp4 {
namespace {

constexpr int kTile = kBlocksTile, kWarps = 8, kGemmThreads = 32 * kWarps, kWarpCols = 32;
constexpr int kNumberBytes = kTile * 128, kScaleBytes = kTile * 16, kStageBytes = 2 * kNumberBytes + kScaleBytes;
constexpr float kUnscale = 0x1p28f;

// ---------------------------------------------------------------- decoding to scratch
struct Prepared {
  __half *a, *b;  // rows of K
  float* scales;  // of a: [tile of 128 rows][block][row], rows in the order in which lanes read them
};
// Of 64 rows, row 8 i + g is at i / 4 * 32 + 4 g + i % 4.
__device__ __forceinline__ int row_of_place(int place) {
  const int in = place % 64;
  return place / 64 * 64 + (in / 32 * 4 + in % 4) * 8 + in % 32 / 4;
}
// The numbers of a block, in an order that both operands have.
template <bool kScaled>
__device__ __forceinline__ void decode_block(const MatmulOperand& x, int64_t i, __half* out) {
  const uint2 codes = __ldg(static_cast<const uint2*>(x.data) + i);
  uint32_t p[8], pair[4];
  halves_of_codes(codes.x, pair);
#pragma unroll
  for (int j = 0; j < 4; ++j) p[j] = pair[j];
  halves_of_codes(codes.y, pair);
#pragma unroll
  for (int j = 0; j < 4; ++j) p[4 + j] = pair[j];
  if constexpr (kScaled) {
    const float s = e4m3_decode(__ldg(x.scale + i));
    const uint32_t two = f16_pair(s, s);
#pragma unroll
    for (uint32_t& v : p) v = multiply_halves(v, two);
  }
  auto* const to = reinterpret_cast<uint4*>(out) + 2 * i;
  to[0] = make_uint4(p[0], p[1], p[2], p[3]), to[1] = make_uint4(p[4], p[5], p[6], p[7]);
}

__global__ void __launch_bounds__(kThreads)
    sm80_decode_operands_kernel(MatmulOperand a, MatmulOperand b, GemmShape s, Prepared to) {
  const int64_t blocks = s.depth / kBlock, windows = (s.depth + kWindow - 1) / kWindow;
  const int64_t a_blocks = s.batch * s.rows * blocks, b_blocks = s.batch * s.cols * blocks;
  const int64_t tiles = (s.rows + kTile - 1) / kTile, places = windows * kWindowBlocks * kTile;
  for (int64_t i = thread_index(); i < a_blocks; i += thread_count()) decode_block<false>(a, i, to.a);
  for (int64_t i = thread_index(); i < b_blocks; i += thread_count()) decode_block<true>(b, i, to.b);
  for (int64_t i = thread_index(); i < s.batch * tiles * places; i += thread_count()) {
    const int64_t tile = quotient(i, places), block = (i - tile * places) / kTile, matrix = quotient(tile, tiles);
    const int64_t row = (tile - matrix * tiles) * kTile + row_of_place(static_cast<int>(i % kTile));
    const bool there = row < s.rows && block < blocks;
    to.scales[i] = there ? e4m3_decode(__ldg(a.scale + (matrix * s.rows + row) * blocks + block)) : 0.0f;
  }
}

// ---------------------------------------------------------------- the GEMM
__device__ __forceinline__ uint32_t address_of(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// 16 bytes, or zeros.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void load_four(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ float4 load_floats(uint32_t at) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(at)
               : "memory");
  return v;
}
__device__ __forceinline__ void dot16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

using Sums = float[4][4][4];  // of 16 rows, of 8 columns: rows g and g + 8, columns 2 t and 2 t + 1

// Where a CTA is, and a thread in it.
struct Place {
  int64_t matrix, row, col;  // the first of the tile
  int warp_row, warp_col, group, pair;

  __device__ __forceinline__ Place(int64_t of, int64_t row0, int64_t col0)
      : matrix(of),
        row(row0),
        col(col0),
        warp_row(threadIdx.x / 32 % 2 * 64),
        warp_col(threadIdx.x / 64 * kWarpCols),
        group(threadIdx.x % 32 / 4),
        pair(threadIdx.x % 4) {}
  __device__ __forceinline__ int64_t row_of(int i, int e) const { return row + warp_row + i * 16 + group + e / 2 * 8; }
  __device__ __forceinline__ int64_t col_of(int j, int e) const { return col + warp_col + j * 8 + pair * 2 + e % 2; }
};

__device__ __forceinline__ void load_stage(uint32_t stage, const MatmulArgs& g, const Prepared& x, const Place& at,
                                           int64_t tile, int64_t window, int64_t windows) {
  const GemmShape& s = g.shape;
  const int chunk = threadIdx.x % 8, first = threadIdx.x / 8;
  const int64_t k = window * kWindow + chunk * 8;
  const uint32_t to = stage + first * 128 + ((chunk ^ first % 8) << 4);
  const auto load = [&](uint32_t to, const __half* from, int64_t row, int64_t rows, int64_t matrix_row) {
    const __half* p = from + (matrix_row + row + first) * s.depth + k;
#pragma unroll
    for (int i = 0; i < kTile / 32; ++i, p += 32 * s.depth) {
      const bool there = k < s.depth && row + first + i * 32 < rows;
      copy_async(to + i * 32 * 128, there ? p : from, there);
    }
  };
  load(to, x.a, at.row, s.rows, at.matrix * s.rows);
  load(to + kNumberBytes, x.b, at.col, s.cols, at.matrix * s.cols);
  if (threadIdx.x < kTile)
    copy_async(stage + 2 * kNumberBytes + threadIdx.x * 16,
               x.scales + (tile * windows + window) * (kWindowBlocks * kTile) + threadIdx.x * 4, true);
}

// Adds the four blocks of a stage.
__device__ __forceinline__ void add_stage(Sums& y, uint32_t stage, const Place& at) {
  constexpr int kGroup = 2, kHalves = 4 / kGroup, kGroups = 4 * 4 * kHalves;  // mma of a group
  const int lane = threadIdx.x % 32;
  const uint32_t left = stage + (at.warp_row + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
  const uint32_t right =
      stage + kNumberBytes + (at.warp_col + lane % 8 + lane / 16 * 8) * 128 + ((lane / 8 % 2 ^ lane % 8) << 4);
  const uint32_t scales = stage + 2 * kNumberBytes + at.warp_row * 4 + at.group * 16;
  float d[2][kGroup][4], s[2][8];
  uint32_t a[2][4], b[2][4];
  const auto add = [&](int q) {
    const int block = q / (4 * kHalves), i = q / kHalves % 4, j0 = q % kHalves * kGroup;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e)
          asm volatile("fma.rn.f32 %0, %1, %2, %0;"
                       : "+f"(y[i][j0 + j][e])
                       : "f"(d[q % 2][j][e]), "f"(s[block % 2][2 * i + h]));
  };
  load_four(a[0], left);
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
    const int block = q / (4 * kHalves), i = q / kHalves % 4, j0 = q % kHalves * kGroup;
    if (q % (4 * kHalves) == 0) {
#pragma unroll
      for (int x = 0; x < 2; ++x) load_four(b[x], (right ^ block * 32) + x * 16 * 128);
      const float4 low = load_floats(scales + block * kTile * 4), high = load_floats(scales + block * kTile * 4 + 128);
      float (&to)[8] = s[block % 2];
      to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
      to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
    }
    if (j0 == 0 && (i < 3 || block < 3))
      load_four(a[(i + 1) % 2], (left ^ (i < 3 ? block : block + 1) * 32) + (i + 1) % 4 * 16 * 128);
#pragma unroll
    for (int j = 0; j < kGroup; ++j)
      dot16(d[q % 2][j], a[i % 2], b[(j0 + j) / 2][j % 2 * 2], b[(j0 + j) / 2][j % 2 * 2 + 1]);
    if (q > 0) add(q - 1);
  }
  add(kGroups - 1);
}

// y = fl(y + fl(alpha sum)) of a window, with alpha as in sm90/pinned.cuh.
__device__ __forceinline__ void add_windows(Sums& y, const Sums& sums, const MatmulArgs& g, const Place& at,
                                            int64_t window) {
  const GemmShape& s = g.shape;
  const Operand left(g.a, s.depth), right(g.b, s.depth);
  const double reciprocal = 1.0 / (36.0 * double{g.a.e4m3_max} * double{g.b.e4m3_max});
  const auto large = static_cast<float>(reciprocal), small = static_cast<float>(reciprocal - double{large});
  float rows[4][2], cols[4][2];
  bool usual = true;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      rows[i][e] = left.amax_of(at.matrix * s.rows + min(at.row_of(i, 2 * e), s.rows - 1), window);
      cols[i][e] = right.amax_of(at.matrix * s.cols + min(at.col_of(i, e), s.cols - 1), window);
      usual = usual && is_usual(bits_of(rows[i][e])) && is_usual(bits_of(cols[i][e]));
    }
  const auto each = [&](const auto& term) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          y[i][j][e] = add_rn(y[i][j][e], term(mul_rn(rows[i][e / 2], cols[j][e % 2]), sums[i][j][e]));
  };
  const auto fma = [](float a, float b, float c) { return __fmaf_rn(a, b, c); };
  if (usual)
    each([&](float product, float sum) {
      return mul_rn(div_by_pieces(product, large * kUnscale, small * kUnscale, fma), sum);
    });
  else
    each([&](float product, float sum) { return mul_rn(div_by_float64(product, reciprocal), mul_rn(sum, kUnscale)); });
}

// By way of shared memory, where the stages were.
template <bool kWindows>
__device__ __forceinline__ void write(const MatmulArgs& g, const Sums& y, const Place& at, uint32_t shared) {
  constexpr int kPitch = (kTile + 4) * 4;
  const GemmShape& s = g.shape;
  const Place here(0, 0, 0);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; e += 2)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared + static_cast<int>(here.row_of(i, e)) * kPitch +
                                                              static_cast<int>(here.col_of(j, 0)) * 4),
                     "f"(y[i][j][e]), "f"(y[i][j][e + 1])
                     : "memory");
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < kTile * kTile; i += kGemmThreads) {
    const int64_t row = at.row + i / kTile, col = at.col + i % kTile;
    if (row >= s.rows || col >= s.cols) continue;
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(shared + i / kTile * kPitch + i % kTile * 4) : "memory");
    v = finish_sum<kWindows>(g, kWindows ? v : mul_rn(v, kUnscale), at.matrix, row, col);
    const int64_t to = (at.matrix * s.rows + row) * s.cols + col;
    if (g.result.kind == Float::kF32)
      static_cast<uint32_t*>(g.result.out)[to] = F32::store(v);
    else
      static_cast<uint16_t*>(g.result.out)[to] = g.result.kind == Float::kBf16 ? Bf16::store(v) : F16::store(v);
  }
}

template <int kStages, bool kWindows>
__global__ void __launch_bounds__(kGemmThreads, kWindows || kStages < 3 ? 1 : 2)
    sm80_nvfp4_blocks_kernel(const __grid_constant__ MatmulArgs g, Prepared x) {
  extern __shared__ uint8_t any_shared[];
  const uint32_t shared = (address_of(any_shared) + 127) & ~127u;
  const GemmShape& s = g.shape;
  const int64_t row_tiles = (s.rows + kTile - 1) / kTile, windows = (s.depth + kWindow - 1) / kWindow;
  // Groups of 8 tiles of rows go along all columns.
  const int64_t col_tiles = (s.cols + kTile - 1) / kTile, group = blockIdx.x / (8 * col_tiles);
  const int64_t in = blockIdx.x - group * 8 * col_tiles, width = min(int64_t{8}, row_tiles - group * 8);
  for (int64_t matrix = blockIdx.y; matrix < s.batch; matrix += gridDim.y) {
    const Place at(matrix, (group * 8 + in % width) * kTile, in / width * kTile);
    const int64_t tile = matrix * row_tiles + at.row / kTile;
    const auto load = [&](int64_t w) {
      if (w < windows) load_stage(shared + w % kStages * kStageBytes, g, x, at, tile, w, windows);
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
    Sums y{};
    for (int w = 0; w < kStages - 1; ++w) load(w);
#pragma unroll 1
    for (int64_t w = 0; w < windows; ++w) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
      __syncthreads();  // all copies are there, and the stage before has been read
      load(w + kStages - 1);
      const uint32_t stage = shared + static_cast<uint32_t>(w % kStages) * kStageBytes;
      if constexpr (kWindows) {
        Sums sums{};
        add_stage(sums, stage, at);
        add_windows(y, sums, g, at, w);
      } else {
        add_stage(y, stage, at);
      }
    }
    write<kWindows>(g, y, at, shared);
    __syncthreads();  // the stages are free
  }
}

template <int kStages, bool kWindows>
cudaError_t launch(const MatmulArgs& g, const Prepared& x, cudaStream_t stream) {
  constexpr int64_t kMost = 32768;  // of the 65535 that grid dimension y allows
  constexpr int kShared = kStages * kStageBytes + 128;
  const auto kernel = sm80_nvfp4_blocks_kernel<kStages, kWindows>;
  const cudaError_t status = allow_shared(reinterpret_cast<const void*>(kernel), kShared);
  if (status != cudaSuccess) return status;
  const int64_t tiles = (g.shape.rows + kTile - 1) / kTile * ((g.shape.cols + kTile - 1) / kTile);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(std::min(g.shape.batch, kMost)));
  kernel<<<grid, kGemmThreads, kShared, stream>>>(g, x);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_sm80_nvfp4_blocks(const MatmulArgs& g, void* scratch, cudaStream_t stream) {
  const BlocksScratch at = blocks_scratch(g.shape);
  auto* const bytes = static_cast<uint8_t*>(scratch);
  const Prepared x{reinterpret_cast<__half*>(bytes + at.a), reinterpret_cast<__half*>(bytes + at.b),
                   reinterpret_cast<float*>(bytes + at.scales)};
  const int64_t blocks = g.shape.batch * (g.shape.rows + g.shape.cols) * (g.shape.depth / kBlock);
  sm80_decode_operands_kernel<<<resident_grid(blocks, kThreads, 8), kThreads, 0, stream>>>(g.a, g.b, g.shape, x);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  const bool many = shared_memory() > 3 * kStageBytes + 128;
  if (g.windows()) return many ? launch<3, true>(g, x, stream) : launch<2, true>(g, x, stream);
  return many ? launch<3, false>(g, x, stream) : launch<2, false>(g, x, stream);
}

}  // namespace jnvfp4
