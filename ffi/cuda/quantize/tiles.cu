// quantize on CUDA through tiles in shared memory: blocks along the columns of x, and 16x16 tiles.
#include "passes.cuh"

namespace jnvfp4 {
namespace {

template <class S, class T>
struct RowsMemory {
  Stages<T> stages;
  SharedScales<S> scales;
};
template <class S, class T>
struct ColumnsMemory : RowsMemory<S, T> {
  ColumnsShared<S> columns;
};

template <class S, class T>
__global__ void __launch_bounds__(kThreads, kTileBlocks<S>) quantize_tile_rows_kernel(QuantizeArgs a, Runs runs) {
  auto& shared = shared_memory<RowsMemory<S, T>>();
  for_each_tile_of(
      a.x, a.kind, shared.stages, StoredShape(a.shape), runs,
      [&](int64_t matrix) { fill_scales(shared.scales, a, matrix); },
      [&](const TilePlace& first) { return RowsPass<S, T>(a, shared.scales, first); });
}

template <class S, class T>
__global__ void __launch_bounds__(kThreads, kTileBlocks<S>) quantize_tile_columns_kernel(QuantizeArgs a, Runs runs) {
  auto& shared = shared_memory<ColumnsMemory<S, T>>();
  for_each_tile_of(
      a.x, a.kind, shared.stages, StoredShape(a.shape), runs,
      [&](int64_t matrix) { fill_scales(shared.scales, a, matrix); },
      [&](const TilePlace& first) { return ColumnsPass<S, T>(a, shared.scales, shared.columns, first); });
}

// The amax of each row of a transposed x; `found` starts as zeros. NaN is made canonical before the atomic maximum,
// where it is larger than every number.
template <class T>
class AmaxColumns {
 public:
  __device__ __forceinline__ AmaxColumns(const QuantizeArgs& a, const TilePlace& first)
      : found_(reinterpret_cast<unsigned*>(a.found) + first.matrix * a.shape.rows + first.col + 2 * pair_of_thread()),
        lines_left_(a.shape.rows - first.col - 2 * pair_of_thread()),
        rows_left_(a.shape.cols - first.row - rows_of_thread()) {}
  __device__ __forceinline__ void operator()(const Tile<T>& tile) {
    Columns<T> x;
    x.load(tile, Columns<T>::place());
    uint32_t m[2];
    x.amax(m);
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (rows_left_ > 0) m_[j] = amax_bits(m_[j], m[j]);
    rows_left_ -= kTileRows;
  }
  __device__ __forceinline__ void finish(int) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (j < lines_left_) atomicMax(found_ + j, canonical_nan(m_[j]));
      m_[j] = 0;
    }
  }

 private:
  unsigned* found_;
  int64_t lines_left_, rows_left_;
  uint32_t m_[2] = {0, 0};
};

template <class T>
__global__ void __launch_bounds__(kThreads) amax_columns_kernel(QuantizeArgs a, Runs runs) {
  for_each_tile_of(
      a.x, a.kind, shared_memory<Stages<T>>(), StoredShape(a.shape), runs, [](int64_t) {},
      [&](const TilePlace& first) { return AmaxColumns<T>(a, first); });
}

template <class S, class T, bool kTransposed>
cudaError_t launch(QuantizeArgs a, cudaStream_t stream) {
  const Runs runs(StoredShape(a.shape), kTileBlocks<S>);
  if constexpr (S::spec.amax_scope == AmaxScope::kRow)
    if (!a.amax) {
      const cudaError_t cleared = cudaMemsetAsync(a.found, 0, all_rows(a.shape) * sizeof(float), stream);
      if (cleared != cudaSuccess) return cleared;
      const cudaError_t found = launch_tiles<Stages<T>>(amax_columns_kernel<T>, runs, stream, a);
      if (found != cudaSuccess) return found;
      a.amax = a.found;
    }
  if constexpr (kTransposed)
    return launch_tiles<ColumnsMemory<S, T>>(quantize_tile_columns_kernel<S, T>, runs, stream, a);
  else
    return launch_tiles<RowsMemory<S, T>>(quantize_tile_rows_kernel<S, T>, runs, stream, a);
}

}  // namespace

cudaError_t launch_quantize_tiles(const QuantizeArgs& args, const KernelSpec& spec, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  dispatch(spec, CudaSpecs{}, [&](auto s) {
    using S = decltype(s);
    with_bf16_or_wide(args.kind, [&](auto t) {
      if (args.shape.transposed)
        status = launch<S, decltype(t), true>(args, stream);
      else if constexpr (S::spec.block_rows == kBlock)
        status = launch<S, decltype(t), false>(args, stream);
    });
  });
  return status;
}

}  // namespace jnvfp4
