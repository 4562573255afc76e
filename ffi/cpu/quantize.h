// The quantizer as other CPU handlers call it.
#pragma once

#include <cstdint>
#include <string_view>

#include "../check.h"

namespace jnvfp4 {

// One orientation. `found` is where the amax of rows or windows goes when none is given.
struct QuantizeRequest {
  const float* amax;
  float* found;
  const uint32_t* stream;
  QuantBuffers buffers;
  bool transpose;
  SpecAttr attr;
  int64_t row_blocks;
};

ffi::Error run_quantize(ffi::ThreadPool& pool, std::string_view op, const ffi::AnyBuffer& x,
                        const QuantizeRequest& request);

// A request whose rows come one group after the other, not transposed.
struct RowsRequest {
  KernelSpec spec;  // known to be supported
  QuantShape shape;
  const float* amax;
  float* found;
  StreamArgs stream;
  uint8_t* data;
  uint8_t* scale;
  float e4m3_max;
};

// Quantizes rows [row, row + count) over all matrices, which belong to one matrix and are bfloat16 at `y`, on the
// calling thread.
void quantize_rows(const RowsRequest& request, const uint16_t* y, int64_t row, int64_t count);

}  // namespace jnvfp4
