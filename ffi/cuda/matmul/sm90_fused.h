// The kernels of Hopper that decode the right operand in registers: what a launch needs.
#pragma once

#include <cuda.h>

#include "../kernels.h"

namespace jnvfp4 {

// The left operand that the kernel itself prepares while it multiplies: of one matrix, in pieces of 8 rows and 256
// along K. Of the first `round` rows `ahead` slots are prepared before it starts. Rows of a round follow each other,
// then slots, then rounds: the order in which they are needed. The slots of parts of K take turns.
struct FusedRest {
  const void* data;
  const uint8_t* scale;
  uint4* out;
  int rows, round, slots;  // slots of K, 0 if all is prepared ahead
  int ahead, parts;
  uint32_t* next;   // a count of pieces that are begun
  uint32_t* ready;  // counts of those that are done: of 128 rows, and of each slot
};

struct FusedArgs {
  MatmulArgs g;
  bool exchanged;              // which of the operands is which: not, then tokens are rows of a, columns rows of b
  int tokens, columns;         // of one matrix
  int pairs, matrix_tiles;     // tiles along columns, and of one matrix
  int begin, items;            // of this launch; parts of K of all tiles
  int whole, splits;           // the first tiles, which have one, and the parts of the others
  int slots;                   // of 256 along K; past the end of K they hold zeros
  bool each_row;               // whether rows of a matrix of a have an amax each
  bool each_col;               // the same of columns of the result, rows of b
  int a_matrices, b_matrices;  // that share an amax, if rows of one have no several
  float unscale;               // undoes the factors of decoded numbers
  float* sums;                 // of all splits but the last
  uint32_t* flags;             // one for each warpgroup that writes sums: 0 until it has
  FusedRest rest;
};

// Rows of a x 64 along K, rows of b x codes of 256 along K, rows of b x scales of 256 along K.
struct FusedMaps {
  CUtensorMap a, data, scale;
};

// Each defined in a file of its own, for one type of decoded numbers.
cudaError_t launch_sm90_f16_fused(const FusedArgs& args, const FusedMaps& maps, int tokens, cudaStream_t stream);
cudaError_t launch_sm90_bf16_fused(const FusedArgs& args, const FusedMaps& maps, int tokens, cudaStream_t stream);

// Of the left operand: `runs` times `windows` windows of the first rows, which begin `stride` windows apart.
struct PreparedPart {
  int64_t rows, windows, runs, stride;
};
// Makes them, decoded, in fragment order (sm90_prepare.cu); rows are `depth` rounded up to 64 apart, with zeros. Lowers
// the flags.
cudaError_t launch_sm90_prepare(const MatmulOperand& a, void* out, int64_t depth, const PreparedPart& part,
                                uint32_t* flags, int64_t flag_count, cudaStream_t stream);
// Copies rows of `bytes` to rows `pitch` apart.
cudaError_t launch_sm90_pitch(const void* from, void* to, int64_t rows, int64_t bytes, int64_t pitch,
                              cudaStream_t stream);

}  // namespace jnvfp4
