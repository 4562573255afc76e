// quantize on CUDA. One thread encodes one block of 16; how blocks reach threads differs:
//   rows kernel         blocks along contiguous memory, any number of rows
//   tiles kernel        16x16 tiles of a row-major source (block_rows = 16)
//   transposed kernel   64x64 tiles through shared memory, blocks along the source's columns
// A per-row amax that is not given is found first: in the same launch for rows, by a pass of its own
// for transposed sources.
#include "device.cuh"
#include "kernels.h"

namespace jnvfp4 {
namespace {

__device__ __forceinline__ int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ __forceinline__ int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * kThreads; }

__device__ __forceinline__ void encode_and_store(const float (&v)[kBlock], uint32_t amax, GlobalScale g, uint8_t* data,
                                                 uint8_t* scale, int64_t block) {
  const uint8_t s = block_scale(amax, g);
  scale[block] = s;
  *reinterpret_cast<uint2*>(data + block * (kBlock / 2)) = encode_block(v, block_encode_scale(s, g), s);
}

template <class T>
__device__ __forceinline__ void load_block(const typename T::Stored* x, int64_t block, float (&v)[kBlock]) {
  Block<T> raw;
  raw.load(x + block * kBlock);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = raw.value(i);
}

// One amax for all blocks, or one per `blocks_per_amax`.
template <class T, bool kOneAmax>
__global__ void __launch_bounds__(kThreads)
    quantize_rows_kernel(QuantizeArgs a, int64_t blocks, int64_t blocks_per_amax) {
  const auto* x = static_cast<const typename T::Stored*>(a.x);
  GlobalScale g = global_scale(a.amax[0], a.e4m3_max);
  for (int64_t b = thread_index(); b < blocks; b += thread_count()) {
    float v[kBlock];
    load_block<T>(x, b, v);
    if constexpr (!kOneAmax) g = global_scale(a.amax[b / blocks_per_amax], a.e4m3_max);
    encode_and_store(v, block_amax(v), g, a.data, a.scale, b);
  }
}

// The maximum over a thread block, in every thread.
__device__ __forceinline__ uint32_t block_wide_max(uint32_t m) {
  __shared__ uint32_t partial[kThreads / 32];
  m = __reduce_max_sync(0xffffffffu, m);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = m;
  __syncthreads();
  m = partial[0];
#pragma unroll
  for (int i = 1; i < kThreads / 32; ++i) m = amax_bits(m, partial[i]);
  __syncthreads();  // `partial` is free for the next row
  return m;
}

// One thread block per row: its amax, then its blocks (the second read comes from cache).
template <class T>
__global__ void __launch_bounds__(kThreads) quantize_find_amax_kernel(QuantizeArgs a) {
  const auto* x = static_cast<const typename T::Stored*>(a.x);
  const int64_t blocks = a.shape.cols / kBlock;
  for (int64_t row = blockIdx.x; row < a.shape.batch * a.shape.rows; row += gridDim.x) {
    float v[kBlock];
    uint32_t m = 0;
    for (int64_t b = threadIdx.x; b < blocks; b += kThreads) {
      load_block<T>(x, row * blocks + b, v);
      m = amax_bits(m, block_amax(v));
    }
    const float amax = float_of(canonical_nan(block_wide_max(m)));
    if (threadIdx.x == 0) a.found[row] = amax;
    const GlobalScale g = global_scale(amax, a.e4m3_max);
    for (int64_t b = threadIdx.x; b < blocks; b += kThreads) {
      load_block<T>(x, row * blocks + b, v);
      encode_and_store(v, block_amax(v), g, a.data, a.scale, row * blocks + b);
    }
  }
}

// 16 rows x 16 blocks: each thread one block, each column of blocks one 16x16 tile.
template <class T>
__global__ void __launch_bounds__(kThreads) quantize_tiles_kernel(QuantizeArgs a, int64_t strips) {
  __shared__ uint32_t amax[kBlock][kBlock];
  const auto* x = static_cast<const typename T::Stored*>(a.x);
  const int64_t blocks = a.shape.cols / kBlock;
  const int r = threadIdx.x / kBlock, c = threadIdx.x % kBlock;
  const int64_t items = a.shape.batch * (a.shape.rows / kBlock) * strips;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t row = item / strips * kBlock + r, col = item % strips * kBlock + c;
    const bool active = col < blocks;
    float v[kBlock];
    if (active) {
      load_block<T>(x, row * blocks + col, v);
      amax[r][c] = block_amax(v);
    }
    __syncthreads();
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) m = amax_bits(m, amax[i][c]);
    __syncthreads();
    if (active)
      encode_and_store(v, m, global_scale(a.amax[row / a.shape.rows_per_amax], a.e4m3_max), a.data, a.scale,
                       row * blocks + col);
  }
}

// A tile of the source: 64 of its rows (the quantized axis) by 64 of its columns (rows of the result).
constexpr int kTile = 64;

template <class T>
struct TransposeTile {
  using Stored = typename T::Stored;
  static constexpr int kPerWord = 4 / sizeof(Stored);
  static constexpr int kWords = kTile / kPerWord;
  uint32_t word[kTile][kWords + 1];  // one word of padding keeps column reads off one bank

  __device__ __forceinline__ Stored get(int c, int r) const { return reinterpret_cast<const Stored*>(word[c])[r]; }

  // Loads [c0, c0 + 64) x [r0, r0 + 64) of a source with `rows` columns and `cols` rows; zeros outside.
  __device__ __forceinline__ void load(const Stored* source, int64_t cols, int64_t rows, int64_t c0, int64_t r0,
                                       bool aligned) {
    constexpr int kVector = 16 / sizeof(Stored), kVectors = kTile / kVector;
    for (int i = threadIdx.x; i < kTile * kVectors; i += kThreads) {
      const int c = i / kVectors, r = i % kVectors * kVector;
      uint32_t w[4] = {0, 0, 0, 0};
      if (c0 + c < cols) {
        const Stored* p = source + (c0 + c) * rows + r0 + r;
        if (aligned && r0 + r < rows) {
          const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
          w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
        } else if (!aligned) {
#pragma unroll
          for (int e = 0; e < kVector; ++e)
            if (r0 + r + e < rows) w[e / kPerWord] |= uint32_t{p[e]} << (32 / kPerWord * (e % kPerWord));
        }
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) word[c][r / kPerWord + k] = w[k];
    }
  }
};

// Rows of 16-byte words can be read whole only if every source row starts on one.
template <class T>
__device__ __forceinline__ bool rows_aligned(const QuantShape& s) {
  return s.rows * sizeof(typename T::Stored) % 16 == 0;
}

// Eight result rows by four blocks a warp, so that a warp writes whole 32-byte sectors.
template <class S, class T>
__global__ void __launch_bounds__(kThreads)
    quantize_transposed_kernel(QuantizeArgs a, int64_t row_tiles, int64_t col_tiles) {
  __shared__ TransposeTile<T> tile;
  __shared__ uint32_t amax[kTile / kBlock][kTile / 8];
  const QuantShape& s = a.shape;
  const bool aligned = rows_aligned<T>(s);
  const int64_t blocks = s.cols / kBlock;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = lane % 4, r = 8 * warp + lane / 4;
  const int64_t items = s.batch * row_tiles * col_tiles;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t matrix = item / col_tiles / row_tiles;
    const int64_t r0 = item / col_tiles % row_tiles * kTile, c0 = item % col_tiles * kTile;
    tile.load(static_cast<const typename T::Stored*>(a.x) + matrix * s.rows * s.cols, s.cols, s.rows, c0, r0, aligned);
    __syncthreads();
    float v[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = T::load(tile.get(block * kBlock + i, r));
    uint32_t m = block_amax(v);
    if constexpr (S::spec.block_rows == kBlock) {  // 16 result rows are two warps
#pragma unroll
      for (int step = 4; step < 32; step *= 2) m = amax_bits(m, __shfl_xor_sync(0xffffffffu, m, step));
      if (lane < 4) amax[block][warp] = m;
      __syncthreads();
      m = amax_bits(amax[block][warp & ~1], amax[block][warp | 1]);
    }
    const int64_t row = matrix * s.rows + r0 + r, col = c0 / kBlock + block;
    if (r0 + r < s.rows && col < blocks)
      encode_and_store(v, m, global_scale(a.amax[row / s.rows_per_amax], a.e4m3_max), a.data, a.scale,
                       row * blocks + col);
    __syncthreads();  // before the next tile overwrites this one
  }
}

// The amax of each result row of a transposed source; `found` starts as zeros. NaN is made canonical
// before the atomic maximum, where it is larger than every number.
template <class T>
__global__ void __launch_bounds__(kThreads)
    amax_transposed_kernel(QuantizeArgs a, int64_t row_tiles, int64_t col_tiles) {
  __shared__ TransposeTile<T> tile;
  const QuantShape& s = a.shape;
  const bool aligned = rows_aligned<T>(s);
  const int r = threadIdx.x % kTile, part = threadIdx.x / kTile;
  for (int64_t item = blockIdx.x; item < s.batch * row_tiles * col_tiles; item += gridDim.x) {
    const int64_t matrix = item / col_tiles / row_tiles;
    const int64_t r0 = item / col_tiles % row_tiles * kTile, c0 = item % col_tiles * kTile;
    tile.load(static_cast<const typename T::Stored*>(a.x) + matrix * s.rows * s.cols, s.cols, s.rows, c0, r0, aligned);
    __syncthreads();
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) m = amax_bits(m, bits_of(T::load(tile.get(part * kBlock + i, r))) & kMagnitude);
    if (r0 + r < s.rows) atomicMax(reinterpret_cast<unsigned*>(a.found) + matrix * s.rows + r0 + r, canonical_nan(m));
    __syncthreads();
  }
}

template <class T>
cudaError_t launch_rows(const QuantizeArgs& a, cudaStream_t stream) {
  const int64_t rows = a.shape.batch * a.shape.rows, row_blocks = a.shape.cols / kBlock, blocks = rows * row_blocks;
  if (!a.amax) {
    quantize_find_amax_kernel<T><<<grid_for(rows, 1), kThreads, 0, stream>>>(a);
  } else if (a.shape.rows_per_amax == rows) {
    quantize_rows_kernel<T, true><<<grid_for(blocks, kThreads), kThreads, 0, stream>>>(a, blocks, 0);
  } else {
    quantize_rows_kernel<T, false>
        <<<grid_for(blocks, kThreads), kThreads, 0, stream>>>(a, blocks, a.shape.rows_per_amax * row_blocks);
  }
  return cudaGetLastError();
}

template <class S, class T>
cudaError_t launch_transposed(QuantizeArgs a, cudaStream_t stream) {
  const int64_t row_tiles = (a.shape.rows + kTile - 1) / kTile, col_tiles = (a.shape.cols + kTile - 1) / kTile;
  const unsigned grid = grid_for(a.shape.batch * row_tiles * col_tiles, 1);
  if (!a.amax) {
    const cudaError_t cleared = cudaMemsetAsync(a.found, 0, a.shape.batch * a.shape.rows * sizeof(float), stream);
    if (cleared != cudaSuccess) return cleared;
    amax_transposed_kernel<T><<<grid, kThreads, 0, stream>>>(a, row_tiles, col_tiles);
    a.amax = a.found;
  }
  quantize_transposed_kernel<S, T><<<grid, kThreads, 0, stream>>>(a, row_tiles, col_tiles);
  return cudaGetLastError();
}

template <class S, class T>
cudaError_t launch(const QuantizeArgs& a, cudaStream_t stream) {
  if (a.shape.transposed) return launch_transposed<S, T>(a, stream);
  if constexpr (S::spec.block_rows == kBlock) {
    const int64_t strips = (a.shape.cols / kBlock + kBlock - 1) / kBlock;
    const unsigned grid = grid_for(a.shape.batch * (a.shape.rows / kBlock) * strips, 1);
    quantize_tiles_kernel<T><<<grid, kThreads, 0, stream>>>(a, strips);
    return cudaGetLastError();
  } else {
    return launch_rows<T>(a, stream);
  }
}

}  // namespace

bool launch_quantize(const QuantizeArgs& args, const KernelSpec& spec, cudaStream_t stream, cudaError_t* status) {
  return dispatch(spec, SupportedSpecs{}, [&](auto s) {
    with_float(args.kind, [&](auto t) { *status = launch<decltype(s), decltype(t)>(args, stream); });
  });
}

}  // namespace jnvfp4
