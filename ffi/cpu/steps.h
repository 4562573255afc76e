// quantize and dequantize as steps of other CPU kernels: on the calling thread, inside parallel_for.
#pragma once

#include <cstdint>

#include "../spec.h"

namespace jnvfp4 {

struct QuantizeStep {
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

struct DequantizeStep {
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

// `spec` is one of SupportedSpecs.
void quantize_step(const QuantizeStep& step, const KernelSpec& spec);
void dequantize_step(const DequantizeStep& step);

}  // namespace jnvfp4
