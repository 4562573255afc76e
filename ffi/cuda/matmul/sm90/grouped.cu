// Launches the kernels of grouped products on Hopper.
#include <algorithm>

#include "../../device.cuh"
#include "grouped.h"
#include "maps.h"
#include "pairs.cuh"

namespace jnvfp4 {
namespace {

// Microseconds on an H200, as in plan_fused: of 256 along K, and of another part of K.
struct TileTimes {
  float slot, split;
};
TileTimes times_of(int tokens) { return tokens == 64 ? TileTimes{1.02f, 2.1f} : TileTimes{2.42f, 6.4f}; }

// What the launches of a product have in common.
struct Product {
  const GroupedArgs& g;
  GroupedScratch at;
  uint8_t* scratch;
  bool pinned;
  PitchedRows data, scale;  // of b
  cudaStream_t stream;

  GroupedHeader* list(bool of_tails) const {
    return reinterpret_cast<GroupedHeader*>(scratch + (of_tails ? at.tails : at.list));
  }
  int most_tiles(bool of_tails) const { return static_cast<int>(of_tails ? at.most_tails : at.most_tiles); }
  uint32_t* flags() const { return reinterpret_cast<uint32_t*>(scratch + at.flags); }
  int pairs() const { return static_cast<int>((g.shape.cols + kFusedCols - 1) / kFusedCols); }
  int slots() const { return static_cast<int>((g.shape.depth + kFusedDepth - 1) / kFusedDepth); }
};

// Tails and the pinned order have no parts of K, and lower no flags. The pinned order has no faster tiles of few rows.
GroupedListing listing_of(const Product& p, int tokens, bool of_tails) {
  const GroupedShape& s = p.g.shape;
  const TileTimes times = times_of(tokens);
  return {p.g.sizes,
          static_cast<int>(s.groups),
          static_cast<int>(s.rows),
          p.at.most_tails ? kGroupedTailTokens : 0,
          of_tails,
          tokens,
          p.pinned ? 0 : tokens / 2,
          p.pairs(),
          of_tails || p.pinned ? 1 : p.slots(),
          clusters_of_list(multiprocessors() / 2, p.most_tiles(of_tails), p.pairs()),
          times.slot,
          times.split,
          p.list(of_tails),
          p.most_tiles(of_tails),
          p.flags(),
          of_tails ? 0 : static_cast<int>(p.at.flag_count)};
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
  const int64_t b_rows = s.groups * s.cols, a_cols = fused_depth(s.depth);
  const auto of_a = [&](int rows) {
    return MapSource{
        p.scratch + p.at.rows,      CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, a_cols, p.at.padded_rows, a_cols * 2, kWindow,
        static_cast<uint32_t>(rows)};
  };
  const auto of_b = [&](const PitchedRows& x, uint32_t width) {
    return MapSource{x.data, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, x.bytes, b_rows, x.pitch, width, kFusedCols / 2};
  };
  return make_maps({{of_a(tokens / 2), &maps->a},
                    {of_a(tokens / 4), &maps->few},
                    {of_b(p.data, p.pinned ? kWindow / 2 : 128), &maps->data},
                    {of_b(p.scale, 16), &maps->scale}});
}

cudaError_t launch_list(const Product& p, int tokens, bool of_tails) {
  const GroupedArgs& g = p.g;
  const GroupedShape& s = g.shape;
  GroupedMaps maps;
  const cudaError_t status = maps_of(p, tokens, &maps);
  if (status != cudaSuccess) return status;
  const bool quantized = g.a.quantized(), bf16 = !quantized && g.a.kind == Float::kBf16;
  GroupedFusedArgs args{};
  args.g = {g.a, g.b, {nullptr, Float::kBf16, g.out, g.kind}, {1, s.rows, s.cols, s.depth}};
  args.tokens = static_cast<int>(s.rows), args.columns = static_cast<int>(s.cols);
  args.pairs = p.pairs(), args.steps = p.slots();
  args.each_row = quantized && g.a.map.rows_per_amax < s.rows, args.each_col = g.b.map.rows_per_amax < s.cols;
  args.a_matrices = args.b_matrices = 1;
  args.unscale = bf16 ? 0x1p8f : quantized ? 0x1p28f : 0x1p14f;
  args.sums = reinterpret_cast<float*>(p.scratch + p.at.sums), args.flags = p.flags();
  args.header = p.list(of_tails), args.most_tiles = p.most_tiles(of_tails), args.beside = of_tails;
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
  if (p.at.most_tiles * p.pairs() > INT32_MAX - kGroupedPairs * kGroupedMostParts) return cudaErrorInvalidConfiguration;
  cudaError_t status = copy_pitched(&p);
  if (status != cudaSuccess) return status;
  GroupedListings lists{listing_of(p, tiles.tokens, false), {}};
  if (p.at.most_tails) lists.tails = listing_of(p, kGroupedTailTokens, true);
  // Last of what runs ahead, since the kernel that follows may start early.
  status = launch_sm90_prepare_grouped(g.a, p.pinned ? Order::kBlocks : Order::kWindows, p.scratch + p.at.rows, s.rows,
                                       s.depth, lists, stream);
  if (status == cudaSuccess) status = launch_list(p, tiles.tokens, false);
  return status == cudaSuccess && p.at.most_tails ? launch_list(p, kGroupedTailTokens, true) : status;
}

}  // namespace jnvfp4
