// out = a b^T on Hopper, in one kernel: b is NVFP4 and is decoded in registers. a, as 16-bit floats in the order along
// K of the decoded b, comes from sm90/prepare.cu.
//
// A and B of wgmma are swapped: rows of b are its M, 64 rows from registers, and rows of a ("tokens") its N, from
// shared memory. A consumer warpgroup decodes its own 64 rows of b, one window (64 along K) at a time, while its last
// four wgmmas run. Two CTAs of a cluster have the same tokens and neighbouring rows of b; each loads half of the tokens
// for both. CTAs are persistent (scheduler.cuh) and warp-specialized.
//
// Order of sums along K: the tensor core's, windows ascending, in one accumulator, or in two that are then added if
// there are two teams of consumers; and for each of `num_splits` splits of K, to the last of which the others are added
// in their order. The shape fixes it, so runs have the same bits.
#pragma once

#include "../decode.cuh"
#include "fused.h"
#include "fused_results.cuh"
#include "launch.cuh"
#include "pairs.cuh"
#include "ptx.cuh"
#include "scheduler.cuh"

namespace jnvfp4 {

// T: type of the decoded numbers, F16 or Bf16.
//
// Decoding a window takes longer than wgmma does for up to 64 tokens, so two teams of two consumer warpgroups share K
// then. With 256 tokens the two warpgroups of the one team run ping-pong: one decodes, one multiplies.
template <class T_, int kTokens_>
struct FusedConfig {
  using T = T_;
  using Args = FusedArgs;
  using Maps = FusedMaps;
  static constexpr bool kGrouped = false;  // see sm90/grouped.cuh
  static constexpr bool kHalfTiles =
      false;  // whether tiles with at most half of the tokens come last, and are narrower
  static constexpr int kTokens = kTokens_, kTeams = fused_teams(kTokens), kRows = 128;
  static constexpr bool kPingPong = kTokens == 256;
  static constexpr int kThreads = 128 * (1 + 2 * kTeams);
  // Registers per thread: at launch, of the producer warpgroup, of the consumers. The sum over all may not grow.
  static constexpr int kLaunchRegisters = kTeams == 1 ? 168 : 96, kProducerRegisters = kTeams == 1 ? 40 : 32;
  static constexpr int kConsumerRegisters = kTeams == 1 ? 232 : 112;

  // Two rings in shared memory: a slot has codes and scales of b, 256 along K; a stage has tokens, kStageDepth windows
  // of them. Several windows, since the producer waits once per stage, which limits tiles of 128 tokens.
  static constexpr int kStageDepth = kTokens <= 64 ? 4 : kTokens == 128 ? 2 : 1;
  static constexpr int kHalfDepth = kStageDepth == 1 ? 2 : kStageDepth;  // in half tiles
  static constexpr int kSlots = kTokens <= 64 ? 4 : 3, kStages = 4;
  static constexpr int kTokenBytes = kTokens * 128, kDataBytes = kRows * 128, kScaleBytes = kRows * 16;
  static constexpr bool kCanSwap = kTokens >= 128 && std::is_same_v<T, F16>;
  template <bool kSwapped>
  using Result = FusedResult<kTokens, kSwapped, std::is_same_v<T, F16>>;
  using Writer = TileWriter<kTokens, false>;

  static constexpr int kDataOffset = kStages * kStageDepth * kTokenBytes;
  static constexpr int kScaleOffset = kDataOffset + kSlots * kDataBytes;
  static constexpr int kOutOffset = kScaleOffset + kSlots * kScaleBytes;
  static constexpr int kFullBarriers = kOutOffset + 2 * Writer::kShared;
  static constexpr int kEmptyBarriers = kFullBarriers + 8 * kStages, kSlotBarriers = kEmptyBarriers + 8 * kStages;
  using Ring = TileRing<kStages * kHalfDepth / 4>;  // a work tile has one slot at least
  using Tiles = DenseTiles<FusedArgs, kTokens>;
  static constexpr int kTileRingOffset = kSlotBarriers + 8 * kSlots;
  static constexpr int kShared = kTileRingOffset + Ring::kShared + 1024;  // to align the start
  static_assert(kProducerRegisters + 2 * kTeams * kConsumerRegisters <= (1 + 2 * kTeams) * kLaunchRegisters);
  static_assert(kStages * kStageDepth <= 4 * kSlots - 3 || kStageDepth == 4, "a slot is read before it is refilled");
  static_assert(kStages % (4 / kStageDepth) == 0 && kShared <= 232448);
};

// ---------------------------------------------------------------- dense GEMMs, unlike those of sm90/grouped.cuh
__device__ __forceinline__ void wait_for_tile_list(const FusedArgs&) {}
__device__ __forceinline__ void wait_for_counter(const FusedArgs&) { wait_for_previous_kernel(); }  // which clears it
__device__ __forceinline__ void wait_for_overlapped_kernel(const FusedArgs&) {}
// Returns the first row of a, of all matrices, that this CTA loads.
__device__ __forceinline__ int row_of_a(const FusedArgs& a, const WorkTile& tile, int rows_per_cta) {
  return tile.matrix * a.tokens + tile.token + cluster_rank() * rows_per_cta;
}
template <class C>
__device__ __forceinline__ int row_of_b(const typename C::Args& a, const WorkTile& tile) {
  return tile.matrix * a.columns + tile.column + cluster_rank() * C::kRows;
}
template <class C>
__device__ __forceinline__ bool is_half_tile(const WorkTile& tile) {
  return C::kHalfTiles && tile.token_end - tile.token <= C::kTokens / 2;
}

// ---------------------------------------------------------------- producer thread
// Loads the slot of b from window w on.
template <class C>
__device__ __forceinline__ void load_slot(const FusedMaps& maps, uint32_t smem, int slot, int b_row, int w) {
  const uint32_t barrier = smem + C::kSlotBarriers + 8 * slot;
  barrier_expect(barrier, C::kDataBytes + C::kScaleBytes);
  load_box(smem + C::kDataOffset + slot * C::kDataBytes, maps.data, barrier, w * 32, b_row);
  load_box(smem + C::kScaleOffset + slot * C::kScaleBytes, maps.scale, barrier, w * 4, b_row);
}
// Loads the first slot of each team before the CTAs of the cluster know of each other. Returns the number of slots.
template <class C>
__device__ __forceinline__ int prefetch_slots(const typename C::Args& a, const typename C::Maps& maps, uint32_t smem) {
  if (C::kTeams == 1 || C::kGrouped) return 0;
  const WorkTile tile = typename C::Tiles{a}[blockIdx.x / 2];
  const int count = min(C::kTeams, tile.k_end - tile.k_begin), b_row = row_of_b<C>(a, tile);
  for (int i = 0; i < count; ++i) load_slot<C>(maps, smem, i, b_row, (tile.k_begin + i) * 4);
  return count;
}
template <class C>
__device__ __forceinline__ void produce_tiles(const typename C::Args& a, const typename C::Maps& maps, uint32_t smem,
                                              int prefetched_slots) {
  const int rank = cluster_rank();
  constexpr int kRowsPerCta = C::kTokens / 2;
  int stage = 0, phase = 0, slot = 0;
  bool first_load = !C::kGrouped;
  const typename C::Tiles tiles{a};
  TileScheduler<C, true> scheduler(tiles, smem);
  for (int i = scheduler.first(); i < tiles.end(); i = scheduler.next()) {
    const WorkTile tile = tiles[i];
    const int b_row = row_of_b<C>(a, tile);
    const bool half = is_half_tile<C>(tile);
    const int rows = half ? kRowsPerCta / 2 : kRowsPerCta, a_row = row_of_a(a, tile, rows);
    for (int w = tile.k_begin * 4; w < tile.k_end * 4; w += C::kHalfTiles && half ? C::kHalfDepth : C::kStageDepth) {
      barrier_wait(smem + C::kEmptyBarriers + 8 * stage, phase ^ 1);
      const uint32_t full = smem + C::kFullBarriers + 8 * stage;
      if (w % 4 == 0) {
        if (prefetched_slots > 0)
          --prefetched_slots;
        else
          load_slot<C>(maps, smem, slot, b_row, w);
        if (++slot == C::kSlots) slot = 0;
      }
      if (first_load) wait_for_previous_kernel(), first_load = false;  // it writes a
      if constexpr (C::kHalfTiles) {
        const int depth = half ? C::kHalfDepth : C::kStageDepth, bytes = half ? C::kTokenBytes / 2 : C::kTokenBytes;
        const uint32_t dst = smem + stage * C::kStageDepth * C::kTokenBytes + rank * rows * 128;
        barrier_expect(full, depth * bytes);
        for (int q = 0; q < depth; ++q)
          load_box_to(3, dst + q * bytes, half ? maps.half_a : maps.a, full, (w + q) * 64, a_row);
      } else {
        barrier_expect(full, C::kStageDepth * C::kTokenBytes);
#pragma unroll
        for (int q = 0; q < C::kStageDepth; ++q)
          load_box_to(3, smem + (stage * C::kStageDepth + q) * C::kTokenBytes + rank * kRowsPerCta * 128, maps.a, full,
                      (w + q) * 64, a_row);
      }
      if (++stage == C::kStages) stage = 0, phase ^= 1;
    }
  }
  // Waits until the other CTA has read what this one has multicast to it.
  for (int i = 0; i < C::kStages; ++i) {
    barrier_wait(smem + C::kEmptyBarriers + 8 * stage, phase ^ 1);
    if (++stage == C::kStages) stage = 0, phase ^= 1;
  }
}

// ---------------------------------------------------------------- codes to fragments
// Codes and scales of a thread for one window, of rows r and r + 8. Lane t of four has the t-th 16 along K.
template <class T>
struct RawWindow {
  uint32_t codes[4], scales;

  // Loads window `quarter` of a slot, given the addresses of this thread's row and t there.
  __device__ __forceinline__ void load(uint32_t data, uint32_t scale, int quarter) {
    const uint32_t address = data ^ quarter * 32;  // the 128-byte swizzle permutes 16-byte words
    const uint2 low = load_shared64(address), high = load_shared64(address + 8 * 128);  // the same pattern 8 rows down
    codes[0] = low.x, codes[1] = low.y, codes[2] = high.x, codes[3] = high.y;
    scales = load_shared8(scale + quarter * 4) | load_shared8(scale + quarter * 4 + 8 * 16) << 8;
  }
  // Decodes to the fragments of four k16 steps.
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

// ---------------------------------------------------------------- consumer warpgroup
// Computes tiles of kTokens: all of C::kTokens, or half of them. Half tiles are an object of their own, with stages of
// another depth, which goes on with the rings where the whole tiles have left them.
template <class C, int kTokens = C::kTokens>
struct FusedConsumer {
  static constexpr bool kHalf = kTokens != C::kTokens, kPingPong = C::kPingPong && !kHalf;
  static constexpr int kDepth = kHalf ? C::kHalfDepth : C::kStageDepth;  // windows of a stage
  static constexpr int kStagesPerSlot = 4 / kDepth, kSlotsPerRing = C::kStages / kStagesPerSlot;
  using Sums = float[kTokens / 2];
  using Fragments = uint32_t[16];

  const typename C::Args& a;
  uint32_t smem;
  int rank, team, wg;       // wg: in its team. Both by a shuffle, so that they are in uniform registers
  uint32_t data, scale;     // addresses of this thread's codes and scales in slot 0
  uint32_t num_slots = 0;   // slots of all previous work tiles, which is the ring counter of b
  uint32_t first_slot = 0;  // the slot from which on stages of kDepth are counted; each before it was a whole ring

  __device__ __forceinline__ FusedConsumer(const typename C::Args& args, uint32_t shared)
      : a(args), smem(shared), rank(cluster_rank()) {
    const int consumer_wg = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);
    team = consumer_wg / 2, wg = consumer_wg % 2;
    const int row = wg * 64 + fragment_row(), t = threadIdx.x % 4;
    data = smem + C::kDataOffset + row * 128 + (t / 2 ^ row % 8) * 16 + t % 2 * 8;
    scale = smem + C::kScaleOffset + row * 16 + t;
  }
  __device__ __forceinline__ explicit FusedConsumer(const FusedConsumer<C, 2 * kTokens>& whole)
      : a(whole.a),
        smem(whole.smem),
        rank(whole.rank),
        team(whole.team),
        wg(whole.wg),
        data(whole.data),
        scale(whole.scale),
        num_slots(whole.num_slots),
        first_slot(kDepth == C::kStageDepth ? 0 : whole.num_slots) {}

  // ---- mainloop
  // Returns whether window q of a slot is a ping-pong turn, in a tile of several slots. Others run on the tensor cores
  // as they come: warpgroup 1 has three windows left when 0 has none, which run while 0 writes its result, and both
  // begin the next tile at once. Both have the same number of turns, or the barriers would not pair.
  __device__ __forceinline__ bool is_turn(int q, bool first_slot_of_tile, bool last_slot_of_tile) const {
    if (first_slot_of_tile) return q >= 2;
    return !last_slot_of_tile || q == 0 || q == (wg == 0 ? 3 : 1);
  }
  // Stage and phase of window q of slot n.
  __device__ __forceinline__ int stage_of(uint32_t n, int q) const {
    return (n - first_slot) % kSlotsPerRing * kStagesPerSlot + q / kDepth;
  }
  __device__ __forceinline__ int phase_of(uint32_t n) const {
    return (first_slot + (n - first_slot) / kSlotsPerRing) & 1;
  }
  __device__ __forceinline__ void wait_for_slot(uint32_t n) {
    barrier_wait(smem + C::kSlotBarriers + 8 * (n % C::kSlots), n / C::kSlots & 1);
  }
  __device__ __forceinline__ void load(RawWindow<typename C::T>& r, uint32_t n, int q) {
    const uint32_t slot = n % C::kSlots;
    r.load(data + slot * C::kDataBytes, scale + slot * C::kScaleBytes, q);
  }
  __device__ __forceinline__ void multiply(Sums& sums, const Fragments& f, uint32_t n, int q, bool first, bool turn) {
    const int stage = stage_of(n, q);
    if (q % kDepth == 0) barrier_wait(smem + C::kFullBarriers + 8 * stage, phase_of(n));
    if (kPingPong && turn) wait_turn(wg);
    wgmma_fence();
    const uint64_t tokens =
        shared_matrix(smem + stage * C::kStageDepth * C::kTokenBytes + q % kDepth * (kTokens * 128));
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma<typename C::T>(sums, f + 4 * j, tokens + 2 * j, !first || j > 0);
    wgmma_commit();
    if (kPingPong && turn) pass_turn(wg);
  }
  // Releases the stage of window q of slot n, in both CTAs that load for it, if the window is the last of the stage.
  __device__ __forceinline__ void release(uint32_t n, int q) {
    if (q % kDepth == kDepth - 1) barrier_arrive_in_both(smem + C::kEmptyBarriers + 8 * stage_of(n, q));
  }

  // Sums along K: a window is multiplied while the next one is decoded. Calls `before_end` while the last one runs.
  template <class F>
  __device__ __forceinline__ void sum(Sums& sums, int slots, const F& before_end) {
    Fragments f[2];
    RawWindow<typename C::T> r;
    const bool staggered = C::kPingPong && slots > 1;
    uint32_t n = num_slots + team;
    num_slots += slots;
    if constexpr (C::kTeams == 2) {
#pragma unroll
      for (float& s : sums) s = 0;
      if (n >= num_slots) return before_end();  // K has one slot, which is the other team's
    }
    wait_for_slot(n);
    load(r, n, 0);
    r.decode(f[0]);
    for (bool first = true; n < num_slots; first = false, n += C::kTeams) {
      const bool last = n + C::kTeams >= num_slots;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        multiply(sums, f[q % 2], n, q, first && q == 0, !staggered || is_turn(q, first, last));
        if (q < 3) {
          load(r, n, q + 1);
        } else if (!last) {
          wait_for_slot(n + C::kTeams);
          load(r, n + C::kTeams, 0);
        }
        wgmma_wait<1>();  // the previous window has run: its stage and fragments are free
        if (q > 0)
          release(n, q - 1);
        else if (!first)
          release(n - C::kTeams, 3);
        if (q < 3 || !last) r.decode(f[(q + 1) % 2]);
      }
    }
    before_end();
    wgmma_wait<0>();
    release(n - C::kTeams, 3);
  }

  // ---- epilogue
  // Named barriers 1 and 2, 8 and 9: a warpgroup of team 0 or 1. 6 and 7: the two warpgroups with the same rows.
  __device__ __forceinline__ int own_barrier() const { return team == 0 ? 1 + wg : 8 + wg; }
  __device__ __forceinline__ void meet_other_team() const {
    if constexpr (C::kTeams == 2) named_meet(6 + wg, 256);
  }
  // Slot of this warpgroup in the split-K scratch, whose slots have room for whole tiles.
  __device__ __forceinline__ int64_t split_slot(const WorkTile& tile, int split) const {
    const int64_t splits = int64_t{tile.split_tile} * (tile.num_splits - 1) + split;
    return ((splits * 2 + rank) * 2 * C::kTeams + team * 2 + wg) * (C::kTokens / kTokens);
  }
  __device__ __forceinline__ SplitSums<kTokens / 2> split_sums() const {
    return {a.split_sums, a.split_flags, own_barrier()};
  }
  // Address of the staging buffer that the warpgroups of both teams with the same rows share.
  __device__ __forceinline__ uint32_t out() const { return smem + C::kOutOffset + wg * C::Writer::kShared; }
  // Calls f with the writer of the tile's result.
  template <class F>
  __device__ __forceinline__ void with_writer(const WorkTile& tile, const F& f) const {
    const int column = tile.column + rank * C::kRows + wg * 64;
    if constexpr (C::kGrouped) {
      f(typename C::template Result<kTokens>{a, tile.matrix, tile.token, tile.token_end, column, out(), 1 + wg});
    } else {
      if constexpr (C::kCanSwap)
        if (a.swapped) return f(typename C::template Result<true>{a, tile.matrix, tile.token, column, out(), 1 + wg});
      f(typename C::template Result<false>{a, tile.matrix, tile.token, column, out(), 1 + wg});
    }
  }
  __device__ __forceinline__ void load_factors(const WorkTile& tile, ResultFactors& factors) const {
    with_writer(tile, [&](const auto& writer) { writer.load(factors); });
  }
  // Adds the sums of team 1 to those of team 0, through shared memory in the order in which threads have them.
  __device__ __forceinline__ void add_other_team(Sums& sums) const {
    constexpr int kChunk = C::Writer::kBuffer / 512;
    const uint32_t address = out() + threadIdx.x % 128 * 16;
#pragma unroll
    for (int first = 0; first < kTokens / 2; first += kChunk) {
      meet_other_team();  // the previous chunk has been read
#pragma unroll
      for (int i = first; team == 1 && i < first + kChunk; i += 4)
        store_shared128(address + (i - first) * 512, {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]});
      meet_other_team();
#pragma unroll
      for (int i = first; team == 0 && i < first + kChunk; i += 4) {
        const uint4 other = load_shared128(address + (i - first) * 512);
        sums[i] = __fadd_rn(sums[i], float_of(other.x)), sums[i + 1] = __fadd_rn(sums[i + 1], float_of(other.y));
        sums[i + 2] = __fadd_rn(sums[i + 2], float_of(other.z)),
                 sums[i + 3] = __fadd_rn(sums[i + 3], float_of(other.w));
      }
    }
    if (team == 1) return;
    named_sync(own_barrier(), 128);  // all of them have been read
  }
  __device__ __forceinline__ void finish(Sums& sums, const WorkTile& tile, ResultFactors& factors) {
    if (tile.split_tile >= 0) {
      wait_for_previous_kernel();  // it has lowered the flags
      if (tile.split < tile.num_splits - 1) {
        meet_other_team();  // so that neither is ahead by a whole ring, whose phases it could not tell apart
        return split_sums().store(sums, split_slot(tile, tile.split));
      }
      split_sums().add(sums, tile.split, [&](int split) { return split_slot(tile, split); });
    }
    if constexpr (C::kTeams == 2) {
      add_other_team(sums);
      if (team == 1) return;
      load_factors(tile, factors);
    }
    with_writer(tile, [&](const auto& writer) { writer.write(sums, factors); });
    __syncwarp();  // instructions for whole warps follow
  }

  __device__ __forceinline__ void compute(int i, WorkTile tile) {
    Sums sums;
    ResultFactors factors;
    // The tile is looked up again where there may be no registers to keep it.
    sum(sums, tile.k_end - tile.k_begin, [&] {
      if constexpr (C::kHalfTiles) tile = typename C::Tiles{a}[pin_register(i)];
      if constexpr (C::kTeams == 1) load_factors(tile, factors);
    });
    if constexpr (C::kTeams == 2) tile = typename C::Tiles{a}[pin_register(i)];
    finish(sums, tile, factors);
  }
};

// Computes all work tiles of the cluster: whole ones, then half ones.
template <class C>
__device__ __forceinline__ void consume_tiles(const typename C::Args& a, uint32_t smem) {
  FusedConsumer<C> whole(a, smem);
  if (C::kPingPong && whole.wg == 1) pass_turn(1);  // the first turn is that of warpgroup 0
  const typename C::Tiles tiles{a};
  TileScheduler<C, false> scheduler(tiles, smem);
  int i = scheduler.first();
  for (; i < tiles.end(); i = scheduler.next()) {
    const WorkTile tile = tiles[i];
    if (is_half_tile<C>(tile)) break;  // and so are all that follow
    whole.compute(i, tile);
  }
  if constexpr (C::kHalfTiles) {
    FusedConsumer<C, C::kTokens / 2> half(whole);
    for (; i < tiles.end(); i = scheduler.next()) half.compute(i, tiles[i]);
  }
  if (C::kPingPong && whole.wg == 0) wait_turn(0);  // no barrier is left half full
  if constexpr (C::kGrouped) clear_other_rows(a, C::kThreads - 128);
}

// ---------------------------------------------------------------- kernel
// One CTA of a cluster in time order; "both" are the CTAs of the cluster, in [] what some configurations have.
//
//   set-up      init barriers, prefetch tensor maps [two teams: TMA of each team's first slot]; cluster barrier
//               [grouped: wait for the tile list, which the previous kernel makes]
//   producer    warpgroup 0, thread 0, after giving up registers and launching dependents:
//     per work tile, per stage along K:
//       wait empty[stage]                                      by the consumers of both
//       each 256 of K: TMA codes and scales of 128 rows of b -> slot, signals slot barrier
//       before the first stage: wait for the previous kernel, which writes a
//       TMA half of the tokens -> stage, multicast to both, signals full[stage]
//     drain: wait until every stage is empty
//   scheduler   warpgroup 0, thread 32 of CTA 0: serve requests for the next work tile
//   consumer    warpgroups 1, 2 [3, 4]: 64 rows of b each, after taking registers:
//     per work tile [whole tiles, then half tiles]:
//       wait slot; decode window 0
//       per window w, 64 along K [two teams: of every other slot]:
//         wait full[stage] [ping-pong: wait turn]; 4 wgmmas of window w, asynchronous [pass turn]
//         wait for the wgmmas of w - 1, arrive at empty[its stage] of both; decode window w + 1
//       epilogue, after the last wgmmas:
//         [split-K: every split but the last stores its sums and a flag, and is done; the last adds them in order]
//         [two teams: team 1 stages its sums, team 0 adds them and goes on alone]
//         times alpha and 2^k, plus bias, cast; staged in shared memory; written by rows
//   tear-down   [ping-pong: warpgroup 0 takes the turn that is left] [grouped: zero the rows of no group]
//               cluster barrier, since the other CTA may still write here
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sm90_fused_kernel(const __grid_constant__ typename C::Args a, const __grid_constant__ typename C::Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t any_shared[];
  const uint32_t smem = (shared_address(any_shared) + 1023) & ~1023u;  // the same in both CTAs of a cluster
  int prefetched_slots = 0;
  if (threadIdx.x == 0) {
    init_stage_barriers<C>(smem);
    for (int i = 0; i < C::kSlots; ++i) barrier_init(smem + C::kSlotBarriers + 8 * i, 1);
    typename C::Ring{smem + C::kTileRingOffset}.init_barriers();
    fence_barrier_init();
    prefetch_map(maps.data), prefetch_map(maps.scale), prefetch_map(maps.a);
    if constexpr (C::kHalfTiles) prefetch_map(maps.half_a);
    prefetched_slots = prefetch_slots<C>(a, maps, smem);
  }
  __syncwarp();  // instructions for whole warps follow
  cluster_meet();
  if (threadIdx.x < 128) {
    wait_for_tile_list(a);
    launch_dependents();  // the next kernel waits for the end of this one
    give_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) produce_tiles<C>(a, maps, smem, prefetched_slots);
    if (threadIdx.x == 32 && cluster_rank() == 0) {
      wait_for_counter(a);
      const typename C::Tiles tiles{a};
      TileScheduler<C, false>(tiles, smem).serve();
    }
    __syncwarp();
  } else {
    take_registers<C::kConsumerRegisters>();
    wait_for_tile_list(a);
    consume_tiles<C>(a, smem);
  }
  cluster_sync();
  wait_for_overlapped_kernel(a);
#else
  __trap();  // compiled for another architecture
#endif
}

// ---------------------------------------------------------------- launch
template <class C>
cudaError_t launch_fused_config(const FusedArgs& args, const FusedMaps& maps, cudaStream_t stream) {
  const int clusters = clusters_of(args.num_work_tiles, args.num_unsplit, args.num_splits);
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
