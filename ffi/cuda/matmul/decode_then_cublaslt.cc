// out = a b^T in three steps: NVFP4 operands decoded to 16 bits in scratch, cuBLASLt's GEMM, and the epilogue. What
// decode_then_dot does in XLA operations, in one call.
//
// cuBLASLt makes float32 sums, and the epilogue kernel alpha, bias and the cast. cuBLASLt could do these too, which
// would save a pass over the sums, but not with the bits of docs/numerics.md: its NaN is 0x7fff where the rule's is
// 0x7fc0, how it rounds alpha * y + bias and when it applies alpha to parts of K is not documented, and it takes no
// factor for each row and column at once.
#include <algorithm>

#include "../kernels.h"
#include "cublaslt_gemm.h"

namespace jnvfp4 {
namespace {

// As many matrices at a time as a dimension of a grid allows.
cudaError_t multiply(const GemmShape& s, Float kind, const uint16_t* a, const uint16_t* b, float* sums, void* workspace,
                     cudaStream_t stream) {
  constexpr int64_t kMost = 65535;
  const CublasLt* lt = cublaslt();
  if (!lt) return cudaErrorSharedObjectInitFailed;
  lt::Handle handle = nullptr;
  lt::Status status = handle_of_device(*lt, &handle);
  const int type = kind == Float::kBf16 ? lt::kR16BF : lt::kR16F;
  for (int64_t first = 0; first < s.batch && status == lt::kSuccess; first += kMost) {
    CublasLtGemm gemm(*lt, {{std::min(kMost, s.batch - first), s.rows, s.cols, s.depth}, type, lt::kR32F});
    status = gemm.choose(handle);
    if (status == lt::kSuccess)
      status = gemm.run(handle, a + first * s.rows * s.depth, b + first * s.cols * s.depth,
                        sums + first * s.rows * s.cols, workspace, stream);
  }
  return error_of(status);
}

cudaError_t decode(const MatmulOperand& t, int64_t elements, Float kind, void* out, cudaStream_t stream) {
  return launch_decode({static_cast<const uint8_t*>(t.data), t.scale, out, kind, elements / kBlock}, stream);
}

}  // namespace

cudaError_t launch_decode_then_cublaslt(const MatmulArgs& g, void* scratch, cudaStream_t stream) {
  const GemmShape& s = g.shape;
  const bool decoded = g.a.quantized();
  const CublasLtScratch at = cublaslt_scratch(s, decoded, g.result.kind);
  auto* const bytes = static_cast<uint8_t*>(scratch);
  const Float kind = decoded ? Float::kBf16 : g.a.kind;
  const void* a = decoded ? bytes + at.a : g.a.data;
  auto* const sums = static_cast<float*>(g.result.kind == Float::kF32 ? g.result.out : bytes + at.sums);
  cudaError_t status = decode(g.b, s.batch * s.cols * s.depth, kind, bytes + at.b, stream);
  if (status == cudaSuccess && decoded) status = decode(g.a, s.batch * s.rows * s.depth, kind, bytes + at.a, stream);
  if (status == cudaSuccess)
    status = multiply(s, kind, static_cast<const uint16_t*>(a), reinterpret_cast<const uint16_t*>(bytes + at.b), sums,
                      bytes + at.workspace, stream);
  if (status != cudaSuccess) return status;
  return launch_epilogue({sums, s.cols, decoded, g.a, g.b, g.result, s},
                         stream);  // in place if the result holds the sums
}

}  // namespace jnvfp4
