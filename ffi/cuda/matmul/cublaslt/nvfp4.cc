// out = a b^T of two NVFP4 tensors on the FP4 tensor cores of Blackwell, through cuBLASLt: scales in tiles, each matrix
// one product. It has not run on such a GPU; tests/test_block_scaled.py runs it with a stand-in for the library.
//
// If every matrix has one factor, the library applies it, and the bias too if that has the type of the result.
// Otherwise it makes float32 sums, and the epilogue kernel does the rest.
#include "../../../plan/sm100_cublaslt.h"
#include "../launchers.h"
#include "gemm.h"
#include "prepare.h"

namespace jnvfp4 {
namespace {

int type_of(Float kind) { return kind == Float::kF32 ? lt::kR32F : kind == Float::kBf16 ? lt::kR16BF : lt::kR16F; }
int64_t size_of(Float kind) { return kind == Float::kF32 ? 4 : 2; }

// Whether the library may finish the product. Whether it can, it says itself.
bool may_finish(const MatmulArgs& g, const BlockScaledScratch& at) {
  const MatmulResult& r = g.result;
  const bool one_factor = g.a.map.rows_per_amax % g.shape.rows == 0 && g.b.map.rows_per_amax % g.shape.cols == 0;
  // The library takes no float32 bias; one of another type than the result it would have to convert.
  const bool bias = !r.bias || (r.bias_kind == r.kind && r.kind != Float::kF32);
  return one_factor && bias && at.cols == g.shape.cols;
}

class Product {
 public:
  Product(const MatmulArgs& args, void* scratch)
      : g_(args), at_(block_scaled_scratch(args.shape, args.result.kind)), bytes_(static_cast<uint8_t*>(scratch)) {}

  cudaError_t run(const CublasLt& lt, lt::Handle handle, cudaStream_t stream) {
    if (may_finish(g_, at_)) {
      CublasLtGemm gemm(lt, problem(true));
      const lt::Status status = gemm.choose(handle);
      if (status == lt::kSuccess) return multiply(gemm, handle, true, stream);
      if (status != lt::kNotSupported && status != lt::kInvalidValue) return error_of(status);
    }
    CublasLtGemm gemm(lt, problem(false));
    const lt::Status status = gemm.choose(handle);
    return status == lt::kSuccess ? multiply(gemm, handle, false, stream) : error_of(status);
  }

 private:
  CublasLtProblem problem(bool finished) const {
    const Float out = finished ? g_.result.kind : Float::kF32;
    return {g_.shape.rows, at_.cols,     at_.depth,
            lt::kR4FE2M1,  type_of(out), bytes_ + at_.a_scales,
            b_tiles(),     finished,     finished ? g_.result.bias : nullptr};
  }

  PrepareArgs prepared(bool finished) const {
    const GemmShape& s = g_.shape;
    const auto scales = [&](const MatmulOperand& t, int64_t rows, int64_t at) {
      return ScaleTiles{t.scale, bytes_ + at, s.batch, rows, s.depth / kBlock};
    };
    const auto codes = [&](const MatmulOperand& t, int64_t rows, int64_t out_rows, int64_t at) {
      const bool padded = rows != out_rows || s.depth != at_.depth;
      return PaddedCodes{t.data, padded ? bytes_ + at : nullptr, s.batch, rows, s.depth / 16, out_rows, at_.depth / 16};
    };
    return {scales(g_.a, s.rows, at_.a_scales),
            scales(g_.b, s.cols, at_.b_scales),
            codes(g_.a, s.rows, s.rows, at_.a_codes),
            codes(g_.b, s.cols, at_.cols, at_.b_codes),
            {g_.a, g_.b, s, !finished, factors()}};
  }

  cudaError_t multiply(CublasLtGemm& gemm, lt::Handle handle, bool finished, cudaStream_t stream) const {
    const PrepareArgs p = prepared(finished);
    const cudaError_t status = launch_sm100_prepare(p, stream);
    if (status != cudaSuccess) return status;
    const GemmShape& s = g_.shape;
    const Float kind = finished ? g_.result.kind : Float::kF32;
    const auto* a = static_cast<const uint8_t*>(p.a_codes.out ? p.a_codes.out : g_.a.data);
    const auto* b = static_cast<const uint8_t*>(p.b_codes.out ? p.b_codes.out : g_.b.data);
    auto* const d = static_cast<uint8_t*>(finished || in_place() ? g_.result.out : bytes_ + at_.sums);
    for (int64_t i = 0; i < s.batch; ++i) {
      gemm.use_scales(p.a_scales.tiles + i * tiled_scale_bytes(s.rows, s.depth / kBlock),
                      b_tiles() + i * tiled_scale_bytes(s.cols, s.depth / kBlock));
      const lt::Status done = gemm.run(handle, a + i * s.rows * at_.depth / 2, b + i * at_.cols * at_.depth / 2,
                                       d + i * s.rows * at_.cols * size_of(kind), bytes_ + at_.workspace, stream,
                                       finished ? factors() + i : nullptr, finished ? factors() + s.batch : nullptr);
      if (done != lt::kSuccess) return error_of(done);
    }
    if (finished) return cudaSuccess;
    return launch_epilogue({reinterpret_cast<const float*>(d), at_.cols, true, g_.a, g_.b, g_.result, s}, stream);
  }

  const uint8_t* b_tiles() const { return bytes_ + at_.b_scales; }
  float* factors() const { return reinterpret_cast<float*>(bytes_ + at_.factors); }
  // Whether the result can hold the sums.
  bool in_place() const { return g_.result.kind == Float::kF32 && at_.cols == g_.shape.cols; }

  const MatmulArgs& g_;
  const BlockScaledScratch at_;
  uint8_t* const bytes_;
};

}  // namespace

cudaError_t launch_sm100_cublaslt_nvfp4(const MatmulArgs& args, void* scratch, cudaStream_t stream) {
  const CublasLt* lt = cublaslt();
  if (!lt) return cudaErrorSharedObjectInitFailed;
  lt::Handle handle = nullptr;
  const lt::Status status = handle_of_device(*lt, &handle);
  return status == lt::kSuccess ? Product(args, scratch).run(*lt, handle, stream) : error_of(status);
}

}  // namespace jnvfp4
