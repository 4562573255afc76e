// The launchers of kernels that a plan names, and those of products.
#pragma once

#include <initializer_list>
#include <map>

#include "../kernels.h"

namespace jnvfp4 {

// Adds launchers, by the kernel that each runs, while the module is loaded. A build has the launchers of the sources
// that it compiles, so that launch.cc knows no architecture.
template <class Args>
class Launchers {
 public:
  using Launch = cudaError_t (*)(const Args&, void* scratch, cudaStream_t);
  using Known = std::map<std::string_view, Launch>;

  explicit Launchers(std::initializer_list<typename Known::value_type> launchers) { known().insert(launchers); }

  static Known& known() {
    static Known all;
    return all;
  }
  static cudaError_t launch(std::string_view kernel, const Args& args, void* scratch, cudaStream_t stream) {
    const auto found = known().find(kernel);
    return found == known().end() ? cudaErrorInvalidValue : found->second(args, scratch, stream);
  }
};

cudaError_t launch_sm80_nvfp4_blocks(const MatmulArgs& args, void* scratch, cudaStream_t stream);
// A CTA has 8, 16, 32 or 64 rows of a: `tokens`, or what suits the shape and the device for 0.
cudaError_t launch_sm80_nvfp4_blocks_small_m(const MatmulArgs& args, cudaStream_t stream, int tokens = 0);
cudaError_t launch_sm80_dense_elements(const MatmulArgs& args, cudaStream_t stream);
// Needs the library that find_cublaslt has found.
cudaError_t launch_sm100_cublaslt_nvfp4(const MatmulArgs& args, void* scratch, cudaStream_t stream);

// In builds for 90a alone; how they divide a product is in ../../plan/sm90_*.h.
struct FusedPlan;
struct PinnedPlan;
struct GroupedTiles;
cudaError_t launch_sm90_small_m(const MatmulArgs& args, cudaStream_t stream);
cudaError_t launch_sm90_fused(const MatmulArgs& args, const FusedPlan& plan, void* scratch, cudaStream_t stream);
cudaError_t launch_sm90_pinned(const MatmulArgs& args, const PinnedPlan& plan, void* scratch, cudaStream_t stream);
cudaError_t launch_sm90_windows(const MatmulArgs& args, const FusedPlan& plan, void* scratch, cudaStream_t stream);
cudaError_t launch_sm90_grouped(const GroupedArgs& args, const GroupedTiles& tiles, void* scratch, cudaStream_t stream);

}  // namespace jnvfp4
