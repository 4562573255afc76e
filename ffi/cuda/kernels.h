// The launchers that the handlers call. No XLA here, so that device code compiles fast. Each takes arguments that its
// call in ../calls has checked; a spec that no kernel is built for gives cudaErrorInvalidValue.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

#include "../core/args.h"

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

// Run the kernel that a plan names, which is of no XLA operations, with the scratch that the plan asks for.
cudaError_t launch_matmul(const MatmulArgs& args, std::string_view kernel, void* scratch, cudaStream_t stream);
cudaError_t launch_grouped(const GroupedArgs& args, std::string_view kernel, void* scratch, cudaStream_t stream);
// Launch the kernels around XLA's 16-bit GEMM; the epilogue also follows cuBLASLt's.
cudaError_t launch_decode(const DecodeArgs& args, cudaStream_t stream);
cudaError_t launch_epilogue(const EpilogueArgs& args, cudaStream_t stream);

cudaError_t launch_decode_attention(const DecodeAttentionArgs& args, std::string_view kernel, void* scratch,
                                    cudaStream_t stream);
cudaError_t launch_append_kv(const AppendKvArgs& args, cudaStream_t stream);

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
