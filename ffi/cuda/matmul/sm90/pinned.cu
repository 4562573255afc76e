// Launches the Hopper kernels of the pinned order.
#include "../../../plan/scratch.h"
#include "maps.h"
#include "pinned.cuh"

namespace jnvfp4 {
namespace {

// Decodes b or copies what must be copied, arranges amaxes, prepares a last, since the kernel that follows may start
// early, and describes it all.
cudaError_t prepare(const MatmulArgs& g, const PinnedPlan& plan, const PinnedScratch& at, uint8_t* scratch,
                    cudaStream_t stream, FusedMaps* maps) {
  const GemmShape& s = g.shape;
  const int64_t a_rows = s.batch * s.rows, b_rows = s.batch * s.cols, depth = fused_depth(s.depth);
  const bool codes = plan.b == Pinned::kCodes;
  const auto amaxes = [&](const MatmulOperand& x, int64_t out, int64_t rows, int tile_rows) {
    return launch_sm90_amaxes(x, reinterpret_cast<float*>(scratch + out), s.batch, rows, tile_rows, s.depth,
                              out == at.token_amaxes, stream);
  };
  PitchedRows data{}, scale{};
  cudaError_t status = pitched_rows(g.b.scale, b_rows, s.depth / kBlock, scratch + at.scale, stream, &scale);
  if (status == cudaSuccess)
    status = codes
                 ? pitched_rows(g.b.data, b_rows, s.depth / 2, scratch + at.data, stream, &data)
                 : launch_sm90_prepare(g.b, Order::kBlocks, scratch + at.columns, b_rows, s.depth, nullptr, 0, stream);
  if (status == cudaSuccess && plan.b == Pinned::kWindows) {
    status = amaxes(g.a, at.token_amaxes, s.rows, plan.tokens);
    if (status == cudaSuccess) status = amaxes(g.b, at.column_amaxes, s.cols, static_cast<int>(kFusedCols));
  }
  if (status == cudaSuccess)
    status = launch_sm90_prepare(g.a, Order::kBlocks, scratch + at.rows, a_rows, s.depth,
                                 reinterpret_cast<uint32_t*>(scratch + at.flags), at.flag_count, stream);
  if (status != cudaSuccess) return status;
  constexpr uint32_t kBox = kFusedCols / 2;
  return make_maps(
      {{map_of_numbers(scratch + at.rows, at.padded_rows, depth, static_cast<uint32_t>(plan.tokens / 2)), &maps->a},
       {codes ? map_of_bytes(data, b_rows, kWindow / 2, kBox)
              : map_of_numbers(scratch + at.columns, b_rows, depth, kBox),
        &maps->data},
       {map_of_bytes(scale, b_rows, 16, kBox), &maps->scale}});
}

template <class C>
cudaError_t launch(const typename C::Args& args, const FusedMaps& maps, int clusters, cudaStream_t stream) {
  return launch_early(sm90_pinned_kernel<C>, 2 * clusters, C::kThreads, 2, C::kShared, stream, args, maps);
}

cudaError_t launch_plan(const PinnedArgs& args, const FusedMaps& maps, const PinnedPlan& plan, cudaStream_t stream) {
  const int clusters = clusters_of(args.num_work_tiles, 0, 1);
  const auto is = [&](Pinned b, int tokens) { return plan.b == b && plan.tokens == tokens; };
  if (is(Pinned::kCodes, 64)) return launch<PinnedConfig<64, Pinned::kCodes>>(args, maps, clusters, stream);
  if (is(Pinned::kCodes, 128)) return launch<PinnedConfig<128, Pinned::kCodes>>(args, maps, clusters, stream);
  if (is(Pinned::kCodes, 256)) return launch<PinnedConfig<256, Pinned::kCodes>>(args, maps, clusters, stream);
  if (is(Pinned::kNumbers, 256)) return launch<PinnedConfig<256, Pinned::kNumbers>>(args, maps, clusters, stream);
  if (is(Pinned::kWindows, 128)) return launch<PinnedConfig<128, Pinned::kWindows>>(args, maps, clusters, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_sm90_pinned(const MatmulArgs& g, const PinnedPlan& plan, void* scratch, cudaStream_t stream) {
  if (g.windows() != (plan.b == Pinned::kWindows)) return cudaErrorInvalidValue;
  const PinnedScratch at = pinned_scratch(g.shape, plan);
  auto* const bytes = static_cast<uint8_t*>(scratch);
  PinnedArgs args{};
  cudaError_t status = fused_args(g, {plan.tokens, 1, false}, at, scratch, &args);
  if (status != cudaSuccess) return status;
  const double reciprocal = 1.0 / (36.0 * double{g.a.e4m3_max} * double{g.b.e4m3_max});
  const auto large = static_cast<float>(reciprocal), small = static_cast<float>(reciprocal - double{large});
  args.token_amaxes = reinterpret_cast<float*>(bytes + at.token_amaxes);
  args.column_amaxes = reinterpret_cast<float*>(bytes + at.column_amaxes);
  args.reciprocal = large * 0x1p28f, args.reciprocal_rest = small * 0x1p28f, args.reciprocal64 = reciprocal;
  FusedMaps maps;
  status = prepare(g, plan, at, bytes, stream, &maps);
  return status == cudaSuccess ? launch_plan(args, maps, plan, stream) : status;
}

cudaError_t launch_sm90_pinned_grouped(const GroupedFusedArgs& args, const FusedMaps& maps, int tokens,
                                       cudaStream_t stream) {
  const int clusters = clusters_of_list(multiprocessors() / 2, args.max_tiles, args.column_tiles);
  switch (tokens) {
    case 64: return launch<PinnedConfig<64, Pinned::kCodes, true>>(args, maps, clusters, stream);
    case 128: return launch<PinnedConfig<128, Pinned::kCodes, true>>(args, maps, clusters, stream);
    case 256: return launch<PinnedConfig<256, Pinned::kCodes, true>>(args, maps, clusters, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jnvfp4
