// The rule of products on a device, one element at a time, for operands whose sums are exact in any order.
#pragma once

#include "cuda/device.cuh"
#include "cuda/matmul/launchers.h"

namespace jnvfp4 {

// Element `i` of an operand: a code times the scale of its block, or a 16-bit number.
__device__ inline float value_of(const MatmulOperand& t, int64_t i) {
  if (!t.quantized()) return load_float(t.data, t.kind, i);
  const uint8_t pair = static_cast<const uint8_t*>(t.data)[i / 2];
  return e2m1_decode(i % 2 ? pair >> 4 : pair & 15) * e4m3_decode(t.scale[i / kBlock]);
}

__device__ inline float dot_by_rule(const MatmulOperand& a, const MatmulOperand& b, int64_t a_row, int64_t b_row,
                                    int64_t depth) {
  float y = 0;  // +0, also of terms that are all -0
  for (int64_t k = 0; k < depth; ++k) y += value_of(a, a_row * depth + k) * value_of(b, b_row * depth + k);
  return y;
}

__device__ inline float alpha_by_rule(const MatmulOperand& a, const MatmulOperand& b, int64_t a_row, int64_t b_row) {
  const float b_amax = b.amax[b_row / b.map.rows_per_amax];
  if (!a.quantized()) return alpha_w4a16(b_amax, b.e4m3_max);
  return alpha_w4a4(a.amax[a_row / a.map.rows_per_amax], b_amax, a.e4m3_max, b.e4m3_max);
}

__device__ inline void store_result(Float kind, void* out, int64_t i, float value) {
  if (kind == Float::kF32)
    static_cast<uint32_t*>(out)[i] = F32::store(value);
  else
    static_cast<uint16_t*>(out)[i] = kind == Float::kBf16 ? Bf16::store(value) : F16::store(value);
}

}  // namespace jnvfp4
