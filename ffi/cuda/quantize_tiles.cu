// quantize on CUDA through 64x64 tiles in shared memory: blocks along the columns of x, and 16x16 tiles.
#include "tile.cuh"

namespace jnvfp4 {
namespace {

template <class S, class T, bool kTransposed>
__global__ void __launch_bounds__(kThreads) quantize_tiles_kernel(QuantizeArgs a) {
  __shared__ Tile<T> tile;
  __shared__ Exchange exchange;
  const auto* x = static_cast<const typename T::Stored*>(a.x);
  const int64_t rows = kTransposed ? a.shape.cols : a.shape.rows, cols = kTransposed ? a.shape.rows : a.shape.cols;
  for_each_tile(a.shape.batch, rows, [&](const TilePlace& place) {
    tile.load(x + place.matrix * rows * cols, rows, cols, place.row, place.col);
    __syncthreads();
    quantize_tile<S, T, kTransposed>(tile, a, place, exchange);
    __syncthreads();  // before the next tile overwrites this one
  });
}

// The amax of each row of a transposed x; `found` starts as zeros. NaN is made canonical before the atomic maximum,
// where it is larger than every number.
template <class T>
__global__ void __launch_bounds__(kThreads) amax_columns_kernel(QuantizeArgs a) {
  __shared__ Tile<T> tile;
  const auto* x = static_cast<const typename T::Stored*>(a.x);
  const int64_t rows = a.shape.cols, cols = a.shape.rows;
  for_each_tile(a.shape.batch, rows, [&](const TilePlace& place) {
    tile.load(x + place.matrix * rows * cols, rows, cols, place.row, place.col);
    __syncthreads();
    Values v;
    read_block<T, true>(tile, v);
    const uint32_t m = canonical_nan(window_max(block_amax(v)));
    const int64_t line = place.col + line_of_thread();
    if (line < cols && block_of_thread() == 0)
      atomicMax(reinterpret_cast<unsigned*>(a.found) + place.matrix * cols + line, m);
    __syncthreads();
  });
}

template <class S, class T, bool kTransposed>
cudaError_t launch(QuantizeArgs a, cudaStream_t stream) {
  const QuantShape& s = a.shape;
  const dim3 grid = kTransposed ? tile_grid(s.batch, s.cols, s.rows) : tile_grid(s.batch, s.rows, s.cols);
  if constexpr (S::spec.amax_scope == AmaxScope::kRow)
    if (!a.amax) {
      const cudaError_t cleared = cudaMemsetAsync(a.found, 0, all_rows(s) * sizeof(float), stream);
      if (cleared != cudaSuccess) return cleared;
      amax_columns_kernel<T><<<grid, kThreads, 0, stream>>>(a);
      a.amax = a.found;
    }
  quantize_tiles_kernel<S, T, kTransposed><<<grid, kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

bool launch_quantize_tiles(const QuantizeArgs& args, const KernelSpec& spec, cudaStream_t stream, cudaError_t* status) {
  return dispatch(spec, SupportedSpecs{}, [&](auto s) {
    using S = decltype(s);
    with_float(args.kind, [&](auto t) {
      if (args.shape.transposed)
        *status = launch<S, decltype(t), true>(args, stream);
      else if constexpr (S::spec.block_rows == kBlock)
        *status = launch<S, decltype(t), false>(args, stream);
    });
  });
}

}  // namespace jnvfp4
