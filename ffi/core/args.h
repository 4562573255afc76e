// The arguments of each operation's kernels, the same on the CPU and on CUDA. The calls in calls/ fill them.
#pragma once

#include <cstdint>

#include "arrays.h"
#include "kv_cache.h"
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
  float headroom;  // kHeadroom or 1; read by stochastic specs only
};

// One pass over x for both orientations.
struct PairArgs {
  QuantizeArgs row, col;
};

// The amax of x after the rotation and before it, one of each for every `shape.amax.rows_per_amax` rows.
struct RhtAmaxArgs {
  const void* x;
  Float kind;
  float *rotated, *plain;
  QuantShape shape;
};

struct DequantizeArgs {
  const uint8_t* data;
  const uint8_t* scale;
  const float* amax;
  void* out;
  Float kind;
  int64_t blocks;
  int64_t blocks_per_amax;  // AmaxMap::blocks_per_amax
  float e4m3_max;
  bool rotate_back;
};

// `batch` matrices of `rows` x `cols` codes in 16x16 tiles, and their transposes.
struct TransposeArgs {
  const uint8_t* data;
  const uint8_t* scale;
  uint8_t* out_data;   // batch x cols x rows / 2
  uint8_t* out_scale;  // batch x cols x rows / 16
  int64_t batch, rows, cols;
};

// q * s of a tensor, exact in 16 bits: an operand of XLA's GEMM.
struct DecodeArgs {
  const uint8_t* data;
  const uint8_t* scale;
  void* out;
  Float kind;  // kBf16 or kF16
  int64_t blocks;
};

// One operand of a product: an NVFP4 tensor, or an array of 16-bit floats.
struct MatmulOperand {
  const void* data;      // NVFP4 codes, or 16-bit floats
  const uint8_t* scale;  // null for 16-bit floats
  const float* amax;     // null for 16-bit floats
  Float kind;            // of 16-bit floats
  AmaxMap map;
  float e4m3_max;

  JNVFP4_HD bool quantized() const { return scale != nullptr; }
};

// out = cast(alpha * y + bias).
struct MatmulResult {
  const void* bias;  // null without
  Float bias_kind;
  void* out;
  Float kind;
  bool whole_bias = false;  // the bias has the shape of out, not one number for each column
};

// Norm of the rows of a 16-bit left operand: cast(row * rsqrt(mean(row^2) + epsilon) * gain).
struct RowNorm {
  const void* gain;  // K numbers; null without a norm
  Float kind;
  float epsilon;
};

struct MatmulArgs {
  MatmulOperand a, b;
  MatmulResult result;
  GemmShape shape;
  RowNorm norm{};

  JNVFP4_HD bool windows() const { return a.map.windows() || b.map.windows(); }
};

// Row m of out is row m of a times the matrix of b of the group that holds row m, transposed. Group g begins where
// group g - 1 ends, group 0 at row 0, and ends at the last row at the latest. Rows that no group holds are zero.
struct GroupedArgs {
  MatmulOperand a, b;    // without windows; the rows of b are counted over all groups
  const int32_t* sizes;  // rows of each group; a negative size counts as 0
  void* out;
  Float kind;
  GroupedShape shape;
};

// Epilogue of a GEMM whose sums y XLA has made. Of a and b only amax, map and e4m3_max are used.
struct EpilogueArgs {
  const float* y;  // batch x rows x pitch, of which `cols` are used
  int64_t pitch;
  bool quantized_a;
  MatmulOperand a, b;
  MatmulResult result;
  GemmShape shape;
};

// One query token of each sequence over its cache.
struct DecodeAttentionArgs {
  const void* q;  // batch x kv_heads x group x depth, of bfloat16 or float16 as `out`
  void* out;
  Float kind;
  KvRows keys, values;
  KvCacheShape cache;
  const int32_t* lengths;  // of each sequence: the tokens that count
  int64_t group;
  float sm_scale;
};

// A new row of each sequence and kv head, at the sequence's position.
struct AppendKvArgs {
  const void *k, *v;  // batch x kv_heads x depth
  Float kind;
  KvRowsOut keys, values;
  KvCacheShape cache;
  const int32_t* positions;
};

}  // namespace jnvfp4
