// How the kernel of the pinned order on Hopper divides products.
#pragma once

#include "../core/arrays.h"
#include "scratch.h"
#include "sm90_fused.h"
#include "sm90_grouped.h"

namespace jnvfp4 {

// From so many rows on it is faster to decode b to scratch once than in each tile.
inline constexpr int64_t kPinnedManyRows = 4096;

// How the kernel has b: as codes, or decoded to scratch, and then maybe with amaxes of windows.
enum class Pinned : uint8_t { kCodes, kNumbers, kWindows };

// Rows of a in a tile; K is never split.
struct PinnedPlan {
  int tokens;
  Pinned b;
};

inline PinnedPlan plan_pinned_prepared(bool windows) {
  return windows ? PinnedPlan{128, Pinned::kWindows} : PinnedPlan{256, Pinned::kNumbers};
}

// Which tile has the least time: waves of 66 2-CTA clusters, as an H200 has them, times clocks of 16 along K. One H100,
// microseconds by tiles of 64, 128 and 256 rows: 128 x 8192 x 8192 66, 87 and 157, 128 x 14336 x 4096 67, 49 and 87,
// 256 x 14336 x 4096 124, 90 and 86, 256 x 8192 x 8192 119, 87 and 157.
inline PinnedPlan plan_pinned(const GemmShape& s) {
  constexpr struct {
    int tokens, clocks;
  } kTiles[] = {{256, 560}, {128, 300}, {64, 215}};
  PinnedPlan best{};
  int64_t least = 0;
  for (const auto& tile : kTiles) {
    const int64_t time = (fused_tiles(s, tile.tokens) + 65) / 66 * tile.clocks;
    if (least == 0 || time < least) least = time, best = {tile.tokens, Pinned::kCodes};
  }
  return best;
}

// Words for the amaxes that 128 rows have in a window, and what is to be known of each 32 of them.
inline constexpr int kPinnedAmaxes = 128 + 4;

// The right operand as 16-bit floats, and amaxes of both for each window of fused_depth.
struct PinnedScratch : FusedScratch {
  int64_t columns, token_amaxes, column_amaxes;
};
inline PinnedScratch pinned_scratch(const GemmShape& s, const PinnedPlan& plan) {
  PinnedScratch at{fused_scratch(s, {plan.tokens, 1, false}), 0, 0, 0};
  const auto take = [&](bool needed, int64_t bytes) { return take_scratch(needed ? bytes : 0, &at.bytes); };
  const auto amaxes = [&](int64_t rows, int64_t tile) {
    const int64_t windows = round_up(s.depth, kFusedDepth) / kWindow, tiles = round_up(rows, tile) / 128;
    return take(plan.b == Pinned::kWindows, s.batch * tiles * windows * kPinnedAmaxes * 4);
  };
  at.columns = take(plan.b != Pinned::kCodes, s.batch * s.cols * fused_depth(s.depth) * 2);
  at.token_amaxes = amaxes(s.rows, plan.tokens), at.column_amaxes = amaxes(s.cols, kFusedCols);
  return at;
}

// Plans by the mean group, since no more is known: half a tile of each is idle, and clocks are as above.
inline GroupedTiles plan_pinned_groups(const GroupedShape& s) {
  constexpr int64_t kManyRows = 896, kSomeRows = 48;  // of one group on average
  return {s.rows >= kManyRows * s.groups ? 256 : s.rows >= kSomeRows * s.groups ? 128 : 64, false, true};
}

}  // namespace jnvfp4
