// Norm and gate on CUDA: the bfloat16 values of eight or sixteen neighbouring elements.
#pragma once

#include "../producers.h"
#include "block.cuh"

namespace jnvfp4 {

// Elements i to i + 7, i a multiple of 8. Which type is the same for the whole launch.
__device__ __forceinline__ void load_eight(const void* p, Float kind, int64_t i, float (&v)[8]) {
  const auto* q = reinterpret_cast<const uint4*>(static_cast<const char*>(p) + i * (kind == Float::kF32 ? 4 : 2));
  const uint4 a = __ldg(q);
  if (kind == Float::kF32) {
    const uint4 b = __ldg(q + 1);
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = float_of((&a.x)[k]), v[k + 4] = float_of((&b.x)[k]);
  } else if (kind == Float::kBf16) {
#pragma unroll
    for (int k = 0; k < 4; ++k) v[2 * k] = float_of((&a.x)[k] << 16), v[2 * k + 1] = float_of((&a.x)[k] & 0xffff0000u);
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = F16::load(static_cast<uint16_t>((&a.x)[k / 2] >> (16 * (k % 2))));
  }
}

__device__ __forceinline__ uint4 round_eight(const float (&y)[8]) {
  return make_uint4(bf16_pair(y[0], y[1]), bf16_pair(y[2], y[3]), bf16_pair(y[4], y[5]), bf16_pair(y[6], y[7]));
}

__device__ __forceinline__ uint4 gate_eight(const float (&g)[8], const float (&u)[8]) {
  bool tiny = false;
#pragma unroll
  for (int k = 0; k < 8; ++k) tiny |= g[k] < kTinyGate;
  float y[8];
  if (tiny) {  // never in most data
#pragma unroll
    for (int k = 0; k < 8; ++k) y[k] = silu_mul(g[k], u[k]);
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) y[k] = silu_mul_usual(g[k], u[k]);
  }
  return round_eight(y);
}

__device__ __forceinline__ uint4 norm_eight(const float (&v)[8], float factor, const float (&w)[8]) {
  float y[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) y[k] = norm_scale(v[k], factor, w[k]);
  return round_eight(y);
}

// Where the weights of a row over all matrices begin.
__device__ __forceinline__ int64_t weights_of(const Sources& s, int64_t row) {
  return s.rows_per_weight == s.batch * s.rows ? 0 : quotient(row, s.rows_per_weight) * s.cols;
}

// The values from `col` of a row over all matrices; `factors` holds those of the rows, for a norm.
__device__ __forceinline__ uint4 produce_eight(const Sources& s, const float* factors, int64_t row, int64_t col) {
  float a[8], b[8];
  load_eight(s.a, s.a_kind, row * s.cols + col, a);
  if (s.producer == Producer::kSiluMul) {
    load_eight(s.b, s.b_kind, row * s.cols + col, b);
    return gate_eight(a, b);
  }
  load_eight(s.b, s.b_kind, weights_of(s, row) + col, b);
  return norm_eight(a, factors[row], b);
}

// The conversion instruction makes every NaN 0x7fff; stored is 0x7fc0.
__device__ __forceinline__ uint4 stored_values(uint4 v) {
#pragma unroll
  for (int k = 0; k < 4; ++k) (&v.x)[k] ^= __vcmpeq2((&v.x)[k], 0x7fff7fffu) & 0x003f003fu;
  return v;
}

}  // namespace jnvfp4
