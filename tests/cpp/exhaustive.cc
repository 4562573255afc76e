// The encoders of ffi/core/numerics.h against rules written independently, and those of ffi/core/numerics_fast.h
// against the encoders, over float32 bit patterns; that a block scale with headroom maps nothing above 6; the error of
// 4over6 candidates by decoded values against the division for each element; and the device's division by a constant
// against division.
//   exhaustive quick [NAME]   every pattern of the upper 24 bits, with lower bits 0x00, 0x01 and 0xff
//   exhaustive full [NAME]    every pattern
// NAME runs that check alone. Prints the first wrong pattern of each check and exits with 1 if there is one.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/numerics_fast.h"
#include "patterns.h"

namespace {

// The tie table: a tie goes to the code whose last bit is 0; values above 5 saturate.
uint32_t e2m1_by_table(float v) {
  if (std::isnan(v)) return 0;
  const float m = std::fabs(v);
  const uint32_t code = m <= 0.25f   ? 0
                        : m < 0.75f  ? 1
                        : m <= 1.25f ? 2
                        : m < 1.75f  ? 3
                        : m <= 2.5f  ? 4
                        : m < 3.5f   ? 5
                        : m <= 5.0f  ? 6
                                     : 7;
  return std::signbit(v) ? code + 8 : code;
}

// In double: the grid step of v's binade (2^-9 below 2^-6), and the integer nearest to v / step.
uint32_t e4m3_by_grid(float v) {
  if (std::isnan(v)) return 0x7f;
  const double clamped = std::min<double>(v, 448.0);
  const int exponent = clamped < 0x1p-6 ? -6 : std::ilogb(clamped);
  const double steps = std::nearbyint(std::ldexp(clamped, 3 - exponent));  // exact but for nearbyint, ties to even
  return static_cast<uint32_t>(8 * (exponent + 6) + static_cast<int>(steps));
}

// One random byte for each pattern: all 256 meet every binade many times over.
uint32_t random_byte(float v) { return hash(jnvfp4::bits_of(v) & jnvfp4::kMagnitude) & 0xff; }
uint32_t stochastic(float v) { return jnvfp4::e2m1_encode_stochastic(v, random_byte(v)); }

// In double: adds r / 256 of a grid step, rounds that sum to float32, and truncates it to the grid.
double grid_step(double v) { return v >= 4 ? 2 : v >= 2 ? 1 : 0.5; }
uint32_t stochastic_by_grid(float v) {
  if (std::isnan(v)) return 0;
  const double a = std::fabs(v);
  const float t = static_cast<float>(a + random_byte(v) * (grid_step(a) / 256));
  const double truncated = std::min(std::floor(t / grid_step(t)) * grid_step(t), 6.0);
  return e2m1_by_table(std::copysign(static_cast<float>(truncated), v));
}

// The fast forms, and the rules they equal with what their comments except.
uint32_t magnitude_fast(float v) { return jnvfp4::e2m1_magnitude(jnvfp4::bits_of(v)); }
uint32_t magnitude_less_magic(float v) {
  return static_cast<uint32_t>(jnvfp4::e2m1_magnitude_plus_magic(jnvfp4::bits_of(v)) - jnvfp4::kMagicBits);
}
uint32_t magnitude_by_rule(float v) { return std::isnan(v) ? 7 : jnvfp4::e2m1_encode(v); }
uint32_t magnitude_stochastic_fast(float v) {
  return jnvfp4::e2m1_magnitude_stochastic(jnvfp4::bits_of(v), random_byte(v));
}
uint32_t magnitude_stochastic_by_rule(float v) { return std::isnan(v) ? 7 : stochastic(v); }

uint32_t value_of(uint32_t code, float v) {  // 6 for NaN
  return jnvfp4::bits_of(std::isnan(v) ? std::copysign(6.0f, v) : jnvfp4::e2m1_decode(code));
}
uint32_t round_fast(float v) { return jnvfp4::bits_of(jnvfp4::e2m1_round(v)); }
uint32_t round_by_rule(float v) { return value_of(jnvfp4::e2m1_encode(v), v); }

// Below 7 times 1 / kDown.
template <int kDown>
uint32_t round_below_7_fast(float v) {
  return jnvfp4::bits_of(jnvfp4::e2m1_round_below_7(v, 1.0f / kDown));
}
template <int kDown>
uint32_t round_below_7_by_rule(float v) {
  return jnvfp4::bits_of(jnvfp4::e2m1_decode(jnvfp4::e2m1_encode(v * kDown)) / kDown);
}

// Of the block scale with headroom: whether it is at least what maps the largest magnitude to 6, and at most 17/15 of
// that (and of a float32 rounding), where it is a normal number. The exact scale is the pattern itself.
uint32_t scale_with_headroom_fits(float exact) {
  jnvfp4::GlobalScale g{};
  g.block_mult = 1.0f;
  const float s = jnvfp4::e4m3_decode(jnvfp4::block_scale(jnvfp4::bits_of(exact), g, jnvfp4::kHeadroom));
  return s < 0x1p-6f || (s >= exact && s <= 1.133334 * exact);
}

struct Encoder {
  const char* name;
  uint64_t patterns;  // from 0 on
  uint32_t (*got)(float);
  uint32_t (*want)(float);
};

constexpr Encoder kEncoders[] = {
    {"e2m1_encode", uint64_t{1} << 32, [](float v) -> uint32_t { return jnvfp4::e2m1_encode(v); }, e2m1_by_table},
    {"e2m1_encode_stochastic", uint64_t{1} << 32, stochastic, stochastic_by_grid},
    {"e4m3_encode", uint64_t{1} << 31, [](float v) -> uint32_t { return jnvfp4::e4m3_encode(v); }, e4m3_by_grid},
    {"e2m1_magnitude", uint64_t{1} << 31, magnitude_fast, magnitude_by_rule},
    {"e2m1_magnitude_plus_magic", uint64_t{1} << 31, magnitude_less_magic, magnitude_by_rule},
    {"e2m1_round_below_7", 0x40e00000, round_below_7_fast<1>, round_below_7_by_rule<1>},
    {"e2m1_round_below_7", 0x3de00000, round_below_7_fast<64>, round_below_7_by_rule<64>},
    {"e2m1_round", uint64_t{1} << 32, round_fast, round_by_rule},
    {"e2m1_magnitude_stochastic", uint64_t{1} << 31, magnitude_stochastic_fast, magnitude_stochastic_by_rule},
    {"block_scale", 0x43e00000, scale_with_headroom_fits, [](float) -> uint32_t { return 1; }},  // below 448
};

uint32_t first_wrong(const Encoder& e, uint64_t begin, uint64_t end, const std::vector<uint32_t>& low_bits,
                     std::atomic<uint64_t>& wrong) {
  uint32_t first = UINT32_MAX;
  for (uint64_t high = begin; high < end; ++high)
    for (const uint32_t low : low_bits) {
      const uint32_t b = static_cast<uint32_t>(high << 8) | low;
      const float v = jnvfp4::float_of(b);
      if (e.got(v) == e.want(v)) continue;
      first = std::min(first, b);
      ++wrong;
    }
  return first;
}

bool holds(const Encoder& e, const std::vector<uint32_t>& low_bits) {
  const uint64_t highs = e.patterns >> 8;
  std::atomic<uint32_t> first{UINT32_MAX};
  std::atomic<uint64_t> wrong{0};
  in_pieces(highs, [&](uint64_t begin, uint64_t end) {
    const uint32_t own = first_wrong(e, begin, end, low_bits, wrong);
    for (uint32_t seen = first; own < seen && !first.compare_exchange_weak(seen, own);) {
    }
  });
  const uint64_t tried = highs * low_bits.size();
  if (wrong == 0) {
    std::printf("%s: %llu patterns\n", e.name, static_cast<unsigned long long>(tried));
    return true;
  }
  const float v = jnvfp4::float_of(first);
  std::printf("%s: %llu of %llu patterns wrong, first 0x%08x (%.9g): got %u, expected %u\n", e.name,
              static_cast<unsigned long long>(wrong), static_cast<unsigned long long>(tried), first.load(), v, e.got(v),
              e.want(v));
  return false;
}

// row_error_by_values against row_error_strict, wherever the values apply: every scale and code, and amaxes of every
// upper 16 bits with hashed lower ones, `each` of them. The elements are the decoded values themselves, so every
// difference is 0, or NaN from infinite values.
bool error_by_values_holds(uint32_t each) {
  std::atomic<uint64_t> wrong{0};
  float q[jnvfp4::kBlock];
  for (uint32_t i = 0; i < jnvfp4::kBlock; ++i) q[i] = jnvfp4::e2m1_decode(i);
  in_pieces(uint64_t{0x7f81} * each, [&](uint64_t begin, uint64_t end) {
    uint64_t own = 0;
    for (uint64_t i = begin; i < end; ++i)
      for (const float e4m3_max : {448.0f, 256.0f}) {
        const uint32_t amax = static_cast<uint32_t>(i / each) << 16 | (hash(static_cast<uint32_t>(i)) & 0xffff);
        const jnvfp4::GlobalScale g = jnvfp4::global_scale(jnvfp4::float_of(amax), e4m3_max);
        for (uint32_t scale = 0; scale < 127; ++scale) {
          const float s = jnvfp4::e4m3_decode(static_cast<uint8_t>(scale));
          const jnvfp4::StrictValues values(s, g);
          if (!values.apply) continue;
          float x[jnvfp4::kBlock];
          for (uint32_t c = 0; c < jnvfp4::kBlock; ++c) x[c] = q[c] * s * g.amax / (6 * e4m3_max);
          const float got = jnvfp4::row_error_by_values(x, q, values, false);
          const float want = jnvfp4::row_error_strict(x, q, s, g, false);
          own += std::isnan(want) ? !std::isnan(got) : got != want;
        }
      }
    wrong += own;
  });
  std::printf("row_error_by_values: %llu of %llu patterns wrong\n", static_cast<unsigned long long>(wrong),
              static_cast<unsigned long long>(uint64_t{0x7f81} * each * 2 * 127));
  return wrong == 0;
}

// div_by_steps for every mantissa and constant, in the binade of 1 and, with `ends`, in the first and the last one
// where div_constant takes it.
bool division_holds(bool ends) {
  std::atomic<uint64_t> wrong{0};
  const auto fma = [](float a, float b, float c) { return std::fmaf(a, b, c); };
  in_pieces(uint64_t{1} << 23, [&](uint64_t begin, uint64_t end) {
    uint64_t own = 0;
    for (uint64_t mantissa = begin; mantissa < end; ++mantissa)
      for (const uint32_t exponent : {127u, 67u, 187u}) {
        if (exponent != 127u && !ends) break;
        const float a = jnvfp4::float_of(exponent << 23 | static_cast<uint32_t>(mantissa));
        for (const float d : {6.0f, 1536.0f, 2688.0f, 2359296.0f, 4128768.0f, 7225344.0f})
          own += jnvfp4::div_by_steps(a, d, 1.0f / d, fma) != a / d;
      }
    wrong += own;
  });
  std::printf("div_by_steps: %llu patterns wrong\n", static_cast<unsigned long long>(wrong));
  return wrong == 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "", only = argc > 2 ? argv[2] : "";
  if ((which != "quick" && which != "full") || argc > 3) {
    std::fprintf(stderr, "usage: exhaustive quick|full [NAME]\n");
    return 2;
  }
  const std::vector<uint32_t> low_bits = low_bits_of(which);
  bool good = true;
  const auto asked = [&](const char* name) { return only.empty() || only == name; };
  for (const Encoder& e : kEncoders)
    if (asked(e.name)) good = holds(e, low_bits) && good;
  if (asked("row_error_by_values")) good = error_by_values_holds(which == "full" ? 64 : 1) && good;
  if (asked("div_by_steps")) good = division_holds(which == "full") && good;
  return good ? 0 : 1;
}
