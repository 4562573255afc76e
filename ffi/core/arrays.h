// Arrays as kernels see them: element types, shapes, and which amax a block has.
#pragma once

#include <cstdint>

#include "numerics.h"

namespace jnvfp4 {

// ---------------------------------------------------------------- element types of unquantized arrays
enum class Float : uint8_t { kF32, kBf16, kF16 };

struct F32 {
  using Stored = uint32_t;
  static JNVFP4_HD float load(Stored v) { return float_of(v); }
  static JNVFP4_HD Stored store(float v) { return bits_of(f32_encode(v)); }
};
struct Bf16 {
  using Stored = uint16_t;
  static JNVFP4_HD float load(Stored v) { return bf16_decode(v); }
  static JNVFP4_HD Stored store(float v) { return bf16_encode(v); }
};
struct F16 {
  using Stored = uint16_t;
  static JNVFP4_HD float load(Stored v) { return f16_decode(v); }
  static JNVFP4_HD Stored store(float v) { return f16_encode(v); }
};

// Calls f with the type that `kind` names.
template <class F>
void with_float(Float kind, F&& f) {
  switch (kind) {
    case Float::kF32: return f(F32{});
    case Float::kBf16: return f(Bf16{});
    case Float::kF16: return f(F16{});
  }
}

JNVFP4_HD float load_float(const void* p, Float kind, int64_t i) {
  switch (kind) {
    case Float::kF32: return F32::load(static_cast<const F32::Stored*>(p)[i]);
    case Float::kBf16: return Bf16::load(static_cast<const Bf16::Stored*>(p)[i]);
    case Float::kF16: return F16::load(static_cast<const F16::Stored*>(p)[i]);
  }
  return 0.0f;
}

// ---------------------------------------------------------------- shapes
inline constexpr int kWindowBlocks = kWindow / kBlock;

// Which amax a block has. Rows are counted over all matrices.
struct AmaxMap {
  int64_t rows_per_amax;    // consecutive rows that share an amax; unused with windows
  int64_t windows_per_row;  // of 64 elements with an amax each; 0: whole rows share one

  JNVFP4_HD bool windows() const { return windows_per_row != 0; }
  JNVFP4_HD int64_t at(int64_t row, int64_t block) const {
    return windows() ? row * windows_per_row + block / kWindowBlocks : row / rows_per_amax;
  }
  // Consecutive blocks that share an amax, over all rows.
  JNVFP4_HD int64_t blocks_per_amax(int64_t blocks_per_row) const {
    return windows() ? kWindowBlocks : rows_per_amax * blocks_per_row;
  }
};

// A quantized array: `batch` matrices of `rows` x `cols`, blocks along the columns.
struct QuantShape {
  int64_t batch, rows, cols;
  AmaxMap amax;
  bool transposed;  // the source is stored as batch x cols x rows
};

// `batch` products, rows x depth times cols x depth transposed.
struct GemmShape {
  int64_t batch, rows, cols, depth;
};

// `groups` products over consecutive rows of one left operand: rows x depth in all, and groups x cols x depth. How many
// rows a group has is on the device.
struct GroupedShape {
  int64_t rows, groups, cols, depth;
};

// The random bits of stochastic rounding. Each matrix has four words: the key, and the index of its first block in
// the whole array, low word first. `row_blocks` counts the blocks of a row of the whole array.
struct StreamArgs {
  const uint32_t* words = nullptr;
  int64_t row_blocks = 0;
};

}  // namespace jnvfp4
