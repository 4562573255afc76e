// The fused kernel whose operands have an amax for each window.
#include "sm90_fused.cuh"

namespace jnvfp4 {

cudaError_t launch_sm90_windows_fused(const FusedArgs& args, const FusedMaps& maps, cudaStream_t stream) {
  return launch_fused_config<FusedConfig<F16, 128, true>>(args, maps, stream);
}

}  // namespace jnvfp4
