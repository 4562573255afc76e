// The list of tiles of a grouped product, which a kernel makes from the sizes of the groups.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "../../../core/numerics.h"
#include "../../../plan/sm90_fused.h"
#include "../../../plan/sm90_grouped.h"

namespace jnvfp4 {

// Tile of the rows [row, end) of a, or the first of them if they are more, and the group that has them.
struct GroupedTile {
  int group, row, end, unused;
};
// Header in front of the tiles. Half tiles come last: the n-th of them is the n-th from the end of the list's memory.
struct GroupedHeader {
  int whole_tiles, num_tiles;       // tiles that are not half tiles, and all
  int num_unsplit, num_work_tiles;  // work tiles of a 2-CTA cluster: unsplit tiles, then splits of the others
  int num_splits, rows;             // splits of each of the last tiles; rows of all groups
  int num_initial;                  // clusters that begin with the work tile of their index
  uint32_t counter;                 // work-tile counter, without the initial tiles
};

// Arguments from which the tile list is made.
struct GroupedListing {
  const int32_t* sizes;
  int groups, rows;
  // Tail of a group: the rows that tiles of 256 leave, if at most `max_tail`. A list has no tails, or nothing else.
  int max_tail;
  bool tails_only;
  int tokens, half_tokens;      // rows of a tile; tiles with at most `half_tokens` are half tiles
  int column_tiles, k_steps;    // tiles along the columns; slots of 256 along K
  int clusters;                 // of the launch
  float step_time, split_time;  // cost of a k-step, and of each split
  GroupedHeader* header;        // followed by the tiles
  int max_tiles;
  uint32_t* flags;
  int flag_count;
};

// Lists of tiles of all rows, and, unless its header is null, of tails.
struct GroupedListings {
  GroupedListing rows, tails;
};

// ---------------------------------------------------------------- split-K
// Returns a key that is least for the split count that takes the least time, ~0 where K cannot be split so. It models
// the wave quantization tail of an H200 on every GPU, so that sums are the same.
JNVFP4_HD uint32_t split_key(const GroupedListing& a, int tiles, int splits) {
  const int steps = (a.k_steps + splits - 1) / splits;
  const bool can = splits == 1 || (splits <= kGroupedMaxSplits && 2 * splits <= a.k_steps &&
                                   tiles * splits <= kGroupedPairs / splits * splits);
  const float time = static_cast<float>(steps) * a.step_time + static_cast<float>(splits - 1) * a.split_time;
  // Times are positive, so their bits have their order; the last bits hold the split count.
  return can ? (bits_of(time) & ~31u) | static_cast<uint32_t>(splits - 1) : ~0u;
}
JNVFP4_HD int splits_of_key(uint32_t key) { return static_cast<int>(key & 31u) + 1; }

// Returns the clusters of a launch, of those that a GPU has room for: no more than there may be work tiles.
inline int clusters_of_list(int room, int64_t max_tiles, int column_tiles) {
  return static_cast<int>(std::clamp<int64_t>(max_tiles * column_tiles * kGroupedMaxSplits, 1, std::max(room, 1)));
}

JNVFP4_HD int tiles_in_last_wave(int tiles) { return tiles % kGroupedPairs; }
JNVFP4_HD GroupedHeader make_header(const GroupedListing& a, int whole_tiles, int half_tiles, int splits, int rows) {
  const int count = (whole_tiles + half_tiles) * a.column_tiles;
  const int unsplit = splits == 1 ? count : count - tiles_in_last_wave(count);
  const int initial = initial_tiles(a.clusters, unsplit, splits);
  return {
      whole_tiles, whole_tiles + half_tiles, unsplit, unsplit + (count - unsplit) * splits, splits, rows, initial, 0};
}

}  // namespace jnvfp4
