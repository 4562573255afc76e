// The list of tiles of a grouped product, which a kernel makes from the sizes of the groups.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "../../../core/numerics.h"
#include "../../../plan/sm90_fused.h"
#include "../../../plan/sm90_grouped.h"

namespace jnvfp4 {

// Rows [row, end) of a, of which a tile has the first, and the group that has them.
struct GroupedTile {
  int group, row, end, unused;
};
// In front of the tiles. Those with few rows come last: the n-th is the n-th from the end of the list's memory.
struct GroupedHeader {
  int full, tiles;        // tiles of many rows, and all
  int whole, work_tiles;  // what a 2-CTA cluster computes at a time: whole tiles, then parts of the others
  int splits, rows;       // parts of each of the last tiles; rows of all groups
  int own;                // clusters that begin with the work tile of their number
  uint32_t counter;       // of work tiles that clusters have taken after these
};

// What the list is made from, and where.
struct GroupedListing {
  const int32_t* sizes;
  int groups, rows;
  // At most `tail` rows that are left of a group by tiles of 256 are not in the list, or are alone in it.
  int tail;
  bool of_tails;
  int tokens, few;        // of a tile; tiles with at most `few` come last
  int pairs, slots;       // tiles along the columns; steps along K
  int clusters;           // of the launch
  float slot, split;      // what a step takes, and what each part of K costs
  GroupedHeader* header;  // and the tiles
  int most_tiles;
  uint32_t* flags;
  int flag_count;
};

// For tiles of all rows, and, unless its header is null, for tails.
struct GroupedListings {
  GroupedListing rows, tails;
};

// ---------------------------------------------------------------- parts of K
// Of the tiles that fill no wave of pairs, those of an H200 on every GPU, so that sums are the same. The least time has
// the least key, which is ~0 where K cannot have the parts.
JNVFP4_HD uint32_t key_of_parts(const GroupedListing& a, int tiles, int splits) {
  const int slots = (a.slots + splits - 1) / splits;
  const bool can = splits == 1 || (splits <= kGroupedMostParts && 2 * splits <= a.slots &&
                                   tiles * splits <= kGroupedPairs / splits * splits);
  const float time = static_cast<float>(slots) * a.slot + static_cast<float>(splits - 1) * a.split;
  // Times are positive, so their bits have their order; the last bits say which one it is.
  return can ? (bits_of(time) & ~31u) | static_cast<uint32_t>(splits - 1) : ~0u;
}
JNVFP4_HD int parts_of_key(uint32_t key) { return static_cast<int>(key & 31u) + 1; }

// Clusters of a launch, of those that a GPU has room for: no more than there may be work tiles.
inline int clusters_of_list(int room, int64_t most_tiles, int pairs) {
  return static_cast<int>(std::clamp<int64_t>(most_tiles * pairs * kGroupedMostParts, 1, std::max(room, 1)));
}

JNVFP4_HD int tiles_in_parts(int tiles) { return tiles % kGroupedPairs; }
JNVFP4_HD GroupedHeader make_header(const GroupedListing& a, int full, int few, int splits, int rows) {
  const int count = (full + few) * a.pairs, whole = splits == 1 ? count : count - tiles_in_parts(count);
  const int own = own_tiles(a.clusters, whole, splits);
  return {full, full + few, whole, whole + (count - whole) * splits, splits, rows, own, 0};
}

}  // namespace jnvfp4
