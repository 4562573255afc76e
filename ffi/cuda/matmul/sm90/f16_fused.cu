// The fused kernels whose operands are decoded to float16: two NVFP4 operands, or a float16 left one.
#include "fused.cuh"

namespace jnvfp4 {

cudaError_t launch_sm90_f16_fused(const FusedArgs& args, const FusedMaps& maps, int tokens, cudaStream_t stream) {
  return launch_fused_tokens<F16>(args, maps, tokens, stream);
}

}  // namespace jnvfp4
