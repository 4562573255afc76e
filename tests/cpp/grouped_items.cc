// Which pairs of thread blocks compute the tiles of a grouped product and their parts of K, as ffi/cuda/matmul/
// sm90_groups.h decides it on the device: every part is computed once, after those that it waits for have started.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "cuda/matmul/sm90_groups.h"

using namespace jnvfp4;

namespace {

int splits_of(const GroupedListing& a, int tiles) {
  uint32_t least = ~0u;
  for (int splits = 1; splits <= 32; ++splits) least = std::min(least, key_of_parts(a, tiles, splits));
  return parts_of_key(least);
}

// The pair of each item; -1 where none computes it, -2 where several do.
std::vector<int> pairs_of(const GroupedHeader& header, int pairs) {
  std::vector<int> found(static_cast<size_t>(header.items), -1);
  for (int pair = 0; pair < pairs; ++pair)
    for (int i = item_from(header, pair, false, pair, pairs); i < header.items; i = item_after(header, i, pair, pairs))
      found[static_cast<size_t>(i)] = found[static_cast<size_t>(i)] == -1 ? pair : -2;
  return found;
}

const char* fault(const GroupedHeader& header, int pairs) {
  const std::vector<int> found = pairs_of(header, pairs);
  for (int i = 0; i < header.items; ++i) {
    if (found[static_cast<size_t>(i)] == -1) return "no pair computes an item";
    if (found[static_cast<size_t>(i)] == -2) return "two pairs compute an item";
    const bool first = i < header.whole || (i - header.whole) % header.splits == 0;
    if (!first && found[static_cast<size_t>(i)] != found[static_cast<size_t>(i) - 1] + 1)
      return "a part waits for a later pair";
  }
  return nullptr;
}

}  // namespace

int main() {
  bool parted = false;
  for (const int slots : {1, 2, 3, 4, 7, 8, 16, 17, 64, 200})
    for (const float split : {2.1f, 6.4f})
      for (int tiles = 0; tiles <= 2 * kGroupedPairs + 1; ++tiles)
        for (int pairs = 1; pairs <= kGroupedPairs; pairs += pairs < 20 ? 1 : 7) {
          GroupedListing a{};
          a.pairs = 1, a.grid = pairs, a.slots = slots, a.slot = split < 3 ? 1.02f : 2.42f, a.split = split;
          const int splits = splits_of(a, tiles_in_parts(tiles));
          parted |= splits > 1;
          a.grid = kGroupedPairs;
          if (pairs >= kGroupedMostParts && splits != splits_of(a, tiles_in_parts(tiles)))
            return std::printf("%d pairs have other parts than those of an H200\n", pairs), 1;
          const GroupedHeader header = make_header(a, tiles, 0, splits, 0);
          if (const char* text = fault(header, pairs))
            return std::printf("%d pairs, %d tiles, %d along K in %d parts: %s\n", pairs, tiles, slots, splits, text),
                   1;
        }
  return parted ? 0 : (std::printf("no tile had parts\n"), 1);
}
