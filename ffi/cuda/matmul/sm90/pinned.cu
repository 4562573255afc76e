// Launches the Hopper kernels of the pinned order.
#include "pinned.cuh"

namespace jnvfp4 {
namespace {

template <class C>
cudaError_t launch(const typename C::Args& args, const FusedMaps& maps, int clusters, cudaStream_t stream) {
  return launch_early(sm90_pinned_kernel<C>, 2 * clusters, C::kThreads, 2, C::kShared, stream, args, maps);
}

}  // namespace

cudaError_t launch_sm90_pinned(const FusedArgs& args, const FusedMaps& maps, const FusedPlan& plan,
                               cudaStream_t stream) {
  const int clusters = clusters_of(args.num_work_tiles, 0, 1);
  const auto is = [&](Pinned pinned, int tokens) { return plan.pinned == pinned && plan.tokens == tokens; };
  if (is(Pinned::kCodes, 64)) return launch<PinnedConfig<64, Pinned::kCodes>>(args, maps, clusters, stream);
  if (is(Pinned::kCodes, 128)) return launch<PinnedConfig<128, Pinned::kCodes>>(args, maps, clusters, stream);
  if (is(Pinned::kCodes, 256)) return launch<PinnedConfig<256, Pinned::kCodes>>(args, maps, clusters, stream);
  if (is(Pinned::kNumbers, 256)) return launch<PinnedConfig<256, Pinned::kNumbers>>(args, maps, clusters, stream);
  if (is(Pinned::kWindows, 128)) return launch<PinnedConfig<128, Pinned::kWindows>>(args, maps, clusters, stream);
  return cudaErrorInvalidValue;
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
