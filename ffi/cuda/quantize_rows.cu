// quantize on CUDA, blocks along contiguous memory: one thread a block of 16, any number of rows.
#include "block.cuh"

namespace jnvfp4 {
namespace {

// Thread blocks a multiprocessor holds, which bounds registers.
template <class S>
constexpr int kRowBlocks = kChooses<S>      ? 2
                           : kStochastic<S> ? 4
                                            : 5;

template <class S, class T, class Scales>
__device__ __forceinline__ Encoded encode(const Block<T>& raw, const Scales& scales, const QuantizeArgs& a,
                                          int64_t block) {
  const auto source = source_of<S>(raw);
  const uint32_t m = source.amax();
  Values v;
  source.values(v);
  const auto* x = static_cast<const typename T::Stored*>(a.x) + block * kBlock;
  return encode_block<S>(
      v, m, scales, [&](int i) { return T::load(x[i]); },
      [&](uint32_t (&bits)[4]) { random_of(scales, a, block, bits); });
}

// Calls f(block, elements, here) for the blocks of this thread, the next one's elements on their way. Every lane calls
// it, for the exchanges within f, and those past the end with here = false.
template <class T, class F>
__device__ __forceinline__ void for_each_block(const void* x, int64_t blocks, const F& f) {
  const auto* p = static_cast<const typename T::Stored*>(x);
  const int lane = threadIdx.x % 32;
  int64_t first = thread_index() - lane;  // of the warp
  Block<T> next{};
  if (first + lane < blocks) next.load(p + (first + lane) * kBlock);
  while (first < blocks) {
    const Block<T> own = next;
    const int64_t block = first + lane;
    first += thread_count();
    if (first + lane < blocks) next.load(p + (first + lane) * kBlock);
    f(block, own, block < blocks);
  }
}

// One amax for all blocks, and one key.
template <class S, class T>
__global__ void __launch_bounds__(kThreads, kRowBlocks<S>) quantize_rows_kernel(QuantizeArgs a, int64_t blocks) {
  __shared__ SharedScales<S> scales;
  scales.fill(a.amax[0], a.e4m3_max);
  if constexpr (kStochastic<S>) scales.fill_keys(a.stream, 0);
  __syncthreads();
  for_each_block<T>(a.x, blocks, [&](int64_t b, const Block<T>& x, bool here) {
    if (here) encode<S>(x, scales, a, b).store(a, b);
  });
}

// One amax for `blocks_per_amax` blocks.
template <class S, class T>
__global__ void __launch_bounds__(kThreads, kRowBlocks<S>)
    quantize_groups_kernel(QuantizeArgs a, int64_t blocks, int64_t blocks_per_amax) {
  for_each_block<T>(a.x, blocks, [&](int64_t b, const Block<T>& x, bool here) {
    if (here) encode<S>(x, OwnScales<S>(a.amax[quotient(b, blocks_per_amax)], a.e4m3_max), a, b).store(a, b);
  });
}

// One amax for each window, given or found. Blocks are a multiple of 4: all four lanes of a window are here, or none.
template <class S, class T>
__global__ void __launch_bounds__(kThreads, kRowBlocks<S>) quantize_windows_kernel(QuantizeArgs a, int64_t blocks) {
  for_each_block<T>(a.x, blocks, [&](int64_t b, const Block<T>& x, bool here) {
    const int64_t window = b >> 2;
    const uint32_t m = a.amax ? 0 : window_max(x.amax());
    if (!here) return;
    const float amax = a.amax ? a.amax[window] : float_of(canonical_nan(m));
    if (!a.amax && b % 4 == 0) a.found[window] = amax;
    encode<S>(x, OwnScales<S>(amax, a.e4m3_max), a, b).store(a, b);
  });
}

// The maximum over a thread block, in every thread.
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

constexpr int kHeld = 2;  // blocks of a row that a thread keeps in registers

// One thread block per row: its amax, then its blocks. What registers cannot hold is read again, from cache.
template <class S, class T>
__global__ void __launch_bounds__(1024) quantize_find_amax_kernel(QuantizeArgs a) {
  const auto* x = static_cast<const typename T::Stored*>(a.x);
  const int blocks = static_cast<int>(a.shape.cols / kBlock), threads = blockDim.x;
  for (int64_t row = blockIdx.x; row < all_rows(a.shape); row += gridDim.x) {
    const int64_t first = row * blocks;
    Block<T> held[kHeld];
    uint32_t m = 0;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int b = threadIdx.x + j * threads;
      if (b < blocks) held[j].load(x + (first + b) * kBlock);
    }
#pragma unroll
    for (int j = 0; j < kHeld; ++j)
      if (threadIdx.x + j * threads < blocks) m = amax_bits(m, held[j].amax());
    for (int b = threadIdx.x + kHeld * threads; b < blocks; b += threads) {
      Block<T> again;
      again.load(x + (first + b) * kBlock);
      m = amax_bits(m, again.amax());
    }
    const float amax = float_of(canonical_nan(block_wide_max(m)));
    if (threadIdx.x == 0) a.found[row] = amax;
    const OwnScales<S> scales(amax, a.e4m3_max);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int b = threadIdx.x + j * threads;
      if (b < blocks) encode<S>(held[j], scales, a, first + b).store(a, first + b);
    }
    for (int b = threadIdx.x + kHeld * threads; b < blocks; b += threads) {
      Block<T> again;
      again.load(x + (first + b) * kBlock);
      encode<S>(again, scales, a, first + b).store(a, first + b);
    }
  }
}

template <class S, class T>
cudaError_t launch(const QuantizeArgs& a, cudaStream_t stream) {
  const int64_t row_blocks = a.shape.cols / kBlock, rows = all_rows(a.shape), blocks = rows * row_blocks;
  const unsigned grid = resident_grid(blocks, kThreads, kRowBlocks<S>);
  if constexpr (kWindows<S>) {
    quantize_windows_kernel<S, T><<<grid, kThreads, 0, stream>>>(a, blocks);
  } else {
    const int64_t per_amax = a.shape.rows_per_amax;
    if constexpr (kOneAmax<S>) {
      if (per_amax == rows && !(kStochastic<S> && a.shape.batch > 1)) {
        quantize_rows_kernel<S, T><<<grid, kThreads, 0, stream>>>(a, blocks);
        return cudaGetLastError();
      }
    } else if (!a.amax) {
      const int64_t threads = std::clamp<int64_t>((row_blocks + 32 * kHeld - 1) / (32 * kHeld) * 32, 32, 1024);
      quantize_find_amax_kernel<S, T>
          <<<static_cast<unsigned>(std::min<int64_t>(rows, 1 << 20)), static_cast<unsigned>(threads), 0, stream>>>(a);
      return cudaGetLastError();
    }
    quantize_groups_kernel<S, T><<<grid, kThreads, 0, stream>>>(a, blocks, per_amax * row_blocks);
  }
  return cudaGetLastError();
}

}  // namespace

bool launch_quantize(const QuantizeArgs& args, const KernelSpec& spec, cudaStream_t stream, cudaError_t* status) {
  const bool rows = !args.shape.transposed && spec.block_rows == 1;
  return rows ? launch_quantize_rows(args, spec, stream, status) : launch_quantize_tiles(args, spec, stream, status);
}

bool launch_quantize_rows(const QuantizeArgs& args, const KernelSpec& spec, cudaStream_t stream, cudaError_t* status) {
  return dispatch(spec, SupportedSpecs{}, [&](auto s) {
    using S = decltype(s);
    if constexpr (S::spec.block_rows == 1)
      with_float(args.kind, [&](auto t) { *status = launch<S, decltype(t)>(args, stream); });
  });
}

}  // namespace jnvfp4
