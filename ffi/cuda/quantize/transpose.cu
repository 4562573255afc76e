// transpose on CUDA: a thread block has a square of 16 x 16 tiles, a thread one of them.
//
// 16 threads read 128 bytes of one row, a word of each of their tiles. A tile is transposed in registers. Shared memory
// holds the square's result, which is written in rows of 128 bytes again.
#include "../device.cuh"
#include "../kernels.h"

namespace jnvfp4 {
namespace {

constexpr int kSide = 16;                   // tiles
constexpr int kSideCodes = kSide * kBlock;  // rows and columns of a square
static_assert(kSide * kSide == kThreads);

// The codes of a row of a tile, the first one in the low bits of x.
using Word = uint2;

struct Square {
  Word codes[kSideCodes][kSide];  // tile r of row c is in place r ^ c / 16, so that threads meet in no bank
  uint8_t scale[kSide][kSide];    // of tile (r, c) at [c][r]
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

// Where a square begins, in tiles, and how many tiles it has.
struct Place {
  int64_t matrix, row, col;
  int down, across;

  __device__ __forceinline__ Place(const TransposeArgs& a, int64_t index) {
    const int64_t tile_rows = a.rows / kBlock, tile_cols = a.cols / kBlock;
    const int64_t high = (tile_rows + kSide - 1) / kSide, wide = (tile_cols + kSide - 1) / kSide;
    const int64_t line = quotient(index, wide);
    matrix = quotient(line, high);
    row = (line - matrix * high) * kSide, col = (index - line * wide) * kSide;
    down = static_cast<int>(tile_rows - row < kSide ? tile_rows - row : kSide);
    across = static_cast<int>(tile_cols - col < kSide ? tile_cols - col : kSide);
  }
};

// Reads this thread's tile, if it has one, and leaves its result in shared memory.
__device__ __forceinline__ void transpose_to_shared(const TransposeArgs& a, const Place& p, Square& shared) {
  const int r = threadIdx.x / kSide, c = threadIdx.x % kSide;
  if (r >= p.down || c >= p.across) return;
  const int64_t tile_cols = a.cols / kBlock;
  const int64_t at = (p.matrix * a.rows + (p.row + r) * kBlock) * tile_cols + p.col + c;
  const Word* data = reinterpret_cast<const Word*>(a.data) + at;
  const uint8_t* scale = a.scale + at;
  Word w[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) w[i] = __ldg(data + i * tile_cols);
  const uint32_t first = __ldg(scale);
  uint32_t different = 0;
#pragma unroll
  for (int i = 1; i < kBlock; ++i) different |= __ldg(scale + i * tile_cols) ^ first;
  shared.scale[c][r] = different ? kScaleNan : static_cast<uint8_t>(first);
  transpose_tile(w);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) shared.codes[c * kBlock + i][r ^ c] = w[i];
}

// Rows of 128 bytes, 8 threads each. `pairs`: both tiles of a pair are there or neither, at a multiple of 16 bytes.
__device__ __forceinline__ void store_codes(const TransposeArgs& a, const Place& p, bool pairs, const Square& shared) {
  constexpr int kPairs = kSide / 2;
  const int64_t tile_rows = a.rows / kBlock;
  const int pair = threadIdx.x % kPairs;
  Word* out = reinterpret_cast<Word*>(a.out_data) + (p.matrix * a.cols + p.col * kBlock) * tile_rows + p.row;
#pragma unroll 4
  for (int row = threadIdx.x / kPairs; row < p.across * kBlock; row += kThreads / kPairs) {
    const int c = row / kBlock;
    uint4 both = *reinterpret_cast<const uint4*>(&shared.codes[row][2 * pair ^ (c & ~1)]);
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

// `whole`: rows of 16 bytes that are there and at multiples of 16 bytes. A thread has one of them.
__device__ __forceinline__ void store_scales(const TransposeArgs& a, const Place& p, bool whole, const Square& shared) {
  const int row = threadIdx.x;
  if (row >= p.across * kBlock) return;
  const int64_t tile_rows = a.rows / kBlock;
  uint8_t* to = a.out_scale + (p.matrix * a.cols + p.col * kBlock + row) * tile_rows + p.row;
  const uint8_t* from = shared.scale[row / kBlock];
  if (whole)
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  else
    for (int r = 0; r < p.down; ++r) to[r] = from[r];
}

__global__ void __launch_bounds__(kThreads, 4) transpose_kernel(TransposeArgs a, int64_t squares) {
  __shared__ alignas(16) Square shared;
  const bool pairs = a.rows % (2 * kBlock) == 0, whole = a.rows % kSideCodes == 0;
  for (int64_t i = blockIdx.x; i < squares; i += gridDim.x) {
    const Place p(a, i);
    transpose_to_shared(a, p, shared);
    __syncthreads();
    store_codes(a, p, pairs, shared);
    store_scales(a, p, whole, shared);
    __syncthreads();  // before the next square overwrites this one
  }
}

}  // namespace

cudaError_t launch_transpose(const TransposeArgs& a, cudaStream_t stream) {
  const auto squares = [](int64_t codes) { return (codes + kSideCodes - 1) / kSideCodes; };
  const int64_t all = a.batch * squares(a.rows) * squares(a.cols);
  transpose_kernel<<<grid_for(all, 1), kThreads, 0, stream>>>(a, all);
  return cudaGetLastError();
}

}  // namespace jnvfp4
