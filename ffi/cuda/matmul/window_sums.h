// Kinds of the rows of a tile, bits by which sums of windows (64 along K) are computed; several rows' are combined by
// "or". tests/cpp/window_sums.cc proves has_exact_sums, with a model of tensor cores.
#pragma once

#include "../../core/numerics.h"

namespace jnvfp4 {

// Whether an amax has more than 12 bits, so that its products may be rounded, and whether it is neither 0 nor from
// 2^-38 to 2^49, so that div_by_pieces may be wrong.
constexpr uint32_t kLongAmax = 1, kOddAmax = 2;
JNVFP4_HD uint32_t kinds_of(float amax) {
  const uint32_t bits = bits_of(amax);
  return (bits & 0xfff ? kLongAmax : 0) | (bits == 0 || bits - 0x2c800000u <= 0x2b800000u ? 0 : kOddAmax);
}

// The numbers of a row in a window are integers times a power of two, a vector shorter than 2^size of it. All sums of
// products of two such vectors are below 2^(size + size') units (Cauchy-Schwarz), so up to 2^24 they are exact in any
// order, on tensor cores too. There a subnormal float16 has the exponent of a normal one, which costs up to 10 bits of
// 24: enough for sizes up to 13. A size is as many bits as it exceeds the least one by.
constexpr int kTokenSize = 2, kColumnSize = 13, kLeastSize = 7, kMostSize = 13, kMostSizes = 24;
JNVFP4_HD uint32_t bits_of_size(int size) {
  constexpr int kTooMany = kMostSizes - 2 * kLeastSize + 1;
  return (1u << (size > kMostSize ? kTooMany : size < kLeastSize ? 0 : size - kLeastSize)) - 1;
}

#if defined(__CUDA_ARCH__)
__device__ __forceinline__ int count_of_bits(uint32_t v) { return __popc(v); }
__device__ __forceinline__ int length_of(uint64_t v) { return 64 - __clzll(static_cast<int64_t>(v)); }
// Sums the squares of eight codes, times 4.
__device__ __forceinline__ uint32_t sum_of_squares(uint32_t codes) {
  const auto squares = [](uint32_t magnitudes) { return __byte_perm(0x09040100, 0x90402410, magnitudes); };
  const uint32_t m = codes & 0x77777777u;
  return __dp4a(squares(m), 0x01010101u, __dp4a(squares(m >> 16), 0x01010101u, 0u));
}
#else
inline int count_of_bits(uint32_t v) { return v ? static_cast<int>(v & 1) + count_of_bits(v >> 1) : 0; }
inline int length_of(uint64_t v) { return v ? 1 + length_of(v >> 1) : 0; }
inline uint32_t sum_of_squares(uint32_t codes) {
  constexpr uint32_t kSquares[] = {0, 1, 4, 9, 16, 36, 64, 144};
  return codes ? kSquares[codes & 7] + sum_of_squares(codes >> 4) : 0;
}
#endif

JNVFP4_HD bool has_exact_sums(uint32_t kinds) {
  return count_of_bits(kinds >> kTokenSize) <= kMostSizes - 2 * kLeastSize;
}
// Given the codes of four blocks, each eight in a word, and their scales.
JNVFP4_HD int size_of_window(const uint32_t (&codes)[8], uint32_t scales) {
  uint32_t squares[4], exponents[4], least = 15;
  JNVFP4_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t scale = scales >> (8 * i) & 0x7f, significand = scale < 8 ? scale : 8 | scale % 8;
    squares[i] = (sum_of_squares(codes[2 * i]) + sum_of_squares(codes[2 * i + 1])) * significand * significand;
    exponents[i] = scale < 8 ? 1 : scale / 8;
    if (squares[i] && exponents[i] < least) least = exponents[i];
  }
  uint64_t sum = 0;
  JNVFP4_UNROLL
  for (int i = 0; i < 4; ++i)
    if (squares[i]) sum += uint64_t{squares[i]} << 2 * (exponents[i] - least);
  return (length_of(sum) + 1) / 2;
}

}  // namespace jnvfp4
