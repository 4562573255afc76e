// A 64x64 tile of x in shared memory, and its quantization along either axis: one thread a block of 16.
#pragma once

#include "block.cuh"

namespace jnvfp4 {

constexpr int kTile = 64;

// Rows are 16-byte aligned and four banks apart, and each 16 rows are rotated by eight words more than those above, so
// that neither 16-byte reads along rows nor two-byte reads down columns by eight lines x four blocks meet in a bank.
template <class T>
struct Tile {
  using Stored = typename T::Stored;
  static constexpr int kPerWord = 4 / sizeof(Stored);
  static constexpr int kWords = kTile / kPerWord;
  static constexpr int kVector = 16 / sizeof(Stored), kVectors = kTile / kVector;  // elements of 16 bytes
  alignas(16) uint32_t word[kTile][kWords + 4];

  __device__ __forceinline__ static int place(int r, int w) { return (w + r / kBlock * 8) & (kWords - 1); }
  __device__ __forceinline__ Stored get(int r, int c) const {
    return reinterpret_cast<const Stored*>(&word[r][place(r, c / kPerWord)])[c % kPerWord];
  }
  __device__ __forceinline__ uint4& vector(int r, int c) {
    return *reinterpret_cast<uint4*>(&word[r][place(r, c / kPerWord)]);
  }
  __device__ __forceinline__ const uint4& vector(int r, int c) const {
    return *reinterpret_cast<const uint4*>(&word[r][place(r, c / kPerWord)]);
  }

  // Loads [r0, r0 + 64) x [c0, c0 + 64) of a rows x cols matrix; zeros outside.
  __device__ __forceinline__ void load(const Stored* matrix, int64_t rows, int64_t cols, int64_t r0, int64_t c0) {
    const bool aligned = cols * sizeof(Stored) % 16 == 0;  // every row starts on a 16-byte word
#pragma unroll
    for (int i = threadIdx.x; i < kTile * kVectors; i += kThreads) {
      const int r = i / kVectors, c = i % kVectors * kVector;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (r0 + r < rows) {
        const Stored* p = matrix + (r0 + r) * cols + c0 + c;
        if (aligned && c0 + c < cols)
          v = __ldg(reinterpret_cast<const uint4*>(p));
        else if (!aligned)
          v = load_elements(p, cols - c0 - c);
      }
      vector(r, c) = v;
    }
  }

 private:
  __device__ __forceinline__ static uint4 load_elements(const Stored* p, int64_t count) {
    uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < kVector; ++e)
      if (e < count) w[e / kPerWord] |= uint32_t{p[e]} << (32 / kPerWord * (e % kPerWord));
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
};

// Calls f(matrix, row, col) for the tiles of this thread block: the grid is columns, rows, matrices of tiles.
struct TilePlace {
  int64_t matrix, row, col;
};
template <class F>
__device__ __forceinline__ void for_each_tile(int64_t batch, int64_t rows, const F& f) {
  for (int64_t matrix = blockIdx.z; matrix < batch; matrix += gridDim.z)
    for (int64_t row = static_cast<int64_t>(blockIdx.y) * kTile; row < rows;
         row += static_cast<int64_t>(gridDim.y) * kTile)
      f(TilePlace{matrix, row, static_cast<int64_t>(blockIdx.x) * kTile});
}

inline dim3 tile_grid(int64_t batch, int64_t rows, int64_t cols) {
  constexpr int64_t kMost = 32768;  // of the 65535 that grid dimensions y and z allow
  return dim3(static_cast<unsigned>((cols + kTile - 1) / kTile),
              static_cast<unsigned>(std::min((rows + kTile - 1) / kTile, kMost)),
              static_cast<unsigned>(std::min(batch, kMost)));
}

// A thread's block: line `r` of the tile (a column of x if transposed), the lane's fourth of it. Eight lines by four
// blocks a warp, so that a warp writes whole 32-byte sectors.
__device__ __forceinline__ int line_of_thread() { return threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4; }
__device__ __forceinline__ int block_of_thread() { return threadIdx.x % 4; }

template <class T, bool kTransposed>
__device__ __forceinline__ void read_block(const Tile<T>& tile, Values& v) {
  const int r = line_of_thread(), c = block_of_thread() * kBlock;
  if constexpr (kTransposed) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = T::load(tile.get(c + i, r));
  } else {
    Block<T> raw;
#pragma unroll
    for (int i = 0; i < Block<T>::kWords; ++i) raw.word[i] = tile.vector(r, c + i * Tile<T>::kVector);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = raw.value(i);
  }
}

// For what 16 lines, which are two warps, have in common.
struct Exchange {
  uint32_t amax[kThreads / 32][4];
  float error[2][kThreads];
};

// The maximum over 16 lines, for each fourth of them.
__device__ __forceinline__ uint32_t lines_max(uint32_t m, Exchange& e) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 4; step < 32; step *= 2) m = amax_bits(m, __shfl_xor_sync(0xffffffffu, m, step));
  if (lane < 4) e.amax[warp][lane] = m;
  __syncthreads();
  m = amax_bits(e.amax[warp & ~1][lane % 4], e.amax[warp | 1][lane % 4]);
  __syncthreads();
  return m;
}

// `tile_error` of numerics.h over 16 lines: the other warp first, then lanes 4, 2 and 1 lines away. Each sum is the
// same from both sides.
__device__ __forceinline__ float lines_error(float own, float other) {
  float t = add_rn(own, other);
#pragma unroll
  for (int step = 16; step >= 4; step /= 2) t = add_rn(t, __shfl_xor_sync(0xffffffffu, t, step));
  return t;
}

__device__ __forceinline__ void lines_errors(Both& both, Exchange& e) {
  const int other = threadIdx.x ^ 32;
  e.error[0][threadIdx.x] = both.error_six, e.error[1][threadIdx.x] = both.error_four;
  __syncthreads();
  both.error_six = lines_error(both.error_six, e.error[0][other]);
  both.error_four = lines_error(both.error_four, e.error[1][other]);
  __syncthreads();
}

// The amax that scales a thread's block; the one of its window if that is to be found.
template <class S>
__device__ __forceinline__ float amax_of_block(const QuantizeArgs& a, uint32_t m, int64_t row, int64_t col,
                                               bool active) {
  const int64_t window = row * (a.shape.cols / kWindow) + col / (kWindow / kBlock);
  if constexpr (kWindows<S>) {
    if (a.amax) return active ? a.amax[window] : 0.0f;
    const float found = float_of(canonical_nan(window_max(m)));
    if (active && col % (kWindow / kBlock) == 0) a.found[window] = found;
    return found;
  } else {
    const int64_t per = a.shape.rows_per_amax, index = per == 1                   ? row
                                                       : per == all_rows(a.shape) ? 0
                                                                                  : quotient(row, per);
    return active ? a.amax[index] : 0.0f;
  }
}

// Quantizes the tile along its rows, or along its columns. All threads of the block take part.
template <class S, class T, bool kTransposed>
__device__ __forceinline__ void quantize_tile(const Tile<T>& tile, const QuantizeArgs& a, const TilePlace& place,
                                              Exchange& exchange) {
  Values v;
  read_block<T, kTransposed>(tile, v);
  if constexpr (S::spec.rht) rht16(v);
  uint32_t m = block_amax(v);
  if constexpr (S::spec.block_rows == kBlock) m = lines_max(m, exchange);
  const int64_t line = (kTransposed ? place.col : place.row) + line_of_thread();
  const int64_t col = (kTransposed ? place.row : place.col) / kBlock + block_of_thread();
  const int64_t row = place.matrix * a.shape.rows + line;
  const bool active = line < a.shape.rows && col < a.shape.cols / kBlock;
  const GlobalScale g = global_scale(amax_of_block<S>(a, m, row, col, active), a.e4m3_max);
  Encoded out;
  if constexpr (kChooses<S>) {
    Both both = try_both<S>(v, m, g);
    if constexpr (S::spec.block_rows == kBlock) lines_errors(both, exchange);
    out = both.better(v, g);
  } else {
    out = encode_plain<S>(v, m, g, a, active ? place.matrix : 0, line, col);
  }
  if (active) out.store(a, row * (a.shape.cols / kBlock) + col);
}

}  // namespace jnvfp4
