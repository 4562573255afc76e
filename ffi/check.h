// Shape checks that repeat in C++ what abstract evaluation already promised, and attribute decoding.
// Included by the handlers of both platforms.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "numerics.h"
#include "spec.h"
#include "xla/ffi/api/ffi.h"

namespace jnvfp4 {

namespace ffi = ::xla::ffi;

// `QuantSpec.ffi_attrs()` of Python, word for word.
struct SpecAttr {
  std::string_view amax_scope;
  int32_t e4m3_max;
  bool rht;
  int32_t block_rows;
  std::string_view select;
  std::string_view error_math;
  std::string_view rounding;
};

inline bool one_of(std::string_view word, std::initializer_list<std::string_view> words) {
  for (std::string_view w : words)
    if (word == w) return true;
  return false;
}

// Whether every member has a value that `kernel_spec` knows.
inline bool known(const SpecAttr& a) {
  return one_of(a.amax_scope, {"tensor", "row", "window64"}) && (a.e4m3_max == 448 || a.e4m3_max == 256) &&
         one_of(a.select, {"max6", "mae", "mse"}) && one_of(a.error_math, {"fp32", "fp16"}) &&
         one_of(a.rounding, {"nearest", "stochastic"});
}

inline KernelSpec kernel_spec(const SpecAttr& a) {
  return {a.amax_scope == "tensor" ? AmaxScope::kTensor
          : a.amax_scope == "row"  ? AmaxScope::kRow
                                   : AmaxScope::kWindow64,
          a.rht,
          a.block_rows,
          a.select == "max6"  ? Select::kMax6
          : a.select == "mae" ? Select::kMae
                              : Select::kMse,
          a.error_math == "fp32" ? ErrorMath::kFp32 : ErrorMath::kFp16,
          a.rounding == "nearest" ? Rounding::kNearest : Rounding::kStochastic};
}

inline std::string to_string(const SpecAttr& a) {
  std::string s = "{amax_scope=";
  s.append(a.amax_scope).append(", e4m3_max=").append(std::to_string(a.e4m3_max));
  s.append(a.rht ? ", rht=true" : ", rht=false").append(", block_rows=").append(std::to_string(a.block_rows));
  s.append(", select=").append(a.select).append(", error_math=").append(a.error_math);
  return s.append(", rounding=").append(a.rounding).append("}");
}

inline ffi::Error unsupported(std::string_view op, const SpecAttr& a) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented, std::string(op) + ": no kernel is built for " + to_string(a));
}

// An error if no kernel quantizes both ways in one pass with this pair of specs.
inline ffi::Error check_pair(const SpecAttr& row, const SpecAttr& col) {
  if (known(row) && known(col) && dispatch(kernel_spec(row), kernel_spec(col), FusedPairs{}, [](auto) {}))
    return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    "quantize_pair: no kernel is built for the pair " + to_string(row) + ", " + to_string(col));
}

inline ffi::Error invalid(std::string_view op, std::string_view what) {
  return ffi::Error::InvalidArgument(std::string(op) + ": " + std::string(what));
}

template <class B>
std::string shape_of(const B& buffer) {
  std::string s = "(";
  for (int64_t d : buffer.dimensions()) s += std::to_string(d) + ",";
  return s + ")";
}

template <class B>
int64_t count_of(const B& buffer) {
  return static_cast<int64_t>(buffer.element_count());
}

// An error text if `buffer` does not hold `count` elements, or empty.
template <class B>
std::string check_count(std::string_view name, const B& buffer, int64_t count) {
  if (count_of(buffer) == count) return {};
  return std::string(name) + " must hold " + std::to_string(count) + " elements, got " + shape_of(buffer);
}

// The first text that is not empty.
inline std::string first_of(std::initializer_list<std::string> errors) {
  for (const std::string& e : errors)
    if (!e.empty()) return e;
  return {};
}

inline bool float_kind(ffi::DataType t, Float* out) {
  if (t == ffi::DataType::F32)
    *out = Float::kF32;
  else if (t == ffi::DataType::BF16)
    *out = Float::kBf16;
  else if (t == ffi::DataType::F16)
    *out = Float::kF16;
  else
    return false;
  return true;
}

// How many consecutive rows share an amax, for an amax array that holds one value for everything, one
// per matrix, or one per row. 0 if the sizes do not fit.
inline int64_t rows_per_amax(int64_t batch, int64_t rows, int64_t amax_count) {
  if (amax_count == batch * rows) return 1;
  if (amax_count == batch) return rows;
  return amax_count == 1 ? batch * rows : 0;
}

// The last two dimensions and the product of the others.
template <class Dims>
bool split_dims(const Dims& dims, int64_t* batch, int64_t* rows, int64_t* cols) {
  if (dims.size() < 2) return false;
  *batch = 1;
  for (size_t i = 0; i + 2 < dims.size(); ++i) *batch *= dims[i];
  *rows = dims[dims.size() - 2];
  *cols = dims[dims.size() - 1];
  return true;
}

// How many amaxes an array has that are found, not given.
inline int64_t found_amax_count(const KernelSpec& spec, int64_t batch, int64_t rows, int64_t cols) {
  return spec.amax_scope == AmaxScope::kWindow64 ? batch * rows * cols / kWindow : batch * rows;
}

// What one result of quantize must hold. `row_blocks` counts the blocks in a row of the whole array.
struct QuantBuffers {
  ffi::AnyBuffer data, scale;
  int64_t amax_count;
  int64_t stream_count = 0;
};

// Fills `shape` from what is quantized, transposed or not, and the counts of its amax and stream; an error text, or
// empty.
inline std::string operand_shape(const ffi::AnyBuffer& x, int64_t amax_count, int64_t stream_count, bool transposed,
                                 const KernelSpec& spec, QuantShape* shape) {
  int64_t batch, rows, cols;
  if (!split_dims(x.dimensions(), &batch, &rows, &cols)) return "x must have rank 2 or more, got " + shape_of(x);
  if (transposed) std::swap(rows, cols);
  const bool windows = spec.amax_scope == AmaxScope::kWindow64;
  const int64_t unit = windows ? kWindow : kBlock;
  if (cols % unit) return "the quantized axis must be a multiple of " + std::to_string(unit) + ", got x " + shape_of(x);
  if (rows % spec.block_rows) return "block_rows=16 needs both axes to be multiples of 16, got x " + shape_of(x);
  const int64_t per = windows ? amax_count == batch * rows * cols / kWindow : rows_per_amax(batch, rows, amax_count);
  if (!per) return "amax has " + std::to_string(amax_count) + " elements, which does not fit x " + shape_of(x);
  if (stream_count != (spec.rounding == Rounding::kStochastic ? batch * 4 : 0))
    return "the stream has " + std::to_string(stream_count) + " words, which does not fit x " + shape_of(x);
  *shape = {batch, rows, cols, per, transposed};
  return {};
}

// As `operand_shape`, with the results of quantize.
inline std::string quant_shape(const ffi::AnyBuffer& x, const QuantBuffers& b, bool transposed, const KernelSpec& spec,
                               QuantShape* shape) {
  if (std::string error = operand_shape(x, b.amax_count, b.stream_count, transposed, spec, shape); !error.empty())
    return error;
  const int64_t blocks = shape->batch * shape->rows * shape->cols / kBlock;
  return first_of({check_count("data", b.data, blocks * 8), check_count("scale", b.scale, blocks)});
}

// As `operand_shape`, with the result of fake_quant. No amax at all means one to be found for each row or window.
inline std::string fake_quant_shape(const ffi::AnyBuffer& x, const ffi::AnyBuffer& out, int64_t amax_count,
                                    int64_t stream_count, const KernelSpec& spec, QuantShape* shape) {
  int64_t batch, rows, cols;
  if (amax_count == 0 && spec.amax_scope == AmaxScope::kTensor) return "the amax of a tensor must be given";
  if (amax_count == 0 && split_dims(x.dimensions(), &batch, &rows, &cols))
    amax_count = found_amax_count(spec, batch, rows, cols);
  if (std::string error = operand_shape(x, amax_count, stream_count, false, spec, shape); !error.empty()) return error;
  if (out.element_type() != x.element_type()) return "the result must have the dtype of x";
  return check_count("out", out, count_of(x));
}

// As `quant_shape`, for one amax for each index of the first `keep` axes of x.
inline std::string rht_amax_shape(const ffi::AnyBuffer& x, int64_t amax_count, bool transposed, int32_t keep,
                                  QuantShape* shape) {
  int64_t batch, rows, cols, kept = 1;
  if (!split_dims(x.dimensions(), &batch, &rows, &cols)) return "x must have rank 2 or more, got " + shape_of(x);
  if (transposed) std::swap(rows, cols);
  if (cols % kBlock) return "the quantized axis must be a multiple of 16, got x " + shape_of(x);
  for (int32_t i = 0; i < keep && i < static_cast<int32_t>(x.dimensions().size()); ++i) kept *= x.dimensions()[i];
  if (amax_count != kept || !kept || batch % kept)
    return "amax must hold one value for each kept index of x " + shape_of(x);
  *shape = {batch, rows, cols, batch * rows / kept, transposed};
  return {};
}

// The number of blocks and how many share an amax; an error text, or empty.
template <class D, class S, class A>
std::string dequantize_shape(const D& data, const S& scale, const A& amax, const S& out, bool windows, int64_t* blocks,
                             int64_t* blocks_per_amax) {
  int64_t batch, rows, cols;
  if (!split_dims(scale.dimensions(), &batch, &rows, &cols)) return "scale must have rank 2 or more";
  const int64_t count = static_cast<int64_t>(amax.element_count());
  *blocks = batch * rows * cols;
  *blocks_per_amax = windows ? (count * (kWindow / kBlock) == *blocks ? kWindow / kBlock : 0)
                             : rows_per_amax(batch, rows, count) * cols;
  if (!*blocks_per_amax) return "amax " + shape_of(amax) + " does not fit scale " + shape_of(scale);
  return first_of({check_count("data", data, *blocks * 8), check_count("out", out, *blocks * 16)});
}

// How many matrices the leading axes of `buffer` hold.
template <class B>
int64_t matrices(const B& buffer) {
  int64_t batch, rows, cols;
  return split_dims(buffer.dimensions(), &batch, &rows, &cols) ? batch : 1;
}

// Fills `g` from a, whose last axis times `a_scale` is K, and the codes of b: [N, K], then all leading axes of a are
// rows; or with the leading axes of a. An error text, or empty.
template <class A, class B>
std::string gemm_shape(const A& a, const B& b, int64_t a_scale, GemmShape* g) {
  int64_t a_batch, a_rows, a_cols, b_batch, b_rows, b_cols;
  if (!split_dims(a.dimensions(), &a_batch, &a_rows, &a_cols) ||
      !split_dims(b.dimensions(), &b_batch, &b_rows, &b_cols))
    return "operands must have rank 2 or more";
  if (a_cols * a_scale != b_cols * 2 || b_cols % 8)
    return "K differs or is no multiple of 16: a " + shape_of(a) + ", b " + shape_of(b);
  if (b.dimensions().size() == 2) a_rows *= a_batch, a_batch = 1;
  if (a_batch != b_batch) return "leading axes differ: a " + shape_of(a) + ", b " + shape_of(b);
  *g = {a_batch, a_rows, b_rows, b_cols * 2};
  return {};
}

// Where the amax of an operand of `matrices` matrices stand, whose rows a GEMM sees as `batch` x `rows`.
inline std::string gemm_amax(const ffi::Buffer<ffi::F32>& amax, int64_t matrices, int64_t batch, int64_t rows,
                             int64_t depth, AmaxMap* map) {
  const int64_t count = static_cast<int64_t>(amax.element_count());
  if (map->windows) {
    if (depth % kWindow) return "K must be a multiple of 64 for window64";
    return check_count("amax", amax, batch * rows * depth / kWindow);
  }
  map->rows_per_amax = count == matrices && matrices && batch * rows % matrices == 0
                           ? batch * rows / matrices
                           : rows_per_amax(batch, rows, count);
  return map->rows_per_amax ? "" : "amax " + shape_of(amax) + " does not fit its operand";
}

}  // namespace jnvfp4

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jnvfp4::SpecAttr, ::xla::ffi::StructMember<std::string_view>("amax_scope"),
                                      ::xla::ffi::StructMember<int32_t>("e4m3_max"),
                                      ::xla::ffi::StructMember<bool>("rht"),
                                      ::xla::ffi::StructMember<int32_t>("block_rows"),
                                      ::xla::ffi::StructMember<std::string_view>("select"),
                                      ::xla::ffi::StructMember<std::string_view>("error_math"),
                                      ::xla::ffi::StructMember<std::string_view>("rounding"));
