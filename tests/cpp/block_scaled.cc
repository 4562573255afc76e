// Products through cuBLASLt on the CPU: the host files of ffi/ as they are, and loops over the same functions in place
// of kernels. test_block_scaled.py builds this as a shared library, with host_cuda/ in place of CUDA's headers, and a
// library for it to find.
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cuda/matmul/cublaslt/gemm.h"
#include "cuda/matmul/launchers.h"
#include "plan/matmul.h"
#include "prepare_on_cpu.h"

using namespace jnvfp4;

// Each test has a device of its own, since handles are kept.
namespace {
int current_device = 0;
bool launches_fail = false;
bool padding_stays = false;  // what was in the padding of scales before

// Scales behind the last column of a matrix get back what scratch was full of.
void leave_padding(const ScaleTiles& t) {
  for (int64_t matrix = 0; matrix < t.matrices; ++matrix) {
    uint8_t* const tiles = t.tiles + matrix * tiled_scale_bytes(t.rows, t.cols);
    for (int64_t at = 0; at < tiled_scale_bytes(t.rows, t.cols); ++at)
      if (tiled_scale_place(at, t.cols).col >= t.cols) tiles[at] = 0xff;
  }
}
}  // namespace

cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

namespace jnvfp4 {

cudaError_t launch_sm100_prepare(const PrepareArgs& p, cudaStream_t) {
  prepare_on_cpu(p);
  if (padding_stays) leave_padding(p.a_scales), leave_padding(p.b_scales);
  return launches_fail ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t launch_epilogue(const EpilogueArgs& e, cudaStream_t) {
  const GemmShape& s = e.shape;
  for (int64_t row = 0; row < s.batch * s.rows; ++row)
    for (int64_t col = 0; col < s.cols; ++col) {
      const float b_amax = e.b.amax[e.b.map.at(row / s.rows * s.cols + col, 0)];
      const float alpha = alpha_w4a4(e.a.amax[e.a.map.at(row, 0)], b_amax, e.a.e4m3_max, e.b.e4m3_max);
      const MatmulResult& r = e.result;
      const float bias = r.bias ? load_float(r.bias, r.bias_kind, col) : 0.0f;
      const float value = gemm_epilogue(e.y[row * e.pitch + col], alpha, bias, r.bias);
      with_float(r.kind, [&](auto t) {
        static_cast<typename decltype(t)::Stored*>(r.out)[row * s.cols + col] = t.store(value);
      });
    }
  return cudaSuccess;
}

cudaError_t launch_sm80_nvfp4_blocks(const MatmulArgs&, void*, cudaStream_t) { return cudaErrorUnknown; }
cudaError_t launch_sm80_nvfp4_blocks_small_m(const MatmulArgs&, cudaStream_t, int) { return cudaErrorUnknown; }
cudaError_t launch_sm80_dense_elements(const MatmulArgs&, cudaStream_t) { return cudaErrorUnknown; }

}  // namespace jnvfp4

namespace {

std::string text;  // of the last answer

const char* keep(std::string answer) { return text = std::move(answer), text.c_str(); }

// Whether each place of whole tiles is one byte of theirs.
bool is_bijection(int64_t rows, int64_t cols) {
  const int64_t bytes = tiled_scale_bytes(rows, cols);
  std::vector<bool> seen(static_cast<size_t>(bytes));
  const int64_t all_rows = scale_tile_rows(rows) * kScaleTileRows, all_cols = scale_tile_cols(cols) * kScaleTileCols;
  if (bytes != all_rows * all_cols) return false;
  for (int64_t row = 0; row < all_rows; ++row)
    for (int64_t col = 0; col < all_cols; ++col) {
      const int64_t at = tiled_scale_at({row, col}, cols);
      if (at < 0 || at >= bytes || seen[static_cast<size_t>(at)]) return false;
      seen[static_cast<size_t>(at)] = true;
      const ScalePlace back = tiled_scale_place(at, cols);
      if (back.row != row || back.col != col) return false;
    }
  return true;
}

static_assert(tiled_scale_at({129, 5}, 9) == (3 + 1) * 512 + 16 + 1, "tiles are known when a program is compiled");
static_assert(tiled_scale_place((3 + 1) * 512 + 16 + 1, 9).row == 129);

}  // namespace

extern "C" {

int64_t first_rows_without_bijection(int64_t most_rows, int64_t most_cols) {
  for (int64_t rows = 1; rows <= most_rows; ++rows)
    for (int64_t cols = 1; cols <= most_cols; ++cols)
      if (!is_bijection(rows, cols)) return rows;
  return 0;
}

int64_t tiles_bytes(int64_t rows, int64_t cols) { return tiled_scale_bytes(rows, cols); }

void make_tiles(const uint8_t* scale, uint8_t* tiles, int64_t matrices, int64_t rows, int64_t cols) {
  PrepareArgs p{};
  p.a_scales = {scale, tiles, matrices, rows, cols};
  float zero = 1;
  p.factors.factors = &zero;
  launch_sm100_prepare(p, nullptr);
}

void pad_codes(const uint64_t* data, uint64_t* out, int64_t matrices, int64_t rows, int64_t pieces, int64_t out_rows,
               int64_t out_pieces) {
  const PaddedCodes codes{data, out, matrices, rows, pieces, out_rows, out_pieces};
  for (int64_t i = 0; i < codes.count(); ++i) out[i] = padded_piece(codes, i);
}

const char* find_library(const char* path) { return keep(find_cublaslt(path).reason); }
void use_device(int device) { current_device = device; }
void fail_launches(bool fail) { launches_fail = fail; }
void keep_padding(bool keep) { padding_stays = keep; }

// An NVFP4 tensor as numpy has it.
struct Operand {
  const void* data;
  const uint8_t* scale;
  const float* amax;
  int64_t rows_per_amax;
  int32_t e4m3_max;
};

// What nvfp4_matmul does on a GPU of a capability: plans, for the kernel `wanted` or the best, and runs the plan with
// scratch that is full of NaN. Returns the error, an empty text for none; the name of the kernel goes to `kernel`.
const char* multiply(const Operand* a, const Operand* b, const void* bias, int32_t bias_kind, void* out,
                     int32_t out_kind, int64_t batch, int64_t rows, int64_t cols, int64_t depth, int32_t capability,
                     const char* wanted, char* kernel) {
  const auto operand = [](const Operand& t) {
    return MatmulOperand{t.data, t.scale, t.amax, Float::kBf16, {t.rows_per_amax, 0}, static_cast<float>(t.e4m3_max)};
  };
  MatmulArgs args{operand(*a),
                  operand(*b),
                  {bias, static_cast<Float>(bias_kind), out, static_cast<Float>(out_kind)},
                  {batch, rows, cols, depth}};
  const MatmulProblem problem{args.shape, MatmulProblem::Left::kNvfp4, false, args.result.kind, false};
  const Device device{capability, "compute_80", {}, cublaslt_version()};
  const KernelRow<MatmulProblem>* row = *wanted ? kMatmulKernels.find(wanted) : kMatmulKernels.plan(problem, device);
  if (!row) return keep(*wanted ? "no such kernel" : "no plan");
  if (std::string reason = row->why_not(problem, device); !reason.empty()) return keep(std::move(reason));
  std::strcpy(kernel, std::string(row->name).c_str());
  const int64_t bytes = row->scratch_bytes(problem);
  std::vector<uint8_t> memory(static_cast<size_t>(bytes) + 512, 0xff);
  auto* const scratch = memory.data() + 256 - reinterpret_cast<uintptr_t>(memory.data()) % 256;
  const cudaError_t status = launch_matmul(args, row->name, scratch, nullptr);
  for (uint8_t* p = scratch + bytes; p < memory.data() + memory.size(); ++p)
    if (*p != 0xff) return keep("something is written behind the scratch");
  return keep(status == cudaSuccess ? "" : "status " + std::to_string(status));
}

// Whether the library takes every attribute of a product of FP4 operands; needs no GPU of it.
int describe(bool finished, bool with_bias, int out_type) {
  alignas(16) static const uint8_t array[16] = {};
  const void* bias = with_bias ? array : nullptr;
  return CublasLtGemm(*cublaslt(), {48, 32, 64, lt::kR4FE2M1, out_type, array, array, finished, bias}).status();
}

// The numbers that ffi/ gives names of cuBLASLt, for a comparison with its header.
const char* numbers() {
  const std::pair<const char*, int64_t> named[] = {
      {"CUBLAS_STATUS_SUCCESS", lt::kSuccess},
      {"CUBLAS_STATUS_ALLOC_FAILED", lt::kAllocFailed},
      {"CUBLAS_STATUS_INVALID_VALUE", lt::kInvalidValue},
      {"CUBLAS_STATUS_ARCH_MISMATCH", lt::kArchMismatch},
      {"CUBLAS_STATUS_EXECUTION_FAILED", lt::kExecutionFailed},
      {"CUBLAS_STATUS_NOT_SUPPORTED", lt::kNotSupported},
      {"CUBLAS_COMPUTE_32F", lt::kCompute32F},
      {"CUDA_R_32F", lt::kR32F},
      {"CUDA_R_16F", lt::kR16F},
      {"CUDA_R_16BF", lt::kR16BF},
      {"CUDA_R_4F_E2M1", lt::kR4FE2M1},
      {"CUBLASLT_MATMUL_DESC_POINTER_MODE", lt::kDescPointerMode},
      {"CUBLASLT_MATMUL_DESC_TRANSA", lt::kDescTransA},
      {"CUBLASLT_MATMUL_DESC_TRANSB", lt::kDescTransB},
      {"CUBLASLT_MATMUL_DESC_EPILOGUE", lt::kDescEpilogue},
      {"CUBLASLT_MATMUL_DESC_BIAS_POINTER", lt::kDescBiasPointer},
      {"CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE", lt::kDescBiasType},
      {"CUBLASLT_MATMUL_DESC_A_SCALE_POINTER", lt::kDescScalePointerA},
      {"CUBLASLT_MATMUL_DESC_B_SCALE_POINTER", lt::kDescScalePointerB},
      {"CUBLASLT_MATMUL_DESC_A_SCALE_MODE", lt::kDescScaleModeA},
      {"CUBLASLT_MATMUL_DESC_B_SCALE_MODE", lt::kDescScaleModeB},
      {"CUBLASLT_POINTER_MODE_DEVICE", lt::kPointersToDevice},
      {"CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3", lt::kScaleVec16Ue4m3},
      {"CUBLASLT_EPILOGUE_BIAS", lt::kEpilogueBias},
      {"CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES", lt::kPreferWorkspace},
      {"CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK", lt::kPreferReductions},
      {"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES", lt::kPreferAlignments[0]},
      {"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES", lt::kPreferAlignments[1]},
      {"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES", lt::kPreferAlignments[2]},
      {"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES", lt::kPreferAlignments[3]},
      {"CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE", lt::kReductions},
      {"CUBLASLT_REDUCTION_SCHEME_NONE", lt::kNoReductions},
      {"sizeof(cublasLtMatmulAlgo_t)", sizeof(lt::Algorithm)},
      {"sizeof(cublasLtMatmulHeuristicResult_t)", sizeof(lt::Heuristic)},
      {"offsetof(cublasLtMatmulHeuristicResult_t, state)", offsetof(lt::Heuristic, state)},
  };
  std::string lines;
  for (const auto& [name, number] : named) lines += std::string(name) + "\t" + std::to_string(number) + "\n";
  return keep(lines);
}

}  // extern "C"
