// What the host decides for grouped products, and what ffi/cuda/matmul/sm90/groups.h decides on the device, on the CPU.
// The argument selects: items, scratch or plans. Prints the first fault.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda/matmul/sm90/groups.h"
#include "plan/grouped.h"

using namespace jnvfp4;

namespace {

// ---------------------------------------------------------------- items: every part is computed once
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

const char* fault_of(const GroupedHeader& header, int pairs) {
  const std::vector<int> found = pairs_of(header, pairs);
  for (int i = 0, before = 0; i < header.items; before = found[static_cast<size_t>(i++)]) {
    const int pair = found[static_cast<size_t>(i)];
    if (pair == -1) return "no pair computes an item";
    if (pair == -2) return "two pairs compute an item";
    const bool waits = i >= header.whole && (i - header.whole) % header.splits;
    if (waits && pair != before + 1) return "a part waits for a pair that may not have started";
  }
  return nullptr;
}

bool check_items() {
  bool parted = false;
  for (const int slots : {1, 2, 3, 4, 7, 8, 16, 17, 64, 200})
    for (const float split : {2.1f, 6.4f})
      for (int tiles = 0; tiles <= 2 * kGroupedPairs + 1; ++tiles)
        for (int pairs = 1; pairs <= kGroupedPairs; pairs += pairs < 20 ? 1 : 7) {
          GroupedListing a{};
          a.pairs = 1, a.grid = pairs, a.slots = slots, a.slot = split < 3 ? 1.02f : 2.42f, a.split = split;
          const int splits = splits_of(a, tiles_in_parts(tiles));
          parted |= splits > 1;
          const char* fault = fault_of(make_header(a, tiles, 0, splits, 0), pairs);
          a.grid = kGroupedPairs;
          if (pairs >= kGroupedMostParts && splits != splits_of(a, tiles_in_parts(tiles)))
            fault = "not the parts of an H200";
          if (!fault) continue;
          std::printf("%d pairs, %d tiles, %d along K in %d parts: %s\n", pairs, tiles, slots, splits, fault);
          return false;
        }
  if (!parted) std::printf("no tile had parts\n");
  return parted;
}

// ---------------------------------------------------------------- scratch: the lists have room for all tiles
// Sizes of groups with many tiles: rows in turns of `size`, the rest in the last group.
std::vector<int64_t> sizes_of(int64_t rows, int64_t groups, int64_t size) {
  std::vector<int64_t> sizes(static_cast<size_t>(groups));
  for (int64_t& s : sizes) s = std::min(rows, size), rows -= s;
  sizes.back() += rows;
  return sizes;
}

bool check_lists(const GroupedShape& shape, int64_t size) {
  const GroupedTiles tiles = plan_grouped_tiles(shape);
  const GroupedScratch at = grouped_scratch(shape, tiles);
  if (tiles.tokens == 0) return true;
  int64_t listed = 0, tails = 0;
  for (const int64_t rows : sizes_of(shape.rows, shape.groups, size)) {
    const int64_t left = rows % kGroupedManyTokens, tail = at.most_tails && left <= kGroupedTailTokens ? left : 0;
    listed += (rows - tail + tiles.tokens - 1) / tiles.tokens, tails += tail > 0;
  }
  const int64_t end = at.most_tails ? at.tails : at.bytes, header = 2;  // as many bytes as two tiles
  if (listed <= at.most_tiles && tails <= at.most_tails && at.list + (header + listed) * 16 <= end &&
      (!at.most_tails || at.tails + (header + tails) * 16 <= at.bytes))
    return true;
  std::printf("%lld rows of %lld groups, of %lld each: %lld tiles and %lld tails do not fit\n",
              static_cast<long long>(shape.rows), static_cast<long long>(shape.groups), static_cast<long long>(size),
              static_cast<long long>(listed), static_cast<long long>(tails));
  return false;
}

bool check_scratch() {
  for (const int64_t groups : {1, 2, 3, 8, 17, 64, 257, 1000})
    for (const int64_t rows : {1, 17, 63, 129, 500, 1024, 4097, 48 * 64, 48 * 257 - 1, 48 * 1000, 100000})
      for (const int64_t size : {int64_t{1}, int64_t{63}, int64_t{65}, int64_t{256}, int64_t{257}, int64_t{321}, rows})
        if (!check_lists({rows, groups, 300, 272}, size)) return false;
  return true;
}

// ---------------------------------------------------------------- plans: what a handler does with one of another
// device
bool check_plan(int capability, int64_t scratch, std::string_view planned, std::string_view want) {
  std::string_view kernel;
  const GroupedProblem problem{{128, 4, 128, 256}, MatmulProblem::Left::kNvfp4, Float::kBf16};
  std::string text = kGroupedKernels.adapt(planned, problem, {capability, true}, scratch, &kernel);
  if (text.empty()) text = kernel;
  if (text.find(want) != std::string::npos) return true;
  std::printf("on %d: %s\n", capability, text.c_str());
  return false;
}

bool check_plans() {
  constexpr std::string_view kXla = "decode_then_ragged_dot", kHopper = "sm90_nvfp4_grouped";
  constexpr int64_t kMuch = int64_t{1} << 30;
  return check_plan(90, kMuch, kHopper, kHopper) && check_plan(90, 0, kHopper, "it needs more scratch") &&
         check_plan(90, kMuch, kXla, kHopper) && check_plan(90, 0, kXla, "is XLA operations, not a kernel") &&
         check_plan(80, kMuch, kXla, "is XLA operations, not a kernel") &&
         check_plan(80, kMuch, kHopper, "runs on GPUs of compute capability 9.0") &&
         check_plan(0, 0, kHopper, "cpu_nvfp4_blocks") && check_plan(90, kMuch, "unheard_of", "this version has");
}

}  // namespace

int main(int, char** arguments) {
  const std::string what = arguments[1];
  return (what == "items" ? check_items() : what == "scratch" ? check_scratch() : check_plans()) ? 0 : 1;
}
