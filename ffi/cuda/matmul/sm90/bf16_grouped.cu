// The kernels of grouped products whose right operand is decoded to bfloat16, since the left one is a bfloat16 array.
#include "grouped.cuh"

namespace jnvfp4 {

cudaError_t launch_sm90_bf16_grouped(const GroupedFusedArgs& args, const GroupedMaps& maps, int tokens,
                                     cudaStream_t stream) {
  return launch_grouped_tokens<Bf16>(args, maps, tokens, stream);
}

}  // namespace jnvfp4
