// a b^T of two NVFP4 operands in the pinned order of docs/numerics.md: the same bits as the CPU. A block's dot product
// of doubled codes is exact in the integer tensor cores, its product with the two scales is exact in float32, and each
// sum is one rounding.
//
// A CTA has 64 x 64 outputs and goes along K by slabs of 64, which are the windows of window64: codes to bytes
// in shared memory, then for each of the four blocks one mma m16n8k16 per 16 x 8 outputs.
#include "nvfp4_blocks.cuh"

namespace jnvfp4 {
namespace {

constexpr int kGemmThreads = 128, kRows = 64, kCols = 64, kWarpRows = 32, kWarpCols = 32;
constexpr int kRowTiles = kWarpRows / 16, kColTiles = kWarpCols / 8;
constexpr int kPitch = kWindow + 16;  // bytes a row: a multiple of 16 that spreads rows over the banks

template <int kCount>
struct Slab {
  alignas(16) int8_t twice[kCount][kPitch];
  float scale[kCount][kWindowBlocks];
  float amax[kCount];
};

// Four codes, in the low 16 bits, to four bytes of twice their value: table look-ups by byte permutation, once for
// each sign.
__device__ __forceinline__ uint32_t twice_of_codes(uint32_t codes) {
  const uint32_t magnitudes = codes & 0x7777u, signs = (codes >> 3 & 0x1111u) | 0x8888u;
  const uint32_t positive = __byte_perm(0x03020100u, 0x0c080604u, magnitudes);
  const uint32_t negative = __byte_perm(0xfdfeff00u, 0xf4f8fafcu, magnitudes);
  uint32_t mask;  // selector bit 3 replicates the sign of the byte, which __byte_perm does not offer
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(0x00008000u), "r"(0u), "r"(signs));
  return (positive & ~mask) | (negative & mask);
}

// Codes and scales of a slab of kCount rows, and its amax with windows: what one thread carries from global to shared
// memory. Without windows K may end within a slab, whose rest is zeros.
template <int kCount, bool kWindows>
struct Fetch {
  static constexpr int kBytes = kCount * kWindow / 2 / kGemmThreads;  // of codes
  static constexpr int kPerRow = kWindow / 2 / kBytes;
  uint32_t codes[kBytes / 4];
  uint32_t scales;
  float amax;

  __device__ __forceinline__ void load(const Operand& x, int64_t first_row, int64_t count, int64_t slab) {
    const int r = threadIdx.x / kPerRow, part = threadIdx.x % kPerRow;
    // Blocks from the slab's first one to the end of K.
    const int left =
        kWindows ? kWindowBlocks : static_cast<int>(x.depth / kBlock) - static_cast<int>(slab) * kWindowBlocks;
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) codes[i] = 0;
    if (r < count) {
      const auto* p = reinterpret_cast<const uint32_t*>(x.data + (first_row + r) * (x.depth / 2) +
                                                        slab * (kWindow / 2) + part * kBytes);
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i)
        if (kWindows || part * (kBytes / 8) + i / 2 < left) codes[i] = __ldg(p + i);
    }
    scales = 0, amax = 0.0f;
    if (threadIdx.x < kCount && threadIdx.x < count) {
      const int64_t row = first_row + threadIdx.x;
      if constexpr (kWindows) {
        scales = __ldg(reinterpret_cast<const uint32_t*>(x.scale + row * (x.depth / kBlock)) + slab);
        amax = x.amax_of(row, slab);
      } else {
        const uint8_t* p = x.scale + row * (x.depth / kBlock) + slab * kWindowBlocks;
#pragma unroll
        for (int j = 0; j < kWindowBlocks; ++j)
          if (j < left) scales |= uint32_t{__ldg(p + j)} << (8 * j);
      }
    }
  }
  // `factor` goes into the scales, exactly.
  __device__ __forceinline__ void store(Slab<kCount>& slab, float factor) const {
    auto* row = reinterpret_cast<uint2*>(slab.twice[threadIdx.x / kPerRow] + threadIdx.x % kPerRow * 2 * kBytes);
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i)
      row[i] = make_uint2(twice_of_codes(codes[i] & 0xffffu), twice_of_codes(codes[i] >> 16));
    if (threadIdx.x < kCount) {
#pragma unroll
      for (int j = 0; j < kWindowBlocks; ++j)
        slab.scale[threadIdx.x][j] = mul_rn(e4m3_decode(static_cast<uint8_t>(scales >> (8 * j))), factor);
      if constexpr (kWindows) slab.amax[threadIdx.x] = amax;
    }
  }
};

// An accumulator that starts as the bits of 1.5 * 2^23 ends as the bits of that number plus the dot product.
__device__ __forceinline__ void dot16(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(kMagicBits));
}

// Outputs of a thread: rows lane / 4 and 8 below of each 16, columns 2 * (lane % 4) and the next of each 8.
struct Warp {
  int row, col, group, pair;  // first row and column in the tile; lane / 4 and lane % 4

  __device__ __forceinline__ Warp()
      : row(threadIdx.x / 32 % (kRows / kWarpRows) * kWarpRows),
        col(threadIdx.x / 32 / (kRows / kWarpRows) * kWarpCols),
        group(threadIdx.x % 32 / 4),
        pair(threadIdx.x % 4) {}
  __device__ __forceinline__ int row_of(int tile, int i) const { return row + tile * 16 + group + i / 2 * 8; }
  __device__ __forceinline__ int col_of(int tile, int i) const { return col + tile * 8 + pair * 2 + i % 2; }
};

using Sums = float[kRowTiles][kColTiles][4];

__device__ __forceinline__ uint32_t word_at(const int8_t* row, int byte) {
  return *reinterpret_cast<const uint32_t*>(row + byte);
}

// sum = fl(sum + s_a * s_b * dot16) for one block of the window.
__device__ __forceinline__ void add_block(Sums& sum, const Slab<kRows>& a, const Slab<kCols>& b, const Warp& w, int j) {
  const int byte = j * kBlock + w.pair * 4;
  uint32_t right[kColTiles];
  float right_scale[kColTiles][2];
#pragma unroll
  for (int n = 0; n < kColTiles; ++n) {
    right[n] = word_at(b.twice[w.col + n * 8 + w.group], byte);
#pragma unroll
    for (int i = 0; i < 2; ++i) right_scale[n][i] = b.scale[w.col_of(n, i)][j];
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const uint32_t a0 = word_at(a.twice[w.row_of(m, 0)], byte), a1 = word_at(a.twice[w.row_of(m, 2)], byte);
    const float left_scale[2] = {a.scale[w.row_of(m, 0)][j], a.scale[w.row_of(m, 2)][j]};
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      int d[4];
      dot16(d, a0, a1, right[n]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum[m][n][i] = __fmaf_rn(mul_rn(left_scale[i / 2], right_scale[n][i % 2]),
                                 add_rn(__int_as_float(d[i]), -kMagic), sum[m][n][i]);
    }
  }
}

template <class F>
__device__ __forceinline__ void for_each_output(const F& f) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < kColTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(m, n, i);
}

// With windows each slab has its own sum, which alpha scales before it is added; else the blocks of all slabs add up,
// and alpha scales the sum in the end.
template <class T, bool kWindows>
__global__ void __launch_bounds__(kGemmThreads, 3) sm80_nvfp4_blocks_kernel(MatmulArgs g) {
  __shared__ Slab<kRows> a;
  __shared__ Slab<kCols> b;
  const Warp w;
  const GemmShape& s = g.shape;
  const Operand left(g.a, s.depth), right(g.b, s.depth);
  const int64_t slabs = kWindows ? s.depth / kWindow : (s.depth + kWindow - 1) / kWindow;
  const WindowAlpha alpha_of(g);
  const auto col_tiles = static_cast<unsigned>((s.cols + kCols - 1) / kCols);
  const int64_t row0 = static_cast<int64_t>(blockIdx.x / col_tiles) * kRows;
  const int64_t col0 = static_cast<int64_t>(blockIdx.x % col_tiles) * kCols;
  for (int64_t matrix = blockIdx.y; matrix < s.batch; matrix += gridDim.y) {
    Fetch<kRows, kWindows> next_a;
    Fetch<kCols, kWindows> next_b;
    Sums y{};
    next_a.load(left, matrix * s.rows + row0, s.rows - row0, 0);
    next_b.load(right, matrix * s.cols + col0, s.cols - col0, 0);
    for (int64_t slab = 0; slab < slabs; ++slab) {
      __syncthreads();  // the last slab has been read
      next_a.store(a, 1.0f);
      next_b.store(b, 0.25f);  // both codes are doubled
      __syncthreads();
      if (slab + 1 < slabs) {
        next_a.load(left, matrix * s.rows + row0, s.rows - row0, slab + 1);
        next_b.load(right, matrix * s.cols + col0, s.cols - col0, slab + 1);
      }
      if constexpr (kWindows) {
        Sums sum{};
#pragma unroll
        for (int j = 0; j < kWindowBlocks; ++j) add_block(sum, a, b, w, j);
        for_each_output([&](int m, int n, int i) {
          y[m][n][i] = add_window(y[m][n][i], sum[m][n][i], alpha_of(a.amax[w.row_of(m, i)], b.amax[w.col_of(n, i)]));
        });
      } else {
#pragma unroll
        for (int j = 0; j < kWindowBlocks; ++j) add_block(y, a, b, w, j);  // past the end: plus zero, y is never -0
      }
    }
    for_each_output([&](int m, int n, int i) {
      const int64_t row = row0 + w.row_of(m, i), col = col0 + w.col_of(n, i);
      if (row >= s.rows || col >= s.cols) return;
      static_cast<typename T::Stored*>(g.result.out)[(matrix * s.rows + row) * s.cols + col] =
          T::store(finish_sum<kWindows>(g, y[m][n][i], matrix, row, col));
    });
    __syncthreads();
  }
}

template <class T, bool kWindows>
void launch(const MatmulArgs& g, cudaStream_t stream) {
  constexpr int64_t kMost = 32768;  // of the 65535 that grid dimension y allows
  const int64_t tiles = (g.shape.rows + kRows - 1) / kRows * ((g.shape.cols + kCols - 1) / kCols);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(std::min(g.shape.batch, kMost)));
  sm80_nvfp4_blocks_kernel<T, kWindows><<<grid, kGemmThreads, 0, stream>>>(g);
}

}  // namespace

cudaError_t launch_sm80_nvfp4_blocks(const MatmulArgs& g, cudaStream_t stream) {
  with_float(g.result.kind, [&](auto t) {
    if (g.windows())
      launch<decltype(t), true>(g, stream);
    else
      launch<decltype(t), false>(g, stream);
  });
  return cudaGetLastError();
}

}  // namespace jnvfp4
