// The amax of the rotated x on CUDA, one for each group of matrices.
#include "passes.cuh"

namespace jnvfp4 {
namespace {

// Atomic maxima of a warp's rotated tiles: a run lies in one matrix, so it has one amax.
template <class T, bool kTransposed>
class AmaxPass {
 public:
  __device__ __forceinline__ AmaxPass(float* amax, const StoredShape& x, const TilePlace& first)
      : amax_(reinterpret_cast<unsigned*>(amax)),
        rows_left_(x.rows - first.row - (kTransposed ? rows_of_thread() : row_of_thread<false>())),
        cols_left_(x.cols - first.col - (kTransposed ? 2 * pair_of_thread() : block_of_thread<false>() * kBlock)) {}

  __device__ __forceinline__ void operator()(const Tile<T>& tile) {
    uint32_t m[2];
    if constexpr (kTransposed) {
      Columns<T> x;
      x.load(tile, Columns<T>::place());
      rotated(x).amax(m);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j)
        m[j] =
            rotated(tile.block(Tile<T>::place_of_block(row_of_thread<false>(), block_of_thread<false>() + j))).amax();
    }
    constexpr int kEach = kTransposed ? 1 : kBlock;
    if (rows_left_ > 0 && cols_left_ > 0) m_ = amax_bits(m_, m[0]);
    if (rows_left_ > 0 && cols_left_ > kEach) m_ = amax_bits(m_, m[1]);
    rows_left_ -= kTileRows;
  }
  __device__ __forceinline__ void finish(int) {
    const uint32_t m = __reduce_max_sync(0xffffffffu, canonical_nan(m_));
    if (threadIdx.x % 32 == 0) atomicMax(amax_, m);
    m_ = 0;
  }

 private:
  unsigned* amax_;
  int64_t rows_left_, cols_left_;  // from what the thread has on
  uint32_t m_ = 0;
};

// `amax` starts as zeros.
template <class T, bool kTransposed>
__global__ void __launch_bounds__(kThreads, 3) rht_amax_kernel(RhtAmaxArgs a, Runs runs) {
  const StoredShape x(a.shape);
  for_each_tile_of(
      a.x, a.kind, shared_memory<Stages<T>>(), x, runs, [](int64_t) {},
      [&](const TilePlace& first) {
        const int64_t group = quotient(first.matrix * a.shape.rows, a.shape.amax.rows_per_amax);
        return AmaxPass<T, kTransposed>(a.amax + group, x, first);
      });
}

}  // namespace

cudaError_t launch_rht_amax(const RhtAmaxArgs& a, cudaStream_t stream) {
  const QuantShape& s = a.shape;
  const cudaError_t cleared = cudaMemsetAsync(a.amax, 0, all_rows(s) / s.amax.rows_per_amax * sizeof(float), stream);
  if (cleared != cudaSuccess) return cleared;
  const Runs runs(StoredShape(s), 3);
  cudaError_t status = cudaSuccess;
  with_bf16_or_wide(a.kind, [&](auto t) {
    using T = decltype(t);
    status =
        launch_tiles<Stages<T>>(s.transposed ? rht_amax_kernel<T, true> : rht_amax_kernel<T, false>, runs, stream, a);
  });
  return status;
}

}  // namespace jnvfp4
