#include "matmul.h"

#include <algorithm>

#include "sm100_cublaslt.h"
#include "sm80_blocks.h"
#include "sm90_fused.h"
#include "sm90_pinned.h"
#include "sm90_windows.h"

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

// Bound of what Hopper kernels count in 32 bits.
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

// Bound of what the kernels for few rows count in 32 bits, with room for the factors that they multiply it by.
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

const char* needs_pinned_tiles(const MatmulProblem& p) {
  return p.windows ? "it takes no operand with amax_scope=\"window64\"" : nullptr;
}
const char* needs_windows_or_many_rows(const MatmulProblem& p) {
  return p.windows || p.shape.rows >= kPinnedManyRows
             ? nullptr
             : "an operand must have amax_scope=\"window64\", or M must be at least 4096";
}

std::string version_text(int64_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

constexpr std::string_view kBlockScaled = "sm100_cublaslt_nvfp4";
constexpr Devices kFp4TensorCores{100, 121};  // Blackwell

std::string needs_cublaslt(const Device& device) {
  const std::string needs = std::string(kBlockScaled) + " needs cuBLASLt";
  if (!device.no_cublaslt.empty()) return needs + ": " + std::string(device.no_cublaslt);
  // On 10.x and 11.x block-scaled products of 12.8 to 13.1 free tensor memory twice, which corrupts what runs beside
  // them. Earlier versions have no such products.
  const int64_t least = device.capability < 120 ? 130200 : 120800;
  if (device.cublaslt_version >= least) return {};
  return needs + " " + std::to_string(least / 10000) + "." + std::to_string(least / 100 % 100) + " or newer on " +
         device_text(device.capability) + ", got " + version_text(device.cublaslt_version);
}

// What the kernels for few rows do beside the product.
bool whole_units(const MatmulProblem& p) { return p.shape.depth % kSmallUnit == 0; }
bool few_whole_units(const MatmulProblem& p) { return whole_units(p) && p.shape.rows <= kNormRows; }
bool always(const MatmulProblem&) { return true; }

int64_t of_fused(const MatmulProblem& p) {
  const FusedPlan plan = plan_fused(p.shape, p.a == Left::kNvfp4);
  return fused_scratch(fused_shape(p.shape, plan), plan).bytes;
}
// Whichever sides have windows.
int64_t of_windows(const MatmulProblem& p) {
  const auto bytes = [&](bool a_windows, bool b_windows) {
    const FusedPlan plan = plan_windows(p.shape, a_windows, b_windows);
    return windows_scratch(fused_shape(p.shape, plan), plan).bytes;
  };
  return std::max({bytes(false, true), bytes(true, false), bytes(true, true)});
}
int64_t of_pinned(const MatmulProblem& p) { return pinned_scratch(p.shape, plan_pinned(p.shape)).bytes; }
int64_t of_pinned_prepared(const MatmulProblem& p) {
  return pinned_scratch(p.shape, plan_pinned_prepared(p.windows)).bytes;
}
int64_t of_blocks(const MatmulProblem& p) { return blocks_scratch(p.shape).bytes; }
int64_t of_block_scaled(const MatmulProblem& p) { return block_scaled_scratch(p.shape, p.out).bytes; }

// In order of preference. One H200, microseconds per GEMM (commit fca8c26, decode_... d8f2dea;
// docs/results.md):
// - M x N x K = 16 x 14336 x 4096: sm90_nvfp4_small_m 15.7, sm80_nvfp4_blocks_small_m 22.6.
// - 32 x 14336 x 4096: sm90_nvfp4_fused 21.7, sm80_nvfp4_blocks_small_m 30.1, decode_then_dot 88.
// - 8192^3: sm90_nvfp4_fused 1295, decode_then_dot 1451.
// - 8192^3 with windows on both sides: sm90_nvfp4_windows 1836.
// - 16 and 64 x 14336 x 4096 with windows on both sides: sm80_nvfp4_blocks_small_m 28 and 80, sm90_nvfp4_windows 98 and
//   100 (with windows of b alone 88 and 89), most of which is decoding b to memory.
// The pinned order, one H100, where bfloat16 takes 1355, 592, 299 and 151 by cuBLAS:
// - 8192^3: sm90_nvfp4_pinned_prepared 2360, sm90_nvfp4_pinned 2472, sm80_nvfp4_blocks 4250; with windows on both sides
//   sm90_nvfp4_pinned_prepared 3270, sm80_nvfp4_blocks 7700.
// - 4096, 2048 and 1024 x 14336 x 4096: sm90_nvfp4_pinned_prepared 1099, 577 and 352, sm90_nvfp4_pinned 1106, 547, 294
//   (before both scales were in float16).
constexpr KernelRow<MatmulProblem> kRows[] = {
    // Few rows: b is decoded inside a GEMM for Hopper, and so is a if it is an NVFP4 tensor.
    {"sm90_nvfp4_small_m",
     kSm90a,
     all<needs_nvfp4, needs_free_order, needs_depth, needs_few_rows>,
     {.whole_bias = whole_units}},
    {"sm90_dense_small_m",
     kSm90a,
     all<needs_dense, needs_free_order, needs_depth, needs_few_rows>,
     {.whole_bias = whole_units, .norm = few_whole_units}},
    // The right operand is decoded in registers of the GEMM; a left one that is an NVFP4 tensor, to scratch.
    {"sm90_nvfp4_fused", kSm90a, all<needs_nvfp4, needs_free_order, needs_depth, needs_narrow>, {.scratch = of_fused}},
    {"sm90_dense_fused", kSm90a, all<needs_dense, needs_free_order, needs_depth, needs_narrow>, {.scratch = of_fused}},
    // The pinned order, few rows.
    {"sm80_nvfp4_blocks_small_m", kAnyGpuFrom80, all<needs_nvfp4, needs_depth, needs_at_most_64_rows>},
    // window64 on a side: both operands decoded to scratch, summed window by window.
    {"sm90_nvfp4_windows", kSm90a, all<needs_nvfp4, needs_windows, needs_depth, needs_narrow>, {.scratch = of_windows}},
    // The library's product of FP4 tensor cores, scaled block by block. It has not run on such a GPU. Few rows are left
    // to a kernel that has run on others.
    {kBlockScaled,
     kFp4TensorCores,
     all<needs_nvfp4, needs_free_order, needs_depth, needs_few_matrices, needs_cublaslt_sizes>,
     {.scratch = of_block_scaled, .lacks = needs_cublaslt}},
    // The pinned order, more rows: b is decoded to scratch, or in registers of the GEMM.
    {"sm90_nvfp4_pinned_prepared",
     kSm90a,
     all<needs_nvfp4, needs_depth, needs_windows_or_many_rows, needs_narrow>,
     {.scratch = of_pinned_prepared}},
    {"sm90_nvfp4_pinned",
     kSm90a,
     all<needs_nvfp4, needs_pinned_tiles, needs_depth, needs_narrow>,
     {.scratch = of_pinned}},
    // Decode both operands, XLA's 16-bit GEMM, epilogue.
    {"decode_then_dot", kAnyGpuFrom80, needs_free_order, {.of_xla = true, .whole_bias = always}},
    // The pinned order, any number of rows and any GPU: tensor cores; a 16-bit left operand; and both on the CPU.
    {"sm80_nvfp4_blocks", kAnyGpuFrom80, needs_nvfp4, {.scratch = of_blocks}},
    {"sm80_dense_elements", kAnyGpuFrom80, needs_dense},
    {"cpu_nvfp4_blocks", kCpuAlone, needs_nvfp4, {.whole_bias = always}},
    {"cpu_dense_elements", kCpuAlone, needs_dense, {.whole_bias = always}},
};

}  // namespace

const KernelTable<MatmulProblem> kMatmulKernels(kRows);

bool has_block_scaled(int capability) { return kFp4TensorCores.include(capability); }

std::string no_block_scaled(const Device& device) {
  return has_block_scaled(device.capability) ? needs_cublaslt(device) : std::string();
}

}  // namespace jnvfp4
