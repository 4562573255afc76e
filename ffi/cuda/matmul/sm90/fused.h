// Launch arguments of the Hopper kernels that decode the right operand in registers.
#pragma once

#include <cuda.h>

#include "../../../plan/sm90_fused.h"
#include "../launchers.h"
#include "maps.h"

namespace jnvfp4 {

struct FusedArgs {
  MatmulArgs g;
  bool swapped;                     // whether A and B are: then tokens are rows of b, columns rows of a
  int tokens, columns;              // extents of one matrix
  int column_tiles, matrix_tiles;   // tiles along columns, and of one matrix
  int num_work_tiles;               // splits of all tiles
  int num_unsplit, num_splits;      // tiles, the first ones, whose K is not split; splits of each other one
  int k_steps;                      // slots of 256 along K; past its end they hold zeros
  bool amax_per_row, amax_per_col;  // whether rows of a matrix of a, or of b, have an amax each
  int matrices_per_a_amax, matrices_per_b_amax;  // matrices that share an amax otherwise
  float unscale;                                 // undoes the factors of decoded numbers
  float* split_sums;                             // of all splits but the last
  uint32_t* split_flags;                         // one for each warpgroup that writes sums: 0 until it has
  uint32_t* counter;                             // work-tile counter, without the initial tiles
};
// Returns those of a plan, and cudaErrorInvalidConfiguration if a result is larger than any memory.
cudaError_t fused_args(const MatmulArgs& g, const FusedPlan& plan, const FusedScratch& at, void* scratch,
                       FusedArgs* args);

// Tensor maps, whose boxes are rows of a x 64 along K, rows of b x codes and x scales of 256 along K.
struct FusedMaps {
  CUtensorMap a, data, scale;
};

// Launch the kernel for one type of decoded numbers; each is defined in a file of its own.
cudaError_t launch_sm90_f16_fused(const FusedArgs& args, const FusedMaps& maps, int tokens, cudaStream_t stream);
cudaError_t launch_sm90_bf16_fused(const FusedArgs& args, const FusedMaps& maps, int tokens, cudaStream_t stream);

// Order of elements along K (sm90/prepare.cu).
enum class Order : uint8_t { kWindows, kBlocks };

// Decodes the rows of an operand, each of `depth` rounded up to 64 with zeros. Lowers the flags and the counter.
cudaError_t launch_sm90_prepare(const MatmulOperand& x, Order order, void* out, int64_t rows, int64_t depth,
                                uint32_t* flags, int64_t flag_count, cudaStream_t stream);
// Copies rows of `bytes` to rows `pitch` apart.
cudaError_t launch_sm90_pitch(const void* from, void* to, int64_t rows, int64_t bytes, int64_t pitch,
                              cudaStream_t stream);
// Returns rows at a pitch that a tensor map takes: in place, or a copy.
cudaError_t pitched_rows(const void* data, int64_t rows, int64_t bytes, void* copy, cudaStream_t stream,
                         PitchedRows* out);

}  // namespace jnvfp4
