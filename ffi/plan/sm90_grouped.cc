#include "sm90_grouped.h"

#include <algorithm>

#include "scratch.h"
#include "sm90_fused.h"

namespace jnvfp4 {

// Groups have different sizes, so the mean says little about one. What counts is how many tiles are not full, and for
// few rows how often a matrix is decoded. One H200, W4A4, microseconds, for 8 groups of 14336 x 4096 and 64 of 2048 x
// 7168:
// - 32 rows in all: few rows 79 and 23, tiles of 32 rows 101 and 35.
// - 128 rows: few rows 160 and 82, tiles of 64 rows 110 and 110.
// - 1024 rows: tiles of 64 rows 318 and 226, of 256 with tails 251 and 239.
// - 4096 rows: tiles of 256 rows 694 and 401, with tails 670 and 343, tiles of 64 356 for the second.
GroupedTiles plan_grouped_tiles(const GroupedShape& s) {
  constexpr int64_t kAlwaysFew = 16, kManyRows = 48;  // rows of all groups; of one on average
  if (s.rows <= kAlwaysFew || (s.rows <= kGroupedFewRows && s.rows <= 4 * s.groups)) return {0};
  if (s.rows >= kManyRows * s.groups) return {kGroupedManyTokens, true};
  return {kGroupedTailTokens};
}

GroupedScratch grouped_scratch(const GroupedShape& shape, const GroupedTiles& tiles) {
  GroupedScratch s{};
  if (tiles.tokens == 0) return s;
  const auto take = [&](int64_t bytes) { return take_scratch(bytes, &s.bytes); };
  const auto copy = [&](int64_t bytes) {
    return take(row_pitch(bytes) == bytes ? 0 : shape.groups * shape.cols * row_pitch(bytes));
  };
  const int64_t tokens = tiles.tokens, depth = fused_depth(shape.depth);
  s.padded_rows = shape.rows + tokens;
  s.rows = take(s.padded_rows * depth * 2);
  s.data = copy(shape.depth / 2);
  s.scale = copy(shape.depth / kBlock);
  const int64_t teams = fused_teams(tiles.tokens);
  s.sums = take(tiles.pinned ? 0 : int64_t{kGroupedPairs} * tokens * kFusedCols * teams * 4);
  s.flag_count = tiles.pinned ? 0 : int64_t{kGroupedPairs} * 4 * teams * 2;
  s.flags = take(s.flag_count * 4);
  s.max_tiles = shape.rows / tokens + std::min(shape.rows, shape.groups);
  s.list = take((s.max_tiles + 2) * 16);
  s.max_tails = tiles.tails && tokens == kGroupedManyTokens ? std::min(shape.rows, shape.groups) : 0;
  s.tails = take(s.max_tails ? (s.max_tails + 2) * 16 : 0);
  return s;
}

}  // namespace jnvfp4
