// Common parts of the kernels of two NVFP4 operands in the pinned order: amaxes, and the epilogue.
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

// Computes an output before its cast. With windows y has its alpha.
template <bool kWindows>
__device__ __forceinline__ float finish_sum(const MatmulArgs& g, float y, int64_t matrix, int64_t row, int64_t col) {
  const GemmShape& s = g.shape;
  const Operand a(g.a, s.depth), b(g.b, s.depth);
  const float bias = g.result.bias ? load_float(g.result.bias, g.result.bias_kind, col) : 0.0f;
  const float alpha = kWindows ? 1.0f
                               : alpha_w4a4(a.amax_of(matrix * s.rows + row, 0), b.amax_of(matrix * s.cols + col, 0),
                                            g.a.e4m3_max, g.b.e4m3_max);
  return gemm_epilogue(y, alpha, bias, g.result.bias != nullptr);
}

}  // namespace jnvfp4
