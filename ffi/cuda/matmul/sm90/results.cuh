// The end of a product on Hopper: from the sums in the registers of a warpgroup to the result.
//
// The warpgroup has the sums of 64 rows of b ("columns") by the tokens of its tile. Of every eight tokens e a thread
// has two, and two columns: sums[4 e + 2 h + p] is of column r + 8 h, r = fragment_row(), and token 8 e + 2 (lane % 4)
// + p. They are scaled in registers, and go through shared memory, in which rows of the result are put together: of
// tokens or, if operands are exchanged, of columns. There they are in strips 128 bytes wide, in which the place of a
// piece of 16 bytes depends on the row, so that neither side meets in a bank.
#pragma once

#include "../../kernels.h"
#include "ptx.cuh"

namespace jnvfp4 {

// Of a warpgroup's 64 columns, that of a thread's first sum.
__device__ __forceinline__ int fragment_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// Bytes for all 16-bit results of a tile, but of one of 256 tokens.
constexpr int result_buffer(int tokens) { return tokens <= 64 ? 8192 : tokens == 192 ? 24576 : 16384; }

// kTokens: of the tile. kExchanged: whether operands are exchanged.
template <int kTokens_, bool kExchanged, int kBuffer_ = result_buffer(kTokens_)>
struct TileWriter {
  static constexpr int kTokens = kTokens_, kSums = kTokens / 2;
  // In shared memory of a warpgroup: the buffer, then factors and biases of the tokens.
  static constexpr int kBuffer = kBuffer_;
  static constexpr int kShared = kBuffer + 2 * kTokens * 4;
  using Sums = float[kSums];

  const MatmulResult& result;
  int tokens, columns;        // of one matrix
  int matrix, token, column;  // the first of the tile and of this warpgroup
  uint32_t shared;            // its address
  int barrier;                // a named barrier of the warpgroup

  // Scaled sums, with biases.
  __device__ __forceinline__ void write(const Sums& sums) const {
    result.kind == Float::kF32 ? write_floats(sums) : write_halves(sums);
  }
  // Those of the thread's columns or, if operands are exchanged, of the tokens that it brings for all threads.
  __device__ __forceinline__ void load_biases(float (&biases)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      biases[i] = 0;
      if (result.bias)
        biases[i] = kExchanged ? bias(token + threadIdx.x % 128 + 128 * i, tokens)
                               : bias(column + fragment_row() + 8 * i, columns);
    }
  }
  // Those of tokens have been staged.
  __device__ __forceinline__ void add_biases(Sums& sums, const float (&biases)[2]) const {
    if (!result.bias) return;
    if constexpr (kExchanged) {
      for_each_token([&](int i, float bias) { sums[i] = add_rn(sums[i], bias); }, bias_at(0));
    } else {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = add_rn(sums[i], biases[i / 2 % 2]);
    }
  }
  // Calls `store` with what this thread brings: the number of a token of the tile, and its place of two.
  template <class F>
  __device__ __forceinline__ void stage_tokens(const F& store) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of = threadIdx.x % 128 + 128 * i;
      if (of < kTokens) store(of, i);
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
  __device__ __forceinline__ uint32_t factor_at(int of) const { return shared + kBuffer + of * 4; }
  __device__ __forceinline__ uint32_t bias_at(int of) const { return factor_at(kTokens + of); }

 private:
  __device__ __forceinline__ void sync() const {
    __syncwarp();  // instructions for whole warps follow
    named_sync(barrier, 128);
  }
  __device__ __forceinline__ float bias(int at, int end) const {
    return load_float(result.bias, result.bias_kind, min(at, end - 1));
  }

  // ---- 16-bit results
  __device__ __forceinline__ void write_halves(const Sums& sums) const {
    uint32_t words[kSums / 2];
    if (result.kind == Float::kBf16) {
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
      write_rows<kBytes, 64, kAtOnce>(column, columns, token + first, tokens);
    else
      write_rows<kBytes, kAtOnce, 64>(token + first, tokens, column, columns);
  }
  // The buffer's rows, which are rows of the result from `row` on, and its columns from `col` on.
  template <int kBytes, int kRows, int kCols>
  __device__ __forceinline__ void write_rows(int row, int rows, int col, int cols) const {
    auto* const out = static_cast<uint8_t*>(result.out) + ((int64_t{matrix} * rows + row) * cols + col) * kBytes;
    if (cols % (16 / kBytes) == 0)
      write_pieces<kBytes, kRows, kCols>(out, rows - row, cols - col, int64_t{cols} * kBytes);
    else
      write_elements<kBytes, kRows, kCols>(out, rows - row, cols - col, int64_t{cols} * kBytes);
  }
  template <int kBytes, int kRows, int kCols>
  __device__ __forceinline__ void write_pieces(uint8_t* out, int rows, int cols, int64_t pitch) const {
    constexpr int kPieces = kCols * kBytes / 16, kStep = 128 / kPieces;  // of a row; rows of a step
    constexpr int kSteps = (kRows + kStep - 1) / kStep;
    const int first = threadIdx.x % 128 / kPieces, piece = threadIdx.x % 128 % kPieces;
    const int end = kRows % kStep ? min(rows, kRows) : rows;
    if (first < kStep && piece * (16 / kBytes) < cols)
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int r = first + i * kStep;
        uint4 v = load_shared128(place<kRows>(r, piece));
        if constexpr (kBytes == 4)
          v.x = canonical_nan(v.x), v.y = canonical_nan(v.y), v.z = canonical_nan(v.z), v.w = canonical_nan(v.w);
        if (r < end) *reinterpret_cast<uint4*>(out + r * pitch + piece * 16) = v;
      }
  }
  template <int kBytes, int kRows, int kCols>
  __device__ __forceinline__ void write_elements(uint8_t* out, int rows, int cols, int64_t pitch) const {
    using Stored = std::conditional_t<kBytes == 4, uint32_t, uint16_t>;
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < min(kRows, rows) * kCols; i += 128) {
      const int r = i / kCols, at = i % kCols * kBytes;
      Stored v = load_shared<Stored>(place<kRows>(r, at / 16) + at % 16);
      if constexpr (kBytes == 4) v = canonical_nan(v);
      if (i % kCols < cols) *reinterpret_cast<Stored*>(out + r * pitch + at) = v;
    }
  }
};

}  // namespace jnvfp4
