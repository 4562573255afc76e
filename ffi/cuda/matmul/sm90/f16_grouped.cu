// The kernels of grouped products whose right operand is decoded to float16.
#include "grouped.cuh"

namespace jnvfp4 {

cudaError_t launch_sm90_f16_grouped(const GroupedFusedArgs& args, const GroupedMaps& maps, int tokens,
                                    cudaStream_t stream) {
  return launch_grouped_tokens<F16>(args, maps, tokens, stream);
}

}  // namespace jnvfp4
