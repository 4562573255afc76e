// Exact decode of NVFP4 codes to float16, in the order that takes the fewest instructions.
#pragma once

#include "../device.cuh"

namespace jnvfp4 {

// Eight codes, the first in the lowest bits, to the pairs (0, 4) (1, 5) (2, 6) (3, 7) times 2^-14, because the bits of
// a code are those of a float16 that is so much smaller.
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

}  // namespace jnvfp4
