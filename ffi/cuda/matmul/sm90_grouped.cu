// Launches the kernels of grouped products on Hopper.
#include <algorithm>

#include "../device.cuh"
#include "sm90_grouped.h"
#include "sm90_maps.h"

namespace jnvfp4 {
namespace {

// Microseconds on an H200, as in plan_fused: of 256 along K, and of another part of K.
struct TileTimes {
  float slot, split;
};
TileTimes times_of(int tokens) { return tokens == 64 ? TileTimes{1.02f, 2.1f} : TileTimes{2.42f, 6.4f}; }

struct Preparation {
  const GroupedArgs& g;
  const GroupedTiles& tiles;
  const GroupedScratch& at;
  uint8_t* scratch;
  GroupedListing listing;
};

// Copies what must be copied, prepares a last, since the kernel that follows may start early, and describes it all.
cudaError_t prepare(const Preparation& p, cudaStream_t stream, GroupedMaps* maps) {
  const GroupedShape& s = p.g.shape;
  const int64_t b_rows = s.groups * s.cols, a_cols = (s.depth + kWindow - 1) / kWindow * kWindow;
  PitchedRows data{}, scale{};
  cudaError_t status = pitched_rows(p.g.b.data, b_rows, s.depth / 2, p.scratch + p.at.data, stream, &data);
  if (status == cudaSuccess)
    status = pitched_rows(p.g.b.scale, b_rows, s.depth / kBlock, p.scratch + p.at.scale, stream, &scale);
  if (status == cudaSuccess)
    status = launch_sm90_prepare_grouped(p.g.a, p.scratch + p.at.rows, s.rows, s.depth, p.listing, stream);
  constexpr auto kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto of_a = [&](int rows) {
    return MapSource{
        p.scratch + p.at.rows,      CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, a_cols, p.at.padded_rows, a_cols * 2, kWindow,
        static_cast<uint32_t>(rows)};
  };
  const MapSource of_data{data.data, kBytes, 1, data.bytes, b_rows, data.pitch, 128, kFusedCols / 2};
  const MapSource of_scale{scale.data, kBytes, 1, scale.bytes, b_rows, scale.pitch, 16, kFusedCols / 2};
  return status == cudaSuccess ? make_maps({{of_a(p.tiles.tokens / 2), &maps->a},
                                            {of_a(p.tiles.tokens / 4), &maps->few},
                                            {of_data, &maps->data},
                                            {of_scale, &maps->scale}})
                               : status;
}

}  // namespace

cudaError_t launch_sm90_grouped(const GroupedArgs& g, const GroupedTiles& tiles, void* scratch, cudaStream_t stream) {
  const GroupedShape& s = g.shape;
  if (s.groups == 0)
    return cudaMemsetAsync(g.out, 0, static_cast<size_t>(s.rows * s.cols * (g.kind == Float::kF32 ? 4 : 2)), stream);
  if (tiles.tokens == 0) return launch_sm90_grouped_small_m(g, stream);
  const int64_t pairs = (s.cols + kFusedCols - 1) / kFusedCols, slots = (s.depth + kFusedDepth - 1) / kFusedDepth;
  const GroupedScratch at = grouped_scratch(s, tiles);
  if (at.most_tiles * pairs > INT32_MAX - kGroupedPairs * kGroupedMostParts) return cudaErrorInvalidConfiguration;
  auto* const bytes = static_cast<uint8_t*>(scratch);
  auto* const header = reinterpret_cast<GroupedHeader*>(bytes + at.list);
  auto* const flags = reinterpret_cast<uint32_t*>(bytes + at.flags);
  const TileTimes times = times_of(tiles.tokens);
  const GroupedListing listing{g.sizes,
                               static_cast<int>(s.groups),
                               static_cast<int>(s.rows),
                               tiles.tokens,
                               tiles.tokens / 2,
                               static_cast<int>(pairs),
                               static_cast<int>(slots),
                               times.slot,
                               times.split,
                               header,
                               static_cast<int>(at.most_tiles),
                               flags,
                               static_cast<int>(at.flag_count)};
  GroupedMaps maps;
  const cudaError_t status = prepare({g, tiles, at, bytes, listing}, stream, &maps);
  if (status != cudaSuccess) return status;
  const bool quantized = g.a.quantized(), bf16 = !quantized && g.a.kind == Float::kBf16;
  GroupedFusedArgs args{};
  args.g = {g.a, g.b, {nullptr, Float::kBf16, g.out, g.kind}, {1, s.rows, s.cols, s.depth}};
  args.tokens = static_cast<int>(s.rows), args.columns = static_cast<int>(s.cols);
  args.pairs = static_cast<int>(pairs), args.slots = static_cast<int>(slots);
  args.each_row = quantized && g.a.map.rows_per_amax < s.rows, args.each_col = g.b.map.rows_per_amax < s.cols;
  args.a_matrices = args.b_matrices = 1;
  args.unscale = bf16 ? 0x1p8f : quantized ? 0x1p28f : 0x1p14f;
  args.sums = reinterpret_cast<float*>(bytes + at.sums), args.flags = flags;
  args.header = header, args.most_tiles = static_cast<int>(at.most_tiles);
  return bf16 ? launch_sm90_bf16_grouped(args, maps, tiles.tokens, stream)
              : launch_sm90_f16_grouped(args, maps, tiles.tokens, stream);
}

}  // namespace jnvfp4
