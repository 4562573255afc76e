// Blocks along contiguous memory: one thread a block of 16, any number of rows. What is done with a block is an `Op`:
// Op::run<S>(args, scales, elements, at). Op::kBlocks<S, kE2M1>: CTAs an SM holds, which bounds
// registers, in code with the conversion to E2M1 or without.
#pragma once

#include "block.cuh"

namespace jnvfp4 {

template <class Op, class S, bool kConverts = kE2M1>
inline constexpr int kRowBlocks = Op::template kBlocks<S, kConverts>;

// kRowBlocks of the code that runs on the current device. (GPUs from 10.0 on may have code without the conversion, from
// an older compiler. Then some CTAs fewer are launched than would fit.)
template <class Op, class S>
int row_blocks_here() {
  constexpr int kWith = kRowBlocks<Op, S, true>, kWithout = kRowBlocks<Op, S, false>;
  if constexpr (kWith == kWithout)
    return kWith;
  else
    return major_capability() >= 10 ? kWith : kWithout;
}

// The random bits of a block, by its place in the local array.
template <class S>
__device__ __forceinline__ void random_of(const SharedScales<S>& scales, const QuantShape& shape,
                                          const StreamArgs& stream, int64_t block, uint32_t (&bits)[4]) {
  const int64_t blocks = shape.cols / kBlock, elsewhere = stream.row_blocks - blocks;  // of a row, on other devices
  scales.random(elsewhere ? block + quotient(block, blocks) * elsewhere : block, false, bits);
}

// The matrices of a launch, in rows of the grid: one of all blocks, where all have one amax and one key.
struct Matrices {
  int64_t count, blocks;

  // `x` CTAs for each matrix.
  dim3 grid(unsigned x) const {
    constexpr int64_t kMost = 65535;  // of grid dimensions y and z
    return dim3(x, static_cast<unsigned>(std::min(count, kMost)), static_cast<unsigned>((count + kMost - 1) / kMost));
  }
  // Index of this CTA's item; none if not below `count`. Without a branch, so that it stays in uniform registers.
  __device__ __forceinline__ int64_t own() const { return blockIdx.y + static_cast<int64_t>(blockIdx.z) * gridDim.y; }
};
template <class S>
Matrices matrices_of(const QuantShape& shape) {
  const int64_t blocks = shape.rows * (shape.cols / kBlock);
  const bool one = shape.amax.rows_per_amax == all_rows(shape) && !(kStochastic<S> && shape.batch > 1);
  return one || !kOneAmax<S> ? Matrices{1, shape.batch * blocks} : Matrices{shape.batch, blocks};
}

// As fill_scales, but with fewer instructions for the first matrix, which small launches feel. The CTA then
// synchronises.
template <class S, class Args>
__device__ __forceinline__ void fill_scales_of_matrix(SharedScales<S>& scales, const Args& a, int64_t matrix) {
  const int64_t rows = matrix * a.shape.rows;
  scales.fill(a.amax[matrix ? quotient(rows, a.shape.amax.rows_per_amax) : 0], a.e4m3_max);
  if constexpr (kStochastic<S>) {
    scales.fill_random(a, matrix);
    if (threadIdx.x == 0) scales.first_block -= rows * a.stream.row_blocks;  // random_of counts those of all matrices
  }
}

// A block: the `i`-th from `first`, which a CTA has in common, so that addresses are 32-bit numbers on top.
struct At {
  int64_t first;
  int i;

  __device__ __forceinline__ int64_t index() const { return first + i; }
};

// Calls f(at, elements, here) for those of the blocks from `first` to before `end` that this thread has, the next one's
// elements in flight. Every lane calls it, for the exchanges within f, and those past the end with here = false.
template <class T, class F>
__device__ __forceinline__ void for_each_block(const void* x, Float kind, int64_t first, int64_t end, const F& f) {
  const auto load = [&](Block<T>& b, int64_t first) {
    const int i = threadIdx.x;
    if (i < end - first) b = load_block<T>(x, kind, first, i);
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x - lane;
  first += static_cast<int64_t>(blockIdx.x) * kThreads;
  Block<T> next{};
  load(next, first);
  while (first + warp < end) {
    const Block<T> own = next;
    const At at{first, static_cast<int>(threadIdx.x)};
    const int64_t left = end - first;
    first += thread_count();
    load(next, first);
    f(at, own, left > at.i);
  }
}

constexpr int kHeld = 2;  // blocks that a thread keeps in registers

// One amax for a matrix.
template <class Op, class S, class T>
__global__ void __launch_bounds__(kThreads, kRowBlocks<Op, S>)
    quantize_with_shared_scales_kernel(typename Op::Args a, Matrices matrices) {
  __shared__ SharedScales<S> scales;
  const int64_t matrix = matrices.own(), first = matrix * matrices.blocks;
  if (matrix >= matrices.count) return;
  fill_scales_of_matrix(scales, a, matrix);
  __syncthreads();
  for_each_block<T>(a.x, a.kind, first, first + matrices.blocks, [&](At at, const Block<T>& x, bool here) {
    if (here) Op::template run<S>(a, scales, x, at);
  });
}

// One amax for each row, given. With factors of its own a block needs more registers.
template <class Op, class S, class T>
__global__ void __launch_bounds__(kThreads, kChooses<S> ? 2 : kRowBlocks<Op, S>)
    quantize_with_row_amax_kernel(typename Op::Args a, int64_t blocks) {
  const int64_t row_blocks = a.shape.cols / kBlock;
  for_each_block<T>(a.x, a.kind, 0, blocks, [&](At at, const Block<T>& x, bool here) {
    if (here) Op::template run<S>(a, OwnScales<S>(a.amax[quotient(at.index(), row_blocks)], a.e4m3_max), x, at);
  });
}

// One amax for each window, given or found. Blocks are a multiple of 4: all four lanes of a window are here, or none.
template <class Op, class S, class T>
__global__ void __launch_bounds__(kThreads, kRowBlocks<Op, S>)
    quantize_with_window_amax_kernel(typename Op::Args a, int64_t blocks) {
  for_each_block<T>(a.x, a.kind, 0, blocks, [&](At at, const Block<T>& x, bool here) {
    const int64_t window = at.index() >> 2;
    const uint32_t m = a.amax ? 0 : window_max(x.amax());
    if (!here) return;
    const float amax = a.amax ? a.amax[window] : float_of(canonical_nan(m));
    if (a.found && at.i % 4 == 0) a.found[window] = amax;
    Op::template run<S>(a, OwnScales<S>(amax, a.e4m3_max), x, at);
  });
}

// The maximum over a CTA, in every thread.
__device__ __forceinline__ uint32_t block_wide_max(uint32_t m) {
  __shared__ uint32_t partial[32];
  m = __reduce_max_sync(0xffffffffu, m);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = m;
  __syncthreads();
  m = threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0;
  m = __reduce_max_sync(0xffffffffu, m);
  __syncthreads();  // `partial` is free for the next row
  return m;
}

template <class S>
inline constexpr int kRowThreads = kChooses<S> ? 512 : 1024;  // of a row, at most: bounds registers

// One CTA per row: its amax, then its blocks. What registers cannot hold is read again, from cache.
template <class Op, class S, class T>
__global__ void __launch_bounds__(kRowThreads<S>) find_amax_and_quantize_kernel(typename Op::Args a) {
  const int blocks = static_cast<int>(a.shape.cols / kBlock), threads = blockDim.x;
  for (int64_t row = blockIdx.x; row < all_rows(a.shape); row += gridDim.x) {
    const int64_t first = row * blocks;
    Block<T> held[kHeld];
    uint32_t m = 0;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int b = threadIdx.x + j * threads;
      if (b < blocks) held[j] = load_block<T>(a.x, a.kind, first, b);
    }
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (threadIdx.x + j * threads < blocks) m = amax_bits(m, held[j].amax());
    for (int b = threadIdx.x + kHeld * threads; b < blocks; b += threads) {
      m = amax_bits(m, load_block<T>(a.x, a.kind, first, b).amax());
    }
    const float amax = float_of(canonical_nan(block_wide_max(m)));
    if (a.found && threadIdx.x == 0) a.found[row] = amax;
    const OwnScales<S> scales(amax, a.e4m3_max);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int b = threadIdx.x + j * threads;
      if (b < blocks) Op::template run<S>(a, scales, held[j], At{first, b});
    }
    for (int b = threadIdx.x + kHeld * threads; b < blocks; b += threads) {
      const auto again = load_block<T>(a.x, a.kind, first, b);
      Op::template run<S>(a, scales, again, At{first, b});
    }
  }
}

template <class Op, class S, class T>
cudaError_t launch_rows(const typename Op::Args& a, cudaStream_t stream) {
  const int64_t row_blocks = a.shape.cols / kBlock, rows = all_rows(a.shape), blocks = rows * row_blocks;
  if constexpr (kOneAmax<S>) {
    const Matrices matrices = matrices_of<S>(a.shape);
    const unsigned grid = resident_grid(matrices.blocks, kThreads, row_blocks_here<Op, S>());
    quantize_with_shared_scales_kernel<Op, S, T><<<matrices.grid(grid), kThreads, 0, stream>>>(a, matrices);
  } else if constexpr (kWindows<S>) {
    const unsigned grid = resident_grid(blocks, kThreads, row_blocks_here<Op, S>());
    quantize_with_window_amax_kernel<Op, S, T><<<grid, kThreads, 0, stream>>>(a, blocks);
  } else if (a.amax) {
    const unsigned grid = resident_grid(blocks, kThreads, kChooses<S> ? 2 : row_blocks_here<Op, S>());
    quantize_with_row_amax_kernel<Op, S, T><<<grid, kThreads, 0, stream>>>(a, blocks);
  } else {
    const int64_t threads = std::clamp<int64_t>((row_blocks + 32 * kHeld - 1) / (32 * kHeld) * 32, 32, kRowThreads<S>);
    const auto grid = static_cast<unsigned>(std::min<int64_t>(rows, 1 << 20));
    find_amax_and_quantize_kernel<Op, S, T><<<grid, static_cast<unsigned>(threads), 0, stream>>>(a);
  }
  return cudaGetLastError();
}

}  // namespace jnvfp4
