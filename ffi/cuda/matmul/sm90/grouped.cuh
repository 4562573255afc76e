// The fused kernel of Hopper for grouped products: rows of a belong to groups, each of which has a matrix of b.
//
// How many rows a group has is known on the device alone. The kernel that prepares a also makes a list of tiles
// (sm90/groups.cuh), over which 2-CTA clusters go as over the tiles of one product. A tile begins where a group
// or the tile before does, at any row: what it reads beyond the group's end is not written.
#pragma once

#include "fused.cuh"
#include "grouped.h"

namespace jnvfp4 {

// ---------------------------------------------------------------- work tiles
// The header and the tiles are in L1 after the first look, but for the counter.
__device__ __forceinline__ GroupedHeader header_of(const GroupedFusedArgs& a) {
  const auto* const words = reinterpret_cast<const int4*>(a.header);
  const int4 low = words[0], high = words[1];
  return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, 0};
}
template <int kTokens>
struct ListedTiles {
  const GroupedFusedArgs& a;

  __device__ __forceinline__ int own() const { return header_of(a).own; }
  __device__ __forceinline__ bool has_own() const { return static_cast<int>(blockIdx.x / 2) < own(); }
  __device__ __forceinline__ int end() const { return header_of(a).work_tiles; }
  __device__ __forceinline__ uint32_t* counter() const { return &a.header->counter; }
  __device__ __forceinline__ WorkTile operator[](int i) const {
    const GroupedHeader header = header_of(a);
    const bool parted = i >= header.whole;
    const int parts = parted ? header.splits : 1, divided = parted ? quick_quotient(i - header.whole, parts) : 0;
    const int split = parted ? i - header.whole - divided * parts : 0, all = parted ? header.whole + divided : i;
    const bool full = all < header.full * a.pairs;
    const TilePlace place(full ? all : all - header.full * a.pairs, full ? header.full : header.tiles - header.full,
                          a.pairs);
    const int4 listed =
        reinterpret_cast<const int4*>(a.header + 1)[full ? place.tokens : a.most_tiles - 1 - place.tokens];
    WorkTile tile;
    tile.matrix = listed.x, tile.token = listed.y, tile.token_end = listed.z;
    tile.column = place.columns * static_cast<int>(kFusedCols);
    tile.split = split, tile.splits = parts, tile.partial = parts > 1 ? divided : -1;
    tile.k_begin = quick_quotient(a.steps * split, parts), tile.k_end = quick_quotient(a.steps * (split + 1), parts);
    return tile;
  }
};

template <class T, int kTokens>
struct GroupedConfig : FusedConfig<T, kTokens> {
  using Args = GroupedFusedArgs;
  using Maps = GroupedMaps;
  static constexpr bool kGrouped = true, kFew = true, kExchanges = false;
  using Tiles = ListedTiles<kTokens>;
  template <int kCount>
  using Result = FusedResult<kCount, false, std::is_same_v<T, F16>, true>;
};

// The kernel ahead makes the lists and prepares a. The launch beside it starts when all blocks of the first one have
// waited for that, so it fences instead: an SM may hold the lists of the product before in L1.
__device__ __forceinline__ void wait_for_lists(const GroupedFusedArgs& a) {
  if (a.beside)
    fence_acquire();
  else
    wait_for_kernel_ahead();
}
__device__ __forceinline__ void wait_for_counter(const GroupedFusedArgs&) {}  // it is beside the list
__device__ __forceinline__ void wait_for_kernel_beside(const GroupedFusedArgs& a) {
  if (a.beside) wait_for_kernel_ahead();
}
__device__ __forceinline__ int row_of_a(const GroupedFusedArgs&, const WorkTile& tile, int half) {
  return tile.token + cluster_rank() * half;
}

// ---------------------------------------------------------------- rows of no group
// By the threads of all blocks that compute, `threads` of each.
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
  const int clusters = clusters_of_list(multiprocessors() / 2, args.most_tiles, args.pairs);
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
