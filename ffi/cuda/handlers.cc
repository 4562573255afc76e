// The CUDA handlers: each runs the launcher of its call on XLA's stream. They do not allocate, synchronise or read
// device memory, so XLA may record them in command buffers (CUDA graphs).
#include <cuda_runtime_api.h>

#include <atomic>

#include "../calls/attention.h"
#include "../calls/dequantize.h"
#include "../calls/grouped_matmul.h"
#include "../calls/matmul.h"
#include "../calls/quantize.h"
#include "../calls/transpose.h"
#include "kernels.h"

namespace jnvfp4 {
namespace {

ffi::Error launched(std::string_view op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  std::string text = std::string(op) + ": the kernel launch failed: " + cudaGetErrorString(status);
  if (status == cudaErrorNoKernelImageForDevice) text += " (jnvfp4 needs compute capability 8.0 or newer)";
  if (status == cudaErrorNotSupported)
    text += " (cuBLASLt has no algorithm; implementation=\"decode_then_dot\" needs none)";
  return ffi::Error(ffi::ErrorCode::kInternal, text);
}

// Why there is no cuBLASLt. Where Python lowered the program it has looked already; a program that was loaded finds the
// copy of JAX's plugin.
std::string_view no_cublaslt() {
  static const CublasLtCopy loaded = find_cublaslt("");
  return has_cublaslt() ? std::string_view() : loaded.reason;
}

// Capability of the current device, which XLA has set to that of the stream; looked up once.
int current_capability() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return kAnyGpu;  // the launch that follows reports what is wrong
  if (device < kDevices && known[device]) return known[device];
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess)
    return kAnyGpu;
  if (device < kDevices) known[device] = 10 * major + minor;
  return 10 * major + minor;
}
Device current_device() { return {current_capability(), JNVFP4_CUDA_BUILT_FOR, no_cublaslt(), cublaslt_version()}; }

ffi::Error quantize(cudaStream_t stream, const QuantizeArgs& args, const KernelSpec& spec) {
  return launched("quantize", launch_quantize(args, spec, stream));
}
ffi::Error quantize_pair(cudaStream_t stream, const PairArgs& args, const KernelSpec& row, const KernelSpec& col) {
  return launched("quantize_pair", launch_quantize_pair(args, row, col, stream));
}
ffi::Error rht_amax(cudaStream_t stream, const RhtAmaxArgs& args) {
  return launched("quantize", launch_rht_amax(args, stream));
}
ffi::Error dequantize(cudaStream_t stream, const DequantizeArgs& args) {
  return launched("dequantize", launch_dequantize(args, stream));
}
ffi::Error transpose(cudaStream_t stream, const TransposeArgs& args) {
  return launched("transpose", launch_transpose(args, stream));
}

ffi::Error matmul(cudaStream_t stream, const MatmulArgs& args, std::string_view kernel, void* scratch) {
  return launched("matmul_nt", launch_matmul(args, kernel, scratch, stream));
}
ffi::Error grouped_matmul(cudaStream_t stream, const GroupedArgs& args, std::string_view kernel, void* scratch) {
  return launched("grouped_matmul_nt", launch_grouped(args, kernel, scratch, stream));
}
ffi::Error decode(cudaStream_t stream, const DecodeArgs& args) {
  return launched("matmul_nt", launch_decode(args, stream));
}
ffi::Error epilogue(cudaStream_t stream, const EpilogueArgs& args) {
  return launched("matmul_nt", launch_epilogue(args, stream));
}

ffi::Error decode_attention(cudaStream_t stream, const DecodeAttentionArgs& args, std::string_view kernel,
                            void* scratch) {
  return launched("decode_attention", launch_decode_attention(args, kernel, scratch, stream));
}
ffi::Error append_kv(cudaStream_t stream, const AppendKvArgs& args) {
  return launched("append_kv", launch_append_kv(args, stream));
}

template <class Binding>
auto on_stream(Binding binding) {
  return std::move(binding).template Ctx<ffi::PlatformStream<cudaStream_t>>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Quantize, (quantize_call<cudaStream_t, quantize>), on_stream(quantize_binding()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizePair, (quantize_pair_call<cudaStream_t, quantize_pair>),
                              on_stream(quantize_pair_binding()), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(RhtAmax, (rht_amax_call<cudaStream_t, rht_amax>), on_stream(rht_amax_binding()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(Dequantize, (dequantize_call<cudaStream_t, dequantize>), on_stream(dequantize_binding()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(Transpose, (transpose_call<cudaStream_t, transpose>), on_stream(transpose_binding()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(Matmul, (matmul_call<cudaStream_t, matmul, current_device>), on_stream(matmul_binding()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(GroupedMatmul, (grouped_matmul_call<cudaStream_t, grouped_matmul, current_device>),
                              on_stream(grouped_matmul_binding()), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(Decode, (decode_call<cudaStream_t, decode>), on_stream(decode_binding()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(Epilogue, (epilogue_call<cudaStream_t, epilogue>), on_stream(epilogue_binding()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(DecodeAttention, (decode_attention_call<cudaStream_t, decode_attention, current_device>),
                              on_stream(decode_attention_binding()), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(AppendKv, (append_kv_call<cudaStream_t, append_kv>), on_stream(append_kv_binding()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jnvfp4
