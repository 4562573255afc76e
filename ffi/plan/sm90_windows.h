// How sm90_nvfp4_windows divides a product and lays out its scratch, for operands that have windows on these sides, one
// at least.
#pragma once

#include <cstdint>

#include "scratch.h"
#include "sm90_fused.h"

namespace jnvfp4 {

inline constexpr int kWindowsTokens = 192, kBothWindowsTokens = 128;

// A and B are swapped if only a has windows.
inline FusedPlan plan_windows(const GemmShape& s, bool a_windows, bool b_windows) {
  const bool swapped = !b_windows;
  const TileTime tile =
      a_windows && b_windows ? TileTime{kBothWindowsTokens, 0.41, 2.3, 2.5} : TileTime{kWindowsTokens, 0.48, 2.8, 4.0};
  FusedPlan plan = plan_tiles(fused_shape(s, {0, 1, swapped}), {tile}, false);
  plan.swapped = swapped;
  return plan;
}

// Offsets as in FusedScratch: both operands as 16-bit floats, and factors of both.
struct WindowsScratch {
  int64_t tokens, columns;  // tiles may read past their last rows
  int64_t token_factors, column_factors;
  int64_t sums, flags;
  int64_t bytes;
  int64_t token_rows, column_rows, flag_count;
};
inline WindowsScratch windows_scratch(const GemmShape& shape, const FusedPlan& plan) {
  WindowsScratch s{};
  const auto take = [&](int64_t bytes) { return take_scratch(bytes, &s.bytes); };
  const int64_t depth = fused_depth(shape.depth), windows = depth / kWindow, tiles = fused_tiles(shape, plan.tokens);
  const int64_t tokens = round_up(shape.rows, plan.tokens), columns = round_up(shape.cols, kFusedCols);
  s.token_rows = (shape.batch - 1) * shape.rows + tokens, s.column_rows = (shape.batch - 1) * shape.cols + columns;
  s.tokens = take(s.token_rows * depth * 2), s.columns = take(s.column_rows * depth * 2);
  const bool both = plan.tokens == kBothWindowsTokens;  // tokens have one factor each, if they have no windows
  const int64_t factor = both ? 16 : 4;
  s.token_factors = take(shape.batch * tokens * (both ? windows : 1) * factor);
  s.column_factors = take(shape.batch * columns * windows * factor);
  s.sums = take(fused_sums(tiles, plan) * 4);
  s.flag_count = tiles * (plan.splits - 1) * 4 + 1;
  s.flags = take(s.flag_count * 4);
  return s;
}

}  // namespace jnvfp4
