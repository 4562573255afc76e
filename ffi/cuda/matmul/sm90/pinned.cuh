// out = a b^T on Hopper in the pinned order of docs/numerics.md: the same bits as the CPU, for any number of rows.
//
// "Pinned": the order of sums is fixed, so that results are the same bitwise. A and B of wgmma are swapped, and CTAs
// are persistent, warp-specialized and in clusters of two, as in the fused kernels. But each block of 16 along K has a
// wgmma of its own, which does not add to another (scale-d is 0). float16 numbers are q s 2^-14, exact; those of b that
// are decoded in registers are q 2^-14, without the scale. All products of a block are multiples of one unit, 2^-20 of
// the largest exponent or more, and wgmma keeps 24 bits below that, so its sums D are exact in any order inside. Then
// y = D + y, or fma(D, s_b, y), is the one rounding of the rule, with everything times 2^-28. s_a s_b dot16 has at most
// 20 bits, and no end of float32 is near. Zeros beyond the end of K change nothing, since y is never -0.
//
// BlockConsumer: while the tensor cores run one wgmma, the sums of the previous one are added to y. The kernel is
// limited by issue: an instruction for each output and block. One that reads three registers takes 1.5 clocks; those of
// one row come first, then those of the other, so that s_b stays in the operand cache. ptxas keeps this order because
// the instructions are volatile, and the sets of D because their registers are operands of the waits; no wgmma runs
// from one iteration of the loop to the next, where ptxas would put waits between all of them.
//
// WindowConsumer: operands with windows have a second sum, of a window. For normal data it is exact in any order
// (window_sums.h), so wgmma adds up its four blocks too, and what is left is an alpha per output and window.
#pragma once

#include "../../../core/numerics_fast.h"
#include "grouped.cuh"
#include "pinned.h"

namespace jnvfp4 {

template <int kTokens_, Pinned kPinned, bool kGrouped_ = false>
struct PinnedConfig {
  // Whether b is decoded to float16 in scratch, with its scales, and whether operands have an amax per window.
  static constexpr bool kNumbers = kPinned != Pinned::kCodes, kWindows = kPinned == Pinned::kWindows;
  static constexpr bool kGrouped = kGrouped_;
  using Args = std::conditional_t<kGrouped, GroupedFusedArgs, PinnedArgs>;
  using Tiles = std::conditional_t<kGrouped, ListedTiles<kTokens_>, DenseTiles<PinnedArgs, kTokens_>>;
  static constexpr int kTokens = kTokens_, kRows = 128, kThreads = 128 * 3, kSums = kTokens / 2;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;                           // of 168 at launch
  static constexpr int kWgmmaTokens = kTokens == 128 ? 128 : 64, kWgmmas = kTokens / kWgmmaTokens;  // of a block

  // A stage has a window (64 along K) of tokens and of rows of b; a slot has scales of the four windows of one
  // iteration of the loop. So stages are compile-time constants, and the iteration's index gives phases and slots.
  static constexpr int kStages = 4, kSlots = 2;
  static constexpr int kTokenBytes = kTokens * 128, kLeftPitch = kNumbers ? 128 : 32, kLeftBytes = kRows * kLeftPitch;
  static constexpr int kAmaxes = kPinnedAmaxes * 4, kAmaxBytes = kWindows ? 2 * kAmaxes : 0;  // of tokens, then of rows
  static constexpr int kScaleBytes = kNumbers ? 0 : kRows * 16;
  static constexpr int kBuffer = 8192;
  using Result = FusedResult<kTokens, false, true, kGrouped, kBuffer>;
  using Writer = typename Result::Writer;

  static constexpr int kLeftOffset = kStages * kTokenBytes, kScaleOffset = kLeftOffset + kStages * kLeftBytes;
  static constexpr int kAmaxOffset = kScaleOffset + kSlots * kScaleBytes;
  static constexpr int kOutOffset = kAmaxOffset + kStages * kAmaxBytes;
  static constexpr int kFullBarriers = kOutOffset + 2 * Writer::kShared, kEmptyBarriers = kFullBarriers + 8 * kStages;
  static constexpr int kTileRingOffset = kEmptyBarriers + 8 * kStages;
  using Ring = TileRing<kStages>;
  static constexpr int kShared = kTileRingOffset + Ring::kShared + 1024;  // to align the start
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * (65536 / kThreads / 8 * 8));
  static_assert(kShared <= 232448);
};

// ---------------------------------------------------------------- producer thread
template <class C>
__device__ __forceinline__ void produce_windows(const typename C::Args& a, const FusedMaps& maps, uint32_t smem) {
  constexpr int kRowsPerCta = C::kTokens / 2;
  const int rank = cluster_rank();
  uint32_t turn = 0;
  const typename C::Tiles tiles{a};
  TileScheduler<C, true> scheduler(tiles, smem);
  for (int i = scheduler.first(); i < tiles.end(); i = scheduler.next()) {
    const WorkTile tile = tiles[i];
    const int b_row = row_of_b<C>(a, tile), a_row = row_of_a(a, tile, kRowsPerCta);
    const float *token_amaxes = nullptr, *column_amaxes = nullptr;
    if constexpr (C::kWindows) {
      const int64_t per_tile = 4 * int64_t{a.k_steps} * kPinnedAmaxes, token_tiles = a.matrix_tiles / a.column_tiles;
      token_amaxes = a.token_amaxes + (tile.matrix * token_tiles + tile.token / C::kTokens) * per_tile;
      column_amaxes =
          a.column_amaxes + (int64_t{tile.matrix} * a.column_tiles * 2 + tile.column / C::kRows + rank) * per_tile;
    }
    for (int step = 0; step < tile.k_end; ++step, ++turn) {
#pragma unroll
      for (int stage = 0; stage < C::kStages; ++stage) {
        const int w = 4 * step + stage;
        const uint32_t full = smem + C::kFullBarriers + 8 * stage;
        barrier_wait(smem + C::kEmptyBarriers + 8 * stage, ~turn & 1);
        barrier_expect(full, C::kTokenBytes + C::kLeftBytes + C::kAmaxBytes + (stage == 0 ? C::kScaleBytes : 0));
        if (stage == 0 && !C::kNumbers)
          load_box(smem + C::kScaleOffset + (turn & 1) * C::kScaleBytes, maps.scale, full, w * 4, b_row);
        load_box(smem + C::kLeftOffset + stage * C::kLeftBytes, maps.data, full, w * (C::kNumbers ? 64 : 32), b_row);
        load_box_to(3, smem + stage * C::kTokenBytes + rank * kRowsPerCta * 128, maps.a, full, w * 64, a_row);
        if constexpr (C::kWindows) {
          const uint32_t dst = smem + C::kAmaxOffset + stage * C::kAmaxBytes;
          load_bytes(dst, token_amaxes + int64_t{w} * kPinnedAmaxes, C::kAmaxes, full);
          load_bytes(dst + C::kAmaxes, column_amaxes + int64_t{w} * kPinnedAmaxes, C::kAmaxes, full);
        }
      }
    }
  }
  // Waits until the other CTA has read what this one has multicast to it.
  for (int stage = 0; stage < C::kStages; ++stage) barrier_wait(smem + C::kEmptyBarriers + 8 * stage, ~turn & 1);
}

// ---------------------------------------------------------------- consumer warpgroups, in common
template <class C>
struct PinnedConsumer {
  const typename C::Args& a;
  uint32_t smem;
  uint32_t turn = 0;  // iterations of the loop, of all previous tiles

  __device__ __forceinline__ PinnedConsumer(const typename C::Args& args, uint32_t shared) : a(args), smem(shared) {}

  // Index of the consumer warpgroup, read again each time, as there are no registers to keep it.
  static __device__ __forceinline__ int wg() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread / 128 - 1;
  }
  __device__ __forceinline__ void wait_for(int stage, uint32_t turn_idx) const {
    barrier_wait(smem + C::kFullBarriers + 8 * stage, turn_idx & 1);
  }
  // Releases a stage that every lane has read, in both CTAs that load for it.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    barrier_arrive_in_both(smem + C::kEmptyBarriers + 8 * stage);
  }
  template <int kCount>
  static __device__ __forceinline__ void add(float (&sums)[kCount], const float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(sums[i]) : "f"(d[i]));
    make_here(sums);
  }
  // Writes a tile; sums of windows have had their alphas.
  __device__ __forceinline__ void finish(float (&sums)[C::kSums], const WorkTile& tile) const {
    const int wg_idx = __shfl_sync(~0u, wg(), 0), column = tile.column + cluster_rank() * C::kRows + wg_idx * 64;
    const uint32_t out = smem + C::kOutOffset + wg_idx * C::Writer::kShared;
    if constexpr (C::kWindows) {
      const typename C::Writer writer{a.g.result, a.tokens, a.columns, tile.matrix,
                                      tile.token, column,   out,       1 + wg_idx};
      float biases[2];
      writer.load_biases(biases);
      writer.add_biases(sums, biases);
      writer.write(sums);
    } else {
      const auto write = [&](const auto& result) {
        ResultFactors factors;
        result.load(factors);
        result.write(sums, factors);
      };
      if constexpr (C::kGrouped)
        write(typename C::Result{a, tile.matrix, tile.token, tile.token_end, column, out, 1 + wg_idx});
      else
        write(typename C::Result{a, tile.matrix, tile.token, column, out, 1 + wg_idx});
    }
    __syncwarp();  // instructions for whole warps follow
  }
};

// ---------------------------------------------------------------- consumer warpgroup: block by block
template <class C>
struct BlockConsumer : PinnedConsumer<C> {
  static constexpr int kSums = C::kWgmmaTokens / 2;  // of a thread in a wgmma
  using Part = float[kSums];
  using Sums = float[C::kWgmmas][kSums];
  using Fragment = uint32_t[4];
  using Scales = float[2][4];  // of rows r and r + 8, four blocks
  using Base = PinnedConsumer<C>;
  using Base::a, Base::smem, Base::turn, Base::wait_for, Base::release, Base::add;

  uint32_t left, scale;  // addresses of its rows in stage and slot 0

  __device__ __forceinline__ BlockConsumer(const typename C::Args& args, uint32_t shared) : Base(args, shared) {
    const int row = Base::wg() * 64 + fragment_row(), lane = threadIdx.x % 32;
    scale = smem + C::kScaleOffset + row * 16;
    left =
        smem + C::kLeftOffset +
        (C::kNumbers ? (row - lane / 4 + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16 : row * 32 + lane % 4 / 2 * 4);
  }

  // Loads the fragment of a block. Lane t of four has its t-th quarter, as sm90/prepare.cu has ordered the tokens.
  __device__ __forceinline__ void load_left(Fragment& to, int stage, int block) const {
    const uint32_t address = left + stage * C::kLeftBytes;
    if constexpr (C::kNumbers) {
      load_matrices(to, address ^ block * 32);
    } else {
      uint32_t pair[4];
      halves_of_codes(__byte_perm(load_shared32(address + block * 8), load_shared32(address + block * 8 + 8 * 32),
                                  threadIdx.x % 2 ? 0x7362u : 0x5140u),
                      pair);
      to[0] = pair[0], to[1] = pair[2], to[2] = pair[1], to[3] = pair[3];
    }
  }
  __device__ __forceinline__ void load_scales(Scales& to, uint32_t turn_idx, int stage) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t four = load_shared32(scale + (turn_idx & 1) * C::kScaleBytes + r * 8 * 16 + stage * 4);
      uint32_t low, high;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(low) : "h"(static_cast<uint16_t>(four)));
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(high) : "h"(static_cast<uint16_t>(four >> 16)));
      const float2 x = __half22float2(reinterpret_cast<const __half2&>(low));
      const float2 y = __half22float2(reinterpret_cast<const __half2&>(high));
      to[r][0] = x.x, to[r][1] = x.y, to[r][2] = y.x, to[r][3] = y.y;
    }
  }
  __device__ __forceinline__ void multiply(Part& d, const Fragment& f, int stage, int block, int wgmma_idx) const {
    wgmma_fence();
    wgmma<F16>(d, f,
               shared_matrix(smem + stage * C::kTokenBytes) + block * 2 + wgmma_idx * (C::kWgmmaTokens * 128 / 16), 0);
    wgmma_commit();
  }
  // Adds d times a scale per row: all of one row, then all of the other.
  static __device__ __forceinline__ void add(Part& sums, const Part& d, float low, float high) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 2 * h; i < kSums; i += 4)
#pragma unroll
        for (int e = i; e < i + 2; ++e)
          asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(sums[e]) : "f"(d[e]), "f"(h ? high : low));
    make_here(sums);
  }

  __device__ __forceinline__ void sum(Sums& y) {
    constexpr int kPerWindow = 4 * C::kWgmmas, kPerTurn = kPerWindow * C::kStages;  // wgmmas
    float d[2][kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      d[0][i] = d[1][i] = 0;
#pragma unroll
      for (int p = 0; p < C::kWgmmas; ++p) y[p][i] = 0;
    }
    Fragment fragments[2];
    Scales scales[2];  // of the window and of the next one
    const auto load = [&](uint32_t turn_idx, int window, bool exists = true) {
      if (exists) wait_for(window, turn_idx);
      load_left(fragments[0], window, 0);
      if constexpr (!C::kNumbers) load_scales(scales[window % 2], turn_idx, window);
    };
    // Adds the sums of wgmma q of the iteration.
    const auto add_wgmma = [&](int q) {
      const int block = q % kPerWindow / C::kWgmmas;
      const Scales& s = scales[q / kPerWindow % 2];
      if constexpr (C::kNumbers)
        add(y[q % C::kWgmmas], d[q % 2]);
      else
        add(y[q % C::kWgmmas], d[q % 2], s[0][block], s[1][block]);
    };
    load(turn, 0);
    int turns = a.k_steps;
#pragma unroll 1
    do {
#pragma unroll
      for (int q = 0; q < kPerTurn; ++q) {
        const int window = q / kPerWindow, block = q % kPerWindow / C::kWgmmas, wgmma_idx = q % C::kWgmmas;
        multiply(d[q % 2], fragments[block % 2], window, block, wgmma_idx);
        if (q > 0) wgmma_wait_for<1>(d[(q + 1) % 2]);
        if (q % kPerWindow == 0 && window > 0) release(window - 1);
        if (wgmma_idx == 0 && block < 3) load_left(fragments[(block + 1) % 2], window, block + 1);
        if (wgmma_idx == 0 && block == 3) {
          if (window < C::kStages - 1)
            load(turn, window + 1);
          else
            load(turn + 1, 0, turns > 1);
        }
        if (q > 0) add_wgmma(q - 1);
      }
      wgmma_wait_for<0>(d[(kPerTurn - 1) % 2]);
      add_wgmma(kPerTurn - 1);
      release(C::kStages - 1);
      ++turn;
    } while (--turns > 0);
  }
};

// ---------------------------------------------------------------- consumer warpgroup: window by window
template <class C>
struct WindowConsumer : PinnedConsumer<C> {
  using Sums = float[C::kSums];
  using Base = PinnedConsumer<C>;
  using Base::a, Base::smem, Base::turn, Base::wait_for, Base::release, Base::add, Base::Base;

  // Adds a window: y = fl(y + fl(alpha * window)), alpha = fl(fl(amax_a amax_b) / divisor). Where nothing is subnormal,
  // two products with a large and a small piece of a reciprocal, times 2^28, make the quotient; else one product in
  // float64 does (numerics_fast.h). Where products of amaxes are exact, the reciprocal is one per row.
  __device__ __forceinline__ void add_window(Sums& y, const Sums& window, const float (&rows)[2],
                                             uint32_t tokens_address, uint32_t kinds) const {
    const auto fma = [](float x, float y, float z) { return __fmaf_rn(x, y, z); };
    const auto each = [&](const auto& term) {
#pragma unroll
      for (int e = 0; e < C::kSums; e += 8) {
        const uint4 four = load_shared128(tokens_address + e * 8);
        const float tokens[4] = {float_of(four.x), float_of(four.y), float_of(four.z), float_of(four.w)};
#pragma unroll
        for (int i = 0; i < 8; ++i)
          y[e + i] = add_rn(y[e + i], term(tokens[i / 4 * 2 + i % 2], i / 2 % 2, window[e + i]));
      }
    };
    if (kinds & kOddAmax) {
      each([&](float token, int r, float sum) {
        return mul_rn(div_by_float64(mul_rn(token, rows[r]), a.reciprocal64), mul_rn(sum, 0x1p28f));
      });
    } else if (kinds & kLongAmax) {
      each([&](float token, int r, float sum) {
        return mul_rn(div_by_pieces(mul_rn(token, rows[r]), a.reciprocal, a.reciprocal_rest, fma), sum);
      });
    } else {
      const AlphasOfRow alphas[2] = {{rows[0], a.reciprocal, a.reciprocal_rest, fma},
                                     {rows[1], a.reciprocal, a.reciprocal_rest, fma}};
      each([&](float token, int r, float sum) { return mul_rn(alphas[r](token, fma), sum); });
    }
  }
  // Sums along K. Where the sums of a window are exact, wgmma makes them; else blocks are added one by one.
  __device__ __forceinline__ void sum(Sums& y) {
    // Shuffles put these into uniform registers; the others stay in registers.
    const int own = __shfl_sync(~0u, Base::wg(), 0), lane = threadIdx.x % 32;
    const uint32_t shared = __shfl_sync(~0u, smem, 0), amaxes = shared + C::kAmaxOffset;
    const uint32_t kinds_address = pin_register(amaxes + C::kRows * 4 + lane / 4 % 2 * C::kAmaxes + lane % 4 * 4);
    const uint32_t tokens_address = pin_register(amaxes + lane % 4 * 16);
    const uint32_t rows_address = pin_register(amaxes + C::kAmaxes + (own * 64 + fragment_row()) * 4);
    const auto load_kinds = [&](int w) {  // of 32 of the tile's rows
      wait_for(w % C::kStages, turn + w / C::kStages);
      return load_shared32(kinds_address + w % C::kStages * C::kAmaxBytes);
    };
    Sums window, d;
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) y[i] = window[i] = d[i] = 0;
    const int windows = C::kStages * a.k_steps;
    uint32_t next_kinds = load_kinds(0);
#pragma unroll 1
    for (int w = 0; w < windows; ++w) {
      const int stage = w % C::kStages, offset = stage * C::kAmaxBytes;
      const auto multiply = [&](Sums& sums, int begin, int end) {
        const uint64_t rows = shared_matrix(shared + C::kLeftOffset + stage * C::kLeftBytes + own * 64 * 128);
        const uint64_t tokens = shared_matrix(shared + stage * C::kTokenBytes);
        wgmma_fence();
#pragma unroll
        for (int block = begin; block < end; ++block)
          wgmma_shared<F16>(sums, rows + 2 * block, tokens + 2 * block, block > begin);
        wgmma_commit();
      };
      const uint32_t kinds = __reduce_or_sync(~0u, next_kinds);
      const bool exact = has_exact_sums(kinds);
      wait_turn(own);
      if (exact)
        multiply(window, 0, 4);
      else
        multiply(window, 0, 1);
      pass_turn(own);
      if (w + 1 < windows) next_kinds = load_kinds(w + 1);
      const float rows[2] = {float_of(load_shared32(rows_address + offset)),
                             float_of(load_shared32(rows_address + offset + 8 * 4))};
      wgmma_wait_for<0>(window);
      if (!exact) {
#pragma unroll
        for (int block = 1; block < 4; ++block) {
          multiply(d, block, block + 1);
          wgmma_wait_for<0>(d), make_here(window);
          add(window, d);
        }
      }
      add_window(y, window, rows, tokens_address + offset, kinds);
      make_here(y);
      release(stage);
    }
    turn += a.k_steps;
  }
};

// ---------------------------------------------------------------- kernel
template <class C>
__device__ __forceinline__ void consume_windows(const typename C::Args& a, uint32_t smem) {
  using Consumer = std::conditional_t<C::kWindows, WindowConsumer<C>, BlockConsumer<C>>;
  Consumer consumer(a, smem);
  if (C::kWindows && consumer.wg() == 1) pass_turn(1);  // the first turn is that of warpgroup 0
  const typename C::Tiles tiles{a};
  TileScheduler<C, false> scheduler(tiles, smem);
  for (int i = scheduler.first(); i < tiles.end(); i = scheduler.next()) {
    typename Consumer::Sums y;
    consumer.sum(y);
    // The tile is looked up again, as there are no registers to keep it.
    consumer.finish(reinterpret_cast<float (&)[C::kSums]>(y), tiles[pin_register(i)]);
  }
  if (C::kWindows && consumer.wg() == 0) wait_turn(0);  // no barrier is left half full
  if constexpr (C::kGrouped) clear_other_rows(a, C::kThreads - 128);
}

// One CTA of a cluster in time order; "both" are the CTAs of the cluster.
//
//   set-up      init barriers, prefetch tensor maps; cluster barrier; wait for the previous kernel
//   producer    warpgroup 0, thread 0: per work tile, per window of 64 along K (a stage each, four per iteration):
//     wait empty[stage]; TMA rows of b, as codes or numbers [windows: amaxes and kinds]; multicast tokens to both
//     every fourth window of codes: TMA the scales of all four -> slot;   all of it signals full[stage]
//   scheduler   warpgroup 0, thread 32 of CTA 0: serve requests for the next work tile
//   consumer    warpgroups 1 and 2, 64 rows of b each; per work tile:
//     BlockConsumer, per wgmma q (4 blocks per window, of 64 or 128 tokens each):
//       start wgmma q -> d[q % 2], without adding to it
//       wait for wgmma q - 1; after a window's last one: arrive at empty[stage] of both
//       load the next block's fragment, or wait full[next stage] and load its first one with scales
//       y += d[(q - 1) % 2], times s_b if b is codes
//     WindowConsumer, per window:
//       wait turn; start 4 wgmmas that add up, or 1 where the sum may not be exact; pass turn
//       wait full[next stage], load its kinds; wait for the wgmmas [not exact: 3 more, each added by rounding]
//       y += alpha * window, alpha from amaxes of row and token; arrive at empty[stage] of both
//     epilogue: times alpha [not with windows], plus bias, cast, staged in shared memory, written by rows
//   tear-down   [windows: warpgroup 0 takes the turn left] [grouped: zero the rows of no group]; cluster barrier
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sm90_pinned_kernel(const __grid_constant__ typename C::Args a, const __grid_constant__ FusedMaps maps) {
  run_warp_specialized<C>(
      a, [&] { prefetch_map(maps.data), prefetch_map(maps.scale), prefetch_map(maps.a); },
      [&](uint32_t smem) { produce_windows<C>(a, maps, smem); }, [&](uint32_t smem) { consume_windows<C>(a, smem); });
}

}  // namespace jnvfp4
