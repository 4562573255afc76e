// Times decode attention over an NVFP4 KV cache on Hopper without JAX, in the form of a graph of calls that rotate over
// caches of 400 MB in all: medians of 11 graphs after a rest of 12 ms each.
//
//   attention 8x32768 32x8192 paged:32x8192
//
// BxS: sequences of S tokens, a multiple of 64; 8 KV heads with four query heads each, of 128 elements. "paged:" deals
// the pages of each sequence in descending order. benchmarks/README.md has the command that builds it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/kernels.h"
#include "plan/decode_attention.h"
#include "timing.h"

namespace {

using namespace jnvfp4;

constexpr int64_t kHeads = 8, kGroup = 4, kDepth = 128, kCaches = int64_t{400} << 20;
constexpr int kMostSets = 96;

const int32_t* on_device(const std::vector<int32_t>& values) {
  void* p = nullptr;
  check(cudaMalloc(&p, values.size() * 4), "cudaMalloc");
  check(cudaMemcpy(p, values.data(), values.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  return static_cast<const int32_t*>(p);
}

KvRows random_rows(int64_t rows, uint32_t seed) {
  return {random_bytes(rows * kDepth / 2, seed), random_bytes(rows * kDepth / kBlock, seed + 1, 0x38),
          reinterpret_cast<float*>(random_bytes(rows * 4, seed + 2, 0x3f, 4))};
}

void time(const char* text) {
  const bool paged = std::strncmp(text, "paged:", 6) == 0;
  long batch = 0, tokens = 0;
  if (std::sscanf(paged ? text + 6 : text, "%ldx%ld", &batch, &tokens) != 2 || tokens % kPageTokens) {
    std::fprintf(stderr, "a case must be BxS or paged:BxS, S a multiple of 64, got %s\n", text);
    std::exit(2);
  }
  const int64_t rows = batch * kHeads * tokens, pages = batch * (tokens / kPageTokens);
  const int64_t bytes = 2 * rows * (kDepth / 2 + kDepth / kBlock + 4);
  const int sets = static_cast<int>(std::clamp<int64_t>(kCaches / bytes + 1, 1, kMostSets));
  std::vector<int32_t> table;
  for (int64_t i = 0; i < pages; ++i) table.push_back(static_cast<int32_t>(pages - 1 - i));
  const int64_t heads = batch * kHeads * kGroup;
  const KvCacheShape shape{batch, kHeads, tokens, kDepth, pages, paged ? on_device(table) : nullptr};
  const int32_t* const lengths = on_device(std::vector<int32_t>(static_cast<size_t>(batch), static_cast<int>(tokens)));
  void* const scratch = random_bytes(decode_attention_scratch({batch, kHeads, kGroup, kDepth, tokens}).bytes, 3);
  std::vector<DecodeAttentionArgs> calls;
  for (int i = 0; i < sets; ++i) {
    const auto seed = static_cast<uint32_t>(10 * i);
    calls.push_back({random_bytes(heads * kDepth * 2, seed + 9, 0x3c, 2), random_bytes(heads * kDepth * 2, seed),
                     Float::kBf16, random_rows(rows, seed + 1), random_rows(rows, seed + 5), shape, lengths, kGroup,
                     0.088f});
  }
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  const int count = static_cast<int>(std::clamp(3e6 / (static_cast<double>(bytes) / 2.5e3 + 1e4), 2.0, 96.0));
  const float microseconds = time_products(stream, count, 11, [&](int i) {
    check(launch_decode_attention(calls[static_cast<size_t>(i % sets)], "sm90_nvfp4_attention", scratch, stream),
          "launch");
  });
  std::printf("%s: %.2f us, %.0f GB/s\n", text, microseconds, static_cast<double>(bytes) / microseconds / 1e3);
  check(cudaDeviceReset(), "cudaDeviceReset");
}

}  // namespace

int main(int count, char** cases) {
  for (int i = 1; i < count; ++i) time(cases[i]);
  return 0;
}
