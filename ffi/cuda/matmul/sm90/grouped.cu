// Launches the Hopper kernels of grouped GEMMs.
#include <algorithm>

#include "../../device.cuh"
#include "grouped.h"
#include "maps.h"
#include "pairs.cuh"

namespace jnvfp4 {
namespace {

// Microseconds on an H200, as in plan_fused, per k-step of 256 and per split of K.
struct TileTimes {
  float step, split;
};
TileTimes times_of(int tokens) { return tokens == 64 ? TileTimes{1.02f, 2.1f} : TileTimes{2.42f, 6.4f}; }

// Common arguments of the launches of a GEMM.
struct Product {
  const GroupedArgs& g;
  GroupedScratch at;
  uint8_t* scratch;
  bool pinned;
  PitchedRows data, scale;  // of b
  cudaStream_t stream;

  GroupedHeader* list(bool tails_only) const {
    return reinterpret_cast<GroupedHeader*>(scratch + (tails_only ? at.tails : at.list));
  }
  int max_tiles(bool tails_only) const { return static_cast<int>(tails_only ? at.max_tails : at.max_tiles); }
  uint32_t* flags() const { return reinterpret_cast<uint32_t*>(scratch + at.flags); }
  int column_tiles() const { return static_cast<int>((g.shape.cols + kFusedCols - 1) / kFusedCols); }
  int k_steps() const { return static_cast<int>((g.shape.depth + kFusedDepth - 1) / kFusedDepth); }
};

// Returns the arguments of a list. Tails and the pinned order have no split-K and no flags; the latter no half tiles.
GroupedListing listing_of(const Product& p, int tokens, bool tails_only) {
  const GroupedShape& s = p.g.shape;
  const TileTimes times = times_of(tokens);
  GroupedListing list{};
  list.sizes = p.g.sizes, list.groups = static_cast<int>(s.groups), list.rows = static_cast<int>(s.rows);
  list.max_tail = p.at.max_tails ? kGroupedTailTokens : 0, list.tails_only = tails_only;
  list.tokens = tokens, list.half_tokens = p.pinned ? 0 : tokens / 2;
  list.column_tiles = p.column_tiles(), list.k_steps = tails_only || p.pinned ? 1 : p.k_steps();
  list.clusters = clusters_of_list(multiprocessors() / 2, p.max_tiles(tails_only), p.column_tiles());
  list.step_time = times.step, list.split_time = times.split;
  list.header = p.list(tails_only), list.max_tiles = p.max_tiles(tails_only);
  list.flags = p.flags(), list.flag_count = tails_only ? 0 : static_cast<int>(p.at.flag_count);
  return list;
}

cudaError_t copy_pitched(Product* p) {
  const GroupedShape& s = p->g.shape;
  const int64_t rows = s.groups * s.cols;
  const cudaError_t status = pitched_rows(p->g.b.data, rows, s.depth / 2, p->scratch + p->at.data, p->stream, &p->data);
  if (status != cudaSuccess) return status;
  return pitched_rows(p->g.b.scale, rows, s.depth / kBlock, p->scratch + p->at.scale, p->stream, &p->scale);
}

cudaError_t maps_of(const Product& p, int tokens, GroupedMaps* maps) {
  const GroupedShape& s = p.g.shape;
  const int64_t b_rows = s.groups * s.cols;
  constexpr uint32_t kBox = kFusedCols / 2;
  const auto of_a = [&](int rows) {
    return map_of_numbers(p.scratch + p.at.rows, p.at.padded_rows, fused_depth(s.depth), static_cast<uint32_t>(rows));
  };
  return make_maps({{of_a(tokens / 2), &maps->a},
                    {of_a(tokens / 4), &maps->half_a},
                    {map_of_bytes(p.data, b_rows, p.pinned ? kWindow / 2 : 128, kBox), &maps->data},
                    {map_of_bytes(p.scale, b_rows, 16, kBox), &maps->scale}});
}

cudaError_t launch_list(const Product& p, int tokens, bool tails_only) {
  const GroupedArgs& g = p.g;
  const GroupedShape& s = g.shape;
  GroupedMaps maps;
  const cudaError_t status = maps_of(p, tokens, &maps);
  if (status != cudaSuccess) return status;
  const bool quantized = g.a.quantized(), bf16 = !quantized && g.a.kind == Float::kBf16;
  GroupedFusedArgs args{};
  args.g = {g.a, g.b, {nullptr, Float::kBf16, g.out, g.kind}, {1, s.rows, s.cols, s.depth}};
  args.tokens = static_cast<int>(s.rows), args.columns = static_cast<int>(s.cols);
  args.column_tiles = p.column_tiles(), args.k_steps = p.k_steps();
  args.amax_per_row = quantized && g.a.map.rows_per_amax < s.rows, args.amax_per_col = g.b.map.rows_per_amax < s.cols;
  args.matrices_per_a_amax = args.matrices_per_b_amax = 1;
  args.unscale = bf16 ? 0x1p8f : quantized ? 0x1p28f : 0x1p14f;
  args.split_sums = reinterpret_cast<float*>(p.scratch + p.at.sums), args.split_flags = p.flags();
  args.header = p.list(tails_only), args.max_tiles = p.max_tiles(tails_only), args.overlapped = tails_only;
  if (p.pinned) return launch_sm90_pinned_grouped(args, maps, tokens, p.stream);
  return bf16 ? launch_sm90_bf16_grouped(args, maps, tokens, p.stream)
              : launch_sm90_f16_grouped(args, maps, tokens, p.stream);
}

}  // namespace

cudaError_t launch_sm90_grouped(const GroupedArgs& g, const GroupedTiles& tiles, void* scratch, cudaStream_t stream) {
  const GroupedShape& s = g.shape;
  if (s.groups == 0)
    return cudaMemsetAsync(g.out, 0, static_cast<size_t>(s.rows * s.cols * (g.kind == Float::kF32 ? 4 : 2)), stream);
  if (tiles.tokens == 0) return launch_sm90_grouped_small_m(g, stream);
  Product p{g, grouped_scratch(s, tiles), static_cast<uint8_t*>(scratch), tiles.pinned, {}, {}, stream};
  if (p.at.max_tiles * p.column_tiles() > INT32_MAX - kGroupedPairs * kGroupedMaxSplits)
    return cudaErrorInvalidConfiguration;
  cudaError_t status = copy_pitched(&p);
  if (status != cudaSuccess) return status;
  GroupedListings lists{listing_of(p, tiles.tokens, false), {}};
  if (p.at.max_tails) lists.tails = listing_of(p, kGroupedTailTokens, true);
  // The last kernel before the GEMM, which may start early (PDL).
  status = launch_sm90_prepare_grouped(g.a, p.pinned ? Order::kBlocks : Order::kWindows, p.scratch + p.at.rows, s.rows,
                                       s.depth, lists, stream);
  if (status == cudaSuccess) status = launch_list(p, tiles.tokens, false);
  return status == cudaSuccess && p.at.max_tails ? launch_list(p, kGroupedTailTokens, true) : status;
}

}  // namespace jnvfp4
