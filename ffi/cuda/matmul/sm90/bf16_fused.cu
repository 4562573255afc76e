// The fused kernels whose right operand is decoded to bfloat16, since the left one is a bfloat16 array.
#include "fused.cuh"

namespace jnvfp4 {

cudaError_t launch_sm90_bf16_fused(const FusedArgs& args, const FusedMaps& maps, int tokens, cudaStream_t stream) {
  return launch_fused_tokens<Bf16>(args, maps, tokens, stream);
}

}  // namespace jnvfp4
