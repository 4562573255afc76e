// What quantize and dequantize are called with, on the CPU and on CUDA.
#pragma once

#include <cstdint>

#include "spec.h"

namespace jnvfp4 {

struct QuantizeArgs {
  const void* x;
  Float kind;
  const float* amax;  // null: find one per row or window and write it to `found`
  float* found;
  uint8_t* data;
  uint8_t* scale;
  StreamArgs stream;
  QuantShape shape;
  float e4m3_max;
};

struct DequantizeArgs {
  const uint8_t* data;
  const uint8_t* scale;
  const float* amax;
  void* out;
  Float kind;
  int64_t blocks;
  int64_t blocks_per_amax;
  float e4m3_max;
  bool rotate_back;
};

}  // namespace jnvfp4
