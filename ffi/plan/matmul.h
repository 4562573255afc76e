// Which kernel multiplies.
#pragma once

#include <cstdint>
#include <string>

#include "../core/arrays.h"
#include "table.h"

namespace jnvfp4 {

struct MatmulProblem {
  enum class Left : uint8_t { kNvfp4, kBf16, kF16 };

  GemmShape shape;
  Left a;
  bool windows;  // an operand has one amax for each 64 elements
  Float out;
  bool pinned;  // the sum along K must have the order of docs/numerics.md
};

extern const KernelTable<MatmulProblem> kMatmulKernels;

// Whether a GPU has FP4 tensor cores that sm100_cublaslt_nvfp4 is for, and what they lack to be used: a library. Empty
// if nothing.
bool has_block_scaled(int capability);
std::string no_block_scaled(const Device& device);

}  // namespace jnvfp4
