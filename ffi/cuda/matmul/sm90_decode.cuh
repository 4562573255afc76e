// Exact decode of NVFP4 codes and scales to the fragments that wgmma takes from registers, as pairs of 16-bit floats.
//
// float16:  a value is q * s * 2^-14, because the bits of a code are those of q * 2^-14.
// bfloat16: a value is q * s * 2^-8: the bits of a code are those of q * 2^-126, and a scale is made times 2^118.
// The factors are powers of two and nothing under- or overflows, so the sums are exact multiples of the rule's.
//
// Fragment order, inside a window of 64 along K: position 16 j + 2 t + b holds element 16 t + 8 (j / 2) + j % 2 + 2 b
// of the window, position 16 j + 8 + 2 t + b the element 4 further. Lane t of a quad then needs for the four k16 steps
// j exactly the elements of block t: 8 neighbouring bytes of codes and one scale of a row. No order of the terms is
// promised, and both operands have the same one.
#pragma once

#include "../device.cuh"

namespace jnvfp4 {

// Subnormals are kept, and NaN stays NaN.
template <class T>
__device__ __forceinline__ uint32_t mul_pairs(uint32_t a, uint32_t b) {
  uint32_t c;
  if constexpr (std::is_same_v<T, Bf16>)
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
__device__ __forceinline__ uint32_t low_twice(uint32_t v) { return __byte_perm(v, 0, 0x1010); }
__device__ __forceinline__ uint32_t high_twice(uint32_t v) { return __byte_perm(v, 0, 0x3232); }

// What a sum of decoded products is multiplied by to be the rule's y.
template <class T>
inline constexpr float kUnscale = std::is_same_v<T, Bf16> ? 0x1p8f : 0x1p14f;

// The scales in the two low bytes.
template <class T>
__device__ __forceinline__ uint32_t scale_pair(uint32_t bytes) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, Bf16>) {
    const uint32_t high = __byte_perm(bytes, 0, 0x1404);  // each in the high byte of its half
    const uint32_t magnitude = high >> 4 & 0x07f007f0u;   // s * 2^-120, but 480 * 2^-120 for NaN
    const uint32_t nan = (magnitude + 0x00100010u) & 0x08000800u;
    pair = (magnitude + nan * 15u) | (high & 0x80008000u);                    // all bits of the exponent for NaN
    pair = mul_pairs<Bf16>(mul_pairs<Bf16>(pair, 0x7b007b00u), 0x7b007b00u);  // times 2^119, twice
  } else {
    asm("{\n.reg .b16 x;\ncvt.u16.u32 x, %1;\ncvt.rn.f16x2.e4m3x2 %0, x;\n}" : "=r"(pair) : "r"(bytes));
  }
  return pair;
}

// The two codes of a byte times a scale.
template <class T>
__device__ __forceinline__ uint32_t decode_byte(uint32_t byte, uint32_t scale) {
  const uint32_t x = byte * 0x01001000u;  // the second code at bit 28, the first at bit 12
  if constexpr (std::is_same_v<T, Bf16>)
    return mul_pairs<T>((x & 0x80008000u) | (x >> 6 & 0x01c001c0u), scale);
  else
    return mul_pairs<T>((x & 0x80008000u) | (x >> 3 & 0x0e000e00u), scale);
}

// Eight codes of one scale as float16: elements (0, 2), (4, 6), (1, 3), (5, 7).
__device__ __forceinline__ void decode_word(uint32_t codes, uint32_t scale, uint32_t& p0, uint32_t& p1, uint32_t& p2,
                                            uint32_t& p3) {
  const uint32_t odd = (codes & 0x80808080u) | (codes >> 3 & 0x0e0e0e0eu);
  const uint32_t even = (codes << 4 & 0x80808080u) | (codes << 1 & 0x0e0e0e0eu);
  p0 = mul_pairs<F16>(__byte_perm(even, 0, 0x1404), scale);
  p1 = mul_pairs<F16>(__byte_perm(even, 0, 0x3424), scale);
  p2 = mul_pairs<F16>(__byte_perm(odd, 0, 0x1404), scale);
  p3 = mul_pairs<F16>(__byte_perm(odd, 0, 0x3424), scale);
}

}  // namespace jnvfp4
