// Runs a plan: the only place that chooses among the kernels of products, and knows which are in this build.
#include <cstddef>

#include "../../plan/sm90_fused.h"
#include "../../plan/sm90_grouped.h"
#include "../../plan/sm90_pinned.h"
#include "../../plan/sm90_windows.h"
#include "launchers.h"

namespace jnvfp4 {
namespace {

template <class Args>
struct Launcher {
  std::string_view kernel;
  cudaError_t (*launch)(const Args&, void* scratch, cudaStream_t);  // null where it is not built
};

cudaError_t blocks_small_m(const MatmulArgs& g, void*, cudaStream_t stream) {
  return launch_sm80_nvfp4_blocks_small_m(g, stream);
}
cudaError_t elements(const MatmulArgs& g, void*, cudaStream_t stream) { return launch_sm80_dense_elements(g, stream); }

#if defined(JNVFP4_SM90A)
constexpr bool kBuilt = true;
cudaError_t small_m(const MatmulArgs& g, void*, cudaStream_t stream) { return launch_sm90_small_m(g, stream); }
cudaError_t fused(const MatmulArgs& g, void* scratch, cudaStream_t stream) {
  return launch_sm90_fused(g, plan_fused(g.shape, g.a.quantized()), scratch, stream);
}
cudaError_t pinned(const MatmulArgs& g, void* scratch, cudaStream_t stream) {
  return launch_sm90_fused(g, plan_pinned(g.shape), scratch, stream);
}
cudaError_t pinned_prepared(const MatmulArgs& g, void* scratch, cudaStream_t stream) {
  return launch_sm90_fused(g, plan_pinned_prepared(g.windows()), scratch, stream);
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
#else
constexpr bool kBuilt = false;
constexpr std::nullptr_t small_m{}, fused{}, pinned{}, pinned_prepared{}, windows{}, grouped{}, pinned_grouped{};
#endif

constexpr Launcher<MatmulArgs> kMatmul[] = {
    {"sm90_nvfp4_small_m", small_m},
    {"sm90_dense_small_m", small_m},
    {"sm90_nvfp4_fused", fused},
    {"sm90_dense_fused", fused},
    {"sm90_nvfp4_windows", windows},
    {"sm90_nvfp4_pinned_prepared", pinned_prepared},
    {"sm90_nvfp4_pinned", pinned},
    {"sm80_nvfp4_blocks_small_m", blocks_small_m},
    {"sm80_nvfp4_blocks", launch_sm80_nvfp4_blocks},
    {"sm80_dense_elements", elements},
    {"sm100_cublaslt_nvfp4", launch_sm100_cublaslt_nvfp4},
};
constexpr Launcher<GroupedArgs> kGrouped[] = {
    {"sm90_nvfp4_grouped", grouped}, {"sm90_dense_grouped", grouped}, {"sm90_nvfp4_pinned_grouped", pinned_grouped}};

template <class Args, size_t kCount>
cudaError_t launch(const Launcher<Args> (&launchers)[kCount], std::string_view kernel, const Args& args, void* scratch,
                   cudaStream_t stream) {
  for (const Launcher<Args>& launcher : launchers)
    if (launcher.kernel == kernel && launcher.launch) return launcher.launch(args, scratch, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

const bool kSm90a = kBuilt;

cudaError_t launch_matmul(const MatmulArgs& args, std::string_view kernel, void* scratch, cudaStream_t stream) {
  return launch(kMatmul, kernel, args, scratch, stream);
}
cudaError_t launch_grouped(const GroupedArgs& args, std::string_view kernel, void* scratch, cudaStream_t stream) {
  return launch(kGrouped, kernel, args, scratch, stream);
}

}  // namespace jnvfp4
