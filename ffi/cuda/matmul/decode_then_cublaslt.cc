// out = a b^T in three steps: NVFP4 operands decoded to 16 bits in scratch, cuBLASLt's GEMM, and the epilogue. What
// decode_then_dot does in XLA operations, in one call.
//
// cuBLASLt makes float32 sums, and the epilogue kernel alpha, bias and the cast. cuBLASLt could do these too, which
// would save a pass over the sums, but not with the bits of docs/numerics.md: its NaN is 0x7fff where the rule's is
// 0x7fc0, how it rounds alpha * y + bias and when it applies alpha to parts of K is not documented, and it takes no
// factor for each row and column at once.
#include <algorithm>
#include <map>
#include <mutex>

#include "../kernels.h"
#include "cublaslt.h"

namespace jnvfp4 {
namespace {

// The handle of the current device, made once and kept. This allocates on the host and may on the device. A stream that
// is being captured forbids that to its thread, except in the relaxed mode, since none of it is for the stream.
lt::Status handle_of_device(const CublasLt& lt, lt::Handle* handle) {
  static std::mutex making;
  static std::map<int, lt::Handle> made;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return lt::kExecutionFailed;
  const std::lock_guard<std::mutex> lock(making);
  lt::Handle& own = made[device];
  lt::Status status = lt::kSuccess;
  if (!own) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    const bool exchanged = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess;
    status = lt.create(&own);
    if (exchanged) cudaThreadExchangeStreamCaptureMode(&mode);
    if (status != lt::kSuccess) own = nullptr;
  }
  return *handle = own, status;
}

// cuBLASLt's matrices are stored by columns: the rows of a, b and the result are columns to it, so it makes the
// transposed result, b^T as its A by a as its B.
class Gemm {
 public:
  Gemm(const CublasLt& lt, const GemmShape& s, Float kind) : lt_(lt) {
    const int type = kind == Float::kBf16 ? lt::kR16BF : lt::kR16F;
    take(lt.desc_create(&desc_, lt::kCompute32F, lt::kR32F));
    set(lt.desc_set, desc_, lt::kDescTransA, int32_t{1});
    set(lt.desc_set, desc_, lt::kDescTransB, int32_t{0});
    describe(&b_, type, s.depth, s.cols, s.batch);
    describe(&a_, type, s.depth, s.rows, s.batch);
    describe(&sums_, lt::kR32F, s.cols, s.rows, s.batch);
    take(lt.preference_create(&preference_));
    set(lt.preference_set, preference_, lt::kPreferWorkspace, static_cast<uint64_t>(kCublasLtWorkspace));
    set(lt.preference_set, preference_, lt::kPreferReductions, lt::kReductions);
    // What all arrays have, not what these have: the shape alone chooses the algorithm, so that runs are identical.
    for (int operand : lt::kPreferAlignments) set(lt.preference_set, preference_, operand, kAlignment);
  }
  ~Gemm() {
    if (desc_) lt_.desc_destroy(desc_);
    for (lt::Layout layout : {a_, b_, sums_})
      if (layout) lt_.layout_destroy(layout);
    if (preference_) lt_.preference_destroy(preference_);
  }
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  // cuBLASLt keeps the algorithms that it has chosen, so to ask again costs little.
  lt::Status run(lt::Handle handle, const void* a, const void* b, float* sums, void* workspace, cudaStream_t stream) {
    lt::Heuristic best{};
    int count = 0;
    if (ok()) take(lt_.heuristic(handle, desc_, b_, a_, sums_, sums_, preference_, 1, &best, &count));
    if (ok() && count == 0) take(lt::kNotSupported);
    if (ok()) take(best.state);
    const float alpha = 1, beta = 0;
    if (ok())
      take(lt_.matmul(handle, desc_, &alpha, b, b_, a, a_, &beta, sums, sums_, sums, sums_, &best.algorithm, workspace,
                      static_cast<size_t>(kCublasLtWorkspace), stream));
    return status_;
  }

 private:
  static constexpr uint32_t kAlignment = 16;

  bool ok() const { return status_ == lt::kSuccess; }
  void take(lt::Status status) {
    if (ok()) status_ = status;
  }
  template <class Set, class T>
  void set(Set set, void* object, int attribute, T value) {
    if (ok()) take(set(object, attribute, &value, sizeof value));
  }
  void describe(lt::Layout* layout, int type, int64_t rows, int64_t cols, int64_t batch) {
    take(lt_.layout_create(layout, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), rows));
    if (batch == 1) return;
    set(lt_.layout_set, *layout, lt::kLayoutBatch, static_cast<int32_t>(batch));
    set(lt_.layout_set, *layout, lt::kLayoutBatchStride, rows * cols);
  }

  const CublasLt& lt_;
  lt::Desc desc_ = nullptr;
  lt::Layout a_ = nullptr, b_ = nullptr, sums_ = nullptr;
  lt::Preference preference_ = nullptr;
  lt::Status status_ = lt::kSuccess;
};

cudaError_t error_of(lt::Status status) {
  switch (status) {
    case lt::kSuccess: return cudaSuccess;
    case lt::kAllocFailed: return cudaErrorMemoryAllocation;
    case lt::kArchMismatch:
    case lt::kNotSupported: return cudaErrorNotSupported;
    case lt::kExecutionFailed: return cudaErrorLaunchFailure;
    default: return cudaErrorUnknown;
  }
}

// As many matrices at a time as a dimension of a grid allows.
cudaError_t multiply(const GemmShape& s, Float kind, const uint16_t* a, const uint16_t* b, float* sums, void* workspace,
                     cudaStream_t stream) {
  constexpr int64_t kMost = 65535;
  const CublasLt* lt = cublaslt();
  if (!lt) return cudaErrorSharedObjectInitFailed;
  lt::Handle handle = nullptr;
  lt::Status status = handle_of_device(*lt, &handle);
  for (int64_t first = 0; first < s.batch && status == lt::kSuccess; first += kMost) {
    Gemm gemm(*lt, {std::min(kMost, s.batch - first), s.rows, s.cols, s.depth}, kind);
    status = gemm.run(handle, a + first * s.rows * s.depth, b + first * s.cols * s.depth,
                      sums + first * s.rows * s.cols, workspace, stream);
  }
  return error_of(status);
}

cudaError_t decode(const MatmulOperand& t, int64_t elements, Float kind, void* out, cudaStream_t stream) {
  return launch_decode({static_cast<const uint8_t*>(t.data), t.scale, out, kind, elements / kBlock}, stream);
}

}  // namespace

cudaError_t launch_decode_then_cublaslt(const MatmulArgs& g, void* scratch, cudaStream_t stream) {
  const GemmShape& s = g.shape;
  const bool decoded = g.a.quantized();
  const CublasLtScratch at = cublaslt_scratch(s, decoded, g.result.kind);
  auto* const bytes = static_cast<uint8_t*>(scratch);
  const Float kind = decoded ? Float::kBf16 : g.a.kind;
  const void* a = decoded ? bytes + at.a : g.a.data;
  auto* const sums = static_cast<float*>(g.result.kind == Float::kF32 ? g.result.out : bytes + at.sums);
  cudaError_t status = decode(g.b, s.batch * s.cols * s.depth, kind, bytes + at.b, stream);
  if (status == cudaSuccess && decoded) status = decode(g.a, s.batch * s.rows * s.depth, kind, bytes + at.a, stream);
  if (status == cudaSuccess)
    status = multiply(s, kind, static_cast<const uint16_t*>(a), reinterpret_cast<const uint16_t*>(bytes + at.b), sums,
                      bytes + at.workspace, stream);
  if (status != cudaSuccess) return status;
  return launch_epilogue({sums, decoded, g.a, g.b, g.result, s}, stream);  // in place if the result holds the sums
}

}  // namespace jnvfp4
