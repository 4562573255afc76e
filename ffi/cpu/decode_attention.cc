// decode_attention on the CPU, in float32, in the order of docs/numerics.md. A piece of work is a sequence and kv head.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "../calls/attention.h"
#include "parallel.h"

namespace jnvfp4 {
namespace {

constexpr int kMostDepth = 128;

// The result of some tokens for a query head. The sums have the factor 2^-v 2688, the sum of weights 2^-m.
struct Partial {
  bool empty = true;
  float m, v, l;
  float sums[kMostDepth];
};

JNVFP4_HD void merge(Partial& into, const Partial& next, int64_t depth) {
  if (into.empty) {
    into = next;
    return;
  }
  const float m = std::fmax(into.m, next.m), v = std::fmax(into.v, next.v);
  into.l = into.l * std::exp2(into.m - m) + next.l * std::exp2(next.m - m);
  const float keep = std::exp2(into.v - v), add = std::exp2(next.v - v);
  for (int64_t d = 0; d < depth; ++d) into.sums[d] = into.sums[d] * keep + next.sums[d] * add;
  into.m = m, into.v = v;
}

// Rows of a chunk, decoded but for the amax.
struct Chunk {
  int count;
  float amax[kChunkTokens];
  float value[kChunkTokens * kMostDepth];

  // Puts element d of token t to t * stride_t + d * stride_d. The rows of a chunk follow each other.
  JNVFP4_HD void decode(const KvRows& rows, int64_t first, int tokens, int64_t depth, int64_t stride_t,
                        int64_t stride_d) {
    count = tokens;
    for (int t = 0; t < tokens; ++t) {
      amax[t] = rows.amax[first + t];
      for (int64_t block = 0; block < depth / kBlock; ++block) {
        const int64_t at = (first + t) * (depth / kBlock) + block;
        float decoded[kBlock];  // q * s for the 16 codes, exact
        for (uint32_t c = 0; c < kBlock; ++c) decoded[c] = mul_rn(e2m1_decode(c), e4m3_decode(rows.scale[at]));
        for (int64_t i = 0; i < kBlock; ++i)
          value[t * stride_t + (block * kBlock + i) * stride_d] =
              decoded[rows.data[at * (kBlock / 2) + i / 2] >> (4 * (i % 2)) & 15u];
      }
    }
  }
};

JNVFP4_HD int exponent_of(const Chunk& values) {
  uint32_t m = 0;
  for (int t = 0; t < values.count; ++t) m = amax_bits(m, bits_of(values.amax[t]) & kMagnitude);
  return bounded_exponent(m);
}

// One query head over a chunk; keys have tokens side by side, values elements.
JNVFP4_HD void attend(const float* q, float factor, const Chunk& keys, const Chunk& values, int exponent, int64_t depth,
                      Partial& out) {
  float x[kChunkTokens] = {};
  for (int64_t d = 0; d < depth; ++d)
    for (int t = 0; t < kChunkTokens; ++t) x[t] += q[d] * keys.value[d * kChunkTokens + t];
  float most = -INFINITY;
  for (int t = 0; t < keys.count; ++t) x[t] *= keys.amax[t] * factor, most = std::fmax(most, x[t]);
  out.empty = false, out.m = std::ceil(most), out.v = out.m + static_cast<float>(exponent), out.l = 0.0f;
  std::fill_n(out.sums, depth, 0.0f);
  for (int t = 0; t < keys.count; ++t) {
    const float p = std::exp2(x[t] - out.m), weight = p * std::ldexp(values.amax[t], -exponent);
    out.l += p;
    for (int64_t d = 0; d < depth; ++d) out.sums[d] += weight * values.value[t * depth + d];
  }
}

// All query heads of a sequence and kv head.
template <class T>
struct AttendRow {
  static JNVFP4_HD void run(const DecodeAttentionArgs& a, int64_t sequence, int64_t head) {
    const KvCacheShape& c = a.cache;
    const int length = static_cast<int>(std::clamp<int64_t>(a.lengths[sequence], 0, c.tokens));
    const int each = segment_tokens(length);
    const int64_t first = (sequence * c.kv_heads + head) * a.group * c.depth;
    const auto* const stored = static_cast<const typename T::Stored*>(a.q) + first;
    std::vector<float> q(a.group * c.depth);
    for (size_t i = 0; i < q.size(); ++i) q[i] = T::load(stored[i]);
    const float factor = score_factor(a.sm_scale);
    std::vector<Partial> segment(a.group), result(4 * a.group);  // results: of every fourth segment
    const auto chunks = std::make_unique<Chunk[]>(2);
    Partial chunk;
    for (int begin = 0; begin < length; begin += kChunkTokens) {
      const int64_t row = c.row(sequence, head, begin);
      const int count = std::min(kChunkTokens, length - begin);
      chunks[0].decode(a.keys, row, count, c.depth, 1, kChunkTokens);
      chunks[1].decode(a.values, row, count, c.depth, c.depth, 1);
      const int exponent = exponent_of(chunks[1]);
      const bool last = begin + kChunkTokens >= length || (begin + kChunkTokens) % each == 0;
      for (int64_t g = 0; g < a.group; ++g) {
        attend(&q[g * c.depth], factor, chunks[0], chunks[1], exponent, c.depth, chunk);
        merge(segment[g], chunk, c.depth);
        if (!last) continue;
        merge(result[4 * g + begin / each % 4], segment[g], c.depth);
        segment[g].empty = true;
      }
    }
    auto* const out = static_cast<typename T::Stored*>(a.out) + first;
    for (int64_t g = 0; g < a.group; ++g) {
      Partial& sum = result[4 * g];
      for (int i = 1; i < 4; ++i)
        if (!result[4 * g + i].empty) merge(sum, result[4 * g + i], c.depth);
      for (int64_t d = 0; d < c.depth; ++d)
        out[g * c.depth + d] = T::store(length ? sum.sums[d] / sum.l * (std::exp2(sum.v - sum.m) / 2688.0f) : 0.0f);
    }
  }
};

ffi::Error run(ffi::ThreadPool pool, const DecodeAttentionArgs& a, std::string_view, void*) {
  const int64_t heads = a.cache.kv_heads;
  with_float(a.kind, [&](auto t) {
    const auto attend_row = Compiled<AttendRow<decltype(t)>>::best();
    parallel_for(pool, a.cache.batch * heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) attend_row(a, i / heads, i % heads);
    });
  });
  return ffi::Error::Success();
}

Device this_cpu() { return {kCpu}; }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DecodeAttention, (decode_attention_call<ffi::ThreadPool, run, this_cpu>),
                              decode_attention_binding().Ctx<ffi::ThreadPool>());

}  // namespace jnvfp4
