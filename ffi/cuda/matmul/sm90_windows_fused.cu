// The fused kernels whose operands have an amax for each window.
#include "sm90_fused.cuh"

namespace jnvfp4 {

cudaError_t launch_sm90_windows_fused(const FusedArgs& args, const FusedMaps& maps, cudaStream_t stream) {
  const bool a = args.g.a.map.windows(), b = args.g.b.map.windows();
  if (a && b) return launch_fused_config<FusedConfig<F16, 128, WindowSides::kBoth>>(args, maps, stream);
  if (a) return launch_fused_config<FusedConfig<F16, 128, WindowSides::kA>>(args, maps, stream);
  return launch_fused_config<FusedConfig<F16, 128, WindowSides::kB>>(args, maps, stream);
}

}  // namespace jnvfp4
