// The end of a product on Hopper: from the sums in the registers of a warpgroup to the result.
//
// The warpgroup has the sums of 64 rows of b ("columns") by the tokens of its tile. Of every eight tokens e a thread
// has two, and two columns: sums[4 e + 2 h + p] is of column r + 8 h, r = fragment_row(), and token 8 e + 2 (lane % 4)
// + p. It scales them in registers, and sends them through shared memory, in which rows of the result are put together:
// of tokens or, if operands are exchanged, of columns. There they are in strips 128 bytes wide, in which the place of a
// piece of 16 bytes depends on the row, so that neither side meets in a bank.
#pragma once

#include "sm90_decode.cuh"
#include "sm90_fused.h"
#include "sm90_ptx.cuh"

namespace jnvfp4 {

// Of a warpgroup's 64 columns, that of a thread's first sum.
__device__ __forceinline__ int fragment_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// What the end of a tile takes from memory: amaxes of the thread's columns; those of the tokens that it brings for all
// threads, or the one of all tokens; biases of either.
struct ResultFactors {
  float columns[2], tokens[2], biases[2];
};

// kTokens: of the tile. kExchanged: whether operands are exchanged. kExact: whether the factors of decoded numbers
// times alpha are exact.
template <int kTokens, bool kExchanged, bool kExact>
struct ResultWriter {
  static constexpr int kSums = kTokens / 2;
  // In shared memory of a warpgroup: the buffer, then factors and biases of the tokens.
  static constexpr int kBuffer = kTokens >= 128 ? 16384 : 8192, kShared = kBuffer + 2 * kTokens * 4;
  using Sums = float[kSums];

  const FusedArgs& a;
  int matrix, token, column;  // the first of the tile and of this warpgroup
  uint32_t shared;            // its address
  int barrier;                // a named barrier of the warpgroup

  // To be called while the last multiplications run.
  __device__ __forceinline__ void load(ResultFactors& f) const {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of = fragment_row() + 8 * i;
      f.columns[i] = column_amax(of);
      f.tokens[i] = token_amax(each_token() ? thread + 128 * i : 0);
      f.biases[i] = 0;
      if (a.g.result.bias)
        f.biases[i] = kExchanged ? bias(token + thread + 128 * i, a.tokens) : bias(column + of, a.columns);
    }
  }
  __device__ __forceinline__ void write(Sums& sums, const ResultFactors& f) const {
    scale(sums, f);
    a.g.result.kind == Float::kF32 ? write_floats(sums) : write_halves(sums);
  }

 private:
  __device__ __forceinline__ bool each_token() const { return kExchanged ? a.each_col : a.each_row; }
  __device__ __forceinline__ bool each_column() const { return kExchanged ? a.each_row : a.each_col; }
  __device__ __forceinline__ void sync() const {
    __syncwarp();  // instructions for whole warps follow
    named_sync(barrier, 128);
  }

  // ---- factors and bias
  __device__ __forceinline__ uint32_t factor_at(int of) const { return shared + kBuffer + of * 4; }
  __device__ __forceinline__ uint32_t bias_at(int of) const { return factor_at(kTokens + of); }
  // Of a token and of a column of this warpgroup, or of the last there is.
  __device__ __forceinline__ float token_amax(int of) const {
    const int row = min(token + of, a.tokens - 1);
    return kExchanged ? amax(a.g.b, each_token(), row, a.tokens, a.b_matrices)
                      : amax(a.g.a, each_token(), row, a.tokens, a.a_matrices);
  }
  __device__ __forceinline__ float column_amax(int of) const {
    const int row = min(column + of, a.columns - 1);
    return kExchanged ? amax(a.g.a, each_column(), row, a.columns, a.a_matrices)
                      : amax(a.g.b, each_column(), row, a.columns, a.b_matrices);
  }
  // 1 for a dense operand. `each`: whether rows of a matrix have several. `shared`: else the
  // matrices that share one.
  __device__ __forceinline__ float amax(const MatmulOperand& x, bool each, int row, int rows, int shared) const {
    if (!x.quantized()) return 1.0f;
    return each ? amax_of(x, int64_t{matrix} * rows + row) : __ldg(x.amax + matrix / shared);
  }
  __device__ __forceinline__ float bias(int at, int end) const {
    return load_float(a.g.result.bias, a.g.result.bias_kind, min(at, end - 1));
  }
  __device__ __forceinline__ float alpha(float token_amax, float column_amax) const {
    const MatmulOperand &x = a.g.a, &y = a.g.b;
    const float left = kExchanged ? column_amax : token_amax, right = kExchanged ? token_amax : column_amax;
    return x.quantized() ? alpha_w4a4(left, right, x.e4m3_max, y.e4m3_max) : alpha_w4a16(right, y.e4m3_max);
  }
  // The addition makes -0 the rule's 0.
  __device__ __forceinline__ float scaled(float sum, float alpha) const {
    return mul_rn(alpha, __fmaf_rn(sum, a.unscale, 0.0f));
  }

  __device__ __forceinline__ void scale(Sums& sums, const ResultFactors& f) const {
    const bool token_bias = kExchanged && a.g.result.bias;
    if (each_token() || token_bias) stage_tokens(f);
    if (!each_token()) {
      scale_columns(sums, f);
    } else if (each_column()) {
      scale_each(sums, f.columns);
    } else {
      for_each_token([&](int i, float factor) { sums[i] = scaled(sums[i], factor); }, factor_at(0));
    }
    if (token_bias) {
      for_each_token([&](int i, float bias) { sums[i] = add_rn(sums[i], bias); }, bias_at(0));
    } else if (a.g.result.bias) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = add_rn(sums[i], f.biases[i / 2 % 2]);
    }
  }
  // All tokens have one amax. Where the factor of decoded numbers times alpha is exact, one operation is as good as
  // two, unless it is infinite, or 0, which takes the sign of a sum. Adding -0 changes nothing.
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
  // Factors of the tokens, or their amaxes if every column has another one; and biases.
  __device__ __forceinline__ void stage_tokens(const ResultFactors& f) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of = threadIdx.x % 128 + 128 * i;
      if (of >= kTokens) continue;
      store_shared(factor_at(of), each_column() ? f.tokens[i] : alpha(f.tokens[i], f.columns[0]));
      store_shared(bias_at(of), f.biases[i]);
    }
    sync();
  }
  // Calls `apply` with the number of each sum and the staged float of its token.
  template <class F>
  __device__ __forceinline__ static void for_each_token(const F& apply, uint32_t floats) {
#pragma unroll
    for (int e = 0; e < kTokens / 8; ++e) {
      const uint2 two = load_shared64(floats + (8 * e + threadIdx.x % 4 * 2) * 4);
#pragma unroll
      for (int i = 4 * e; i < 4 * e + 4; ++i) apply(i, float_of(i % 2 ? two.y : two.x));
    }
  }
  // Every token and every column has an amax. Four factors at a time by a loop, since a division is much code, for sums
  // whose registers have no index that is known late.
  __device__ __forceinline__ void scale_each(Sums& sums, const float (&columns)[2]) const {
#pragma unroll 1
    for (int e = 0; e < kTokens / 8; ++e) {
      const uint2 two = load_shared64(factor_at(8 * e + threadIdx.x % 4 * 2));
      float factors[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) factors[i] = alpha(float_of(i % 2 ? two.y : two.x), columns[i / 2]);
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        if (i / 4 == e) sums[i] = scaled(sums[i], factors[i % 4]);
    }
  }

  // ---- 16-bit results
  __device__ __forceinline__ void write_halves(const Sums& sums) const {
    uint32_t words[kSums / 2];
    if (a.g.result.kind == Float::kBf16) {
      if (convert<Bf16>(sums, words)) replace_nans<Bf16>(words);
    } else {
      if (convert<F16>(sums, words)) replace_nans<F16>(words);
    }
    write_words(words);
  }
  // Instructions convert two floats to a word. Returns whether there are NaNs, which are others than the rule's.
  template <class T>
  __device__ __forceinline__ static bool convert(const Sums& sums, uint32_t (&words)[kSums / 2]) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
      const float low = sums[2 * i], high = sums[2 * i + 1];
      words[i] = std::is_same_v<T, Bf16> ? bf16_pair(low, high) : f16_pair(low, high);
      largest = max_of_pairs<T>(largest, words[i]);
    }
    return is_nan<T>(largest) || is_nan<T>(largest >> 16);
  }
  template <class T>
  __device__ __forceinline__ static bool is_nan(uint32_t half) {
    return (half & 0x7fffu) > (std::is_same_v<T, Bf16> ? 0x7f80u : 0x7c00u);
  }
  template <class T>
  __device__ __forceinline__ static void replace_nans(uint32_t (&words)[kSums / 2]) {
    const uint32_t nan = T::store(float_of(kNan));
#pragma unroll
    for (uint32_t& w : words) {
      if (is_nan<T>(w)) w = (w & 0xffff0000u) | nan;
      if (is_nan<T>(w >> 16)) w = (w & 0xffffu) | nan << 16;
    }
  }
  __device__ __forceinline__ void write_words(const uint32_t (&words)[kSums / 2]) const {
    constexpr int kAtOnce = kTokens < kBuffer / 128 ? kTokens : kBuffer / 128;
#pragma unroll
    for (int first = 0; first < kTokens; first += kAtOnce) {
      sync();  // the tokens before have been written, or the last tile
#pragma unroll
      for (int e = 0; e < kAtOnce / 8; e += 2) stage_words<kAtOnce>(words + (first / 8 + e) * 2, e);
      sync();
      write_chunk<2, kAtOnce>(first);
    }
  }
  // Of 16 tokens from the e-th eight in the buffer: four 8 x 8 matrices, whose rows the lanes of a quarter of a warp
  // give.
  template <int kAtOnce>
  __device__ __forceinline__ void stage_words(const uint32_t* words, int e) const {
    const int lane = threadIdx.x % 32, eight = e + lane / 16, columns = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
    if constexpr (kExchanged)
      store_matrices<false>(place<64>(columns * 8 + lane % 8, eight), words);
    else
      store_matrices<true>(place<kAtOnce>(eight * 8 + lane % 8, columns), words);
  }

  // ---- float32 results
  __device__ __forceinline__ void write_floats(const Sums& sums) const {
    constexpr int kAtOnce = kBuffer / 256;
#pragma unroll
    for (int first = 0; first < kTokens; first += kAtOnce) {
      sync();
#pragma unroll
      for (int e = 0; e < kAtOnce / 8; ++e) stage_floats<kAtOnce>(sums + (first / 8 + e) * 4, e);
      sync();
      write_chunk<4, kAtOnce>(first);
    }
  }
  template <int kAtOnce>
  __device__ __forceinline__ void stage_floats(const float* sums, int e) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int of = fragment_row() + 8 * h;
      if constexpr (kExchanged) {
        store_shared64(place<64>(of, 2 * e + t / 2) + t % 2 * 8, sums[2 * h], sums[2 * h + 1]);
      } else {
#pragma unroll
        for (int p = 0; p < 2; ++p)
          store_shared(place<kAtOnce>(8 * e + 2 * t + p, of / 4) + of % 4 * 4, sums[2 * h + p]);
      }
    }
  }

  // ---- from shared memory to the result
  // The 16 bytes `piece` of row r of the buffer, whose strips have kRows rows.
  template <int kRows>
  __device__ __forceinline__ uint32_t place(int r, int piece) const {
    return shared + piece / 8 * kRows * 128 + r * 128 + (piece % 8 ^ r % 8) * 16;
  }
  // kAtOnce tokens from the `first` of the tile on.
  template <int kBytes, int kAtOnce>
  __device__ __forceinline__ void write_chunk(int first) const {
    if constexpr (kExchanged)
      write_rows<kBytes, 64, kAtOnce>(column, a.columns, token + first, a.tokens);
    else
      write_rows<kBytes, kAtOnce, 64>(token + first, a.tokens, column, a.columns);
  }
  // The buffer's rows, which are rows of the result from `row` on, and its columns from `col` on.
  template <int kBytes, int kRows, int kCols>
  __device__ __forceinline__ void write_rows(int row, int rows, int col, int cols) const {
    auto* const out = static_cast<uint8_t*>(a.g.result.out) + ((int64_t{matrix} * rows + row) * cols + col) * kBytes;
    if (cols * kBytes % 16 == 0)
      write_pieces<kBytes, kRows, kCols>(out, rows - row, (cols - col) * kBytes, int64_t{cols} * kBytes);
    else
      write_elements<kBytes, kRows, kCols>(out, rows - row, cols - col, int64_t{cols} * kBytes);
  }
  template <int kBytes, int kRows, int kCols>
  __device__ __forceinline__ void write_pieces(uint8_t* out, int rows, int bytes, int64_t pitch) const {
    constexpr int kPieces = kCols * kBytes / 16, kStep = 128 / kPieces;  // of a row; rows of a step
    const int first = threadIdx.x % 128 / kPieces, piece = threadIdx.x % kPieces;
    if (piece * 16 < bytes)
#pragma unroll
      for (int r = first; r < kRows; r += kStep) {
        uint4 v = load_shared128(place<kRows>(r, piece));
        if constexpr (kBytes == 4)
          v.x = canonical_nan(v.x), v.y = canonical_nan(v.y), v.z = canonical_nan(v.z), v.w = canonical_nan(v.w);
        if (r < rows) *reinterpret_cast<uint4*>(out + r * pitch + piece * 16) = v;
      }
  }
  template <int kBytes, int kRows, int kCols>
  __device__ __forceinline__ void write_elements(uint8_t* out, int rows, int cols, int64_t pitch) const {
    using Stored = std::conditional_t<kBytes == 4, uint32_t, uint16_t>;
    const int c = threadIdx.x % kCols, at = c * kBytes;
    if (c < cols)
#pragma unroll 1
      for (int r = threadIdx.x % 128 / kCols; r < min(kRows, rows); r += 128 / kCols) {
        Stored v = load_shared<Stored>(place<kRows>(r, at / 16) + at % 16);
        if constexpr (kBytes == 4) v = canonical_nan(v);
        *reinterpret_cast<Stored*>(out + r * pitch + at) = v;
      }
  }
};

}  // namespace jnvfp4
