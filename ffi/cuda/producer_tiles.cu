// The producers on CUDA through tiles in shared memory: 16x16 tiles, and both orientations in one pass.
#include "producers.cuh"
#include "tile.cuh"

namespace jnvfp4 {
namespace {

// Computes the values of a tile, zeros outside the matrix, and stores them where they are wanted.
__device__ __forceinline__ void fill_tile(Tile<Bf16>& tile, const ProduceArgs& a, const TilePlace& at) {
  constexpr int kVectors = kTile / 8;
  const Sources& s = a.sources;
  const int c = threadIdx.x % kVectors * 8;
  const int64_t col = at.col + c;
#pragma unroll 1
  for (int r = threadIdx.x / kVectors; r < kTile; r += kThreads / kVectors) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (at.row + r < s.rows && col < s.cols) {
      const int64_t row = at.matrix * s.rows + at.row + r;
      v = produce_eight(s, a.factors, row, col);
      if (a.values) *reinterpret_cast<uint4*>(a.values + row * s.cols + col) = stored_values(v);
    }
    tile.vector(r, c) = v;
  }
}

// Along rows as Row says, along columns as Col; not at all if that is void.
template <class Row, class Col>
__global__ void __launch_bounds__(kThreads) produce_tiles_kernel(ProduceArgs a) {
  __shared__ Tile<Bf16> tile;
  __shared__ Exchange exchange;
  for_each_tile(a.sources.batch, a.sources.rows, [&](const TilePlace& at) {
    fill_tile(tile, a, at);
    __syncthreads();
    quantize_tile<Row, Bf16, false>(tile, a.row, at, exchange);
    if constexpr (!std::is_void_v<Col>) quantize_tile<Col, Bf16, true>(tile, a.col, at, exchange);
    __syncthreads();  // before the next tile overwrites this one
  });
}

template <class Row, class Col>
cudaError_t launch(const ProduceArgs& a, cudaStream_t stream) {
  const Sources& s = a.sources;
  produce_tiles_kernel<Row, Col><<<tile_grid(s.batch, s.rows, s.cols), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
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
