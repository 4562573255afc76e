// The CUDA handlers: shapes from XLA's buffers, launches on XLA's stream. They do not allocate,
// synchronise or read device memory, so XLA may record them in command buffers (CUDA graphs).
#include <cuda_runtime_api.h>

#include "../check.h"
#include "../producer_call.h"
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

// One orientation of a request to quantize. `found` is where the amax of rows or windows goes when none is given.
struct Request {
  const float* amax;
  float* found;
  const uint32_t* stream;
  QuantBuffers buffers;
  bool transpose;
  SpecAttr attr;
  int64_t row_blocks;

  // Fills `args`; an error text, or empty.
  std::string arguments(const ffi::AnyBuffer& x, QuantizeArgs* args) {
    *args = {x.untyped_data(),
             {},
             amax,
             found,
             static_cast<uint8_t*>(buffers.data.untyped_data()),
             static_cast<uint8_t*>(buffers.scale.untyped_data()),
             {stream, row_blocks},
             {},
             static_cast<float>(attr.e4m3_max)};
    if (!float_kind(x.element_type(), &args->kind)) return "x must be float32, bfloat16 or float16";
    const KernelSpec spec = kernel_spec(attr);
    if (!amax && spec.amax_scope == AmaxScope::kTensor) return "the amax of a tensor must be given";
    return quant_shape(x, buffers, transpose, spec, &args->shape);
  }
};

ffi::Error run_quantize(cudaStream_t stream, const ffi::AnyBuffer& x, Request request) {
  if (!known(request.attr)) return unsupported("quantize", request.attr);
  QuantizeArgs args;
  if (const std::string error = request.arguments(x, &args); !error.empty()) return invalid("quantize", error);
  cudaError_t status = cudaSuccess;
  if (!launch_quantize(args, kernel_spec(request.attr), stream, &status)) return unsupported("quantize", request.attr);
  return launched("quantize", status);
}

ffi::Error quantize_impl(cudaStream_t cuda, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> amax, ffi::Buffer<ffi::U32> stream,
                         ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> scale, bool transpose,
                         SpecAttr spec, int32_t row_blocks) {
  return run_quantize(cuda, x,
                      {amax.typed_data(),
                       nullptr,
                       stream.typed_data(),
                       {*data, *scale, count_of(amax), count_of(stream)},
                       transpose,
                       spec,
                       row_blocks});
}

ffi::Error quantize_find_amax_impl(cudaStream_t cuda, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> data,
                                   ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::Buffer<ffi::F32>> amax,
                                   bool transpose, SpecAttr spec) {
  return run_quantize(cuda, x,
                      {nullptr, amax->typed_data(), nullptr, {*data, *scale, count_of(*amax)}, transpose, spec, 0});
}

ffi::Error run_pair(cudaStream_t stream, const ffi::AnyBuffer& x, Request row, Request col) {
  if (ffi::Error pair = check_pair(row.attr, col.attr); !pair.success()) return pair;
  PairArgs args;
  std::string error = row.arguments(x, &args.row);
  if (error.empty()) error = col.arguments(x, &args.col);
  if (!error.empty()) return invalid("quantize_pair", error);
  return launched("quantize_pair", launch_quantize_pair(args, kernel_spec(row.attr), kernel_spec(col.attr), stream));
}

ffi::Error quantize_pair_impl(cudaStream_t cuda, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> row_amax,
                              ffi::Buffer<ffi::F32> col_amax, ffi::Buffer<ffi::U32> row_stream,
                              ffi::Buffer<ffi::U32> col_stream, ffi::Result<ffi::AnyBuffer> row_data,
                              ffi::Result<ffi::AnyBuffer> row_scale, ffi::Result<ffi::AnyBuffer> col_data,
                              ffi::Result<ffi::AnyBuffer> col_scale, SpecAttr row_spec, SpecAttr col_spec,
                              int32_t row_blocks, int32_t col_blocks) {
  return run_pair(cuda, x,
                  {row_amax.typed_data(),
                   nullptr,
                   row_stream.typed_data(),
                   {*row_data, *row_scale, count_of(row_amax), count_of(row_stream)},
                   false,
                   row_spec,
                   row_blocks},
                  {col_amax.typed_data(),
                   nullptr,
                   col_stream.typed_data(),
                   {*col_data, *col_scale, count_of(col_amax), count_of(col_stream)},
                   true,
                   col_spec,
                   col_blocks});
}

ffi::Error quantize_pair_find_amax_impl(cudaStream_t cuda, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> row_data,
                                        ffi::Result<ffi::AnyBuffer> row_scale,
                                        ffi::Result<ffi::Buffer<ffi::F32>> row_amax,
                                        ffi::Result<ffi::AnyBuffer> col_data, ffi::Result<ffi::AnyBuffer> col_scale,
                                        ffi::Result<ffi::Buffer<ffi::F32>> col_amax, SpecAttr row_spec,
                                        SpecAttr col_spec) {
  return run_pair(
      cuda, x,
      {nullptr, row_amax->typed_data(), nullptr, {*row_data, *row_scale, count_of(*row_amax)}, false, row_spec, 0},
      {nullptr, col_amax->typed_data(), nullptr, {*col_data, *col_scale, count_of(*col_amax)}, true, col_spec, 0});
}

ffi::Error rht_amax_impl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::Buffer<ffi::F32>> amax, bool transpose,
                         int32_t keep) {
  RhtAmaxArgs args{x.untyped_data(), {}, amax->typed_data(), {}};
  if (!float_kind(x.element_type(), &args.kind)) return invalid("quantize", "x must be float32, bfloat16 or float16");
  const std::string error = rht_amax_shape(x, count_of(*amax), transpose, keep, &args.shape);
  if (!error.empty()) return invalid("quantize", error);
  return launched("quantize", launch_rht_amax(args, stream));
}

// Fills `args` for one side of a producer's result; an error text, or empty.
std::string side_arguments(const ProducerCall& call, const ProducerSide& side, QuantizeArgs* args) {
  if (!side.wanted()) return {};
  *args = {nullptr,
           Float::kBf16,
           side.given() ? side.amax.typed_data() : nullptr,
           side.given() ? nullptr : side.found.typed_data(),
           static_cast<uint8_t*>(side.data.untyped_data()),
           static_cast<uint8_t*>(side.scale.untyped_data()),
           {side.stream.typed_data(), side.row_blocks},
           {},
           static_cast<float>(side.spec.e4m3_max)};
  return call.side_shape(side, &args->shape);
}

ffi::Error run_producer(cudaStream_t stream, const ProducerCall& call) {
  if (ffi::Error error = call.check_specs(); !error.success()) return error;
  const KernelSpec row = kernel_spec(call.row.spec), col = kernel_spec(call.col.spec);
  const bool tiles = call.col.wanted() || (call.row.wanted() && row.block_rows == kBlock);
  ProduceArgs args{};
  const Sources& s = args.sources;
  std::string error = call.sources(&args.sources);
  if (error.empty()) error = side_arguments(call, call.row, &args.row);
  if (error.empty()) error = side_arguments(call, call.col, &args.col);
  if (error.empty() && tiles && call.norm()) error = check_count("scratch", call.scratch, s.batch * s.rows);
  if (!error.empty()) return invalid("produce", error);
  if (call.keeps_values()) args.values = static_cast<uint16_t*>(call.values.untyped_data());
  cudaError_t status = cudaSuccess;
  if (!tiles) {
    if (!call.row.wanted()) return launched("produce", launch_produce_values(s, args.values, nullptr, stream));
    if (!launch_produce_rows(s, args.row, args.values, row, stream, &status))
      return unsupported("produce", call.row.spec);
    return launched("produce", status);
  }
  if (call.norm()) {
    args.factors = static_cast<float*>(call.scratch.untyped_data());
    if (status = launch_produce_values(s, nullptr, args.factors, stream); status != cudaSuccess)
      return launched("produce", status);
  }
  if (call.col.wanted()) return launched("produce", launch_produce_pair(args, row, col, stream));
  if (!launch_produce_tiles(args, row, stream, &status)) return unsupported("produce", call.row.spec);
  return launched("produce", status);
}

ffi::Error dequantize_impl(cudaStream_t stream, ffi::Buffer<ffi::U8> data, ffi::AnyBuffer scale,
                           ffi::Buffer<ffi::F32> amax, ffi::Result<ffi::AnyBuffer> out, int32_t e4m3_max, bool windows,
                           bool rotate_back) {
  DequantizeArgs args{};
  if (const std::string error = dequantize_shape(data, scale, amax, *out, windows, &args.blocks, &args.blocks_per_amax);
      !error.empty())
    return invalid("dequantize", error);
  if (!float_kind(out->element_type(), &args.kind))
    return invalid("dequantize", "dtype must be float32, bfloat16 or float16");
  args.data = data.typed_data(), args.scale = static_cast<const uint8_t*>(scale.untyped_data()),
  args.amax = amax.typed_data();
  args.out = out->untyped_data(), args.e4m3_max = static_cast<float>(e4m3_max);
  args.rotate_back = rotate_back;
  return launched("dequantize", launch_dequantize(args, stream));
}

ffi::Error fake_quant_impl(cudaStream_t cuda, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> amax,
                           ffi::Buffer<ffi::U32> stream, ffi::Result<ffi::AnyBuffer> out, SpecAttr attr,
                           int32_t row_blocks) {
  if (!known(attr)) return unsupported("fake_quant", attr);
  const KernelSpec spec = kernel_spec(attr);
  FakeQuantArgs args{x.untyped_data(),
                     out->untyped_data(),
                     {},
                     count_of(amax) ? amax.typed_data() : nullptr,
                     {stream.typed_data(), row_blocks},
                     {},
                     static_cast<float>(attr.e4m3_max)};
  if (!float_kind(x.element_type(), &args.kind)) return invalid("fake_quant", "x must be float32, bfloat16 or float16");
  if (const std::string error = fake_quant_shape(x, *out, count_of(amax), count_of(stream), spec, &args.shape);
      !error.empty())
    return invalid("fake_quant", error);
  cudaError_t status = cudaSuccess;
  if (!launch_fake_quant(args, spec, cuda, &status)) return unsupported("fake_quant", attr);
  return launched("fake_quant", status);
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

ffi::Error matmul_impl(cudaStream_t stream, ffi::Buffer<ffi::U8> a, ffi::AnyBuffer a_scale,
                       ffi::Buffer<ffi::F32> a_amax, ffi::Buffer<ffi::U8> b, ffi::AnyBuffer b_scale,
                       ffi::Buffer<ffi::F32> b_amax, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> out,
                       int32_t a_max, int32_t b_max, bool a_windows, bool b_windows) {
  BlockGemmArgs g{};
  g.a = a.typed_data(), g.a_scale = static_cast<const uint8_t*>(a_scale.untyped_data()), g.a_amax = a_amax.typed_data();
  g.b = b.typed_data(), g.b_scale = static_cast<const uint8_t*>(b_scale.untyped_data()), g.b_amax = b_amax.typed_data();
  g.a_map.windows = a_windows, g.b_map.windows = b_windows;
  g.a_max = static_cast<float>(a_max), g.b_max = static_cast<float>(b_max);
  const GemmShape& n = g.shape;
  std::string error = gemm_shape(a, b, 2, &g.shape);
  if (error.empty()) error = check_count("a scale", a_scale, count_of(a) / 8);
  if (error.empty()) error = check_count("b scale", b_scale, count_of(b) / 8);
  if (error.empty()) error = gemm_amax(a_amax, matrices(a), n.batch, n.rows, n.depth, &g.a_map);
  if (error.empty()) error = gemm_amax(b_amax, matrices(b), n.batch, n.cols, n.depth, &g.b_map);
  if (error.empty()) error = check_count("out", *out, n.batch * n.rows * n.cols);
  if (error.empty() && bias.element_count()) error = check_count("bias", bias, n.cols);
  if (error.empty() && !(a_windows || b_windows)) error = "this kernel is for window64";
  if (!error.empty()) return invalid("matmul_nt", error);
  if (!float_kind(out->element_type(), &g.out_kind) || !float_kind(bias.element_type(), &g.bias_kind))
    return invalid("matmul_nt", "out and bias must be float32, bfloat16 or float16");
  g.bias = bias.element_count() ? bias.untyped_data() : nullptr, g.out = out->untyped_data();
  return launched("matmul_nt", launch_gemm_blocks(g, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Quantize, quantize_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::Buffer<ffi::F32>>()  // amax
                                  .Arg<ffi::Buffer<ffi::U32>>()  // stream, empty without
                                  .Ret<ffi::AnyBuffer>()         // data
                                  .Ret<ffi::AnyBuffer>()         // scale
                                  .Attr<bool>("transpose")
                                  .Attr<SpecAttr>("spec")
                                  .Attr<int32_t>("row_blocks"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeFindAmax, quantize_find_amax_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Ret<ffi::AnyBuffer>()         // data
                                  .Ret<ffi::AnyBuffer>()         // scale
                                  .Ret<ffi::Buffer<ffi::F32>>()  // amax, one per row or window
                                  .Attr<bool>("transpose")
                                  .Attr<SpecAttr>("spec"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizePair, quantize_pair_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::Buffer<ffi::F32>>()  // amax of rows
                                  .Arg<ffi::Buffer<ffi::F32>>()  // amax of columns
                                  .Arg<ffi::Buffer<ffi::U32>>()  // stream of rows, empty without
                                  .Arg<ffi::Buffer<ffi::U32>>()  // stream of columns, empty without
                                  .Ret<ffi::AnyBuffer>()         // data of rows
                                  .Ret<ffi::AnyBuffer>()         // scale of rows
                                  .Ret<ffi::AnyBuffer>()         // data of columns
                                  .Ret<ffi::AnyBuffer>()         // scale of columns
                                  .Attr<SpecAttr>("row_spec")
                                  .Attr<SpecAttr>("col_spec")
                                  .Attr<int32_t>("row_blocks")
                                  .Attr<int32_t>("col_blocks"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizePairFindAmax, quantize_pair_find_amax_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Ret<ffi::AnyBuffer>()         // data of rows
                                  .Ret<ffi::AnyBuffer>()         // scale of rows
                                  .Ret<ffi::Buffer<ffi::F32>>()  // amax of the windows of rows
                                  .Ret<ffi::AnyBuffer>()         // data of columns
                                  .Ret<ffi::AnyBuffer>()         // scale of columns
                                  .Ret<ffi::Buffer<ffi::F32>>()  // amax of the windows of columns
                                  .Attr<SpecAttr>("row_spec")
                                  .Attr<SpecAttr>("col_spec"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(RhtAmax, rht_amax_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Ret<ffi::Buffer<ffi::F32>>()  // amax
                                  .Attr<bool>("transpose")
                                  .Attr<int32_t>("keep"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(Produce, (produce_impl<cudaStream_t, run_producer>),
                              producer_binding().Ctx<ffi::PlatformStream<cudaStream_t>>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dequantize, dequantize_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()   // data
                                  .Arg<ffi::AnyBuffer>()         // scale
                                  .Arg<ffi::Buffer<ffi::F32>>()  // amax
                                  .Ret<ffi::AnyBuffer>()         // out
                                  .Attr<int32_t>("e4m3_max")
                                  .Attr<bool>("windows")
                                  .Attr<bool>("rotate_back"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(FakeQuant, fake_quant_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::Buffer<ffi::F32>>()  // amax, empty where it is to be found
                                  .Arg<ffi::Buffer<ffi::U32>>()  // stream, empty without
                                  .Ret<ffi::AnyBuffer>()         // out
                                  .Attr<SpecAttr>("spec")
                                  .Attr<int32_t>("row_blocks"),
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(Matmul, matmul_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()   // a data
                                  .Arg<ffi::AnyBuffer>()         // a scale
                                  .Arg<ffi::Buffer<ffi::F32>>()  // a amax
                                  .Arg<ffi::Buffer<ffi::U8>>()   // b data
                                  .Arg<ffi::AnyBuffer>()         // b scale
                                  .Arg<ffi::Buffer<ffi::F32>>()  // b amax
                                  .Arg<ffi::AnyBuffer>()         // bias, empty without
                                  .Ret<ffi::AnyBuffer>()         // out
                                  .Attr<int32_t>("a_e4m3_max")
                                  .Attr<int32_t>("b_e4m3_max")
                                  .Attr<bool>("a_windows")
                                  .Attr<bool>("b_windows"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jnvfp4
