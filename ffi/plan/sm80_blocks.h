// How sm80_nvfp4_blocks lays out its scratch.
#pragma once

#include <cstdint>

#include "../core/arrays.h"
#include "scratch.h"

namespace jnvfp4 {

inline constexpr int kBlocksTile = 128;  // rows and columns of a CTA

// Offsets: both operands as float16, and scales of a as float32.
struct BlocksScratch {
  int64_t a, b, scales, bytes;
};
inline BlocksScratch blocks_scratch(const GemmShape& s) {
  BlocksScratch at{};
  at.a = take_scratch(s.batch * s.rows * s.depth * 2, &at.bytes);
  at.b = take_scratch(s.batch * s.cols * s.depth * 2, &at.bytes);
  const int64_t scales = round_up(s.depth, kWindow) / kBlock;
  at.scales = take_scratch(s.batch * round_up(s.rows, kBlocksTile) * scales * 4, &at.bytes);
  return at;
}

}  // namespace jnvfp4
