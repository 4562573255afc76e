// The element types of unquantized arrays by their stored bits, and the choice among them at run time.
#pragma once

#include <cstdint>

#include "numerics.h"
#include "spec.h"

namespace jnvfp4 {

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

}  // namespace jnvfp4
