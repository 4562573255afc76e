// The calls nvfp4_quantize, nvfp4_quantize_pair and nvfp4_rht_amax: their operands, results and attributes, and the
// checks of them. An amax without elements means that the kernel finds one for each row or window; the result `found`
// then holds them, and has no elements otherwise.
#pragma once

#include "../core/args.h"
#include "spec_attr.h"

namespace jnvfp4 {

// The matrices that are quantized: those of x, or those of x transposed. `values` names x in errors.
inline Matrices oriented(Checks& check, std::string_view values, const ffi::AnyBuffer& x, const KernelSpec& spec,
                         bool transposed) {
  Matrices m(check, values, x);
  if (transposed) std::swap(m.rows, m.cols);
  const int64_t unit = spec.amax_scope == AmaxScope::kWindow64 ? kWindow : kBlock;
  check.that(m.cols > 0 && m.cols % unit == 0, [&] {
    return std::string(values) + " must have a quantized axis that is a multiple of " + std::to_string(unit) +
           " and not 0, got " + text_of(x);
  });
  check.that(m.rows % spec.block_rows == 0, [&] {
    return std::string(values) + " must have axes that are multiples of 16 for block_rows=16, got " + text_of(x);
  });
  return m;
}

// The amaxes that the scope of a spec has.
inline AmaxMap scope_amax(Checks& check, std::string_view name, const ffi::AnyBuffer& amax, const Matrices& m,
                          AmaxScope scope) {
  if (scope == AmaxScope::kTensor)
    check.that(amax.dimensions().size() == 0 || Expected{m.lead, {}} == amax.dimensions(), [&] {
      return std::string(name) + " must have shape ()" + (m.lead.size() ? " or " + text_of(m.lead) : "") + ", got " +
             text_of(amax.dimensions());
    });
  if (scope == AmaxScope::kRow) check.dims(name, amax, {m.lead, {m.rows}});
  return amax_map(check, name, amax, m, scope == AmaxScope::kWindow64);
}

// The buffers of one orientation beside x. `side` begins their names in errors: "", "row " or "col ".
struct SideBuffers {
  std::string_view side;
  ffi::AnyBuffer amax, stream, data, scale, found;
  SpecAttr spec;
  int32_t row_blocks;

  std::string name(std::string_view buffer) const { return std::string(side).append(buffer); }
};

// Map of the amaxes that the kernel finds.
inline AmaxMap found_map(const Matrices& m, AmaxScope scope) {
  return scope == AmaxScope::kWindow64 ? AmaxMap{m.batch * m.rows, m.cols / kWindow} : AmaxMap{1, 0};
}

// No kernel finds the amax of a tensor.
inline void check_found(Checks& check, std::string_view name, const ffi::AnyBuffer& amax, const Matrices& m,
                        AmaxScope scope) {
  check.that(scope != AmaxScope::kTensor || m.batch * m.rows == 0,
             [&] { return std::string(name) + " must be given for amax_scope=\"tensor\", got " + text_of(amax); });
}

// The operand `amax`, or the result `found amax` where the operand has no elements.
inline void side_amax(Checks& check, const SideBuffers& b, const Matrices& m, const KernelSpec& spec,
                      QuantizeArgs* args) {
  check.type(b.name("amax"), b.amax, {Type::F32});
  if (present(b.amax)) {
    args->shape.amax = scope_amax(check, b.name("amax"), b.amax, m, spec.amax_scope);
    args->amax = static_cast<const float*>(b.amax.untyped_data());
    check.absent(b.name("found amax"), b.found, {Type::F32});
    return;
  }
  check.type(b.name("found amax"), b.found, {Type::F32});
  check_found(check, b.name("amax"), b.amax, m, spec.amax_scope);
  if (spec.amax_scope != AmaxScope::kTensor) scope_amax(check, b.name("found amax"), b.found, m, spec.amax_scope);
  args->shape.amax = found_map(m, spec.amax_scope);
  args->found = static_cast<float*>(b.found.untyped_data());
}

// `blocks` names `row_blocks`.
inline StreamArgs side_stream(Checks& check, std::string_view name, const ffi::AnyBuffer& stream,
                              std::string_view blocks, int32_t row_blocks, const Matrices& m, const KernelSpec& spec) {
  if (spec.rounding == Rounding::kNearest) {
    check.absent(name, stream, {Type::U32});
    return {nullptr, m.cols / kBlock};
  }
  check.type(name, stream, {Type::U32});
  check.dims(name, stream, {m.lead, {4}});
  check.that(row_blocks >= m.cols / kBlock, [&] {
    return std::string(blocks) + " must be the blocks in a row of the whole array, at least " +
           std::to_string(m.cols / kBlock) + ", got " + std::to_string(row_blocks);
  });
  return {static_cast<const uint32_t*>(stream.untyped_data()), row_blocks};
}

// One orientation of x. `values` and `type` are the name and the type of what is quantized.
inline QuantizeArgs side_args(Checks& check, std::string_view values, const ffi::AnyBuffer& x, Type type,
                              const SideBuffers& b, bool transposed, const KernelSpec& spec) {
  QuantizeArgs args{};
  const Matrices m = oriented(check, values, x, spec, transposed);
  args.x = x.untyped_data(), args.kind = float_kind(type);
  args.shape = {m.batch, m.rows, m.cols, {}, transposed};
  args.e4m3_max = static_cast<float>(b.spec.e4m3_max), args.headroom = b.spec.headroom();
  check.array(b.name("data"), b.data, {Type::U8}, {m.lead, {m.rows, m.cols / 2}});
  check.array(b.name("scale"), b.scale, kScales, {m.lead, {m.rows, m.cols / kBlock}});
  args.data = static_cast<uint8_t*>(b.data.untyped_data());
  args.scale = static_cast<uint8_t*>(b.scale.untyped_data());
  side_amax(check, b, m, spec, &args);
  args.stream = side_stream(check, b.name("stream"), b.stream, b.side == "col " ? "col_blocks" : "row_blocks",
                            b.row_blocks, m, spec);
  return args;
}

// ---------------------------------------------------------------- nvfp4_quantize
inline auto quantize_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // x
      .Arg<ffi::AnyBuffer>()  // amax
      .Arg<ffi::AnyBuffer>()  // stream, empty without stochastic rounding
      .Ret<ffi::AnyBuffer>()  // data
      .Ret<ffi::AnyBuffer>()  // scale
      .Ret<ffi::AnyBuffer>()  // found amax
      .Attr<bool>("transpose")
      .Attr<SpecAttr>("spec")
      .Attr<int32_t>("row_blocks");
}

template <class Context, ffi::Error (*kRun)(Context, const QuantizeArgs&, const KernelSpec&)>
ffi::Error quantize_call(ffi::AnyBuffer x, ffi::AnyBuffer amax, ffi::AnyBuffer stream, ffi::Result<ffi::AnyBuffer> data,
                         ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::AnyBuffer> found, bool transpose,
                         SpecAttr attr, int32_t row_blocks, Context context) {
  Checks check("quantize");
  const KernelSpec spec = kernel_spec(check, "spec", attr);
  check.type("x", x, kFloats);
  const SideBuffers side{"", amax, stream, *data, *scale, *found, attr, row_blocks};
  if (!check.ok()) return check.error();
  const QuantizeArgs args = side_args(check, "x", x, x.element_type(), side, transpose, spec);
  if (!check.ok()) return check.error();
  return present(x) ? kRun(context, args, spec) : ffi::Error::Success();
}

// ---------------------------------------------------------------- nvfp4_quantize_pair
inline auto quantize_pair_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // x
      .Arg<ffi::AnyBuffer>()  // amax of rows
      .Arg<ffi::AnyBuffer>()  // amax of columns
      .Arg<ffi::AnyBuffer>()  // stream of rows
      .Arg<ffi::AnyBuffer>()  // stream of columns
      .Ret<ffi::AnyBuffer>()  // data of rows
      .Ret<ffi::AnyBuffer>()  // scale of rows
      .Ret<ffi::AnyBuffer>()  // found amax of rows
      .Ret<ffi::AnyBuffer>()  // data of columns
      .Ret<ffi::AnyBuffer>()  // scale of columns
      .Ret<ffi::AnyBuffer>()  // found amax of columns
      .Attr<SpecAttr>("row_spec")
      .Attr<SpecAttr>("col_spec")
      .Attr<int32_t>("row_blocks")
      .Attr<int32_t>("col_blocks");
}

// No kernel finds the amax of one orientation alone, or quantizes both ways with specs that are no fused pair.
inline void check_pair(Checks& check, const SideBuffers& row, const SideBuffers& col, const KernelSpec& row_spec,
                       const KernelSpec& col_spec) {
  check.that(dispatch(row_spec, col_spec, FusedPairs{}, [](auto) {}), [&] {
    return "row_spec and col_spec must be a pair that is quantized in one pass, got " + text_of(row.spec) + ", " +
           text_of(col.spec);
  });
  const bool windows = row_spec.amax_scope == AmaxScope::kWindow64;
  check.that(present(row.amax) == present(col.amax) && present(row.amax) != windows, [&] {
    return std::string(windows ? "row amax and col amax must be found, not given"
                               : "row amax and col amax must be given") +
           " for this pair, got " + text_of(row.amax) + ", " + text_of(col.amax);
  });
}

template <class Context, ffi::Error (*kRun)(Context, const PairArgs&, const KernelSpec&, const KernelSpec&)>
ffi::Error quantize_pair_call(ffi::AnyBuffer x, ffi::AnyBuffer row_amax, ffi::AnyBuffer col_amax,
                              ffi::AnyBuffer row_stream, ffi::AnyBuffer col_stream,
                              ffi::Result<ffi::AnyBuffer> row_data, ffi::Result<ffi::AnyBuffer> row_scale,
                              ffi::Result<ffi::AnyBuffer> row_found, ffi::Result<ffi::AnyBuffer> col_data,
                              ffi::Result<ffi::AnyBuffer> col_scale, ffi::Result<ffi::AnyBuffer> col_found,
                              SpecAttr row_attr, SpecAttr col_attr, int32_t row_blocks, int32_t col_blocks,
                              Context context) {
  Checks check("quantize_pair");
  const SideBuffers row{"row ", row_amax, row_stream, *row_data, *row_scale, *row_found, row_attr, row_blocks};
  const SideBuffers col{"col ", col_amax, col_stream, *col_data, *col_scale, *col_found, col_attr, col_blocks};
  const KernelSpec row_spec = kernel_spec(check, "row_spec", row_attr);
  const KernelSpec col_spec = kernel_spec(check, "col_spec", col_attr);
  check.type("x", x, kFloats);
  if (!check.ok()) return check.error();
  if (present(x)) check_pair(check, row, col, row_spec, col_spec);
  PairArgs args;
  args.row = side_args(check, "x", x, x.element_type(), row, false, row_spec);
  args.col = side_args(check, "x", x, x.element_type(), col, true, col_spec);
  if (!check.ok()) return check.error();
  return present(x) ? kRun(context, args, row_spec, col_spec) : ffi::Error::Success();
}

// ---------------------------------------------------------------- nvfp4_rht_amax
inline auto rht_amax_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // x
      .Ret<ffi::AnyBuffer>()  // amax of the rotated x, one for each index of its first `keep` axes
      .Ret<ffi::AnyBuffer>()  // amax of x, as many
      .Attr<bool>("transpose")
      .Attr<int32_t>("keep");
}

template <class Context, ffi::Error (*kRun)(Context, const RhtAmaxArgs&)>
ffi::Error rht_amax_call(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> amax, ffi::Result<ffi::AnyBuffer> plain,
                         bool transpose, int32_t keep, Context context) {
  Checks check("quantize");
  check.type("x", x, kFloats);
  check.that(present(x), [&] { return "x must have elements, got " + text_of(x); });
  const Matrices m = oriented(check, "x", x, Nvfp4Rht::spec, transpose);
  check.that(keep >= 0 && keep <= static_cast<int64_t>(m.lead.size()), [&] {
    return "keep must be at most the number of leading axes of x " + text_of(x) + ", got " + std::to_string(keep);
  });
  if (check.ok()) check.array("amax", *amax, {Type::F32}, {m.lead.first(keep), {}});
  if (check.ok()) check.array("plain_amax", *plain, {Type::F32}, {m.lead.first(keep), {}});
  if (!check.ok()) return check.error();
  const AmaxMap map{m.batch * m.rows / count_of(*amax), 0};
  return kRun(context, {x.untyped_data(),
                        float_kind(x.element_type()),
                        static_cast<float*>(amax->untyped_data()),
                        static_cast<float*>(plain->untyped_data()),
                        {m.batch, m.rows, m.cols, map, transpose}});
}

}  // namespace jnvfp4
