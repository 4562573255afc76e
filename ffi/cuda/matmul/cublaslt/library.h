// The part of cuBLASLt's C interface that products call, declared here: its headers need not be there to compile this,
// and no library is linked. It is the same in CUDA 12 and 13.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace jnvfp4 {

namespace lt {

using Status = int;
inline constexpr Status kSuccess = 0, kAllocFailed = 3, kInvalidValue = 7, kArchMismatch = 8, kExecutionFailed = 13,
                        kNotSupported = 15;

using Handle = void*;
// Small objects on the host.
using Desc = void*;
using Layout = void*;
using Preference = void*;

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  Status state;
  float waves;
  int reserved[4];
};

// cudaDataType_t and cublasComputeType_t.
inline constexpr int kR32F = 0, kR16F = 2, kR16BF = 14, kR4FE2M1 = 33, kCompute32F = 68;
// Attributes: of a product, int32_t or uint32_t each, and pointers; preferences, uint64_t and uint32_t.
inline constexpr int kDescPointerMode = 2, kDescTransA = 3, kDescTransB = 4, kDescEpilogue = 7, kDescBiasPointer = 8;
inline constexpr int kDescScalePointerA = 17, kDescScalePointerB = 18, kDescBiasType = 26;
inline constexpr int kDescScaleModeA = 31, kDescScaleModeB = 32;
// Their values: where alpha and beta are, what follows the product, and which scales an operand has.
inline constexpr int32_t kPointersToDevice = 1, kScaleVec16Ue4m3 = 1;
inline constexpr uint32_t kEpilogueBias = 4;
inline constexpr int kPreferWorkspace = 1, kPreferReductions = 3;
inline constexpr int kPreferAlignments[] = {5, 6, 7, 8};  // of A, B, C and D
// How splits of K are added: in a step of their own, from float32 in the workspace (2), or from the type of the result
// (4), here float32 too. Not in place (1).
inline constexpr uint32_t kReductions = 2 | 4;
// K has one part: where the library applies alpha to several is not documented.
inline constexpr uint32_t kNoReductions = 0;

}  // namespace lt

struct CublasLt {
  size_t (*version)();
  lt::Status (*create)(lt::Handle*);
  lt::Status (*desc_create)(lt::Desc*, int compute, int scale);
  lt::Status (*desc_set)(lt::Desc, int attribute, const void* value, size_t bytes);
  lt::Status (*desc_destroy)(lt::Desc);
  lt::Status (*layout_create)(lt::Layout*, int type, uint64_t rows, uint64_t cols, int64_t column_distance);
  lt::Status (*layout_destroy)(lt::Layout);
  lt::Status (*preference_create)(lt::Preference*);
  lt::Status (*preference_set)(lt::Preference, int attribute, const void* value, size_t bytes);
  lt::Status (*preference_destroy)(lt::Preference);
  lt::Status (*heuristic)(lt::Handle, lt::Desc, lt::Layout a, lt::Layout b, lt::Layout c, lt::Layout d, lt::Preference,
                          int wanted, lt::Heuristic*, int* found);
  lt::Status (*matmul)(lt::Handle, lt::Desc, const void* alpha, const void* a, lt::Layout, const void* b, lt::Layout,
                       const void* beta, const void* c, lt::Layout, void* d, lt::Layout, const lt::Algorithm*,
                       void* workspace, size_t workspace_bytes, cudaStream_t);
};

// The copy that find_cublaslt has found; null before.
const CublasLt* cublaslt();

// The handle of the current device, made once and kept.
lt::Status handle_of_device(const CublasLt& lt, lt::Handle* handle);

cudaError_t error_of(lt::Status status);

}  // namespace jnvfp4
