#include "matmul_plan.h"

#include <algorithm>

namespace jnvfp4 {
namespace {

using Left = MatmulProblem::Left;

// A reason, or null.
const char* needs_nvfp4(const MatmulProblem& p) {
  return p.a == Left::kNvfp4 ? nullptr : "its left operand must be an NVFP4 tensor";
}
const char* needs_dense(const MatmulProblem& p) {
  if (p.a == Left::kNvfp4) return "its left operand must be a bfloat16 or float16 array";
  return p.windows ? "it takes no operand with amax_scope=\"window64\"" : nullptr;
}
const char* needs_free_order(const MatmulProblem& p) {
  if (p.pinned) return "its order of summation is not pinned";
  return p.windows ? "it takes no operand with amax_scope=\"window64\"" : nullptr;
}
// The coordinates of tensor maps are 32-bit integers.
const char* needs_narrow(const MatmulProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const GemmShape& s = p.shape;
  const bool fits = s.batch * s.rows <= kMost && s.batch * s.cols <= kMost && s.depth <= kMost;
  return fits ? nullptr : "it takes at most 2^30 rows of either operand, over all matrices, and K of at most 2^30";
}
const char* needs_fused_nvfp4(const MatmulProblem& p) {
  if (const char* reason = needs_nvfp4(p)) return reason;
  if (const char* reason = needs_free_order(p)) return reason;
  return needs_narrow(p);
}
const char* needs_fused_dense(const MatmulProblem& p) {
  if (const char* reason = needs_dense(p)) return reason;
  if (const char* reason = needs_free_order(p)) return reason;
  return needs_narrow(p);
}

// What the kernels of few rows count in 32 bits, with room for what they multiply it by.
const char* needs_few_rows(const MatmulProblem& p) {
  if (const char* reason = needs_free_order(p)) return reason;
  const GemmShape& s = p.shape;
  constexpr int64_t kMost = int64_t{1} << 30;
  if (s.rows > 64) return "M must be at most 64";
  if (s.depth > kMost) return "K must be at most 2^30";
  const int64_t groups = (s.cols + 15) / 16;
  return s.cols > kMost || groups * s.batch > kMost / 16 ? "N times the batch is too large" : nullptr;
}
const char* needs_nvfp4_and_few_rows(const MatmulProblem& p) {
  const char* reason = needs_nvfp4(p);
  return reason ? reason : needs_few_rows(p);
}
const char* needs_dense_and_few_rows(const MatmulProblem& p) {
  const char* reason = needs_dense(p);
  return reason ? reason : needs_few_rows(p);
}

struct Row {
  MatmulKernel kernel;
  std::string_view name;
  int least, most;  // compute capabilities, or kCpu
  const char* (*cannot)(const MatmulProblem&);
};

constexpr int kHopper = 90, kNewest = 999;

// In order of preference. An H200 takes 1548 us for 8192^3 by decode_then_dot and 17276 us by sm80_nvfp4_blocks (commit
// 498bfa0, benchmarks/results/h200_gemm.json), so the pinned kernels run only where the order asks for them. The
// kernels of Hopper run only by name until they are measured.
constexpr Row kTable[] = {
    {MatmulKernel::kDecodeThenDot, "decode_then_dot", kAnyGpu, kNewest, needs_free_order},
    {MatmulKernel::kSm90Nvfp4SmallM, "sm90_nvfp4_small_m", kHopper, kHopper, needs_nvfp4_and_few_rows},
    {MatmulKernel::kSm90DenseSmallM, "sm90_dense_small_m", kHopper, kHopper, needs_dense_and_few_rows},
    {MatmulKernel::kSm90Nvfp4Fused, "sm90_nvfp4_fused", kHopper, kHopper, needs_fused_nvfp4},
    {MatmulKernel::kSm90DenseFused, "sm90_dense_fused", kHopper, kHopper, needs_fused_dense},
    {MatmulKernel::kSm80Nvfp4Blocks, "sm80_nvfp4_blocks", kAnyGpu, kNewest, needs_nvfp4},
    {MatmulKernel::kSm80DenseElements, "sm80_dense_elements", kAnyGpu, kNewest, needs_dense},
    {MatmulKernel::kCpuNvfp4Blocks, "cpu_nvfp4_blocks", kCpu, kCpu, needs_nvfp4},
    {MatmulKernel::kCpuDenseElements, "cpu_dense_elements", kCpu, kCpu, needs_dense},
};
static_assert(sizeof kTable / sizeof kTable[0] == kMatmulKernels, "each kernel has one row");

const Row& row_of(MatmulKernel kernel) {
  for (const Row& row : kTable)
    if (row.kernel == kernel) return row;
  return kTable[0];  // not reached: each kernel has one row
}

std::string device_text(int capability) {
  if (capability == kCpu) return "the CPU";
  return "compute capability " + std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

}  // namespace

std::string_view name_of(MatmulKernel kernel) { return row_of(kernel).name; }

bool find_kernel(std::string_view name, MatmulKernel* kernel) {
  for (const Row& row : kTable)
    if (row.name == name) return *kernel = row.kernel, true;
  return false;
}

std::string why_not(MatmulKernel kernel, const MatmulProblem& problem, int capability) {
  const Row& row = row_of(kernel);
  if (capability < row.least || capability > row.most) {
    const char* which = row.most == kCpu ? "" : row.most == row.least ? "GPUs of " : "GPUs from ";
    return std::string(row.name) + " runs on " + which + device_text(row.least) + ", not on " + device_text(capability);
  }
  const char* reason = row.cannot(problem);
  return reason ? std::string(row.name) + " cannot: " + reason : std::string();
}

int64_t fused_sums(int64_t tiles, const FusedPlan& plan) {
  return tiles * (plan.splits - 1) * plan.tokens * kFusedCols * fused_teams(plan.tokens);
}

// Least time, in cycles, for 66 pairs of thread blocks, as an H200 has them.
FusedPlan plan_fused(const GemmShape& s) {
  struct Tile {
    int tokens;
    double window, end;  // cycles for 64 along K, and for a tile's results
  };
  constexpr Tile kTiles[] = {{32, 380, 2500}, {64, 400, 2800}, {128, 570, 3500}, {256, 1060, 5000}};
  constexpr int64_t kPairs = 66, kMostSums = int64_t{16} << 20;
  const int64_t slots = (s.depth + kFusedDepth - 1) / kFusedDepth;
  FusedPlan best{256, 1};
  double least = -1;
  for (const Tile& tile : kTiles)
    for (int64_t splits = 1; splits <= 8 && splits <= std::max<int64_t>(slots, 1); ++splits) {
      const int64_t tiles =
          s.batch * ((s.rows + tile.tokens - 1) / tile.tokens) * ((s.cols + kFusedCols - 1) / kFusedCols);
      if (fused_sums(tiles, {tile.tokens, static_cast<int>(splits)}) * 4 > kMostSums) break;
      const int64_t waves = (tiles * splits + kPairs - 1) / kPairs;
      const double part = 4.0 * static_cast<double>((slots + splits - 1) / splits) * tile.window + tile.end;
      const double cycles = static_cast<double>(waves) * part +
                            (splits > 1 ? 1000 + 10.0 * tile.tokens * static_cast<double>(splits) : 0);
      if (least < 0 || cycles < least) least = cycles, best = {tile.tokens, static_cast<int>(splits)};
    }
  return best;
}

FusedScratch fused_scratch(const GemmShape& shape, const FusedPlan& plan) {
  FusedScratch s{};
  const auto take = [&](int64_t bytes) {
    const int64_t at = s.bytes;
    s.bytes += (bytes + 255) / 256 * 256;
    return at;
  };
  // The copy of rows of `bytes`, if one is needed.
  const auto copy = [&](int64_t bytes) {
    return take(row_pitch(bytes) == bytes ? 0 : shape.batch * shape.cols * row_pitch(bytes));
  };
  const int64_t row_tiles = (shape.rows + plan.tokens - 1) / plan.tokens;
  const int64_t tiles = shape.batch * row_tiles * ((shape.cols + kFusedCols - 1) / kFusedCols);
  s.padded_rows = (shape.batch - 1) * shape.rows + row_tiles * plan.tokens;
  s.rows = take(s.padded_rows * fused_depth(shape) * 2);
  s.data = copy(shape.depth / 2);
  s.scale = copy(shape.depth / kBlock);
  s.sums = take(fused_sums(tiles, plan) * 4);
  s.flag_count = tiles * (plan.splits - 1) * 4 * fused_teams(plan.tokens);
  s.flags = take(s.flag_count * 4);
  return s;
}

int64_t scratch_bytes(MatmulKernel kernel, const MatmulProblem& problem) {
  const bool fused = kernel == MatmulKernel::kSm90Nvfp4Fused || kernel == MatmulKernel::kSm90DenseFused;
  return fused ? fused_scratch(problem.shape, plan_fused(problem.shape)).bytes : 0;
}

bool plan_matmul(const MatmulProblem& problem, int capability, MatmulPlan* plan) {
  for (const Row& row : kTable)
    if (why_not(row.kernel, problem, capability).empty())
      return *plan = {row.kernel, scratch_bytes(row.kernel, problem)}, true;
  return false;
}

std::string adapt_plan(std::string_view planned, const MatmulProblem& problem, int capability, int64_t scratch,
                       MatmulPlan* plan) {
  const auto fits = [&](const MatmulPlan& p) {
    return p.kernel != MatmulKernel::kDecodeThenDot && p.scratch_bytes <= scratch;
  };
  MatmulKernel kernel;
  if (!find_kernel(planned, &kernel)) return "kernel must be one that this version has, got " + std::string(planned);
  *plan = {kernel, scratch_bytes(kernel, problem)};
  const std::string reason = why_not(kernel, problem, capability);
  if (reason.empty() && fits(*plan)) return {};
  if (plan_matmul(problem, capability, plan) && fits(*plan)) return {};
  const std::string cause = kernel == MatmulKernel::kDecodeThenDot
                                ? "decode_then_dot is XLA operations, not a kernel of this call"
                            : reason.empty() ? "it needs more scratch"
                                             : reason;
  return "the program was lowered for the kernel " + std::string(planned) + " with " + std::to_string(scratch) +
         " bytes of scratch, which " + device_text(capability) + " cannot run (" + cause +
         "); lower it again for this device";
}

}  // namespace jnvfp4
