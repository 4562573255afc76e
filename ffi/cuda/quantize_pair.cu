// quantize_pair on CUDA: each 64x64 tile of x is read once and quantized along both axes.
#include "tile.cuh"

namespace jnvfp4 {
namespace {

template <class P, class T>
__global__ void __launch_bounds__(kThreads) quantize_pair_kernel(PairArgs a) {
  __shared__ Tile<T> tile;
  __shared__ Exchange exchange;
  const auto* x = static_cast<const typename T::Stored*>(a.row.x);
  const int64_t rows = a.row.shape.rows, cols = a.row.shape.cols;
  for_each_tile(a.row.shape.batch, rows, [&](const TilePlace& place) {
    tile.load(x + place.matrix * rows * cols, rows, cols, place.row, place.col);
    __syncthreads();
    quantize_tile<typename P::Row, T, false>(tile, a.row, place, exchange);
    quantize_tile<typename P::Col, T, true>(tile, a.col, place, exchange);
    __syncthreads();  // before the next tile overwrites this one
  });
}

}  // namespace

cudaError_t launch_quantize_pair(const PairArgs& args, const KernelSpec& row, const KernelSpec& col,
                                 cudaStream_t stream) {
  const QuantShape& s = args.row.shape;
  const dim3 grid = tile_grid(s.batch, s.rows, s.cols);
  const bool listed = dispatch(row, col, FusedPairs{}, [&](auto p) {
    with_float(args.row.kind,
               [&](auto t) { quantize_pair_kernel<decltype(p), decltype(t)><<<grid, kThreads, 0, stream>>>(args); });
  });
  return listed ? cudaGetLastError() : cudaErrorInvalidValue;
}

}  // namespace jnvfp4
