// Makes the tile list of a grouped GEMM.
#pragma once

#include "../../device.cuh"
#include "../../kernels.h"
#include "groups.h"

namespace jnvfp4 {

// Returns the exclusive prefix sum of `value` over the threads of a CTA, all of which take part, and the sum of `all`.
template <int kBlockThreads>
__device__ __forceinline__ uint64_t scan_block(uint64_t value, uint64_t& all) {
  __shared__ uint64_t sums[kBlockThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
  __syncthreads();  // the sums of the previous call have been read
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  uint64_t ahead = 0;
  all = 0;
#pragma unroll
  for (int w = 0; w < kBlockThreads / 32; ++w) {
    if (w == warp) ahead = all;
    all += sums[w];
  }
  return ahead + sum - value;
}

__device__ __forceinline__ uint64_t size_of(const int32_t* sizes, int group, int groups) {
  return group < groups ? static_cast<uint64_t>(max(__ldg(sizes + group), 0)) : 0;
}

// Chooses the split count that takes the least time.
__device__ __forceinline__ int choose_splits(const GroupedListing& a, int tiles) {
  return splits_of_key(__reduce_min_sync(~0u, split_key(a, tiles, threadIdx.x % 32 + 1)));
}

// Lists the tiles, in a CTA of kThreads, each thread for a group at a time:
//   rows before the group        by a prefix sum of sizes -> its rows [start, end), with or without its tail
//   tiles of the group           whole tiles, and perhaps one half tile
//   tiles before those of it     by a prefix sum of both counts at once -> where to write
//   in the end                   split count by the number of tiles, then the header
__device__ __forceinline__ void list_tiles(const GroupedListing& a) {
  auto* const tiles = reinterpret_cast<GroupedTile*>(a.header + 1);
  for (int i = threadIdx.x; i < a.flag_count; i += kThreads) a.flags[i] = 0;
  const uint64_t end_of_rows = static_cast<uint64_t>(a.rows);
  uint64_t rows = 0;
  int whole_tiles = 0, half_tiles = 0;  // of previous groups
  for (int first = 0; first < a.groups; first += kThreads) {
    const int group = first + static_cast<int>(threadIdx.x);
    const uint64_t size = size_of(a.sizes, group, a.groups);
    uint64_t all;
    const uint64_t before = rows + scan_block<kThreads>(size, all);
    rows += all;
    int start = static_cast<int>(min(before, end_of_rows)), end = static_cast<int>(min(before + size, end_of_rows));
    const int remainder = (end - start) % kGroupedManyTokens, tail = remainder <= a.max_tail ? remainder : 0;
    if (a.tails_only)
      start = end - tail;
    else
      end -= tail;
    const int rest = (end - start) % a.tokens, group_half = rest > 0 && rest <= a.half_tokens;
    const int group_whole = (end - start) / a.tokens + (rest > a.half_tokens);
    const uint64_t counts_before =
        scan_block<kThreads>(static_cast<uint64_t>(group_whole) | static_cast<uint64_t>(group_half) << 32, all);
    const int whole_idx = whole_tiles + static_cast<int>(counts_before & 0xffffffffu);
    const int half_idx = half_tiles + static_cast<int>(counts_before >> 32);
    whole_tiles += static_cast<int>(all & 0xffffffffu), half_tiles += static_cast<int>(all >> 32);
    if (group_half) tiles[a.max_tiles - 1 - half_idx] = {group, start + group_whole * a.tokens, end, 0};
    // A warp writes the tiles of a large group together.
    constexpr int kAlone = 2;
    if (group_whole <= kAlone)
      for (int t = 0; t < group_whole; ++t) tiles[whole_idx + t] = {group, start + t * a.tokens, end, 0};
    for (uint32_t large = __ballot_sync(~0u, group_whole > kAlone); large; large &= large - 1) {
      const int lane = __ffs(large) - 1;
      const int count = __shfl_sync(~0u, group_whole, lane), dst = __shfl_sync(~0u, whole_idx, lane);
      const int of_group = __shfl_sync(~0u, group, lane), from = __shfl_sync(~0u, start, lane);
      const int until = __shfl_sync(~0u, end, lane);
      for (int t = threadIdx.x % 32; t < count; t += 32) tiles[dst + t] = {of_group, from + t * a.tokens, until, 0};
    }
  }
  if (threadIdx.x >= 32) return;
  const int splits = choose_splits(a, tiles_in_last_wave((whole_tiles + half_tiles) * a.column_tiles));
  const int listed = static_cast<int>(a.tails_only ? end_of_rows : min(rows, end_of_rows));
  if (threadIdx.x == 0) *a.header = make_header(a, whole_tiles, half_tiles, splits, listed);
}

}  // namespace jnvfp4
