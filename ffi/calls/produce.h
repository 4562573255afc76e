// The call nvfp4_produce: its operands, results and attributes, and the checks of them. The list of buffers is fixed:
// one without elements stands for a result that is not wanted, or for an amax that the kernel finds.
#pragma once

#include "quantize.h"

namespace jnvfp4 {

inline auto produce_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // x or gate
      .Arg<ffi::AnyBuffer>()  // weight or up
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
      .Ret<ffi::AnyBuffer>()  // values
      .Ret<ffi::AnyBuffer>()  // scratch
      .Attr<std::string_view>("producer")
      .Attr<float>("eps")
      .Attr<SpecAttr>("row_spec")
      .Attr<SpecAttr>("col_spec")
      .Attr<int32_t>("row_blocks")
      .Attr<int32_t>("col_blocks");
}

inline constexpr Word<Producer> kProducers[] = {{"rms_norm", Producer::kRmsNorm}, {"silu_mul", Producer::kSiluMul}};

// The operands of a norm, x [..., M, K] and weight [K] or [..., K], or of a gate, gate and up.
inline ProducerOperands producer_sources(Checks& check, std::string_view producer, float eps, const ffi::AnyBuffer& a,
                                         const ffi::AnyBuffer& b) {
  ProducerOperands s{};
  check.that(find_word(kProducers, producer, &s.producer),
             [&] { return "producer must be rms_norm or silu_mul, got " + std::string(producer); });
  const bool norm = s.producer == Producer::kRmsNorm;
  const std::string_view first = norm ? "x" : "gate", second = norm ? "weight" : "up";
  check.type(first, a, kFloats);
  check.type(second, b, kFloats);
  const Matrices m = oriented(check, first, a, Nvfp4::spec, false);
  const Dims dims = b.dimensions();
  const bool one_weight = norm && dims.size() == 1;
  if (!norm)
    check.array(second, b, {a.element_type()}, {m.lead, {m.rows, m.cols}});
  else if (one_weight)
    check.dims(second, b, {{}, {m.cols}});
  else
    check.dims(second, b, {m.lead, {m.cols}});
  s.a = a.untyped_data(), s.b = b.untyped_data(), s.eps = eps;
  s.a_kind = float_kind(a.element_type()), s.b_kind = float_kind(b.element_type());
  s.batch = m.batch, s.rows = m.rows, s.cols = m.cols;
  s.rows_per_weight = one_weight ? m.batch * m.rows : m.rows;
  return s;
}

// One orientation of the result, if it is wanted.
inline QuantizeArgs producer_side(Checks& check, const ProducerOperands& s, const ffi::AnyBuffer& a,
                                  const SideBuffers& side, bool transposed, const KernelSpec& spec) {
  const std::string_view name = s.producer == Producer::kRmsNorm ? "x" : "gate";
  if (present(side.data)) return side_args(check, name, a, Type::BF16, side, transposed, spec);
  check.absent(side.name("data"), side.data, {Type::U8});
  check.absent(side.name("scale"), side.scale, kScales);
  check.absent(side.name("found amax"), side.found, {Type::F32});
  check.absent(side.name("amax"), side.amax, {Type::F32});
  check.absent(side.name("stream"), side.stream, {Type::U32});
  return {};
}

// The scratch memory: a CPU keeps the values for columns, unless they are a result; CUDA kernels that go through tiles
// keep the factor of each row of a norm. `kHost` says which platform it is.
template <bool kHost>
void* producer_scratch(Checks& check, const ProduceArgs& args, const KernelSpec& row_spec, const Dims& dims,
                       const ffi::AnyBuffer& scratch) {
  const bool tiles = args.col.data || (args.row.data && row_spec.block_rows == kBlock);
  if (kHost && args.col.data && !args.values)
    check.array("scratch", scratch, {Type::BF16}, {dims, {}});
  else if (!kHost && tiles && args.sources.producer == Producer::kRmsNorm)
    check.array("scratch", scratch, {Type::F32}, {dims.first(dims.size() - 1), {}});
  else
    return check.type("scratch", scratch, {Type::U8}), nullptr;
  return scratch.untyped_data();
}

template <bool kHost, class Context,
          ffi::Error (*kRun)(Context, const ProduceArgs&, const KernelSpec& row, const KernelSpec& col)>
ffi::Error produce_call(ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer row_amax, ffi::AnyBuffer col_amax,
                        ffi::AnyBuffer row_stream, ffi::AnyBuffer col_stream, ffi::Result<ffi::AnyBuffer> row_data,
                        ffi::Result<ffi::AnyBuffer> row_scale, ffi::Result<ffi::AnyBuffer> row_found,
                        ffi::Result<ffi::AnyBuffer> col_data, ffi::Result<ffi::AnyBuffer> col_scale,
                        ffi::Result<ffi::AnyBuffer> col_found, ffi::Result<ffi::AnyBuffer> values,
                        ffi::Result<ffi::AnyBuffer> scratch, std::string_view producer, float eps, SpecAttr row_attr,
                        SpecAttr col_attr, int32_t row_blocks, int32_t col_blocks, Context context) {
  Checks check("produce");
  const SideBuffers row{"row ", row_amax, row_stream, *row_data, *row_scale, *row_found, row_attr, row_blocks};
  const SideBuffers col{"col ", col_amax, col_stream, *col_data, *col_scale, *col_found, col_attr, col_blocks};
  const KernelSpec row_spec = kernel_spec(check, "row_spec", row_attr);
  const KernelSpec col_spec = kernel_spec(check, "col_spec", col_attr);
  ProduceArgs args{};
  args.sources = producer_sources(check, producer, eps, a, b);
  if (!check.ok()) return check.error();
  args.row = producer_side(check, args.sources, a, row, false, row_spec);
  args.col = producer_side(check, args.sources, a, col, true, col_spec);
  if (args.col.data) check_pair(check, row, col, row_spec, col_spec);
  check.type("values", *values, {Type::BF16});
  if (present(*values)) {
    check.dims("values", *values, {a.dimensions(), {}});
    args.values = static_cast<uint16_t*>(values->untyped_data());
  }
  check.that(args.row.data || !args.col.data, [] { return "row data must be wanted where col data is, got none"; });
  args.scratch = producer_scratch<kHost>(check, args, row_spec, a.dimensions(), *scratch);
  if (!check.ok()) return check.error();
  return present(a) ? kRun(context, args, row_spec, col_spec) : ffi::Error::Success();
}

}  // namespace jnvfp4
