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

bool has_numbers(const FusedPlan& plan) { return plan.pinned == Pinned::kNumbers || plan.pinned == Pinned::kWindows; }

// Copies what must be copied, prepares a last, since the kernel that follows may start early, and describes it all.
cudaError_t prepare(const MatmulOperand& a, const MatmulOperand& b, const GemmShape& s, const FusedPlan& plan,
                    const FusedScratch& at, uint8_t* scratch, cudaStream_t stream, FusedMaps* maps) {
  const int64_t a_rows = s.batch * s.rows, b_rows = s.batch * s.cols;
  const bool numbers = has_numbers(plan);
  PitchedRows data{}, scale{};
  cudaError_t status = pitched_rows(b.scale, b_rows, s.depth / kBlock, scratch + at.scale, stream, &scale);
  if (status == cudaSuccess)
    status = numbers ? launch_sm90_prepare(b, Order::kBlocks, scratch + at.columns, b_rows, s.depth, nullptr, 0, stream)
                     : pitched_rows(b.data, b_rows, s.depth / 2, scratch + at.data, stream, &data);
  if (status == cudaSuccess && plan.pinned == Pinned::kWindows) {
    const auto amaxes = [&](const MatmulOperand& x, int64_t out, int64_t rows, int tiles_of) {
      return launch_sm90_amaxes(x, reinterpret_cast<float*>(scratch + out), s.batch, rows, tiles_of, s.depth,
                                out == at.token_amaxes, stream);
    };
    status = amaxes(a, at.token_amaxes, s.rows, plan.tokens);
    if (status == cudaSuccess) status = amaxes(b, at.column_amaxes, s.cols, static_cast<int>(kFusedCols));
  }
  if (status == cudaSuccess)
    status =
        launch_sm90_prepare(a, plan.pinned == Pinned::kNo ? Order::kWindows : Order::kBlocks, scratch + at.rows, a_rows,
                            s.depth, reinterpret_cast<uint32_t*>(scratch + at.flags), at.flag_count, stream);
  constexpr auto kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8, kHalves = CU_TENSOR_MAP_DATA_TYPE_UINT16;
  constexpr uint32_t kBox = kFusedCols / 2;
  const int64_t cols = fused_depth(s.depth);  // of numbers
  const MapSource of_a{scratch + at.rows, kHalves,  2,       cols,
                       at.padded_rows,    cols * 2, kWindow, static_cast<uint32_t>(plan.tokens) / 2};
  const uint32_t codes = plan.pinned == Pinned::kNo ? 128 : kWindow / 2;  // bytes along K at a time
  const MapSource of_data = numbers ? MapSource{scratch + at.columns, kHalves, 2, cols, b_rows, cols * 2, kWindow, kBox}
                                    : MapSource{data.data, kBytes, 1, data.bytes, b_rows, data.pitch, codes, kBox};
  const MapSource of_scale{scale.data, kBytes, 1, scale.bytes, b_rows, scale.pitch, 16, kBox};
  return status == cudaSuccess ? make_maps({{of_a, &maps->a}, {of_data, &maps->data}, {of_scale, &maps->scale}})
                               : status;
}

// Consecutive matrices of `rows` that share an amax.
int matrices_per_amax(const MatmulOperand& x, int64_t rows) {
  const int64_t matrices = x.map.rows_per_amax / rows;
  return static_cast<int>(std::clamp<int64_t>(matrices, 1, INT32_MAX));
}

}  // namespace

cudaError_t launch_sm90_fused(const MatmulArgs& g, const FusedPlan& plan, void* scratch, cudaStream_t stream) {
  const GemmShape s = fused_shape(g.shape, plan);
  const int64_t column_tiles = (s.cols + kFusedCols - 1) / kFusedCols;
  const int64_t matrix_tiles = column_tiles * ((s.rows + plan.tokens - 1) / plan.tokens);
  const int64_t num_work_tiles = plan.whole + (s.batch * matrix_tiles - plan.whole) * plan.splits;
  const int64_t slots = (s.depth + kFusedDepth - 1) / kFusedDepth;
  if (num_work_tiles > INT32_MAX) return cudaErrorInvalidConfiguration;          // more results than any memory holds
  if (plan.splits > 1 && slots < 2 * plan.splits) return cudaErrorInvalidValue;  // plan_fused makes no such splits
  if (plan.swapped && (plan.tokens < 128 || !g.a.quantized())) return cudaErrorInvalidValue;  // nor swaps these
  if (g.windows() != (plan.pinned == Pinned::kWindows)) return cudaErrorInvalidValue;
  auto* const bytes = static_cast<uint8_t*>(scratch);
  const FusedScratch at = fused_scratch(s, plan);
  FusedMaps maps;
  const cudaError_t status =
      prepare(plan.swapped ? g.b : g.a, plan.swapped ? g.a : g.b, s, plan, at, bytes, stream, &maps);
  if (status != cudaSuccess) return status;
  const bool quantized = g.a.quantized(), bf16 = !quantized && g.a.kind == Float::kBf16;
  const double reciprocal = 1.0 / (36.0 * double{g.a.e4m3_max} * double{g.b.e4m3_max});
  const auto large = static_cast<float>(reciprocal), small = static_cast<float>(reciprocal - double{large});
  FusedArgs args{};
  args.g = g, args.swapped = plan.swapped;
  args.tokens = static_cast<int>(s.rows), args.columns = static_cast<int>(s.cols);
  args.column_tiles = static_cast<int>(column_tiles), args.matrix_tiles = static_cast<int>(matrix_tiles);
  args.num_work_tiles = static_cast<int>(num_work_tiles), args.num_unsplit = static_cast<int>(plan.whole);
  args.num_splits = plan.splits, args.k_steps = static_cast<int>(slots);
  args.amax_per_row = quantized && g.a.map.rows_per_amax % g.shape.rows != 0;
  args.amax_per_col = g.b.map.rows_per_amax % g.shape.cols != 0;
  args.matrices_per_a_amax = matrices_per_amax(g.a, g.shape.rows);
  args.matrices_per_b_amax = matrices_per_amax(g.b, g.shape.cols);
  args.unscale = bf16 ? 0x1p8f : quantized ? 0x1p28f : 0x1p14f;
  args.split_sums = reinterpret_cast<float*>(bytes + at.sums);
  args.split_flags = reinterpret_cast<uint32_t*>(bytes + at.flags);
  args.counter = args.split_flags + at.flag_count - 1;
  args.token_amaxes = reinterpret_cast<float*>(bytes + at.token_amaxes);
  args.column_amaxes = reinterpret_cast<float*>(bytes + at.column_amaxes);
  args.reciprocal = large * 0x1p28f, args.reciprocal_rest = small * 0x1p28f, args.reciprocal64 = reciprocal;
  if (plan.pinned != Pinned::kNo) return launch_sm90_pinned(args, maps, plan, stream);
  return bf16 ? launch_sm90_bf16_fused(args, maps, plan.tokens, stream)
              : launch_sm90_f16_fused(args, maps, plan.tokens, stream);
}

}  // namespace jnvfp4
