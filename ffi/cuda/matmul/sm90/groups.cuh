// Makes the list of tiles of a grouped product.
#pragma once

#include "../../device.cuh"
#include "../../kernels.h"
#include "groups.h"

namespace jnvfp4 {

// The sum of `value` over the threads before, and over all. Every thread of a block takes part.
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
  __syncthreads();  // the sums of the call before have been read
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

// Those that take the least time.
__device__ __forceinline__ int choose_splits(const GroupedListing& a, int tiles) {
  return parts_of_key(__reduce_min_sync(~0u, key_of_parts(a, tiles, threadIdx.x % 32 + 1)));
}

// Run by a block of kThreads.
__device__ __forceinline__ void list_tiles(const GroupedListing& a) {
  auto* const tiles = reinterpret_cast<GroupedTile*>(a.header + 1);
  for (int i = threadIdx.x; i < a.flag_count; i += kThreads) a.flags[i] = 0;
  const uint64_t end_of_rows = static_cast<uint64_t>(a.rows);
  uint64_t rows = 0;
  int full = 0, few = 0;  // of the groups before
  for (int first = 0; first < a.groups; first += kThreads) {
    const int group = first + static_cast<int>(threadIdx.x);
    const uint64_t size = size_of(a.sizes, group, a.groups);
    uint64_t all;
    const uint64_t before = rows + scan_block<kThreads>(size, all);
    rows += all;
    int start = static_cast<int>(min(before, end_of_rows)), end = static_cast<int>(min(before + size, end_of_rows));
    const int left = (end - start) % kGroupedManyTokens, tail = left <= a.tail ? left : 0;
    if (a.of_tails)
      start = end - tail;
    else
      end -= tail;
    const int rest = (end - start) % a.tokens, own_few = rest > 0 && rest <= a.few;
    const int own_full = (end - start) / a.tokens + (rest > a.few);
    const uint64_t at =
        scan_block<kThreads>(static_cast<uint64_t>(own_full) | static_cast<uint64_t>(own_few) << 32, all);
    const int place = full + static_cast<int>(at & 0xffffffffu), few_place = few + static_cast<int>(at >> 32);
    full += static_cast<int>(all & 0xffffffffu), few += static_cast<int>(all >> 32);
    if (own_few) tiles[a.most_tiles - 1 - few_place] = {group, start + own_full * a.tokens, end, 0};
    // A warp writes the tiles of a large group together.
    constexpr int kAlone = 2;
    if (own_full <= kAlone)
      for (int t = 0; t < own_full; ++t) tiles[place + t] = {group, start + t * a.tokens, end, 0};
    for (uint32_t large = __ballot_sync(~0u, own_full > kAlone); large; large &= large - 1) {
      const int lane = __ffs(large) - 1;
      const int count = __shfl_sync(~0u, own_full, lane), to = __shfl_sync(~0u, place, lane);
      const int of_group = __shfl_sync(~0u, group, lane), from = __shfl_sync(~0u, start, lane);
      const int until = __shfl_sync(~0u, end, lane);
      for (int t = threadIdx.x % 32; t < count; t += 32) tiles[to + t] = {of_group, from + t * a.tokens, until, 0};
    }
  }
  if (threadIdx.x >= 32) return;
  const int splits = choose_splits(a, tiles_in_parts((full + few) * a.pairs));
  const int listed = static_cast<int>(a.of_tails ? end_of_rows : min(rows, end_of_rows));
  if (threadIdx.x == 0) *a.header = make_header(a, full, few, splits, listed);
}

}  // namespace jnvfp4
