// Runs a plan: the only place that chooses among the kernels of nvfp4_matmul.
#include "../kernels.h"

namespace jnvfp4 {
namespace {

// cudaErrorNotSupported where CMake has left out the target 90a.
cudaError_t launch_fused([[maybe_unused]] const MatmulArgs& args, [[maybe_unused]] void* scratch,
                         [[maybe_unused]] cudaStream_t stream) {
#if defined(JNVFP4_HAS_90A)
  return launch_sm90_fused(args, choose_fused_tile(args.shape), scratch, stream);
#else
  return cudaErrorNotSupported;
#endif
}

}  // namespace

cudaError_t launch_matmul(const MatmulArgs& args, const MatmulPlan& plan, void* scratch, cudaStream_t stream) {
  switch (plan.kernel) {
    case MatmulKernel::kSm80Nvfp4Blocks: return launch_sm80_nvfp4_blocks(args, stream);
    case MatmulKernel::kSm80DenseElements: return launch_sm80_dense_elements(args, stream);
    case MatmulKernel::kSm90Nvfp4Fused:
    case MatmulKernel::kSm90DenseFused: return launch_fused(args, scratch, stream);
    case MatmulKernel::kDecodeThenDot:  // XLA operations
    case MatmulKernel::kCpuNvfp4Blocks:
    case MatmulKernel::kCpuDenseElements: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace jnvfp4
