// Launches the fused kernels of Hopper: tensor maps, and the kernels that prepare operands.
#include <algorithm>

#include "../../../plan/scratch.h"
#include "../../device.cuh"
#include "fused.h"
#include "maps.h"

namespace jnvfp4 {

cudaError_t pitched_rows(const void* data, int64_t rows, int64_t bytes, void* copy, cudaStream_t stream,
                         PitchedRows* out) {
  const int64_t pitch = row_pitch(bytes);
  *out = {pitch == bytes ? data : copy, bytes, pitch};
  return pitch == bytes ? cudaSuccess : launch_sm90_pitch(data, copy, rows, bytes, pitch, stream);
}

namespace {

// Copies what must be copied, prepares a last, since the kernel that follows may start early, and describes it all.
cudaError_t prepare(const MatmulOperand& a, const MatmulOperand& b, const GemmShape& s, const FusedPlan& plan,
                    const FusedScratch& at, uint8_t* scratch, cudaStream_t stream, FusedMaps* maps) {
  const int64_t a_rows = s.batch * s.rows, b_rows = s.batch * s.cols;
  PitchedRows data{}, scale{};
  cudaError_t status = pitched_rows(b.scale, b_rows, s.depth / kBlock, scratch + at.scale, stream, &scale);
  if (status == cudaSuccess) status = pitched_rows(b.data, b_rows, s.depth / 2, scratch + at.data, stream, &data);
  if (status == cudaSuccess)
    status = launch_sm90_prepare(a, Order::kWindows, scratch + at.rows, a_rows, s.depth,
                                 reinterpret_cast<uint32_t*>(scratch + at.flags), at.flag_count, stream);
  constexpr uint32_t kBox = kFusedCols / 2;
  const auto half_tile = static_cast<uint32_t>(plan.tokens / 2);
  return status == cudaSuccess
             ? make_maps(
                   {{map_of_numbers(scratch + at.rows, at.padded_rows, fused_depth(s.depth), half_tile), &maps->a},
                    {map_of_bytes(data, b_rows, 128, kBox), &maps->data},
                    {map_of_bytes(scale, b_rows, 16, kBox), &maps->scale}})
             : status;
}

// Consecutive matrices of `rows` that share an amax.
int matrices_per_amax(const MatmulOperand& x, int64_t rows) {
  const int64_t matrices = x.map.rows_per_amax / rows;
  return static_cast<int>(std::clamp<int64_t>(matrices, 1, INT32_MAX));
}

bool is_bf16(const MatmulOperand& a) { return !a.quantized() && a.kind == Float::kBf16; }

}  // namespace

cudaError_t fused_args(const MatmulArgs& g, const FusedPlan& plan, const FusedScratch& at, void* scratch,
                       FusedArgs* args) {
  const GemmShape s = fused_shape(g.shape, plan);
  const int64_t column_tiles = (s.cols + kFusedCols - 1) / kFusedCols;
  const int64_t matrix_tiles = column_tiles * ((s.rows + plan.tokens - 1) / plan.tokens);
  const int64_t num_work_tiles = plan.whole + (s.batch * matrix_tiles - plan.whole) * plan.splits;
  if (num_work_tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
  auto* const bytes = static_cast<uint8_t*>(scratch);
  auto* const flags = reinterpret_cast<uint32_t*>(bytes + at.flags);
  *args = {
      .g = g,
      .swapped = plan.swapped,
      .tokens = static_cast<int>(s.rows),
      .columns = static_cast<int>(s.cols),
      .column_tiles = static_cast<int>(column_tiles),
      .matrix_tiles = static_cast<int>(matrix_tiles),
      .num_work_tiles = static_cast<int>(num_work_tiles),
      .num_unsplit = static_cast<int>(plan.whole),
      .num_splits = plan.splits,
      .k_steps = static_cast<int>((s.depth + kFusedDepth - 1) / kFusedDepth),
      .amax_per_row = g.a.quantized() && g.a.map.rows_per_amax % g.shape.rows != 0,
      .amax_per_col = g.b.map.rows_per_amax % g.shape.cols != 0,
      .matrices_per_a_amax = matrices_per_amax(g.a, g.shape.rows),
      .matrices_per_b_amax = matrices_per_amax(g.b, g.shape.cols),
      .unscale = is_bf16(g.a)      ? 0x1p8f
                 : g.a.quantized() ? 0x1p28f
                                   : 0x1p14f,
      .split_sums = reinterpret_cast<float*>(bytes + at.sums),
      .split_flags = flags,
      .counter = flags + at.flag_count - 1,
  };
  return cudaSuccess;
}

cudaError_t launch_sm90_fused(const MatmulArgs& g, const FusedPlan& plan, void* scratch, cudaStream_t stream) {
  const GemmShape s = fused_shape(g.shape, plan);
  const FusedScratch at = fused_scratch(s, plan);
  FusedArgs args;
  cudaError_t status = fused_args(g, plan, at, scratch, &args);
  if (status != cudaSuccess) return status;
  // plan_fused neither makes such splits nor swaps such operands.
  if (plan.splits > 1 && args.k_steps < 2 * plan.splits) return cudaErrorInvalidValue;
  if (plan.swapped && (plan.tokens < 128 || !g.a.quantized())) return cudaErrorInvalidValue;
  if (g.windows()) return cudaErrorInvalidValue;
  FusedMaps maps;
  status = prepare(plan.swapped ? g.b : g.a, plan.swapped ? g.a : g.b, s, plan, at, static_cast<uint8_t*>(scratch),
                   stream, &maps);
  if (status != cudaSuccess) return status;
  return is_bf16(g.a) ? launch_sm90_bf16_fused(args, maps, plan.tokens, stream)
                      : launch_sm90_f16_fused(args, maps, plan.tokens, stream);
}

}  // namespace jnvfp4
