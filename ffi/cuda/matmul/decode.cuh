// Exact decode of NVFP4 codes and scales to what tensor cores take, as pairs of 16-bit floats. `Decode` needs Hopper.
//
// float16:  a value is q * s * 2^-14, because the bits of a code are those of q * 2^-14.
// bfloat16: a value is q * s * 2^-8: the bits of a code are those of q * 2^-126, and a scale is made times 2^118.
// The factors are powers of two, and decoded numbers neither under- nor overflow, so sums are exact multiples of the
// rule's, unless a bfloat16 operand is so small or large that its products leave the range of float32.
//
// Eight codes decode to the pairs (k, k + 4), which takes the fewest instructions. No order of the terms along K is
// promised, so the other operand gets the same order.
#pragma once

#include "../device.cuh"
#include "../kernels.h"
#include "window_sums.h"

namespace jnvfp4 {

// Eight codes, the first in the lowest bits, to the pairs (0, 4) (1, 5) (2, 6) (3, 7) times 2^-14.
__device__ __forceinline__ void halves_of_codes(uint32_t codes, uint32_t (&pair)[4]) {
  // The high bytes, of odd and of even places.
  const uint32_t odd = (codes & 0x80808080u) | (codes >> 3 & 0x0e0e0e0eu);
  const uint32_t even = (codes << 4 & 0x80808080u) | (codes << 1 & 0x0e0e0e0eu);
  pair[0] = __byte_perm(even, 0, 0x2404), pair[1] = __byte_perm(odd, 0, 0x2404);
  pair[2] = even & 0xff00ff00u, pair[3] = odd & 0xff00ff00u;
}

// The product of two pairs. Subnormals are kept.
__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// T is F16 or Bf16.
template <class T>
struct Decode {
  static constexpr int kPower = 14;  // the negative exponent of the factor
  // Two E4M3 bytes to two words with the scale in both halves. NaN stays NaN.
  static __device__ __forceinline__ void scales(uint32_t two, uint32_t& s0, uint32_t& s1) {
    uint32_t h;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(static_cast<uint16_t>(two)));
    s0 = __byte_perm(h, 0, 0x1010), s1 = __byte_perm(h, 0, 0x3232);
  }
  // The pairs of eight codes, times the scale.
  static __device__ __forceinline__ void eight(uint32_t codes, uint32_t scale, uint32_t (&pair)[4]) {
    uint32_t raw[4];
    halves_of_codes(codes, raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = multiply_halves(raw[i], scale);
  }
};

template <>
struct Decode<Bf16> {
  static constexpr int kPower = 8;
  static __device__ __forceinline__ void scales(uint32_t two, uint32_t& s0, uint32_t& s1) {
    uint32_t h;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(static_cast<uint16_t>(two)));
    const float a = low_half<F16>(h) * 0x1p118f, b = high_half<F16>(h) * 0x1p118f;
    s0 = bf16_pair(a, a), s1 = bf16_pair(b, b);
  }
  static __device__ __forceinline__ void eight(uint32_t codes, uint32_t scale, uint32_t (&pair)[4]) {
    // One multiplication puts the sign at bit 15 and the magnitude at bits 8 to 6: bfloat16(q) * 2^-126.
    const uint32_t high = codes >> 8;
    const uint32_t raw[4] = {
        (codes & 0x000f000fu) * 0x1040u & 0x81c081c0u, (codes & 0x00f000f0u) * 0x0104u & 0x81c081c0u,
        (high & 0x000f000fu) * 0x1040u & 0x81c081c0u, (high & 0x00f000f0u) * 0x0104u & 0x81c081c0u};
#pragma unroll
    for (int i = 0; i < 4; ++i) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair[i]) : "r"(raw[i]), "r"(scale));
  }
};

// Eight 16-bit elements to the same pairs.
__device__ __forceinline__ void permute8(uint4 v, uint32_t (&pair)[4]) {
  pair[0] = __byte_perm(v.x, v.z, 0x5410), pair[1] = __byte_perm(v.x, v.z, 0x7632);
  pair[2] = __byte_perm(v.y, v.w, 0x5410), pair[3] = __byte_perm(v.y, v.w, 0x7632);
}

// The amax of a row of an operand without windows, rows of all matrices counted.
__device__ __forceinline__ float amax_of(const MatmulOperand& x, int64_t row) {
  return __ldg(x.amax + (x.map.rows_per_amax == 1 ? row : quotient(row, x.map.rows_per_amax)));
}

}  // namespace jnvfp4
