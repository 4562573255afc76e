// How the fused kernels of Hopper divide a product and lay out their scratch. Only the shape decides, so that sums are
// the same on every GPU.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "../core/arrays.h"

namespace jnvfp4 {

// Rows of a in a tile, and split-K for tiles that are too few for all SMs.
struct FusedPlan {
  int tokens, splits;
  bool swapped;       // b is decoded to scratch instead of a, because it is smaller: its rows are then those of a tile
  int64_t whole = 0;  // the first tiles, whose K has no parts: as many as keep all SMs of an H200 at work
};
FusedPlan plan_fused(const GemmShape& shape, bool nvfp4_a);

// Microseconds of a tile: a window of 64 along K, its epilogue, and the partial sums of a split of K.
struct TileTime {
  int tokens;
  double window, end, split;
};
// Returns the fastest of these tiles. `mixed`: only the tiles of the wave quantization tail may be split.
FusedPlan plan_tiles(const GemmShape& shape, std::initializer_list<TileTime> tiles, bool mixed);

// Groups of warps of a CTA that share K.
JNVFP4_HD constexpr int fused_teams(int tokens) { return tokens <= 64 ? 2 : 1; }

// Columns of the result that a tile has, and what comes along K at a time.
inline constexpr int64_t kFusedCols = 256, kFusedDepth = 256;
inline int64_t fused_tiles(const GemmShape& s, int tokens) {
  return s.batch * ((s.rows + tokens - 1) / tokens) * ((s.cols + kFusedCols - 1) / kFusedCols);
}
// K of the prepared left operand.
inline int64_t fused_depth(int64_t depth) { return (depth + kWindow - 1) / kWindow * kWindow; }
// Floats of all splits but the last.
inline int64_t fused_sums(int64_t tiles, const FusedPlan& plan) {
  return (tiles - plan.whole) * (plan.splits - 1) * plan.tokens * kFusedCols * fused_teams(plan.tokens);
}
// Returns how many 2-CTA clusters begin with the work tile of their index, and take others then: `whole` unsplit tiles
// come first, then `splits` splits of each other one. A split waits for those before it, which running clusters must
// have: clusters start in order, and take tiles in order, so all splits of a tile are one or the other.
JNVFP4_HD constexpr int initial_tiles(int clusters, int whole, int splits) {
  return clusters <= whole ? clusters : whole + (clusters - whole) / splits * splits;
}
// As the kernels see it: the operand that is decoded to scratch is the left one.
inline GemmShape fused_shape(const GemmShape& s, const FusedPlan& plan) {
  return plan.swapped ? GemmShape{s.batch, s.cols, s.rows, s.depth} : s;
}

// Offsets in the scratch: what is used begins at a multiple of 256.
struct FusedScratch {
  int64_t rows;         // the left operand as 16-bit floats; tiles may read past its last row
  int64_t data, scale;  // copies of the right operand's, if the distance of its rows is no multiple of 16 bytes
  int64_t sums, flags;  // of all splits but the last; the last flag is the counter of sm90/scheduler.cuh
  int64_t bytes;        // in all
  int64_t padded_rows, flag_count;
};
FusedScratch fused_scratch(const GemmShape& shape, const FusedPlan& plan);

}  // namespace jnvfp4
