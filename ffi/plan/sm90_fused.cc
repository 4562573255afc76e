#include "sm90_fused.h"

#include <algorithm>

#include "scratch.h"

namespace jnvfp4 {

// The least time by a model: microseconds on an H200, whose 132 SMs hold 66 2-CTA clusters.
// Measured with N x K of 14336 x 4096, 4096 x 14336, 8192 x 8192 and 4096 x 4096.
FusedPlan plan_tiles(const GemmShape& s, std::initializer_list<TileTime> tiles, bool mixed) {
  constexpr int64_t kPairs = 66, kMostSums = int64_t{16} << 20, kMostSplits = 8;
  constexpr int64_t kMostParted = 64 * kPairs;
  const int64_t slots = (s.depth + kFusedDepth - 1) / kFusedDepth;
  // Two teams share a part, so that it needs a slot for each.
  const int64_t most = std::clamp<int64_t>(slots / 2, 1, kMostSplits);
  FusedPlan best{};
  double least = 0;
  for (const TileTime& tile : tiles)
    for (int splits = 1; splits <= most; ++splits) {
      FusedPlan plan{tile.tokens, splits, false};
      const int64_t count = fused_tiles(s, plan.tokens), at_once = kPairs / splits * splits;
      plan.whole = mixed && splits > 1 ? count / at_once * at_once : 0;
      const int64_t rest = count - plan.whole;
      // One of many waves is not worth parts.
      if (splits > 1 && (rest == 0 || count > kMostParted || fused_sums(count, plan) * 4 > kMostSums)) continue;
      const auto waves = [&](int64_t items, int64_t depth) {
        const auto windows = static_cast<double>(depth * 4);
        return static_cast<double>((items + at_once - 1) / at_once) * (windows * tile.window + tile.end);
      };
      const double time =
          waves(plan.whole, slots) + waves(rest * splits, (slots + splits - 1) / splits) + (splits - 1) * tile.split;
      if (least == 0 || time < least) least = time, best = plan;
    }
  return best;
}

// The tiles of fewer rows are for few of them, and write only results whose rows are those of a.
FusedPlan plan_fused(const GemmShape& s, bool nvfp4_a) {
  constexpr int kLeast = 128;
  const auto plan_shape = [](const GemmShape& of) {
    return plan_tiles(
        of, {{32, 0.235, 1.9, 1.5}, {64, 0.255, 2.3, 2.1}, {128, 0.348, 2.7, 2.5}, {256, 0.605, 2.6, 6.4}}, true);
  };
  const FusedPlan plan = plan_shape(s);
  if (!nvfp4_a || s.rows < 2 * s.cols || plan.tokens < kLeast) return plan;
  FusedPlan other = plan_shape({s.batch, s.cols, s.rows, s.depth});
  other.swapped = true;
  return other.tokens < kLeast ? plan : other;
}

FusedScratch fused_scratch(const GemmShape& shape, const FusedPlan& plan) {
  FusedScratch s{};
  const auto take = [&](int64_t bytes) { return take_scratch(bytes, &s.bytes); };
  // The copy of rows of `bytes`, if one is needed.
  const auto copy = [&](int64_t bytes) {
    return take(row_pitch(bytes) == bytes ? 0 : shape.batch * shape.cols * row_pitch(bytes));
  };
  const int64_t tiles = fused_tiles(shape, plan.tokens);
  s.padded_rows = (shape.batch - 1) * shape.rows + round_up(shape.rows, plan.tokens);
  s.rows = take(s.padded_rows * fused_depth(shape.depth) * 2);
  s.data = copy(shape.depth / 2);
  s.scale = copy(shape.depth / kBlock);
  s.sums = take(fused_sums(tiles, plan) * 4);
  s.flag_count = (tiles - plan.whole) * (plan.splits - 1) * 4 * fused_teams(plan.tokens) + 1;
  s.flags = take(s.flag_count * 4);
  return s;
}

}  // namespace jnvfp4
