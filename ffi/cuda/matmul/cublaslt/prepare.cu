// The operands of the block-scaled product of Blackwell, in scratch. These kernels use no instruction of Blackwell.
#include "../../device.cuh"
#include "prepare.h"

namespace jnvfp4 {
namespace {

constexpr int kTilesAtOnce = 8;  // side by side: a CTA reads 32 neighbouring bytes of each row
static_assert(kThreads == 32 * kTilesAtOnce, "a thread has 16 bytes of a tile");

__host__ __device__ int64_t tile_groups(const ScaleTiles& t) {
  return (scale_tile_cols(t.cols) + kTilesAtOnce - 1) / kTilesAtOnce;
}
__host__ __device__ int64_t tile_blocks(const ScaleTiles& t) {
  return t.matrices * scale_tile_rows(t.rows) * tile_groups(t);
}

// Field by field, since the address of an argument would put it into memory.
__device__ __forceinline__ ScaleTiles of_block(const ScaleTiles& a, const ScaleTiles& b) {
  const bool y = blockIdx.y;
  return {y ? b.scale : a.scale, y ? b.tiles : a.tiles, y ? b.matrices : a.matrices, y ? b.rows : a.rows,
          y ? b.cols : a.cols};
}
__device__ __forceinline__ PaddedCodes of_block(const PaddedCodes& a, const PaddedCodes& b) {
  const bool y = blockIdx.y;
  return {y ? b.data : a.data,     y ? b.out : a.out,           y ? b.matrices : a.matrices,    y ? b.rows : a.rows,
          y ? b.pieces : a.pieces, y ? b.out_rows : a.out_rows, y ? b.out_pieces : a.out_pieces};
}

// Grid: tiles, which are strided over, and the two operands. The first CTA also makes the factors.
__global__ void __launch_bounds__(kThreads) tile_scales_kernel(ScaleTiles a, ScaleTiles b, ProductFactors factors) {
  const ScaleTiles t = of_block(a, b);
  const int64_t groups = tile_groups(t), tile_rows = scale_tile_rows(t.rows), count = tile_blocks(t);
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t row = quotient(i, groups), matrix = quotient(row, tile_rows);
    const int64_t tile_col = (i - row * groups) * kTilesAtOnce + threadIdx.x % kTilesAtOnce;
    if (tile_col >= scale_tile_cols(t.cols)) continue;
    const TilePart part{matrix, row - matrix * tile_rows, tile_col, static_cast<int>(threadIdx.x) / kTilesAtOnce};
    *reinterpret_cast<uint4*>(tile_part(t, part)) =
        make_uint4(tile_word(t, part, 0), tile_word(t, part, 1), tile_word(t, part, 2), tile_word(t, part, 3));
  }
  if (blockIdx.x == 0 && blockIdx.y == 0)
    for (int64_t i = threadIdx.x; i < factors.count(); i += kThreads) factors.factors[i] = product_factor(factors, i);
}

__global__ void __launch_bounds__(kThreads) pad_codes_kernel(PaddedCodes a, PaddedCodes b) {
  const PaddedCodes c = of_block(a, b);
  for (int64_t i = thread_index(); i < c.count(); i += thread_count())
    static_cast<uint64_t*>(c.out)[i] = padded_piece(c, i);
}

}  // namespace

cudaError_t launch_sm100_prepare(const PrepareArgs& p, cudaStream_t stream) {
  const int64_t blocks = std::max(tile_blocks(p.a_scales), tile_blocks(p.b_scales));
  tile_scales_kernel<<<dim3(grid_for(blocks, 1), 2), kThreads, 0, stream>>>(p.a_scales, p.b_scales, p.factors);
  const int64_t pieces = std::max(p.a_codes.count(), p.b_codes.count());
  if (pieces) pad_codes_kernel<<<dim3(grid_for(pieces, kThreads), 2), kThreads, 0, stream>>>(p.a_codes, p.b_codes);
  return cudaGetLastError();
}

}  // namespace jnvfp4
