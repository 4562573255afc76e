// Epilogue of the fused kernels: amaxes to factors, and sums times factors.
#pragma once

#include "../decode.cuh"
#include "fused.h"
#include "ptx.cuh"
#include "results.cuh"

namespace jnvfp4 {

// Operands of a tile's epilogue: amaxes of the thread's columns, amaxes of the tokens that it stages, biases of either.
struct ResultFactors {
  float columns[2], tokens[2], biases[2];
};

// kExact: the factors of decoded numbers times alpha are exact. kGrouped: rows of the result have matrices of b of
// their own, and A and B are not swapped.
template <int kTokens, bool kSwapped, bool kExact, bool kGrouped = false, int kBuffer = result_buffer(kTokens)>
struct FusedResult {
  using Writer = TileWriter<kTokens, kSwapped, kBuffer>;
  using Sums = typename Writer::Sums;
  static constexpr int kSums = Writer::kSums;

  const FusedArgs& a;
  Writer writer;
  int right;  // index of b's matrix

  __device__ __forceinline__ FusedResult(const FusedArgs& args, int matrix, int token, int column, uint32_t shared,
                                         int barrier)
      : a(args),
        writer{args.g.result, args.tokens, args.columns, matrix, token, column, shared, barrier},
        right(matrix) {}
  // For a group, whose rows of the result end at `end`.
  __device__ __forceinline__ FusedResult(const FusedArgs& args, int matrix, int token, int end, int column,
                                         uint32_t shared, int barrier)
      : a(args), writer{args.g.result, end, args.columns, 0, token, column, shared, barrier}, right(matrix) {}

  // Loads the operands, best while the last wgmmas run.
  __device__ __forceinline__ void load(ResultFactors& f) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      f.columns[i] = column_amax(fragment_row() + 8 * i);
      f.tokens[i] = token_amax(each_token() ? threadIdx.x % 128 + 128 * i : 0);
    }
    writer.load_biases(f.biases);
  }
  __device__ __forceinline__ void write(Sums& sums, const ResultFactors& f) const {
    scale(sums, f);
    writer.add_biases(sums, f.biases);
    writer.write(sums);
  }

 private:
  __device__ __forceinline__ bool each_token() const { return kSwapped ? a.amax_per_col : a.amax_per_row; }
  __device__ __forceinline__ bool each_column() const { return kSwapped ? a.amax_per_row : a.amax_per_col; }

  // ---- factors
  // Amax of a token and of a column of this warpgroup; past the end, of the last one.
  __device__ __forceinline__ float token_amax(int token_idx) const {
    const int row = min(writer.token + token_idx, (kGrouped ? writer.tokens : a.tokens) - 1);
    return kSwapped ? amax(a.g.b, each_token(), row, a.tokens, a.matrices_per_b_amax)
                    : amax(a.g.a, each_token(), row, a.tokens, a.matrices_per_a_amax);
  }
  __device__ __forceinline__ float column_amax(int column_idx) const {
    const int row = min(writer.column + column_idx, a.columns - 1);
    return kSwapped
               ? amax(a.g.a, each_column(), row, a.columns, a.matrices_per_a_amax)
               : amax(a.g.b, each_column(), row, a.columns, a.matrices_per_b_amax, kGrouped ? right : writer.matrix);
  }
  // Amax of an operand's row; 1 if it is dense. `each`: a matrix has several; else `shared` matrices have one.
  __device__ __forceinline__ float amax(const MatmulOperand& x, bool each, int row, int rows, int shared) const {
    return amax(x, each, row, rows, shared, writer.matrix);
  }
  __device__ __forceinline__ static float amax(const MatmulOperand& x, bool each, int row, int rows, int shared,
                                               int matrix) {
    if (!x.quantized()) return 1.0f;
    return each ? amax_of(x, int64_t{matrix} * rows + row) : __ldg(x.amax + matrix / shared);
  }
  __device__ __forceinline__ float alpha(float token_amax, float column_amax) const {
    const MatmulOperand &x = a.g.a, &y = a.g.b;
    const float left = kSwapped ? column_amax : token_amax, right = kSwapped ? token_amax : column_amax;
    return x.quantized() ? alpha_w4a4(left, right, x.e4m3_max, y.e4m3_max) : alpha_w4a16(right, y.e4m3_max);
  }
  // Scales a sum; the addition makes -0 the rule's 0.
  __device__ __forceinline__ float scaled(float sum, float alpha) const {
    return mul_rn(alpha, __fmaf_rn(sum, a.unscale, 0.0f));
  }

  __device__ __forceinline__ void scale(Sums& sums, const ResultFactors& f) const {
    if (each_token() || (kSwapped && a.g.result.bias)) stage_tokens(f);
    if (!each_token()) {
      scale_columns(sums, f);
    } else if (each_column()) {
      scale_each(sums, f.columns);
    } else {
      Writer::for_each_token([&](int i, float factor) { sums[i] = scaled(sums[i], factor); }, writer.factor_address(0));
    }
  }
  // Scales if all tokens have one amax. Where the factor of decoded numbers times alpha is exact, one operation is as
  // good as two, unless the factor is infinite, or 0, which takes the sign of a sum. Adding -0 changes nothing.
  __device__ __forceinline__ static bool is_ordinary(float factor) { return factor != 0 && !isinf(factor); }
  __device__ __forceinline__ void scale_columns(Sums& sums, const ResultFactors& f) const {
    const float low = alpha(f.tokens[0], f.columns[0]), high = each_column() ? alpha(f.tokens[0], f.columns[1]) : low;
    float factors[2] = {low, high}, zero = 0;
    if constexpr (kExact) {
      factors[0] *= a.unscale, factors[1] *= a.unscale;
      if (!is_ordinary(factors[0]) || !is_ordinary(factors[1])) {
        factors[0] = low, factors[1] = high, zero = -0.0f;
#pragma unroll
        for (float& sum : sums) sum = __fmaf_rn(sum, a.unscale, 0.0f);
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = __fmaf_rn(sums[i], factors[i / 2 % 2], zero);
    } else {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = scaled(sums[i], factors[i / 2 % 2]);
    }
  }
  // Stages factors of the tokens, or their amaxes if every column has its own; and biases.
  __device__ __forceinline__ void stage_tokens(const ResultFactors& f) const {
    writer.stage_tokens([&](int token_idx, int i) {
      store_shared(writer.factor_address(token_idx), each_column() ? f.tokens[i] : alpha(f.tokens[i], f.columns[0]));
      store_shared(writer.bias_address(token_idx), f.biases[i]);
    });
  }
  // Scales if every token and every column has an amax. A rolled loop makes four factors at a time, since a division is
  // much code; the sums stay unrolled, because registers cannot be indexed at run time.
  __device__ __forceinline__ void scale_each(Sums& sums, const float (&columns)[2]) const {
#pragma unroll 1
    for (int e = 0; e < kTokens / 8; ++e) {
      const uint2 two = load_shared64(writer.factor_address(8 * e + threadIdx.x % 4 * 2));
      float factors[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) factors[i] = alpha(float_of(i % 2 ? two.y : two.x), columns[i / 2]);
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        if (i / 4 == e) sums[i] = scaled(sums[i], factors[i % 4]);
    }
  }
};

}  // namespace jnvfp4
