#include "grouped.h"

#include "tiles.h"

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
const char* needs_nothing(const GroupedProblem&) { return nullptr; }
// What kernels of Hopper count in 32 bits, with room for what they multiply it by.
const char* needs_sizes(const GroupedProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const GroupedShape& s = p.shape;
  if (s.depth < 1) return "K must be at least 16";
  const bool fits = s.rows <= kMost && s.groups <= kMost && s.groups * s.cols <= kMost && s.depth <= kMost;
  return fits ? nullptr : "it takes at most 2^30 rows of a, 2^30 rows of b over all groups, and K of at most 2^30";
}

struct Row {
  GroupedKernel kernel;
  std::string_view name;
  int least, most;  // compute capabilities, or kCpu
  const char* (*cannot)(const GroupedProblem&);
};

constexpr int kHopper = 90, kNewest = 999;

// In order of preference.
constexpr Row kTable[] = {
    {GroupedKernel::kSm90Nvfp4Grouped, "sm90_nvfp4_grouped", kHopper, kHopper, all<needs_nvfp4, needs_sizes>},
    {GroupedKernel::kSm90DenseGrouped, "sm90_dense_grouped", kHopper, kHopper, all<needs_dense, needs_sizes>},
    {GroupedKernel::kDecodeThenRaggedDot, "decode_then_ragged_dot", kAnyGpu, kNewest, needs_nothing},
    {GroupedKernel::kCpuNvfp4Blocks, "cpu_nvfp4_blocks", kCpu, kCpu, needs_nvfp4},
    {GroupedKernel::kCpuDenseElements, "cpu_dense_elements", kCpu, kCpu, needs_dense},
};
static_assert(sizeof kTable / sizeof kTable[0] == kGroupedKernels, "each kernel has one row");

const Row& row_of(GroupedKernel kernel) {
  for (const Row& row : kTable)
    if (row.kernel == kernel) return row;
  return kTable[0];  // not reached: each kernel has one row
}

}  // namespace

std::string_view name_of(GroupedKernel kernel) { return row_of(kernel).name; }

bool find_kernel(std::string_view name, GroupedKernel* kernel) {
  for (const Row& row : kTable)
    if (row.name == name) return *kernel = row.kernel, true;
  return false;
}

std::string why_not(GroupedKernel kernel, const GroupedProblem& problem, const Device& device) {
  const Row& row = row_of(kernel);
  const std::string reason = wrong_device(row.name, row.least, row.most, device);
  if (!reason.empty()) return reason;
  const char* cannot = row.cannot(problem);
  return cannot ? std::string(row.name) + " cannot: " + cannot : std::string();
}

int64_t scratch_bytes(GroupedKernel kernel, const GroupedProblem& problem) {
  const bool hopper = kernel == GroupedKernel::kSm90Nvfp4Grouped || kernel == GroupedKernel::kSm90DenseGrouped;
  return hopper ? grouped_scratch(problem.shape, plan_grouped_tiles(problem.shape)).bytes : 0;
}

bool plan_grouped(const GroupedProblem& problem, const Device& device, GroupedPlan* plan) {
  for (const Row& row : kTable)
    if (why_not(row.kernel, problem, device).empty())
      return *plan = {row.kernel, scratch_bytes(row.kernel, problem)}, true;
  return false;
}

std::string adapt_plan(std::string_view planned, const GroupedProblem& problem, const Device& device, int64_t scratch,
                       GroupedPlan* plan) {
  const auto fits = [&](const GroupedPlan& p) {
    return p.kernel != GroupedKernel::kDecodeThenRaggedDot && p.scratch_bytes <= scratch;
  };
  GroupedKernel kernel;
  if (!find_kernel(planned, &kernel)) return "kernel must be one that this version has, got " + std::string(planned);
  *plan = {kernel, scratch_bytes(kernel, problem)};
  const std::string reason = why_not(kernel, problem, device);
  if (reason.empty() && fits(*plan)) return {};
  if (plan_grouped(problem, device, plan) && fits(*plan)) return {};
  const std::string cause = kernel == GroupedKernel::kDecodeThenRaggedDot
                                ? "decode_then_ragged_dot is XLA operations, not a kernel of this call"
                            : reason.empty() ? "it needs more scratch"
                                             : reason;
  return no_plan(planned, scratch, device, cause);
}

}  // namespace jnvfp4
