// The call of grouped products, nvfp4_grouped_matmul, on both platforms.
#pragma once

#include "../core/args.h"
#include "../plan/grouped.h"
#include "checks.h"
#include "matmul.h"

namespace jnvfp4 {

inline auto grouped_matmul_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // a data [M, K/2], or a 16-bit array [M, K]
      .Arg<ffi::AnyBuffer>()  // a scale, empty with a 16-bit array
      .Arg<ffi::AnyBuffer>()  // a amax () or [M], empty with a 16-bit array
      .Arg<ffi::AnyBuffer>()  // b data [G, N, K/2]
      .Arg<ffi::AnyBuffer>()  // b scale
      .Arg<ffi::AnyBuffer>()  // b amax [G] or [G, N]
      .Arg<ffi::AnyBuffer>()  // group sizes [G]
      .Ret<ffi::AnyBuffer>()  // out [M, N]
      .Ret<ffi::AnyBuffer>()  // scratch
      .Attr<std::string_view>("kernel")
      .Attr<bool>("pinned")
      .Attr<int32_t>("a_e4m3_max")
      .Attr<int32_t>("b_e4m3_max");
}

// `kDevice` and kRun as in matmul_call.
template <class Context, ffi::Error (*kRun)(Context, const GroupedArgs&, std::string_view kernel, void* scratch),
          Device (*kDevice)()>
ffi::Error grouped_matmul_call(ffi::AnyBuffer a, ffi::AnyBuffer a_scale, ffi::AnyBuffer a_amax, ffi::AnyBuffer b,
                               ffi::AnyBuffer b_scale, ffi::AnyBuffer b_amax, ffi::AnyBuffer sizes,
                               ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> scratch,
                               std::string_view kernel, bool pinned, int32_t a_max, int32_t b_max, Context context) {
  Checks check("grouped_matmul_nt");
  check.e4m3_max("a_e4m3_max", a_max);
  check.e4m3_max("b_e4m3_max", b_max);
  const auto rank = [&](std::string_view name, const ffi::AnyBuffer& x, size_t wanted) {
    check.that(x.dimensions().size() == wanted,
               [&] { return std::string(name) + " must have rank " + std::to_string(wanted) + ", got " + text_of(x); });
  };
  const bool quantized = a.element_type() == Type::U8;
  rank(quantized ? "a data" : "a", a, 2);
  rank("b data", b, 3);
  GroupedArgs args{};
  MatmulProblem::Left kind = MatmulProblem::Left::kNvfp4;
  const Tensor right(check, "b ", b, b_scale, b_amax, false);
  check.that(b_amax.dimensions().size() != 0, [&] {
    return "b amax must have shape (G,) or (G, N), one for each group, got " + text_of(b_amax.dimensions());
  });
  args.b = tensor_operand(right, b, b_scale, b_amax, b_max);
  Matrices left(check, "a", a);
  if (quantized) {
    const Tensor parts(check, "a ", a, a_scale, a_amax, false);
    args.a = tensor_operand(parts, a, a_scale, a_amax, a_max);
    left = parts;
  } else {
    check.type("a", a, {Type::U8, Type::BF16, Type::F16});
    check.absent("a scale", a_scale, {Type::U8});
    check.absent("a amax", a_amax, {Type::F32});
    args.a.data = a.untyped_data(), args.a.kind = float_kind(a.element_type());
    kind = args.a.kind == Float::kBf16 ? MatmulProblem::Left::kBf16 : MatmulProblem::Left::kF16;
  }
  check.that(left.cols == right.cols && left.cols > 0, [&] {
    return "a and b must have the same K, not 0, got K=" + std::to_string(left.cols) +
           " and K=" + std::to_string(right.cols);
  });
  check.array("group sizes", sizes, {Type::S32}, {{}, {right.batch}});
  check.array("out", *out, kFloats, {{}, {left.rows, right.rows}});
  check.type("scratch", *scratch, {Type::U8});
  if (!check.ok()) return check.error();
  if (!present(*out)) return ffi::Error::Success();
  args.sizes = static_cast<const int32_t*>(sizes.untyped_data());
  args.out = out->untyped_data(), args.kind = float_kind(out->element_type());
  args.shape = {left.rows, right.batch, right.rows, left.cols};
  const std::string error =
      kGroupedKernels.adapt(kernel, {args.shape, kind, args.kind, pinned}, kDevice(), count_of(*scratch), &kernel);
  check.that(error.empty(), [&] { return error; });
  return check.ok() ? kRun(context, args, kernel, scratch->untyped_data()) : check.error();
}

}  // namespace jnvfp4
