// Block scales as the FP4 tensor cores of Blackwell read them: tiles of 128 rows and 4 columns, whose first tile holds
// the first columns of the first rows, and the next one the columns beside them. 16 neighbouring bytes of a tile are
// the 4 columns of row r, then those of rows r + 32, r + 64 and r + 96. What a matrix lacks of its last tiles is zero.
#pragma once

#include <cstdint>

#include "numerics.h"

namespace jnvfp4 {

inline constexpr int64_t kScaleTileRows = 128, kScaleTileCols = 4, kScaleTileBytes = 512;

JNVFP4_HD constexpr int64_t scale_tile_rows(int64_t rows) { return (rows + kScaleTileRows - 1) / kScaleTileRows; }
JNVFP4_HD constexpr int64_t scale_tile_cols(int64_t cols) { return (cols + kScaleTileCols - 1) / kScaleTileCols; }

// Bytes of the tiles of a matrix of `rows` x `cols` scales.
JNVFP4_HD constexpr int64_t tiled_scale_bytes(int64_t rows, int64_t cols) {
  return scale_tile_rows(rows) * scale_tile_cols(cols) * kScaleTileBytes;
}

struct ScalePlace {
  int64_t row, col;
};

// Which byte of the tiles a scale of a matrix of `cols` columns is, and which scale a byte is.
JNVFP4_HD constexpr int64_t tiled_scale_at(ScalePlace p, int64_t cols) {
  const int64_t tile = p.row / kScaleTileRows * scale_tile_cols(cols) + p.col / kScaleTileCols;
  return tile * kScaleTileBytes + p.row % 32 * 16 + p.row % kScaleTileRows / 32 * 4 + p.col % kScaleTileCols;
}
JNVFP4_HD constexpr ScalePlace tiled_scale_place(int64_t at, int64_t cols) {
  const int64_t tile = at / kScaleTileBytes, byte = at % kScaleTileBytes;
  return {tile / scale_tile_cols(cols) * kScaleTileRows + byte % 16 / 4 * 32 + byte / 16,
          tile % scale_tile_cols(cols) * kScaleTileCols + byte % 4};
}

// The 4 scales from `p` on, a column of a tile: zero where the matrix of `rows` x `cols` has none.
JNVFP4_HD uint32_t scale_word(const uint8_t* scale, int64_t rows, int64_t cols, ScalePlace p) {
  uint32_t word = 0;
  if (p.row >= rows) return word;
  const uint8_t* first = scale + p.row * cols + p.col;
  if (cols % kScaleTileCols == 0) {  // then rows begin at multiples of 4 bytes
#if defined(__CUDA_ARCH__)
    return *reinterpret_cast<const uint32_t*>(first);
#endif
  }
  for (int i = 0; i < kScaleTileCols; ++i)
    if (p.col + i < cols) word |= uint32_t{first[i]} << (8 * i);
  return word;
}

}  // namespace jnvfp4
