// The amax of the rotated x and that of x on CUDA, one of each for every group of matrices.
#include "passes.cuh"

namespace jnvfp4 {
namespace {

// Atomic maxima of a warp's tiles, rotated and not: a run lies in one matrix, so it has one amax of each.
template <class T, bool kTransposed>
class AmaxPass {
 public:
  __device__ __forceinline__ AmaxPass(float* rotated, float* plain, const StoredShape& x, const TilePlace& first)
      : to_{reinterpret_cast<unsigned*>(rotated), reinterpret_cast<unsigned*>(plain)},
        rows_left_(x.rows - first.row - (kTransposed ? rows_of_thread() : row_of_thread<false>())),
        cols_left_(x.cols - first.col - (kTransposed ? 2 * pair_of_thread() : block_of_thread<false>() * kBlock)) {}

  __device__ __forceinline__ void operator()(const Tile<T>& tile) {
    uint32_t m[2][2];  // of the rotated x and of x, for each of the thread's two blocks
    if constexpr (kTransposed) {
      Columns<T> x;
      x.load(tile, Columns<T>::place());
      rotated(x).amax(m[0]), x.amax(m[1]);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto x = tile.block(Tile<T>::place_of_block(row_of_thread<false>(), block_of_thread<false>() + j));
        m[0][j] = rotated(x).amax(), m[1][j] = x.amax();
      }
    }
    constexpr int kEach = kTransposed ? 1 : kBlock;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (rows_left_ > 0 && cols_left_ > 0) m_[i] = amax_bits(m_[i], m[i][0]);
      if (rows_left_ > 0 && cols_left_ > kEach) m_[i] = amax_bits(m_[i], m[i][1]);
    }
    rows_left_ -= kTileRows;
  }
  __device__ __forceinline__ void finish(int) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t m = __reduce_max_sync(0xffffffffu, canonical_nan(m_[i]));
      if (threadIdx.x % 32 == 0) atomicMax(to_[i], m);
      m_[i] = 0;
    }
  }

 private:
  unsigned* to_[2];
  int64_t rows_left_, cols_left_;  // from what the thread has on
  uint32_t m_[2] = {};
};

// One launch instead of two memsets.
__global__ void clear_amaxes_kernel(float* rotated, float* plain, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) rotated[i] = plain[i] = 0.0f;
}

// The amaxes start as zeros.
template <class T, bool kTransposed>
__global__ void __launch_bounds__(kThreads, 3) rht_amax_kernel(RhtAmaxArgs a, Runs runs) {
  const StoredShape x(a.shape);
  for_each_tile_of(
      a.x, a.kind, shared_memory<Stages<T>>(), x, runs, [](int64_t) {},
      [&](const TilePlace& first) {
        const int64_t group = quotient(first.matrix * a.shape.rows, a.shape.amax.rows_per_amax);
        return AmaxPass<T, kTransposed>(a.rotated + group, a.plain + group, x, first);
      });
}

}  // namespace

cudaError_t launch_rht_amax(const RhtAmaxArgs& a, cudaStream_t stream) {
  const QuantShape& s = a.shape;
  const int64_t count = all_rows(s) / s.amax.rows_per_amax;
  clear_amaxes_kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      a.rotated, a.plain, count);
  const cudaError_t cleared = cudaGetLastError();
  if (cleared != cudaSuccess) return cleared;
  // Runs of 32 tiles instead of 4: each warp of a run has two atomics to the same two addresses.
  const Runs runs(StoredShape(s), 3, 32);
  cudaError_t status = cudaSuccess;
  with_bf16_or_wide(a.kind, [&](auto t) {
    using T = decltype(t);
    status =
        launch_tiles<Stages<T>>(s.transposed ? rht_amax_kernel<T, true> : rht_amax_kernel<T, false>, runs, stream, a);
  });
  return status;
}

}  // namespace jnvfp4
