// Tables of the functions of ffi/core/numerics.h and ffi/core/numerics_fast.h: index -> entry, for tables.cc
// (host) and tables.cu (device).
#pragma once

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "core/numerics_fast.h"
#include "stochastic_values.h"  // test_numerics.py writes it: the golden values, as float32 bits

namespace jnvfp4::tables {

// Fills a table: on the host in tables.cc, on the device in tables.cu.
template <class Table>
std::vector<uint32_t> filled();
inline std::vector<std::pair<std::string, std::vector<uint32_t> (*)()>> every_table;

// Entry `i` of a table of `size` uint32 called Name. JNVFP4_TABLES: that of a rule, and Name_fast of its `fast` form.
#define JNVFP4_TABLE(Name, count, expression)                          \
  struct Name {                                                        \
    static constexpr uint32_t size = count;                            \
    static JNVFP4_HD uint32_t entry(uint32_t i) { return expression; } \
  };                                                                   \
  inline const bool Name##_is_listed = (every_table.emplace_back(#Name, filled<Name>), true);
#define JNVFP4_TABLES(Name, count, expression)                                     \
  JNVFP4_HD uint32_t entry_of_##Name(uint32_t i, bool fast) { return expression; } \
  JNVFP4_TABLE(Name, count, entry_of_##Name(i, false))                             \
  JNVFP4_TABLE(Name##_fast, count, entry_of_##Name(i, true))

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

// Pseudo-random bits.
JNVFP4_HD uint32_t hash(uint32_t v) {
  v = (v ^ v >> 16) * 0x7feb352du;
  v = (v ^ v >> 15) * 0x846ca68bu;
  return v ^ v >> 16;
}

// An array inside the function, which device code may index.
JNVFP4_HD uint32_t golden_value(uint32_t i) {
  constexpr uint32_t values[] = {JNVFP4_STOCHASTIC_VALUES};
  return values[i];
}

// Codes with their sign by the fast forms. NaN never reaches these: a NaN scale has only codes 0.
JNVFP4_HD uint32_t signed_code(uint32_t b, uint32_t magnitude) {
  return (b & kMagnitude) > kInf ? 0u : magnitude | (b & kSign) >> 28;
}
JNVFP4_HD uint32_t nearest(float v, bool fast) {
  return fast ? signed_code(bits_of(v), e2m1_magnitude(bits_of(v) & kMagnitude)) : e2m1_encode(v);
}
JNVFP4_HD uint32_t stochastic(uint32_t b, uint32_t r, bool fast) {
  if (fast) return signed_code(b, e2m1_magnitude_stochastic(b & kMagnitude, r));
  return e2m1_encode_stochastic(float_of(b), r);
}

// The codes of one bfloat16 number with eight consecutive random bytes.
JNVFP4_HD uint32_t eight_stochastic(uint32_t i, bool fast) {
  uint32_t packed = 0;
  for (uint32_t j = 0; j < 8; ++j) packed |= stochastic(i / 32u << 16, i % 32u * 8u + j, fast) << (4u * j);
  return packed;
}

// Word i % 4 of the random bits of case i / 4; case 0 is all zeros.
JNVFP4_HD uint32_t random_word(uint32_t i) {
  const uint32_t c = i / 4u, key[2] = {c * 0x9e3779b9u, c * 0x85ebca6bu};
  uint32_t word[4];
  random_bits(key, uint64_t{c % 2u ? c * 0xc2b2ae35u : 0u} << 32 | c, c / 2u % 2u, word);
  return word[i % 4u];
}

// Scales of a block whose amax is up to 20 binades below the tensor's.
JNVFP4_HD uint32_t amax_of_block(uint32_t i) {
  const uint32_t amax = bits_of(magnitude(i)), below = hash(i) % (20u << 23);
  return amax > kInf ? amax : amax - (below < amax ? below : amax);
}
JNVFP4_HD float base_of_candidates(uint32_t i, float e4m3_max) {
  return candidate_base(amax_of_block(i), global_scale(magnitude(i), e4m3_max).encode);
}
JNVFP4_HD uint32_t candidates(uint32_t i, float e4m3_max) {
  const Candidates c = candidate_scales(amax_of_block(i), global_scale(magnitude(i), e4m3_max).encode);
  return c.six | uint32_t{c.four} << 8;
}

// The plain scale of a block with any amax under another amax, often beyond the largest scale or infinite.
JNVFP4_HD uint32_t plain_scale(uint32_t i, bool fast, float headroom) {
  const uint32_t block_amax = bits_of(magnitude(hash(i) & 0xffffu));
  const GlobalScale g = global_scale(magnitude(i), 448.0f);
  return fast ? block_scale_of_lane(block_amax, g, headroom) : jnvfp4::block_scale(block_amax, g, headroom);
}

// Element i of blocks of 16: within few binades of 1, within many, any bits at all, and zeros of either sign.
JNVFP4_HD uint32_t block_element(uint32_t i) {
  const uint32_t h = hash(i), kind = i / 16u % 4u;
  if (kind == 0) return (h & 0x807fffffu) | (120u + h / 8388608u % 8u) << 23;
  if (kind == 1) return (h & 0x807fffffu) | (64u + h / 8388608u % 128u) << 23;
  return kind == 2 ? h : h & kSign;
}

JNVFP4_HD void rht16_by_sums(float* v) {
  for (int j = 0; j < kBlock; ++j) v[j] = bf16_round(v[j]);
  rht16_sums(v);
  for (int j = 0; j < kBlock; ++j) v[j] = bf16_round(v[j]);
}

template <void (*rotate)(float*)>
JNVFP4_HD uint32_t rotated(uint32_t i) {
  float v[kBlock];
  for (uint32_t j = 0; j < kBlock; ++j) v[j] = float_of(block_element(i / 16u * 16u + j));
  rotate(v);
  return bits_of(v[i % 16u]);
}

// The errors of a row of 16 near the values that random codes decode to, in one of four ways.
constexpr uint32_t kRows = 8192;
JNVFP4_HD float errors_by_fast_forms(const float* x, const float* q, float scale, GlobalScale g, bool scaled,
                                     bool squared) {
  const StrictValues values(scale, g);  // apply to all of these
  float sum = 0.0f;
  for (int j = 0; j < kBlock; ++j) {
    const float strict = strict_difference_by_values(q[j], x[j], values.one, values.one_and_half);
    sum = add_error(sum, scaled ? scaled_difference_fused(q[j], x[j], scale, g.encode) : strict, squared);
  }
  return sum;
}
JNVFP4_HD uint32_t row_errors(uint32_t i, bool fast) {
  const uint32_t row = i % kRows;
  const bool scaled = i / kRows % 2u, squared = i / kRows / 2u;
  const GlobalScale g = global_scale(float_of(0x3f800000u + (hash(row) & 0x3ffffffu)), 256.0f);
  const float scale = jnvfp4::e4m3_decode(static_cast<uint8_t>(8u + hash(row + kRows) % 119u));
  float x[kBlock], q[kBlock];
  for (uint32_t j = 0; j < kBlock; ++j) {
    const uint32_t h = hash(16u * row + j);
    q[j] = jnvfp4::e2m1_decode(h % 16u);
    const float near = mul_rn(q[j], float_of(0x3f000000u | (h >> 9)));
    x[j] = mul_rn(near, div_rn(mul_rn(scale, g.amax), 1536.0f));
  }
  if (fast) return bits_of(errors_by_fast_forms(x, q, scale, g, scaled, squared));
  return bits_of(scaled ? row_error_scaled(x, q, scale, g, squared) : row_error_strict(x, q, scale, g, squared));
}

// The error of a tile whose rows have errors within a few binades.
JNVFP4_HD float error_of_row(uint32_t i) { return float_of(0x3f800000u + (hash(i) & 0x1ffffffu)); }
JNVFP4_HD uint32_t tile_errors(uint32_t i) {
  float row[kBlock];
  for (uint32_t j = 0; j < kBlock; ++j) row[j] = error_of_row(16u * i + j);
  return bits_of(jnvfp4::tile_error(row));
}

// Pairs of amaxes, for the four pairs of e4m3_max.
JNVFP4_HD uint32_t alphas(uint32_t i, bool fast) {
  const float a = magnitude(i % kMagnitudes), b = magnitude(hash(i) & 0xffffu);
  const float a_max = i / kMagnitudes % 2u ? 256.0f : 448.0f, b_max = i / kMagnitudes / 2u ? 256.0f : 448.0f;
  const float divisor = 36.0f * a_max * b_max;
  return bits_of(fast ? alpha_w4a4_by_steps(a, b, divisor, div_rn(1.0f, divisor)) : alpha_w4a4(a, b, a_max, b_max));
}

// Factors of 12 bits, whose product is exact, and a third number of a similar size.
JNVFP4_HD float twelve_bits(uint32_t h) { return float_of((h & 0x807ff000u) | (112u + h % 32u) << 23); }
JNVFP4_HD uint32_t fused(uint32_t i) {
  const float c = float_of((hash(i + 2u * kMagnitudes) & 0x807fffffu) | (97u + hash(i) % 64u) << 23);
  return bits_of(mul_exact_add(twelve_bits(hash(i)), twelve_bits(hash(i + kMagnitudes)), c));
}

// Integers whose sums do not overflow.
JNVFP4_HD int32_t integer(uint32_t i) { return static_cast<int32_t>(hash(i)) / 4; }
JNVFP4_HD uint32_t larger_sum(uint32_t i) {
  return static_cast<uint32_t>(add_max(integer(i), integer(i + kMagnitudes), integer(i + 2u * kMagnitudes)));
}

// Accumulators are sums of exact products: multiples of 2^-20.
JNVFP4_HD float accumulator(uint32_t i) { return mul_rn(static_cast<float>(integer(i)), 0x1p-20f); }
JNVFP4_HD uint32_t block_added(uint32_t i) {
  const float a = jnvfp4::e4m3_decode(static_cast<uint8_t>(hash(i + 1u) % 127u));
  const float b = jnvfp4::e4m3_decode(static_cast<uint8_t>(hash(i + 2u) % 127u));
  const float dot16 = mul_rn(static_cast<float>(static_cast<int32_t>(hash(i + 3u) % 4609u) - 2304), 0.25f);
  return bits_of(jnvfp4::add_block(accumulator(i), a, b, dot16));
}

JNVFP4_TABLE(bf16_decode, 65536, bits_of(jnvfp4::bf16_decode(static_cast<uint16_t>(i))))
JNVFP4_TABLE(f16_decode, 65536, bits_of(jnvfp4::f16_decode(static_cast<uint16_t>(i))))
JNVFP4_TABLE(bf16_encode, kDense, jnvfp4::bf16_encode(dense(i)))
JNVFP4_TABLE(f16_encode, kDense, jnvfp4::f16_encode(dense(i)))
JNVFP4_TABLES(e2m1_of_bf16, 65536, nearest(jnvfp4::bf16_decode(static_cast<uint16_t>(i)), fast))
JNVFP4_TABLES(e2m1_of_f16, 65536, nearest(jnvfp4::f16_decode(static_cast<uint16_t>(i)), fast))
JNVFP4_TABLE(e4m3_of_bf16, 65536, scale_of(jnvfp4::bf16_decode(static_cast<uint16_t>(i))))
JNVFP4_TABLE(e4m3_of_f16, 65536, scale_of(jnvfp4::f16_decode(static_cast<uint16_t>(i))))
JNVFP4_TABLE(e4m3_decode, 256, bits_of(jnvfp4::e4m3_decode(static_cast<uint8_t>(i))))
JNVFP4_TABLES(e2m1_decode, 16, bits_of(fast ? e2m1_decode_subnormal(i) : jnvfp4::e2m1_decode(i)))
JNVFP4_TABLE(e2m1_twice, 16, static_cast<uint32_t>(jnvfp4::e2m1_twice(i)))
JNVFP4_TABLE(products, 127 * 16,
             bits_of(mul_rn(jnvfp4::e4m3_decode(static_cast<uint8_t>(i / 16u)), jnvfp4::e2m1_decode(i % 16u))))
JNVFP4_TABLE(encode_scale_448, kMagnitudes, bits_of(encode_scale(magnitude(i), 448.0f)))
JNVFP4_TABLE(encode_scale_256, kMagnitudes, bits_of(encode_scale(magnitude(i), 256.0f)))
JNVFP4_TABLE(decode_of_global_scale, kMagnitudes, bits_of(global_scale(magnitude(i), 448.0f).decode))
JNVFP4_TABLE(mult_of_global_scale, kMagnitudes, bits_of(global_scale(magnitude(i), 448.0f).block_mult))
JNVFP4_TABLES(block_scale, kMagnitudes, plain_scale(i, fast, 1.0f))
JNVFP4_TABLES(block_scale_headroom, kMagnitudes, plain_scale(i, fast, kHeadroom))
JNVFP4_TABLE(block_encode_scale, kScalesTimesAmaxes,
             bits_of(jnvfp4::block_encode_scale(static_cast<uint8_t>(i % 127u), spread(i, 448.0f))))
JNVFP4_TABLE(dequantize_factor_448, kScalesTimesAmaxes,
             bits_of(dequantize_factor(static_cast<uint8_t>(i % 127u), magnitude(i / 127u * 127u), 448.0f)))
JNVFP4_TABLE(dequantize_factor_256, kScalesTimesAmaxes,
             bits_of(dequantize_factor(static_cast<uint8_t>(i % 127u), magnitude(i / 127u * 127u), 256.0f)))
JNVFP4_TABLES(stochastic_of_golden, JNVFP4_STOCHASTIC_COUNT * 256u, stochastic(golden_value(i / 256u), i % 256u, fast))
JNVFP4_TABLES(stochastic_of_bf16, 65536 * 32, eight_stochastic(i, fast))
JNVFP4_TABLE(random_words, 4096 * 4, random_word(i))
JNVFP4_TABLE(divided_by_6, kDense, bits_of(div_constant(dense(i), 6.0f, 1.0f / 6.0f)))
JNVFP4_TABLE(divided_by_1536, kDense, bits_of(div_constant(dense(i), 1536.0f, reciprocal_max6(256.0f))))
JNVFP4_TABLE(divided_by_2688, kDense, bits_of(div_constant(dense(i), 2688.0f, reciprocal_max6(448.0f))))
JNVFP4_TABLE(candidates_448, kMagnitudes, candidates(i, 448.0f))
JNVFP4_TABLE(candidates_256, kMagnitudes, candidates(i, 256.0f))
JNVFP4_TABLE(candidate_base_448, kMagnitudes, bits_of(base_of_candidates(i, 448.0f)))
JNVFP4_TABLE(candidate_base_256, kMagnitudes, bits_of(base_of_candidates(i, 256.0f)))
JNVFP4_TABLES(row_error, 4u * kRows, row_errors(i, fast))
JNVFP4_TABLE(tile_error, 4096, tile_errors(i))
JNVFP4_TABLE(search_candidate, 127 * kSearched,
             jnvfp4::search_candidate(static_cast<uint8_t>(i / kSearched),
                                      search_offset(static_cast<int>(i % kSearched))))
JNVFP4_TABLE(improves, kMagnitudes, jnvfp4::improves(magnitude(i), magnitude(hash(i) & 0xffffu)))
JNVFP4_TABLE(block_elements, 4096 * 16, block_element(i))
JNVFP4_TABLES(rht16, 4096 * 16, fast ? rotated<rht16_by_sums>(i) : rotated<jnvfp4::rht16>(i))
JNVFP4_TABLE(rht16_inverse, 4096 * 16, rotated<jnvfp4::rht16_inverse>(i))
JNVFP4_TABLES(alpha_w4a4, 4 * kMagnitudes, alphas(i, fast))
JNVFP4_TABLE(fused_multiply_add, kMagnitudes, fused(i))
JNVFP4_TABLE(add_max, kMagnitudes, larger_sum(i))
JNVFP4_TABLE(add_block, kMagnitudes, block_added(i))
JNVFP4_TABLE(add_element, kMagnitudes,
             bits_of(jnvfp4::add_element(magnitude(i), float_of(hash(i)), float_of(hash(~i)))))
JNVFP4_TABLE(add_window, kMagnitudes, bits_of(jnvfp4::add_window(magnitude(i), float_of(hash(i)), float_of(hash(~i)))))

// Writes every table to <folder>/<name>.bin.
inline int write_all(int argc, char** argv) {
  bool good = argc == 2;
  for (const auto& [name, fill] : every_table) {
    std::FILE* f = good ? std::fopen((std::string(argv[1]) + "/" + name + ".bin").c_str(), "wb") : nullptr;
    const std::vector<uint32_t> entries = fill();
    good = f && std::fwrite(entries.data(), 4, entries.size(), f) == entries.size();
    good = f && std::fclose(f) == 0 && good;
  }
  return good ? 0 : 1;
}

}  // namespace jnvfp4::tables
