#include "grouped.h"

#include "sm90_grouped.h"
#include "sm90_pinned.h"

namespace jnvfp4 {
namespace {

using Left = MatmulProblem::Left;

// A reason, or null.
const char* needs_nvfp4(const GroupedProblem& p) {
  return p.a == Left::kNvfp4 ? nullptr : "its left operand must be an NVFP4 tensor";
}
const char* needs_dense(const GroupedProblem& p) {
  return p.a == Left::kNvfp4 ? "its left operand must be a bfloat16 or float16 array" : nullptr;
}
const char* needs_free_order(const GroupedProblem& p) {
  return p.pinned ? "its order of summation is not pinned" : nullptr;
}
// Bound of what Hopper kernels count in 32 bits, with room for the factors that they multiply it by.
const char* needs_sizes(const GroupedProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const GroupedShape& s = p.shape;
  if (s.depth < 1) return "K must be at least 16";
  const bool fits = s.rows <= kMost && s.groups <= kMost && s.groups * s.cols <= kMost && s.depth <= kMost;
  return fits ? nullptr : "it takes at most 2^30 rows of a, 2^30 rows of b over all groups, and K of at most 2^30";
}

int64_t tiles_scratch(const GroupedProblem& p) { return grouped_scratch(p.shape, plan_grouped_tiles(p.shape)).bytes; }

int64_t of_pinned(const GroupedProblem& p) { return grouped_scratch(p.shape, plan_pinned_groups(p.shape)).bytes; }

constexpr KernelRow<GroupedProblem> kRows[] = {
    // Two NVFP4 operands, and a 16-bit left operand.
    {"sm90_nvfp4_grouped", kSm90a, all<needs_nvfp4, needs_free_order, needs_sizes>, {.scratch = tiles_scratch}},
    {"sm90_dense_grouped", kSm90a, all<needs_dense, needs_free_order, needs_sizes>, {.scratch = tiles_scratch}},
    // Decode both operands, XLA's ragged_dot, scale.
    {"decode_then_ragged_dot", kAnyGpuFrom80, needs_free_order, {.of_xla = true}},
    // The pinned order: that of each group's dense product.
    {"sm90_nvfp4_pinned_grouped", kSm90a, all<needs_nvfp4, needs_sizes>, {.scratch = of_pinned}},
    {"cpu_nvfp4_blocks", kCpuAlone, needs_nvfp4},
    {"cpu_dense_elements", kCpuAlone, needs_dense},
};

}  // namespace

const KernelTable<GroupedProblem> kGroupedKernels(kRows);

}  // namespace jnvfp4
