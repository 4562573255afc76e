// How sm100_cublaslt_nvfp4 lays out its scratch.
#pragma once

#include <cstdint>

#include "../core/arrays.h"
#include "../core/scale_tiles.h"
#include "scratch.h"

namespace jnvfp4 {

inline constexpr int64_t kBlockScaledDepth = 32, kBlockScaledCols = 16;
// Workspace that cuBLASLt may use. The size limits its choice of an algorithm, so it is the same on every GPU: what
// NVIDIA recommends for Hopper.
inline constexpr int64_t kCublasLtWorkspace = int64_t{32} << 20;

// Offsets, multiples of 256, and the sizes that the library is given: rows of 16 bytes at least, and a result whose
// rows begin at multiples of 16 bytes.
struct BlockScaledScratch {
  int64_t depth, cols;         // K and N, padded
  int64_t a_codes, b_codes;    // where they are padded
  int64_t a_scales, b_scales;  // in tiles
  int64_t factors;             // of each matrix, and a zero
  int64_t sums;                // float32, where the result cannot hold them
  int64_t workspace, bytes;
};
inline BlockScaledScratch block_scaled_scratch(const GemmShape& shape, Float out) {
  BlockScaledScratch s{};
  const auto take = [&](int64_t bytes) { return take_scratch(bytes, &s.bytes); };
  s.depth = round_up(shape.depth, kBlockScaledDepth), s.cols = round_up(shape.cols, kBlockScaledCols);
  const bool deeper = s.depth != shape.depth, wider = s.cols != shape.cols;
  s.a_codes = take(deeper ? shape.batch * shape.rows * s.depth / 2 : 0);
  s.b_codes = take(deeper || wider ? shape.batch * s.cols * s.depth / 2 : 0);
  s.a_scales = take(shape.batch * tiled_scale_bytes(shape.rows, shape.depth / kBlock));
  s.b_scales = take(shape.batch * tiled_scale_bytes(shape.cols, shape.depth / kBlock));
  s.factors = take((shape.batch + 1) * 4);
  s.sums = take(out == Float::kF32 && !wider ? 0 : shape.batch * shape.rows * s.cols * 4);
  s.workspace = take(kCublasLtWorkspace);
  return s;
}

}  // namespace jnvfp4
