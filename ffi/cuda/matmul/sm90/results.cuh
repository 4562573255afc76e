// Epilogue of the Hopper GEMMs: from the accumulators of a consumer warpgroup to the result.
//
// The warpgroup has the sums of 64 rows of b ("columns") by the tokens of its tile, as wgmma leaves them. Warp w has 16
// of the columns; of each eight tokens e it has a 16x8 fragment, four sums per lane:
//
//                    token 8e    +1 | +2    +3 | +4    +5 | +6    +7
//   column 16w          lane 0      |  lane 1  |  lane 2  |  lane 3      sums[4e], sums[4e + 1]
//   column 16w + 1      lane 4      |  lane 5  |  lane 6  |  lane 7
//     ...
//   column 16w + 8      lane 0      |  lane 1  |  lane 2  |  lane 3      sums[4e + 2], sums[4e + 3]
//     ...                                                                16w + lane / 4 is fragment_row()
//
// The sums are scaled in registers and staged in shared memory, where rows of the result are put together: of tokens
// or, if A and B are swapped, of columns. A row lies in strips 128 bytes wide, swizzled in pieces of 16 bytes, so that
// neither the stores nor the loads have bank conflicts.
#pragma once

#include "../../kernels.h"
#include "ptx.cuh"

namespace jnvfp4 {

// Column index, of the warpgroup's 64, of this thread's first sum.
__device__ __forceinline__ int fragment_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// Bytes of the staging buffer: all 16-bit results of a tile, except for one of 256 tokens.
constexpr int result_buffer(int tokens) { return tokens <= 64 ? 8192 : tokens == 192 ? 24576 : 16384; }

// Writes a tile of kTokens. kSwapped: A and B are swapped, so that rows of the result are columns of the tile.
template <int kTokens_, bool kSwapped, int kBuffer_ = result_buffer(kTokens_)>
struct TileWriter {
  static constexpr int kTokens = kTokens_, kSums = kTokens / 2;
  static constexpr int kBuffer = kBuffer_;
  // Shared memory of a warpgroup: the staging buffer, then factors and biases of the tokens.
  static constexpr int kShared = kBuffer + 2 * kTokens * 4;
  using Sums = float[kSums];

  const MatmulResult& result;
  int tokens, columns;        // extents of one matrix
  int matrix, token, column;  // position of the tile, and of this warpgroup's first column
  uint32_t shared;            // address of kShared bytes
  int barrier_id;             // named barrier of the warpgroup

  // Writes sums that are scaled and have their biases.
  __device__ __forceinline__ void write(const Sums& sums) const {
    result.kind == Float::kF32 ? write_floats(sums) : write_halves(sums);
  }
  // Loads biases of the thread's columns or, if swapped, of the tokens that it stages for all threads.
  __device__ __forceinline__ void load_biases(float (&biases)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      biases[i] = 0;
      if (result.bias)
        biases[i] = kSwapped ? bias(token + threadIdx.x % 128 + 128 * i, tokens)
                             : bias(column + fragment_row() + 8 * i, columns);
    }
  }
  // Adds the biases of columns or, if swapped, those of tokens that have been staged.
  __device__ __forceinline__ void add_biases(Sums& sums, const float (&biases)[2]) const {
    if (!result.bias) return;
    if constexpr (kSwapped) {
      for_each_token([&](int i, float bias) { sums[i] = add_rn(sums[i], bias); }, bias_address(0));
    } else {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = add_rn(sums[i], biases[i / 2 % 2]);
    }
  }
  // Calls `store` with the index of each token that this thread stages, and which of its two that is.
  template <class F>
  __device__ __forceinline__ void stage_tokens(const F& store) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token_idx = threadIdx.x % 128 + 128 * i;
      if (token_idx < kTokens) store(token_idx, i);
    }
    sync();
  }
  // Calls `apply` with the index of each sum and the staged float of its token.
  template <class F>
  __device__ __forceinline__ static void for_each_token(const F& apply, uint32_t floats) {
#pragma unroll
    for (int e = 0; e < kTokens / 8; ++e) {
      const uint2 two = load_shared64(floats + (8 * e + threadIdx.x % 4 * 2) * 4);
#pragma unroll
      for (int i = 4 * e; i < 4 * e + 4; ++i) apply(i, float_of(i % 2 ? two.y : two.x));
    }
  }
  __device__ __forceinline__ uint32_t factor_address(int token_idx) const { return shared + kBuffer + token_idx * 4; }
  __device__ __forceinline__ uint32_t bias_address(int token_idx) const { return factor_address(kTokens + token_idx); }

 private:
  __device__ __forceinline__ void sync() const {
    __syncwarp();  // instructions for whole warps follow
    named_sync(barrier_id, 128);
  }
  __device__ __forceinline__ float bias(int idx, int end) const {
    return load_float(result.bias, result.bias_kind, min(idx, end - 1));
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
  // Converts pairs of floats by instructions. Returns whether there are NaNs, whose bits differ from the rule's.
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
    constexpr int kChunk = kTokens < kBuffer / 128 ? kTokens : kBuffer / 128;
#pragma unroll
    for (int first = 0; first < kTokens; first += kChunk) {
      sync();  // the previous tokens, or the last tile, have been written
#pragma unroll
      for (int e = 0; e < kChunk / 8; e += 2) stage_words<kChunk>(words + (first / 8 + e) * 2, e);
      sync();
      write_chunk<2, kChunk>(first);
    }
  }
  // Stages 16 tokens from the e-th eight on: four 8 x 8 matrices, whose rows a quarter of the warp each addresses.
  template <int kChunk>
  __device__ __forceinline__ void stage_words(const uint32_t* words, int e) const {
    const int lane = threadIdx.x % 32, eight = e + lane / 16, column8 = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
    if constexpr (kSwapped)
      store_matrices<false>(piece_address<64>(column8 * 8 + lane % 8, eight), words);
    else
      store_matrices<true>(piece_address<kChunk>(eight * 8 + lane % 8, column8), words);
  }

  // ---- float32 results
  __device__ __forceinline__ void write_floats(const Sums& sums) const {
    constexpr int kChunk = kBuffer / 256;
#pragma unroll
    for (int first = 0; first < kTokens; first += kChunk) {
      sync();
#pragma unroll
      for (int e = 0; e < kChunk / 8; ++e) stage_floats<kChunk>(sums + (first / 8 + e) * 4, e);
      sync();
      write_chunk<4, kChunk>(first);
    }
  }
  template <int kChunk>
  __device__ __forceinline__ void stage_floats(const float* sums, int e) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column_idx = fragment_row() + 8 * h;
      if constexpr (kSwapped) {
        store_shared64(piece_address<64>(column_idx, 2 * e + t / 2) + t % 2 * 8, sums[2 * h], sums[2 * h + 1]);
      } else {
#pragma unroll
        for (int p = 0; p < 2; ++p)
          store_shared(piece_address<kChunk>(8 * e + 2 * t + p, column_idx / 4) + column_idx % 4 * 4, sums[2 * h + p]);
      }
    }
  }

  // ---- from shared memory to the result
  // Address of the 16 bytes `piece` of row r of the buffer, whose strips have kRows rows.
  template <int kRows>
  __device__ __forceinline__ uint32_t piece_address(int r, int piece) const {
    return shared + piece / 8 * kRows * 128 + r * 128 + (piece % 8 ^ r % 8) * 16;
  }
  // Writes kChunk tokens from the `first` of the tile on.
  template <int kBytes, int kChunk>
  __device__ __forceinline__ void write_chunk(int first) const {
    if constexpr (kSwapped)
      write_rows<kBytes, 64, kChunk>(column, columns, token + first, tokens);
    else
      write_rows<kBytes, kChunk, 64>(token + first, tokens, column, columns);
  }
  // Writes the buffer, whose first element is (row, col) of the result, without what is past its ends.
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
        uint4 v = load_shared128(piece_address<kRows>(r, piece));
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
      const int r = i / kCols, byte = i % kCols * kBytes;
      Stored v = load_shared<Stored>(piece_address<kRows>(r, byte / 16) + byte % 16);
      if constexpr (kBytes == 4) v = canonical_nan(v);
      if (i % kCols < cols) *reinterpret_cast<Stored*>(out + r * pitch + byte) = v;
    }
  }
};

}  // namespace jnvfp4
