// Which kernel computes a grouped product: the decision for the lowering and for the handler, as in plan/matmul.h. It
// sees the number of rows of all groups together; how they are divided is on the device.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "../core/arrays.h"
#include "matmul.h"

namespace jnvfp4 {

enum class GroupedKernel : uint8_t {
  kSm90Nvfp4Grouped,     // two NVFP4 operands
  kSm90DenseGrouped,     // a 16-bit left operand
  kDecodeThenRaggedDot,  // decode both operands, XLA's ragged_dot, scale: XLA operations, not the handler
  kCpuNvfp4Blocks,       // the pinned order on the CPU, group by group
  kCpuDenseElements,     // the same of a 16-bit left operand
};
inline constexpr int kGroupedKernels = 5;

struct GroupedProblem {
  GroupedShape shape;
  MatmulProblem::Left a;
  Float out;
};

struct GroupedPlan {
  GroupedKernel kernel;
  int64_t scratch_bytes;
};

std::string_view name_of(GroupedKernel kernel);
// False if no kernel has the name.
bool find_kernel(std::string_view name, GroupedKernel* kernel);

// Why a kernel cannot solve a problem on a device; empty if it can.
std::string why_not(GroupedKernel kernel, const GroupedProblem& problem, const Device& device);

// The scratch memory that a kernel needs.
int64_t scratch_bytes(GroupedKernel kernel, const GroupedProblem& problem);

// The first kernel of the table in plan/grouped.cc that can. False if none can.
bool plan_grouped(const GroupedProblem& problem, const Device& device, GroupedPlan* plan);

// What a handler on a device runs, as the function of this name in plan/matmul.h.
std::string adapt_plan(std::string_view planned, const GroupedProblem& problem, const Device& device, int64_t scratch,
                       GroupedPlan* plan);

}  // namespace jnvfp4
