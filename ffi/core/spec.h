// Specs that kernels are compiled for. The lists below are the whole support matrix of the quantizers: one
// type per spec, one line to add a spec. `jnvfp4/spec.py` is the Python side.
#pragma once

#include <cstdint>

namespace jnvfp4 {

enum class AmaxScope : uint8_t { kTensor, kRow, kWindow64 };
enum class Select : uint8_t { kMax6, kMae, kMse, kSearch };
enum class ErrorMath : uint8_t { kFp32, kFp16 };
enum class Rounding : uint8_t { kNearest, kStochastic };

// Numbers of a spec that change no instruction are kernel arguments (QuantizeArgs), not part of the type.
struct KernelSpec {
  AmaxScope amax_scope = AmaxScope::kTensor;
  bool rht = false;
  int32_t block_rows = 1;
  Select select = Select::kMax6;
  ErrorMath error_math = ErrorMath::kFp32;
  Rounding rounding = Rounding::kNearest;

  constexpr bool operator==(const KernelSpec& o) const {
    return amax_scope == o.amax_scope && rht == o.rht && block_rows == o.block_rows && select == o.select &&
           error_math == o.error_math && rounding == o.rounding;
  }
};

constexpr KernelSpec plain(AmaxScope scope, int32_t block_rows = 1, bool rht = false,
                           Rounding rounding = Rounding::kNearest) {
  return {scope, rht, block_rows, Select::kMax6, ErrorMath::kFp32, rounding};
}
constexpr KernelSpec chosen(AmaxScope scope, int32_t block_rows, Select select, ErrorMath error_math) {
  return {scope, false, block_rows, select, error_math, Rounding::kNearest};
}

// clang-format off
struct Nvfp4 { static constexpr KernelSpec spec = plain(AmaxScope::kTensor); };
struct Nvfp4Sr { static constexpr KernelSpec spec = plain(AmaxScope::kTensor, 1, false, Rounding::kStochastic); };
struct Nvfp4Rht { static constexpr KernelSpec spec = plain(AmaxScope::kTensor, 1, true); };
struct Nvfp4RhtSr { static constexpr KernelSpec spec = plain(AmaxScope::kTensor, 1, true, Rounding::kStochastic); };
struct Nvfp4_2D { static constexpr KernelSpec spec = plain(AmaxScope::kTensor, 16); };
struct RowScaled { static constexpr KernelSpec spec = plain(AmaxScope::kRow); };
struct Window64 { static constexpr KernelSpec spec = plain(AmaxScope::kWindow64); };
template <Select kSelect, ErrorMath kMath>
struct FourOverSix { static constexpr KernelSpec spec = chosen(AmaxScope::kTensor, 1, kSelect, kMath); };
template <Select kSelect, ErrorMath kMath>
struct FourOverSix2D { static constexpr KernelSpec spec = chosen(AmaxScope::kTensor, 16, kSelect, kMath); };
template <Select kSelect, ErrorMath kMath>
struct FourOverSixRow { static constexpr KernelSpec spec = chosen(AmaxScope::kRow, 1, kSelect, kMath); };
struct Nvfp4Search { static constexpr KernelSpec spec = chosen(AmaxScope::kTensor, 1, Select::kSearch, ErrorMath::kFp32); };
struct RowScaledSearch { static constexpr KernelSpec spec = chosen(AmaxScope::kRow, 1, Select::kSearch, ErrorMath::kFp32); };
// clang-format on

template <class... S>
struct SpecList {};

template <class... L>
struct Concatenated;
template <class... S>
struct Concatenated<SpecList<S...>> {
  using Type = SpecList<S...>;
};
template <class... A, class... B, class... L>
struct Concatenated<SpecList<A...>, SpecList<B...>, L...> : Concatenated<SpecList<A..., B...>, L...> {};

template <template <Select, ErrorMath> class S>
using EveryError = SpecList<S<Select::kMae, ErrorMath::kFp32>, S<Select::kMae, ErrorMath::kFp16>,
                            S<Select::kMse, ErrorMath::kFp32>, S<Select::kMse, ErrorMath::kFp16>>;

// GPUs search by the reference: a kernel would take more than 3 times the instructions of 4over6 (docs/tried.md).
using CudaSpecs = Concatenated<SpecList<Nvfp4, Nvfp4Sr, Nvfp4Rht, Nvfp4RhtSr, Nvfp4_2D, RowScaled, Window64>,
                               EveryError<FourOverSix>, EveryError<FourOverSix2D>, EveryError<FourOverSixRow>>::Type;
using SupportedSpecs = Concatenated<CudaSpecs, SpecList<Nvfp4Search, RowScaledSearch>>::Type;

// Pairs of specs that one pass over x quantizes; any other pair is two calls. `jnvfp4/spec.py` lists the same.
template <class R, class C>
struct Pair {
  using Row = R;
  using Col = C;
};
template <class S>
using Alike = Pair<S, S>;

template <class... P>
struct PairList {};

template <class... S>
PairList<Alike<S>...> alike(SpecList<S...>);
template <class... A, class... B, class... C>
PairList<A..., B..., C...> joined(PairList<A...>, PairList<B...>, PairList<C...>);

using FusedPairs = decltype(joined(PairList<Pair<Nvfp4, Nvfp4Rht>, Pair<Nvfp4Sr, Nvfp4RhtSr>>{},
                                   alike(SpecList<Nvfp4, Nvfp4Sr, Nvfp4_2D, RowScaled, Window64>{}),
                                   alike(Concatenated<EveryError<FourOverSix>, EveryError<FourOverSix2D>>::Type{})));

template <class F, class... P>
bool dispatch(const KernelSpec& row, const KernelSpec& col, PairList<P...>, F&& f) {
  return ((row == P::Row::spec && col == P::Col::spec ? (f(P{}), true) : false) || ...);
}

// Calls f with the one listed type that equals `spec`; false if none does.
template <class F, class... S>
bool dispatch(const KernelSpec& spec, SpecList<S...>, F&& f) {
  return ((spec == S::spec ? (f(S{}), true) : false) || ...);
}

}  // namespace jnvfp4
