// Times grouped products on Hopper without JAX: graphs of up to 16 products that rotate over sets of weights of 260 MB
// in all at least, medians of 7 graphs after a rest of 12 ms each. Groups have rows proportional to 1 / (i + 1),
// rounded down, the first one the rest, and the last eighth of the groups none.
//
//   grouped w4a4:128:8x14336x4096:64
//
// LEFT:M:GxNxK:TOKENS, with TOKENS as in ffi/plan/sm90_grouped.h, or -1 for what the plan takes; -256 is 256 with
// tails. LEFT is w4a4, bf16 or fp16. The time of one product follows, and its share of 797 TFLOP/s, what bfloat16
// 8192^3 takes on an H200.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/matmul/launchers.h"
#include "plan/sm90_grouped.h"
#include "timing.h"

namespace {

using namespace jnvfp4;

std::vector<int32_t> sizes_of(int64_t rows, int64_t groups) {
  const int64_t active = groups - groups / 8;
  double sum = 0;
  for (int64_t i = 0; i < active; ++i) sum += 1.0 / static_cast<double>(i + 1);
  std::vector<int32_t> v(static_cast<size_t>(groups));
  int64_t rest = rows;
  for (int64_t i = 0; i < active; ++i) {
    v[i] = static_cast<int32_t>(static_cast<double>(rows) / sum / static_cast<double>(i + 1));
    rest -= v[i];
  }
  v[0] += static_cast<int32_t>(rest);
  return v;
}

float time(const std::string& left, const GroupedShape& s, const GroupedTiles& tiles) {
  const bool quantized = left == "w4a4", bf16 = left == "bf16";
  const std::vector<int32_t> sizes = sizes_of(s.rows, s.groups);
  const auto active = std::count_if(sizes.begin(), sizes.end(), [](int32_t n) { return n > 0; });
  const int64_t weights = s.cols * s.depth / 2;
  const int sets = static_cast<int>(std::clamp<int64_t>((int64_t{260} << 20) / (weights * active), 1, 8));
  std::vector<uint8_t*> buffers;
  const auto keep = [&](uint8_t* p) { return buffers.push_back(p), p; };
  auto* const amax = reinterpret_cast<float*>(keep(random_bytes(4 * s.groups, 0, 0x45, 4)));
  uint8_t* const a = keep(random_bytes(s.rows * s.depth * 2, 1, quantized ? 0 : 0x3c, 2));
  uint8_t* const a_scale = keep(random_bytes(s.rows * s.depth / kBlock, 2, 0x38));
  uint8_t* const out = keep(random_bytes(s.rows * s.cols * 2, 3));
  uint8_t* const scratch = keep(random_bytes(grouped_scratch(s, tiles).bytes, 4));
  auto* const on_device = reinterpret_cast<int32_t*>(keep(random_bytes(4 * s.groups, 5)));
  check(cudaMemcpy(on_device, sizes.data(), sizes.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  std::vector<MatmulOperand> b;
  for (int i = 0; i < sets; ++i)
    b.push_back({keep(random_bytes(s.groups * weights, 6u + i)),
                 keep(random_bytes(s.groups * weights / 8, 50u + i, 0x38)), amax, Float::kBf16, AmaxMap{s.cols, 0},
                 448.0f});
  const MatmulOperand operand{a,
                              quantized ? a_scale : nullptr,
                              quantized ? amax : nullptr,
                              bf16 ? Float::kBf16 : Float::kF16,
                              AmaxMap{s.rows, 0},
                              448.0f};
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  const auto product = [&](int i) {
    check(launch_sm90_grouped({operand, b[i % sets], on_device, out, Float::kBf16, s}, tiles, scratch, stream),
          "launch");
  };
  const double flops = 2.0 * static_cast<double>(s.rows) * static_cast<double>(s.cols) * static_cast<double>(s.depth);
  const int count = static_cast<int>(std::clamp(3e-3 / (flops / 6e14 + 40e-6), 2.0, 16.0));
  const float microseconds = time_products(stream, count, 7, product);
  for (uint8_t* p : buffers) check(cudaFree(p), "cudaFree");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  return microseconds;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    char left[8] = {};
    long m = 0, g = 0, n = 0, k = 0;
    int tokens = 0;
    if (std::sscanf(argv[i], "%7[^:]:%ld:%ldx%ldx%ld:%d", left, &m, &g, &n, &k, &tokens) != 6) {
      std::fprintf(stderr, "a case must be LEFT:M:GxNxK:TOKENS, got %s\n", argv[i]);
      return 2;
    }
    const GroupedShape shape{m, g, n, k};
    const GroupedTiles tiles = tokens == -1 ? plan_grouped_tiles(shape) : GroupedTiles{std::abs(tokens), tokens < 0};
    const float microseconds = time(left, shape, tiles);
    std::printf("%-32s %9.2f us  %5.3f of the peak (tokens %d)\n", argv[i], microseconds,
                2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) / microseconds / 797e6,
                tiles.tokens);
  }
}
