// The producers on CUDA through tiles in shared memory: 16x16 tiles, and both orientations in one pass.
#include "producers.cuh"
#include "tile.cuh"

namespace jnvfp4 {
namespace {

template <class Row, class Col>
struct Shared {
  Tile<Bf16> tile;
  SharedScales<Row> row_scales;
  SharedScales<Col> col_scales;
  Held held;
};
template <class Row>
struct Shared<Row, void> {
  Tile<Bf16> tile;
  SharedScales<Row> row_scales;
};

// Computes the values of a tile, zeros outside the matrix, and stores them where they are wanted.
__device__ __forceinline__ void fill_tile(Tile<Bf16>& tile, const ProduceArgs& a, const TilePlace& at) {
  constexpr int kVectors = kTileCols / 8;
  const Sources& s = a.sources;
  const int c = threadIdx.x % kVectors;
  const int64_t col = at.col + c * 8;
#pragma unroll 1
  for (int r = threadIdx.x / kVectors; r < kTileRows; r += kThreads / kVectors) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (at.row + r < s.rows && col < s.cols) {
      const int64_t row = at.matrix * s.rows + at.row + r;
      v = produce_eight(s, a.factors, row, col);
      if (a.values) *reinterpret_cast<uint4*>(a.values + row * s.cols + col) = stored_values(v);
    }
    reinterpret_cast<uint4*>(tile.row(r))[c] = v;
  }
}

// Along rows as Row says, along columns as Col; not at all if that is void.
template <class Row, class Col>
__global__ void __launch_bounds__(kThreads, kTileBlocks<Row>) produce_tiles_kernel(ProduceArgs a, int tiles) {
  auto& shared = shared_memory<Shared<Row, Col>>();
  const Sources& s = a.sources;
  const int64_t step = static_cast<int64_t>(tiles) * kTileRows;
  for (int64_t matrix = blockIdx.z; matrix < s.batch; matrix += gridDim.z) {
    fill_scales(shared.row_scales, a.row, matrix);
    if constexpr (!std::is_void_v<Col>) fill_scales(shared.col_scales, a.col, matrix);
    for (int64_t row = blockIdx.y * step; row < s.rows; row += gridDim.y * step) {
      const int64_t left = s.rows - row < step ? s.rows - row : step;
      const int count = static_cast<int>(left + kTileRows - 1) / kTileRows;
      TilePlace at{matrix, row, static_cast<int64_t>(blockIdx.x) * kTileCols};
      const auto run = [&](const auto& work) {
        for (int i = 0; i < count; ++i, at.row += kTileRows) {
          fill_tile(shared.tile, a, at);
          __syncthreads();
          work(shared.tile, i);
          __syncthreads();  // before the next tile overwrites this one
        }
      };
      RowsPass<Row, Bf16> rows(a.row, shared.row_scales, at);
      if constexpr (std::is_void_v<Col>) {
        run([&](const Tile<Bf16>& tile, int) { rows(tile); });
      } else {
        ColumnsPass<Col, Bf16> columns(a.col, shared.col_scales, shared.held, at);
        run([&](const Tile<Bf16>& tile, int i) {
          rows(tile);
          columns(tile);
          if (i % kTilesHeld != kTilesHeld - 1 && i + 1 != count) return;
          __syncthreads();  // what is held is there
          columns.finish(i % kTilesHeld + 1);
        });
      }
    }
  }
}

template <class Row, class Col>
cudaError_t launch(const ProduceArgs& a, cudaStream_t stream) {
  const Runs runs(Source(a.row.shape), kTileBlocks<Row>);
  return launch_tiles<Shared<Row, Col>>(produce_tiles_kernel<Row, Col>, runs, stream, a);
}

}  // namespace

bool launch_produce_tiles(const ProduceArgs& args, const KernelSpec& spec, cudaStream_t stream, cudaError_t* status) {
  return dispatch(spec, SupportedSpecs{}, [&](auto s) {
    using S = decltype(s);
    if constexpr (S::spec.block_rows == kBlock) *status = launch<S, void>(args, stream);
  });
}

cudaError_t launch_produce_pair(const ProduceArgs& args, const KernelSpec& row, const KernelSpec& col,
                                cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  dispatch(row, col, FusedPairs{},
           [&](auto p) { status = launch<typename decltype(p)::Row, typename decltype(p)::Col>(args, stream); });
  return status;
}

}  // namespace jnvfp4
