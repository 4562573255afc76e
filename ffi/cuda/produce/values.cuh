// Norm and gate on CUDA: the bfloat16 values of eight or sixteen neighbouring elements.
#pragma once

#include "../../numerics_fast.h"
#include "../quantize/block.cuh"

namespace jnvfp4 {

// Eight elements as they are stored; only float32 has the second word. Which type is the same for the whole launch.
struct Eight {
  uint4 word[2];

  // Elements i to i + 7, i a multiple of 8.
  __device__ __forceinline__ void load(const void* p, Float kind, int64_t i) {
    const auto* q = reinterpret_cast<const uint4*>(static_cast<const char*>(p) + i * (kind == Float::kF32 ? 4 : 2));
    word[0] = __ldg(q);
    if (kind == Float::kF32) word[1] = __ldg(q + 1);
  }
  __device__ __forceinline__ void values(Float kind, float (&v)[8]) const {
    const uint4 a = word[0], b = word[1];
    if (kind == Float::kF32) {
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = float_of((&a.x)[k]), v[k + 4] = float_of((&b.x)[k]);
    } else {
      values16(kind, v);
    }
  }
  __device__ __forceinline__ void values16(Float kind, float (&v)[8]) const {
    const uint4 a = word[0];
    if (kind == Float::kBf16) {
#pragma unroll
      for (int k = 0; k < 8; ++k) v[k] = half_of<Bf16>((&a.x)[k / 2], k % 2);
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) v[k] = half_of<F16>((&a.x)[k / 2], k % 2);
    }
  }
};

__device__ __forceinline__ void load_eight(const void* p, Float kind, int64_t i, float (&v)[8]) {
  Eight e;
  e.load(p, kind, i);
  e.values(kind, v);
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
__device__ __forceinline__ int64_t weights_of(const ProducerOperands& s, int64_t row) {
  return s.rows_per_weight == s.batch * s.rows ? 0 : quotient(row, s.rows_per_weight) * s.cols;
}

// Where the second operand of a row over all matrices begins.
__device__ __forceinline__ int64_t second_of(const ProducerOperands& s, int64_t row) {
  return s.producer == Producer::kSiluMul ? row * s.cols : weights_of(s, row);
}

// The values from what was read of a row over all matrices; `factors` holds those of the rows, for a norm.
__device__ __forceinline__ uint4 produce_eight(const ProducerOperands& s, const float* factors, int64_t row,
                                               const Eight& first, const Eight& second) {
  float a[8], b[8];
  first.values(s.a_kind, a);
  second.values(s.b_kind, b);
  return s.producer == Producer::kSiluMul ? gate_eight(a, b) : norm_eight(a, factors[row], b);
}

// The conversion instruction makes every NaN 0x7fff; stored is 0x7fc0.
__device__ __forceinline__ uint4 stored_values(uint4 v) {
#pragma unroll
  for (int k = 0; k < 4; ++k) (&v.x)[k] ^= __vcmpeq2((&v.x)[k], 0x7fff7fffu) & 0x003f003fu;
  return v;
}

}  // namespace jnvfp4
