// The CUDA handlers: shapes from XLA's buffers, one launch on XLA's stream. They do not allocate,
// synchronise or read device memory, so XLA may record them in command buffers (CUDA graphs).
#include <cuda_runtime_api.h>

#include "../check.h"
#include "kernels.h"

namespace jnvfp4 {
namespace {

ffi::Error launched(std::string_view op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  std::string text = std::string(op) + ": the kernel launch failed: " + cudaGetErrorString(status);
  if (status == cudaErrorNoKernelImageForDevice) text += " (jnvfp4 needs compute capability 8.0 or newer)";
  return ffi::Error(ffi::ErrorCode::kInternal, text);
}

// One amax for everything, one per matrix, or one per row.
bool amax_stride(const ffi::Buffer<ffi::F32>& amax, int64_t batch, int64_t rows, AmaxStride* stride) {
  const int64_t per = rows_per_amax(batch, rows, static_cast<int64_t>(amax.element_count()));
  *stride = per == 1 ? AmaxStride{rows, 1} : per == rows ? AmaxStride{1, 0} : AmaxStride{0, 0};
  return per != 0;
}

ffi::Error run_quantize(cudaStream_t stream, const ffi::AnyBuffer& x, const float* amax, float* found,
                        int64_t amax_count, ffi::AnyBuffer data, ffi::AnyBuffer scale, bool transpose,
                        const SpecAttr& attr) {
  const KernelSpec spec = kernel_spec(attr);
  QuantizeArgs args{x.untyped_data(),
                    {},
                    amax,
                    found,
                    static_cast<uint8_t*>(data.untyped_data()),
                    static_cast<uint8_t*>(scale.untyped_data()),
                    {},
                    static_cast<float>(attr.e4m3_max)};
  if (!float_kind(x.element_type(), &args.kind)) return invalid("quantize", "x must be float32, bfloat16 or float16");
  const std::string error = quant_shape(x, data, scale, amax_count, transpose, spec, &args.shape);
  if (!error.empty()) return invalid("quantize", error);
  cudaError_t status = cudaSuccess;
  if (!launch_quantize(args, spec, stream, &status)) return unsupported("quantize", attr);
  return launched("quantize", status);
}

ffi::Error quantize_impl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> amax,
                         ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> scale, bool transpose,
                         SpecAttr spec) {
  return run_quantize(stream, x, amax.typed_data(), nullptr, static_cast<int64_t>(amax.element_count()), *data, *scale,
                      transpose, spec);
}

ffi::Error quantize_find_amax_impl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> data,
                                   ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::Buffer<ffi::F32>> amax,
                                   bool transpose, SpecAttr spec) {
  return run_quantize(stream, x, nullptr, amax->typed_data(), static_cast<int64_t>(amax->element_count()), *data,
                      *scale, transpose, spec);
}

ffi::Error dequantize_impl(cudaStream_t stream, ffi::Buffer<ffi::U8> data, ffi::AnyBuffer scale,
                           ffi::Buffer<ffi::F32> amax, ffi::Result<ffi::AnyBuffer> out, int32_t e4m3_max) {
  DequantizeArgs args{};
  if (const std::string error = dequantize_shape(data, scale, amax, *out, &args.blocks, &args.blocks_per_amax);
      !error.empty())
    return invalid("dequantize", error);
  if (!float_kind(out->element_type(), &args.kind))
    return invalid("dequantize", "dtype must be float32, bfloat16 or float16");
  args.data = data.typed_data(), args.scale = static_cast<const uint8_t*>(scale.untyped_data()),
  args.amax = amax.typed_data();
  args.out = out->untyped_data(), args.e4m3_max = static_cast<float>(e4m3_max);
  return launched("dequantize", launch_dequantize(args, stream));
}

ffi::Error decode_impl(cudaStream_t stream, ffi::Buffer<ffi::U8> data, ffi::AnyBuffer scale,
                       ffi::Result<ffi::AnyBuffer> out) {
  DecodeArgs args{data.typed_data(),
                  static_cast<const uint8_t*>(scale.untyped_data()),
                  out->untyped_data(),
                  {},
                  static_cast<int64_t>(scale.element_count())};
  const std::string error =
      first_of({check_count("data", data, args.blocks * 8), check_count("out", *out, args.blocks * 16)});
  if (!error.empty()) return invalid("matmul_nt", error);
  if (!float_kind(out->element_type(), &args.kind) || args.kind == Float::kF32)
    return invalid("matmul_nt", "operands decode to bfloat16 or float16");
  return launched("matmul_nt", launch_decode(args, stream));
}

ffi::Error epilogue_impl(cudaStream_t stream, ffi::Buffer<ffi::F32> y, ffi::Buffer<ffi::F32> a_amax,
                         ffi::Buffer<ffi::F32> b_amax, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> out,
                         int32_t a_max, int32_t b_max, bool b_batched) {
  EpilogueArgs args{};
  if (!split_dims(y.dimensions(), &args.batch, &args.rows, &args.cols))
    return invalid("matmul_nt", "the product must have rank 2 or more");
  const std::string error = first_of({check_count("out", *out, args.batch * args.rows * args.cols),
                                      bias.element_count() ? check_count("bias", bias, args.cols) : std::string()});
  if (!error.empty()) return invalid("matmul_nt", error);
  if (!amax_stride(a_amax, args.batch, args.rows, &args.a_stride) ||
      !amax_stride(b_amax, b_batched ? args.batch : 1, args.cols, &args.b_stride))
    return invalid("matmul_nt",
                   "amax " + shape_of(a_amax) + ", " + shape_of(b_amax) + " do not fit the product " + shape_of(y));
  if (!b_batched) args.b_stride.per_matrix = 0;
  if (!float_kind(out->element_type(), &args.out_kind) || !float_kind(bias.element_type(), &args.bias_kind))
    return invalid("matmul_nt", "out and bias must be float32, bfloat16 or float16");
  args.y = y.typed_data(), args.a_amax = a_amax.typed_data(), args.b_amax = b_amax.typed_data();
  args.bias = bias.element_count() ? bias.untyped_data() : nullptr, args.out = out->untyped_data();
  args.a_max = static_cast<float>(a_max), args.b_max = static_cast<float>(b_max);
  return launched("matmul_nt", launch_epilogue(args, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Quantize, quantize_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::Buffer<ffi::F32>>()  // amax
                                  .Ret<ffi::AnyBuffer>()         // data
                                  .Ret<ffi::AnyBuffer>()         // scale
                                  .Attr<bool>("transpose")
                                  .Attr<SpecAttr>("spec"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeFindAmax, quantize_find_amax_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Ret<ffi::AnyBuffer>()         // data
                                  .Ret<ffi::AnyBuffer>()         // scale
                                  .Ret<ffi::Buffer<ffi::F32>>()  // amax, one per row
                                  .Attr<bool>("transpose")
                                  .Attr<SpecAttr>("spec"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dequantize, dequantize_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()   // data
                                  .Arg<ffi::AnyBuffer>()         // scale
                                  .Arg<ffi::Buffer<ffi::F32>>()  // amax
                                  .Ret<ffi::AnyBuffer>()         // out
                                  .Attr<int32_t>("e4m3_max"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(Decode, decode_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()  // data
                                  .Arg<ffi::AnyBuffer>()        // scale
                                  .Ret<ffi::AnyBuffer>(),       // out
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(Epilogue, epilogue_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()  // y
                                  .Arg<ffi::Buffer<ffi::F32>>()  // a amax
                                  .Arg<ffi::Buffer<ffi::F32>>()  // b amax
                                  .Arg<ffi::AnyBuffer>()         // bias, empty without
                                  .Ret<ffi::AnyBuffer>()         // out
                                  .Attr<int32_t>("a_e4m3_max")   // 0: a is not quantized
                                  .Attr<int32_t>("b_e4m3_max")
                                  .Attr<bool>("b_batched"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jnvfp4
