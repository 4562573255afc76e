// Inputs of Blackwell's block-scaled GEMM besides the operands: their scales in tiles, their codes padded, and its
// factors. Element by element, so that a test can make the same on the CPU.
#pragma once

#include "../../../core/scale_tiles.h"
#include "../../kernels.h"

namespace jnvfp4 {

// The scales of `matrices` matrices, each in tiles of its own. No matrices: nothing to do.
struct ScaleTiles {
  const uint8_t* scale;
  uint8_t* tiles;
  int64_t matrices, rows, cols;
};
// Position of 16 neighbouring bytes of the tiles: those of the `lane`-th of the first 32 rows of a tile.
struct TilePart {
  int64_t matrix, tile_row, tile_col;
  int lane;
};
JNVFP4_HD uint8_t* tile_part(const ScaleTiles& t, const TilePart& p) {
  const int64_t tile = (p.matrix * scale_tile_rows(t.rows) + p.tile_row) * scale_tile_cols(t.cols) + p.tile_col;
  return t.tiles + tile * kScaleTileBytes + p.lane * 16;
}
// The word of these bytes that is a column of row `32 * quarter + lane` of the tile.
JNVFP4_HD uint32_t tile_word(const ScaleTiles& t, const TilePart& p, int quarter) {
  const ScalePlace first{p.tile_row * kScaleTileRows + 32 * quarter + p.lane, p.tile_col * kScaleTileCols};
  return scale_word(t.scale + p.matrix * t.rows * t.cols, t.rows, t.cols, first);
}

// Codes of `matrices` matrices, each with zeros behind its rows and columns. Sizes of rows are in pieces of 8 bytes.
struct PaddedCodes {
  const void* data;
  void* out;  // null if nothing is padded
  int64_t matrices, rows, pieces, out_rows, out_pieces;

  JNVFP4_HD int64_t count() const { return out ? matrices * out_rows * out_pieces : 0; }
};
JNVFP4_HD uint64_t padded_piece(const PaddedCodes& c, int64_t i) {
  const int64_t piece = i % c.out_pieces, row = i / c.out_pieces % c.out_rows, matrix = i / c.out_pieces / c.out_rows;
  if (row >= c.rows || piece >= c.pieces) return 0;
  return static_cast<const uint64_t*>(c.data)[(matrix * c.rows + row) * c.pieces + piece];
}

// One factor for each matrix, and behind them a zero.
struct ProductFactors {
  MatmulOperand a, b;
  GemmShape shape;
  bool ones;  // the epilogue scales the sums
  float* factors;

  JNVFP4_HD int64_t count() const { return shape.batch + 1; }
};
JNVFP4_HD float product_factor(const ProductFactors& f, int64_t i) {
  if (i == f.shape.batch) return 0.0f;
  if (f.ones) return 1.0f;
  const float a_amax = f.a.amax[f.a.map.at(i * f.shape.rows, 0)], b_amax = f.b.amax[f.b.map.at(i * f.shape.cols, 0)];
  return alpha_w4a4(a_amax, b_amax, f.a.e4m3_max, f.b.e4m3_max);
}

struct PrepareArgs {
  ScaleTiles a_scales, b_scales;
  PaddedCodes a_codes, b_codes;
  ProductFactors factors;
};
cudaError_t launch_sm100_prepare(const PrepareArgs& args, cudaStream_t stream);

}  // namespace jnvfp4
