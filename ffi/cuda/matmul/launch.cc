// Runs the kernel that a plan names.
#include "launchers.h"

namespace jnvfp4 {
namespace {

cudaError_t blocks_small_m(const MatmulArgs& g, void*, cudaStream_t stream) {
  return launch_sm80_nvfp4_blocks_small_m(g, stream);
}
cudaError_t elements(const MatmulArgs& g, void*, cudaStream_t stream) { return launch_sm80_dense_elements(g, stream); }

const Launchers<MatmulArgs> kInEveryBuild({{"sm80_nvfp4_blocks_small_m", blocks_small_m},
                                           {"sm80_nvfp4_blocks", launch_sm80_nvfp4_blocks},
                                           {"sm80_dense_elements", elements},
                                           {"sm100_cublaslt_nvfp4", launch_sm100_cublaslt_nvfp4}});

}  // namespace

cudaError_t launch_matmul(const MatmulArgs& args, std::string_view kernel, void* scratch, cudaStream_t stream) {
  return Launchers<MatmulArgs>::launch(kernel, args, scratch, stream);
}
cudaError_t launch_grouped(const GroupedArgs& args, std::string_view kernel, void* scratch, cudaStream_t stream) {
  return Launchers<GroupedArgs>::launch(kernel, args, scratch, stream);
}

}  // namespace jnvfp4
