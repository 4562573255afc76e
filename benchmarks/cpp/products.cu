// Times GEMM kernels on Hopper without JAX, in the form of a graph of up to 32 products that rotate over weights of
// 260 MB in all: medians of 11 graphs after a rest of 12 ms each. For work on the kernels; docs/kernels.md has results.
//
//   products w4a4:64x14336x4096:64:1 bf16:8x14336x4096:0:0 pinned:64x14336x4096:0:0
//
// LEFT:MxNxK:TOKENS:SPLITS, and :WHOLE for tiles whose K has no parts. LEFT is w4a4, bf16 or fp16; TOKENS is a tile of
// the fused kernel, or 0 for that of few rows. LEFT is pinned, or windows with window64 on both sides, for the pinned
// order: TOKENS is then 8, 16, 32 or 64 rows per CTA, 0 for what the launcher takes, or 128 for the kernel of
// any number of rows. LEFT is fast-a, fast-b or fast-ab for sm90_nvfp4_windows with windows on these sides: TOKENS is
// then 192, or 128 for both. LEFT is codes, numbers or amaxes for the kernel of the pinned order on Hopper with b as
// codes, decoded to scratch, or with windows on both sides too: TOKENS is then 64, 128 or 256; the others plan theirs.
// benchmarks/README.md has the commands that build it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/matmul/launchers.h"
#include "plan/sm80_blocks.h"
#include "plan/sm90_pinned.h"
#include "plan/sm90_windows.h"
#include "timing.h"

namespace {

using namespace jnvfp4;

constexpr int64_t kWeights = int64_t{260} << 20;

struct Case {
  std::string left;
  GemmShape shape;
  FusedPlan plan;

  bool fast() const { return left.rfind("fast-", 0) == 0; }
  bool a_windows() const { return left == "windows" || left == "amaxes" || left == "fast-a" || left == "fast-ab"; }
  bool b_windows() const { return left == "windows" || left == "amaxes" || left == "fast-b" || left == "fast-ab"; }
  bool pinned() const { return left == "pinned" || left == "windows"; }
  bool pinned_tiles() const { return left == "codes" || left == "numbers" || left == "amaxes"; }
  bool fused() const { return !pinned() && !fast() && !pinned_tiles() && plan.tokens; }
  PinnedPlan pinned_plan() const {
    return left == "codes" ? PinnedPlan{plan.tokens, Pinned::kCodes} : plan_pinned_prepared(left == "amaxes");
  }
  int64_t scratch() const {
    const GemmShape s = fused_shape(shape, plan);
    return fast()           ? windows_scratch(s, plan).bytes
           : fused()        ? fused_scratch(s, plan).bytes
           : pinned_tiles() ? pinned_scratch(s, pinned_plan()).bytes
                            : blocks_scratch(s).bytes;
  }
};

void launch(const Case& c, const MatmulArgs& args, void* scratch, cudaStream_t stream) {
  check(c.fast()               ? launch_sm90_windows(args, c.plan, scratch, stream)
        : c.fused()            ? launch_sm90_fused(args, c.plan, scratch, stream)
        : c.pinned_tiles()     ? launch_sm90_pinned(args, c.pinned_plan(), scratch, stream)
        : !c.pinned()          ? launch_sm90_small_m(args, stream)
        : c.plan.tokens == 128 ? launch_sm80_nvfp4_blocks(args, scratch, stream)
                               : launch_sm80_nvfp4_blocks_small_m(args, stream, c.plan.tokens),
        "launch");
}

Case parse(const char* text) {
  char left[8] = {};
  long m = 0, n = 0, k = 0;
  int tokens = 0, splits = 0;
  long whole = 0;
  const bool parsed =
      std::sscanf(text, "%7[^:]:%ldx%ldx%ld:%d:%d:%ld", left, &m, &n, &k, &tokens, &splits, &whole) >= 6;
  const Case c{left, {1, m, n, k}, {tokens, splits, std::string(left) == "fast-a", whole}};
  if (!parsed || ((c.fused() || c.fast()) && (splits < 1 || (splits > 1 && 2 * splits > (k + 255) / 256)))) {
    std::fprintf(stderr, "a case must be LEFT:MxNxK:TOKENS:SPLITS, got %s\n", text);
    std::exit(2);
  }
  return c;
}

// The medians of 11, in microseconds of a product.
float time(const Case& c) {
  const GemmShape& s = c.shape;
  const bool quantized = c.left == "w4a4" || c.pinned() || c.fast() || c.pinned_tiles(), bf16 = c.left == "bf16";
  const int64_t windows = s.depth / kWindow;
  const int sets = static_cast<int>(std::clamp<int64_t>(kWeights / (s.cols * s.depth / 2), 2, 8));
  std::vector<uint8_t*> buffers;
  const auto keep = [&](uint8_t* p) { return buffers.push_back(p), p; };
  const int64_t amaxes = std::max<int64_t>(1, std::max(s.rows, s.cols) * windows);
  auto* const amax = reinterpret_cast<float*>(keep(random_bytes(4 * amaxes, 0, 0x45, 4)));
  uint8_t* const a = keep(random_bytes(s.rows * s.depth * 2, 1, quantized ? 0 : 0x3c, 2));
  uint8_t* const a_scale = keep(random_bytes(s.rows * s.depth / kBlock, 2, 0x38));
  uint8_t* const out = keep(random_bytes(s.rows * s.cols * 2, 3));
  uint8_t* const scratch = keep(random_bytes(c.scratch() + 1, 4));
  std::vector<MatmulOperand> weights;
  for (int i = 0; i < sets; ++i)
    weights.push_back({keep(random_bytes(s.cols * s.depth / 2, 5u + i)),
                       keep(random_bytes(s.cols * s.depth / kBlock, 50u + i, 0x38)), amax, Float::kBf16,
                       AmaxMap{s.cols, c.b_windows() ? windows : 0}, 448.0f});
  const MatmulOperand left{a,
                           quantized ? a_scale : nullptr,
                           quantized ? amax : nullptr,
                           bf16 ? Float::kBf16 : Float::kF16,
                           AmaxMap{s.rows, c.a_windows() ? windows : 0},
                           448.0f};
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  const auto product = [&](int i) {
    launch(c, {left, weights[i % sets], {nullptr, Float::kBf16, out, Float::kBf16}, s}, scratch, stream);
  };
  const double products =
      2.0 * static_cast<double>(s.rows) * static_cast<double>(s.cols) * static_cast<double>(s.depth);
  const int count = static_cast<int>(std::clamp(3e-3 / (products / 8e14 + 20e-6), 2.0, 32.0));
  const float microseconds = time_products(stream, count, 11, product);
  for (uint8_t* p : buffers) check(cudaFree(p), "cudaFree");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  return microseconds;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) std::printf("%-32s %8.2f us\n", argv[i], time(parse(argv[i])));
}
