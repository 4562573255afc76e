// Which kernel computes a grouped product. The plan sees the number of rows of all groups together; how they are
// divided is on the device.
#pragma once

#include "../core/arrays.h"
#include "matmul.h"
#include "table.h"

namespace jnvfp4 {

struct GroupedProblem {
  GroupedShape shape;
  MatmulProblem::Left a;
  Float out;
  bool pinned;  // as in MatmulProblem
};

extern const KernelTable<GroupedProblem> kGroupedKernels;

}  // namespace jnvfp4
