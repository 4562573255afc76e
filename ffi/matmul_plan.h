// Which kernel multiplies: one decision for the lowering in Python, which needs it before a device is known, and for
// the FFI handler, which knows the device. Plain C++ that runs on any machine.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "arrays.h"

namespace jnvfp4 {

enum class MatmulKernel : uint8_t {
  kDecodeThenDot,      // decode both operands, XLA's 16-bit GEMM, epilogue: XLA operations, not the handler
  kSm90Nvfp4SmallM,    // two NVFP4 operands, few rows: decoded inside a GEMM for Hopper
  kSm90DenseSmallM,    // the same of a 16-bit left operand
  kSm80Nvfp4Blocks,    // two NVFP4 operands in the pinned order, integer tensor cores
  kSm80DenseElements,  // a 16-bit left operand in the pinned order
  kCpuNvfp4Blocks,     // the same on the CPU
  kCpuDenseElements,
};
inline constexpr int kMatmulKernels = 7;

struct MatmulProblem {
  enum class Left : uint8_t { kNvfp4, kBf16, kF16 };

  GemmShape shape;
  Left a;
  bool windows;  // an operand has one amax for each 64 elements
  Float out;
  bool pinned;  // the sum along K must have the order of docs/numerics.md
};

struct MatmulPlan {
  MatmulKernel kernel;
  int64_t scratch_bytes;
};

// 10 * major + minor of a GPU. Without a device, what every supported GPU can run is planned.
inline constexpr int kCpu = 0, kAnyGpu = 80;

std::string_view name_of(MatmulKernel kernel);
// False if no kernel has the name.
bool find_kernel(std::string_view name, MatmulKernel* kernel);

// Why a kernel cannot solve a problem on a device; empty if it can.
std::string why_not(MatmulKernel kernel, const MatmulProblem& problem, int capability);

// The scratch memory that a kernel needs.
int64_t scratch_bytes(MatmulKernel kernel, const MatmulProblem& problem);

// The first kernel of the table in matmul_plan.cc that can. False if none can.
bool plan_matmul(const MatmulProblem& problem, int capability, MatmulPlan* plan);

// What a handler on a device runs, where the program was lowered for the kernel `planned` and has that much scratch:
// that kernel, or another one that fits. An error text, or empty.
std::string adapt_plan(std::string_view planned, const MatmulProblem& problem, int capability, int64_t scratch,
                       MatmulPlan* plan);

}  // namespace jnvfp4
