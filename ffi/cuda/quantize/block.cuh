// What a thread does with the 16 elements of its block, by spec. Reductions over threads are the caller's.
//
// Each step has a quick form, which gives the same bits wherever a test on the block allows it, and the form of
// numerics.h for all other blocks. docs/kernels.md says why the quick forms are exact.
#pragma once

#include <cuda_fp8.h>

#include "../device.cuh"
#include "../kernels.h"

namespace jnvfp4 {

using Values = float[kBlock];

template <class S>
inline constexpr bool kChooses = S::spec.select != Select::kMax6;
template <class S>
inline constexpr bool kStrict = S::spec.error_math == ErrorMath::kFp32;
template <class S>
inline constexpr bool kSquared = S::spec.select == Select::kMse;
template <class S>
inline constexpr bool kStochastic = S::spec.rounding == Rounding::kStochastic;
template <class S>
inline constexpr bool kWindows = S::spec.amax_scope == AmaxScope::kWindow64;
template <class S>
inline constexpr bool kOneAmax = S::spec.amax_scope == AmaxScope::kTensor;
template <class S>
inline constexpr bool kTiles = S::spec.block_rows == kBlock;

// A block rotated, before the rounding to bfloat16.
template <class T>
__device__ __forceinline__ void rotate(Values& v) {
  if constexpr (!std::is_same_v<T, Bf16>) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = bf16_round(v[i]);
  }
  rht16_sums(v);
}

template <class T>
__device__ __forceinline__ Block<Bf16> rotated(const Block<T>& block) {
  Values v;
  block.values(v);
  rotate<T>(v);
  Block<Bf16> out;
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) out.part(i) = bf16_pair(v[2 * i], v[2 * i + 1]);
  return out;
}

// What a thread quantizes.
template <class S, class X>
__device__ __forceinline__ auto source_of(const X& x) {
  if constexpr (S::spec.rht)
    return rotated(x);
  else
    return x;
}

// ---------------------------------------------------------------- what follows from a block scale and an amax
// Quick forms work on elements times the encode scale over 64: there the E2M1 grid lies on the first 29 codes of E4M3,
// whose conversion instruction then packs it. `encode` is NaN where a quick form is not proven exact, so that every
// test on it fails.
struct EncodeFactor {
  float encode;
};
// Of a 4over6 candidate also the values of 1 and 1.5, or the scale itself for the fast error; times 64.
struct alignas(16) ErrorFactors {
  float encode, one, one_and_half;
};
template <class S>
using Factors = std::conditional_t<kChooses<S>, ErrorFactors, EncodeFactor>;

template <class S>
__device__ __forceinline__ Factors<S> factors_of(uint32_t scale, const GlobalScale& g) {
  const float encode = block_encode_scale(scale, g);
  const float quick = encode >= 0x1p-119f ? encode * 0x1p-6f : float_of(kNan);
  if constexpr (!kChooses<S>) {
    return {quick};
  } else {
    // Away from under- and overflow of errors and of the amax, which is about six times the value of 1. A block of
    // zeros has no error.
    const float s = e4m3_decode(scale), one = mul_rn(s, g.decode);
    const bool safe = scale == 0 || (one > 0x1p-41f && one < 0x1p36f);
    if constexpr (!kStrict<S>) return {safe ? quick : float_of(kNan), s * 64.0f, 0.0f};
    const StrictValues values(s, g);
    return {safe && (values.apply || scale == 0) ? quick : float_of(kNan), values.one * 64.0f,
            values.one_and_half * 64.0f};
  }
}

// One amax for many blocks: the factors of all scales, in shared memory; and one key for their random bits.
template <class S>
struct SharedScales {
  Factors<S> entry[kScaleNan + 1];
  float amax, e4m3_max, block_mult, encode;
  alignas(16) uint32_t round_key[kStochastic<S> ? 2 * kPhiloxRounds : 4];
  uint64_t first_block;

  // By the 128 threads from `first` on; the thread block then synchronises.
  __device__ __forceinline__ void fill(float tensor_amax, float scale_max, int first = 0) {
    const uint32_t scale = threadIdx.x - first;
    if (scale > kScaleNan) return;
    const GlobalScale g = global_scale(tensor_amax, scale_max);
    entry[scale] = factors_of<S>(scale, g);
    if (scale == 0) amax = tensor_amax, e4m3_max = scale_max, block_mult = g.block_mult, encode = g.encode;
  }
  __device__ __forceinline__ void fill_keys(const StreamArgs& stream, int64_t matrix, int first = 0) {
    const uint32_t* words = stream.words + 4 * matrix;
    const uint32_t key[2] = {words[0], words[1]};
    const uint32_t at = threadIdx.x - first;
    if (at < 2 * kPhiloxRounds) round_key[at] = philox_round_key(key, at / 2, at % 2);
    if (at == 0) first_block = words[2] | uint64_t{words[3]} << 32;
  }
  __device__ __forceinline__ Factors<S> factors(uint32_t scale) const { return entry[scale]; }
  __device__ __forceinline__ GlobalScale global() const { return global_scale(amax, e4m3_max); }
  __device__ __forceinline__ void random(uint64_t block, bool transposed, uint32_t (&word)[4]) const {
    philox(first_block + block, transposed, [&](int round, int w) { return round_key[2 * round + w]; }, word);
  }
};

template <class S>
struct OwnScales : GlobalScale {
  __device__ __forceinline__ OwnScales(float amax, float e4m3_max) : GlobalScale(global_scale(amax, e4m3_max)) {}
  __device__ __forceinline__ Factors<S> factors(uint32_t scale) const { return factors_of<S>(scale, *this); }
  __device__ __forceinline__ const GlobalScale& global() const { return *this; }
};

// ---------------------------------------------------------------- codes
struct Encoded {
  uint2 codes;     // packed two a byte
  uint32_t scale;  // a byte

  __device__ __forceinline__ void store(uint8_t* all_codes, uint8_t* all_scales, int64_t block) const {
    all_scales[block] = static_cast<uint8_t>(scale);
    *reinterpret_cast<uint2*>(all_codes + block * (kBlock / 2)) = codes;
  }
  __device__ __forceinline__ void store(const QuantizeArgs& a, int64_t block) const { store(a.data, a.scale, block); }
};

// `signs` as code_signs of device.cuh gives them.
__device__ __forceinline__ uint2 with_signs(uint2 codes, uint2 signs) {
  return make_uint2(codes.x | (signs.x & 0x88888888u), codes.y | (signs.y & 0x88888888u));
}

// The 16 codes of a block, packed two a byte, from `magnitude(i)` plus `bias`. A NaN scale has only codes 0.
template <class F>
__device__ __forceinline__ uint2 pack(uint2 signs, uint32_t scale, uint32_t bias, const F& magnitude) {
  uint32_t half[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) packed = packed * 16u + magnitude(8 * h + i);
    half[h] = packed - bias * 0x11111111u;
  }
  return scale == kScaleNan ? make_uint2(0, 0) : with_signs(make_uint2(half[0], half[1]), signs);
}

__device__ __forceinline__ uint2 encode_nearest(const Values& v, uint2 signs, float encode, uint32_t scale) {
  return pack(signs, scale, kMagicBits, [&](int i) {
    return static_cast<uint32_t>(e2m1_magnitude_plus_magic(bits_of(mul_rn(fabsf(v[i]), encode))));
  });
}

__device__ __forceinline__ uint2 encode_stochastic(const Values& v, uint2 signs, float encode, uint32_t scale,
                                                   const uint32_t (&random)[4]) {
  return pack(signs, scale, 0, [&](int i) {
    return e2m1_magnitude_stochastic(bits_of(mul_rn(fabsf(v[i]), encode)), random[i / 4] >> (8 * (i % 4)) & 0xffu);
  });
}

// ---------------------------------------------------------------- codes, the quick form
#if __CUDA_ARCH__ >= 890  // has the conversion to E4M3
constexpr bool kQuick = true;
#else
constexpr bool kQuick = false;
#endif

// Whether all elements of a block with this amax are below 7 when encoded; false for NaN.
__device__ __forceinline__ bool below_seven(uint32_t amax, float encode) {
  return kQuick && mul_rn(float_of(amax), encode) < 7.0f / 64.0f;
}

__device__ __forceinline__ uint32_t e4m3_codes(float a, float b) {
#if __CUDA_ARCH__ >= 890
  uint32_t r;
  asm("{.reg .b16 x; cvt.rn.satfinite.e4m3x2.f32 x, %2, %1; mov.b32 %0, {x, 0};}" : "=r"(r) : "f"(a), "f"(b));
  return r;
#else
  return e4m3_encode(clamp_max(a)) | e4m3_encode(clamp_max(b)) << 8;
#endif
}
__device__ __forceinline__ uint32_t e4m3_codes(float a, float b, float c, float d) {
  uint32_t r;
  asm("{.reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, %2, %1; cvt.rn.satfinite.e4m3x2.f32 y, %4, %3; mov.b32 %0, {x, "
      "y};}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// The magnitudes of a block's codes: of its halves, the E4M3 codes of elements 0 2 4 6 and of 1 3 5 7. Those of grid
// magnitudes over 64 are four times the E2M1 codes.
struct Magnitudes {
  uint32_t even[2], odd[2];
};

__device__ __forceinline__ Magnitudes magnitudes_over_64(const Values& r) {
  Magnitudes m;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float* half = r + 8 * h;
    m.even[h] = e4m3_codes(half[0], half[2], half[4], half[6]);
    m.odd[h] = e4m3_codes(half[1], half[3], half[5], half[7]);
  }
  return m;
}

__device__ __forceinline__ uint2 codes_of(const Magnitudes& m) {
  return make_uint2((m.even[0] >> 2) + 4 * m.odd[0], (m.even[1] >> 2) + 4 * m.odd[1]);
}

__device__ __forceinline__ float round_over_64(float a) { return e2m1_round_below_7(a, 1.0f / 64.0f); }

__device__ __forceinline__ void nearest_over_64(const Values& v, float encode, Values& r) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) r[i] = round_over_64(mul_rn(fabsf(v[i]), encode));
}

// Grid values over 64 as e2m1_magnitude_stochastic gives them, but 8 where that saturates at 6. `binade` is the power
// of two of a magnitude, at least that of 1, times 2^124: a random byte in the third byte of a float32 is r * 2^-133,
// so the product is r / 512 of it, which is r / 256 of a grid step. The step is that before the addition; the sum stays
// within one, so it truncates to the same grid value.
__device__ __forceinline__ void stochastic_over_64(const Values& v, float encode, const uint32_t (&random)[4],
                                                   Values& r) {
  constexpr int kUp = 124 << 23;
  constexpr float kMagicDown = 6291456.0f * 0x1p-124f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float a = mul_rn(fabsf(v[i]), encode);
    const int32_t power = static_cast<int32_t>(bits_of(a) & kInf);
    const float binade = float_of(add_max(power, kUp, kUp + static_cast<int32_t>(bits_of(1.0f / 64.0f))));
    const float random_byte = float_of(__byte_perm(random[i / 4], 0, 0x4044u | i % 4 << 8));
    const float t = __fmaf_rn(random_byte, binade, a);
    r[i] = __fmaf_rn(binade, -kMagicDown, __fmaf_rz(binade, kMagicDown, t));
  }
}
// Codes from such magnitudes: 8 becomes 7.
__device__ __forceinline__ uint32_t saturated(uint32_t codes) { return codes - ((codes & 0x88888888u) >> 3); }

// With a scale that is chosen. `x` has the elements, `signs` is code_signs of them.
template <class X, class Scales>
__device__ __forceinline__ Encoded encode_with(const X& x, uint2 signs, uint32_t amax, uint32_t scale, float encode,
                                               const Scales& scales) {
  Values v;
  if (below_seven(amax, encode)) {
    Values r;
    x.finite_values(v);
    nearest_over_64(v, encode, r);
    return {with_signs(codes_of(magnitudes_over_64(r)), signs), scale};
  }
  x.values(v);
  return {encode_nearest(v, signs, block_encode_scale(scale, scales.global()), scale), scale};
}

// ---------------------------------------------------------------- plain block scale
// As `block_scale` does: infinity saturates as FLT_MAX does.
template <class Scales>
__device__ __forceinline__ uint32_t plain_scale(uint32_t amax, const Scales& scales) {
  return e4m3_codes(mul_rn(float_of(amax), scales.block_mult), 0.0f);
}

// `random` gives the random bits of the block.
template <class S, class X, class Scales, class Random>
__device__ __forceinline__ Encoded encode_plain(const X& x, uint2 signs, uint32_t amax, const Scales& scales,
                                                const Random& random) {
  const uint32_t scale = plain_scale(amax, scales);
  const float encode = scales.factors(scale).encode;
  if constexpr (kStochastic<S>) {
    uint32_t bits[4];
    random(bits);
    Values v;
    x.values(v);
    if (below_seven(amax, encode)) {
      Values r;
      stochastic_over_64(v, encode, bits, r);
      const uint2 codes = codes_of(magnitudes_over_64(r));
      return {with_signs(make_uint2(saturated(codes.x), saturated(codes.y)), signs), scale};
    }
    return {encode_stochastic(v, signs, block_encode_scale(scale, scales.global()), scale, bits), scale};
  } else {
    return encode_with(x, signs, amax, scale, encode, scales);
  }
}

// ---------------------------------------------------------------- 4over6
// Rounds the magnitudes `v` of a block with a candidate and sums its errors: those of the rule for the fast error,
// within `error_bound` of them for the strict one.
template <class S>
__device__ __forceinline__ float quick_error(const Values& v, const Factors<S>& factors, float encode_all,
                                             Magnitudes& magnitudes) {
  Values rounded;
  float error = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float x = v[i];
    rounded[i] = round_over_64(mul_rn(x, factors.encode));
    if constexpr (!kStrict<S>) {
      error = add_error(error, scaled_difference(rounded[i], x, factors.one, encode_all), kSquared<S>);
    } else {
      const float d = __fmaf_rn(rounded[i], factors.one, -x);
      error = kSquared<S> ? __fmaf_rn(d, d, error) : __fadd_rn(error, fabsf(d));
    }
  }
  magnitudes = magnitudes_over_64(rounded);
  return error;
}

// How far the two sums of quick strict errors may be from the strict ones, together (docs/kernels.md).
template <class S>
__device__ __forceinline__ float error_bound(float amax, float errors) {
  constexpr float u = 0x1p-24f;
  constexpr float a = kTiles<S> ? (kSquared<S> ? 128.0f : 2200.0f) : (kSquared<S> ? 12.0f : 136.0f);
  constexpr float e = kTiles<S> ? (kSquared<S> ? 160.0f : 48.0f) : (kSquared<S> ? 100.0f : 40.0f);
  // One more of each than proven, for the rounding of the bound.
  return __fmaf_rn(errors, (e + 1.0f) * u, (a + 1.0f) * u * (kSquared<S> ? amax * amax : amax));
}

// The error of a candidate by the rule. Rare, so it is a loop that rereads the elements: `element(i)` is the i-th.
template <class S, class Element>
__device__ __forceinline__ float exact_error(const Element& element, uint32_t scale, const GlobalScale& g) {
  const float s = e4m3_decode(scale), encode = block_encode_scale(scale, g);
  const StrictValues values(s, g);
  float sum = 0.0f;
#pragma unroll 1
  for (int i = 0; i < kBlock; ++i) {
    const float x = element(i), q = e2m1_round(mul_rn(x, encode));
    float difference;
    if constexpr (!kStrict<S>)
      difference = scaled_difference(q, x, s, g.encode);
    else
      difference = values.apply ? values.difference(q, x) : add_rn(strict_value(q, s, g), -x);
    sum = add_error(sum, difference, kSquared<S>);
  }
  return sum;
}

// The candidates of a block or a 16x16 tile under one amax, and which is chosen from the errors of what shares it.
template <class S>
struct Choice {
  struct {
    uint32_t six, four;
  } scales;
  Factors<S> six, four;
  float amax;
  bool quick;

  template <class Scales>
  __device__ __forceinline__ Choice(uint32_t amax_bits, const Scales& all) : amax(float_of(amax_bits)) {
    // In the range in which factors are quick the steps divide exactly.
    const float sixth =
        div_by_steps(amax, 6.0f, 1.0f / 6.0f, [](float x, float y, float z) { return __fmaf_rn(x, y, z); });
    take(mul_rn(sixth, all.encode), all);
    quick = below_seven(amax_bits, six.encode) && below_seven(amax_bits, four.encode) &&
            (scales.six != 0 || amax_bits == 0);
    if (!quick) take(candidate_base(amax_bits, all.encode), all);
  }

  __device__ __forceinline__ bool one_scale() const { return scales.six == scales.four; }  // a tie: six
  // Whether the quick errors decide in whatever order they are summed.
  __device__ __forceinline__ bool sure(float error_six, float error_four) const {
    const float inexact = kStrict<S> ? amax : 0.0f;  // the fast error of an element is exact
    return quick && fabsf(error_four - error_six) > error_bound<S>(inexact, error_four + error_six);
  }
  // Whether they decide in the order of the rule.
  __device__ __forceinline__ bool decided(float error_six, float error_four) const {
    return kStrict<S> ? sure(error_six, error_four) : quick;
  }
  __device__ __forceinline__ Factors<S> factors(bool take_four) const {
    Factors<S> f = six;
    if (take_four) f = four;
    return f;
  }
  __device__ __forceinline__ uint32_t scale(bool take_four) const { return take_four ? scales.four : scales.six; }
  __device__ __forceinline__ float encode(bool take_four) const { return take_four ? four.encode : six.encode; }

 private:
  template <class Scales>
  __device__ __forceinline__ void take(float base, const Scales& all) {
    const uint32_t both = e4m3_codes(base, mul_rn(base, 1.5f));
    scales.six = both & 0xffu, scales.four = both >> 8;
    six = all.factors(scales.six), four = all.factors(scales.four);
  }
};

// The strict error where `quick_error` applies, whose factors are times 64.
__device__ __forceinline__ float strict_error(const Values& v, const ErrorFactors& factors, bool squared) {
  float encode = factors.encode, error = 0.0f;
  asm volatile("" : "+f"(encode));  // rounds again, rather than keep what `quick_error` rounded in registers
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float rounded = round_over_64(mul_rn(v[i], encode));
    error = add_error(error, strict_difference(rounded, v[i], factors.one, factors.one_and_half), squared);
  }
  return error;
}

__device__ __forceinline__ Magnitudes chosen_of(bool four, const Magnitudes& with_six, const Magnitudes& with_four) {
  Magnitudes m;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    m.even[h] = four ? with_four.even[h] : with_six.even[h];
    m.odd[h] = four ? with_four.odd[h] : with_six.odd[h];
  }
  return m;
}

// `error(four)` of both candidates, one after the other.
template <class F>
__device__ __forceinline__ bool four_is_better(const F& error) {
  float six = 0.0f, four = 0.0f;
#pragma unroll 1
  for (int c = 0; c < 2; ++c) {
    six = four;
    four = error(c == 1);
  }
  return choose_four(six, four);
}

// Whether 4-bit codes with the larger scale stand for the same values as with the other. Then 4 times the one is 6
// times the other: 0 stays, and 1, 2 and 4 are 1.5, 3 and 6, which is the next code. Their errors are the same, in any
// order.
template <class S>
__device__ __forceinline__ bool same_values(const Choice<S>& choice, const Magnitudes& six, const Magnitudes& four) {
  const auto differ = [](uint32_t with_six, uint32_t with_four) {
    const uint32_t not_zero = (with_four >> 1 | with_four) & 0x08080808u;
    return (with_four & 0x04040404u) | (with_six ^ (with_four + (not_zero >> 1)));
  };
  const uint32_t any = differ(six.even[0], four.even[0]) | differ(six.even[1], four.even[1]) |
                       differ(six.odd[0], four.odd[0]) | differ(six.odd[1], four.odd[1]);
  return any == 0 && choice.quick &&
         2.0f * e4m3_decode(static_cast<uint8_t>(choice.scales.four)) ==
             3.0f * e4m3_decode(static_cast<uint8_t>(choice.scales.six));
}

// What comes next waits for this, so that registers hold the rounded values of one candidate at a time.
__device__ __forceinline__ void one_after_the_other(float& error, Magnitudes& m) {
  asm volatile("" : "+f"(error), "+r"(m.even[0]), "+r"(m.even[1]), "+r"(m.odd[0]), "+r"(m.odd[1]));
}

// Which scale a block of magnitudes `v` takes by itself, and its codes' magnitudes with it, if the choice is quick.
template <class S, class Scales, class Element>
__device__ __forceinline__ bool block_takes_four(const Values& v, const Choice<S>& choice, const Scales& scales,
                                                 const Element& element, Magnitudes& chosen) {
  Magnitudes six, four;
  float error_six = quick_error<S>(v, choice.six, scales.encode, six);
  one_after_the_other(error_six, six);
  const float error_four = quick_error<S>(v, choice.four, scales.encode, four);
  bool take_four = choose_four(error_six, error_four);
  if (!choice.decided(error_six, error_four)) {
    if (choice.one_scale() || same_values(choice, six, four)) {
      take_four = false;
    } else if (kStrict<S> && choice.quick) {
      take_four = four_is_better([&](bool c) { return strict_error(v, choice.factors(c), kSquared<S>); });
    } else {
      const GlobalScale g = scales.global();
      take_four = four_is_better([&](bool c) { return exact_error<S>(element, choice.scale(c), g); });
    }
  }
  chosen = chosen_of(take_four, six, four);
  return take_four;
}

template <class S, class X, class Scales>
__device__ __forceinline__ Encoded encode_chosen(const X& x, uint2 signs, const Choice<S>& choice, bool four,
                                                 const Magnitudes& chosen, const Scales& scales) {
  const uint32_t scale = choice.scale(four);
  if (choice.quick) return {with_signs(codes_of(chosen), signs), scale};
  Values v;
  x.values(v);
  return {encode_nearest(v, signs, block_encode_scale(scale, scales.global()), scale), scale};
}

template <class S, class X, class Scales, class Element>
__device__ __forceinline__ Encoded encode_better(const X& x, uint2 signs, uint32_t amax, const Scales& scales,
                                                 const Element& element) {
  const Choice<S> choice(amax, scales);
  Magnitudes chosen;
  Values v;
  x.magnitudes(v);
  const bool four = block_takes_four<S>(v, choice, scales, element, chosen);
  return encode_chosen(x, signs, choice, four, chosen, scales);
}

// The amax of a 16x16 tile, and its errors by `tile_error` of numerics.h, over the lanes that have its lines, from
// `kFarthest` lanes apart to `kNearest`. Each sum is the same from both sides.
template <int kFarthest, int kNearest>
struct Lanes {
  __device__ __forceinline__ static uint32_t max(uint32_t m) {
#pragma unroll
    for (int step = kFarthest; step >= kNearest; step /= 2) m = amax_bits(m, __shfl_xor_sync(0xffffffffu, m, step));
    return m;
  }
  __device__ __forceinline__ static float sum(float error) {
#pragma unroll
    for (int step = kFarthest; step >= kNearest; step /= 2)
      error = add_rn(error, __shfl_xor_sync(0xffffffffu, error, step));
    return error;
  }
  __device__ __forceinline__ static bool all(bool b) {
    constexpr uint32_t kSteps = 2 * kFarthest - kNearest;  // the bits of a lane in which lines differ
    constexpr uint32_t kGroup = kNearest == 1 ? (1u << 2 * kFarthest) - 1 : 0x55555555u;
    static_assert(kNearest == 1 || kSteps == 30);
    const uint32_t lanes = kGroup << (threadIdx.x % 32 & ~kSteps);
    return (__ballot_sync(0xffffffffu, b) & lanes) == lanes;
  }
};

// What the quick errors say of a 16x16 tile, in whatever order they are summed.
enum class TileChoice : uint8_t { kSix, kFour, kClose };

// The same by the rule, in the warp's tiles that are not decided.
template <class S, int kLines, class Scales, class Sum, class LineValues, class Element>
__device__ __forceinline__ bool exactly_four(const Choice<S>& choice, const Scales& scales, const Sum& sum,
                                             const LineValues& values, const Element& element, bool decided) {
  bool four = false;
  if constexpr (kStrict<S>)
    if (__any_sync(0xffffffffu, !decided && choice.quick))  // every lane, since lines are lanes
      four = four_is_better([&](bool c) {
        return sum([&](int j) {
          Values v;
          values(j, v);
          return strict_error(v, choice.factors(c), kSquared<S>);
        });
      });
  if (__any_sync(0xffffffffu, !decided && !(kStrict<S> && choice.quick))) {
    const GlobalScale g = scales.global();
    const bool slow = four_is_better([&](bool c) {
      return sum([&](int j) { return exact_error<S>([&](int i) { return element(j, i); }, choice.scale(c), g); });
    });
    if (!(kStrict<S> && choice.quick)) four = slow;
  }
  return four;
}

// Which scale a 16x16 tile takes, and the magnitudes of the thread's kLines lines of it, if the choice is quick; by the
// rule at once, without magnitudes, where the quick errors did not decide before. `values(j, v)` are the magnitudes of
// the j-th line, `element(j, i)` is an element of it.
template <class S, bool kByRule, class Lines, int kLines, class Scales, class LineValues, class Element>
__device__ __forceinline__ bool tile_takes_four(const Choice<S>& choice, const Scales& scales, const LineValues& values,
                                                const Element& element, TileChoice* found,
                                                Magnitudes (&chosen)[kLines]) {
  const auto sum = [](const auto& error) {
    const float first = Lines::sum(error(0));
    return kLines == 1 ? first : add_rn(first, Lines::sum(error(kLines - 1)));
  };
  bool four = false, decided = choice.one_scale();
  if constexpr (!kByRule || !kStrict<S>) {
    Magnitudes with_six[kLines], with_four[kLines];
    const auto quick = [&](const Factors<S>& factors, Magnitudes(&magnitudes)[kLines]) {
      return sum([&](int j) {
        Values v;
        values(j, v);
        return quick_error<S>(v, factors, scales.encode, magnitudes[j]);
      });
    };
    float six = quick(choice.six, with_six);
#pragma unroll
    for (int j = 0; j < kLines; ++j) one_after_the_other(six, with_six[j]);
    const float other = quick(choice.four, with_four);
    four = !decided && choose_four(six, other);
    bool sure = decided || choice.sure(six, other);
    if (__any_sync(0xffffffffu, !sure)) {
      bool same = true;
#pragma unroll
      for (int j = 0; j < kLines; ++j) same = same && same_values(choice, with_six[j], with_four[j]);
      if (Lines::all(same) && !sure) sure = true, four = false;
    }
    if (found) *found = !sure ? TileChoice::kClose : four ? TileChoice::kFour : TileChoice::kSix;
    decided = sure || choice.decided(six, other);
#pragma unroll
    for (int j = 0; j < kLines; ++j) chosen[j] = chosen_of(four, with_six[j], with_four[j]);
    if (__all_sync(0xffffffffu, decided)) return four;
    const bool close = exactly_four<S, kLines>(choice, scales, sum, values, element, decided);
    if (!decided && close) {
      four = true;
#pragma unroll
      for (int j = 0; j < kLines; ++j) chosen[j] = with_four[j];
    } else if (!decided) {
      four = false;
#pragma unroll
      for (int j = 0; j < kLines; ++j) chosen[j] = with_six[j];
    }
    return four;
  } else {
    return exactly_four<S, kLines>(choice, scales, sum, values, element, decided) && !decided;
  }
}

template <class S, class X, class Scales, class Element, class Random>
__device__ __forceinline__ Encoded encode_block(const X& x, uint2 signs, uint32_t amax, const Scales& scales,
                                                const Element& element, const Random& random) {
  if constexpr (kChooses<S>)
    return encode_better<S>(x, signs, amax, scales, element);
  else
    return encode_plain<S>(x, signs, amax, scales, random);
}

// The maximum over the four neighbouring lanes that hold a window; every lane is here.
__device__ __forceinline__ uint32_t window_max(uint32_t m) {
  m = amax_bits(m, __shfl_xor_sync(0xffffffffu, m, 1));
  return amax_bits(m, __shfl_xor_sync(0xffffffffu, m, 2));
}

}  // namespace jnvfp4
