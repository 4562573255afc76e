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

}  // namespace jnvfp4
