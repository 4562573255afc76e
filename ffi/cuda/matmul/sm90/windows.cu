// out = a b^T on Hopper, for operands that have an amax for each window (64 along K). sm90/prepare.cu has decoded both
// to float16, in the same order along K, and has made factors of their amaxes.
//
// Rows of one operand are the M of wgmma ("columns", since they are columns of the result), rows of the other its N
// ("tokens"), both from shared memory. A consumer warpgroup sums a window in one set of registers, and adds it, times
// the factors of that window, to another. Meanwhile the other warpgroup runs wgmmas (ping-pong). If both operands have
// windows, every sum of a window has a factor of its own, the product of two. The tensor cores make these too, in a
// third set of registers: they cost a warp that adds less than multiplications of its own would. Two CTAs of a cluster
// have the same tokens and neighbouring columns; each loads half of the tokens for both. CTAs are persistent
// (scheduler.cuh) and warp-specialized: one producer thread, two consumer warpgroups.
//
// Columns have windows. Tokens may have them too; if not, their factors come last. If only a has windows, A and B are
// swapped: tokens are then rows of b.
//
// Order of sums along K: the tensor core's in a window, windows ascending, and for each split of K, to the last of
// which the others are added in their order. The shape fixes it, so runs have the same bits.
#include <cuda.h>

#include "../../device.cuh"
#include "launch.cuh"
#include "maps.h"
#include "pairs.cuh"
#include "ptx.cuh"
#include "results.cuh"
#include "scheduler.cuh"
#include "windows.h"

namespace jnvfp4 {
namespace {

struct WindowsArgs {
  MatmulResult result;
  bool swapped;                                   // whether A and B are: then tokens are rows of b
  int tokens, columns;                            // extents of one matrix
  int column_tiles, matrix_tiles;                 // tiles along columns, and of one matrix
  int num_work_tiles;                             // splits of all tiles
  int num_unsplit, num_splits;                    // 0 tiles whose K is not split; splits of each other one
  int k_steps;                                    // windows
  const uint8_t *token_factors, *column_factors;  // WindowsOperand::factors
  float* split_sums;                              // of all splits but the last
  uint32_t* split_flags;                          // one for each warpgroup that writes sums: 0 until it has
  uint32_t* counter;                              // work-tile counter, without the initial tiles
};

// Tensor maps, whose boxes are 64 along K of the rows of half a tile of tokens, and of a CTA's columns.
struct WindowsMaps {
  CUtensorMap tokens, columns;
};

// Decoded numbers are times 2^-14. Factors undo one, the epilogue the other: factors with both would overflow early.
constexpr float kUnscale = 0x1p14f;

// kBothWindows: tokens have windows too.
template <bool kBothWindows_>
struct WindowsConfig {
  static constexpr bool kBothWindows = kBothWindows_;
  static constexpr int kTokens = kBothWindows ? kBothWindowsTokens : kWindowsTokens, kColumns = kFusedCols / 2;
  static constexpr int kThreads = 128 * 3, kSums = kTokens / 2;  // sums: of a thread
  // Registers per thread of the producer warpgroup and of the consumers.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  // Factors that threads read have one slot more than numbers have stages, since stages are released before.
  static constexpr int kStages = kBothWindows ? 5 : 4, kSlots = kBothWindows ? kStages : kStages + 1;
  static constexpr int kTokenBytes = kTokens * 128, kColumnBytes = kColumns * 128;
  // Factors of tokens without windows come with the last window of a split. Others are pieces (FactorsOf).
  static constexpr int kFactor = kBothWindows ? 16 : 4, kColumnFactorBytes = kColumns * kFactor,
                       kTokenFactorBytes = kTokens * kFactor;
  static constexpr int kFactorBytes = kColumnFactorBytes + kTokenFactorBytes;
  using Writer = TileWriter<kTokens, false>;

  static constexpr int kColumnOffset = kStages * kTokenBytes, kFactorOffset = kColumnOffset + kStages * kColumnBytes;
  static constexpr int kOutOffset = kFactorOffset + kSlots * kFactorBytes,
                       kFullBarriers = kOutOffset + 2 * Writer::kShared;
  static constexpr int kEmptyBarriers = kFullBarriers + 8 * kStages, kTileRingOffset = kEmptyBarriers + 8 * kStages;
  using Ring = TileRing<kStages>;  // a work tile has one window at least
  using Tiles = DenseTiles<WindowsArgs, kTokens>;
  static constexpr int kShared = kTileRingOffset + Ring::kShared + 1024;  // to align the start
  static_assert(kShared <= 232448);
};

// ---------------------------------------------------------------- producer thread
template <class C>
__device__ __forceinline__ void produce_tiles(const WindowsArgs& a, const WindowsMaps& maps, uint32_t smem) {
  const int rank = cluster_rank(), token_tiles = a.matrix_tiles / a.column_tiles;
  constexpr int kHalf = C::kTokens / 2;
  int stage = 0, phase = 0, slot = 0;
  const typename C::Tiles tiles{a};
  TileScheduler<C, true> scheduler(tiles, smem);
  for (int i = scheduler.first(); i < tiles.end(); i = scheduler.next()) {
    const WorkTile tile = tiles[i];
    const int token = tile.matrix * a.tokens + tile.token + rank * kHalf;
    const int column = tile.matrix * a.columns + tile.column + rank * C::kColumns;
    const int64_t token_tile = int64_t{tile.matrix} * token_tiles + tile.token / C::kTokens;
    const int64_t column_tile = int64_t{tile.matrix} * a.column_tiles * 2 + tile.column / C::kColumns + rank;
    const uint8_t* token_factors =
        a.token_factors + (C::kBothWindows ? token_tile * a.k_steps + tile.k_begin : token_tile) * C::kTokenFactorBytes;
    const uint8_t* column_factors = a.column_factors + (column_tile * a.k_steps + tile.k_begin) * C::kColumnFactorBytes;
    for (int w = tile.k_begin; w < tile.k_end; ++w, column_factors += C::kColumnFactorBytes) {
      const bool with_tokens = C::kBothWindows || w == tile.k_end - 1;
      barrier_wait(smem + C::kEmptyBarriers + 8 * stage, phase ^ 1);
      const uint32_t full = smem + C::kFullBarriers + 8 * stage,
                     factors = smem + C::kFactorOffset + slot * C::kFactorBytes;
      barrier_expect(
          full, C::kTokenBytes + C::kColumnBytes + C::kColumnFactorBytes + (with_tokens ? C::kTokenFactorBytes : 0));
      load_box_to(3, smem + stage * C::kTokenBytes + rank * kHalf * 128, maps.tokens, full, w * kWindow, token);
      load_box(smem + C::kColumnOffset + stage * C::kColumnBytes, maps.columns, full, w * kWindow, column);
      load_bytes(factors, column_factors, C::kColumnFactorBytes, full);
      if (with_tokens) load_bytes(factors + C::kColumnFactorBytes, token_factors, C::kTokenFactorBytes, full);
      if constexpr (C::kBothWindows) token_factors += C::kTokenFactorBytes;
      if (++stage == C::kStages) stage = 0, phase ^= 1;
      if (++slot == C::kSlots) slot = 0;
    }
  }
  // Waits until the other CTA has read what this one has multicast to it.
  for (int i = 0; i < C::kStages; ++i) {
    barrier_wait(smem + C::kEmptyBarriers + 8 * stage, phase ^ 1);
    if (++stage == C::kStages) stage = 0, phase ^= 1;
  }
}

// ---------------------------------------------------------------- consumer warpgroup
template <class C>
struct WindowsConsumer {
  using Sums = float[C::kSums];

  const WindowsArgs& a;
  uint32_t smem;
  int rank, wg;              // smem and wg by a shuffle, so that they are in uniform registers
  uint64_t tokens, columns;  // matrix descriptors in stage 0
  int stage = 0, phase = 0, slot = 0;

  __device__ __forceinline__ WindowsConsumer(const WindowsArgs& args, uint32_t shared)
      : a(args),
        smem(__shfl_sync(~0u, shared, 0)),
        rank(cluster_rank()),
        wg(__shfl_sync(~0u, threadIdx.x / 128 - 1, 0)),
        tokens(shared_matrix(smem)),
        columns(shared_matrix(smem + C::kColumnOffset + wg * 64 * 128)) {}

  // ---- mainloop
  // Releases the stage, in both CTAs that load for it.
  __device__ __forceinline__ void release() { barrier_arrive_in_both(smem + C::kEmptyBarriers + 8 * stage); }

  __device__ __forceinline__ void wait_for_stage() { barrier_wait(smem + C::kFullBarriers + 8 * stage, phase); }
  __device__ __forceinline__ uint32_t factors() const {
    return smem + C::kFactorOffset + (C::kBothWindows ? stage : slot) * C::kFactorBytes;
  }
  // Starts the wgmmas of a window.
  __device__ __forceinline__ void multiply(Sums& window) const {
    const uint64_t stage_tokens = tokens + stage * (C::kTokenBytes / 16),
                   stage_columns = columns + stage * (C::kColumnBytes / 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma_shared<F16>(window, stage_columns + 2 * j, stage_tokens + 2 * j, j > 0);
    wgmma_commit();
  }
  // Adds a window, times the factors of the thread's two columns, which it loads before it waits for its turn.
  __device__ __forceinline__ void add_window_of_columns(Sums& sums) {
    Sums window;
    const uint32_t address = factors() + (wg * 64 + fragment_row()) * 4;
    const float low = float_of(load_shared32(address)), high = float_of(load_shared32(address + 8 * 4));
    wait_turn(wg);
    wgmma_fence();
    multiply(window);
    pass_turn(wg);
    wgmma_wait<0>();
    release();
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) sums[i] = __fmaf_rn(window[i], i % 4 < 2 ? low : high, sums[i]);
  }
  // Adds a window, times the products of the factors of columns and tokens.
  __device__ __forceinline__ void add_window_of_both(Sums& sums) {
    Sums window, products;
    wait_turn(wg);
    wgmma_fence();
    wgmma_shared<Bf16>(products, shared_rows_of_16(factors() + wg * 64 * C::kFactor),
                       shared_rows_of_16(factors() + C::kColumnFactorBytes), 0);
    multiply(window);
    pass_turn(wg);
    wgmma_wait<0>();
    release();
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) sums[i] = __fmaf_rn(window[i], products[i], sums[i]);
  }
  __device__ __forceinline__ void sum(Sums& sums, int windows) {
#pragma unroll
    for (float& s : sums) s = 0;
    for (int w = 0; w < windows; ++w) {
      wait_for_stage();
      if constexpr (C::kBothWindows)
        add_window_of_both(sums);
      else
        add_window_of_columns(sums);
      if (++stage == C::kStages) stage = 0, phase ^= 1;
      if (++slot == C::kSlots) slot = 0;
    }
  }

  // ---- epilogue
  // Slot of this warpgroup in the split-K scratch.
  __device__ __forceinline__ int64_t split_slot(const WorkTile& tile, int split) const {
    return ((int64_t{tile.split_tile} * (a.num_splits - 1) + split) * 2 + rank) * 2 + wg;
  }
  __device__ __forceinline__ SplitSums<C::kSums> split_sums() const { return {a.split_sums, a.split_flags, 1 + wg}; }
  // Undoes the factor of the numbers; the addition makes -0 the rule's 0.
  __device__ __forceinline__ static float unscaled(float sum) { return __fmaf_rn(sum, kUnscale, 0.0f); }
  // Scales by the factors of tokens without windows, which are in the slot of the last window.
  __device__ __forceinline__ void scale(Sums& sums) const {
    if constexpr (C::kBothWindows) {
#pragma unroll
      for (float& sum : sums) sum = unscaled(sum);
    } else {
      const int last = slot == 0 ? C::kSlots - 1 : slot - 1;
      C::Writer::for_each_token([&](int i, float factor) { sums[i] = mul_rn(factor, unscaled(sums[i])); },
                                smem + C::kFactorOffset + last * C::kFactorBytes + C::kColumnFactorBytes);
    }
  }
  template <bool kSwapped>
  __device__ __forceinline__ void write(Sums& sums, const WorkTile& tile) const {
    const TileWriter<C::kTokens, kSwapped> writer{a.result,
                                                  a.tokens,
                                                  a.columns,
                                                  tile.matrix,
                                                  tile.token,
                                                  tile.column + rank * C::kColumns + wg * 64,
                                                  smem + C::kOutOffset + wg * C::Writer::kShared,
                                                  1 + wg};
    float biases[2];
    writer.load_biases(biases);
    scale(sums);
    if (kSwapped && a.result.bias)
      writer.stage_tokens([&](int token_idx, int i) { store_shared(writer.bias_address(token_idx), biases[i]); });
    writer.add_biases(sums, biases);
    writer.write(sums);
    __syncwarp();  // instructions for whole warps follow
  }
  __device__ __forceinline__ void finish(Sums& sums, const WorkTile& tile) const {
    if (tile.split < tile.num_splits - 1) return split_sums().store(sums, split_slot(tile, tile.split));
    if (tile.split_tile >= 0) split_sums().add(sums, tile.split, [&](int split) { return split_slot(tile, split); });
    if constexpr (!C::kBothWindows)
      if (a.swapped) return write<true>(sums, tile);
    write<false>(sums, tile);
  }

  __device__ __forceinline__ void run() {
    if (wg == 1) pass_turn(wg);  // the first turn is that of warpgroup 0
    const typename C::Tiles tiles{a};
    TileScheduler<C, false> scheduler(tiles, smem);
    for (int i = scheduler.first(); i < tiles.end(); i = scheduler.next()) {
      const WorkTile tile = tiles[i];
      Sums sums;
      sum(sums, tile.k_end - tile.k_begin);
      finish(sums, tile);
    }
    if (wg == 0) wait_turn(wg);  // no barrier is left half full
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sm90_windows_kernel(const __grid_constant__ WindowsArgs a, const __grid_constant__ WindowsMaps maps) {
  run_warp_specialized<C>(
      a, [&] { prefetch_map(maps.tokens), prefetch_map(maps.columns); },
      [&](uint32_t smem) { produce_tiles<C>(a, maps, smem); },
      [&](uint32_t smem) { WindowsConsumer<C>(a, smem).run(); });
}

// ---------------------------------------------------------------- launch
template <class C>
cudaError_t launch_config(const WindowsArgs& args, const WindowsMaps& maps, cudaStream_t stream) {
  const int clusters = clusters_of(args.num_work_tiles, args.num_unsplit, args.num_splits);
  return launch_early(sm90_windows_kernel<C>, 2 * clusters, C::kThreads, 2, C::kShared, stream, args, maps);
}

cudaError_t make_windows_maps(const WindowsPreparation& p, const WindowsScratch& at, WindowsMaps* maps) {
  const auto source = [&](const WindowsOperand& x, int64_t rows, int box_rows) {
    return map_of_numbers(x.numbers, rows, p.depth, static_cast<uint32_t>(box_rows));
  };
  return make_maps({{source(p.tokens, at.token_rows, p.tokens.tile_rows / 2), &maps->tokens},
                    {source(p.columns, at.column_rows, p.columns.tile_rows), &maps->columns}});
}

}  // namespace

cudaError_t launch_sm90_windows(const MatmulArgs& g, const FusedPlan& plan, void* scratch, cudaStream_t stream) {
  const GemmShape s = fused_shape(g.shape, plan);
  const MatmulOperand &tokens = plan.swapped ? g.b : g.a, &columns = plan.swapped ? g.a : g.b;
  const int64_t column_tiles = (s.cols + kFusedCols - 1) / kFusedCols,
                token_tiles = (s.rows + plan.tokens - 1) / plan.tokens;
  const int64_t num_work_tiles = fused_tiles(s, plan.tokens) * plan.splits, windows = s.depth / kWindow;
  const bool both = tokens.map.windows();
  if (num_work_tiles > INT32_MAX) return cudaErrorInvalidConfiguration;  // more results than any memory holds
  if (!columns.map.windows() || s.depth % kWindow || plan.tokens != (both ? kBothWindowsTokens : kWindowsTokens) ||
      plan.splits > windows)
    return cudaErrorInvalidValue;  // plan_windows makes no such plans
  auto* const bytes = static_cast<uint8_t*>(scratch);
  const WindowsScratch at = windows_scratch(s, plan);
  // kUnscale in all; products of pieces come twice.
  const WindowsPreparation p{
      {tokens, s.batch, s.rows, token_tiles, plan.tokens, both ? FactorsOf::kTokenPieces : FactorsOf::kRows,
       both ? 0x1p6f : 1.0f, bytes + at.tokens, bytes + at.token_factors},
      {columns, s.batch, s.cols, 2 * column_tiles, kFusedCols / 2,
       both ? FactorsOf::kColumnPieces : FactorsOf::kWindows, both ? 0x1p7f : kUnscale, bytes + at.columns,
       bytes + at.column_factors},
      s.depth,
      reinterpret_cast<uint32_t*>(bytes + at.flags),
      at.flag_count};
  WindowsMaps maps;
  cudaError_t status = make_windows_maps(p, at, &maps);
  if (status == cudaSuccess) status = launch_sm90_prepare_windows(p, stream);
  if (status != cudaSuccess) return status;
  WindowsArgs args{};
  args.result = g.result, args.swapped = plan.swapped;
  args.tokens = static_cast<int>(s.rows), args.columns = static_cast<int>(s.cols);
  args.column_tiles = static_cast<int>(column_tiles);
  args.matrix_tiles = static_cast<int>(column_tiles * token_tiles);
  args.num_work_tiles = static_cast<int>(num_work_tiles);
  args.num_splits = plan.splits, args.k_steps = static_cast<int>(windows);
  args.token_factors = bytes + at.token_factors, args.column_factors = bytes + at.column_factors;
  args.split_sums = reinterpret_cast<float*>(bytes + at.sums);
  args.split_flags = p.flags, args.counter = p.flags + at.flag_count - 1;
  return both ? launch_config<WindowsConfig<true>>(args, maps, stream)
              : launch_config<WindowsConfig<false>>(args, maps, stream);
}

}  // namespace jnvfp4
