// The kernels of Hopper that decode the right operand in registers: what a launch needs.
#pragma once

#include <cuda.h>

#include "../../../plan/sm90_fused.h"
#include "../launchers.h"

namespace jnvfp4 {

struct FusedArgs {
  MatmulArgs g;
  bool exchanged;              // which of the operands is which: not, then tokens are rows of a, columns rows of b
  int tokens, columns;         // of one matrix
  int pairs, matrix_tiles;     // tiles along columns, and of one matrix
  int work_tiles;              // parts of K of all tiles
  int whole, splits;           // the first tiles, which have one, and the parts of the others
  int steps;                   // slots of 256 along K; past its end they hold zeros
  bool each_row;               // whether rows of a matrix of a have an amax each
  bool each_col;               // the same of columns of the result, rows of b
  int a_matrices, b_matrices;  // that share an amax, if rows of one have no several
  float unscale;               // undoes the factors of decoded numbers
  float* sums;                 // of all splits but the last
  uint32_t* flags;             // one for each warpgroup that writes sums: 0 until it has
  uint32_t* counter;           // of work tiles that clusters have taken after their first
  // Of the pinned order with windows: [matrix][tile][window][row], and the reciprocal of the divisor of alpha: in
  // float64, and as the sum of two float32, times 2^28.
  const float *token_amaxes, *column_amaxes;
  float reciprocal, reciprocal_rest;
  double reciprocal64;
};

// Rows of a x 64 along K, rows of b x codes of 256 along K, rows of b x scales of 256 along K.
struct FusedMaps {
  CUtensorMap a, data, scale;
};

// The pinned order, as plan.pinned says.
cudaError_t launch_sm90_pinned(const FusedArgs& args, const FusedMaps& maps, const FusedPlan& plan,
                               cudaStream_t stream);
// Each defined in a file of its own, for one type of decoded numbers.
cudaError_t launch_sm90_f16_fused(const FusedArgs& args, const FusedMaps& maps, int tokens, cudaStream_t stream);
cudaError_t launch_sm90_bf16_fused(const FusedArgs& args, const FusedMaps& maps, int tokens, cudaStream_t stream);

// How elements are ordered along K (sm90/prepare.cu).
enum class Order : uint8_t { kWindows, kBlocks };

// The rows of an operand, decoded, each of `depth` rounded up to 64, with zeros. Lowers the flags, the counter among
// them.
cudaError_t launch_sm90_prepare(const MatmulOperand& x, Order order, void* out, int64_t rows, int64_t depth,
                                uint32_t* flags, int64_t flag_count, cudaStream_t stream);
// amaxes of `batch` x `rows` rows for each window that steps of 256 along K have, as [tile][window][row], and after
// them, for each 32 rows, their kinds (window_sums.h); 0 beyond the ends.
cudaError_t launch_sm90_amaxes(const MatmulOperand& x, float* out, int64_t batch, int64_t rows, int tile_rows,
                               int64_t depth, bool of_tokens, cudaStream_t stream);
// Copies rows of `bytes` to rows `pitch` apart.
cudaError_t launch_sm90_pitch(const void* from, void* to, int64_t rows, int64_t bytes, int64_t pitch,
                              cudaStream_t stream);
// Rows of the right operand at a distance that a tensor map takes: where they lie, or a copy.
struct PitchedRows {
  const void* data;
  int64_t bytes, pitch;
};
cudaError_t pitched_rows(const void* data, int64_t rows, int64_t bytes, void* copy, cudaStream_t stream,
                         PitchedRows* out);

}  // namespace jnvfp4
