// transpose on the CPU: squares of 8 x 8 tiles, one cache line of codes wide on either side.
#include "../calls/transpose.h"

#include <cstring>

#include "parallel.h"

namespace jnvfp4 {
namespace {

constexpr int kSide = 8;                    // tiles
constexpr int kSideCodes = kSide * kBlock;  // 64 bytes
constexpr int kRowBytes = kBlock / 2;       // of a tile

// A row of each of eight tiles, the first code in the low bits. (Of a loop over plain arrays GCC makes scalar code.)
using Row = uint64_t __attribute__((vector_size(kSide * sizeof(uint64_t))));

// Swaps the upper half of each group of 2 * kCodes codes in row i with the lower half of the group in row i + kCodes.
template <int kCodes>
JNVFP4_HD void swap_halves(Row (&w)[kBlock]) {
  constexpr int kBits = 4 * kCodes;
  constexpr uint64_t kLower = ~uint64_t{0} / ((uint64_t{1} << kBits) + 1);
  for (int i = 0; i < kBlock; ++i) {
    if (i & kCodes) continue;
    const Row changed = ((w[i] >> kBits) ^ w[i + kCodes]) & kLower;
    w[i + kCodes] ^= changed;
    w[i] ^= changed << kBits;
  }
}

// Copies `tiles` of the kSide pieces that a row has. The size is mostly known, so that no function is called.
template <int kPiece>
JNVFP4_HD void copy_row(void* to, const void* from, int tiles) {
  if (tiles == kSide)
    std::memcpy(to, from, kSide * kPiece);
  else
    std::memcpy(to, from, static_cast<size_t>(tiles) * kPiece);
}

// The square of tiles that begins at tile (row, col) of a matrix. At the ends of a matrix it has fewer than 8 x 8.
struct Square {
  const TransposeArgs& a;
  int64_t matrix, row, col;
  int down, across;

  int64_t tile_rows() const { return a.rows / kBlock; }
  int64_t tile_cols() const { return a.cols / kBlock; }

  JNVFP4_HD void codes() const {
    alignas(64) uint64_t out[kSideCodes][kSide];  // row c of the result, tile r: written to memory in whole lines
    const uint8_t* from = a.data + ((matrix * a.rows + row * kBlock) * tile_cols() + col) * kRowBytes;
    const int64_t pitch = tile_cols() * kRowBytes;
    for (int r = 0; r < down; ++r) {
      Row w[kBlock] = {};
      for (int i = 0; i < kBlock; ++i, from += pitch) copy_row<kRowBytes>(&w[i], from, across);
      swap_halves<8>(w), swap_halves<4>(w), swap_halves<2>(w), swap_halves<1>(w);
      for (int i = 0; i < kBlock; ++i)
        for (int t = 0; t < kSide; ++t) out[t * kBlock + i][r] = w[i][t];
    }
    uint8_t* to = a.out_data + ((matrix * a.cols + col * kBlock) * tile_rows() + row) * kRowBytes;
    for (int c = 0; c < across * kBlock; ++c, to += tile_rows() * kRowBytes) copy_row<kRowBytes>(to, out[c], down);
  }

  JNVFP4_HD void scales() const {
    uint8_t out[kSide][kSide] = {};
    const uint8_t* from = a.scale + (matrix * a.rows + row * kBlock) * tile_cols() + col;
    for (int r = 0; r < down; ++r) {
      uint64_t first = 0, different = 0;  // a byte of each tile
      copy_row<1>(&first, from, across);
      for (int i = 0; i < kBlock; ++i, from += tile_cols()) {
        uint64_t here = 0;
        copy_row<1>(&here, from, across);
        different |= here ^ first;
      }
      uint8_t scale[kSide], mixed[kSide];
      std::memcpy(scale, &first, sizeof scale);
      std::memcpy(mixed, &different, sizeof mixed);
      for (int t = 0; t < kSide; ++t) out[t][r] = mixed[t] ? kScaleNan : scale[t];
    }
    uint8_t* to = a.out_scale + (matrix * a.cols + col * kBlock) * tile_rows() + row;
    for (int c = 0; c < across * kBlock; ++c, to += tile_rows()) copy_row<1>(to, out[c / kBlock], down);
  }
};

int64_t squares(int64_t codes) { return (codes / kBlock + kSide - 1) / kSide; }

struct TransposeSquares {
  static JNVFP4_HD void run(const TransposeArgs& a, int64_t begin, int64_t end) {
    const int64_t high = squares(a.rows), wide = squares(a.cols);
    for (int64_t s = begin; s < end; ++s) {
      const int64_t row = s / wide % high * kSide, col = s % wide * kSide;
      const auto left = [](int64_t codes, int64_t first) {
        return static_cast<int>(std::min<int64_t>(kSide, codes / kBlock - first));
      };
      const Square square{a, s / wide / high, row, col, left(a.rows, row), left(a.cols, col)};
      square.codes();
      square.scales();
    }
  }
};

ffi::Error run(ffi::ThreadPool pool, const TransposeArgs& args) {
  const auto kernel = Compiled<TransposeSquares>::best();
  const int64_t all = args.batch * squares(args.rows) * squares(args.cols);
  parallel_for(pool, all, 16, [&](int64_t b, int64_t e) { kernel(args, b, e); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Transpose, (transpose_call<ffi::ThreadPool, run>),
                              transpose_binding().Ctx<ffi::ThreadPool>());

}  // namespace jnvfp4
