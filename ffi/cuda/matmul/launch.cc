// Runs a plan: the only place that chooses among the kernels of nvfp4_matmul.
#include "../kernels.h"

namespace jnvfp4 {

cudaError_t launch_matmul(const MatmulArgs& args, const MatmulPlan& plan, void* /* scratch */, cudaStream_t stream) {
  switch (plan.kernel) {
    case MatmulKernel::kSm80Nvfp4Blocks: return launch_sm80_nvfp4_blocks(args, stream);
    case MatmulKernel::kSm80DenseElements: return launch_sm80_dense_elements(args, stream);
    case MatmulKernel::kDecodeThenDot:  // XLA operations
    case MatmulKernel::kCpuNvfp4Blocks:
    case MatmulKernel::kCpuDenseElements: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace jnvfp4
