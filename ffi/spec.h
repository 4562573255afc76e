// What a kernel is compiled for. The list below is the whole support matrix of the quantizers: one
// type per spec, one line to add a spec. `jnvfp4/spec.py` is the Python side.
#pragma once

#include <cstdint>

namespace jnvfp4 {

enum class AmaxScope : uint8_t { kTensor, kRow, kWindow64 };
enum class Select : uint8_t { kMax6, kMae, kMse };
enum class ErrorMath : uint8_t { kFp32, kFp16 };
enum class Rounding : uint8_t { kNearest, kStochastic };

// e4m3_max is a kernel argument, not part of the type: it changes no instruction.
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

struct Nvfp4 {
  static constexpr KernelSpec spec{};
};
struct Nvfp4_2D {
  static constexpr KernelSpec spec{AmaxScope::kTensor, false, 16};
};
struct RowScaled {
  static constexpr KernelSpec spec{AmaxScope::kRow};
};

template <class... S>
struct SpecList {};

using SupportedSpecs = SpecList<Nvfp4, Nvfp4_2D, RowScaled>;

// Calls f with the one listed type that equals `spec`; false if none does.
template <class F, class... S>
bool dispatch(const KernelSpec& spec, SpecList<S...>, F&& f) {
  return ((spec == S::spec ? (f(S{}), true) : false) || ...);
}

enum class Float : uint8_t { kF32, kBf16, kF16 };

// A quantized array as kernels see it: `batch` matrices of `rows` x `cols`, blocks along the columns.
// `rows_per_amax` says how many consecutive rows (over all matrices) share one amax.
struct QuantShape {
  int64_t batch, rows, cols;
  int64_t rows_per_amax;
  bool transposed;  // the source is stored as batch x cols x rows
};

}  // namespace jnvfp4
