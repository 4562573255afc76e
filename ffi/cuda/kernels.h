// The launchers that the handlers call. No XLA here, so that device code compiles fast. Each takes arguments that its
// call in ../calls has checked; a spec that no kernel is built for gives cudaErrorInvalidValue.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "../core/args.h"
#include "../plan/matmul.h"
#include "../plan/tiles.h"

namespace jnvfp4 {

cudaError_t launch_quantize(const QuantizeArgs& args, const KernelSpec& spec, cudaStream_t stream);
// Halves of launch_quantize, one a translation unit: blocks along contiguous rows, and everything else.
cudaError_t launch_quantize_rows(const QuantizeArgs& args, const KernelSpec& spec, cudaStream_t stream);
cudaError_t launch_quantize_tiles(const QuantizeArgs& args, const KernelSpec& spec, cudaStream_t stream);
cudaError_t launch_quantize_pair(const PairArgs& args, const KernelSpec& row, const KernelSpec& col,
                                 cudaStream_t stream);
cudaError_t launch_rht_amax(const RhtAmaxArgs& args, cudaStream_t stream);
cudaError_t launch_dequantize(const DequantizeArgs& args, cudaStream_t stream);
cudaError_t launch_transpose(const TransposeArgs& args, cudaStream_t stream);

// Whether this build has the kernels of 90a: the target was asked for, and the compiler knows it.
#if defined(JNVFP4_SM90A)
inline constexpr bool kSm90a = true;
#else
inline constexpr bool kSm90a = false;
#endif
// Runs a plan whose kernel is not decode_then_dot.
cudaError_t launch_matmul(const MatmulArgs& args, const MatmulPlan& plan, void* scratch, cudaStream_t stream);
cudaError_t launch_sm80_nvfp4_blocks(const MatmulArgs& args, cudaStream_t stream);
// A thread block has 8, 16, 32 or 64 rows of a: `tokens`, or what suits the shape and the device for 0.
cudaError_t launch_sm80_nvfp4_blocks_small_m(const MatmulArgs& args, cudaStream_t stream, int tokens = 0);
cudaError_t launch_sm80_dense_elements(const MatmulArgs& args, cudaStream_t stream);
// In builds for 90a alone.
cudaError_t launch_sm90_fused(const MatmulArgs& args, const FusedPlan& plan, void* scratch, cudaStream_t stream);
cudaError_t launch_sm90_windows(const MatmulArgs& args, const FusedPlan& plan, void* scratch, cudaStream_t stream);
cudaError_t launch_sm90_small_m(const MatmulArgs& args, cudaStream_t stream);
cudaError_t launch_sm90_grouped(const GroupedArgs& args, const GroupedTiles& tiles, void* scratch, cudaStream_t stream);
// Where find_cublaslt has found the library.
cudaError_t launch_sm100_cublaslt_nvfp4(const MatmulArgs& args, void* scratch, cudaStream_t stream);
// What surrounds XLA's 16-bit GEMM; the epilogue also follows cuBLASLt's.
cudaError_t launch_decode(const DecodeArgs& args, cudaStream_t stream);
cudaError_t launch_epilogue(const EpilogueArgs& args, cudaStream_t stream);

// The copy of cuBLASLt that products call, or why there is none.
struct CublasLtCopy {
  std::string path;
  int64_t version;  // 10000 * major + 100 * minor + patch
  std::string reason;
};
// Takes the copy that the process has loaded already, else loads the file at `path`, which is absolute, or empty for
// none. Once found, a copy stays in use; what was not found is looked for again.
CublasLtCopy find_cublaslt(const std::string& path);
bool has_cublaslt();         // whether it has found one
int64_t cublaslt_version();  // of that; 0 without

}  // namespace jnvfp4
