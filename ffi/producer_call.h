// The call nvfp4_produce as both platforms bind it: a fixed list of buffers, where one without elements stands for what
// is absent, and the checks of what a handler reads from it.
#pragma once

#include "check.h"
#include "producers.h"

namespace jnvfp4 {

// One orientation of the result.
struct ProducerSide {
  ffi::Buffer<ffi::F32> amax;
  ffi::Buffer<ffi::U32> stream;
  ffi::AnyBuffer data, scale;
  ffi::Buffer<ffi::F32> found;
  SpecAttr spec;
  int64_t row_blocks;

  bool wanted() const { return count_of(data) > 0; }
  bool given() const { return count_of(amax) > 0; }
  QuantBuffers buffers() const { return {data, scale, count_of(given() ? amax : found), count_of(stream)}; }
};

struct ProducerCall {
  std::string_view producer;
  float eps;
  ffi::AnyBuffer a, b;
  ProducerSide row, col;
  ffi::AnyBuffer values, scratch;

  bool norm() const { return producer == "rms_norm"; }
  bool keeps_values() const { return count_of(values) > 0; }

  // Fills `s`; an error text, or empty.
  std::string sources(Sources* s) const {
    if (!norm() && producer != "silu_mul") return "no producer is named " + std::string(producer);
    if (!split_dims(a.dimensions(), &s->batch, &s->rows, &s->cols))
      return "x must have rank 2 or more, got " + shape_of(a);
    if (s->cols % kBlock) return "K must be a multiple of 16, got " + shape_of(a);
    s->producer = norm() ? Producer::kRmsNorm : Producer::kSiluMul;
    s->a = a.untyped_data(), s->b = b.untyped_data(), s->eps = eps;
    if (!float_kind(a.element_type(), &s->a_kind) || !float_kind(b.element_type(), &s->b_kind))
      return "operands must be float32, bfloat16 or float16";
    const int64_t rows = s->batch * s->rows, weights = s->cols ? count_of(b) / s->cols : 0;
    s->rows_per_weight = weights == 1 ? rows : s->rows;
    if (norm() && (count_of(b) != weights * s->cols || (weights != 1 && weights != s->batch)))
      return "weight " + shape_of(b) + " does not fit x " + shape_of(a);
    if (!norm() && (count_of(b) != count_of(a) || s->a_kind != s->b_kind))
      return "gate and up must have the same shape and dtype, got " + shape_of(a) + " and " + shape_of(b);
    return keeps_values() ? check_values(values) : std::string();
  }

  // An error text if `buffer` cannot hold the values, or empty.
  std::string check_values(const ffi::AnyBuffer& buffer) const {
    return buffer.element_type() == ffi::DataType::BF16 ? check_count("values", buffer, count_of(a))
                                                        : "values must be bfloat16";
  }

  // Fills `shape` for one side; an error text, or empty.
  std::string side_shape(const ProducerSide& side, QuantShape* shape) const {
    const KernelSpec spec = kernel_spec(side.spec);
    if (!side.given() && spec.amax_scope == AmaxScope::kTensor) return "the amax of a tensor must be given";
    return quant_shape(a, side.buffers(), &side == &col, spec, shape);
  }

  ffi::Error check_specs() const {
    if (col.wanted()) return row.wanted() ? check_pair(row.spec, col.spec) : invalid("produce", "columns need rows");
    return row.wanted() && !known(row.spec) ? unsupported("produce", row.spec) : ffi::Error::Success();
  }
};

template <class Context, ffi::Error (*kRun)(Context, const ProducerCall&)>
ffi::Error produce_impl(ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Buffer<ffi::F32> row_amax,
                        ffi::Buffer<ffi::F32> col_amax, ffi::Buffer<ffi::U32> row_stream,
                        ffi::Buffer<ffi::U32> col_stream, ffi::Result<ffi::AnyBuffer> row_data,
                        ffi::Result<ffi::AnyBuffer> row_scale, ffi::Result<ffi::Buffer<ffi::F32>> row_found,
                        ffi::Result<ffi::AnyBuffer> col_data, ffi::Result<ffi::AnyBuffer> col_scale,
                        ffi::Result<ffi::Buffer<ffi::F32>> col_found, ffi::Result<ffi::AnyBuffer> values,
                        ffi::Result<ffi::AnyBuffer> scratch, std::string_view producer, float eps, SpecAttr row_spec,
                        SpecAttr col_spec, int32_t row_blocks, int32_t col_blocks, Context context) {
  return kRun(context, {producer,
                        eps,
                        a,
                        b,
                        {row_amax, row_stream, *row_data, *row_scale, *row_found, row_spec, row_blocks},
                        {col_amax, col_stream, *col_data, *col_scale, *col_found, col_spec, col_blocks},
                        *values,
                        *scratch});
}

inline auto producer_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()         // x or gate
      .Arg<ffi::AnyBuffer>()         // weight or up
      .Arg<ffi::Buffer<ffi::F32>>()  // amax of rows
      .Arg<ffi::Buffer<ffi::F32>>()  // amax of columns
      .Arg<ffi::Buffer<ffi::U32>>()  // stream of rows
      .Arg<ffi::Buffer<ffi::U32>>()  // stream of columns
      .Ret<ffi::AnyBuffer>()         // data of rows
      .Ret<ffi::AnyBuffer>()         // scale of rows
      .Ret<ffi::Buffer<ffi::F32>>()  // amax of rows or windows, found
      .Ret<ffi::AnyBuffer>()         // data of columns
      .Ret<ffi::AnyBuffer>()         // scale of columns
      .Ret<ffi::Buffer<ffi::F32>>()  // amax of the windows of columns, found
      .Ret<ffi::AnyBuffer>()         // values
      .Ret<ffi::AnyBuffer>()         // scratch
      .Attr<std::string_view>("producer")
      .Attr<float>("eps")
      .Attr<SpecAttr>("row_spec")
      .Attr<SpecAttr>("col_spec")
      .Attr<int32_t>("row_blocks")
      .Attr<int32_t>("col_blocks");
}

}  // namespace jnvfp4
