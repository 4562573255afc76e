// The kernels of products that are compiled for 90a alone: how each runs a plan.
#include "../../../plan/sm90_fused.h"
#include "../../../plan/sm90_grouped.h"
#include "../../../plan/sm90_pinned.h"
#include "../../../plan/sm90_windows.h"
#include "../launchers.h"

namespace jnvfp4 {
namespace {

cudaError_t small_m(const MatmulArgs& g, void*, cudaStream_t stream) { return launch_sm90_small_m(g, stream); }
cudaError_t fused(const MatmulArgs& g, void* scratch, cudaStream_t stream) {
  return launch_sm90_fused(g, plan_fused(g.shape, g.a.quantized()), scratch, stream);
}
cudaError_t pinned(const MatmulArgs& g, void* scratch, cudaStream_t stream) {
  return launch_sm90_pinned(g, plan_pinned(g.shape), scratch, stream);
}
cudaError_t pinned_prepared(const MatmulArgs& g, void* scratch, cudaStream_t stream) {
  return launch_sm90_pinned(g, plan_pinned_prepared(g.windows()), scratch, stream);
}
cudaError_t windows(const MatmulArgs& g, void* scratch, cudaStream_t stream) {
  return launch_sm90_windows(g, plan_windows(g.shape, g.a.map.windows(), g.b.map.windows()), scratch, stream);
}
cudaError_t grouped(const GroupedArgs& g, void* scratch, cudaStream_t stream) {
  return launch_sm90_grouped(g, plan_grouped_tiles(g.shape), scratch, stream);
}
cudaError_t pinned_grouped(const GroupedArgs& g, void* scratch, cudaStream_t stream) {
  return launch_sm90_grouped(g, plan_pinned_groups(g.shape), scratch, stream);
}

const Launchers<MatmulArgs> kMatmul({{"sm90_nvfp4_small_m", small_m},
                                     {"sm90_dense_small_m", small_m},
                                     {"sm90_nvfp4_fused", fused},
                                     {"sm90_dense_fused", fused},
                                     {"sm90_nvfp4_windows", windows},
                                     {"sm90_nvfp4_pinned_prepared", pinned_prepared},
                                     {"sm90_nvfp4_pinned", pinned}});
const Launchers<GroupedArgs> kGrouped({{"sm90_nvfp4_grouped", grouped},
                                       {"sm90_dense_grouped", grouped},
                                       {"sm90_nvfp4_pinned_grouped", pinned_grouped}});

}  // namespace
}  // namespace jnvfp4
