// Tables of the functions of ffi/numerics.h: index -> entry, for tables.cc (host) and tables.cu (device).
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "numerics.h"

namespace jnvfp4::tables {

// Entry `i` of a table of `size` uint32 called `name`.
#define JNVFP4_TABLE(Name, count, expression)                          \
  struct Name {                                                        \
    static constexpr const char* name = #Name;                         \
    static constexpr uint32_t size = count;                            \
    static JNVFP4_HD uint32_t entry(uint32_t i) { return expression; } \
  };

// E4M3 scales are never negative; entries of negative numbers are 0 here.
JNVFP4_HD uint32_t scale_of(float v) {
  const uint32_t b = bits_of(v);
  return b > kSign && (b & kMagnitude) <= kInf ? 0u : b == kSign ? 0u : e4m3_encode(v);
}

// Dense in float32: every pattern of the upper 20 bits, with lower bits 0 (ties among them), 1 and 0xfff.
constexpr uint32_t kDense = 3u << 20;
JNVFP4_HD float dense(uint32_t i) { return float_of(i / 3u << 12 | (i % 3u == 0 ? 0u : i % 3u == 1 ? 1u : 0xfffu)); }

// All exponents of non-negative float32 numbers, Inf and NaN, with the upper 8 bits of the mantissa.
constexpr uint32_t kMagnitudes = 1u << 16;
JNVFP4_HD float magnitude(uint32_t i) { return float_of(i << 15); }

// Every scale that is not NaN with a spread of 512 amaxes.
constexpr uint32_t kScalesTimesAmaxes = 127u * 512u;
JNVFP4_HD GlobalScale spread(uint32_t i, float e4m3_max) { return global_scale(magnitude(i / 127u * 127u), e4m3_max); }

JNVFP4_TABLE(bf16_decode, 65536, bits_of(jnvfp4::bf16_decode(static_cast<uint16_t>(i))))
JNVFP4_TABLE(f16_decode, 65536, bits_of(jnvfp4::f16_decode(static_cast<uint16_t>(i))))
JNVFP4_TABLE(bf16_encode, kDense, jnvfp4::bf16_encode(dense(i)))
JNVFP4_TABLE(f16_encode, kDense, jnvfp4::f16_encode(dense(i)))
JNVFP4_TABLE(e2m1_of_bf16, 65536, e2m1_encode(jnvfp4::bf16_decode(static_cast<uint16_t>(i))))
JNVFP4_TABLE(e2m1_of_f16, 65536, e2m1_encode(jnvfp4::f16_decode(static_cast<uint16_t>(i))))
JNVFP4_TABLE(e4m3_of_bf16, 65536, scale_of(jnvfp4::bf16_decode(static_cast<uint16_t>(i))))
JNVFP4_TABLE(e4m3_of_f16, 65536, scale_of(jnvfp4::f16_decode(static_cast<uint16_t>(i))))
JNVFP4_TABLE(e4m3_decode, 256, bits_of(jnvfp4::e4m3_decode(static_cast<uint8_t>(i))))
JNVFP4_TABLE(e2m1_decode, 16, bits_of(jnvfp4::e2m1_decode(i)))
JNVFP4_TABLE(e2m1_twice, 16, static_cast<uint32_t>(jnvfp4::e2m1_twice(i)))
JNVFP4_TABLE(products, 127 * 16,
             bits_of(mul_rn(jnvfp4::e4m3_decode(static_cast<uint8_t>(i / 16u)), jnvfp4::e2m1_decode(i % 16u))))
JNVFP4_TABLE(encode_scale_448, kMagnitudes, bits_of(encode_scale(magnitude(i), 448.0f)))
JNVFP4_TABLE(encode_scale_256, kMagnitudes, bits_of(encode_scale(magnitude(i), 256.0f)))
JNVFP4_TABLE(decode_of_global_scale, kMagnitudes, bits_of(global_scale(magnitude(i), 448.0f).decode))
JNVFP4_TABLE(mult_of_global_scale, kMagnitudes, bits_of(global_scale(magnitude(i), 448.0f).block_mult))
JNVFP4_TABLE(block_encode_scale, kScalesTimesAmaxes,
             bits_of(jnvfp4::block_encode_scale(static_cast<uint8_t>(i % 127u), spread(i, 448.0f))))
JNVFP4_TABLE(dequantize_factor_448, kScalesTimesAmaxes,
             bits_of(dequantize_factor(static_cast<uint8_t>(i % 127u), magnitude(i / 127u * 127u), 448.0f)))
JNVFP4_TABLE(dequantize_factor_256, kScalesTimesAmaxes,
             bits_of(dequantize_factor(static_cast<uint8_t>(i % 127u), magnitude(i / 127u * 127u), 256.0f)))

// Writes every table to <folder>/<name>.bin. Fill is `template <class Table> vector<uint32_t> operator()()`.
template <class Fill, class... Tables>
bool write_these(const std::string& folder, Fill fill) {
  bool good = true;
  auto write = [&](const char* name, const std::vector<uint32_t>& entries) {
    std::FILE* f = std::fopen((folder + "/" + name + ".bin").c_str(), "wb");
    good = f && std::fwrite(entries.data(), 4, entries.size(), f) == entries.size() && good;
    if (f) good = std::fclose(f) == 0 && good;
  };
  (write(Tables::name, fill.template operator()<Tables>()), ...);
  return good;
}

template <class Fill>
int write_all(int argc, char** argv, Fill fill) {
  if (argc != 2) return 2;
  return write_these<Fill, bf16_decode, f16_decode, bf16_encode, f16_encode, e2m1_of_bf16, e2m1_of_f16, e4m3_of_bf16,
                     e4m3_of_f16, e4m3_decode, e2m1_decode, e2m1_twice, products, encode_scale_448, encode_scale_256,
                     decode_of_global_scale, mult_of_global_scale, block_encode_scale, dequantize_factor_448,
                     dequantize_factor_256>(argv[1], fill)
             ? 0
             : 1;
}

}  // namespace jnvfp4::tables
