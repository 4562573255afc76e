// The encoders of ffi/core/numerics.h against rules written independently, and those of ffi/core/numerics_fast.h
// against the encoders, over float32 bit patterns; that a block scale with headroom maps nothing above 6; the error of
// 4over6 candidates by decoded values against the division for each element; and the device's division by a constant
// against division.
//   exhaustive quick [NAME]   every pattern of the upper 24 bits, with lower bits 0x00, 0x01 and 0xff
//   exhaustive full [NAME]    every pattern
// NAME runs that check alone. Prints the first wrong pattern of each check and exits with 1 if there is one.
#include <algorithm>
#include <array>
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
inline uint32_t e2m1_by_table(float v) {
  const float m = std::fabs(v);
  const uint32_t code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
  return std::isnan(v) ? 0 : code + 8 * (jnvfp4::bits_of(v) >> 31);
}

// In double: the grid step of v's binade (2^-9 below 2^-6), and the integer nearest to v / step.
inline uint32_t e4m3_by_grid(float v) {
  const double clamped = v < 448.0f ? v : 448.0f;
  uint64_t bits;
  std::memcpy(&bits, &clamped, sizeof bits);
  const int exponent = std::max(static_cast<int>(bits >> 52) - 1023, -6);
  const uint64_t step_bits = static_cast<uint64_t>(exponent - 3 + 1023) << 52;
  double step;
  std::memcpy(&step, &step_bits, sizeof step);
  const double steps = std::nearbyint(clamped / step);  // exact but for nearbyint, ties to even
  const uint32_t code = static_cast<uint32_t>(8 * (exponent + 6) + static_cast<int>(steps));
  return std::isnan(v) ? 0x7f : code;
}

// One random byte for each pattern: all 256 meet every binade many times over.
inline uint32_t random_byte(float v) { return hash(jnvfp4::bits_of(v) & jnvfp4::kMagnitude) & 0xff; }
inline uint32_t stochastic(float v) { return jnvfp4::e2m1_encode_stochastic(v, random_byte(v)); }

// In double: adds r / 256 of a grid step, rounds that sum to float32, and truncates it to the grid.
inline uint32_t stochastic_by_grid(float v) {
  const double a = std::fabs(v), step = a >= 4 ? 2 : a >= 2 ? 1 : 0.5;
  const float t = static_cast<float>(a + static_cast<int>(random_byte(v)) * (step / 256));
  const uint32_t code = (t >= 0.5f) + (t >= 1) + (t >= 1.5f) + (t >= 2) + (t >= 3) + (t >= 4) + (t >= 6);
  return std::isnan(v) ? 0 : code + 8 * (jnvfp4::bits_of(v) >> 31);
}

// The fast forms, and the rules they equal with what their comments except.
inline uint32_t magnitude_fast(float v) { return jnvfp4::e2m1_magnitude(jnvfp4::bits_of(v)); }
inline uint32_t magnitude_less_magic(float v) {
  return static_cast<uint32_t>(jnvfp4::e2m1_magnitude_plus_magic(jnvfp4::bits_of(v)) - jnvfp4::kMagicBits);
}
inline uint32_t magnitude_by_rule(float v) { return std::isnan(v) ? 7 : jnvfp4::e2m1_encode(v); }
inline uint32_t magnitude_stochastic_fast(float v) {
  return jnvfp4::e2m1_magnitude_stochastic(jnvfp4::bits_of(v), random_byte(v));
}
inline uint32_t magnitude_stochastic_by_rule(float v) { return std::isnan(v) ? 7 : stochastic(v); }

inline uint32_t value_of(uint32_t code, float v) {  // 6 for NaN
  return jnvfp4::bits_of(std::isnan(v) ? std::copysign(6.0f, v) : jnvfp4::e2m1_decode(code));
}
inline uint32_t round_fast(float v) { return jnvfp4::bits_of(jnvfp4::e2m1_round(v)); }
inline uint32_t round_by_rule(float v) { return value_of(jnvfp4::e2m1_encode(v), v); }

// Below 7 times 1 / kDown.
template <int kDown>
inline uint32_t round_below_7_fast(float v) {
  return jnvfp4::bits_of(jnvfp4::e2m1_round_below_7(v, 1.0f / kDown));
}
template <int kDown>
inline uint32_t round_below_7_by_rule(float v) {
  return jnvfp4::bits_of(jnvfp4::e2m1_decode(jnvfp4::e2m1_encode(v * kDown)) / kDown);
}

// Of the block scale with headroom: whether it is at least what maps the largest magnitude to 6, and at most 17/15 of
// that (and of a float32 rounding), where it is a normal number. The exact scale is the pattern itself.
inline uint32_t scale_with_headroom_fits(float exact) {
  jnvfp4::GlobalScale g{};
  g.block_mult = 1.0f;
  const float s = jnvfp4::e4m3_decode(jnvfp4::block_scale(jnvfp4::bits_of(exact), g, jnvfp4::kHeadroom));
  return s < 0x1p-6f || (s >= exact && s <= 1.133334 * exact);
}

struct Wrong {
  uint64_t count;
  uint32_t first;
};

// Both rules are template parameters: inlined, as they ask for, and in the loop over all lower bytes vectorized.
template <uint32_t (*kGot)(float), uint32_t (*kWant)(float)>
Wrong count_wrong(uint64_t begin, uint64_t end, const std::vector<uint32_t>& low_bits) {
  const auto differs = [](uint32_t b) -> uint32_t { return kGot(jnvfp4::float_of(b)) != kWant(jnvfp4::float_of(b)); };
  Wrong found{0, UINT32_MAX};
  for (uint64_t high = begin; high < end; ++high) {
    const uint32_t b = static_cast<uint32_t>(high << 8);
    uint32_t count = 0;
    if (low_bits.size() == 256) {
      for (uint32_t low = 0; low < 256; ++low) count += differs(b | low);
    } else {
      for (const uint32_t low : low_bits) count += differs(b | low);
    }
    found.count += count;
    for (uint32_t low = 0; count != 0 && low < 256; ++low)
      if (differs(b | low)) found.first = std::min(found.first, b | low);
  }
  return found;
}

struct Encoder {
  const char* name;
  uint64_t patterns;  // from 0 on
  Wrong (*count)(uint64_t, uint64_t, const std::vector<uint32_t>&);
  uint32_t (*got)(float);
  uint32_t (*want)(float);
};

template <uint32_t (*kGot)(float), uint32_t (*kWant)(float)>
constexpr Encoder encoder(const char* name, uint64_t patterns) {
  return {name, patterns, count_wrong<kGot, kWant>, kGot, kWant};
}

inline uint32_t e2m1(float v) { return jnvfp4::e2m1_encode(v); }
inline uint32_t e4m3(float v) { return jnvfp4::e4m3_encode(v); }
inline uint32_t one(float) { return 1; }

constexpr Encoder kEncoders[] = {
    encoder<e2m1, e2m1_by_table>("e2m1_encode", uint64_t{1} << 32),
    encoder<stochastic, stochastic_by_grid>("e2m1_encode_stochastic", uint64_t{1} << 32),
    encoder<e4m3, e4m3_by_grid>("e4m3_encode", uint64_t{1} << 31),
    encoder<magnitude_fast, magnitude_by_rule>("e2m1_magnitude", uint64_t{1} << 31),
    encoder<magnitude_less_magic, magnitude_by_rule>("e2m1_magnitude_plus_magic", uint64_t{1} << 31),
    encoder<round_below_7_fast<1>, round_below_7_by_rule<1>>("e2m1_round_below_7", 0x40e00000),
    encoder<round_below_7_fast<64>, round_below_7_by_rule<64>>("e2m1_round_below_7", 0x3de00000),
    encoder<round_fast, round_by_rule>("e2m1_round", uint64_t{1} << 32),
    encoder<magnitude_stochastic_fast, magnitude_stochastic_by_rule>("e2m1_magnitude_stochastic", uint64_t{1} << 31),
    encoder<scale_with_headroom_fits, one>("block_scale", 0x43e00000),  // below 448
};

bool holds(const Encoder& e, const std::vector<uint32_t>& low_bits) {
  const uint64_t highs = e.patterns >> 8;
  std::atomic<uint32_t> first{UINT32_MAX};
  std::atomic<uint64_t> wrong{0};
  in_pieces(highs, [&](uint64_t begin, uint64_t end) {
    const Wrong own = e.count(begin, end, low_bits);
    wrong += own.count;
    for (uint32_t seen = first; own.first < seen && !first.compare_exchange_weak(seen, own.first);) {
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
// upper 16 bits, with hashed lower ones, `each` of them, and with zeros. The elements are the decoded values
// themselves, so every difference is 0, or NaN from infinite values. Where the values are linear, each is q times the
// first.
bool error_by_values_holds(uint32_t each) {
  const uint64_t amaxes = uint64_t{0x7f81} * (each + 1);
  std::atomic<uint64_t> wrong{0}, linear{0};
  float q[jnvfp4::kBlock];
  for (uint32_t i = 0; i < jnvfp4::kBlock; ++i) q[i] = jnvfp4::e2m1_decode(i);
  in_pieces(amaxes, [&](uint64_t begin, uint64_t end) {
    uint64_t own = 0, own_linear = 0;
    for (uint64_t i = begin; i < end; ++i)
      for (const float e4m3_max : {448.0f, 256.0f}) {
        const uint32_t low = i % (each + 1) < each ? hash(static_cast<uint32_t>(i)) & 0xffff : 0;
        const uint32_t amax = static_cast<uint32_t>(i / (each + 1)) << 16 | low;
        const jnvfp4::GlobalScale g = jnvfp4::global_scale(jnvfp4::float_of(amax), e4m3_max);
        for (uint32_t scale = 0; scale < 127; ++scale) {
          const float s = jnvfp4::e4m3_decode(static_cast<uint8_t>(scale));
          const jnvfp4::StrictValues values(s, g);
          if (!values.apply) continue;
          own_linear += values.linear();
          float x[jnvfp4::kBlock];
          for (uint32_t c = 0; c < jnvfp4::kBlock; ++c) {
            x[c] = q[c] * s * g.amax / (6 * e4m3_max);
            own += values.linear() && static_cast<double>(x[c]) != static_cast<double>(q[c]) * values.one;
          }
          const float got = jnvfp4::row_error_by_values(x, q, values, false);
          const float want = jnvfp4::row_error_strict(x, q, s, g, false);
          own += std::isnan(want) ? !std::isnan(got) : got != want;
        }
      }
    wrong += own, linear += own_linear;
  });
  std::printf("row_error_by_values: %llu of %llu patterns wrong, %llu are linear\n",
              static_cast<unsigned long long>(wrong), static_cast<unsigned long long>(amaxes * 2 * 127),
              static_cast<unsigned long long>(linear));
  return wrong == 0 && linear > 0;
}

// A function of floats by its faults, for every mantissa, of which the last `zeros` bits are 0: in the binade of 1 and,
// with `ends`, in two others.
template <class Faults>
bool mantissas_hold(const char* name, int zeros, const std::array<uint32_t, 3>& exponents, bool ends, Faults faults) {
  std::atomic<uint64_t> wrong{0};
  in_pieces(uint64_t{1} << (23 - zeros), [&](uint64_t begin, uint64_t end) {
    uint64_t own = 0;
    for (uint64_t mantissa = begin; mantissa < end; ++mantissa)
      for (const uint32_t exponent : exponents) {
        if (exponent != 127u && !ends) break;
        own += faults(jnvfp4::float_of(exponent << 23 | static_cast<uint32_t>(mantissa) << zeros), exponent);
      }
    wrong += own;
  });
  std::printf("%s: %llu patterns wrong\n", name, static_cast<unsigned long long>(wrong));
  return wrong == 0;
}

float fused(float a, float b, float c) { return std::fmaf(a, b, c); }

// For every constant; with `ends`, where div_constant takes it for the first and the last time.
bool division_holds(bool ends) {
  return mantissas_hold("div_by_steps", 0, {127, 67, 187}, ends, [](float a, uint32_t) {
    uint64_t own = 0;
    for (const float d : {6.0f, 1536.0f, 2688.0f, 2359296.0f, 4128768.0f, 7225344.0f})
      own += jnvfp4::div_by_steps(a, d, 1.0f / d, fused) != a / d;
    return own;
  });
}

constexpr float kAlphaDivisors[] = {2359296.0f, 4128768.0f, 7225344.0f};

// A reciprocal as the sum of two floats.
struct Pieces {
  float large, small;
  explicit Pieces(float d) {
    const double reciprocal = 1.0 / static_cast<double>(d);
    large = static_cast<float>(reciprocal), small = static_cast<float>(reciprocal - static_cast<double>(large));
  }
};

bool pieces_hold(bool ends) {
  return mantissas_hold("div_by_pieces", 0, {127, 51, 225}, ends, [](float a, uint32_t) {
    uint64_t own = 0;
    for (const float d : kAlphaDivisors) {
      const Pieces pieces(d);
      own += jnvfp4::div_by_pieces(a, pieces.large, pieces.small, fused) != a / d;
    }
    return own;
  });
}

// For all pairs of factors of 12 bits in one binade.
bool alphas_hold(bool ends) {
  return mantissas_hold("AlphasOfRow", 12, {127, 89, 175}, ends, [](float a, uint32_t exponent) {
    uint64_t own = 0;
    for (const float d : kAlphaDivisors) {
      const Pieces pieces(d);
      const jnvfp4::AlphasOfRow alphas(a, pieces.large, pieces.small, fused);
      for (uint32_t other = 0; other < 1u << 11; ++other) {
        const float b = jnvfp4::float_of(exponent << 23 | other << 12);
        own += alphas(b, fused) != a * b / d;
      }
    }
    return own;
  });
}

// div_by_float64 for every positive float or, without `all`, for one of 61 upper 24 bits.
bool float64_holds(bool all) {
  std::atomic<uint64_t> wrong{0};
  in_pieces(uint64_t{0x7f8000}, [&](uint64_t begin, uint64_t end) {
    uint64_t own = 0;
    for (uint64_t high = begin; high < end; high += all ? 1 : 61)
      for (const float d : kAlphaDivisors) {
        uint32_t count = 0;
        for (uint32_t low = 0; low < 256; ++low) {
          const float a = jnvfp4::float_of(static_cast<uint32_t>(high << 8) | low);
          count += jnvfp4::div_by_float64(a, 1.0 / static_cast<double>(d)) != a / d;
        }
        own += count;
      }
    wrong += own;
  });
  for (const float d : kAlphaDivisors) wrong += !std::isinf(jnvfp4::div_by_float64(INFINITY, 1.0 / d));
  std::printf("div_by_float64: %llu patterns wrong\n", static_cast<unsigned long long>(wrong));
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
  if (asked("div_by_pieces")) good = pieces_hold(which == "full") && good;
  if (asked("AlphasOfRow")) good = alphas_hold(which == "full") && good;
  if (asked("div_by_float64")) good = float64_holds(which == "full") && good;
  return good ? 0 : 1;
}
