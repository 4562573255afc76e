// 4over6: which of two scales a thread's block of 16, or a 16x16 tile, takes.
//
// Errors are first summed in a quick form. Where these sums are too close to decide, the sums of numerics.h do.
// docs/kernels.md derives how close that is.
#pragma once

#include "../../core/numerics_fast.h"
#include "block.cuh"

namespace jnvfp4 {

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
    rounded[i] = round_over(mul_rn(x, factors.encode));
    if constexpr (!kStrict<S>) {
      error = add_error(error, scaled_difference_fused(rounded[i], x, factors.one, encode_all), kSquared<S>);
    } else {
      const float d = __fmaf_rn(rounded[i], factors.one, -x);
      error = kSquared<S> ? __fmaf_rn(d, d, error) : __fadd_rn(error, fabsf(d));
    }
  }
  magnitudes = Magnitudes(rounded);
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
      difference = scaled_difference_fused(q, x, s, g.encode);
    else
      difference = values.apply ? values.difference(q, x) : strict_difference(q, x, s, g);
    sum = add_error(sum, difference, kSquared<S>);
  }
  return sum;
}

// The two candidates of a block or a 16x16 tile under one amax, and whether their quick errors decide between them.
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
    quick = quick_below(amax_bits, six.encode) && quick_below(amax_bits, four.encode) &&
            (scales.six != 0 || amax_bits == 0);
    if (!quick) take(candidate_base(amax_bits, all.encode), all);
    // A squared error of the rule is rounded before it is added.
    const bool by_rule = !kSquared<S> && (six.by_rule & four.by_rule);
    inexact_ = !quick ? float_of(kNan) : by_rule ? -float_of(kInf) : amax;
  }

  __device__ __forceinline__ bool one_scale() const { return scales.six == scales.four; }  // a tie: six
  // Whether the quick errors decide, in any order of their sums.
  __device__ __forceinline__ bool sure(float error_six, float error_four) const {
    const float inexact = kStrict<S> ? amax : 0.0f;  // the fast error of an element is exact
    return quick && fabsf(error_four - error_six) > error_bound<S>(inexact, error_four + error_six);
  }
  // Whether they decide, summed in the order of the rule.
  __device__ __forceinline__ bool decided(float error_six, float error_four) const {
    if constexpr (!kStrict<S>) return quick;
    if constexpr (kTiles<S>) return sure(error_six, error_four);
    return fabsf(error_four - error_six) > error_bound<S>(inexact_, error_four + error_six);
  }
  __device__ __forceinline__ Factors<S> factors(bool take_four) const {
    Factors<S> f = six;
    if (take_four) f = four;
    return f;
  }
  __device__ __forceinline__ uint32_t scale(bool take_four) const { return take_four ? scales.four : scales.six; }
  __device__ __forceinline__ float encode(bool take_four) const { return take_four ? four.encode : six.encode; }

 private:
  // The amax for the bound; -inf, of a bound that each difference exceeds, if the quick sums are those of the rule;
  // NaN, of one that none exceeds, if errors are not quick.
  float inexact_;

  template <class Scales>
  __device__ __forceinline__ void take(float base, const Scales& all) {
    const uint32_t both = e4m3_codes(base, mul_rn(base, 1.5f));
    scales.six = both & 0xffu, scales.four = both >> 8;
    six = all.factors(scales.six), four = all.factors(scales.four);
  }
};

// The strict error where `quick_error` applies, whose factors are times kOver.
__device__ __forceinline__ float strict_error(const Values& v, const ErrorFactors& factors, bool squared) {
  float encode = factors.encode, error = 0.0f;
  asm volatile("" : "+f"(encode));  // rounds again, rather than keep what `quick_error` rounded in registers
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float rounded = round_over(mul_rn(v[i], encode));
    error = add_error(error, strict_difference_by_values(rounded, v[i], factors.one, factors.one_and_half), squared);
  }
  return error;
}

__device__ __forceinline__ Magnitudes chosen_of(bool four, const Magnitudes& with_six, const Magnitudes& with_four) {
  Magnitudes m;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int w = h; w < Magnitudes::kWords; w += 2) m.word[w] = four ? with_four.word[w] : with_six.word[w];
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
// times the other. Their errors are the same, in any order.
template <class S>
__device__ __forceinline__ bool same_values(const Choice<S>& choice, const Magnitudes& six, const Magnitudes& four) {
  return !differ_by_half(six, four) && choice.quick &&
         2.0f * e4m3_decode(static_cast<uint8_t>(choice.scales.four)) ==
             3.0f * e4m3_decode(static_cast<uint8_t>(choice.scales.six));
}

// The compiler moves nothing that follows before this, so that registers hold the rounded values of one candidate at a
// time.
template <class M>
__device__ __forceinline__ void one_after_the_other(float& error, M& m) {
  if constexpr (M::kWords == 2)
    asm volatile("" : "+f"(error), "+r"(m.word[0]), "+r"(m.word[1]));
  else
    asm volatile("" : "+f"(error), "+r"(m.word[0]), "+r"(m.word[1]), "+r"(m.word[2]), "+r"(m.word[3]));
}

// Whether a block of magnitudes `v` takes the scale that maps to 4. `chosen` gets the magnitudes of its codes, if the
// choice is quick.
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
  if (choice.quick) return {with_signs(chosen.codes(), signs), scale};
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

// The lanes that share a 16x16 tile: its amax, and its errors by `tile_error` of numerics.h, from `kFarthest` lanes
// apart to `kNearest`. Both lanes of a step form the same sum.
template <int kFarthest, int kNearest>
struct LaneGroup {
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

// The choice of a 16x16 tile by its quick errors, the same for any order of their sums.
enum class TileChoice : uint8_t { kSix, kFour, kClose };

// Whether a tile takes the scale that maps to 4 by the errors of the rule, for the tiles of the warp that quick errors
// did not decide.
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

// Whether a 16x16 tile takes the scale that maps to 4. `chosen` gets the magnitudes of the codes of the thread's kLines
// lines, if the choice is quick. kByRule: quick errors did not decide before, so that those of the rule are summed at
// once, without magnitudes. `values(j, v)` are the magnitudes of the j-th line, `element(j, i)` is an element of it.
template <class S, bool kByRule, class Lines, int kLines, class Scales, class LineValues, class Element>
__device__ __forceinline__ bool tile_takes_four(const Choice<S>& choice, const Scales& scales, const LineValues& values,
                                                const Element& element, TileChoice* by_quick,
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
    if (by_quick) *by_quick = !sure ? TileChoice::kClose : four ? TileChoice::kFour : TileChoice::kSix;
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

// Encodes a block by itself, with any spec.
template <class S, class X, class Scales, class Element, class Random>
__device__ __forceinline__ Encoded encode_block(const X& x, uint2 signs, uint32_t amax, const Scales& scales,
                                                const Element& element, const Random& random) {
  if constexpr (kChooses<S>)
    return encode_better<S>(x, signs, amax, scales, element);
  else
    return encode_plain<S>(x, signs, amax, scales, random);
}

}  // namespace jnvfp4
