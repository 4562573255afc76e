// transpose on CUDA: some CTAs transpose codes, others scales.
//
// For codes a CTA has a square of 16 x 16 tiles, a thread one of them. 16 threads read 128 bytes of one row, a
// word of each of their tiles. A tile is transposed in registers. Shared memory holds the square's result, which is
// written in rows of 128 bytes again. Scales of such a square would be rows of 16 bytes, and the L2 cache works on as
// many requests for those as for the codes. So they have squares of 32 x 32 or 64 x 64 tiles, in CTAs of their
// own.
#include "../device.cuh"
#include "../kernels.h"

namespace jnvfp4 {
namespace {

constexpr int kSide = 16;                   // tiles of a square of codes
constexpr int kSideCodes = kSide * kBlock;  // its rows and columns
static_assert(kSide * kSide == kThreads);

// The codes of a row of a tile, the first one in the low bits of x.
using Word = uint2;

using Codes = Word[kSideCodes][kSide];  // tile r of row c is at r ^ c / 16, without bank conflicts

// Scales of tile (r, c) at [c][r]; rows are 16 bytes longer, for fewer bank conflicts.
template <int kTiles>
using Scales = uint8_t[kTiles][kTiles + 16];

template <int kTiles>
union Shared {
  Codes codes;
  Scales<kTiles> scales;
};

// Swaps the off-diagonal quarters of each square of 2 * kBits / 4 codes; a and b are rows kBits / 4 apart.
template <int kBits>
__device__ __forceinline__ void swap_quarters(uint32_t& a, uint32_t& b) {
  const uint32_t upper = a, lower = b;
  if constexpr (kBits == 16) {
    a = __byte_perm(upper, lower, 0x5410), b = __byte_perm(upper, lower, 0x7632);
  } else if constexpr (kBits == 8) {
    a = __byte_perm(upper, lower, 0x6240), b = __byte_perm(upper, lower, 0x7351);
  } else {
    a = (upper & 0x0f0f0f0fu) | (lower << 4 & 0xf0f0f0f0u), b = (upper >> 4 & 0x0f0f0f0fu) | (lower & 0xf0f0f0f0u);
  }
}

template <int kBits>
__device__ __forceinline__ void swap_quarters(Word (&w)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i)
    if (!(i & kBits / 4)) {
      swap_quarters<kBits>(w[i].x, w[i + kBits / 4].x);
      swap_quarters<kBits>(w[i].y, w[i + kBits / 4].y);
    }
}

__device__ __forceinline__ void transpose_tile(Word (&w)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    const uint32_t upper = w[i].y;
    w[i].y = w[i + kBlock / 2].x, w[i + kBlock / 2].x = upper;
  }
  swap_quarters<16>(w), swap_quarters<8>(w), swap_quarters<4>(w);
}

// Start of a square of tiles, in tiles, and how many tiles it has.
struct Place {
  int64_t matrix, row, col;
  int down, across;

  __device__ __forceinline__ Place(const TransposeArgs& a, int side, int64_t index) {
    const int64_t tile_rows = a.rows / kBlock, tile_cols = a.cols / kBlock;
    const int64_t high = (tile_rows + side - 1) / side, wide = (tile_cols + side - 1) / side;
    const int64_t line = quotient(index, wide);
    matrix = quotient(line, high);
    row = (line - matrix * high) * side, col = (index - line * wide) * side;
    down = static_cast<int>(tile_rows - row < side ? tile_rows - row : side);
    across = static_cast<int>(tile_cols - col < side ? tile_cols - col : side);
  }
};

// ---------------------------------------------------------------- codes
// Reads this thread's tile, if it has one, and leaves its result in shared memory.
__device__ __forceinline__ void transpose_to_shared(const TransposeArgs& a, const Place& p, Codes& shared) {
  const int r = threadIdx.x / kSide, c = threadIdx.x % kSide;
  if (r >= p.down || c >= p.across) return;
  const int64_t tile_cols = a.cols / kBlock;
  const Word* data =
      reinterpret_cast<const Word*>(a.data) + (p.matrix * a.rows + (p.row + r) * kBlock) * tile_cols + p.col + c;
  Word w[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) w[i] = __ldg(data + i * tile_cols);
  transpose_tile(w);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) shared[c * kBlock + i][r ^ c] = w[i];
}

// Rows of 128 bytes, 8 threads each. `pairs`: both tiles of a pair are there or neither, at a multiple of 16 bytes.
__device__ __forceinline__ void store_codes(const TransposeArgs& a, const Place& p, bool pairs, const Codes& shared) {
  constexpr int kPairs = kSide / 2;
  const int64_t tile_rows = a.rows / kBlock;
  const int pair = threadIdx.x % kPairs;
  Word* out = reinterpret_cast<Word*>(a.out_data) + (p.matrix * a.cols + p.col * kBlock) * tile_rows + p.row;
#pragma unroll 4
  for (int row = threadIdx.x / kPairs; row < p.across * kBlock; row += kThreads / kPairs) {
    const int c = row / kBlock;
    uint4 both = *reinterpret_cast<const uint4*>(&shared[row][2 * pair ^ (c & ~1)]);
    if (c & 1) both = make_uint4(both.z, both.w, both.x, both.y);
    Word* to = out + row * tile_rows + 2 * pair;
    if (pairs) {
      if (2 * pair < p.down) *reinterpret_cast<uint4*>(to) = both;
    } else {
      if (2 * pair < p.down) to[0] = make_uint2(both.x, both.y);
      if (2 * pair + 1 < p.down) to[1] = make_uint2(both.z, both.w);
    }
  }
}

// ---------------------------------------------------------------- scales
// The scales of 4 neighbouring tiles. Those of a row after the last tile are not read. `words`: they are one word in
// memory.
__device__ __forceinline__ uint32_t load_scales(const uint8_t* from, int tiles, bool words) {
  if (words) return __ldg(reinterpret_cast<const uint32_t*>(from));
  uint32_t word = 0;
  for (int i = 0; i < tiles; ++i) word |= static_cast<uint32_t>(__ldg(from + i)) << 8 * i;
  return word;
}

// Leaves the scale of each tile in shared memory, NaN where those of its 16 rows differ.
template <int kTiles>
__device__ __forceinline__ void scales_to_shared(const TransposeArgs& a, const Place& p, bool words,
                                                 Scales<kTiles>& shared) {
  constexpr int kWords = kTiles / 4;
  const int64_t tile_cols = a.cols / kBlock;
  const int c = threadIdx.x % kWords * 4;
  const int tiles = p.across - c < 4 ? p.across - c : 4;
  if (tiles <= 0) return;
  for (int r = threadIdx.x / kWords; r < p.down; r += kThreads / kWords) {
    const uint8_t* scale = a.scale + (p.matrix * a.rows + (p.row + r) * kBlock) * tile_cols + p.col + c;
    uint32_t w[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) w[i] = load_scales(scale + i * tile_cols, tiles, words);
    uint32_t different = 0;
#pragma unroll
    for (int i = 1; i < kBlock; ++i) different |= w[i] ^ w[0];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      shared[c + i][r] = (different >> 8 * i & 0xffu) ? kScaleNan : static_cast<uint8_t>(w[0] >> 8 * i);
  }
}

// Rows of kTiles bytes, 16 a thread. `quads`: 16 bytes are there or none, at a multiple of 16.
template <int kTiles>
__device__ __forceinline__ void store_scales(const TransposeArgs& a, const Place& p, bool quads,
                                             const Scales<kTiles>& shared) {
  constexpr int kQuads = kTiles / 16;
  const int64_t tile_rows = a.rows / kBlock;
  const int r = threadIdx.x % kQuads * 16;
  uint8_t* out = a.out_scale + (p.matrix * a.cols + p.col * kBlock) * tile_rows + p.row + r;
  for (int row = threadIdx.x / kQuads; row < p.across * kBlock; row += kThreads / kQuads) {
    const uint8_t* from = &shared[row / kBlock][r];
    uint8_t* to = out + row * tile_rows;
    if (quads) {
      if (r < p.down) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int i = 0; i < 16 && r + i < p.down; ++i) to[i] = from[i];
    }
  }
}

// ---------------------------------------------------------------- both
__host__ __device__ inline int64_t squares(const TransposeArgs& a, int side) {
  const int64_t codes = side * kBlock;
  return a.batch * ((a.rows + codes - 1) / codes) * ((a.cols + codes - 1) / codes);
}

template <int kTiles>
__global__ void __launch_bounds__(kThreads, 4) transpose_kernel(TransposeArgs a, int64_t of_scales, int64_t all) {
  __shared__ alignas(16) Shared<kTiles> shared;
  for (int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    if (i < of_scales) {
      const Place p(a, kTiles, i);
      scales_to_shared<kTiles>(a, p, a.cols % (4 * kBlock) == 0, shared.scales);
      __syncthreads();
      store_scales<kTiles>(a, p, a.rows % (16 * kBlock) == 0, shared.scales);
    } else {
      const Place p(a, kSide, i - of_scales);
      transpose_to_shared(a, p, shared.codes);
      __syncthreads();
      store_codes(a, p, a.rows % (2 * kBlock) == 0, shared.codes);
    }
    __syncthreads();  // before the next square overwrites this one
  }
}

template <int kTiles>
cudaError_t launch(const TransposeArgs& a, cudaStream_t stream) {
  const int64_t of_scales = squares(a, kTiles), all = of_scales + squares(a, kSide);
  transpose_kernel<kTiles><<<grid_for(all, 1), kThreads, 0, stream>>>(a, of_scales, all);
  return cudaGetLastError();
}

}  // namespace

// Wider rows of scales are fewer requests, but each square takes longer, which only other work can hide.
cudaError_t launch_transpose(const TransposeArgs& a, cudaStream_t stream) {
  return squares(a, 64) >= multiprocessors() ? launch<64>(a, stream) : launch<32>(a, stream);
}

}  // namespace jnvfp4
