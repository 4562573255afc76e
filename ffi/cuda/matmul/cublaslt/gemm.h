// A product a b^T of one matrix by cuBLASLt.
#pragma once

#include "library.h"

namespace jnvfp4 {

struct CublasLtProblem {
  int64_t rows, cols, depth;  // of one matrix: how the scales of several are stored is not documented
  int type, out_type;         // of the operands, and of the result
  const void *a_scales = nullptr, *b_scales = nullptr;  // of FP4 operands, in tiles (scale_tiles.h)
  // The library finishes the product: alpha on the device, and a bias for each column, of the type of the result.
  bool finished = false;
  const void* bias = nullptr;
};

// d = a b^T, or alpha (a b^T) + bias if the library finishes it. cuBLASLt's matrices are stored by columns: the rows of
// a, b and d are columns to it, so it makes the transposed result, b^T as its A by a as its B.
class CublasLtGemm {
 public:
  CublasLtGemm(const CublasLt& lt, const CublasLtProblem& problem);
  ~CublasLtGemm();
  CublasLtGemm(const CublasLtGemm&) = delete;
  CublasLtGemm& operator=(const CublasLtGemm&) = delete;

  // Whether the library took what it was told.
  lt::Status status() const { return status_; }
  // Asks for the algorithm. cuBLASLt keeps those that it has chosen, so to ask again costs little.
  lt::Status choose(lt::Handle handle);
  // Other scales of the same shape, for another matrix.
  void use_scales(const void* a, const void* b);
  // alpha and beta are on the device if the library finishes the product; else they are 1 and 0.
  lt::Status run(lt::Handle handle, const void* a, const void* b, void* d, void* workspace, cudaStream_t stream,
                 const float* alpha = nullptr, const float* beta = nullptr);

 private:
  bool ok() const { return status_ == lt::kSuccess; }
  void take(lt::Status status) {
    if (ok()) status_ = status;
  }
  template <class Set, class T>
  void set(Set set, void* object, int attribute, T value) {
    if (ok()) take(set(object, attribute, &value, sizeof value));
  }
  void describe(lt::Layout* layout, int type, int64_t rows, int64_t cols);
  void describe_end(const CublasLtProblem& problem);
  void prefer(const CublasLtProblem& problem);

  const CublasLt& lt_;
  lt::Desc desc_ = nullptr;
  lt::Layout a_ = nullptr, b_ = nullptr, d_ = nullptr;
  lt::Preference preference_ = nullptr;
  lt::Heuristic best_{};
  lt::Status status_ = lt::kSuccess;
};

}  // namespace jnvfp4
