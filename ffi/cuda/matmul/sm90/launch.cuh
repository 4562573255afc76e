// Programmatic dependent launch (PDL): a kernel starts before the previous one ends, and waits for its end itself.
#pragma once

#include "../../device.cuh"

namespace jnvfp4 {

// `cluster`: CTAs of one. `shared`: bytes of shared memory.
template <class... Args>
cudaError_t launch_early(void (*kernel)(Args...), dim3 grid, unsigned threads, unsigned cluster, int shared,
                         cudaStream_t stream, Args... args) {
  cudaError_t status = cudaSuccess;
  if (shared > 0) status = allow_shared(reinterpret_cast<const void*>(kernel), shared);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream, config.attrs = attributes, config.numAttrs = cluster > 1 ? 2 : 1;
  if (status == cudaSuccess) status = cudaLaunchKernelEx(&config, kernel, args...);
  if (status != cudaSuccess) cudaGetLastError();  // it is returned, and not to be found by the next launch
  return status;
}

}  // namespace jnvfp4
