// The KV cache of decode attention: where its rows lie, and how a row is quantized.
#pragma once

#include <cstdint>

#include "numerics.h"

namespace jnvfp4 {

inline constexpr int kPageTokens = 64;

// Rows of K or of V, one for each token of a sequence and kv head, as tensors of spec ROW_SCALED have them: [batch,
// kv_heads, tokens], or, with a table of pages, [num_pages, kv_heads, 64].
struct KvCacheShape {
  int64_t batch, kv_heads, tokens, depth;  // tokens: for which a sequence has room, a multiple of 64
  int64_t num_pages;
  const int32_t* pages;  // [batch, tokens / 64]; null: contiguous

  // The page of a token below `tokens`, as the table has it.
  JNVFP4_HD int64_t page(int64_t sequence, int64_t token) const {
    return pages[sequence * (tokens / kPageTokens) + token / kPageTokens];
  }
  // The row of a token. A page that is none counts as the nearest: it is not read outside of the cache.
  JNVFP4_HD int64_t row(int64_t sequence, int64_t head, int64_t token) const {
    if (!pages) return (sequence * kv_heads + head) * tokens + token;
    const int64_t p = page(sequence, token), last = num_pages - 1;
    return ((p < 0 ? 0 : p > last ? last : p) * kv_heads + head) * kPageTokens + token % kPageTokens;
  }
  // Whether there is a row for a token.
  JNVFP4_HD bool has(int64_t sequence, int64_t token) const {
    if (token < 0 || token >= tokens) return false;
    return !pages || (page(sequence, token) >= 0 && page(sequence, token) < num_pages);
  }
};

struct KvRows {
  const uint8_t* data;   // depth / 2 each
  const uint8_t* scale;  // depth / 16 each
  const float* amax;
};
struct KvRowsOut {
  uint8_t* data;
  uint8_t* scale;
  float* amax;
};

// The bits of the largest magnitude of a block, as amax_bits orders them.
JNVFP4_HD uint32_t block_amax(const float (&v)[kBlock]) {
  uint32_t m = 0;
  JNVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) m = amax_bits(m, bits_of(v[i]) & kMagnitude);
  return m;
}

// Writes a block by the rule of ROW_SCALED, `g` of the row's amax: e4m3_max is 448.
JNVFP4_HD void put_block(const KvRowsOut& out, int64_t block, const float (&v)[kBlock], const GlobalScale& g) {
  const ScaleByte scale = block_scale(canonical_nan(block_amax(v)), g, 1.0f);
  const float encode = block_encode_scale(scale, g);
  uint32_t codes[2] = {};
  JNVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) codes[i / 8] |= e2m1_encode(mul_rn(v[i], encode)) << (4 * (i % 8));
  out.scale[block] = static_cast<uint8_t>(scale);
  std::memcpy(__builtin_assume_aligned(out.data + block * (kBlock / 2), 8), codes, sizeof codes);
}

}  // namespace jnvfp4
