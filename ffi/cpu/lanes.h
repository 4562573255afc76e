// Sixteen blocks at a time, one in each lane of a vector: what quantize does with them.
//
// Every loop over lanes applies the scalar functions of numerics.h, which are free of branches, so the compiler makes
// one vector operation (or several narrower ones) of each of their operations. The 16 elements of a block stay in one
// lane, which keeps sums over a block in their order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../core/numerics_fast.h"
#include "../core/spec.h"

namespace jnvfp4 {

inline constexpr int kLanes = 16;

template <class T>
struct alignas(64) Lanes {
  T lane[kLanes];
  JNVFP4_HD T& operator[](int l) { return lane[l]; }
  JNVFP4_HD const T& operator[](int l) const { return lane[l]; }
};

struct Tile {
  Lanes<float> value[kBlock];  // element i of the block in lane l: value[i][l]

  JNVFP4_HD void block(int l, float* v) const {
    JNVFP4_UNROLL
    for (int i = 0; i < kBlock; ++i) v[i] = value[i][l];
  }
};

// ---------------------------------------------------------------- loads
// Interleaves the halves of n words. Four times over a row-major matrix of 16 rows is its transpose.
template <int n>
JNVFP4_HD void riffle(const uint32_t* __restrict in, uint32_t* __restrict out) {
  for (int k = 0; k < n / 2; ++k) out[2 * k] = in[k], out[2 * k + 1] = in[k + n / 2];
}

// Blocks stored one after the other or one in each row: that of lane l begins at x[l * stride].
template <class L>
JNVFP4_HD void load_rows(const void* x, int64_t stride, int count, Tile& t) {
  using Stored = typename L::Stored;
  constexpr int kWords = kBlock * sizeof(Stored) / sizeof(uint32_t), kAll = kWords * kLanes;
  alignas(64) uint32_t a[kAll], b[kAll];
  if (count < kLanes) std::memset(a, 0, sizeof a);
  for (int l = 0; l < count; ++l)
    std::memcpy(a + l * kWords, static_cast<const Stored*>(x) + l * stride, kWords * sizeof(uint32_t));
  riffle<kAll>(a, b), riffle<kAll>(b, a), riffle<kAll>(a, b), riffle<kAll>(b, a);
  if constexpr (sizeof(Stored) == sizeof(uint16_t)) {  // a word is elements 2 i and 2 i + 1
    for (int i = 0; i < kWords; ++i)
      for (int l = 0; l < kLanes; ++l) {
        t.value[2 * i][l] = L::load(static_cast<Stored>(a[i * kLanes + l] & 0xffffu));
        t.value[2 * i + 1][l] = L::load(static_cast<Stored>(a[i * kLanes + l] >> 16));
      }
  } else {
    for (int i = 0; i < kWords; ++i)
      for (int l = 0; l < kLanes; ++l) t.value[i][l] = L::load(a[i * kLanes + l]);
  }
}

// Blocks stored along columns: element i of the block of lane l is x[i * stride + l].
template <class L>
JNVFP4_HD void load_columns(const void* x, int64_t stride, int count, Tile& t) {
  const auto* p = static_cast<const typename L::Stored*>(x);
  if (count < kLanes) std::memset(&t, 0, sizeof t);
  for (int i = 0; i < kBlock; ++i)
    if (count == kLanes)
      for (int l = 0; l < kLanes; ++l) t.value[i][l] = L::load(p[i * stride + l]);
    else
      for (int l = 0; l < count; ++l) t.value[i][l] = L::load(p[i * stride + l]);
}

// The inverse of load_rows with blocks stored one after the other, rounded to the type.
template <class L>
JNVFP4_HD void store_rows(const Tile& t, int count, void* x) {
  using Stored = typename L::Stored;
  constexpr int kWords = kBlock * sizeof(Stored) / sizeof(uint32_t), kAll = kWords * kLanes;
  alignas(64) uint32_t a[kAll], b[kAll];
  if constexpr (sizeof(Stored) == sizeof(uint16_t)) {
    for (int i = 0; i < kWords; ++i)
      for (int l = 0; l < kLanes; ++l)
        b[i * kLanes + l] = L::store(t.value[2 * i][l]) | uint32_t{L::store(t.value[2 * i + 1][l])} << 16;
  } else {
    for (int i = 0; i < kWords; ++i)
      for (int l = 0; l < kLanes; ++l) a[i * kLanes + l] = L::store(t.value[i][l]);
    riffle<kAll>(a, b);
  }
  riffle<kAll>(b, a), riffle<kAll>(a, b), riffle<kAll>(b, a);
  std::memcpy(x, a, static_cast<size_t>(count) * kBlock * sizeof(Stored));
}

// ---------------------------------------------------------------- amax of rows and columns
// Stored numbers without their sign, as integers, are in the order of their magnitudes, NaN last. Signed ones: SSE2 has
// their maximum.
template <class L>
using Ordered = std::make_signed_t<typename L::Stored>;

template <class L>
JNVFP4_HD Ordered<L> magnitude(typename L::Stored v) {
  return static_cast<Ordered<L>>(v & std::numeric_limits<Ordered<L>>::max());
}

template <class L>
JNVFP4_HD float amax_of(Ordered<L> magnitude) {
  return float_of(canonical_nan(bits_of(L::load(static_cast<typename L::Stored>(magnitude)))));
}

template <class L>
JNVFP4_HD float row_amax(const void* x, int64_t count) {
  const auto* p = static_cast<const typename L::Stored*>(x);
  Ordered<L> m = 0;
  for (int64_t i = 0; i < count; ++i) m = std::max(m, magnitude<L>(p[i]));
  return amax_of<L>(m);
}

// Finds the amax of each of `width` columns, at most 64.
template <class L>
JNVFP4_HD void column_amax(const void* x, int64_t stride, int64_t count, int width, float* amax) {
  const auto* p = static_cast<const typename L::Stored*>(x);
  alignas(64) Ordered<L> m[64] = {};
  for (int64_t i = 0; i < count; ++i)
    if (width == 64)
      for (int j = 0; j < 64; ++j) m[j] = std::max(m[j], magnitude<L>(p[i * stride + j]));
    else
      for (int j = 0; j < width; ++j) m[j] = std::max(m[j], magnitude<L>(p[i * stride + j]));
  for (int j = 0; j < width; ++j) amax[j] = amax_of<L>(m[j]);
}

// ---------------------------------------------------------------- one operation on every lane
JNVFP4_HD void rotate(Tile& t) {
  for (int l = 0; l < kLanes; ++l) {
    float v[kBlock];
    t.block(l, v);
    rht16(v);
    JNVFP4_UNROLL
    for (int i = 0; i < kBlock; ++i) t.value[i][l] = v[i];
  }
}

JNVFP4_HD void rotate_back(Tile& t) {
  for (int l = 0; l < kLanes; ++l) {
    float v[kBlock];
    t.block(l, v);
    rht16_inverse(v);
    JNVFP4_UNROLL
    for (int i = 0; i < kBlock; ++i) t.value[i][l] = v[i];
  }
}

// m[l] becomes the maximum of itself and the magnitudes of the block.
JNVFP4_HD void raise_amax(const Tile& t, Lanes<uint32_t>& m) {
  for (int l = 0; l < kLanes; ++l) {
    uint32_t a = m[l];
    JNVFP4_UNROLL
    for (int i = 0; i < kBlock; ++i) a = amax_bits(a, bits_of(t.value[i][l]) & kMagnitude);
    m[l] = a;
  }
}

// The GlobalScale of each lane.
struct GlobalLanes {
  Lanes<float> encode, decode, block_mult, amax;
  float max6, inv_max6;

  JNVFP4_HD void set(const Lanes<float>& given, float e4m3_max) {
    max6 = 6.0f * e4m3_max, inv_max6 = reciprocal_max6(e4m3_max);
    for (int l = 0; l < kLanes; ++l) {
      const GlobalScale g = global_scale(given[l], e4m3_max);
      encode[l] = g.encode, decode[l] = g.decode, block_mult[l] = g.block_mult, amax[l] = g.amax;
    }
  }
  JNVFP4_HD GlobalScale operator[](int l) const {
    return {encode[l], decode[l], block_mult[l], amax[l], max6, inv_max6};
  }
};

using Random = Lanes<uint32_t>[4];  // the four words of each lane

// Position in Philox's stream for each lane: key and counter.
struct RandomPlaces {
  Lanes<uint32_t> key[2], low, high;

  JNVFP4_HD void read(bool transposed, Random& random) const {
    for (int l = 0; l < kLanes; ++l) {
      uint32_t word[4];
      random_bits({key[0][l], key[1][l]}, low[l] | uint64_t{high[l]} << 32, transposed, word);
      JNVFP4_UNROLL
      for (int j = 0; j < 4; ++j) random[j][l] = word[j];
    }
  }
};

// Sixteen blocks as they are stored.
struct Encoded {
  Lanes<uint64_t> codes;
  Lanes<uint8_t> scale;
};

// A NaN scale has only codes 0. magnitude(bits, i, l) rounds element i.
template <class Magnitude>
JNVFP4_HD void encode(const Tile& t, const GlobalLanes& g, const Lanes<uint32_t>& scales, Encoded& out,
                      Magnitude magnitude) {
  Lanes<uint32_t> low, high;
  for (int l = 0; l < kLanes; ++l) {
    const float scale = block_encode_scale(scales[l], g[l]);
    uint32_t half[2] = {0, 0};
    JNVFP4_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t b = bits_of(mul_rn(t.value[i][l], scale));
      half[i / 8] |= (magnitude(b & kMagnitude, i, l) | (b & kSign) >> 28) << (4 * (i % 8));
    }
    const uint32_t keep = scales[l] == kScaleNan ? 0u : ~0u;
    low[l] = half[0] & keep, high[l] = half[1] & keep;
  }
  for (int l = 0; l < kLanes; ++l) out.codes[l] = low[l] | uint64_t{high[l]} << 32;
  for (int l = 0; l < kLanes; ++l) out.scale[l] = static_cast<uint8_t>(scales[l]);
}

// ---------------------------------------------------------------- 4over6
struct CandidateLanes {
  Lanes<uint32_t> six, four;
};

enum class ErrorBy { kValues, kDivision, kScaled };

// The error of a block rounded with `scale`.
template <ErrorBy kBy, bool kSquared>
JNVFP4_HD float row_error(const Tile& t, int l, const GlobalScale& g, uint32_t scale) {
  const float s = e4m3_decode(scale), enc = block_encode_scale(scale, g);
  float x[kBlock], q[kBlock];
  t.block(l, x);
  JNVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) q[i] = e2m1_round(mul_rn(x[i], enc));
  return kBy == ErrorBy::kValues     ? row_error_by_values(x, q, StrictValues(s, g), kSquared)
         : kBy == ErrorBy::kDivision ? row_error_strict(x, q, s, g, kSquared)
                                     : row_error_scaled(x, q, s, g, kSquared);
}

template <ErrorBy kBy, bool kSquared>
JNVFP4_HD void row_errors(const Tile& t, const GlobalLanes& g, const Lanes<uint32_t>& scale, Lanes<float>& error) {
  for (int l = 0; l < kLanes; ++l) error[l] = row_error<kBy, kSquared>(t, l, g[l], scale[l]);
}

// Whether the blocks with two different candidates can do without a division for each element.
JNVFP4_HD bool all_by_values(const CandidateLanes& c, const GlobalLanes& g) {
  uint32_t bad = 0;
  for (int l = 0; l < kLanes; ++l) {
    const uint32_t six = StrictValues(e4m3_decode(c.six[l]), g[l]).apply;
    const uint32_t four = StrictValues(e4m3_decode(c.four[l]), g[l]).apply;
    bad |= ((six & four) ^ 1u) & static_cast<uint32_t>(c.six[l] != c.four[l]);
  }
  return !bad;
}

template <ErrorBy kBy, class S>
JNVFP4_HD void choose_by(const Tile& t, const GlobalLanes& g, const CandidateLanes& c, Lanes<uint32_t>& scale) {
  constexpr bool squared = S::spec.select == Select::kMse;
  Lanes<float> six, four;
  row_errors<kBy, squared>(t, g, c.six, six);
  row_errors<kBy, squared>(t, g, c.four, four);
  if constexpr (S::spec.block_rows == kBlock) {  // the lanes are the rows of a tile
    std::fill_n(six.lane, kLanes, tile_error(six.lane));
    std::fill_n(four.lane, kLanes, tile_error(four.lane));
  }
  for (int l = 0; l < kLanes; ++l) scale[l] = choose_four(six[l], four[l]) ? c.four[l] : c.six[l];
}

// The scale of each block by its candidates' errors. Equal candidates have equal errors, by any rule: a tie.
template <class S>
JNVFP4_HD void choose_scales(const Tile& t, const GlobalLanes& g, const Lanes<uint32_t>& amax, Lanes<uint32_t>& scale) {
  CandidateLanes c;
  for (int l = 0; l < kLanes; ++l) {
    const Candidates pair = candidate_scales(amax[l], g.encode[l]);
    c.six[l] = pair.six, c.four[l] = pair.four;
  }
  if constexpr (S::spec.error_math == ErrorMath::kFp16)
    choose_by<ErrorBy::kScaled, S>(t, g, c, scale);
  else if (all_by_values(c, g))
    choose_by<ErrorBy::kValues, S>(t, g, c, scale);
  else
    choose_by<ErrorBy::kDivision, S>(t, g, c, scale);
}

// ---------------------------------------------------------------- search
// The best of the scales around the plain ones.
JNVFP4_HD void search_scales(const Tile& t, const GlobalLanes& g, Lanes<uint32_t>& scale) {
  const Lanes<uint32_t> rule = scale;
  Lanes<float> least;
  std::fill_n(least.lane, kLanes, float_of(kInf));
  for (int i = 0; i < kSearched; ++i) {
    const int offset = search_offset(i);
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t candidate = search_candidate(rule[l], offset);
      const float error = row_error<ErrorBy::kScaled, true>(t, l, g[l], candidate);
      // By masks: GCC makes a branch around a conditional store, and then no vectors where stores have no masks.
      const uint32_t lower = 0u - static_cast<uint32_t>(improves(error, least[l]));
      scale[l] ^= (scale[l] ^ candidate) & lower;
      least[l] = float_of(bits_of(least[l]) ^ ((bits_of(least[l]) ^ bits_of(error)) & lower));
    }
  }
}

// ---------------------------------------------------------------- sixteen blocks
// The scale of each block, after the rotation.
template <class S>
JNVFP4_HD void find_scales(Tile& t, const GlobalLanes& g, float given_headroom, Lanes<uint32_t>& scale) {
  const float headroom = S::spec.rounding == Rounding::kStochastic ? given_headroom : 1.0f;
  if constexpr (S::spec.rht) rotate(t);
  Lanes<uint32_t> amax = {};
  raise_amax(t, amax);
  if constexpr (S::spec.block_rows == kBlock)
    std::fill_n(amax.lane, kLanes, *std::max_element(amax.lane, amax.lane + kLanes));
  if constexpr (S::spec.select == Select::kMae || S::spec.select == Select::kMse) {
    choose_scales<S>(t, g, amax, scale);
  } else {
    for (int l = 0; l < kLanes; ++l) scale[l] = block_scale_of_lane(amax[l], g[l], headroom);
    if constexpr (S::spec.select == Select::kSearch) search_scales(t, g, scale);
  }
}

// Up to 16 blocks of the result: that of lane l is block + l * step.
struct Group {
  const void* source;
  int64_t stride;
  int count;
  int64_t block, step;
};

struct Work {
  Group group;
  Tile tile;
  GlobalLanes global;
  RandomPlaces places;  // read by stochastic specs only
  Encoded out;
};

// Groups quantized by one call: while the scales of one wait for divisions, the processor works on the next.
inline constexpr int kBatch = 4;

// Makes codes and scales of tiles and global scales.
template <class S>
JNVFP4_HD void quantize_batch(Work* work, int count, bool transposed, float headroom) {
  Lanes<uint32_t> scale[kBatch];
  for (int k = 0; k < count; ++k) find_scales<S>(work[k].tile, work[k].global, headroom, scale[k]);
  for (int k = 0; k < count; ++k) {
    Work& w = work[k];
    if constexpr (S::spec.rounding == Rounding::kStochastic) {
      Random random;
      w.places.read(transposed, random);
      encode(w.tile, w.global, scale[k], w.out, [&](uint32_t magnitude, int i, int l) {
        return e2m1_magnitude_stochastic(magnitude, random[i / 4][l] >> (8 * (i % 4)) & 0xffu);
      });
    } else {
      encode(w.tile, w.global, scale[k], w.out, [](uint32_t magnitude, int, int) { return e2m1_magnitude(magnitude); });
    }
  }
}

}  // namespace jnvfp4
