// Launch arguments of the Hopper kernel of the pinned order.
#pragma once

#include "../../../plan/sm90_pinned.h"
#include "fused.h"

namespace jnvfp4 {

struct PinnedArgs : FusedArgs {
  // With windows: amaxes as [matrix][tile][window][row], and the reciprocal of the divisor of alpha, in float64, and as
  // the sum of two float32, times 2^28.
  const float *token_amaxes, *column_amaxes;
  float reciprocal, reciprocal_rest;
  double reciprocal64;
};

// Arranges amaxes of `batch` x `rows` rows for each window of the k-steps of 256, as [tile][window][row], followed by
// the kinds (window_sums.h) of each 32 rows; 0 beyond the ends.
cudaError_t launch_sm90_amaxes(const MatmulOperand& x, float* out, int64_t batch, int64_t rows, int tile_rows,
                               int64_t depth, bool of_tokens, cudaStream_t stream);

}  // namespace jnvfp4
