// Checks that the calls of all operations share, before memory is touched: element types, dimensions, attributes.
//
// Abstract evaluation in Python has checked the same. These checks are for callers that bypass it, such as a program
// that another version exported.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "../core/arrays.h"
#include "../core/spec.h"
#include "xla/ffi/api/ffi.h"

namespace jnvfp4 {

namespace ffi = ::xla::ffi;

using Dims = ffi::AnyBuffer::Dimensions;
using Type = ffi::DataType;

template <class B>
int64_t count_of(const B& buffer) {
  int64_t n = 1;
  for (int64_t d : buffer.dimensions()) n *= d;
  return n;
}

// A buffer without elements stands for an operand or result that is absent.
template <class B>
bool present(const B& buffer) {
  return count_of(buffer) != 0;
}

inline std::string name_of(Type type) {
  switch (type) {
    case Type::PRED: return "bool";
    case Type::S4: return "int4";
    case Type::U4: return "uint4";
    case Type::F4E2M1FN: return "float4_e2m1fn";
    case Type::S8: return "int8";
    case Type::U8: return "uint8";
    case Type::S32: return "int32";
    case Type::U32: return "uint32";
    case Type::F8E4M3FN: return "float8_e4m3fn";
    case Type::F32: return "float32";
    case Type::BF16: return "bfloat16";
    case Type::F16: return "float16";
    default: return "type " + std::to_string(static_cast<int>(type));
  }
}

inline std::string text_of(Dims dims) {
  std::string s = "(";
  for (int64_t d : dims) s.append(s.size() > 1 ? "," : "").append(std::to_string(d));
  return s + ")";
}

inline std::string text_of(const ffi::AnyBuffer& buffer) {
  return name_of(buffer.element_type()) + text_of(buffer.dimensions());
}

// The dimensions that an array must have: the leading axes of another one, then at most three more.
class Expected {
 public:
  Expected(Dims lead, std::initializer_list<int64_t> last) : lead_(lead), count_(last.size()) {
    std::copy(last.begin(), last.end(), last_);
  }

  bool operator==(Dims dims) const {
    return dims.size() == lead_.size() + count_ && std::equal(lead_.begin(), lead_.end(), dims.begin()) &&
           std::equal(last_, last_ + count_, dims.begin() + lead_.size());
  }
  std::string text() const {
    std::string s = text_of(lead_);
    s.pop_back();
    for (size_t i = 0; i < count_; ++i) s.append(s.size() > 1 ? "," : "").append(std::to_string(last_[i]));
    return s + ")";
  }

 private:
  Dims lead_;
  size_t count_;
  int64_t last_[3] = {};
};

inline constexpr std::initializer_list<Type> kFloats = {Type::F32, Type::BF16, Type::F16};
inline constexpr std::initializer_list<Type> kFloats16 = {Type::BF16, Type::F16};
inline constexpr std::initializer_list<Type> kScales = {Type::U8, Type::F8E4M3FN};  // the bits of E4M3 either way

inline Float float_kind(Type type) {
  return type == Type::F32 ? Float::kF32 : type == Type::BF16 ? Float::kBf16 : Float::kF16;
}

// The checks of one call. The first that fails makes the error; checks after it are not made.
class Checks {
 public:
  explicit Checks(std::string_view op) : op_(op) {}

  bool ok() const { return text_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(std::string(op_) + ": " + text_); }

  // `text` makes the sentence after "<op>: ".
  template <class Text>
  bool that(bool condition, const Text& text) {
    if (ok() && !condition) text_ = text();
    return ok();
  }

  // Also that the array is where XLA puts arrays, since kernels move 16 bytes at a time: one that comes from elsewhere,
  // such as a slice in another library, may not be.
  bool type(std::string_view name, const ffi::AnyBuffer& buffer, std::initializer_list<Type> types) {
    constexpr int64_t kAligned = 16;
    const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(buffer.untyped_data()) % kAligned);
    that(count_of(buffer) < kAligned || past == 0, [&] {
      return std::string(name) + " must begin at a multiple of 16 bytes, is " + std::to_string(past) +
             " past one: copy it first";
    });
    for (Type t : types)
      if (buffer.element_type() == t) return ok();
    return that(false, [&] {
      std::string s = std::string(name) + " must be ";
      for (const Type& t : types) s.append(&t == types.begin() ? "" : " or ").append(name_of(t));
      return s + ", got " + text_of(buffer);
    });
  }

  bool dims(std::string_view name, const ffi::AnyBuffer& buffer, const Expected& expected) {
    return that(expected == buffer.dimensions(), [&] {
      return std::string(name) + " must have shape " + expected.text() + ", got " + text_of(buffer.dimensions());
    });
  }

  bool array(std::string_view name, const ffi::AnyBuffer& buffer, std::initializer_list<Type> types,
             const Expected& expected) {
    return type(name, buffer, types) && dims(name, buffer, expected);
  }

  bool absent(std::string_view name, const ffi::AnyBuffer& buffer, std::initializer_list<Type> types) {
    type(name, buffer, types);
    return that(!present(buffer), [&] { return std::string(name) + " must have no elements, got " + text_of(buffer); });
  }

  bool e4m3_max(std::string_view name, int32_t value) {
    return that(value == 448 || value == 256,
                [&] { return std::string(name) + " must be 448 or 256, got " + std::to_string(value); });
  }

 private:
  std::string_view op_;
  std::string text_;
};

// An array of rank 2 or more as matrices.
struct Matrices {
  Dims lead;
  int64_t batch = 1, rows = 0, cols = 0;

  Matrices(Checks& check, std::string_view name, const ffi::AnyBuffer& x) : lead(x.dimensions()) {
    const Dims dims = x.dimensions();
    if (!check.that(dims.size() >= 2,
                    [&] { return std::string(name) + " must have rank 2 or more, got " + text_of(x); }))
      return;
    lead = dims.first(dims.size() - 2);
    for (int64_t d : lead) batch *= d;
    rows = dims[dims.size() - 2], cols = dims[dims.size() - 1];
  }

  int64_t count() const { return batch * rows * cols; }
};

// The amaxes of a tensor whose format has one for each 64 elements (`windows`), or else one in all, one for each matrix
// or one for each row.
inline AmaxMap amax_map(Checks& check, std::string_view name, const ffi::AnyBuffer& amax, const Matrices& m,
                        bool windows) {
  check.type(name, amax, {Type::F32});
  const Dims dims = amax.dimensions();
  const Expected each_row{m.lead, {m.rows}};
  if (windows) {
    check.dims(name, amax, {m.lead, {m.rows, m.cols / kWindow}});
    return {m.batch * m.rows, m.cols / kWindow};
  }
  if (dims.size() == 0) return {m.batch * m.rows, 0};
  if (Expected{m.lead, {}} == dims) return {m.rows, 0};
  check.that(each_row == dims, [&] {
    return std::string(name) + " must have shape (), " + (m.lead.size() ? text_of(m.lead) + ", " : "") + "or " +
           each_row.text() + ", got " + text_of(dims);
  });
  return {1, 0};
}

// The parts of an NVFP4 tensor [..., rows, cols]. `side` begins their names in errors.
struct Tensor : Matrices {
  AmaxMap map;

  Tensor(Checks& check, std::string_view side, const ffi::AnyBuffer& data, const ffi::AnyBuffer& scale,
         const ffi::AnyBuffer& amax, bool windows)
      : Matrices(check, std::string(side) + "data", data) {
    const std::string name(side);
    const int64_t unit = windows ? kWindow : kBlock;
    check.type(name + "data", data, {Type::U8});
    cols *= 2;
    check.that(cols % unit == 0, [&] {
      return name + "data must hold a multiple of " + std::to_string(unit) + " codes in a row, got " + text_of(data);
    });
    check.array(name + "scale", scale, kScales, {lead, {rows, cols / kBlock}});
    map = amax_map(check, name + "amax", amax, *this, windows);
  }
};

}  // namespace jnvfp4
