// out = a b^T on Hopper, in one kernel: b is NVFP4 and is decoded in registers. a, as 16-bit floats in the order along
// K of the decoded b, comes from sm90/prepare.cu.
//
// The sides of wgmma change places: rows of b are its 64 rows, from registers, and rows of a ("tokens") its columns,
// from shared memory. A warpgroup decodes its own 64 rows of b, one window (64 along K) at a time, while its last four
// wgmmas run. Two CTAs of a cluster have the same tokens and neighbouring rows of b; each loads half of the
// tokens for both. CTAs are persistent (scheduler.cuh): one thread loads, two or four warpgroups compute.
//
// The sum along K: the tensor core's, windows ascending, in one accumulator, or in two that are then added if four
// warpgroups compute; and for each of `splits` parts of K, to the last of which the others are added in their order.
// Fixed by the shape, so runs have the same bits.
//
//   cluster of 2 CTAs     CTA 0: 128 rows of b (two warpgroups of 64) | the next 128: CTA 1    x kTokens tokens of a
//   rings                 slot: codes and scales of b, 256 along K (kRing, barriers at kAtSlot)
//                         stage: tokens, kStageDepth windows (kStages, barriers at kAtFull and kAtEmpty)
//   warpgroup 0           one thread loads by TMA, one takes tiles          others: decode | wgmma | decode | wgmma ...
//   kTokens <= 64         two teams of two warpgroups, which take slots in turn
//   kTokens = 256         the two warpgroups take turns on the tensor cores: one decodes, one multiplies
#pragma once

#include "../decode.cuh"
#include "fused.h"
#include "fused_results.cuh"
#include "launch.cuh"
#include "pairs.cuh"
#include "ptx.cuh"
#include "scheduler.cuh"

namespace jnvfp4 {

// T: the type of the decoded numbers, F16 or Bf16.
//
// To decode a window takes longer than the tensor cores need for up to 64 tokens. So there are two teams of two
// warpgroups then, which share K. With 256 tokens the two warpgroups of one team take turns on the tensor cores.
template <class T_, int kTokens_>
struct FusedConfig {
  using T = T_;
  using Args = FusedArgs;
  using Maps = FusedMaps;
  static constexpr bool kGrouped = false;  // see sm90/grouped.cuh
  // Whether tiles with half of the tokens or fewer, which come last, are done faster.
  static constexpr bool kFew = false;
  static constexpr int kTokens = kTokens_, kTeams = fused_teams(kTokens), kRows = 128;
  static constexpr bool kTurns = kTokens == 256;
  static constexpr int kThreads = 128 * (1 + 2 * kTeams);
  static constexpr int kSums = kTokens / 2;  // of a thread
  // Registers in a launch, of the loading warpgroup, of the others: the sum over all may not grow.
  static constexpr int kLaunched = kTeams == 1 ? 168 : 96, kLoading = kTeams == 1 ? 40 : 32;
  static constexpr int kComputing = kTeams == 1 ? 232 : 112;

  // A slot has codes and scales of 256 along K, a stage the tokens of kStageDepth windows: several, since the loading
  // thread waits once per stage, and limits tiles of 128 tokens.
  static constexpr int kStageDepth = kTokens <= 64 ? 4 : kTokens == 128 ? 2 : 1, kPerSlot = 4 / kStageDepth;
  static constexpr int kFewDepth = kStageDepth == 1 ? 2 : kStageDepth;  // of tiles with few
  static constexpr int kRing = kTokens <= 64 ? 4 : 3, kStages = 4;
  static constexpr int kWindow = kTokens * 128, kData = kRows * 128, kScale = kRows * 16;
  static constexpr bool kExchanges = kTokens >= 128 && std::is_same_v<T, F16>;
  template <bool kExchanged>
  using Result = FusedResult<kTokens, kExchanged, std::is_same_v<T, F16>>;
  using Writer = TileWriter<kTokens, false>;

  static constexpr int kAtData = kStages * kStageDepth * kWindow, kAtScale = kAtData + kRing * kData;
  static constexpr int kAtOut = kAtScale + kRing * kScale;
  static constexpr int kAtFull = kAtOut + 2 * Writer::kShared;
  static constexpr int kAtEmpty = kAtFull + 8 * kStages, kAtSlot = kAtEmpty + 8 * kStages;
  using Ring = TileRing<kStages * kFewDepth / 4>;  // a work tile has one slot at least
  using Tiles = DenseTiles<FusedArgs, kTokens>;
  static constexpr int kAtTiles = kAtSlot + 8 * kRing;
  static constexpr int kShared = kAtTiles + Ring::kShared + 1024;  // to align the start
  static_assert(kLoading + 2 * kTeams * kComputing <= (1 + 2 * kTeams) * kLaunched);
  static_assert(kStages * kStageDepth <= 4 * kRing - 3 || kStageDepth == 4, "a slot is read before it is filled again");
  static_assert(kStages % kPerSlot == 0 && kShared <= 232448);
};

// ---------------------------------------------------------------- one product, unlike groups
__device__ __forceinline__ void wait_for_lists(const FusedArgs&) {}
__device__ __forceinline__ void wait_for_counter(const FusedArgs&) { wait_for_kernel_ahead(); }  // which clears it
__device__ __forceinline__ void wait_for_kernel_beside(const FusedArgs&) {}
// The row of all tokens that a CTA loads first.
__device__ __forceinline__ int row_of_a(const FusedArgs& a, const WorkTile& tile, int half) {
  return tile.matrix * a.tokens + tile.token + cluster_rank() * half;
}

template <class C>
__device__ __forceinline__ bool has_few_tokens(const WorkTile& tile) {
  return C::kFew && tile.token_end - tile.token <= C::kTokens / 2;
}

// ---------------------------------------------------------------- the thread that loads
template <class C>
__device__ __forceinline__ int row_of_b(const typename C::Args& a, const WorkTile& tile) {
  return tile.matrix * a.columns + tile.column + cluster_rank() * C::kRows;
}
// From window w on.
template <class C>
__device__ __forceinline__ void load_slot(const FusedMaps& maps, uint32_t smem, int slot, int b_row, int w) {
  const uint32_t bar = smem + C::kAtSlot + 8 * slot;
  barrier_expect(bar, C::kData + C::kScale);
  load_box(smem + C::kAtData + slot * C::kData, maps.data, bar, w * 32, b_row);
  load_box(smem + C::kAtScale + slot * C::kScale, maps.scale, bar, w * 4, b_row);
}
// The first slot of each team is asked for before the CTAs of the cluster know of each other. Returns how many
// there are.
template <class C>
__device__ __forceinline__ int load_early(const typename C::Args& a, const typename C::Maps& maps, uint32_t smem) {
  if (C::kTeams == 1 || C::kGrouped) return 0;
  const WorkTile tile = typename C::Tiles{a}[blockIdx.x / 2];
  const int count = min(C::kTeams, tile.k_end - tile.k_begin), b_row = row_of_b<C>(a, tile);
  for (int i = 0; i < count; ++i) load_slot<C>(maps, smem, i, b_row, (tile.k_begin + i) * 4);
  return count;
}
template <class C>
__device__ __forceinline__ void load_tiles(const typename C::Args& a, const typename C::Maps& maps, uint32_t smem,
                                           int early) {
  const int rank = cluster_rank();
  constexpr int kHalf = C::kTokens / 2;
  int stage = 0, phase = 0, slot = 0;
  bool first_load = !C::kGrouped;
  const typename C::Tiles tiles{a};
  TileScheduler<C, true> scheduler(tiles, smem);
  for (int i = scheduler.first(); i < tiles.end(); i = scheduler.next()) {
    const WorkTile tile = tiles[i];
    const int b_row = row_of_b<C>(a, tile);
    const bool few = has_few_tokens<C>(tile);
    const int half = few ? kHalf / 2 : kHalf, a_row = row_of_a(a, tile, half);
    for (int w = tile.k_begin * 4; w < tile.k_end * 4; w += C::kFew && few ? C::kFewDepth : C::kStageDepth) {
      barrier_wait(smem + C::kAtEmpty + 8 * stage, phase ^ 1);
      const uint32_t bar = smem + C::kAtFull + 8 * stage;
      if (w % 4 == 0) {
        if (early > 0)
          --early;
        else
          load_slot<C>(maps, smem, slot, b_row, w);
        if (++slot == C::kRing) slot = 0;
      }
      if (first_load) wait_for_kernel_ahead(), first_load = false;  // it writes a
      if constexpr (C::kFew) {
        const int depth = few ? C::kFewDepth : C::kStageDepth, window = few ? C::kWindow / 2 : C::kWindow;
        const uint32_t to = smem + stage * C::kStageDepth * C::kWindow + rank * half * 128;
        barrier_expect(bar, depth * window);
        for (int q = 0; q < depth; ++q)
          load_box_to(3, to + q * window, few ? maps.few : maps.a, bar, (w + q) * 64, a_row);
      } else {
        barrier_expect(bar, C::kStageDepth * C::kWindow);
#pragma unroll
        for (int q = 0; q < C::kStageDepth; ++q)
          load_box_to(3, smem + (stage * C::kStageDepth + q) * C::kWindow + rank * kHalf * 128, maps.a, bar,
                      (w + q) * 64, a_row);
      }
      if (++stage == C::kStages) stage = 0, phase ^= 1;
    }
  }
  // Stays until the other block has read what this one has loaded for it.
  for (int i = 0; i < C::kStages; ++i) {
    barrier_wait(smem + C::kAtEmpty + 8 * stage, phase ^ 1);
    if (++stage == C::kStages) stage = 0, phase ^= 1;
  }
}

// ---------------------------------------------------------------- codes to fragments
// Codes and scales of a thread for one window: of rows r and r + 8. Lane t of four has the t-th 16 along K.
template <class T>
struct RawWindow {
  uint32_t codes[4], scales;

  // Addresses of the slot for this row and t. `quarter`: which of the four windows.
  __device__ __forceinline__ void load(uint32_t data, uint32_t scale, int quarter) {
    const uint32_t at = data ^ quarter * 32;  // the 128-byte pattern exchanges 16-byte words
    const uint2 low = load_shared64(at), high = load_shared64(at + 8 * 128);  // which is the same 8 rows further
    codes[0] = low.x, codes[1] = low.y, codes[2] = high.x, codes[3] = high.y;
    scales = load_shared8(scale + quarter * 4) | load_shared8(scale + quarter * 4 + 8 * 16) << 8;
  }
  // The fragments of four k16 steps.
  __device__ __forceinline__ void decode(uint32_t (&f)[16]) const {
    uint32_t scale[2];
    Decode<T>::scales(scales, scale[0], scale[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        uint32_t pair[4];
        Decode<T>::eight(codes[2 * row + half], scale[row], pair);
#pragma unroll
        for (int q = 0; q < 4; ++q) f[8 * half + 2 * q + row] = pair[q];
      }
  }
};

// ---------------------------------------------------------------- a warpgroup that computes
template <class C>
struct FusedConsumer {
  // Of so many tokens: C::kTokens, or half of them in a tile with few.
  template <int kTokens>
  using Sums = float[kTokens / 2];
  using Fragments = uint32_t[16];

  const typename C::Args& a;
  uint32_t smem;
  int rank, team, wg;     // wg of its team. Both by a shuffle, so that they are in uniform registers
  uint32_t data, scale;   // where its codes and scales are in the first slot
  uint32_t begun = 0;     // slots of all work tiles before
  uint32_t few_from = 0;  // those before the work tiles with few tokens

  __device__ __forceinline__ FusedConsumer(const typename C::Args& args, uint32_t shared)
      : a(args), smem(shared), rank(cluster_rank()) {
    const int all = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);
    team = all / 2, wg = all % 2;
    const int row = wg * 64 + fragment_row(), t = threadIdx.x % 4;
    data = smem + C::kAtData + row * 128 + (t / 2 ^ row % 8) * 16 + t % 2 * 8;
    scale = smem + C::kAtScale + row * 16 + t;
  }

  // ---- the sum along K
  // Without turns both warpgroups multiply at the same time, and then both decode while the tensor cores rest. Named
  // barriers 4 and 5: one warpgroup waits, the other arrives.
  template <int kTokens = C::kTokens>
  __device__ __forceinline__ void wait_turn() {
    if constexpr (C::kTurns && kTokens == C::kTokens) named_sync(4 + wg, 256);
  }
  template <int kTokens = C::kTokens>
  __device__ __forceinline__ void pass_turn() {
    if constexpr (C::kTurns && kTokens == C::kTokens) named_arrive(5 - wg, 256);
  }
  // Whether window q of a slot is such a turn, in a tile of several slots. Warpgroup 1 has three windows left when 0
  // has none, which run while 0 writes its result, and both begin the next tile as they can. Both have as many
  // turns, or the barriers would not pair.
  __device__ __forceinline__ bool is_turn(int q, bool first, bool last) const {
    if (first) return q >= 2;
    return !last || q == 0 || q == (wg == 0 ? 3 : 1);
  }
  // Windows of a stage.
  template <int kTokens>
  static constexpr int kDepth = kTokens == C::kTokens ? C::kStageDepth : C::kFewDepth;
  // The stage of window q of the n-th slot since the start or, with few tokens, since those began; `before` have been
  // before then.
  template <int kTokens>
  static __device__ __forceinline__ int stage_of(uint32_t n, int q, uint32_t before) {
    if constexpr (kDepth<kTokens> == 2) return (n - before) % 2 * 2 + q / 2;
    return C::kStageDepth == 4 ? n % C::kStages : n % (C::kStages / C::kPerSlot) * C::kPerSlot + q;
  }
  template <int kTokens>
  static __device__ __forceinline__ int phase_of(uint32_t n, uint32_t before) {
    if constexpr (kDepth<kTokens> == 2) return (before + (n - before) / 2) & 1;
    return n / (C::kStages / C::kPerSlot) & 1;
  }

  __device__ __forceinline__ void wait_for_slot(uint32_t n) {
    barrier_wait(smem + C::kAtSlot + 8 * (n % C::kRing), n / C::kRing & 1);
  }
  __device__ __forceinline__ void load(RawWindow<typename C::T>& r, uint32_t n, int q) {
    const uint32_t slot = n % C::kRing;
    r.load(data + slot * C::kData, scale + slot * C::kScale, q);
  }
  // The stage is free, in both blocks that load for it.
  __device__ __forceinline__ void release(int stage) { barrier_arrive_in_both(smem + C::kAtEmpty + 8 * stage); }
  template <int kTokens>
  __device__ __forceinline__ void multiply(Sums<kTokens>& sums, const Fragments& f, uint32_t n, int q, bool first,
                                           bool turn) {
    constexpr int kBytes = C::kWindow / (C::kTokens / kTokens);
    const int stage = stage_of<kTokens>(n, q, few_from);
    if (q % kDepth<kTokens> == 0) barrier_wait(smem + C::kAtFull + 8 * stage, phase_of<kTokens>(n, few_from));
    if (turn) wait_turn<kTokens>();
    wgmma_fence();
    uint32_t at = smem + (stage * C::kStageDepth + q % C::kStageDepth) * C::kWindow;
    if constexpr (kTokens != C::kTokens) at = smem + stage * C::kStageDepth * C::kWindow + q % kDepth<kTokens> * kBytes;
    const uint64_t tokens = shared_matrix(at);
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma<typename C::T>(sums, f + 4 * j, tokens + 2 * j, !first || j > 0);
    wgmma_commit();
    if (turn) pass_turn<kTokens>();
  }
  // If window q is the last of its stage.
  template <int kTokens>
  __device__ __forceinline__ void release(uint32_t n, int q) {
    if (q % kDepth<kTokens> == kDepth<kTokens> - 1) release(stage_of<kTokens>(n, q, few_from));
  }

  // A window runs while the next one is decoded. `before_end` is called while the last one runs.
  template <int kTokens, class F>
  __device__ __forceinline__ void sum(Sums<kTokens>& sums, int slots, const F& before_end) {
    Fragments f[2];
    RawWindow<typename C::T> r;
    const bool staggered = C::kTurns && slots > 1;
    uint32_t n = begun + team;
    begun += slots;
    if constexpr (C::kTeams == 2) {
#pragma unroll
      for (float& s : sums) s = 0;
      if (n >= begun) return before_end();  // K has one slot, which is the other team's
    }
    wait_for_slot(n);
    load(r, n, 0);
    r.decode(f[0]);
    for (bool first = true; n < begun; first = false, n += C::kTeams) {
      const bool last = n + C::kTeams >= begun;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        multiply<kTokens>(sums, f[q % 2], n, q, first && q == 0, !staggered || is_turn(q, first, last));
        if (q < 3) {
          load(r, n, q + 1);
        } else if (!last) {
          wait_for_slot(n + C::kTeams);
          load(r, n + C::kTeams, 0);
        }
        wgmma_wait<1>();  // the window before has run: its stage and fragments are free
        if (q > 0)
          release<kTokens>(n, q - 1);
        else if (!first)
          release<kTokens>(n - C::kTeams, 3);
        if (q < 3 || !last) r.decode(f[(q + 1) % 2]);
      }
    }
    before_end();
    wgmma_wait<0>();
    release<kTokens>(n - C::kTeams, 3);
  }

  // ---- parts of K
  // Of this warpgroup, in the order in which threads have the sums. Few tokens have one of two places.
  template <int kTokens>
  __device__ __forceinline__ int64_t place_of(const WorkTile& tile, int split) const {
    const int64_t parts = int64_t{tile.partial} * (tile.splits - 1) + split;
    return ((parts * 2 + rank) * 2 * C::kTeams + team * 2 + wg) * (C::kTokens / kTokens);
  }
  // With the warpgroup of the other team that has the same rows.
  __device__ __forceinline__ void meet_other_team() const {
    if constexpr (C::kTeams == 2) named_meet(6 + wg, 256);
  }
  __device__ __forceinline__ int own_barrier() const { return team == 0 ? 1 + wg : 8 + wg; }
  template <int kTokens>
  __device__ __forceinline__ PartSums<kTokens / 2> parts() const {
    return {a.sums, a.flags, own_barrier()};
  }

  // ---- the result
  // Of both teams' warpgroups with the same rows.
  __device__ __forceinline__ uint32_t out() const { return smem + C::kAtOut + wg * C::Writer::kShared; }
  // Calls f with what writes the result of the tile.
  template <int kTokens, class F>
  __device__ __forceinline__ void with_writer(const WorkTile& tile, const F& f) const {
    const int column = tile.column + rank * C::kRows + wg * 64;
    if constexpr (C::kGrouped) {
      f(typename C::template Result<kTokens>{a, tile.matrix, tile.token, tile.token_end, column, out(), 1 + wg});
    } else {
      if constexpr (C::kExchanges)
        if (a.exchanged) return f(typename C::template Result<true>{a, tile.matrix, tile.token, column, out(), 1 + wg});
      f(typename C::template Result<false>{a, tile.matrix, tile.token, column, out(), 1 + wg});
    }
  }
  template <int kTokens>
  __device__ __forceinline__ void load_factors(const WorkTile& tile, ResultFactors& factors) const {
    with_writer<kTokens>(tile, [&](const auto& writer) { writer.load(factors); });
  }
  // To the sums of team 0 those of team 1 are added, which come in the order in which threads have them.
  template <int kTokens>
  __device__ __forceinline__ void add_other_team(Sums<kTokens>& sums) const {
    constexpr int kAtOnce = C::Writer::kBuffer / 512;
    const uint32_t at = out() + threadIdx.x % 128 * 16;
#pragma unroll
    for (int first = 0; first < kTokens / 2; first += kAtOnce) {
      meet_other_team();  // what was here has been read
#pragma unroll
      for (int i = first; team == 1 && i < first + kAtOnce; i += 4)
        store_shared128(at + (i - first) * 512, {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]});
      meet_other_team();
#pragma unroll
      for (int i = first; team == 0 && i < first + kAtOnce; i += 4) {
        const uint4 other = load_shared128(at + (i - first) * 512);
        sums[i] = __fadd_rn(sums[i], float_of(other.x)), sums[i + 1] = __fadd_rn(sums[i + 1], float_of(other.y));
        sums[i + 2] = __fadd_rn(sums[i + 2], float_of(other.z)),
                 sums[i + 3] = __fadd_rn(sums[i + 3], float_of(other.w));
      }
    }
    if (team == 1) return;
    named_sync(own_barrier(), 128);  // all of them are read
  }
  // Named barriers 1 and 2, 8 and 9: a warpgroup of team 0 or 1. 6 and 7: two with the same rows.
  template <int kTokens>
  __device__ __forceinline__ void finish(Sums<kTokens>& sums, const WorkTile& tile, ResultFactors& factors) {
    if (tile.partial >= 0) {
      wait_for_kernel_ahead();  // it has lowered the flags
      if (tile.split < tile.splits - 1) {
        meet_other_team();  // so that neither is ahead by a whole ring, whose phases it could not tell apart
        return parts<kTokens>().keep(sums, place_of<kTokens>(tile, tile.split));
      }
      parts<kTokens>().add(sums, tile.split, [&](int split) { return place_of<kTokens>(tile, split); });
    }
    if constexpr (C::kTeams == 2) {
      add_other_team<kTokens>(sums);
      if (team == 1) return;
      load_factors<kTokens>(tile, factors);
    }
    with_writer<kTokens>(tile, [&](const auto& writer) { writer.write(sums, factors); });
    __syncwarp();  // instructions for whole warps follow
  }

  template <int kTokens>
  __device__ __forceinline__ void compute(int i, WorkTile tile) {
    Sums<kTokens> sums;
    ResultFactors factors;
    // There may be no registers to keep the tile.
    sum<kTokens>(sums, tile.k_end - tile.k_begin, [&] {
      if constexpr (C::kFew) tile = typename C::Tiles{a}[pin_register(i)];
      if constexpr (C::kTeams == 1) load_factors<kTokens>(tile, factors);
    });
    if constexpr (C::kTeams == 2) tile = typename C::Tiles{a}[pin_register(i)];
    finish<kTokens>(sums, tile, factors);
  }
  __device__ __forceinline__ void run() {
    if (wg == 1) pass_turn();  // the first turn is that of warpgroup 0
    const typename C::Tiles tiles{a};
    TileScheduler<C, false> scheduler(tiles, smem);
    int i = scheduler.first();
    for (; i < tiles.end(); i = scheduler.next()) {
      const WorkTile tile = tiles[i];
      if (has_few_tokens<C>(tile)) break;  // and so have all that follow
      compute<C::kTokens>(i, tile);
    }
    if constexpr (C::kFew) {
      few_from = begun;
      for (; i < tiles.end(); i = scheduler.next()) compute<C::kTokens / 2>(i, tiles[i]);
    }
    if (wg == 0) wait_turn();  // no barrier is left half full
    if constexpr (C::kGrouped) clear_other_rows(a, C::kThreads - 128);
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sm90_fused_kernel(const __grid_constant__ typename C::Args a, const __grid_constant__ typename C::Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t any_shared[];
  const uint32_t smem = (shared_address(any_shared) + 1023) & ~1023u;  // the same in both blocks of a cluster
  int early = 0;
  if (threadIdx.x == 0) {
    init_stage_barriers<C>(smem);
    for (int i = 0; i < C::kRing; ++i) barrier_init(smem + C::kAtSlot + 8 * i, 1);
    typename C::Ring{smem + C::kAtTiles}.init_barriers();
    fence_barrier_init();
    prefetch_map(maps.data), prefetch_map(maps.scale), prefetch_map(maps.a);
    if constexpr (C::kFew) prefetch_map(maps.few);
    early = load_early<C>(a, maps, smem);
  }
  __syncwarp();  // instructions for whole warps follow
  cluster_meet();
  if (threadIdx.x < 128) {
    wait_for_lists(a);
    let_next_kernel_start();  // it waits for the end of this one
    give_registers<C::kLoading>();
    if (threadIdx.x == 0) load_tiles<C>(a, maps, smem, early);
    if (threadIdx.x == 32 && cluster_rank() == 0) {
      wait_for_counter(a);
      const typename C::Tiles tiles{a};
      TileScheduler<C, false>(tiles, smem).hand_out();
    }
    __syncwarp();
  } else {
    take_registers<C::kComputing>();
    wait_for_lists(a);
    FusedConsumer<C>(a, smem).run();
  }
  cluster_sync();  // no block leaves while another may still arrive or write here
  wait_for_kernel_beside(a);
#else
  __trap();  // compiled for another architecture
#endif
}

// ---------------------------------------------------------------- launch
template <class C>
cudaError_t launch_fused_config(const FusedArgs& args, const FusedMaps& maps, cudaStream_t stream) {
  const int clusters = clusters_of(args.work_tiles, args.whole, args.splits);
  return launch_early(sm90_fused_kernel<C>, 2 * clusters, C::kThreads, 2, C::kShared, stream, args, maps);
}

template <class T>
cudaError_t launch_fused_tokens(const FusedArgs& args, const FusedMaps& maps, int tokens, cudaStream_t stream) {
  switch (tokens) {
    case 32: return launch_fused_config<FusedConfig<T, 32>>(args, maps, stream);
    case 64: return launch_fused_config<FusedConfig<T, 64>>(args, maps, stream);
    case 128: return launch_fused_config<FusedConfig<T, 128>>(args, maps, stream);
    case 256: return launch_fused_config<FusedConfig<T, 256>>(args, maps, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jnvfp4
