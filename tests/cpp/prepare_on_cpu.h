// What the kernels of cublaslt/prepare.cu make, in loops on the CPU.
#pragma once

#include <cstring>

#include "cuda/matmul/cublaslt/prepare.h"

namespace jnvfp4 {

inline void prepare_on_cpu(const PrepareArgs& p) {
  for (const ScaleTiles& t : {p.a_scales, p.b_scales})
    for (int64_t matrix = 0; matrix < t.matrices; ++matrix)
      for (int64_t row = 0; row < scale_tile_rows(t.rows); ++row)
        for (int64_t col = 0; col < scale_tile_cols(t.cols); ++col)
          for (int lane = 0; lane < 32; ++lane)
            for (int quarter = 0; quarter < 4; ++quarter) {
              const TilePart part{matrix, row, col, lane};
              const uint32_t word = tile_word(t, part, quarter);
              std::memcpy(tile_part(t, part) + 4 * quarter, &word, 4);
            }
  for (const PaddedCodes& c : {p.a_codes, p.b_codes})
    for (int64_t i = 0; i < c.count(); ++i) static_cast<uint64_t*>(c.out)[i] = padded_piece(c, i);
  for (int64_t i = 0; i < p.factors.count(); ++i) p.factors.factors[i] = product_factor(p.factors, i);
}

}  // namespace jnvfp4
