#include "gemm.h"

#include <initializer_list>

#include "../../../plan/sm100_cublaslt.h"

namespace jnvfp4 {

CublasLtGemm::CublasLtGemm(const CublasLt& lt, const CublasLtProblem& problem) : lt_(lt) {
  take(lt.desc_create(&desc_, lt::kCompute32F, lt::kR32F));
  set(lt.desc_set, desc_, lt::kDescTransA, int32_t{1});
  set(lt.desc_set, desc_, lt::kDescTransB, int32_t{0});
  if (problem.a_scales) {
    set(lt.desc_set, desc_, lt::kDescScaleModeA, lt::kScaleVec16Ue4m3);
    set(lt.desc_set, desc_, lt::kDescScaleModeB, lt::kScaleVec16Ue4m3);
    use_scales(problem.a_scales, problem.b_scales);
  }
  describe_end(problem);
  describe(&b_, problem.type, problem.depth, problem.cols);
  describe(&a_, problem.type, problem.depth, problem.rows);
  describe(&d_, problem.out_type, problem.cols, problem.rows);
  prefer(problem);
}

CublasLtGemm::~CublasLtGemm() {
  if (desc_) lt_.desc_destroy(desc_);
  for (lt::Layout layout : {a_, b_, d_})
    if (layout) lt_.layout_destroy(layout);
  if (preference_) lt_.preference_destroy(preference_);
}

void CublasLtGemm::use_scales(const void* a, const void* b) {
  set(lt_.desc_set, desc_, lt::kDescScalePointerA, b);
  set(lt_.desc_set, desc_, lt::kDescScalePointerB, a);
}

void CublasLtGemm::describe_end(const CublasLtProblem& problem) {
  if (problem.finished) set(lt_.desc_set, desc_, lt::kDescPointerMode, lt::kPointersToDevice);
  if (!problem.bias) return;
  set(lt_.desc_set, desc_, lt::kDescEpilogue, lt::kEpilogueBias);
  set(lt_.desc_set, desc_, lt::kDescBiasPointer, problem.bias);
  set(lt_.desc_set, desc_, lt::kDescBiasType, int32_t{problem.out_type});
}

void CublasLtGemm::describe(lt::Layout* layout, int type, int64_t rows, int64_t cols) {
  if (ok()) take(lt_.layout_create(layout, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), rows));
}

void CublasLtGemm::prefer(const CublasLtProblem& problem) {
  constexpr uint32_t kAlignment = 16;
  if (ok()) take(lt_.preference_create(&preference_));
  set(lt_.preference_set, preference_, lt::kPreferWorkspace, static_cast<uint64_t>(kCublasLtWorkspace));
  set(lt_.preference_set, preference_, lt::kPreferReductions, problem.finished ? lt::kNoReductions : lt::kReductions);
  // The alignment of all arrays, not of these: the shape alone chooses the algorithm, so that runs are identical.
  for (int operand : lt::kPreferAlignments) set(lt_.preference_set, preference_, operand, kAlignment);
}

lt::Status CublasLtGemm::choose(lt::Handle handle) {
  int count = 0;
  if (ok()) take(lt_.heuristic(handle, desc_, b_, a_, d_, d_, preference_, 1, &best_, &count));
  if (ok() && count == 0) take(lt::kNotSupported);
  if (ok()) take(best_.state);
  return status_;
}

lt::Status CublasLtGemm::run(lt::Handle handle, const void* a, const void* b, void* d, void* workspace,
                             cudaStream_t stream, const float* alpha, const float* beta) {
  const float one = 1, zero = 0;
  if (ok())
    take(lt_.matmul(handle, desc_, alpha ? alpha : &one, b, b_, a, a_, beta ? beta : &zero, d, d_, d, d_,
                    &best_.algorithm, workspace, static_cast<size_t>(kCublasLtWorkspace), stream));
  return status_;
}

}  // namespace jnvfp4
