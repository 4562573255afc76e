// The left operand in bfloat16, the right one NVFP4.
#include "sm90_fused.cuh"

namespace jnvfp4 {

cudaError_t launch_sm90_bf16_fused_tile(const FusedArgs& args, const FusedMaps& maps, FusedTile tile,
                                        cudaStream_t stream) {
  return launch_fused_tile<Bf16, false>(args, maps, tile, stream);
}

}  // namespace jnvfp4
