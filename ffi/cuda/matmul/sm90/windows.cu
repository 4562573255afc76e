// out = a b^T on Hopper, for operands that have an amax for each window (64 along K). sm90/prepare.cu has decoded both
// to float16, in the same order along K, and has made factors of their amaxes.
//
// Rows of one operand are the 64 rows of wgmma ("columns", since they are columns of the result), rows of the other its
// columns ("tokens"), both from shared memory. A warpgroup sums a window in one set of registers, and adds it, times
// the factors of that window, to another. Meanwhile another warpgroup multiplies: they take turns on the tensor cores.
// If both operands have windows, every sum of a window has a factor of its own, the product of two. The tensor cores
// make these too, in a third set of registers: to a warp that adds they cost less than its own multiplications.
// Two CTAs of a cluster have the same tokens and neighbouring columns; each loads half of the tokens for both.
// CTAs are persistent (scheduler.cuh): one thread loads, two warpgroups compute.
//
// Columns have windows. Tokens may have too; if not, their factors come last. If only a has windows, operands are
// exchanged: tokens are then rows of b.
//
// The sum along K: the tensor core's in a window, windows ascending, and for each of `splits` parts of K, to the last
// of which the others are added in their order. Fixed by the shape, so runs have the same bits.
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
  bool exchanged;
  int tokens, columns;                            // of one matrix
  int pairs, matrix_tiles;                        // tiles along columns, and of one matrix
  int work_tiles;                                 // parts of K of all tiles
  int whole, splits;                              // 0 tiles that have one, and the parts of the others
  int steps;                                      // windows
  const uint8_t *token_factors, *column_factors;  // WindowsOperand::factors
  float* sums;                                    // of all splits but the last
  uint32_t* flags;                                // one for each warpgroup that writes sums: 0 until it has
  uint32_t* counter;                              // of work tiles that clusters have taken after their first
};

// 64 along K of the rows of half a tile of tokens, and of a CTA's columns.
struct WindowsMaps {
  CUtensorMap tokens, columns;
};

// Decoded numbers are times 2^-14. Factors undo one of these, the end of a tile undoes the other: with both, factors
// would overflow where those of the rule do not.
constexpr float kUnscale = 0x1p14f;

// kBoth: whether tokens have windows.
template <bool kBoth_>
struct WindowsConfig {
  static constexpr bool kBoth = kBoth_;
  static constexpr int kTokens = kBoth ? kBothWindowsTokens : kWindowsTokens, kColumns = kFusedCols / 2;
  static constexpr int kThreads = 128 * 3, kSums = kTokens / 2;  // of a thread
  // Registers of the loading warpgroup and of the others.
  static constexpr int kLoading = 40, kComputing = 232;
  // Factors that threads read have a slot more than numbers have stages, which are released before.
  static constexpr int kStages = kBoth ? 5 : 4, kSlots = kBoth ? kStages : kStages + 1;
  static constexpr int kTokenBytes = kTokens * 128, kColumnBytes = kColumns * 128;
  // Factors of tokens that have no windows come with the last window of a part. Others are pieces (FactorsOf).
  static constexpr int kFactor = kBoth ? 16 : 4, kColumnFactors = kColumns * kFactor, kTokenFactors = kTokens * kFactor;
  static constexpr int kFactors = kColumnFactors + kTokenFactors;
  using Writer = TileWriter<kTokens, false>;

  static constexpr int kAtColumns = kStages * kTokenBytes, kAtFactors = kAtColumns + kStages * kColumnBytes;
  static constexpr int kAtOut = kAtFactors + kSlots * kFactors, kAtFull = kAtOut + 2 * Writer::kShared;
  static constexpr int kAtEmpty = kAtFull + 8 * kStages, kAtTiles = kAtEmpty + 8 * kStages;
  using Ring = TileRing<kStages>;  // a work tile has one window at least
  using Tiles = DenseTiles<WindowsArgs, kTokens>;
  static constexpr int kShared = kAtTiles + Ring::kShared + 1024;  // to align the start
  static_assert(kShared <= 232448);
};

// ---------------------------------------------------------------- the thread that loads
template <class C>
__device__ __forceinline__ void load_tiles(const WindowsArgs& a, const WindowsMaps& maps, uint32_t smem) {
  const int rank = cluster_rank(), token_tiles = a.matrix_tiles / a.pairs;
  constexpr int kHalf = C::kTokens / 2;
  int stage = 0, phase = 0, slot = 0;
  const typename C::Tiles tiles{a};
  TileScheduler<C, true> scheduler(tiles, smem);
  for (int i = scheduler.first(); i < tiles.end(); i = scheduler.next()) {
    const WorkTile tile = tiles[i];
    const int token = tile.matrix * a.tokens + tile.token + rank * kHalf;
    const int column = tile.matrix * a.columns + tile.column + rank * C::kColumns;
    const int64_t token_tile = int64_t{tile.matrix} * token_tiles + tile.token / C::kTokens;
    const int64_t column_tile = int64_t{tile.matrix} * a.pairs * 2 + tile.column / C::kColumns + rank;
    const auto* of_tokens =
        a.token_factors + (C::kBoth ? token_tile * a.steps + tile.k_begin : token_tile) * C::kTokenFactors;
    const auto* of_columns = a.column_factors + (column_tile * a.steps + tile.k_begin) * C::kColumnFactors;
    for (int w = tile.k_begin; w < tile.k_end; ++w, of_columns += C::kColumnFactors) {
      const bool with_tokens = C::kBoth || w == tile.k_end - 1;
      barrier_wait(smem + C::kAtEmpty + 8 * stage, phase ^ 1);
      const uint32_t bar = smem + C::kAtFull + 8 * stage, factors = smem + C::kAtFactors + slot * C::kFactors;
      barrier_expect(bar, C::kTokenBytes + C::kColumnBytes + C::kColumnFactors + (with_tokens ? C::kTokenFactors : 0));
      load_box_to(3, smem + stage * C::kTokenBytes + rank * kHalf * 128, maps.tokens, bar, w * kWindow, token);
      load_box(smem + C::kAtColumns + stage * C::kColumnBytes, maps.columns, bar, w * kWindow, column);
      load_bytes(factors, of_columns, C::kColumnFactors, bar);
      if (with_tokens) load_bytes(factors + C::kColumnFactors, of_tokens, C::kTokenFactors, bar);
      if constexpr (C::kBoth) of_tokens += C::kTokenFactors;
      if (++stage == C::kStages) stage = 0, phase ^= 1;
      if (++slot == C::kSlots) slot = 0;
    }
  }
  // Stays until the other block has read what this one has loaded for it.
  for (int i = 0; i < C::kStages; ++i) {
    barrier_wait(smem + C::kAtEmpty + 8 * stage, phase ^ 1);
    if (++stage == C::kStages) stage = 0, phase ^= 1;
  }
}

// ---------------------------------------------------------------- a warpgroup that computes
template <class C>
struct WindowsConsumer {
  using Sums = float[C::kSums];

  const WindowsArgs& a;
  uint32_t smem;
  int rank, wg;              // smem and wg by a shuffle, so that they are kept in uniform registers
  uint64_t tokens, columns;  // in the first stage
  int stage = 0, phase = 0, slot = 0;

  __device__ __forceinline__ WindowsConsumer(const WindowsArgs& args, uint32_t shared)
      : a(args),
        smem(__shfl_sync(~0u, shared, 0)),
        rank(cluster_rank()),
        wg(__shfl_sync(~0u, threadIdx.x / 128 - 1, 0)),
        tokens(shared_matrix(smem)),
        columns(shared_matrix(smem + C::kAtColumns + wg * 64 * 128)) {}

  // ---- the sum along K
  // Named barriers 4 and 5: one warpgroup waits, the other arrives.
  __device__ __forceinline__ void wait_turn() { named_sync(4 + wg, 256); }
  __device__ __forceinline__ void pass_turn() { named_arrive(5 - wg, 256); }
  // The stage is free, in both blocks that load for it.
  __device__ __forceinline__ void release() { barrier_arrive_in_both(smem + C::kAtEmpty + 8 * stage); }

  __device__ __forceinline__ void wait_for_stage() { barrier_wait(smem + C::kAtFull + 8 * stage, phase); }
  __device__ __forceinline__ uint32_t factors() const {
    return smem + C::kAtFactors + (C::kBoth ? stage : slot) * C::kFactors;
  }
  // Starts the sum of a window.
  __device__ __forceinline__ void multiply(Sums& window) const {
    const uint64_t of_tokens = tokens + stage * (C::kTokenBytes / 16),
                   of_columns = columns + stage * (C::kColumnBytes / 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma_shared<F16>(window, of_columns + 2 * j, of_tokens + 2 * j, j > 0);
    wgmma_commit();
  }
  // Adds a window, times the factors of its columns. A thread has two, which come before the wait for a turn.
  __device__ __forceinline__ void add_window_of_columns(Sums& sums) {
    Sums window;
    const uint32_t at = factors() + (wg * 64 + fragment_row()) * 4;
    const float low = float_of(load_shared32(at)), high = float_of(load_shared32(at + 8 * 4));
    wait_turn();
    wgmma_fence();
    multiply(window);
    pass_turn();
    wgmma_wait<0>();
    release();
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) sums[i] = __fmaf_rn(window[i], i % 4 < 2 ? low : high, sums[i]);
  }
  // The same, times the products of the factors of columns and tokens.
  __device__ __forceinline__ void add_window_of_both(Sums& sums) {
    Sums window, products;
    wait_turn();
    wgmma_fence();
    wgmma_shared<Bf16>(products, shared_rows_of_16(factors() + wg * 64 * C::kFactor),
                       shared_rows_of_16(factors() + C::kColumnFactors), 0);
    multiply(window);
    pass_turn();
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
      if constexpr (C::kBoth)
        add_window_of_both(sums);
      else
        add_window_of_columns(sums);
      if (++stage == C::kStages) stage = 0, phase ^= 1;
      if (++slot == C::kSlots) slot = 0;
    }
  }

  // ---- parts of K
  // Of this warpgroup, in the order in which threads have the sums.
  __device__ __forceinline__ int64_t place_of(const WorkTile& tile, int split) const {
    return ((int64_t{tile.partial} * (a.splits - 1) + split) * 2 + rank) * 2 + wg;
  }
  __device__ __forceinline__ PartSums<C::kSums> parts() const { return {a.sums, a.flags, 1 + wg}; }

  // ---- the result
  // The addition makes -0 the rule's 0.
  __device__ __forceinline__ static float unscaled(float sum) { return __fmaf_rn(sum, kUnscale, 0.0f); }
  // Tokens that have no windows have their factors beside those of the last window.
  __device__ __forceinline__ void scale(Sums& sums) const {
    if constexpr (C::kBoth) {
#pragma unroll
      for (float& sum : sums) sum = unscaled(sum);
    } else {
      const int last = slot == 0 ? C::kSlots - 1 : slot - 1;
      C::Writer::for_each_token([&](int i, float factor) { sums[i] = mul_rn(factor, unscaled(sums[i])); },
                                smem + C::kAtFactors + last * C::kFactors + C::kColumnFactors);
    }
  }
  template <bool kExchanged>
  __device__ __forceinline__ void write(Sums& sums, const WorkTile& tile) const {
    const TileWriter<C::kTokens, kExchanged> writer{a.result,
                                                    a.tokens,
                                                    a.columns,
                                                    tile.matrix,
                                                    tile.token,
                                                    tile.column + rank * C::kColumns + wg * 64,
                                                    smem + C::kAtOut + wg * C::Writer::kShared,
                                                    1 + wg};
    float biases[2];
    writer.load_biases(biases);
    scale(sums);
    if (kExchanged && a.result.bias)
      writer.stage_tokens([&](int of, int i) { store_shared(writer.bias_at(of), biases[i]); });
    writer.add_biases(sums, biases);
    writer.write(sums);
    __syncwarp();  // instructions for whole warps follow
  }
  __device__ __forceinline__ void finish(Sums& sums, const WorkTile& tile) const {
    if (tile.split < tile.splits - 1) return parts().keep(sums, place_of(tile, tile.split));
    if (tile.partial >= 0) parts().add(sums, tile.split, [&](int split) { return place_of(tile, split); });
    if constexpr (!C::kBoth)
      if (a.exchanged) return write<true>(sums, tile);
    write<false>(sums, tile);
  }

  __device__ __forceinline__ void run() {
    if (wg == 1) pass_turn();  // the first turn is that of warpgroup 0
    const typename C::Tiles tiles{a};
    TileScheduler<C, false> scheduler(tiles, smem);
    for (int i = scheduler.first(); i < tiles.end(); i = scheduler.next()) {
      const WorkTile tile = tiles[i];
      Sums sums;
      sum(sums, tile.k_end - tile.k_begin);
      finish(sums, tile);
    }
    if (wg == 0) wait_turn();  // no barrier is left half full
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sm90_windows_kernel(const __grid_constant__ WindowsArgs a, const __grid_constant__ WindowsMaps maps) {
  run_pair<C>(
      a, [&] { prefetch_map(maps.tokens), prefetch_map(maps.columns); },
      [&](uint32_t smem) { load_tiles<C>(a, maps, smem); }, [&](uint32_t smem) { WindowsConsumer<C>(a, smem).run(); });
}

// ---------------------------------------------------------------- launch
template <class C>
cudaError_t launch_config(const WindowsArgs& args, const WindowsMaps& maps, cudaStream_t stream) {
  const int clusters = clusters_of(args.work_tiles, args.whole, args.splits);
  return launch_early(sm90_windows_kernel<C>, 2 * clusters, C::kThreads, 2, C::kShared, stream, args, maps);
}

cudaError_t make_windows_maps(const WindowsPreparation& p, const WindowsScratch& at, WindowsMaps* maps) {
  const auto source = [&](const WindowsOperand& x, int64_t rows, int box_rows) {
    return MapSource{x.numbers, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, p.depth, rows, p.depth * 2,
                     kWindow,   static_cast<uint32_t>(box_rows)};
  };
  return make_maps({{source(p.tokens, at.token_rows, p.tokens.tile_rows / 2), &maps->tokens},
                    {source(p.columns, at.column_rows, p.columns.tile_rows), &maps->columns}});
}

}  // namespace

cudaError_t launch_sm90_windows(const MatmulArgs& g, const FusedPlan& plan, void* scratch, cudaStream_t stream) {
  const GemmShape s = fused_shape(g.shape, plan);
  const MatmulOperand &tokens = plan.exchanged ? g.b : g.a, &columns = plan.exchanged ? g.a : g.b;
  const int64_t pairs = (s.cols + kFusedCols - 1) / kFusedCols, token_tiles = (s.rows + plan.tokens - 1) / plan.tokens;
  const int64_t work_tiles = fused_tiles(s, plan) * plan.splits, windows = s.depth / kWindow;
  const bool both = tokens.map.windows();
  if (work_tiles > INT32_MAX) return cudaErrorInvalidConfiguration;  // more results than any memory holds
  if (!columns.map.windows() || s.depth % kWindow || plan.tokens != (both ? kBothWindowsTokens : kWindowsTokens) ||
      plan.splits > windows)
    return cudaErrorInvalidValue;  // plan_windows makes no such plans
  auto* const bytes = static_cast<uint8_t*>(scratch);
  const WindowsScratch at = windows_scratch(s, plan);
  // kUnscale in all; products of pieces come twice.
  const WindowsPreparation p{
      {tokens, s.batch, s.rows, token_tiles, plan.tokens, both ? FactorsOf::kTokenPieces : FactorsOf::kRows,
       both ? 0x1p6f : 1.0f, bytes + at.tokens, bytes + at.token_factors},
      {columns, s.batch, s.cols, 2 * pairs, kFusedCols / 2, both ? FactorsOf::kColumnPieces : FactorsOf::kWindows,
       both ? 0x1p7f : kUnscale, bytes + at.columns, bytes + at.column_factors},
      s.depth,
      reinterpret_cast<uint32_t*>(bytes + at.flags),
      at.flag_count};
  WindowsMaps maps;
  cudaError_t status = make_windows_maps(p, at, &maps);
  if (status == cudaSuccess) status = launch_sm90_prepare_windows(p, stream);
  if (status != cudaSuccess) return status;
  const WindowsArgs args{g.result,
                         plan.exchanged,
                         static_cast<int>(s.rows),
                         static_cast<int>(s.cols),
                         static_cast<int>(pairs),
                         static_cast<int>(pairs * token_tiles),
                         static_cast<int>(work_tiles),
                         0,
                         plan.splits,
                         static_cast<int>(windows),
                         bytes + at.token_factors,
                         bytes + at.column_factors,
                         reinterpret_cast<float*>(bytes + at.sums),
                         p.flags,
                         p.flags + at.flag_count - 1};
  return both ? launch_config<WindowsConfig<true>>(args, maps, stream)
              : launch_config<WindowsConfig<false>>(args, maps, stream);
}

}  // namespace jnvfp4
