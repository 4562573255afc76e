// Common parts of the kernels of two NVFP4 operands in the pinned order: amaxes and outputs.
#pragma once

#include "../../../core/numerics_fast.h"
#include "../../device.cuh"
#include "../launchers.h"

namespace jnvfp4 {

// An operand in registers.
struct Operand {
  const uint8_t* data;
  const uint8_t* scale;
  const float* amax;
  int64_t rows_per_amax, depth;
  bool windows;

  __device__ __forceinline__ Operand(const MatmulOperand& x, int64_t k)
      : data(static_cast<const uint8_t*>(x.data)),
        scale(x.scale),
        amax(x.amax),
        rows_per_amax(x.map.rows_per_amax),
        depth(k),
        windows(x.map.windows()) {}
  // Address of the amax of a window, given the row over all matrices.
  __device__ __forceinline__ const float* amax_at(int64_t row, int64_t window) const {
    return amax + (windows ? row * (depth / kWindow) + window : quotient(row, rows_per_amax));
  }
  __device__ __forceinline__ float amax_of(int64_t row, int64_t window) const { return *amax_at(row, window); }
};

// Alpha of a window, given the amaxes of its rows.
struct WindowAlpha {
  float divisor, reciprocal;

  __device__ __forceinline__ explicit WindowAlpha(const MatmulArgs& g)
      : divisor(36.0f * g.a.e4m3_max * g.b.e4m3_max), reciprocal(div_rn(1.0f, divisor)) {}
  __device__ __forceinline__ float operator()(float amax_a, float amax_b) const {
    return alpha_w4a4_by_steps(amax_a, amax_b, divisor, reciprocal);
  }
  // Alpha where the product of the amaxes is 0 or from 2^-60 to 2^60.
  __device__ __forceinline__ float usual(float amax_a, float amax_b) const {
    return div_by_steps(mul_rn(amax_a, amax_b), divisor, reciprocal,
                        [](float x, float y, float z) { return __fmaf_rn(x, y, z); });
  }
};

__device__ __forceinline__ void store_output(const MatmulResult& r, int64_t i, float v) {
  if (r.kind == Float::kF32)
    static_cast<uint32_t*>(r.out)[i] = F32::store(v);
  else
    static_cast<uint16_t*>(r.out)[i] = r.kind == Float::kBf16 ? Bf16::store(v) : F16::store(v);
}

}  // namespace jnvfp4
