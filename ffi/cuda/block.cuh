// What a thread does with the 16 elements of its block, by spec. Reductions over threads are the caller's.
//
// Each step has a quick form, which gives the same bits wherever a test on the block allows it, and the form of
// numerics.h for all other blocks. docs/kernels.md says why the quick forms are exact.
#pragma once

#include <cuda_fp8.h>

#include "device.cuh"
#include "kernels.h"

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
__device__ __forceinline__ Factors<S> factors_of(uint8_t scale, const GlobalScale& g) {
  const float encode = block_encode_scale(scale, g);
  const float quick = encode >= 0x1p-119f ? encode * 0x1p-6f : float_of(kNan);
  if constexpr (!kChooses<S>) {
    return {quick};
  } else if constexpr (kStrict<S>) {
    const StrictValues values(e4m3_decode(scale), g);
    return {values.apply || scale == 0 ? quick : float_of(kNan), values.one * 64.0f, values.one_and_half * 64.0f};
  } else {
    return {quick, e4m3_decode(scale) * 64.0f, 0.0f};
  }
}

// One amax for many blocks: the factors of all scales, in shared memory; and one key for their random bits.
template <class S>
struct SharedScales {
  Factors<S> entry[kScaleNan + 1];
  float amax, e4m3_max, block_mult, encode;
  alignas(16) uint32_t round_key[kStochastic<S> ? 2 * kPhiloxRounds : 4];
  uint64_t first_block;

  // By a thread block, which then synchronises.
  __device__ __forceinline__ void fill(float tensor_amax, float scale_max) {
    if (threadIdx.x > kScaleNan) return;
    const GlobalScale g = global_scale(tensor_amax, scale_max);
    entry[threadIdx.x] = factors_of<S>(static_cast<uint8_t>(threadIdx.x), g);
    if (threadIdx.x == 0) amax = tensor_amax, e4m3_max = scale_max, block_mult = g.block_mult, encode = g.encode;
  }
  __device__ __forceinline__ void fill_keys(const StreamArgs& stream, int64_t matrix) {
    const uint32_t* words = stream.words + 4 * matrix;
    const uint32_t key[2] = {words[0], words[1]};
    if (threadIdx.x < 2 * kPhiloxRounds)
      round_key[threadIdx.x] = philox_round_key(key, threadIdx.x / 2, threadIdx.x % 2);
    if (threadIdx.x == 0) first_block = words[2] | uint64_t{words[3]} << 32;
  }
  __device__ __forceinline__ Factors<S> factors(uint8_t scale) const { return entry[scale]; }
  __device__ __forceinline__ GlobalScale global() const { return global_scale(amax, e4m3_max); }
  __device__ __forceinline__ void random(uint64_t block, bool transposed, uint32_t (&word)[4]) const {
    philox(first_block + block, transposed, [&](int round, int w) { return round_key[2 * round + w]; }, word);
  }
};

template <class S>
struct OwnScales : GlobalScale {
  __device__ __forceinline__ OwnScales(float amax, float e4m3_max) : GlobalScale(global_scale(amax, e4m3_max)) {}
  __device__ __forceinline__ Factors<S> factors(uint8_t scale) const { return factors_of<S>(scale, *this); }
  __device__ __forceinline__ const GlobalScale& global() const { return *this; }
};

// ---------------------------------------------------------------- codes
struct Encoded {
  uint2 codes;  // packed two a byte
  uint8_t scale;

  __device__ __forceinline__ void store(const QuantizeArgs& a, int64_t block) const {
    a.scale[block] = scale;
    *reinterpret_cast<uint2*>(a.data + block * (kBlock / 2)) = codes;
  }
};

// The sign bits of eight values in the places of eight codes' signs.
__device__ __forceinline__ uint32_t signs_of(const float* v) {
  const auto bytes = [](float a, float b) {  // of each, its sign in all bits of a byte
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"(0x00fbu));
    return r;
  };
  const uint32_t even = __byte_perm(bytes(v[0], v[2]), bytes(v[4], v[6]), 0x5410);
  const uint32_t odd = __byte_perm(bytes(v[1], v[3]), bytes(v[5], v[7]), 0x5410);
  return ((even & 0x0f0f0f0fu) | (odd & 0xf0f0f0f0u)) & 0x88888888u;
}

// The 16 codes of a block, packed two a byte, from `magnitude(i)` plus `bias`. A NaN scale has only codes 0.
template <class F>
__device__ __forceinline__ uint2 pack(const Values& v, uint8_t scale, uint32_t bias, const F& magnitude) {
  uint32_t half[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) packed = packed * 16u + magnitude(8 * h + i);
    half[h] = (packed - bias * 0x11111111u) | signs_of(v + 8 * h);
  }
  return scale == kScaleNan ? make_uint2(0, 0) : make_uint2(half[0], half[1]);
}

__device__ __forceinline__ uint2 encode_nearest(const Values& v, float encode, uint8_t scale) {
  return pack(v, scale, kMagicBits, [&](int i) {
    return static_cast<uint32_t>(e2m1_magnitude_plus_magic(bits_of(mul_rn(fabsf(v[i]), encode))));
  });
}

__device__ __forceinline__ uint2 encode_stochastic(const Values& v, float encode, uint8_t scale,
                                                   const uint32_t (&random)[4]) {
  return pack(v, scale, 0, [&](int i) {
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

__device__ __forceinline__ uint32_t e4m3_codes(float a, float b, float c, float d) {
  uint32_t r;
  asm("{.reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, %2, %1; cvt.rn.satfinite.e4m3x2.f32 y, %4, %3; mov.b32 %0, {x, "
      "y};}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// Eight grid magnitudes over 64, whose E4M3 codes are four times the E2M1 ones, with the signs of `v`.
__device__ __forceinline__ uint32_t pack_over_64(const float* r, const float* v) {
  const uint32_t even = e4m3_codes(r[0], r[2], r[4], r[6]), odd = e4m3_codes(r[1], r[3], r[5], r[7]);
  return (even >> 2 | odd << 2) | signs_of(v);
}
__device__ __forceinline__ uint2 codes_over_64(const Values& r, const Values& v) {
  return make_uint2(pack_over_64(r, v), pack_over_64(r + 8, v + 8));
}

__device__ __forceinline__ float round_over_64(float a) { return e2m1_round_below_7(a, 1.0f / 64.0f); }

__device__ __forceinline__ uint2 quick_nearest(const Values& v, float encode) {
  Values r;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) r[i] = round_over_64(mul_rn(fabsf(v[i]), encode));
  return codes_over_64(r, v);
}

// The power of two of a magnitude over 64, that of 1 below it: the grid step there is half of it.
__device__ __forceinline__ float binade_over_64(float a) { return fmaxf(float_of(bits_of(a) & kInf), 1.0f / 64.0f); }

// e2m1_magnitude_stochastic: the grid step is that of the value before the random addition, which truncates to the same
// grid value, since the sum stays within one step. 8 and more is as good as 7.
__device__ __forceinline__ uint2 quick_stochastic(const Values& v, float encode, const uint32_t (&random)[4]) {
  Values r;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float a = mul_rn(fabsf(v[i]), encode), binade = binade_over_64(a);
    // The bytes of a float32: 64 + random / 512.
    const float fraction = add_rn(float_of(__byte_perm(random[i / 4], 0x42800000u, 0x7604u | i % 4 << 4)), -64.0f);
    const float t = fminf(__fmaf_rn(fraction, binade, a), 7.5f / 64.0f);
    r[i] = __fmaf_rn(binade, -6291456.0f, __fmaf_rz(binade, 6291456.0f, t));
  }
  return codes_over_64(r, v);
}

// With a scale that is chosen.
template <class Scales>
__device__ __forceinline__ Encoded encode_with(const Values& v, uint32_t amax, uint8_t scale, float encode,
                                               const Scales& scales) {
  if (below_seven(amax, encode)) return {quick_nearest(v, encode), scale};
  return {encode_nearest(v, block_encode_scale(scale, scales.global()), scale), scale};
}

// ---------------------------------------------------------------- plain block scale
// `random` gives the random bits of the block.
template <class S, class Scales, class Random>
__device__ __forceinline__ Encoded encode_plain(const Values& v, uint32_t amax, const Scales& scales,
                                                const Random& random) {
  const uint8_t scale = e4m3_encode(clamp_max(mul_rn(float_of(amax), scales.block_mult)));
  const float encode = scales.factors(scale).encode;
  if constexpr (kStochastic<S>) {
    uint32_t bits[4];
    random(bits);
    if (below_seven(amax, encode)) return {quick_stochastic(v, encode, bits), scale};
    return {encode_stochastic(v, block_encode_scale(scale, scales.global()), scale, bits), scale};
  } else {
    return encode_with(v, amax, scale, encode, scales);
  }
}

// ---------------------------------------------------------------- 4over6
// Rounds the magnitudes of a block with a candidate, over 64, and sums its errors: those of the rule for the fast
// error, within `error_bound` of them for the strict one.
template <class S>
__device__ __forceinline__ float quick_error(const Values& v, const Factors<S>& factors, float encode_all,
                                             Values& rounded) {
  float error = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float x = fabsf(v[i]);
    rounded[i] = round_over_64(mul_rn(x, factors.encode));
    if constexpr (!kStrict<S>) {
      error = add_error(error, scaled_difference(rounded[i], x, factors.one, encode_all), kSquared<S>);
    } else {
      const float d = __fmaf_rn(rounded[i], factors.one, -x);
      error = kSquared<S> ? __fmaf_rn(d, d, error) : __fadd_rn(error, fabsf(d));
    }
  }
  return error;
}

// How far the two sums of quick strict errors may be from the strict ones, together (docs/kernels.md).
template <class S>
__device__ __forceinline__ float error_bound(float amax, float errors) {
  constexpr float u = 0x1p-24f;
  constexpr float a = kTiles<S> ? (kSquared<S> ? 128.0f : 2200.0f) : (kSquared<S> ? 12.0f : 136.0f);
  constexpr float e = kTiles<S> ? (kSquared<S> ? 160.0f : 48.0f) : (kSquared<S> ? 100.0f : 40.0f);
  return u * (a * (kSquared<S> ? amax * amax : amax) + e * errors);
}

// The error of a candidate by the rule. Rare, so it is a loop that rereads the elements: `element(i)` is the i-th.
template <class S, class Element>
__device__ __forceinline__ float exact_error(const Element& element, uint8_t scale, const GlobalScale& g) {
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
  Candidates scales;
  Factors<S> six, four;
  float amax;
  bool quick;

  template <class Scales>
  __device__ __forceinline__ Choice(uint32_t amax_bits, const Scales& all)
      : scales(candidate_scales(amax_bits, all.encode)),
        six(all.factors(scales.six)),
        four(all.factors(scales.four)),
        amax(float_of(amax_bits)),
        // Away from under- and overflow, or nothing but zeros.
        quick(below_seven(amax_bits, six.encode) && below_seven(amax_bits, four.encode) &&
              ((amax > 0x1p-40f && amax < 0x1p40f) || amax == 0.0f)) {}

  // Whether the quick errors decide, and how.
  __device__ __forceinline__ bool decided(float error_six, float error_four, bool* take_four) const {
    *take_four = choose_four(error_six, error_four);
    if (scales.six == scales.four) return *take_four = false, true;  // one scale has one error: a tie
    if constexpr (!kStrict<S>) return quick;
    return quick && fabsf(error_four - error_six) > error_bound<S>(amax, error_four + error_six);
  }
  __device__ __forceinline__ uint8_t scale(bool take_four) const { return take_four ? scales.four : scales.six; }
  __device__ __forceinline__ float encode(bool take_four) const { return take_four ? four.encode : six.encode; }
};

// The strict error where `quick_error` applies: `rounded(i)` and the factors are over and times 64.
template <class S, class Rounded>
__device__ __forceinline__ float strict_error(const Values& v, const Rounded& rounded, const ErrorFactors& factors) {
  float error = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i)
    error =
        add_error(error, strict_difference(rounded(i), fabsf(v[i]), factors.one, factors.one_and_half), kSquared<S>);
  return error;
}

// A block by itself.
template <class S, class Scales, class Element>
__device__ __forceinline__ Encoded encode_better(const Values& v, uint32_t amax, const Scales& scales,
                                                 const Element& element) {
  const Choice<S> choice(amax, scales);
  Values six, four;
  const float error_six = quick_error<S>(v, choice.six, scales.encode, six);
  const float error_four = quick_error<S>(v, choice.four, scales.encode, four);
  bool take_four;
  if (!choice.decided(error_six, error_four, &take_four)) {
    if (kStrict<S> && choice.quick) {
      take_four = choose_four(strict_error<S>(
                                  v, [&](int i) { return six[i]; }, choice.six),
                              strict_error<S>(v, [&](int i) { return four[i]; }, choice.four));
    } else {
      const GlobalScale g = scales.global();
      take_four =
          choose_four(exact_error<S>(element, choice.scales.six, g), exact_error<S>(element, choice.scales.four, g));
    }
  }
  const uint8_t scale = choice.scale(take_four);
  if (!choice.quick) return {encode_nearest(v, block_encode_scale(scale, scales.global()), scale), scale};
#pragma unroll
  for (int i = 0; i < kBlock; ++i) six[i] = take_four ? four[i] : six[i];
  return {codes_over_64(six, v), scale};
}

template <class S, class Scales, class Element, class Random>
__device__ __forceinline__ Encoded encode_block(const Values& v, uint32_t amax, const Scales& scales,
                                                const Element& element, const Random& random) {
  if constexpr (kChooses<S>)
    return encode_better<S>(v, amax, scales, element);
  else
    return encode_plain<S>(v, amax, scales, random);
}

// The random bits of a block along rows, by its place in the local array; of one matrix if the scales are shared.
template <class S>
__device__ __forceinline__ void random_of(const SharedScales<S>& scales, const QuantizeArgs& a, int64_t block,
                                          uint32_t (&bits)[4]) {
  const int64_t blocks = a.shape.cols / kBlock, elsewhere = a.stream.row_blocks - blocks;  // of a row, on other devices
  scales.random(elsewhere ? block + quotient(block, blocks) * elsewhere : block, false, bits);
}
template <class S>
__device__ __forceinline__ void random_of(const OwnScales<S>&, const QuantizeArgs& a, int64_t block,
                                          uint32_t (&bits)[4]) {
  const int64_t blocks = a.shape.cols / kBlock, line = quotient(block, blocks), col = block - line * blocks;
  const int64_t matrix = quotient(line, a.shape.rows), row = line - matrix * a.shape.rows;
  const uint4 words = __ldg(reinterpret_cast<const uint4*>(a.stream.words) + matrix);
  const uint32_t key[2] = {words.x, words.y};
  random_bits(key, (words.z | uint64_t{words.w} << 32) + row * a.stream.row_blocks + col, false, bits);
}

// The maximum over the four neighbouring lanes that hold a window; every lane is here.
__device__ __forceinline__ uint32_t window_max(uint32_t m) {
  m = amax_bits(m, __shfl_xor_sync(0xffffffffu, m, 1));
  return amax_bits(m, __shfl_xor_sync(0xffffffffu, m, 2));
}

}  // namespace jnvfp4
