// What `cvt.rn.satfinite.e2m1x2.f32` is documented to do, in integers, in place of the instruction (codes.cuh includes
// it where JNVFP4_E2M1_MODEL names it). Nearest, ties to even; a larger magnitude becomes 6 of the same sign; the sign
// stays, that of zero too; NaN becomes 6. So say the PTX ISA, and NVIDIA's own emulation in cuda_fp4.hpp, with which
// codes.cc compares this.
JNVFP4_HD uint32_t e2m1_model(float v) {
  const uint32_t sign = bits_of(v) >> 31, a = bits_of(v) & kMagnitude;
  if (a > kInf) return 7;
  // |v| is significand * 2^(exponent - 150), for normal numbers; the grid step is 2^(binade - 128).
  const uint32_t exponent = a >> 23, significand = (a & 0x7fffffu) | 0x800000u;
  const uint32_t binade = exponent > 127 ? exponent : 127, shift = 22 + binade - exponent;
  if (binade > 129) return sign * 8 + 7;
  if (shift > 31) return sign * 8;
  uint32_t steps = significand >> shift;
  const uint32_t rest = significand - (steps << shift), half = 1u << (shift - 1);
  steps += rest > half || (rest == half && steps % 2);
  const uint32_t code = steps + 2 * (binade - 127);
  return sign * 8 + (code > 7 ? 7 : code);
}

JNVFP4_HD uint32_t e2m1_codes(const float* a) {
  uint32_t r = 0;
  for (int i = 0; i < 8; ++i) r |= e2m1_model(a[i]) << (4 * i);
  return r;
}
