// Arguments of the kernel that prepares operands with an amax per window, on Hopper.
#pragma once

#include "../../../plan/sm90_windows.h"
#include "../launchers.h"

namespace jnvfp4 {

// Layout of an operand's factors, which are made of its amaxes.
enum class FactorsOf {
  kRows,          // [matrix][tile][row]: without windows
  kWindows,       // [matrix][tile][window][row]
  kColumnPieces,  // as kWindows, in 16 bytes each, for the tensor cores (sm90/prepare.cu)
  kTokenPieces,   // as kColumnPieces, for the other side
};

// An operand, and the scratch that it is prepared in.
struct WindowsOperand {
  MatmulOperand source;
  int64_t matrices, rows, tiles;  // rows and tiles: of one matrix
  int tile_rows;
  FactorsOf factors_of;
  float unscale;  // factors are multiplied by it
  void* numbers;  // rows of float16: decoded, times 2^-14, each eight in the order of Decode
  void* factors;
};

// `tokens` are rows of a, `columns` rows of b, unless operands are swapped.
struct WindowsPreparation {
  WindowsOperand tokens, columns;
  int64_t depth;    // a multiple of 64
  uint32_t* flags;  // to lower
  int64_t flag_count;
};
cudaError_t launch_sm90_prepare_windows(const WindowsPreparation& preparation, cudaStream_t stream);

}  // namespace jnvfp4
