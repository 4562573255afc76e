// Both operands NVFP4: a is decoded once to scratch, b in registers.
#include "sm90_fused.cuh"

namespace jnvfp4 {

cudaError_t launch_sm90_nvfp4_fused_tile(const FusedArgs& args, const FusedMaps& maps, FusedTile tile,
                                         cudaStream_t stream) {
  return launch_fused_tile<F16, true>(args, maps, tile, stream);
}

}  // namespace jnvfp4
