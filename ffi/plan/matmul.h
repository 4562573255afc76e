// Which kernel multiplies: one decision for the lowering in Python, which needs it before a device is known, and for
// the FFI handler, which knows the device. Plain C++ that runs on any machine.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "../core/arrays.h"

namespace jnvfp4 {

enum class MatmulKernel : uint8_t {
  kSm90Nvfp4SmallM,   // two NVFP4 operands, few rows: decoded inside a GEMM for Hopper
  kSm90DenseSmallM,   // the same of a 16-bit left operand
  kSm90Nvfp4Fused,    // two NVFP4 operands: the left one decoded to scratch, the right one in registers of the GEMM
  kSm90DenseFused,    // a 16-bit left operand: the right one decoded in registers of the GEMM
  kSm90Nvfp4Windows,  // two NVFP4 operands, window64 on a side: both decoded to scratch, summed window by window
  kSm80Nvfp4BlocksSmallM,  // two NVFP4 operands in the pinned order, few rows
  kSm100CublasLtNvfp4,     // two NVFP4 operands: cuBLASLt's product of FP4 tensor cores, scaled block by block
  kDecodeThenDot,          // decode both operands, XLA's 16-bit GEMM, epilogue: XLA operations, not the handler
  kSm80Nvfp4Blocks,        // two NVFP4 operands in the pinned order, any number of rows, integer tensor cores
  kSm80DenseElements,      // a 16-bit left operand in the pinned order
  kCpuNvfp4Blocks,         // the pinned order on the CPU
  kCpuDenseElements,       // the same of a 16-bit left operand
};
inline constexpr int kMatmulKernels = 12;

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

// All kernels have run on GPUs of this capability, and those for less are compiled from the same code. On newer GPUs
// none has run: what they give is checked there before it is used (jnvfp4/_primitives/_self_check.py).
inline constexpr int kNewestRunOn = 90;
constexpr bool has_run_on(int capability) { return capability <= kNewestRunOn; }

// Why a kernel cannot run a problem: the first reason of several, or null.
template <auto... kNeeds, class Problem>
const char* all(const Problem& p) {
  const char* reason = nullptr;
  static_cast<void>(((reason = kNeeds(p)) || ...));
  return reason;
}

// 10000 * major + 100 * minor + patch; newer than any.
inline constexpr int64_t kNewestCublasLt = 999999;

struct Device {
  int capability;
  bool sm90a = true;                  // whether the build has the kernels that are compiled for 90a alone
  std::string_view no_cublaslt = {};  // why no copy of cuBLASLt was found; empty if one was
  int64_t cublaslt_version = kNewestCublasLt;
};

// Whether a GPU has FP4 tensor cores that sm100_cublaslt_nvfp4 is for, and what they lack to be used: a library. Empty
// if nothing.
bool has_block_scaled(int capability);
std::string no_block_scaled(const Device& device);

// Why kernels for the capabilities from `least` to `most` do not run on a device; empty if they do.
std::string wrong_device(std::string_view kernel, int least, int most, const Device& device);
// The error text where no plan on a device fits the program.
std::string no_plan(std::string_view planned, int64_t scratch, const Device& device, const std::string& cause);

std::string_view name_of(MatmulKernel kernel);
// False if no kernel has the name.
bool find_kernel(std::string_view name, MatmulKernel* kernel);

// Why a kernel cannot solve a problem on a device; empty if it can.
std::string why_not(MatmulKernel kernel, const MatmulProblem& problem, const Device& device);

// The scratch memory that a kernel needs.
int64_t scratch_bytes(MatmulKernel kernel, const MatmulProblem& problem);

// How the fused kernels divide a product: rows of a in a tile, and parts of K for tiles that are too few for all
// multiprocessors. Only the shape decides, so that sums are the same on every GPU.
struct FusedPlan {
  int tokens, splits;
  bool exchanged;     // b is decoded to scratch instead of a, because it is smaller: its rows are then those of a tile
  int64_t whole = 0;  // the first tiles, whose K has no parts: as many as keep all multiprocessors of an H200 at work
};
FusedPlan plan_fused(const GemmShape& shape, bool nvfp4_a);
// The same of sm90_nvfp4_windows, for operands that have windows on these sides, one at least: exchanged if only a has.
inline constexpr int kWindowsTokens = 192, kBothWindowsTokens = 128;
FusedPlan plan_windows(const GemmShape& shape, bool a_windows, bool b_windows);
// Groups of warps of a thread block that share K.
JNVFP4_HD constexpr int fused_teams(int tokens) { return tokens <= 64 ? 2 : 1; }

// Columns of the result that a tile has, and what comes along K at a time.
inline constexpr int64_t kFusedCols = 256, kFusedDepth = 256;
inline int64_t fused_tiles(const GemmShape& s, const FusedPlan& plan) {
  return s.batch * ((s.rows + plan.tokens - 1) / plan.tokens) * ((s.cols + kFusedCols - 1) / kFusedCols);
}
// K of the prepared left operand.
inline int64_t fused_depth(const GemmShape& s) { return (s.depth + kWindow - 1) / kWindow * kWindow; }

// Offsets in the scratch of the fused kernels: what is used begins at a multiple of 256.
struct FusedScratch {
  int64_t rows;         // the left operand as 16-bit floats; tiles may read past its last row
  int64_t data, scale;  // copies of the right operand's, if the distance of its rows is no multiple of 16 bytes
  int64_t sums, flags;  // of the parts of K but the last
  int64_t bytes;        // in all
  int64_t padded_rows, flag_count;
};
FusedScratch fused_scratch(const GemmShape& shape, const FusedPlan& plan);

// The same of sm90_nvfp4_windows, which has both operands as 16-bit floats and factors of both.
struct WindowsScratch {
  int64_t tokens, columns;  // tiles may read past their last rows
  int64_t token_factors, column_factors;
  int64_t sums, flags;
  int64_t bytes;
  int64_t token_rows, column_rows, flag_count;
};
WindowsScratch windows_scratch(const GemmShape& shape, const FusedPlan& plan);
// As the kernels see it: the operand that is decoded to scratch is the left one.
inline GemmShape fused_shape(const GemmShape& s, const FusedPlan& plan) {
  return plan.exchanged ? GemmShape{s.batch, s.cols, s.rows, s.depth} : s;
}

// Offsets in the scratch of sm100_cublaslt_nvfp4, multiples of 256, and the sizes that it gives the library: rows of 16
// bytes at least, and a result whose rows begin at multiples of 16 bytes.
struct BlockScaledScratch {
  int64_t depth, cols;         // K and N, padded
  int64_t a_codes, b_codes;    // where they are padded
  int64_t a_scales, b_scales;  // in tiles
  int64_t factors;             // of each matrix, and a zero
  int64_t sums;                // float32, where the result cannot hold them
  int64_t workspace, bytes;
};
BlockScaledScratch block_scaled_scratch(const GemmShape& shape, Float out);
inline constexpr int64_t kBlockScaledDepth = 32, kBlockScaledCols = 16;
// What cuBLASLt may use of it. The size limits its choice of an algorithm, so it is the same on every GPU: what NVIDIA
// recommends for Hopper.
inline constexpr int64_t kCublasLtWorkspace = int64_t{32} << 20;

// Puts `bytes` behind the scratch that is taken, from a multiple of 256 on; returns where.
int64_t take_scratch(int64_t bytes, int64_t* taken);

// The distance of rows of `bytes`, as tensor maps of Hopper take it.
inline int64_t row_pitch(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// The first kernel of the table in plan/matmul.cc that can. False if none can.
bool plan_matmul(const MatmulProblem& problem, const Device& device, MatmulPlan* plan);

// What a handler on a device runs, where the program was lowered for the kernel `planned` and has that much scratch:
// that kernel, or another one that fits. An error text, or empty.
std::string adapt_plan(std::string_view planned, const MatmulProblem& problem, const Device& device, int64_t scratch,
                       MatmulPlan* plan);

}  // namespace jnvfp4
