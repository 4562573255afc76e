// quantize and dequantize as other CPU kernels call them: on a pool, or as a step on the calling thread, inside
// parallel_for.
#pragma once

#include <algorithm>

#include "../args.h"
#include "xla/ffi/api/ffi.h"

namespace jnvfp4 {

// `spec` is one of SupportedSpecs.
void quantize(::xla::ffi::ThreadPool& pool, const QuantizeArgs& args, const KernelSpec& spec);
void quantize_step(const QuantizeArgs& args, const KernelSpec& spec);
void dequantize_step(const DequantizeArgs& args);

// The random bits of rows of a matrix that are quantized as an array of their own, which begins at `row`.
struct RowStream {
  uint32_t words[4] = {};
  int64_t row_blocks = 0;

  RowStream(const StreamArgs& all, int64_t matrix, int64_t row) : row_blocks(all.row_blocks) {
    std::copy_n(all.words + matrix * 4, 4, words);
    const uint64_t first = (words[2] | uint64_t{words[3]} << 32) + static_cast<uint64_t>(row * row_blocks);
    words[2] = static_cast<uint32_t>(first), words[3] = static_cast<uint32_t>(first >> 32);
  }
  RowStream() = default;
  StreamArgs args() const { return {words, row_blocks}; }
};

}  // namespace jnvfp4
