// The kernel of Hopper for operands with an amax for each window: what its launch and what runs before it share.
#pragma once

#include "../kernels.h"

namespace jnvfp4 {

// What is made of the amaxes of an operand: factors, or, if both have windows, fragments of which the tensor cores make
// the products of factors.
enum class FactorsOf {
  kRows,             // float32 [matrix][tile][row]
  kWindows,          // float32 [matrix][tile][window][row]
  kColumnFragments,  // four words a row, [matrix][tile][window][16 rows][lane][2]
  kTokenFragments,   // [matrix][tile][window][32 rows][lane][4]
};

// An operand, and what is made of it in scratch.
struct WindowsOperand {
  MatmulOperand source;
  int64_t matrices, rows, tiles;  // rows and tiles: of one matrix
  int tile_rows;  // a multiple of 32
  FactorsOf factors_of;
  float unscale;  // factors are multiplied by it
  void* numbers;  // rows of float16: decoded, times 2^-14, each eight in the order of Decode
  uint32_t* factors;
};

// `tokens` are rows of a, `columns` rows of b, unless operands are exchanged.
struct WindowsPreparation {
  WindowsOperand tokens, columns;
  int64_t depth;    // a multiple of 64
  uint32_t* flags;  // to lower
  int64_t flag_count;
};
cudaError_t launch_sm90_prepare_windows(const WindowsPreparation& preparation, cudaStream_t stream);

}  // namespace jnvfp4
