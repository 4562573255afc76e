// Runs a plan: the only place that chooses among the kernels of nvfp4_matmul.
#include "../kernels.h"

namespace jnvfp4 {

cudaError_t launch_matmul(const MatmulArgs& args, const MatmulPlan& plan, void* scratch, cudaStream_t stream) {
  switch (plan.kernel) {
    case MatmulKernel::kSm80Nvfp4BlocksSmallM: return launch_sm80_nvfp4_blocks_small_m(args, stream);
    case MatmulKernel::kSm80Nvfp4Blocks: return launch_sm80_nvfp4_blocks(args, stream);
    case MatmulKernel::kSm80DenseElements: return launch_sm80_dense_elements(args, stream);
    case MatmulKernel::kSm100CublasLtNvfp4: return launch_sm100_cublaslt_nvfp4(args, scratch, stream);
#if defined(JNVFP4_SM90A)
    case MatmulKernel::kSm90Nvfp4SmallM:
    case MatmulKernel::kSm90DenseSmallM: return launch_sm90_small_m(args, stream);
    case MatmulKernel::kSm90Nvfp4Fused:
    case MatmulKernel::kSm90DenseFused:
      return launch_sm90_fused(args, plan_fused(args.shape, args.a.quantized()), scratch, stream);
    case MatmulKernel::kSm90Nvfp4Windows:
      return launch_sm90_windows(args, plan_windows(args.shape, args.a.map.windows(), args.b.map.windows()), scratch,
                                 stream);
#else
    case MatmulKernel::kSm90Nvfp4SmallM:
    case MatmulKernel::kSm90DenseSmallM:
    case MatmulKernel::kSm90Nvfp4Fused:
    case MatmulKernel::kSm90DenseFused:
    case MatmulKernel::kSm90Nvfp4Windows:
#endif
    case MatmulKernel::kDecodeThenDot:  // XLA operations
    case MatmulKernel::kCpuNvfp4Blocks:
    case MatmulKernel::kCpuDenseElements: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace jnvfp4
