// How a call names a QuantSpec: `QuantSpec.ffi_attrs()` of Python, word for word.
#pragma once

#include <string>
#include <string_view>

#include "checks.h"

namespace jnvfp4 {

struct SpecAttr {
  std::string_view amax_scope;
  int32_t e4m3_max;
  bool rht;
  int32_t block_rows;
  std::string_view select;
  std::string_view error_math;
  std::string_view rounding;
  bool scale_headroom;

  float headroom() const { return scale_headroom ? kHeadroom : 1.0f; }
};

template <class E>
struct Word {
  std::string_view word;
  E value;
};
inline constexpr Word<AmaxScope> kAmaxScopes[] = {
    {"tensor", AmaxScope::kTensor}, {"row", AmaxScope::kRow}, {"window64", AmaxScope::kWindow64}};
inline constexpr Word<Select> kSelects[] = {
    {"max6", Select::kMax6}, {"mae", Select::kMae}, {"mse", Select::kMse}, {"search", Select::kSearch}};
inline constexpr Word<ErrorMath> kErrorMaths[] = {{"fp32", ErrorMath::kFp32}, {"fp16", ErrorMath::kFp16}};
inline constexpr Word<Rounding> kRoundings[] = {{"nearest", Rounding::kNearest}, {"stochastic", Rounding::kStochastic}};

// False if no word of the table is `word`.
template <class E, size_t N>
bool find_word(const Word<E> (&table)[N], std::string_view word, E* value) {
  for (const Word<E>& w : table)
    if (w.word == word) return *value = w.value, true;
  return false;
}

inline std::string text_of(const SpecAttr& a) {
  std::string s = "{amax_scope=";
  s.append(a.amax_scope).append(", e4m3_max=").append(std::to_string(a.e4m3_max));
  s.append(a.rht ? ", rht=true" : ", rht=false").append(", block_rows=").append(std::to_string(a.block_rows));
  s.append(", select=").append(a.select).append(", error_math=").append(a.error_math);
  s.append(", rounding=").append(a.rounding);
  return s.append(a.scale_headroom ? ", scale_headroom=true}" : ", scale_headroom=false}");
}

// The kernel's part of a spec, which is one of SupportedSpecs if the check passes. e4m3_max and headroom are arguments
// of kernels.
inline KernelSpec kernel_spec(Checks& check, std::string_view name, const SpecAttr& a) {
  KernelSpec spec{};
  spec.rht = a.rht, spec.block_rows = a.block_rows;
  check.that(find_word(kAmaxScopes, a.amax_scope, &spec.amax_scope) && find_word(kSelects, a.select, &spec.select) &&
                 find_word(kErrorMaths, a.error_math, &spec.error_math) &&
                 find_word(kRoundings, a.rounding, &spec.rounding) && (a.e4m3_max == 448 || a.e4m3_max == 256) &&
                 (!a.scale_headroom || spec.rounding == Rounding::kStochastic) &&
                 dispatch(spec, SupportedSpecs{}, [](auto) {}),
             [&] { return std::string(name) + " must be a supported spec, got " + text_of(a); });
  return spec;
}

}  // namespace jnvfp4

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jnvfp4::SpecAttr, ::xla::ffi::StructMember<std::string_view>("amax_scope"),
                                      ::xla::ffi::StructMember<int32_t>("e4m3_max"),
                                      ::xla::ffi::StructMember<bool>("rht"),
                                      ::xla::ffi::StructMember<int32_t>("block_rows"),
                                      ::xla::ffi::StructMember<std::string_view>("select"),
                                      ::xla::ffi::StructMember<std::string_view>("error_math"),
                                      ::xla::ffi::StructMember<std::string_view>("rounding"),
                                      ::xla::ffi::StructMember<bool>("scale_headroom"));
