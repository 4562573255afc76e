// How the kernels of Hopper divide a grouped product, as far as the host knows it: rows of all groups together, not of
// each.
#pragma once

#include <cstdint>

#include "../core/arrays.h"

namespace jnvfp4 {

// 2-CTA clusters of an H200. A last wave of tiles that leaves more than half of them idle is split along K.
inline constexpr int kGroupedPairs = 66, kGroupedMaxSplits = 8;

// Rows of a for which there is a kernel of few rows.
inline constexpr int kGroupedFewRows = 128;

// Rows of the tiles that may leave tails, and of those that take them.
inline constexpr int kGroupedManyTokens = 256, kGroupedTailTokens = 64;

// `tokens`: rows of a in a tile; 0 for the kernel of few rows. With 256, tiles of up to 128 rows are done faster.
struct GroupedTiles {
  int tokens;
  bool tails = false;   // whether the last rows of a group, if they are few, have tiles of fewer rows in another kernel
  bool pinned = false;  // the pinned order, in which K has no parts
};
GroupedTiles plan_grouped_tiles(const GroupedShape& shape);

// Offsets in the scratch, multiples of 256.
struct GroupedScratch {
  int64_t rows;         // the left operand as 16-bit floats; tiles may read past its last row
  int64_t data, scale;  // copies of the right operand's, if the distance of its rows is no multiple of 16 bytes
  int64_t sums, flags;  // of all splits but the last
  int64_t list, tails;  // of tiles, made on the device
  int64_t bytes;        // in all
  int64_t padded_rows, flag_count, max_tiles, max_tails;
};
GroupedScratch grouped_scratch(const GroupedShape& shape, const GroupedTiles& tiles);

}  // namespace jnvfp4
