// The kernels of Hopper that decode the right operand in registers: what a launch needs, and the choice of a tile.
#pragma once

#include <cuda.h>

#include "../kernels.h"

namespace jnvfp4 {

struct FusedArgs {
  MatmulArgs g;
  int windows;    // of 64 along K that a thread block sums, a multiple of 4; past the end of K they hold zeros
  bool each_row;  // whether rows of a matrix of a have an amax each
  bool each_col;  // the same of columns of the result, rows of b
};

// Rows of a x 64 along K, rows of b x codes of 64 or 256 along K, rows of b x scales of 256 along K.
struct FusedMaps {
  CUtensorMap a, data, scale;
};

// Columns of the result that the two thread blocks of a pair have.
inline constexpr int kFusedCols = 256;

struct FusedGrid {
  int pairs, matrix_tiles, tiles;  // along columns; of one matrix; in all

  FusedGrid(const GemmShape& s, int tile_rows)
      : pairs(static_cast<int>((s.cols + kFusedCols - 1) / kFusedCols)),
        matrix_tiles(pairs * static_cast<int>((s.rows + tile_rows - 1) / tile_rows)),
        tiles(matrix_tiles * static_cast<int>(s.batch)) {}
};

inline int fused_tile_rows(FusedTile tile) { return tile == FusedTile::k256 ? 256 : 128; }
inline int fused_cluster(FusedTile tile) { return tile == FusedTile::k128Split ? 4 : 2; }

// Each defined in a file of its own, for one type of the rows of a: decoded NVFP4, bfloat16, float16.
cudaError_t launch_sm90_nvfp4_fused_tile(const FusedArgs& args, const FusedMaps& maps, FusedTile tile,
                                         cudaStream_t stream);
cudaError_t launch_sm90_bf16_fused_tile(const FusedArgs& args, const FusedMaps& maps, FusedTile tile,
                                        cudaStream_t stream);
cudaError_t launch_sm90_f16_fused_tile(const FusedArgs& args, const FusedMaps& maps, FusedTile tile,
                                       cudaStream_t stream);

// The decoded rows of a, in fragment order (sm90_decode.cuh), each of `depth` rounded up to 64, with zeros.
cudaError_t launch_sm90_decode_fragments(const MatmulOperand& a, void* out, int64_t rows, int64_t depth,
                                         cudaStream_t stream);
// Copies rows of `bytes` to rows `pitch` apart.
cudaError_t launch_sm90_pitch(const void* from, void* to, int64_t rows, int64_t bytes, int64_t pitch,
                              cudaStream_t stream);

}  // namespace jnvfp4
