#include "decode_attention.h"

namespace jnvfp4 {
namespace {

// A reason, or null.
const char* needs_depth(const DecodeAttentionProblem& p) {
  return p.depth == 64 || p.depth == 128 ? nullptr : "D must be 64 or 128";
}
constexpr int64_t kMost = int64_t{1} << 30;
// What every kernel counts in 32 bits: tokens of a sequence, and those of a chunk more.
const char* needs_tokens(const DecodeAttentionProblem& p) {
  return p.tokens <= kMost ? nullptr : "it takes at most 2^30 tokens of a sequence";
}
// What kernels for GPUs count in 32 bits: results of segments and chunks of the cache.
const char* needs_sizes(const DecodeAttentionProblem& p) {
  const bool small = p.batch <= kMost && p.kv_heads <= kMost && p.group <= kMost;
  const int64_t rows = small ? p.batch * p.kv_heads : kMost;
  const bool fits = small && rows <= kMost / kMostSegments && rows * p.group <= kMost / kMostSegments &&
                    rows * (p.tokens / kChunkTokens) <= kMost;
  return fits ? nullptr : "it takes at most 2^25 query heads over all sequences, and 2^36 rows of the cache";
}

int64_t scratch(const DecodeAttentionProblem& p) { return decode_attention_scratch(p).bytes; }

constexpr KernelRow<DecodeAttentionProblem> kRows[] = {
    {"sm90_nvfp4_attention", kSm90a, all<needs_depth, needs_tokens, needs_sizes>, {.scratch = scratch}},
    {"sm80_nvfp4_attention", kAnyGpuFrom80, all<needs_depth, needs_tokens, needs_sizes>, {.scratch = scratch}},
    {"cpu_nvfp4_attention", kCpuAlone, all<needs_depth, needs_tokens>},
};

}  // namespace

const KernelTable<DecodeAttentionProblem> kDecodeAttentionKernels(kRows);

}  // namespace jnvfp4
