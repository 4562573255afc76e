#include "matmul.h"

#include <algorithm>
#include <initializer_list>

#include "../core/scale_tiles.h"

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
const char* needs_depth(const MatmulProblem& p) { return p.shape.depth < 1 ? "K must be at least 16" : nullptr; }

// What kernels of Hopper count in 32 bits.
constexpr int64_t kMost = int64_t{1} << 30;

// The coordinates of tensor maps are 32-bit integers.
const char* needs_narrow(const MatmulProblem& p) {
  const GemmShape& s = p.shape;
  const bool fits = s.batch * s.rows <= kMost && s.batch * s.cols <= kMost && s.depth <= kMost;
  return fits ? nullptr : "it takes at most 2^30 rows of either operand, over all matrices, and K of at most 2^30";
}
// All that it needs has less than 2^61 bytes then, and cuBLASLt counts in 32 bits.
const char* needs_cublaslt_sizes(const MatmulProblem& p) {
  constexpr int64_t kHalf = kMost / 2;
  const GemmShape& s = p.shape;
  const bool fits = s.batch * s.rows <= kHalf && s.batch * s.cols <= kHalf && s.depth <= kHalf;
  return fits ? nullptr : "it takes at most 2^29 rows of either operand, over all matrices, and K of at most 2^29";
}
// One call of the library multiplies one matrix.
const char* needs_few_matrices(const MatmulProblem& p) {
  return p.shape.batch > 64 ? "it takes at most 64 matrices" : nullptr;
}
const char* needs_windows(const MatmulProblem& p) {
  if (p.pinned) return "its order of summation is not pinned";
  return p.windows ? nullptr : "an operand must have amax_scope=\"window64\"";
}

// What the kernels of few rows count in 32 bits, with room for what they multiply it by.
const char* needs_few_rows(const MatmulProblem& p) {
  const GemmShape& s = p.shape;
  if (s.rows > 16) return "M must be at most 16";
  if (s.depth > kMost) return "K must be at most 2^30";
  const int64_t groups = (s.cols + 15) / 16;
  return s.cols > kMost || groups * s.batch > kMost / 16 ? "N times the batch is too large" : nullptr;
}
// The kernel takes any number of rows, but is made for few, and K is counted in 32 bits.
const char* needs_at_most_64_rows(const MatmulProblem& p) {
  if (p.shape.rows > 64) return "M must be at most 64";
  return p.shape.depth > kMost ? "K must be at most 2^30" : nullptr;
}
struct Row {
  MatmulKernel kernel;
  std::string_view name;
  int least, most;  // compute capabilities, or kCpu
  const char* (*cannot)(const MatmulProblem&);
};

constexpr int kHopper = 90, kBlackwell = 100, kLastBlackwell = 121, kNewest = 999;

// In order of preference. One H200, microseconds of a product (commit fca8c26, decode_... d8f2dea;
// docs/performance.md, docs/kernels.md):
// - M x N x K = 16 x 14336 x 4096: sm90_nvfp4_small_m 15.7, sm80_nvfp4_blocks_small_m 22.6.
// - 32 x 14336 x 4096: sm90_nvfp4_fused 21.7, sm80_nvfp4_blocks_small_m 30.1, decode_then_dot 88.
// - 8192^3: sm90_nvfp4_fused 1295, decode_then_dot 1451. sm80_nvfp4_blocks, 13 times as long, runs only where the
//   order asks for it.
// - 8192^3 with windows on both sides: sm90_nvfp4_windows 1836, sm80_nvfp4_blocks 21600.
// - 16 and 64 x 14336 x 4096 with windows on both sides: sm80_nvfp4_blocks_small_m 28 and 80, sm90_nvfp4_windows 98 and
//   100 (with windows of b alone 88 and 89), most of which is decoding b to memory.
constexpr Row kTable[] = {
    {MatmulKernel::kSm90Nvfp4SmallM, "sm90_nvfp4_small_m", kHopper, kHopper,
     all<needs_nvfp4, needs_free_order, needs_depth, needs_few_rows>},
    {MatmulKernel::kSm90DenseSmallM, "sm90_dense_small_m", kHopper, kHopper,
     all<needs_dense, needs_free_order, needs_depth, needs_few_rows>},
    {MatmulKernel::kSm90Nvfp4Fused, "sm90_nvfp4_fused", kHopper, kHopper,
     all<needs_nvfp4, needs_free_order, needs_depth, needs_narrow>},
    {MatmulKernel::kSm90DenseFused, "sm90_dense_fused", kHopper, kHopper,
     all<needs_dense, needs_free_order, needs_depth, needs_narrow>},
    {MatmulKernel::kSm80Nvfp4BlocksSmallM, "sm80_nvfp4_blocks_small_m", kAnyGpu, kNewest,
     all<needs_nvfp4, needs_depth, needs_at_most_64_rows>},
    {MatmulKernel::kSm90Nvfp4Windows, "sm90_nvfp4_windows", kHopper, kHopper,
     all<needs_nvfp4, needs_windows, needs_depth, needs_narrow>},
    // It has not run on such a GPU. Few rows are left to a kernel that has run on others.
    {MatmulKernel::kSm100CublasLtNvfp4, "sm100_cublaslt_nvfp4", kBlackwell, kLastBlackwell,
     all<needs_nvfp4, needs_free_order, needs_depth, needs_few_matrices, needs_cublaslt_sizes>},
    {MatmulKernel::kDecodeThenDot, "decode_then_dot", kAnyGpu, kNewest, needs_free_order},
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

std::string dotted(int capability) { return std::to_string(capability / 10) + "." + std::to_string(capability % 10); }

std::string device_text(int capability) {
  if (capability == kCpu) return "the CPU";
  return "compute capability " + dotted(capability);
}

std::string version_text(int64_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

// What a kernel lacks of the library on a device; empty if nothing.
std::string needs_library(MatmulKernel kernel, const Device& device) {
  if (kernel != MatmulKernel::kSm100CublasLtNvfp4) return {};
  const std::string name(row_of(kernel).name);
  if (!device.no_cublaslt.empty()) return name + " needs cuBLASLt: " + std::string(device.no_cublaslt);
  // On 10.x and 11.x block-scaled products of 12.8 to 13.1 free tensor memory twice, which corrupts what runs beside
  // them. Earlier versions have no such products.
  const int64_t least = device.capability < 120 ? 130200 : 120800;
  if (device.cublaslt_version >= least) return {};
  return name + " needs cuBLASLt " + std::to_string(least / 10000) + "." + std::to_string(least / 100 % 100) +
         " or newer on " + device_text(device.capability) + ", got " + version_text(device.cublaslt_version);
}

}  // namespace

std::string wrong_device(std::string_view kernel, int least, int most, const Device& device) {
  const int capability = device.capability;
  if (capability < least || capability > most) {
    const char* which = most == kCpu ? "" : most == kNewest ? "GPUs from " : "GPUs of ";
    const std::string last = most == least || most == kNewest ? "" : " to " + dotted(most);
    return std::string(kernel) + " runs on " + which + device_text(least) + last + ", not on " +
           device_text(capability);
  }
  if (least == kHopper && !device.sm90a)
    return std::string(kernel) + " is not in this build; build jnvfp4 with 90a among JNVFP4_CUDA_TARGETS";
  return {};
}

std::string no_plan(std::string_view planned, int64_t scratch, const Device& device, const std::string& cause) {
  return "the program was lowered for the kernel " + std::string(planned) + " with " + std::to_string(scratch) +
         " bytes of scratch, which " + device_text(device.capability) + " cannot run (" + cause +
         "); lower it again for this device";
}

std::string_view name_of(MatmulKernel kernel) { return row_of(kernel).name; }

bool find_kernel(std::string_view name, MatmulKernel* kernel) {
  for (const Row& row : kTable)
    if (row.name == name) return *kernel = row.kernel, true;
  return false;
}

std::string why_not(MatmulKernel kernel, const MatmulProblem& problem, const Device& device) {
  const Row& row = row_of(kernel);
  const std::string elsewhere = wrong_device(row.name, row.least, row.most, device);
  if (!elsewhere.empty()) return elsewhere;
  const char* reason = row.cannot(problem);
  return reason ? std::string(row.name) + " cannot: " + reason : needs_library(kernel, device);
}

bool has_block_scaled(int capability) {
  const Row& row = row_of(MatmulKernel::kSm100CublasLtNvfp4);
  return row.least <= capability && capability <= row.most;
}

std::string no_block_scaled(const Device& device) {
  return has_block_scaled(device.capability) ? needs_library(MatmulKernel::kSm100CublasLtNvfp4, device) : std::string();
}

// Floats that the parts of K but the last have.
int64_t fused_sums(int64_t tiles, const FusedPlan& plan) {
  return (tiles - plan.whole) * (plan.splits - 1) * plan.tokens * kFusedCols * fused_teams(plan.tokens);
}

struct Tile {
  int tokens;
  double window, end, split;
};

// The least time by a model: microseconds on an H200, whose 132 multiprocessors hold 66 pairs of thread blocks. A wave
// of tiles costs its windows of 64 along K and its end; each part of K but one, its partial sums. `mixed`: tiles that
// fill waves have no parts, only the others may. Measured with N x K of 14336 x 4096, 4096 x 14336, 8192 x 8192 and
// 4096 x 4096 (docs/kernels.md).
FusedPlan plan_tiles(const GemmShape& s, std::initializer_list<Tile> tiles, bool mixed) {
  constexpr int64_t kPairs = 66, kMostSums = int64_t{16} << 20, kMostSplits = 8;
  constexpr int64_t kMostParted = 64 * kPairs;
  const int64_t slots = (s.depth + kFusedDepth - 1) / kFusedDepth;
  // Two teams share a part, so that it needs a slot for each.
  const int64_t most = std::clamp<int64_t>(slots / 2, 1, kMostSplits);
  FusedPlan best{};
  double least = 0;
  for (const Tile& tile : tiles)
    for (int splits = 1; splits <= most; ++splits) {
      FusedPlan plan{tile.tokens, splits, false};
      const int64_t count = fused_tiles(s, plan), at_once = kPairs / splits * splits;
      plan.whole = mixed && splits > 1 ? count / at_once * at_once : 0;
      const int64_t rest = count - plan.whole;
      // One of many waves is not worth parts.
      if (splits > 1 && (rest == 0 || count > kMostParted || fused_sums(count, plan) * 4 > kMostSums)) continue;
      const auto waves = [&](int64_t items, int64_t depth) {
        const auto windows = static_cast<double>(depth * 4);
        return static_cast<double>((items + at_once - 1) / at_once) * (windows * tile.window + tile.end);
      };
      const double time =
          waves(plan.whole, slots) + waves(rest * splits, (slots + splits - 1) / splits) + (splits - 1) * tile.split;
      if (least == 0 || time < least) least = time, best = plan;
    }
  return best;
}
FusedPlan plan_tiles(const GemmShape& s) {
  return plan_tiles(s, {{32, 0.235, 1.9, 1.5}, {64, 0.255, 2.3, 2.1}, {128, 0.348, 2.7, 2.5}, {256, 0.605, 2.6, 6.4}},
                    true);
}

// The tiles of fewer rows are for few of them, and write only results whose rows are those of a.
FusedPlan plan_fused(const GemmShape& s, bool nvfp4_a) {
  constexpr int kLeast = 128;
  const FusedPlan plan = plan_tiles(s);
  if (!nvfp4_a || s.rows < 2 * s.cols || plan.tokens < kLeast) return plan;
  FusedPlan other = plan_tiles({s.batch, s.cols, s.rows, s.depth});
  other.exchanged = true;
  return other.tokens < kLeast ? plan : other;
}

FusedPlan plan_windows(const GemmShape& s, bool a_windows, bool b_windows) {
  const bool exchanged = !b_windows;
  const Tile tile =
      a_windows && b_windows ? Tile{kBothWindowsTokens, 0.41, 2.3, 2.5} : Tile{kWindowsTokens, 0.48, 2.8, 4.0};
  FusedPlan plan = plan_tiles(fused_shape(s, {0, 1, exchanged}), {tile}, false);
  plan.exchanged = exchanged;
  return plan;
}

int64_t take_scratch(int64_t bytes, int64_t* taken) {
  const int64_t at = *taken;
  *taken += (bytes + 255) / 256 * 256;
  return at;
}

FusedScratch fused_scratch(const GemmShape& shape, const FusedPlan& plan) {
  FusedScratch s{};
  const auto take = [&](int64_t bytes) { return take_scratch(bytes, &s.bytes); };
  // The copy of rows of `bytes`, if one is needed.
  const auto copy = [&](int64_t bytes) {
    return take(row_pitch(bytes) == bytes ? 0 : shape.batch * shape.cols * row_pitch(bytes));
  };
  const int64_t tiles = fused_tiles(shape, plan);
  s.padded_rows = (shape.batch - 1) * shape.rows + (shape.rows + plan.tokens - 1) / plan.tokens * plan.tokens;
  s.rows = take(s.padded_rows * fused_depth(shape) * 2);
  s.data = copy(shape.depth / 2);
  s.scale = copy(shape.depth / kBlock);
  s.sums = take(fused_sums(tiles, plan) * 4);
  s.flag_count = (tiles - plan.whole) * (plan.splits - 1) * 4 * fused_teams(plan.tokens);
  s.flags = take(s.flag_count * 4);
  return s;
}

WindowsScratch windows_scratch(const GemmShape& shape, const FusedPlan& plan) {
  WindowsScratch s{};
  const auto take = [&](int64_t bytes) { return take_scratch(bytes, &s.bytes); };
  const auto up = [](int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; };
  const int64_t depth = fused_depth(shape), windows = depth / kWindow, tiles = fused_tiles(shape, plan);
  const int64_t tokens = up(shape.rows, plan.tokens), columns = up(shape.cols, kFusedCols);
  s.token_rows = (shape.batch - 1) * shape.rows + tokens, s.column_rows = (shape.batch - 1) * shape.cols + columns;
  s.tokens = take(s.token_rows * depth * 2), s.columns = take(s.column_rows * depth * 2);
  const bool both = plan.tokens == kBothWindowsTokens;  // tokens have one factor each, if they have no windows
  const int64_t factor = both ? 16 : 4;
  s.token_factors = take(shape.batch * tokens * (both ? windows : 1) * factor);
  s.column_factors = take(shape.batch * columns * windows * factor);
  s.sums = take(fused_sums(tiles, plan) * 4);
  s.flag_count = tiles * (plan.splits - 1) * 4;
  s.flags = take(s.flag_count * 4);
  return s;
}

BlockScaledScratch block_scaled_scratch(const GemmShape& shape, Float out) {
  const auto up = [](int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; };
  BlockScaledScratch s{};
  const auto take = [&](int64_t bytes) { return take_scratch(bytes, &s.bytes); };
  s.depth = up(shape.depth, kBlockScaledDepth), s.cols = up(shape.cols, kBlockScaledCols);
  const bool deeper = s.depth != shape.depth, wider = s.cols != shape.cols;
  s.a_codes = take(deeper ? shape.batch * shape.rows * s.depth / 2 : 0);
  s.b_codes = take(deeper || wider ? shape.batch * s.cols * s.depth / 2 : 0);
  s.a_scales = take(shape.batch * tiled_scale_bytes(shape.rows, shape.depth / kBlock));
  s.b_scales = take(shape.batch * tiled_scale_bytes(shape.cols, shape.depth / kBlock));
  s.factors = take((shape.batch + 1) * 4);
  s.sums = take(out == Float::kF32 && !wider ? 0 : shape.batch * shape.rows * s.cols * 4);
  s.workspace = take(kCublasLtWorkspace);
  return s;
}

int64_t scratch_bytes(MatmulKernel kernel, const MatmulProblem& problem) {
  switch (kernel) {
    case MatmulKernel::kSm90Nvfp4Fused:
    case MatmulKernel::kSm90DenseFused: {
      const FusedPlan plan = plan_fused(problem.shape, problem.a == Left::kNvfp4);
      return fused_scratch(fused_shape(problem.shape, plan), plan).bytes;
    }
    case MatmulKernel::kSm90Nvfp4Windows: {  // whichever sides have windows
      const auto bytes = [&](bool a_windows, bool b_windows) {
        const FusedPlan plan = plan_windows(problem.shape, a_windows, b_windows);
        return windows_scratch(fused_shape(problem.shape, plan), plan).bytes;
      };
      return std::max({bytes(false, true), bytes(true, false), bytes(true, true)});
    }
    case MatmulKernel::kSm100CublasLtNvfp4: return block_scaled_scratch(problem.shape, problem.out).bytes;
    default: return 0;
  }
}

bool plan_matmul(const MatmulProblem& problem, const Device& device, MatmulPlan* plan) {
  for (const Row& row : kTable)
    if (why_not(row.kernel, problem, device).empty())
      return *plan = {row.kernel, scratch_bytes(row.kernel, problem)}, true;
  return false;
}

std::string adapt_plan(std::string_view planned, const MatmulProblem& problem, const Device& device, int64_t scratch,
                       MatmulPlan* plan) {
  const auto fits = [&](const MatmulPlan& p) {
    return p.kernel != MatmulKernel::kDecodeThenDot && p.scratch_bytes <= scratch;
  };
  MatmulKernel kernel;
  if (!find_kernel(planned, &kernel)) return "kernel must be one that this version has, got " + std::string(planned);
  *plan = {kernel, scratch_bytes(kernel, problem)};
  const std::string reason = why_not(kernel, problem, device);
  if (reason.empty() && fits(*plan)) return {};
  if (plan_matmul(problem, device, plan) && fits(*plan)) return {};
  const std::string cause = kernel == MatmulKernel::kDecodeThenDot
                                ? "decode_then_dot is XLA operations, not a kernel of this call"
                            : reason.empty() ? "it needs more scratch"
                                             : reason;
  return no_plan(planned, scratch, device, cause);
}

}  // namespace jnvfp4
