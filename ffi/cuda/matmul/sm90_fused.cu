// Launches the fused kernels of Hopper: tensor maps, and what runs before.
#include <algorithm>

#include "../device.cuh"
#include "sm90_fused.h"
#include "sm90_maps.h"

namespace jnvfp4 {
namespace {

// ---------------------------------------------------------------- operands
// Rows of the right operand at a distance that a tensor map takes: where they lie, or a copy.
struct PitchedRows {
  const void* data;
  int64_t bytes, pitch;
};

cudaError_t pitched(const void* data, int64_t rows, int64_t bytes, void* copy, cudaStream_t stream, PitchedRows* out) {
  const int64_t pitch = row_pitch(bytes);
  *out = {pitch == bytes ? data : copy, bytes, pitch};
  return pitch == bytes ? cudaSuccess : launch_sm90_pitch(data, copy, rows, bytes, pitch, stream);
}

PreparedPart prepared_ahead(const FusedRest& r, int64_t rows, int64_t windows) {
  if (!r.slots) return {rows, windows, 1, 0};
  constexpr int64_t kPerSlot = kFusedDepth / kWindow;
  return {std::min(r.rows, r.round), r.ahead / r.parts * kPerSlot, r.parts, r.slots / r.parts * kPerSlot};
}

// Copies what must be copied, prepares a last, since the kernel that follows may start early, and describes it all.
cudaError_t prepare(const MatmulOperand& a, const MatmulOperand& b, const GemmShape& s, const FusedPlan& plan,
                    const FusedScratch& at, const FusedRest& rest, uint8_t* scratch, cudaStream_t stream,
                    FusedMaps* maps) {
  const int64_t a_rows = s.batch * s.rows, b_rows = s.batch * s.cols;
  PitchedRows data{}, scale{};
  cudaError_t status = pitched(b.data, b_rows, s.depth / 2, scratch + at.data, stream, &data);
  if (status == cudaSuccess) status = pitched(b.scale, b_rows, s.depth / kBlock, scratch + at.scale, stream, &scale);
  if (status == cudaSuccess)
    status = launch_sm90_prepare(a, scratch + at.rows, s.depth, prepared_ahead(rest, a_rows, fused_depth(s) / kWindow),
                                 reinterpret_cast<uint32_t*>(scratch + at.flags), at.flag_count, stream);
  constexpr auto kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const int64_t a_cols = fused_depth(s);
  const MapSource of_a{scratch + at.rows, CU_TENSOR_MAP_DATA_TYPE_UINT16,        2, a_cols, at.padded_rows, a_cols * 2,
                       kWindow,           static_cast<uint32_t>(plan.tokens) / 2};
  const MapSource of_data{data.data, kBytes, 1, data.bytes, b_rows, data.pitch, 128, kFusedCols / 2};
  const MapSource of_scale{scale.data, kBytes, 1, scale.bytes, b_rows, scale.pitch, 16, kFusedCols / 2};
  return status == cudaSuccess ? make_maps({{of_a, &maps->a}, {of_data, &maps->data}, {of_scale, &maps->scale}})
                               : status;
}

// What the kernel prepares itself: all but what its first tiles need at once.
FusedRest rest_of(const MatmulOperand& a, const GemmShape& s, const FusedPlan& plan, const FusedScratch& at,
                  uint8_t* scratch) {
  constexpr int kAhead = 8, kGroup = 4 * 256;  // slots, and rows that tiles which run together have at least
  FusedRest r{};
  if (!at.ready_count) return r;
  auto* const counts = reinterpret_cast<uint32_t*>(scratch + at.flags) + at.flag_count - at.ready_count;
  const int64_t groups = 4 * ((s.cols + kFusedCols - 1) / kFusedCols);  // tiles of 1024 rows
  r.data = a.data, r.scale = a.scale, r.out = reinterpret_cast<uint4*>(scratch + at.rows);
  r.rows = static_cast<int>(s.rows), r.slots = static_cast<int>(s.depth / kFusedDepth);
  r.round = static_cast<int>((kFusedPairs + groups - 1) / groups * kGroup);
  r.parts = plan.whole ? 1 : plan.splits;
  r.ahead = std::min(kAhead * r.parts, r.slots), r.next = counts, r.ready = counts + 1;
  return r;
}

// Consecutive matrices of `rows` that share an amax.
int matrices_per_amax(const MatmulOperand& x, int64_t rows) {
  const int64_t matrices = x.map.rows_per_amax / rows;
  return static_cast<int>(std::clamp<int64_t>(matrices, 1, INT32_MAX));
}

}  // namespace

cudaError_t launch_sm90_fused(const MatmulArgs& g, const FusedPlan& plan, void* scratch, cudaStream_t stream) {
  const GemmShape s = fused_shape(g.shape, plan);
  const int64_t pairs = (s.cols + kFusedCols - 1) / kFusedCols;
  const int64_t matrix_tiles = pairs * ((s.rows + plan.tokens - 1) / plan.tokens);
  const int64_t items = plan.whole + (s.batch * matrix_tiles - plan.whole) * plan.splits;
  const int64_t slots = (s.depth + kFusedDepth - 1) / kFusedDepth;
  if (items > INT32_MAX) return cudaErrorInvalidConfiguration;                   // more results than any memory holds
  if (plan.splits > 1 && slots < 2 * plan.splits) return cudaErrorInvalidValue;  // plan_fused makes no such parts
  auto* const bytes = static_cast<uint8_t*>(scratch);
  const FusedScratch at = fused_scratch(s, plan);
  FusedMaps maps;
  const MatmulOperand &rows = plan.exchanged ? g.b : g.a, &columns = plan.exchanged ? g.a : g.b;
  const FusedRest rest = rest_of(rows, s, plan, at, bytes);
  const cudaError_t status = prepare(rows, columns, s, plan, at, rest, bytes, stream, &maps);
  if (status != cudaSuccess) return status;
  const bool quantized = g.a.quantized(), bf16 = !quantized && g.a.kind == Float::kBf16;
  const FusedArgs args{g,
                       plan.exchanged,
                       static_cast<int>(s.rows),
                       static_cast<int>(s.cols),
                       static_cast<int>(pairs),
                       static_cast<int>(matrix_tiles),
                       0,
                       static_cast<int>(items),
                       static_cast<int>(plan.whole),
                       plan.splits,
                       static_cast<int>(slots),
                       quantized && g.a.map.rows_per_amax % g.shape.rows != 0,
                       g.b.map.rows_per_amax % g.shape.cols != 0,
                       matrices_per_amax(g.a, g.shape.rows),
                       matrices_per_amax(g.b, g.shape.cols),
                       bf16        ? 0x1p8f
                       : quantized ? 0x1p28f
                                   : 0x1p14f,
                       reinterpret_cast<float*>(bytes + at.sums),
                       reinterpret_cast<uint32_t*>(bytes + at.flags),
                       rest};
  return bf16 ? launch_sm90_bf16_fused(args, maps, plan.tokens, stream)
              : launch_sm90_f16_fused(args, maps, plan.tokens, stream);
}

}  // namespace jnvfp4
