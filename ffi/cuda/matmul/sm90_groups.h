// The list of tiles of a grouped product, which a kernel makes from the sizes of the groups.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jnvfp4 {

// Rows [row, end) of a, of which a tile has the first, and the group that has them.
struct GroupedTile {
  int group, row, end, unused;
};
// In front of the tiles. Those with few rows come last: the n-th is the n-th from the end of the list's memory.
struct GroupedHeader {
  int full, tiles;   // tiles of many rows, and all
  int whole, items;  // what a pair of thread blocks computes at a time: whole tiles, then parts of the others
  int splits, rows;  // parts of each of the last tiles; rows of all groups
  int unused[2];
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

}  // namespace jnvfp4
