// codes.cuh on a CPU, against the rules of numerics.h. Compiled twice: as for Hopper, and with e2m1_model.h in place of
// the conversion to E2M1 as for Blackwell (-DJNVFP4_E2M1_MODEL). With the header cuda_fp4.h (-DJNVFP4_CUDA_FP4) it also
// compares the model with NVIDIA's emulation of the instruction.
//   codes quick   every pattern of the upper 24 bits of a float32, with lower bits 0x00, 0x01 and 0xff
//   codes full    every pattern
// Prints how many codes each check compared and how many were wrong.
#include <math.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#ifdef JNVFP4_CUDA_FP4
#include <cuda_fp4.h>
#else
#define __device__
#define __forceinline__ inline
struct uint2 {
  uint32_t x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
#endif
#include "core/numerics.h"
#include "patterns.h"

// ---------------------------------------------------------------- the device's functions
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | uint64_t{b} << 32;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= static_cast<uint32_t>(bytes >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  return r;
}
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// For sums that a double rounds to no other float32 (stochastic_over).
inline float __fmaf_rz(float a, float b, float c) {
  const double sum = static_cast<double>(a) * b + c;
  const float nearest = static_cast<float>(sum);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(sum) ? nextafterf(nearest, 0.0f) : nearest;
}

#include "cuda/quantize/codes.cuh"

using namespace jnvfp4;

namespace {

struct Count {
  std::atomic<uint64_t> compared{0}, wrong{0};
  bool print(const char* name) const {
    std::printf("%s: %llu of %llu wrong\n", name, static_cast<unsigned long long>(wrong),
                static_cast<unsigned long long>(compared));
    return wrong == 0 && compared > 0;
  }
};

uint32_t code_at(uint2 codes, int i) { return (i < 8 ? codes.x : codes.y) >> (4 * (i % 8)) & 15u; }

// 16 elements, the bits that their random bytes are made of, and their signs as code_signs leaves them, with other bits
// set elsewhere.
struct Elements {
  Values v;
  uint32_t random[4], amax = 0;
  uint2 signs;

  explicit Elements(uint32_t first) {
    uint32_t sign[2] = {hash(first) & 0x77777777u, hash(~first) & 0x77777777u};
    for (uint32_t i = 0; i < kBlock; ++i) {
      const uint32_t b = first + (i << 8);
      v[i] = float_of(b ^ (hash(b) & kSign));
      amax = amax_bits(amax, bits_of(v[i]) & kMagnitude);
      sign[i / 8] |= bits_of(v[i]) >> 31 << (4 * (i % 8) + 3);
    }
    for (uint32_t i = 0; i < 4; ++i) random[i] = hash(first + i);
    signs = make_uint2(sign[0], sign[1]);
  }
  uint32_t random_byte(int i) const { return random[i / 4] >> (8 * (i % 4)) & 0xffu; }
};

template <class Rule>
void compare(Count& count, uint2 got, const Elements& e, float encode, uint32_t scale, const Rule& rule) {
  for (int i = 0; i < static_cast<int>(kBlock); ++i) {
    ++count.compared;
    count.wrong += code_at(got, i) != (scale == kScaleNan ? 0u : rule(mul_rn(e.v[i], encode), i));
  }
}

struct Counts {
  Count nearest, stochastic, nearest_quick, stochastic_quick;
};

// As encode_with and encode_plain of block.cuh choose between the forms; a NaN has a NaN scale.
void check_block(Counts& counts, const Elements& e, float encode) {
  const uint32_t scale = e.amax > kInf ? kScaleNan : 56u;
  const auto nearest = [](float a, int) -> uint32_t { return e2m1_encode(a); };
  const auto stochastic = [&](float a, int i) -> uint32_t { return e2m1_encode_stochastic(a, e.random_byte(i)); };
  compare(counts.nearest, encode_nearest(e.v, e.signs, encode, scale), e, encode, scale, nearest);
  compare(counts.stochastic, encode_stochastic(e.v, e.signs, encode, scale, e.random), e, encode, scale, stochastic);
  const float quick = encode * (1.0f / kOver);
  if (quick_below(e.amax, quick))
    compare(counts.nearest_quick, with_signs(nearest_codes(e.v, quick), e.signs), e, encode, scale, nearest);
  if (quick_below<true>(e.amax, quick))
    compare(counts.stochastic_quick, with_signs(stochastic_codes(e.v, quick, e.random), e.signs), e, encode, scale,
            stochastic);
}

bool blocks_hold(const std::vector<uint32_t>& low_bits) {
  Counts all;
  in_pieces((uint64_t{1} << 31) / (kBlock << 8), [&](uint64_t begin, uint64_t end) {
    Counts own;
    for (uint64_t block = begin; block < end; ++block)
      for (const uint32_t low : low_bits) {
        const uint32_t first = static_cast<uint32_t>(block * (kBlock << 8)) | low;
        const Elements e(first);
        check_block(own, e, 1.0f);
        // Some factor that brings the elements to between 2^-3 and 2^4, where a product rounds before it is encoded.
        const uint32_t exponent = e.amax >> 23, to = 124 + hash(first) % 7;
        if (exponent >= 5 && exponent < 246)
          check_block(own, e, float_of((to + 127 - exponent) << 23 | (hash(~first) & 0x7fffffu)));
      }
    for (const auto part : {&Counts::nearest, &Counts::stochastic, &Counts::nearest_quick, &Counts::stochastic_quick}) {
      (all.*part).compared += (own.*part).compared;
      (all.*part).wrong += (own.*part).wrong;
    }
  });
  bool good = all.nearest.print("nearest");
  good &= all.stochastic.print("stochastic");
  good &= all.nearest_quick.print("nearest, quick form");
  return all.stochastic_quick.print("stochastic, quick form") && good;
}

// differ_by_half for every two codes in every place.
bool halves_hold() {
  Count count;
  for (uint32_t place = 0; place < kBlock; ++place)
    for (uint32_t larger = 0; larger < 8; ++larger)
      for (uint32_t smaller = 0; smaller < 8; ++smaller) {
        Values l, s;  // elsewhere the codes 3 and 2, which stand for 1.5 and 1
        for (uint32_t i = 0; i < kBlock; ++i) {
          l[i] = e2m1_decode(i == place ? larger : 3u) / kOver;
          s[i] = e2m1_decode(i == place ? smaller : 2u) / kOver;
        }
        ++count.compared;
        count.wrong +=
            differ_by_half(Magnitudes(l), Magnitudes(s)) != (e2m1_decode(larger) != 1.5f * e2m1_decode(smaller));
      }
  return count.print("differ_by_half");
}

#ifdef JNVFP4_E2M1_MODEL
template <class F>
bool model_holds(const char* name, const std::vector<uint32_t>& low_bits, const F& want) {
  Count count;
  in_pieces(uint64_t{1} << 24, [&](uint64_t begin, uint64_t end) {
    uint64_t wrong = 0;
    for (uint64_t high = begin; high < end; ++high)
      for (const uint32_t low : low_bits) {
        const float v = float_of(static_cast<uint32_t>(high << 8) | low);
        wrong += e2m1_model(v) != want(v);
      }
    count.compared += (end - begin) * low_bits.size();
    count.wrong += wrong;
  });
  return count.print(name);
}
#endif

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc == 2 ? argv[1] : "";
  if (which != "quick" && which != "full") {
    std::fprintf(stderr, "usage: codes quick|full\n");
    return 2;
  }
  const std::vector<uint32_t> low_bits = low_bits_of(which);
  bool good = blocks_hold(low_bits);
  good = halves_hold() && good;
#ifdef JNVFP4_E2M1_MODEL
  const auto by_rule = [](float v) -> uint32_t { return v != v ? 7u : e2m1_encode(v); };
  good = model_holds("model, against the rule", low_bits, by_rule) && good;
#ifdef JNVFP4_CUDA_FP4
  const auto by_nvidia = [](float v) -> uint32_t { return __nv_cvt_float_to_fp4(v, __NV_E2M1, cudaRoundNearest); };
  good = model_holds("model, against cuda_fp4.h", low_bits, by_nvidia) && good;
#endif
#endif
  return good ? 0 : 1;
}
