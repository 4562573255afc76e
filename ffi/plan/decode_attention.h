// Which kernel computes decode attention, how it divides a sequence, and its scratch.
#pragma once

#include <cstdint>

#include "../core/kv_cache.h"
#include "scratch.h"
#include "table.h"

namespace jnvfp4 {

struct DecodeAttentionProblem {
  int64_t batch, kv_heads, group, depth, tokens;  // tokens: for which a sequence has room
};

extern const KernelTable<DecodeAttentionProblem> kDecodeAttentionKernels;

// A chunk is computed by itself; chunks are merged into segments, segments into the result (docs/numerics.md).
inline constexpr int kChunkTokens = 64, kLeastSegment = 256, kMostSegments = 32;
static_assert(kChunkTokens == kPageTokens, "a chunk lies in one page");

// Tokens of a segment: the least that leave at most kMostSegments. It depends on the sequence's length alone, and so do
// the sums.
JNVFP4_HD int segment_tokens(int length) {
  int tokens = kLeastSegment;
  while (int64_t{tokens} * kMostSegments < length) tokens *= 2;
  return tokens;
}
JNVFP4_HD int num_segments(int length) {
  const int tokens = segment_tokens(length);
  return (length + tokens - 1) / tokens;
}
// The exponent of the largest V amax of a chunk, by its bits, bounded so that what divides by it is a normal number, on
// Hopper 2^14 times that.
JNVFP4_HD int bounded_exponent(uint32_t amax) {
  const int e = static_cast<int>(amax >> 23) - 127, least = e < -113 ? -113 : e;
  return least > 127 ? 127 : least;
}
// What turns the products of codes, scales and amaxes into powers of two.
JNVFP4_HD float score_factor(float sm_scale) { return sm_scale * 1.44269504f / 2688.0f; }  // log2(e)
// Of any sequence that has no more tokens.
inline int64_t max_segments(int64_t tokens) {
  const int64_t n = (tokens + kLeastSegment - 1) / kLeastSegment;
  return n < kMostSegments ? n : kMostSegments;
}

// Results of segments, for each query head: depth sums, then a float4.
struct DecodeAttentionScratch {
  int64_t sums, heads, bytes;
};
inline DecodeAttentionScratch decode_attention_scratch(const DecodeAttentionProblem& p) {
  DecodeAttentionScratch s{};
  const int64_t results = p.batch * p.kv_heads * p.group * max_segments(p.tokens);
  s.sums = take_scratch(results * p.depth * 4, &s.bytes);
  s.heads = take_scratch(results * 16, &s.bytes);
  return s;
}

}  // namespace jnvfp4
