// How the kernel of the pinned order on Hopper divides products.
#pragma once

#include "../core/arrays.h"
#include "sm90_fused.h"
#include "sm90_grouped.h"

namespace jnvfp4 {

// From so many rows on it is faster to decode b to scratch once than in each tile.
inline constexpr int64_t kPinnedManyRows = 4096;

inline FusedPlan plan_pinned_prepared(bool windows) {
  return {windows ? 128 : 256, 1, false, 0, windows ? Pinned::kWindows : Pinned::kNumbers};
}

// Which tile has the least time: waves of 66 2-CTA clusters, as an H200 has them, times clocks of 16 along K. One H100,
// microseconds by tiles of 64, 128 and 256 rows: 128 x 8192 x 8192 66, 87 and 157, 128 x 14336 x 4096 67, 49 and 87,
// 256 x 14336 x 4096 124, 90 and 86, 256 x 8192 x 8192 119, 87 and 157.
inline FusedPlan plan_pinned(const GemmShape& s) {
  constexpr struct {
    int tokens, clocks;
  } kTiles[] = {{256, 560}, {128, 300}, {64, 215}};
  FusedPlan best{};
  int64_t least = 0;
  for (const auto& tile : kTiles) {
    const FusedPlan plan{tile.tokens, 1, false, 0, Pinned::kCodes};
    const int64_t time = (fused_tiles(s, plan) + 65) / 66 * tile.clocks;
    if (least == 0 || time < least) least = time, best = plan;
  }
  return best;
}

// Plans by the mean group, since no more is known: half a tile of each is idle, and clocks are as above.
inline GroupedTiles plan_pinned_groups(const GroupedShape& s) {
  constexpr int64_t kManyRows = 896, kSomeRows = 48;  // of one group on average
  return {s.rows >= kManyRows * s.groups ? 256 : s.rows >= kSomeRows * s.groups ? 128 : 64, false, true};
}

}  // namespace jnvfp4
