// The end of a product on Hopper: from the sums in the registers of a warpgroup to the result.
//
// The warpgroup has the sums of 64 rows of b ("columns") by the tokens of its tile. Of every eight tokens e a thread
// has two, and two columns: sums[4 e + 2 h + p] is of column r + 8 h, r = fragment_row(), and token 8 e + 2 (lane % 4)
// + p. It scales them in registers, and sends them through shared memory, in which rows of the result are put together:
// the tokens, or, if operands are exchanged, the columns. There a row of 128 or 256 bytes is in pieces whose places
// depend on the row, so that neither side meets in a bank.
#pragma once

#include "../../numerics_fast.h"
#include "sm90_decode.cuh"
#include "sm90_fused.h"
#include "sm90_ptx.cuh"

namespace jnvfp4 {

// Of a warpgroup's 64 columns, that of a thread's first sum.
__device__ __forceinline__ int fragment_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// kTokens: of the tile. kExchanges: whether operands may be exchanged. kWindows: whether an operand has windows, and
// the sums the factors of its side, and those of decoded numbers.
template <int kTokens, bool kExchanges, bool kWindows>
struct ResultWriter {
  static constexpr int kSums = kTokens / 2;
  // In shared memory of a warpgroup: buffers, then factors and biases of the tokens.
  static constexpr int kBuffer = 8192, kBuffers = kTokens >= 128 ? 2 : 1;
  static constexpr int kShared = kBuffers * kBuffer + 2 * kTokens * 4;
  using Sums = float[kSums];

  const FusedArgs& a;
  int matrix, token, column;  // the first of the tile and of this warpgroup
  uint32_t shared;            // its address
  int barrier;                // a named barrier of the warpgroup

  __device__ __forceinline__ void write(Sums& sums) const {
    scale(sums);
    switch (a.g.result.kind) {
      case Float::kBf16: return write_halves<Bf16>(sums);
      case Float::kF16: return write_halves<F16>(sums);
      case Float::kF32: return write_floats(sums);
    }
  }

 private:
  __device__ __forceinline__ bool exchanged() const { return kExchanges && a.exchanged; }
  __device__ __forceinline__ void sync() const {
    __syncwarp();  // instructions for whole warps follow
    named_sync(barrier, 128);
  }

  // Of two buffers the other one is free when all threads have met since it was read.
  __device__ __forceinline__ uint32_t next_buffer(int chunk) const {
    if (kBuffers == 1 && chunk) sync();
    return shared + chunk % kBuffers * kBuffer;
  }

  // ---- factors and bias
  __device__ __forceinline__ uint32_t factor_at(int of) const { return shared + kBuffers * kBuffer + of * 4; }
  __device__ __forceinline__ uint32_t bias_at(int of) const { return factor_at(kTokens + of); }
  // Of a token and of a column of this warpgroup, or of the last there is. 1 if the sums need no factor of this side.
  __device__ __forceinline__ float token_amax(int of) const {
    return amax(exchanged() ? a.g.b : a.g.a, int64_t{matrix} * a.tokens + min(token + of, a.tokens - 1));
  }
  __device__ __forceinline__ float column_amax(int of) const {
    return amax(exchanged() ? a.g.a : a.g.b, int64_t{matrix} * a.columns + min(column + of, a.columns - 1));
  }
  __device__ __forceinline__ static float amax(const MatmulOperand& x, int64_t row) {
    return x.quantized() && !x.map.windows() ? amax_of(x, row) : 1.0f;
  }
  __device__ __forceinline__ float bias(int at, int end) const {
    return load_float(a.g.result.bias, a.g.result.bias_kind, min(at, end - 1));
  }
  __device__ __forceinline__ float alpha(float token_amax, float column_amax) const {
    const MatmulOperand &x = a.g.a, &y = a.g.b;
    const float left = exchanged() ? column_amax : token_amax, right = exchanged() ? token_amax : column_amax;
    if constexpr (kWindows)
      return x.map.windows() && y.map.windows() ? 1.0f
             : x.map.windows()                  ? alpha_w4a16(right, y.e4m3_max)
                                                : alpha_w4a16(left, x.e4m3_max);
    return x.quantized() ? alpha_w4a4(left, right, x.e4m3_max, y.e4m3_max) : alpha_w4a16(right, y.e4m3_max);
  }
  // The addition makes -0 the rule's 0.
  __device__ __forceinline__ float scaled(float sum, float alpha) const {
    return mul_rn(alpha, __fmaf_rn(sum, kWindows ? 1.0f : a.unscale, 0.0f));
  }

  __device__ __forceinline__ void scale(Sums& sums) const {
    const bool each_token = exchanged() ? a.each_col : a.each_row, each_column = exchanged() ? a.each_row : a.each_col;
    const bool token_bias = exchanged() && a.g.result.bias;
    const int first = fragment_row();
    const float columns[2] = {column_amax(first), each_column ? column_amax(first + 8) : 0.0f};
    if (each_token || token_bias) stage_tokens(each_column, columns[0], token_bias);
    if (each_token && each_column) {
      scale_each(sums, columns);
    } else if (each_token) {
      for_each_token([&](int i, float factor) { sums[i] = scaled(sums[i], factor); }, factor_at(0));
    } else {
      const float amax = token_amax(0), low = alpha(amax, columns[0]);
      const float factors[2] = {low, each_column ? alpha(amax, columns[1]) : low};
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = scaled(sums[i], factors[i / 2 % 2]);
    }
    if (token_bias) {
      for_each_token([&](int i, float bias) { sums[i] = add_rn(sums[i], bias); }, bias_at(0));
    } else if (a.g.result.bias) {
      const float biases[2] = {bias(column + first, a.columns), bias(column + first + 8, a.columns)};
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = add_rn(sums[i], biases[i / 2 % 2]);
    }
  }
  // Factors of the tokens, or their amaxes if every column has another amax; and biases.
  __device__ __forceinline__ void stage_tokens(bool each_column, float column_amax, bool biases) const {
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < kTokens; i += 128) {
      const float amax = token_amax(i);
      store_shared(factor_at(i), each_column ? amax : alpha(amax, column_amax));
      if (biases) store_shared(bias_at(i), bias(token + i, a.tokens));
    }
    sync();
  }
  // Calls f with the number of each sum and the staged float of its token.
  template <class F>
  __device__ __forceinline__ static void for_each_token(const F& f, uint32_t floats) {
#pragma unroll
    for (int e = 0; e < kTokens / 8; ++e) {
      const uint2 two = load_shared64(floats + (8 * e + threadIdx.x % 4 * 2) * 4);
#pragma unroll
      for (int i = 4 * e; i < 4 * e + 4; ++i) f(i, float_of(i % 2 ? two.y : two.x));
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

  // ---- 16-bit results: 64 tokens by 64 columns at a time
  // Instructions convert two floats to a word. Their NaN is another than the rule's.
  template <class T>
  __device__ __forceinline__ void write_halves(const Sums& sums) const {
    uint32_t words[kSums / 2], largest = 0;
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
      const float low = sums[2 * i], high = sums[2 * i + 1];
      words[i] = std::is_same_v<T, Bf16> ? bf16_pair(low, high) : f16_pair(low, high);
      largest = max_of_pairs<T>(largest, words[i]);
    }
    const uint32_t nan = T::store(__int_as_float(0x7fffffff)), infinity = nan << 1 & nan & 0x7fffu;
    if ((largest & 0x7fffu) > infinity || (largest >> 16 & 0x7fffu) > infinity) replace_nans(words, infinity, nan);
    write_words(words);
  }
  __device__ __forceinline__ static void replace_nans(uint32_t (&words)[kSums / 2], uint32_t infinity, uint32_t nan) {
#pragma unroll
    for (uint32_t& w : words) {
      if ((w & 0x7fffu) > infinity) w = (w & 0xffff0000u) | nan;
      if ((w >> 16 & 0x7fffu) > infinity) w = (w & 0xffffu) | nan << 16;
    }
  }
  __device__ __forceinline__ void write_words(const uint32_t (&words)[kSums / 2]) const {
    constexpr int kRows = kTokens < 64 ? kTokens : 64;  // tokens at a time
#pragma unroll
    for (int chunk = 0; chunk < kTokens / kRows; ++chunk) {
      const uint32_t buffer = next_buffer(chunk);
#pragma unroll
      for (int e = 0; e < kRows / 8; e += 2) stage_words(words + (chunk * kRows / 8 + e) * 2, buffer, e);
      sync();
      write_chunk<2, kRows>(buffer, chunk * kRows);
    }
  }
  // Of 16 tokens from the e-th eight of the chunk: four 8 x 8 matrices, whose rows the lanes of a quarter of a warp
  // give. A row of the buffer has eight pieces of 16 bytes.
  __device__ __forceinline__ void stage_words(const uint32_t* words, uint32_t buffer, int e) const {
    const int lane = threadIdx.x % 32, eight = e + lane / 16, columns = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
    const int row = (exchanged() ? columns : eight) * 8 + lane % 8, piece = exchanged() ? eight : columns;
    const uint32_t at = buffer + row * 128 + (piece ^ lane % 8) * 16;
    if (exchanged())
      store_matrices<false>(at, words);
    else
      store_matrices<true>(at, words);
  }

  // ---- float32 results: 32 tokens by 64 columns at a time
  __device__ __forceinline__ void write_floats(const Sums& sums) const {
#pragma unroll
    for (int chunk = 0; chunk < kTokens / 32; ++chunk) {
      const uint32_t buffer = next_buffer(chunk);
#pragma unroll
      for (int e = 0; e < 4; ++e) stage_floats(sums + (4 * chunk + e) * 4, buffer, e);
      sync();
      write_chunk<4, 32>(buffer, chunk * 32);
    }
  }
  // Rows of tokens have eight pieces of 32 bytes, rows of columns eight of 16.
  __device__ __forceinline__ void stage_floats(const float* sums, uint32_t buffer, int e) const {
    const int t = threadIdx.x % 4, column = fragment_row();
    if (exchanged()) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = column + 8 * h, piece = 2 * e + t / 2 ^ row % 4 * 2;
        store_shared64(buffer + row * 128 + piece * 16 + t % 2 * 8, sums[2 * h], sums[2 * h + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * e + 2 * t + i % 2, piece = column / 8 + i / 2 ^ t;
        store_shared(buffer + row * 256 + piece * 32 + column % 8 * 4, sums[i]);
      }
    }
  }

  // ---- from shared memory to the result
  // Pieces of 16 bytes. kTokensHere: of the chunk, whose first token in the tile is `first`.
  template <int kBytes, int kTokensHere>
  __device__ __forceinline__ void write_chunk(uint32_t buffer, int first) const {
    if (exchanged())
      write_rows<kBytes, 64, kTokensHere>(buffer, column, a.columns, token + first, a.tokens);
    else
      write_rows<kBytes, kTokensHere, 64>(buffer, token + first, a.tokens, column, a.columns);
  }
  // The buffer's rows, which are rows of the result from `row` on, and its columns from `col` on.
  template <int kBytes, int kRows, int kCols>
  __device__ __forceinline__ void write_rows(uint32_t buffer, int row, int rows, int col, int cols) const {
    constexpr int kPieces = kCols * kBytes / 16, kStep = 128 / kPieces;  // of a row; rows of a step
    const int thread = threadIdx.x % 128, piece = thread % kPieces, at_col = col + piece * (16 / kBytes);
    auto* const out = static_cast<uint8_t*>(a.g.result.out);
    const bool whole = cols % (16 / kBytes) == 0;
#pragma unroll
    for (int step = 0; step < kRows / kStep; ++step) {
      const int r = step * kStep + thread / kPieces;
      uint4 v = load_shared128(buffer + r * kCols * kBytes + place<kBytes, kCols>(r, piece) * 16);
      if constexpr (kBytes == 4)
        v.x = canonical_nan(v.x), v.y = canonical_nan(v.y), v.z = canonical_nan(v.z), v.w = canonical_nan(v.w);
      if (row + r >= rows || at_col >= cols) continue;
      uint8_t* const p = out + ((int64_t{matrix} * rows + row + r) * cols + at_col) * kBytes;
      if (whole)
        *reinterpret_cast<uint4*>(p) = v;
      else
        write_part<kBytes>(p, v, cols - at_col);
    }
  }
  // Where the 16 bytes `piece` of row r are.
  template <int kBytes, int kCols>
  __device__ __forceinline__ static int place(int r, int piece) {
    if constexpr (kBytes == 2) return piece ^ r % 8;
    if constexpr (kCols == 64) return piece ^ r / 2 % 4 * 2;
    return piece ^ r % 4 * 2;
  }
  template <int kBytes>
  __device__ __forceinline__ static void write_part(uint8_t* p, uint4 v, int count) {
    const uint32_t words[] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 16 / kBytes; ++i) {
      if (i >= count) continue;
      if constexpr (kBytes == 4)
        reinterpret_cast<uint32_t*>(p)[i] = words[i];
      else
        reinterpret_cast<uint16_t*>(p)[i] = static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));
    }
  }
};

}  // namespace jnvfp4
