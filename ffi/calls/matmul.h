// The calls of a product a b^T: nvfp4_matmul on both platforms; nvfp4_decode and nvfp4_epilogue, which surround XLA's
// 16-bit GEMM in the plan decode_then_dot.
#pragma once

#include "../core/args.h"
#include "../plan/matmul.h"
#include "checks.h"

namespace jnvfp4 {

// ---------------------------------------------------------------- what the calls share
// b [N, K], then the leading axes of a are rows; or b with the leading axes of a.
inline GemmShape product_shape(Checks& check, const Matrices& a, int64_t depth, const Matrices& b, int64_t b_depth) {
  check.that(depth == b_depth && depth > 0, [&] {
    return "a and b must have the same K, not 0, got K=" + std::to_string(depth) + " and K=" + std::to_string(b_depth);
  });
  if (b.lead.size() == 0) return {1, a.batch * a.rows, b.rows, depth};
  check.that(Expected{a.lead, {}} == b.lead, [&] {
    return "b must have rank 2 or the leading axes " + text_of(a.lead) + " of a, got " + text_of(b.lead);
  });
  return {a.batch, a.rows, b.rows, depth};
}

// The bias has one number for each column, or the shape of the result.
inline MatmulResult product_result(Checks& check, const ffi::AnyBuffer& bias, const ffi::AnyBuffer& out, Dims lead,
                                   int64_t rows, int64_t cols) {
  check.type("bias", bias, kFloats);
  const Expected whole{lead, {rows, cols}};
  const bool of_columns = Expected{{}, {cols}} == bias.dimensions();
  if (present(bias))
    check.that(of_columns || whole == bias.dimensions(), [&] {
      return "bias must have shape " + Expected{{}, {cols}}.text() + " or " + whole.text() + ", got " +
             text_of(bias.dimensions());
    });
  check.array("out", out, kFloats, whole);
  return {present(bias) ? bias.untyped_data() : nullptr, float_kind(bias.element_type()), out.untyped_data(),
          float_kind(out.element_type()), present(bias) && !of_columns};
}

inline RowNorm row_norm(Checks& check, const ffi::AnyBuffer& gain, float epsilon, bool quantized, int64_t depth) {
  check.type("gain", gain, kFloats);
  check.that(epsilon > 0, [&] { return "epsilon must be more than 0, got " + std::to_string(epsilon); });
  if (!present(gain)) return {};
  check.dims("gain", gain, {{}, {depth}});
  check.that(!quantized, [] { return "gain must have no elements with an a that is quantized"; });
  return {gain.untyped_data(), float_kind(gain.element_type()), epsilon};
}

// ---------------------------------------------------------------- nvfp4_matmul
inline auto matmul_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // a data, or a 16-bit array
      .Arg<ffi::AnyBuffer>()  // a scale, empty with a 16-bit array
      .Arg<ffi::AnyBuffer>()  // a amax, empty with a 16-bit array
      .Arg<ffi::AnyBuffer>()  // b data
      .Arg<ffi::AnyBuffer>()  // b scale
      .Arg<ffi::AnyBuffer>()  // b amax
      .Arg<ffi::AnyBuffer>()  // bias, empty without
      .Arg<ffi::AnyBuffer>()  // gain of the norm of a, empty without
      .Ret<ffi::AnyBuffer>()  // out
      .Ret<ffi::AnyBuffer>()  // scratch
      .Attr<std::string_view>("kernel")
      .Attr<bool>("pinned")
      .Attr<int32_t>("a_e4m3_max")
      .Attr<int32_t>("b_e4m3_max")
      .Attr<bool>("a_windows")
      .Attr<bool>("b_windows")
      .Attr<float>("epsilon");  // of the norm
}

inline MatmulOperand tensor_operand(const Tensor& t, const ffi::AnyBuffer& data, const ffi::AnyBuffer& scale,
                                    const ffi::AnyBuffer& amax, int32_t e4m3_max) {
  return {data.untyped_data(),
          static_cast<const uint8_t*>(scale.untyped_data()),
          static_cast<const float*>(amax.untyped_data()),
          Float::kBf16,
          t.map,
          static_cast<float>(e4m3_max)};
}

// `kDevice` says what the device is; kRun gets a kernel that it can run.
template <class Context, ffi::Error (*kRun)(Context, const MatmulArgs&, std::string_view kernel, void* scratch),
          Device (*kDevice)()>
ffi::Error matmul_call(ffi::AnyBuffer a, ffi::AnyBuffer a_scale, ffi::AnyBuffer a_amax, ffi::AnyBuffer b,
                       ffi::AnyBuffer b_scale, ffi::AnyBuffer b_amax, ffi::AnyBuffer bias, ffi::AnyBuffer gain,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> scratch, std::string_view kernel,
                       bool pinned, int32_t a_max, int32_t b_max, bool a_windows, bool b_windows, float epsilon,
                       Context context) {
  Checks check("matmul_nt");
  check.e4m3_max("a_e4m3_max", a_max);
  check.e4m3_max("b_e4m3_max", b_max);
  MatmulArgs args{};
  MatmulProblem problem{{}, MatmulProblem::Left::kNvfp4, a_windows || b_windows, {}, pinned};
  const Tensor right(check, "b ", b, b_scale, b_amax, b_windows);
  args.b = tensor_operand(right, b, b_scale, b_amax, b_max);
  Matrices left(check, "a", a);
  if (a.element_type() == Type::U8) {
    const Tensor parts(check, "a ", a, a_scale, a_amax, a_windows);
    args.a = tensor_operand(parts, a, a_scale, a_amax, a_max);
    left = parts;
  } else {
    check.type("a", a, {Type::U8, Type::BF16, Type::F16});
    check.absent("a scale", a_scale, {Type::U8});
    check.absent("a amax", a_amax, {Type::F32});
    args.a.data = a.untyped_data(), args.a.kind = float_kind(a.element_type());
    problem.a = args.a.kind == Float::kBf16 ? MatmulProblem::Left::kBf16 : MatmulProblem::Left::kF16;
    check.that(!a_windows, [] { return "a_windows must be false with a 16-bit a, got true"; });
  }
  args.shape = product_shape(check, left, left.cols, right, right.cols);
  args.result = product_result(check, bias, *out, left.lead, left.rows, right.rows);
  args.norm = row_norm(check, gain, epsilon, args.a.quantized(), right.cols);
  check.type("scratch", *scratch, {Type::U8});
  if (!check.ok()) return check.error();
  if (!present(*out)) return ffi::Error::Success();
  problem.shape = args.shape, problem.out = args.result.kind;
  const std::string error = kMatmulKernels.adapt(kernel, problem, kDevice(), count_of(*scratch), &kernel);
  if (!check.that(error.empty(), [&] { return error; })) return check.error();
  const auto& row = *kMatmulKernels.find(kernel);
  check.that(!args.result.whole_bias || row.takes_whole_bias(problem), [&] {
    return std::string(kernel) +
           " takes no bias of the shape of the result for these operands; lower the program again for this device";
  });
  check.that(!args.norm.gain || row.takes_norm(problem), [&] {
    return std::string(kernel) + " takes no norm of these operands; lower the program again for this device";
  });
  return check.ok() ? kRun(context, args, kernel, scratch->untyped_data()) : check.error();
}

// ---------------------------------------------------------------- nvfp4_decode
inline auto decode_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()   // data
      .Arg<ffi::AnyBuffer>()   // scale
      .Ret<ffi::AnyBuffer>();  // out
}

template <class Context, ffi::Error (*kRun)(Context, const DecodeArgs&)>
ffi::Error decode_call(ffi::AnyBuffer data, ffi::AnyBuffer scale, ffi::Result<ffi::AnyBuffer> out, Context context) {
  Checks check("matmul_nt");
  check.type("data", data, {Type::U8});
  const Matrices m(check, "data", data);
  check.that(m.cols % (kBlock / 2) == 0,
             [&] { return "data must hold a multiple of 16 codes in a row, got " + text_of(data); });
  check.array("scale", scale, kScales, {m.lead, {m.rows, m.cols / (kBlock / 2)}});
  check.array("out", *out, kFloats16, {m.lead, {m.rows, m.cols * 2}});
  if (!check.ok()) return check.error();
  if (!m.count()) return ffi::Error::Success();
  return kRun(context,
              {static_cast<const uint8_t*>(data.untyped_data()), static_cast<const uint8_t*>(scale.untyped_data()),
               out->untyped_data(), float_kind(out->element_type()), m.count() / (kBlock / 2)});
}

// ---------------------------------------------------------------- nvfp4_epilogue
inline auto epilogue_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // y
      .Arg<ffi::AnyBuffer>()  // a amax, empty if a is not quantized
      .Arg<ffi::AnyBuffer>()  // b amax
      .Arg<ffi::AnyBuffer>()  // bias, empty without
      .Ret<ffi::AnyBuffer>()  // out
      .Attr<int32_t>("a_e4m3_max")
      .Attr<int32_t>("b_e4m3_max")
      .Attr<bool>("b_batched");
}

template <class Context, ffi::Error (*kRun)(Context, const EpilogueArgs&)>
ffi::Error epilogue_call(ffi::AnyBuffer y, ffi::AnyBuffer a_amax, ffi::AnyBuffer b_amax, ffi::AnyBuffer bias,
                         ffi::Result<ffi::AnyBuffer> out, int32_t a_max, int32_t b_max, bool b_batched,
                         Context context) {
  Checks check("matmul_nt");
  check.e4m3_max("a_e4m3_max", a_max);
  check.e4m3_max("b_e4m3_max", b_max);
  check.type("y", y, {Type::F32});
  const Matrices left(check, "y", y);
  Matrices right = left;
  right.rows = left.cols;
  if (!b_batched) right.lead = {}, right.batch = 1;
  EpilogueArgs args{};
  args.y = static_cast<const float*>(y.untyped_data()), args.pitch = left.cols;
  args.quantized_a = present(a_amax);
  check.type("a amax", a_amax, {Type::F32});
  if (args.quantized_a) args.a.map = amax_map(check, "a amax", a_amax, left, false);
  args.b.map = amax_map(check, "b amax", b_amax, right, false);
  args.a.amax = static_cast<const float*>(a_amax.untyped_data()), args.a.e4m3_max = static_cast<float>(a_max);
  args.b.amax = static_cast<const float*>(b_amax.untyped_data()), args.b.e4m3_max = static_cast<float>(b_max);
  args.shape =
      b_batched ? GemmShape{left.batch, left.rows, left.cols, 0} : GemmShape{1, left.batch * left.rows, left.cols, 0};
  args.result = product_result(check, bias, *out, left.lead, left.rows, left.cols);
  if (!check.ok()) return check.error();
  return left.count() ? kRun(context, args) : ffi::Error::Success();
}

}  // namespace jnvfp4
