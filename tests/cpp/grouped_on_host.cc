// What the host decides for grouped products, and what ffi/cuda/matmul/sm90/groups.h decides on the device, on the CPU.
// The argument selects: tiles, scratch or plans. Prints the first fault.
#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda/matmul/sm90/groups.h"
#include "plan/grouped.h"
#include "plan/sm90_pinned.h"

using namespace jnvfp4;

namespace {

// ---------------------------------------------------------------- tiles: every work tile is computed once
int splits_of(const GroupedListing& a, int tiles) {
  uint32_t least = ~0u;
  for (int splits = 1; splits <= 32; ++splits) least = std::min(least, split_key(a, tiles, splits));
  return splits_of_key(least);
}

// Clusters as sm90/scheduler.cuh runs them, of which a GPU has room for some at a time: they start in order, begin with
// the work tile of their number if they have one, and then take the next one that nobody has. A part ends after those
// before it; of what may end, the last work tile does, so that the others wait longest.
const char* fault_of(const GroupedHeader& header, int clusters, int room) {
  std::vector<bool> done(static_cast<size_t>(header.num_work_tiles));
  std::vector<int> running;  // what each cluster computes
  int started = 0, taken = header.num_initial, count = 0;
  const auto begin = [&](int tile) {
    if (tile < header.num_work_tiles) running.push_back(tile);
  };
  const auto waits = [&](int tile) {
    const int split = tile < header.num_unsplit ? 0 : (tile - header.num_unsplit) % header.num_splits;
    for (int before = tile - split; before < tile; ++before)
      if (!done[static_cast<size_t>(before)]) return true;
    return false;
  };
  for (; count < header.num_work_tiles; ++count) {
    for (; started < clusters && static_cast<int>(running.size()) < room; ++started)
      begin(started < header.num_initial ? started : taken++);
    if (running.empty()) return "no cluster computes a work tile";
    int last = -1;
    for (size_t i = 0; i < running.size(); ++i)
      if (!waits(running[i]) && (last < 0 || running[i] > running[static_cast<size_t>(last)]))
        last = static_cast<int>(i);
    if (last < 0) return "parts wait for one that may not have started";
    const int tile = running[static_cast<size_t>(last)];
    if (done[static_cast<size_t>(tile)]) return "two clusters compute a work tile";
    done[static_cast<size_t>(tile)] = true;
    running.erase(running.begin() + last);
    begin(taken++);
  }
  return running.empty() ? nullptr : "clusters compute what there is not";
}

bool check_work_tiles() {
  bool parted = false;
  for (const int slots : {1, 2, 3, 4, 7, 8, 16, 17, 64, 200})
    for (const float split : {2.1f, 6.4f})
      for (int tiles = 0; tiles <= 2 * kGroupedPairs + 1; ++tiles)
        for (int clusters = 1; clusters <= kGroupedPairs; clusters += clusters < 20 ? 1 : 7) {
          GroupedListing a{};
          a.column_tiles = 1, a.clusters = clusters, a.k_steps = slots;
          a.step_time = split < 3 ? 1.02f : 2.42f, a.split_time = split;
          const int splits = splits_of(a, tiles_in_last_wave(tiles));
          parted |= splits > 1;
          const GroupedHeader header = make_header(a, tiles, 0, splits, 0);
          if (header.num_work_tiles != header.num_unsplit + (tiles - header.num_unsplit) * splits) {
            std::printf("%d tiles, %d of them whole, in %d parts: %d work tiles\n", tiles, header.num_unsplit, splits,
                        header.num_work_tiles);
            return false;
          }
          for (const int room : {clusters, (clusters + 1) / 2, 1}) {
            const char* const fault = fault_of(header, clusters, room);
            if (!fault) continue;
            std::printf("%d clusters, %d at a time, %d tiles, %d along K in %d parts: %s\n", clusters, room, tiles,
                        slots, splits, fault);
            return false;
          }
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

// Whether no array reaches into the next one. Of 66 work tiles, the last has no sums; a part has two flags of each
// warpgroup of both CTAs, for tiles of few rows.
bool has_room(const GroupedShape& s, const GroupedTiles& tiles, const GroupedScratch& at) {
  const auto copied = [&](int64_t bytes) { return bytes % 16 ? s.groups * s.cols * ((bytes + 15) / 16 * 16) : 0; };
  const int64_t parts = tiles.pinned ? 0 : 65 * (tiles.tokens <= 64 ? 2 : 1);
  return at.data - at.rows >= at.padded_rows * ((s.depth + 63) / 64 * 64) * 2 &&
         at.scale - at.data >= copied(s.depth / 2) && at.sums - at.scale >= copied(s.depth / 16) &&
         at.flags - at.sums >= parts * tiles.tokens * 256 * 4 && at.flag_count >= parts * 8 &&
         at.list - at.flags >= at.flag_count * 4 && (!tiles.pinned || at.list == at.sums) &&
         (at.max_tails > 0) == tiles.tails;
}

bool check_lists(const GroupedShape& shape, const GroupedTiles& tiles, int64_t size) {
  const GroupedScratch at = grouped_scratch(shape, tiles);
  if (tiles.tokens == 0) return true;
  int64_t listed = 0, tails = 0, begin = 0, read = 0;
  for (const int64_t rows : sizes_of(shape.rows, shape.groups, size)) {
    if (rows > 0) read = begin + (rows + tiles.tokens - 1) / tiles.tokens * tiles.tokens;
    begin += rows;
    const int64_t left = rows % kGroupedManyTokens, tail = at.max_tails && left <= kGroupedTailTokens ? left : 0;
    listed += (rows - tail + tiles.tokens - 1) / tiles.tokens, tails += tail > 0;
  }
  const int64_t end = at.max_tails ? at.tails : at.bytes, header = 2;  // as many bytes as two tiles
  if (read <= at.padded_rows && has_room(shape, tiles, at) && listed <= at.max_tiles && tails <= at.max_tails &&
      at.max_tiles <= 2 * shape.rows &&  // a group without rows has none
      at.list + (header + listed) * 16 <= end && (!at.max_tails || at.tails + (header + tails) * 16 <= at.bytes))
    return true;
  std::printf("%lld rows of %lld groups, of %lld each: %lld tiles and %lld tails, or what they read, do not fit\n",
              static_cast<long long>(shape.rows), static_cast<long long>(shape.groups), static_cast<long long>(size),
              static_cast<long long>(listed), static_cast<long long>(tails));
  return false;
}

// The rows of a tile where their number changes.
bool check_tiles() {
  for (const auto& [rows, groups, tokens, pinned] : {std::array<int64_t, 4>{16, 1, 0, 64},
                                                     {17, 1, 64, 64},
                                                     {47, 1, 64, 64},
                                                     {48, 1, 256, 128},
                                                     {895, 1, 256, 128},
                                                     {896, 1, 256, 256},
                                                     {128, 32, 0, 64},
                                                     {129, 33, 64, 64},
                                                     {128, 31, 64, 64},
                                                     {96, 2, 256, 128}}) {
    const GroupedShape shape{rows, groups, 300, 272};
    const GroupedTiles tiles = plan_grouped_tiles(shape);
    if (tiles.tokens == tokens && tiles.tails == (tokens == 256) && plan_pinned_groups(shape).tokens == pinned)
      continue;
    std::printf("%lld rows of %lld groups: tiles of %d rows\n", static_cast<long long>(rows),
                static_cast<long long>(groups), tiles.tokens);
    return false;
  }
  return true;
}

bool check_scratch() {
  for (const int64_t groups : {1, 2, 3, 8, 17, 64, 257, 1000})
    for (const int64_t rows : {1, 17, 63, 129, 256, 500, 1024, 4097, 48 * 64, 48 * 257 - 1, 48 * 1000, 100000})
      for (const int64_t size :
           {int64_t{1}, int64_t{63}, int64_t{65}, int64_t{100}, int64_t{256}, int64_t{257}, int64_t{321}, rows})
        for (const bool pinned : {false, true}) {
          const GroupedShape shape{rows, groups, 300, 272};
          if (!check_lists(shape, pinned ? plan_pinned_groups(shape) : plan_grouped_tiles(shape), size)) return false;
        }
  return true;
}

// ---------------------------------------------------------------- plans: what a handler does with one of another
// device
bool check_plan(int capability, int64_t scratch, std::string_view planned, std::string_view want, bool pinned = false) {
  std::string_view kernel;
  const GroupedProblem problem{{128, 4, 128, 256}, MatmulProblem::Left::kNvfp4, Float::kBf16, pinned};
  const std::string text = kGroupedKernels.adapt(planned, problem, {capability}, scratch, &kernel);
  const bool names_kernel = kGroupedKernels.find(want) != nullptr;
  if (text.empty() ? kernel == want : !names_kernel && text.find(want) != std::string::npos) return true;
  std::printf("on %d: %s%s\n", capability, text.c_str(), std::string(kernel).c_str());
  return false;
}

bool check_plans() {
  constexpr std::string_view kXla = "decode_then_ragged_dot", kHopper = "sm90_nvfp4_grouped";
  constexpr std::string_view kPinned = "sm90_nvfp4_pinned_grouped";
  constexpr int64_t kMuch = int64_t{1} << 30;
  const GroupedShape shape{128, 4, 128, 256};
  const int64_t pinned = grouped_scratch(shape, plan_pinned_groups(shape)).bytes;
  return check_plan(90, kMuch, kHopper, kHopper) && check_plan(90, 0, kHopper, "it needs more scratch") &&
         check_plan(90, kMuch, kXla, kHopper) && check_plan(90, 0, kXla, "is XLA operations, not a kernel") &&
         check_plan(80, kMuch, kXla, "is XLA operations, not a kernel") &&
         check_plan(80, kMuch, kHopper, "runs on GPUs of compute capability 9.0") &&
         check_plan(90, kMuch, "cpu_nvfp4_blocks", kPinned, true) && check_plan(90, pinned, kPinned, kPinned, true) &&
         check_plan(90, pinned - 1, kPinned, "it needs more scratch", true) &&
         check_plan(80, kMuch, kPinned, "runs on GPUs", true) && check_plan(0, 0, kHopper, "cpu_nvfp4_blocks") &&
         check_plan(90, kMuch, "unheard_of", "this version has");
}

}  // namespace

int main(int, char** arguments) {
  const std::string what = arguments[1];
  return (what == "tiles"     ? check_work_tiles()
          : what == "scratch" ? check_tiles() && check_scratch()
                              : check_plans())
             ? 0
             : 1;
}
