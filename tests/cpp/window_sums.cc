// has_exact_sums for random windows of two rows: what the rule adds block by block in float32, and what tensor cores
// add in any order, is then the exact sum. The model of a tensor core aligns 16 products and what it adds them to by
// the largest exponent, in which a subnormal float16 counts as 2^-14, and drops what is below 24 bits of that.
#include "cuda/matmul/window_sums.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

using namespace jnvfp4;

namespace {

struct Window {
  uint32_t codes[8], scales = 0;
  double values[64], norm = 0, unit = 0;  // unit: what all values are multiples of
};

// The exponents of its scales lie up to `spread` apart. With the codes of another, if one is given: a large sum.
Window random_window(std::mt19937& engine, const Window* other = nullptr) {
  const auto random = [&] { return static_cast<uint32_t>(engine()); };
  Window w;
  const int kind = static_cast<int>(random() % 128), spread = kind % 8, top = static_cast<int>(random() % 15) + 1;
  for (uint32_t& word : w.codes) word = random() | (kind & 16 ? 0x77777777u : 0);  // the largest codes
  for (uint32_t& word : w.codes) word &= kind & 32 ? 0x77777777u : ~0u;            // no signs
  for (int i = 2; i < 8 && (kind & 96) == 64; ++i) w.codes[i] = 0;                 // zeros but for a block
  if (other) std::copy(other->codes, other->codes + 8, w.codes);
  for (int i = 0; i < 4; ++i) {
    const int exponent = std::max(top - static_cast<int>(random() % (spread + 1)), 0);
    const uint32_t scale = std::min(exponent * 8u + random() % 8, 0x7eu);
    w.scales |= scale << 8 * i;
    const double unit = std::ldexp(1, std::max(exponent, 1) - 11), s = e4m3_decode(static_cast<uint8_t>(scale));
    bool zero = true;
    for (int k = 0; k < 16; ++k) {
      const double v = e2m1_decode(w.codes[2 * i + k / 8] >> 4 * (k % 8) & 15) * s;
      w.values[16 * i + k] = v, w.norm += v * v, zero = zero && v == 0;
    }
    if (!zero && (w.unit == 0 || unit < w.unit)) w.unit = unit;
  }
  w.norm = std::sqrt(w.norm);
  return w;
}

int exponent_of(double half) { return half == 0 ? -14 : std::max(std::ilogb(half), -14); }

float multiply_add(const double* a, const double* b, float sum) {
  double terms[17] = {sum};
  int most = sum == 0 ? -1000 : std::ilogb(sum);
  for (int k = 0; k < 16; ++k) {
    const double x = std::ldexp(a[k], -14), y = std::ldexp(b[k], -14);
    terms[k + 1] = x * y, most = std::max(most, exponent_of(x) + exponent_of(y));
  }
  double total = 0;
  for (double t : terms) total += std::trunc(std::ldexp(t, 23 - most));
  return static_cast<float>(std::ldexp(total, most - 23));
}

}  // namespace

int main() {
  std::mt19937 random(1);
  int exact = 0, at_limit = 0, wrong = 0;
  for (int n = 0; n < 500000; ++n) {
    const Window a = random_window(random), b = random_window(random, n % 2 ? &a : nullptr);
    const int size = size_of_window(a.codes, a.scales), other = size_of_window(b.codes, b.scales);
    if (a.unit > 0) wrong += !(a.norm < std::ldexp(a.unit, size)) || a.norm < std::ldexp(a.unit, size - 1);
    if (!has_exact_sums(bits_of_size(size) << kTokenSize | bits_of_size(other) << kColumnSize)) continue;
    ++exact, at_limit += size + other == kMostSizes;
    float rule = 0, cores = 0;
    double sum = 0;
    for (int i = 0; i < 64; i += 16) {
      double block = 0;
      for (int k = i; k < i + 16; ++k) block += a.values[k] * b.values[k];
      rule += static_cast<float>(block), sum += block;
      cores = multiply_add(a.values + i, b.values + i, cores);
    }
    wrong += rule != sum || std::ldexp(cores, 28) != sum;
  }
  std::printf("%d windows have exact sums, %d at the limit, %d wrong\n", exact, at_limit, wrong);
  return wrong || exact < 100000 || at_limit < 10000;
}
