// Runs the kernel of decode attention that a plan names.
#include "../matmul/launchers.h"

namespace jnvfp4 {

cudaError_t launch_decode_attention(const DecodeAttentionArgs& args, std::string_view kernel, void* scratch,
                                    cudaStream_t stream) {
  return Launchers<DecodeAttentionArgs>::launch(kernel, args, scratch, stream);
}

}  // namespace jnvfp4
