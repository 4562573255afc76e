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

// K that a warp of the kernels for few rows on Hopper multiplies at a time. Where K is a multiple of it, they add a
// bias of the shape of the result, and normalize at most kNormRows rows of a. More rows take each of their CTAs longer
// than XLA's norm takes: at 16 rows a step of Llama 3 8B took 13 % longer (docs/tried.md).
inline constexpr int64_t kSmallUnit = 256, kNormRows = 4;

extern const KernelTable<MatmulProblem> kMatmulKernels;

// Whether a GPU has FP4 tensor cores that sm100_cublaslt_nvfp4 is for, and what they lack to be used: a library. Empty
// if nothing.
bool has_block_scaled(int capability);
std::string no_block_scaled(const Device& device);

}  // namespace jnvfp4
