// How sm80_nvfp4_blocks lays out its scratch.
#pragma once

#include <cstdint>

#include "../core/arrays.h"
#include "scratch.h"

namespace jnvfp4 {

// Offsets of both operands as float16.
struct BlocksScratch {
  int64_t a, b, bytes;
};
inline BlocksScratch blocks_scratch(const GemmShape& s) {
  BlocksScratch at{};
  at.a = take_scratch(s.batch * s.rows * s.depth * 2, &at.bytes);
  at.b = take_scratch(s.batch * s.cols * s.depth * 2, &at.bytes);
  return at;
}

}  // namespace jnvfp4
