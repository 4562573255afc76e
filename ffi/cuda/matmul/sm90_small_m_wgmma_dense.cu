// 17 to 64 rows of a 16-bit array.
#include "sm90_small_m_wgmma.cuh"

namespace jnvfp4::small_m {

template cudaError_t launch_wgmma<Left::kBf16>(const MatmulArgs&, cudaStream_t);
template cudaError_t launch_wgmma<Left::kF16>(const MatmulArgs&, cudaStream_t);

}  // namespace jnvfp4::small_m
