// quantize on CUDA, blocks along contiguous memory: one thread a block of 16, any number of rows.
#include "block.cuh"

namespace jnvfp4 {
namespace {

template <class S, class T>
__device__ __forceinline__ void load_block(const typename T::Stored* x, int64_t block, Values& v) {
  Block<T> raw;
  raw.load(x + block * kBlock);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) v[i] = raw.value(i);
  if constexpr (S::spec.rht) rht16(v);
}

template <class S>
__device__ __forceinline__ Encoded encode(const Values& v, uint32_t m, const GlobalScale& g, const QuantizeArgs& a,
                                          int64_t block) {
  if constexpr (kChooses<S>) {
    return try_both<S>(v, m, g).better(v, g);
  } else {
    int64_t matrix = 0, row = 0, col = 0;
    if constexpr (S::spec.rounding == Rounding::kStochastic) {
      const int64_t blocks = a.shape.cols / kBlock;
      row = quotient(block, blocks), col = block - row * blocks;
      if (a.shape.batch > 1) matrix = quotient(row, a.shape.rows), row -= matrix * a.shape.rows;
    }
    return encode_plain<S>(v, m, g, a, matrix, row, col);
  }
}

// One amax for all blocks, or one per `blocks_per_amax`; of each window, given or found.
template <class S, class T, bool kOneAmax>
__global__ void __launch_bounds__(kThreads)
    quantize_rows_kernel(QuantizeArgs a, int64_t blocks, int64_t blocks_per_amax) {
  const auto* x = static_cast<const typename T::Stored*>(a.x);
  GlobalScale g{};
  if constexpr (kOneAmax) g = global_scale(a.amax[0], a.e4m3_max);
  for (int64_t b = thread_index(); b < blocks; b += thread_count()) {
    Values v;
    load_block<S, T>(x, b, v);
    const uint32_t m = block_amax(v);
    if constexpr (kWindows<S>) {  // blocks are a multiple of 4, so the four lanes of a window are all here
      const int64_t window = b / (kWindow / kBlock);
      float amax;
      if (a.amax) {
        amax = a.amax[window];
      } else {
        amax = float_of(canonical_nan(window_max(m)));
        if (b % (kWindow / kBlock) == 0) a.found[window] = amax;
      }
      g = global_scale(amax, a.e4m3_max);
    } else if constexpr (!kOneAmax) {
      g = global_scale(a.amax[quotient(b, blocks_per_amax)], a.e4m3_max);
    }
    encode<S>(v, m, g, a, b).store(a, b);
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
template <class S, class T>
__global__ void __launch_bounds__(kThreads) quantize_find_amax_kernel(QuantizeArgs a) {
  const auto* x = static_cast<const typename T::Stored*>(a.x);
  const int64_t blocks = a.shape.cols / kBlock;
  for (int64_t row = blockIdx.x; row < all_rows(a.shape); row += gridDim.x) {
    Values v;
    uint32_t m = 0;
    for (int64_t b = threadIdx.x; b < blocks; b += kThreads) {
      load_block<S, T>(x, row * blocks + b, v);
      m = amax_bits(m, block_amax(v));
    }
    const float amax = float_of(canonical_nan(block_wide_max(m)));
    if (threadIdx.x == 0) a.found[row] = amax;
    const GlobalScale g = global_scale(amax, a.e4m3_max);
    for (int64_t b = threadIdx.x; b < blocks; b += kThreads) {
      load_block<S, T>(x, row * blocks + b, v);
      encode<S>(v, block_amax(v), g, a, row * blocks + b).store(a, row * blocks + b);
    }
  }
}

template <class S, class T>
cudaError_t launch(const QuantizeArgs& a, cudaStream_t stream) {
  const int64_t row_blocks = a.shape.cols / kBlock, blocks = all_rows(a.shape) * row_blocks;
  const unsigned grid = grid_for(blocks, kThreads);
  if constexpr (S::spec.amax_scope == AmaxScope::kWindow64) {
    quantize_rows_kernel<S, T, false><<<grid, kThreads, 0, stream>>>(a, blocks, 0);
  } else {
    const int64_t per_amax = a.shape.rows_per_amax;
    if constexpr (S::spec.amax_scope == AmaxScope::kRow) {
      if (!a.amax) {
        quantize_find_amax_kernel<S, T><<<grid_for(all_rows(a.shape), 1), kThreads, 0, stream>>>(a);
        return cudaGetLastError();
      }
    } else if (per_amax == all_rows(a.shape)) {
      quantize_rows_kernel<S, T, true><<<grid, kThreads, 0, stream>>>(a, blocks, 0);
      return cudaGetLastError();
    }
    quantize_rows_kernel<S, T, false><<<grid, kThreads, 0, stream>>>(a, blocks, per_amax * row_blocks);
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
