// Up to 16 rows: the kernels of sm90_small_m_mma.cuh for each type of the left operand.
#include "sm90_small_m_mma.cuh"

namespace jnvfp4::small_m {

template cudaError_t launch_mma<Left::kNvfp4>(const MatmulArgs&, cudaStream_t);
template cudaError_t launch_mma<Left::kBf16>(const MatmulArgs&, cudaStream_t);
template cudaError_t launch_mma<Left::kF16>(const MatmulArgs&, cudaStream_t);

}  // namespace jnvfp4::small_m
