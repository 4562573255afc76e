// quantize_pair on CUDA: each tile of x is read once and quantized along both axes.
#include "tile.cuh"

namespace jnvfp4 {
namespace {

template <class P>
inline constexpr bool kSharesChoices = kChooses<typename P::Row> && kTiles<typename P::Row>;

template <class P, class T>
struct PairShared {
  Stages<T> stages;
  SharedScales<typename P::Row> row_scales;
  SharedScales<typename P::Col> col_scales;
  Held held;
  TileChoices choices;
};

template <class P, class T>
class PairPass {
 public:
  __device__ __forceinline__ PairPass(const PairArgs& a, PairShared<P, T>& shared, const TilePlace& first)
      : shared_(shared),
        rows_(a.row, shared.row_scales, first, kSharesChoices<P> ? &shared.choices : nullptr),
        columns_(a.col, shared.col_scales, shared.held, first) {}

  __device__ __forceinline__ void operator()(const Tile<T>& tile) {
    rows_(tile);
    if constexpr (kSharesChoices<P>) {
      __syncthreads();  // the choices are there
      const bool alike = shared_.row_scales.amax == shared_.col_scales.amax &&
                         shared_.row_scales.e4m3_max == shared_.col_scales.e4m3_max;
      columns_.template quantize<true>(tile, alike ? &shared_.choices : nullptr);
    } else {
      columns_(tile);
    }
  }
  __device__ __forceinline__ void finish(int tiles) { columns_.finish(tiles); }

 private:
  PairShared<P, T>& shared_;
  RowsPass<typename P::Row, T> rows_;
  ColumnsPass<typename P::Col, T> columns_;
};

template <class P, class T>
__global__ void __launch_bounds__(kThreads, kTileBlocks<typename P::Col>) quantize_pair_kernel(PairArgs a, int tiles) {
  auto& shared = shared_memory<PairShared<P, T>>();
  for_each_tile(shared.stages, a.row.x, Source(a.row.shape), tiles, [&](const TilePlace& first) {
    fill_scales(shared.row_scales, a.row, first.matrix);
    fill_scales(shared.col_scales, a.col, first.matrix);
    return PairPass<P, T>(a, shared, first);
  });
}

}  // namespace

cudaError_t launch_quantize_pair(const PairArgs& args, const KernelSpec& row, const KernelSpec& col,
                                 cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  dispatch(row, col, FusedPairs{}, [&](auto p) {
    with_float(args.row.kind, [&](auto t) {
      using P = decltype(p);
      using T = decltype(t);
      const Runs runs(Source(args.row.shape), kTileBlocks<typename P::Col>);
      status = launch_tiles<PairShared<P, T>>(quantize_pair_kernel<P, T>, runs, stream, args);
    });
  });
  return status;
}

}  // namespace jnvfp4
