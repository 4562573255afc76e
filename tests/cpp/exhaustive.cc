// The encoders of ffi/numerics.h against rules written independently, over float32 bit patterns.
//   exhaustive quick   every pattern of the upper 24 bits, with lower bits 0x00, 0x01 and 0xff
//   exhaustive full    every pattern
// Prints the first wrong pattern of each encoder and exits with 1 if there is one.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "numerics.h"

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

struct Encoder {
  const char* name;
  uint64_t patterns;  // from 0 on
  uint32_t (*got)(float);
  uint32_t (*want)(float);
};

constexpr Encoder kEncoders[] = {
    {"e2m1_encode", uint64_t{1} << 32, [](float v) -> uint32_t { return jnvfp4::e2m1_encode(v); }, e2m1_by_table},
    {"e4m3_encode", uint64_t{1} << 31, [](float v) -> uint32_t { return jnvfp4::e4m3_encode(v); }, e4m3_by_grid},
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
  const uint64_t highs = e.patterns >> 8, pieces = std::max(1u, std::thread::hardware_concurrency());
  std::vector<uint32_t> first(pieces);
  std::atomic<uint64_t> wrong{0};
  std::vector<std::thread> threads;
  for (uint64_t p = 0; p < pieces; ++p)
    threads.emplace_back(
        [&, p] { first[p] = first_wrong(e, highs * p / pieces, highs * (p + 1) / pieces, low_bits, wrong); });
  for (auto& t : threads) t.join();
  const uint64_t tried = highs * low_bits.size();
  if (wrong == 0) {
    std::printf("%s: %llu patterns\n", e.name, static_cast<unsigned long long>(tried));
    return true;
  }
  const uint32_t b = *std::min_element(first.begin(), first.end());
  const float v = jnvfp4::float_of(b);
  std::printf("%s: %llu of %llu patterns wrong, first 0x%08x (%.9g): got %u, expected %u\n", e.name,
              static_cast<unsigned long long>(wrong), static_cast<unsigned long long>(tried), b, v, e.got(v),
              e.want(v));
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc == 2 ? argv[1] : "";
  std::vector<uint32_t> low_bits{0x00, 0x01, 0xff};
  if (which == "full") {
    low_bits.clear();
    for (uint32_t i = 0; i < 256; ++i) low_bits.push_back(i);
  } else if (which != "quick") {
    std::fprintf(stderr, "usage: exhaustive quick|full\n");
    return 2;
  }
  bool good = true;
  for (const Encoder& e : kEncoders) good = holds(e, low_bits) && good;
  return good ? 0 : 1;
}
