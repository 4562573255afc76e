// The amax of the rotated x on CUDA, one for each group of matrices.
#include "tile.cuh"

namespace jnvfp4 {
namespace {

// `amax` starts as zeros; a tile lies in one matrix, so it has one amax.
template <class T, bool kTransposed>
__global__ void __launch_bounds__(kThreads) rht_amax_kernel(RhtAmaxArgs a) {
  __shared__ Tile<T> tile;
  const auto* x = static_cast<const typename T::Stored*>(a.x);
  const int64_t rows = kTransposed ? a.shape.cols : a.shape.rows, cols = kTransposed ? a.shape.rows : a.shape.cols;
  uint32_t m = 0;
  int64_t index = -1;
  auto flush = [&] {
    m = __reduce_max_sync(0xffffffffu, m);
    if (threadIdx.x % 32 == 0 && index >= 0) atomicMax(reinterpret_cast<unsigned*>(a.amax) + index, m);
    m = 0;
  };
  for_each_tile(a.shape.batch, rows, [&](const TilePlace& place) {
    const int64_t next = quotient(place.matrix * a.shape.rows, a.shape.rows_per_amax);
    if (next != index) flush();
    index = next;
    tile.load(x + place.matrix * rows * cols, rows, cols, place.row, place.col);
    __syncthreads();
    Values v;
    read_block<T, kTransposed>(tile, v);
    rht16(v);
    m = amax_bits(m, canonical_nan(block_amax(v)));
    __syncthreads();
  });
  flush();
}

// About eight thread blocks a multiprocessor, each with many tiles: an atomic maximum costs more than a tile.
dim3 persistent(dim3 grid) {
  constexpr unsigned kBlocks = 132 * 8;
  grid.y = std::max(1u, std::min(grid.y, kBlocks / std::max(1u, grid.x)));
  return grid;
}

}  // namespace

cudaError_t launch_rht_amax(const RhtAmaxArgs& a, cudaStream_t stream) {
  const QuantShape& s = a.shape;
  const cudaError_t cleared = cudaMemsetAsync(a.amax, 0, all_rows(s) / s.rows_per_amax * sizeof(float), stream);
  if (cleared != cudaSuccess) return cleared;
  with_float(a.kind, [&](auto t) {
    if (s.transposed)
      rht_amax_kernel<decltype(t), true><<<persistent(tile_grid(s.batch, s.cols, s.rows)), kThreads, 0, stream>>>(a);
    else
      rht_amax_kernel<decltype(t), false><<<persistent(tile_grid(s.batch, s.rows, s.cols)), kThreads, 0, stream>>>(a);
  });
  return cudaGetLastError();
}

}  // namespace jnvfp4
