// The launchers that the handlers call. No XLA here, so that device code compiles fast.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../args.h"
#include "../producers.h"

namespace jnvfp4 {

// One pass over x for both orientations.
struct PairArgs {
  QuantizeArgs row, col;
};

// A norm or a gate, and its result quantized by tiles: along rows, and along columns.
struct ProduceArgs {
  Sources sources;
  QuantizeArgs row, col;
  uint16_t* values;  // null: not wanted
  float* factors;    // of each row, for a norm
};

// The amax after the rotation, one for each `shape.rows_per_amax` rows.
struct RhtAmaxArgs {
  const void* x;
  Float kind;
  float* amax;
  QuantShape shape;
};

// Values in, the values they quantize to out, of the same type.
struct FakeQuantArgs {
  const void* x;
  void* out;
  Float kind;
  const float* amax;                        // null: find one per row or window
  static constexpr float* found = nullptr;  // and keep none
  StreamArgs stream;
  QuantShape shape;  // not transposed
  float e4m3_max;
};

// Operand of the 16-bit GEMM: q * s, exact.
struct DecodeArgs {
  const uint8_t* data;
  const uint8_t* scale;
  void* out;
  Float kind;  // kBf16 or kF16
  int64_t blocks;
};

// Where the amax of row `row` of matrix `matrix` stands: matrix * per_matrix + row * per_row.
struct AmaxStride {
  int64_t per_matrix, per_row;
};

struct EpilogueArgs {
  const float* y;  // batch x rows x cols
  const float* a_amax;
  const float* b_amax;
  const void* bias;  // null without
  Float bias_kind;
  void* out;
  Float out_kind;
  int64_t batch, rows, cols;
  AmaxStride a_stride, b_stride;
  float a_max, b_max;  // a_max 0: a is not quantized
};

// a b^T of two NVFP4 operands in the pinned order, with window64 on either side.
struct BlockGemmArgs {
  const uint8_t* a;
  const uint8_t* a_scale;
  const float* a_amax;
  const uint8_t* b;
  const uint8_t* b_scale;
  const float* b_amax;
  const void* bias;  // null without
  Float bias_kind;
  void* out;
  Float out_kind;
  GemmShape shape;
  AmaxMap a_map, b_map;
  float a_max, b_max;
};

// False if no kernel is built for the spec; `status` is that of the launch.
bool launch_quantize(const QuantizeArgs& args, const KernelSpec& spec, cudaStream_t stream, cudaError_t* status);
// The pair must be one of FusedPairs.
cudaError_t launch_quantize_pair(const PairArgs& args, const KernelSpec& row, const KernelSpec& col,
                                 cudaStream_t stream);
// False if no kernel is built for the spec; `status` is that of the launch.
bool launch_fake_quant(const FakeQuantArgs& args, const KernelSpec& spec, cudaStream_t stream, cudaError_t* status);
cudaError_t launch_rht_amax(const RhtAmaxArgs& args, cudaStream_t stream);
// Null for what is not wanted; a gate has no factors.
cudaError_t launch_produce_values(const Sources& s, uint16_t* values, float* factors, cudaStream_t stream);
// False for a spec with 16x16 tiles; `launch_produce_tiles` takes those.
bool launch_produce_rows(const Sources& s, const QuantizeArgs& args, uint16_t* values, const KernelSpec& spec,
                         cudaStream_t stream, cudaError_t* status);
bool launch_produce_tiles(const ProduceArgs& args, const KernelSpec& spec, cudaStream_t stream, cudaError_t* status);
cudaError_t launch_produce_pair(const ProduceArgs& args, const KernelSpec& row, const KernelSpec& col,
                                cudaStream_t stream);
cudaError_t launch_gemm_blocks(const BlockGemmArgs& args, cudaStream_t stream);
cudaError_t launch_dequantize(const DequantizeArgs& args, cudaStream_t stream);
cudaError_t launch_decode(const DecodeArgs& args, cudaStream_t stream);
cudaError_t launch_epilogue(const EpilogueArgs& args, cudaStream_t stream);

// Halves of launch_quantize, one a translation unit: blocks along contiguous rows, and everything else.
bool launch_quantize_rows(const QuantizeArgs& args, const KernelSpec& spec, cudaStream_t stream, cudaError_t* status);
bool launch_quantize_tiles(const QuantizeArgs& args, const KernelSpec& spec, cudaStream_t stream, cudaError_t* status);

}  // namespace jnvfp4
