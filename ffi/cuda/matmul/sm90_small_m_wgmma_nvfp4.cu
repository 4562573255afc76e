// 17 to 64 rows of an NVFP4 tensor.
#include "sm90_small_m_wgmma.cuh"

namespace jnvfp4::small_m {

template cudaError_t launch_wgmma<Left::kNvfp4>(const MatmulArgs&, cudaStream_t);

}  // namespace jnvfp4::small_m
