// The fused kernel of Hopper for grouped GEMMs: rows of a belong to groups, each of which has a matrix of b.
//
// Only the device knows the sizes of groups. The kernel that prepares a also makes a tile list (sm90/groups.cuh), which
// replaces the tiles of a dense GEMM. A tile may begin at any row; rows beyond the group's end are masked when written.
#pragma once

#include "fused.cuh"
#include "grouped.h"

namespace jnvfp4 {

// ---------------------------------------------------------------- work tiles
// Reads the header, without the counter. After the first time it and the tiles are in L1.
__device__ __forceinline__ GroupedHeader header_of(const GroupedFusedArgs& a) {
  const auto* const words = reinterpret_cast<const int4*>(a.header);
  const int4 low = words[0], high = words[1];
  return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, 0};
}
template <int kTokens>
struct ListedTiles {
  const GroupedFusedArgs& a;

  __device__ __forceinline__ int num_initial() const { return header_of(a).num_initial; }
  __device__ __forceinline__ bool has_initial() const { return static_cast<int>(blockIdx.x / 2) < num_initial(); }
  __device__ __forceinline__ int end() const { return header_of(a).num_work_tiles; }
  __device__ __forceinline__ uint32_t* counter() const { return &a.header->counter; }
  __device__ __forceinline__ WorkTile operator[](int i) const {
    const GroupedHeader header = header_of(a);
    const bool is_split = i >= header.num_unsplit;
    const int splits = is_split ? header.num_splits : 1;
    const int split_tile = is_split ? quick_quotient(i - header.num_unsplit, splits) : 0;
    const int split = is_split ? i - header.num_unsplit - split_tile * splits : 0;
    const int tile_idx = is_split ? header.num_unsplit + split_tile : i;
    const int num_whole = header.whole_tiles * a.column_tiles;
    const bool whole = tile_idx < num_whole;
    const TileCoord coord(whole ? tile_idx : tile_idx - num_whole,
                          whole ? header.whole_tiles : header.num_tiles - header.whole_tiles, a.column_tiles);
    const int4 listed =
        reinterpret_cast<const int4*>(a.header + 1)[whole ? coord.token_tile : a.max_tiles - 1 - coord.token_tile];
    WorkTile tile;
    tile.matrix = listed.x, tile.token = listed.y, tile.token_end = listed.z;
    tile.column = coord.column_tile * static_cast<int>(kFusedCols);
    tile.split = split, tile.num_splits = splits, tile.split_tile = splits > 1 ? split_tile : -1;
    tile.k_begin = quick_quotient(a.k_steps * split, splits);
    tile.k_end = quick_quotient(a.k_steps * (split + 1), splits);
    return tile;
  }
};

template <class T, int kTokens>
struct GroupedConfig : FusedConfig<T, kTokens> {
  using Args = GroupedFusedArgs;
  using Maps = GroupedMaps;
  static constexpr bool kGrouped = true, kHalfTiles = true, kCanSwap = false;
  using Tiles = ListedTiles<kTokens>;
  template <int kCount>
  using Result = FusedResult<kCount, false, std::is_same_v<T, F16>, true>;
};

// Waits for the previous kernel, which makes the lists and prepares a. An overlapped launch starts when all CTAs of the
// one before have waited for that, so it fences instead: an SM may hold the lists of the last GEMM in L1.
__device__ __forceinline__ void wait_for_tile_list(const GroupedFusedArgs& a) {
  if (a.overlapped)
    fence_acquire();
  else
    wait_for_previous_kernel();
}
__device__ __forceinline__ void wait_for_counter(const GroupedFusedArgs&) {}  // it is in the list's header
__device__ __forceinline__ void wait_for_overlapped_kernel(const GroupedFusedArgs& a) {
  if (a.overlapped) wait_for_previous_kernel();
}
__device__ __forceinline__ int row_of_a(const GroupedFusedArgs&, const WorkTile& tile, int rows_per_cta) {
  return tile.token + cluster_rank() * rows_per_cta;
}

// ---------------------------------------------------------------- rows of no group
// Zeroes them, by the consumers of all CTAs, `threads` of each.
__device__ __forceinline__ void clear_other_rows(const GroupedFusedArgs& a, int threads) {
  const int64_t element = a.g.result.kind == Float::kF32 ? 4 : 2, row = a.columns * element;
  auto* const begin = static_cast<uint8_t*>(a.g.result.out) + header_of(a).rows * row;
  auto* const end = static_cast<uint8_t*>(a.g.result.out) + a.tokens * row;
  const int64_t first = int64_t{blockIdx.x} * threads + threadIdx.x - 128, step = int64_t{gridDim.x} * threads;
  if (row % 16 == 0)
    for (auto* p = reinterpret_cast<uint4*>(begin) + first; p < reinterpret_cast<uint4*>(end); p += step)
      *p = make_uint4(0, 0, 0, 0);
  else
    for (auto* p = reinterpret_cast<uint16_t*>(begin) + first; p < reinterpret_cast<uint16_t*>(end); p += step) *p = 0;
}

// ---------------------------------------------------------------- launch
template <class C>
cudaError_t launch_grouped_config(const GroupedFusedArgs& args, const GroupedMaps& maps, cudaStream_t stream) {
  const int clusters = clusters_of_list(multiprocessors() / 2, args.max_tiles, args.column_tiles);
  return launch_early(sm90_fused_kernel<C>, 2 * clusters, C::kThreads, 2, C::kShared, stream, args, maps);
}

template <class T>
cudaError_t launch_grouped_tokens(const GroupedFusedArgs& args, const GroupedMaps& maps, int tokens,
                                  cudaStream_t stream) {
  switch (tokens) {
    case 64: return launch_grouped_config<GroupedConfig<T, 64>>(args, maps, stream);
    case 256: return launch_grouped_config<GroupedConfig<T, 256>>(args, maps, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jnvfp4
