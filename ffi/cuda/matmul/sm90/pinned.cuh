// out = a b^T on Hopper in the pinned order of docs/numerics.md: the same bits as the CPU, for any number of rows.
//
// As in the fused kernels rows of b are the 64 rows of wgmma, from registers, rows of a ("tokens") its columns, two
// CTAs of a cluster share tokens, one thread loads, and two warpgroups compute. But each block of 16 along K has a
// wgmma of its own, which does not add to another (scale-d is 0). float16 numbers are q s 2^-14, exact; those of b that
// are decoded in registers are q 2^-14, without the scale. All products of a block are multiples of one unit, 2^-20 of
// the largest exponent or more, and wgmma keeps 24 bits below that, so its sums D are exact in any order inside. Then
// y = D + y, or fma(D, s_b, y), is the one rounding of the rule, with everything times 2^-28: s_a s_b dot16 has at most
// 20 bits, and no end of float32 is near. Zeros beyond the end of K change nothing, since y is never -0.
//
// A part of a tile is what one wgmma has. While the tensor cores compute a part, the one before is added to y. What
// limits the kernel is issue: an instruction for each output and block. One that reads three registers takes 1.5
// clocks; of a part all of one row come first, then all of the other, so that s_b stays in the operand cache. ptxas
// keeps this order since the instructions are volatile, the sets of D since their registers are operands of the waits,
// and no wgmma runs from one turn of the loop to the next, where it would put waits between all of them.
//
// Operands with windows have a second sum, of a window. Of normal data it is exact in any order, as window_sums.h
// explains, so that wgmma may add up its four blocks too, and what is left for other instructions is an alpha for each
// output and window. The two warpgroups take turns, as in windows.cu.
#pragma once

#include "../../../core/numerics_fast.h"
#include "grouped.cuh"

namespace jnvfp4 {

template <int kTokens_, Pinned kPinned, bool kGrouped_ = false>
struct PinnedConfig {
  // Whether b is decoded to float16 in scratch, with its scales, and whether operands have an amax for each window.
  static constexpr bool kNumbers = kPinned != Pinned::kCodes, kWindows = kPinned == Pinned::kWindows;
  static constexpr bool kGrouped = kGrouped_;
  using Args = std::conditional_t<kGrouped, GroupedFusedArgs, FusedArgs>;
  using Tiles = std::conditional_t<kGrouped, ListedTiles<kTokens_>, DenseTiles<FusedArgs, kTokens_>>;
  static constexpr int kTokens = kTokens_, kRows = 128, kThreads = 128 * 3, kSums = kTokens / 2;
  static constexpr int kLoading = 40, kComputing = 232;  // registers, of 168 in a launch
  static constexpr int kPart = kTokens == 128 ? 128 : 64, kParts = kTokens / kPart;

  // A stage has a window (64 along K) of tokens and of rows of b; a slot, scales of the four windows that are a turn of
  // the loop. So stages are known when this is compiled, and the turn's number says the rest.
  static constexpr int kStages = 4, kSlots = 2;
  static constexpr int kTokenBytes = kTokens * 128, kLeftPitch = kNumbers ? 128 : 32, kLeftBytes = kRows * kLeftPitch;
  static constexpr int kAmaxes = kFusedAmaxes * 4, kAmaxBytes = kWindows ? 2 * kAmaxes : 0;  // of tokens, then of rows
  static constexpr int kScaleBytes = kNumbers ? 0 : kRows * 16;
  static constexpr int kBuffer = 8192;
  using Result = FusedResult<kTokens, false, true, kGrouped, kBuffer>;
  using Writer = typename Result::Writer;

  static constexpr int kAtLeft = kStages * kTokenBytes, kAtScales = kAtLeft + kStages * kLeftBytes;
  static constexpr int kAtAmaxes = kAtScales + kSlots * kScaleBytes, kAtOut = kAtAmaxes + kStages * kAmaxBytes;
  static constexpr int kAtFull = kAtOut + 2 * Writer::kShared, kAtEmpty = kAtFull + 8 * kStages;
  static constexpr int kAtTiles = kAtEmpty + 8 * kStages;
  using Ring = TileRing<kStages>;
  static constexpr int kShared = kAtTiles + Ring::kShared + 1024;  // to align the start
  static_assert(kLoading + 2 * kComputing <= 3 * (65536 / kThreads / 8 * 8));
  static_assert(kShared <= 232448);
};

// ---------------------------------------------------------------- the thread that loads
template <class C>
__device__ __forceinline__ void load_windows(const typename C::Args& a, const FusedMaps& maps, uint32_t smem) {
  constexpr int kHalf = C::kTokens / 2;
  const int rank = cluster_rank();
  uint32_t turn = 0;
  const typename C::Tiles tiles{a};
  TileScheduler<C, true> scheduler(tiles, smem);
  for (int i = scheduler.first(); i < tiles.end(); i = scheduler.next()) {
    const WorkTile tile = tiles[i];
    const int b_row = row_of_b<C>(a, tile), a_row = row_of_a(a, tile, kHalf);
    const float *of_tokens = nullptr, *of_columns = nullptr;  // amaxes
    if constexpr (C::kWindows) {
      const int64_t each = 4 * int64_t{a.steps} * kFusedAmaxes, token_tiles = a.matrix_tiles / a.pairs;
      of_tokens = a.token_amaxes + (tile.matrix * token_tiles + tile.token / C::kTokens) * each;
      of_columns = a.column_amaxes + (int64_t{tile.matrix} * a.pairs * 2 + tile.column / C::kRows + rank) * each;
    }
    for (int step = 0; step < tile.k_end; ++step, ++turn) {
#pragma unroll
      for (int of = 0; of < C::kStages; ++of) {
        const int w = 4 * step + of;
        const uint32_t bar = smem + C::kAtFull + 8 * of;
        barrier_wait(smem + C::kAtEmpty + 8 * of, ~turn & 1);
        barrier_expect(bar, C::kTokenBytes + C::kLeftBytes + C::kAmaxBytes + (of == 0 ? C::kScaleBytes : 0));
        if (of == 0 && !C::kNumbers)
          load_box(smem + C::kAtScales + (turn & 1) * C::kScaleBytes, maps.scale, bar, w * 4, b_row);
        load_box(smem + C::kAtLeft + of * C::kLeftBytes, maps.data, bar, w * (C::kNumbers ? 64 : 32), b_row);
        load_box_to(3, smem + of * C::kTokenBytes + rank * kHalf * 128, maps.a, bar, w * 64, a_row);
        if constexpr (C::kWindows) {
          const uint32_t to = smem + C::kAtAmaxes + of * C::kAmaxBytes;
          load_bytes(to, of_tokens + int64_t{w} * kFusedAmaxes, C::kAmaxes, bar);
          load_bytes(to + C::kAmaxes, of_columns + int64_t{w} * kFusedAmaxes, C::kAmaxes, bar);
        }
      }
    }
  }
  // Stays until the other block has read what this one has loaded for it.
  for (int of = 0; of < C::kStages; ++of) barrier_wait(smem + C::kAtEmpty + 8 * of, ~turn & 1);
}

// ---------------------------------------------------------------- a warpgroup that computes
template <class C>
struct PinnedConsumer {
  static constexpr int kPart = C::kPart / 2;  // sums of a thread in a part
  using Part = float[kPart];
  using Sums = float[C::kSums];
  using Fragment = uint32_t[4];
  using Scales = float[2][4];  // of rows r and r + 8, four blocks

  const typename C::Args& a;
  uint32_t smem;
  uint32_t left, scale;  // where its rows are in the first stage and slot
  uint32_t turn = 0;     // turns of all tiles before

  __device__ __forceinline__ PinnedConsumer(const typename C::Args& args, uint32_t shared) : a(args), smem(shared) {
    const int row = wg() * 64 + fragment_row(), lane = threadIdx.x % 32;
    scale = smem + C::kAtScales + row * 16;
    left =
        smem + C::kAtLeft +
        (C::kNumbers ? (row - lane / 4 + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16 : row * 32 + lane % 4 / 2 * 4);
  }

  // Not kept, as there are no registers to spare.
  static __device__ __forceinline__ int wg() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread / 128 - 1;
  }

  // ---- a block
  __device__ __forceinline__ void wait_for(int of, uint32_t in_turn) const {
    barrier_wait(smem + C::kAtFull + 8 * of, in_turn & 1);
  }
  // Every lane has read what it needs. The stage is free, in both blocks that load for it.
  __device__ __forceinline__ void release(int of) const {
    __syncwarp();
    barrier_arrive_in_both(smem + C::kAtEmpty + 8 * of);
  }
  // Lane t of four has the t-th quarter of a block, as sm90/prepare.cu has ordered the tokens.
  __device__ __forceinline__ void load_left(Fragment& to, int of, int block) const {
    const uint32_t at = left + of * C::kLeftBytes;
    if constexpr (C::kNumbers) {
      load_matrices(to, at ^ block * 32);
    } else {
      uint32_t pair[4];
      halves_of_codes(__byte_perm(load_shared32(at + block * 8), load_shared32(at + block * 8 + 8 * 32),
                                  threadIdx.x % 2 ? 0x7362u : 0x5140u),
                      pair);
      to[0] = pair[0], to[1] = pair[2], to[2] = pair[1], to[3] = pair[3];
    }
  }
  __device__ __forceinline__ void load_scales(Scales& to, uint32_t in_turn, int of) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t four = load_shared32(scale + (in_turn & 1) * C::kScaleBytes + r * 8 * 16 + of * 4);
      uint32_t low, high;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(low) : "h"(static_cast<uint16_t>(four)));
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(high) : "h"(static_cast<uint16_t>(four >> 16)));
      const float2 x = __half22float2(reinterpret_cast<const __half2&>(low));
      const float2 y = __half22float2(reinterpret_cast<const __half2&>(high));
      to[r][0] = x.x, to[r][1] = x.y, to[r][2] = y.x, to[r][3] = y.y;
    }
  }
  __device__ __forceinline__ void multiply(Part& d, const Fragment& f, int of, int block, int part) const {
    wgmma_fence();
    wgmma<F16>(d, f, shared_matrix(smem + of * C::kTokenBytes) + block * 2 + part * (C::kPart * 128 / 16), 0);
    wgmma_commit();
  }
  // All of one row, then all of the other.
  static __device__ __forceinline__ void add(Part& sums, const Part& d, float low, float high) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 2 * h; i < kPart; i += 4)
#pragma unroll
        for (int e = i; e < i + 2; ++e)
          asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(sums[e]) : "f"(d[e]), "f"(h ? high : low));
    make_here(sums);
  }
  static __device__ __forceinline__ void add(Part& sums, const Part& d) {
#pragma unroll
    for (int i = 0; i < kPart; ++i) asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(sums[i]) : "f"(d[i]));
    make_here(sums);
  }

  // ---- the sum along K
  static constexpr int kOfWindow = 4 * C::kParts, kOfTurn = kOfWindow * C::kStages;  // parts
  using Tile = float[C::kParts][kPart];
  __device__ __forceinline__ void sum(Tile& y) {
    float d[2][kPart];
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      d[0][i] = d[1][i] = 0;
#pragma unroll
      for (int p = 0; p < C::kParts; ++p) y[p][i] = 0;
    }
    Fragment left_of[2];
    Scales scales[2];  // of the window and of the next one
    const auto load = [&](uint32_t in_turn, int window, bool there = true) {
      if (there) wait_for(window, in_turn);
      load_left(left_of[0], window, 0);
      if constexpr (!C::kNumbers) load_scales(scales[window % 2], in_turn, window);
    };
    // Adds the part that is the q-th of its turn.
    const auto add_part = [&](int q) {
      const int block = q % kOfWindow / C::kParts;
      const Scales& s = scales[q / kOfWindow % 2];
      if constexpr (C::kNumbers)
        add(y[q % C::kParts], d[q % 2]);
      else
        add(y[q % C::kParts], d[q % 2], s[0][block], s[1][block]);
    };
    load(turn, 0);
    int turns = a.steps;
#pragma unroll 1
    do {
#pragma unroll
      for (int p = 0; p < kOfTurn; ++p) {
        const int window = p / kOfWindow, block = p % kOfWindow / C::kParts, part = p % C::kParts;
        multiply(d[p % 2], left_of[block % 2], window, block, part);
        if (p > 0) wgmma_wait_for<1>(d[(p + 1) % 2]);
        if (p % kOfWindow == 0 && window > 0) release(window - 1);
        if (part == 0 && block < 3) load_left(left_of[(block + 1) % 2], window, block + 1);
        if (part == 0 && block == 3) {
          if (window < C::kStages - 1)
            load(turn, window + 1);
          else
            load(turn + 1, 0, turns > 1);
        }
        if (p > 0) add_part(p - 1);
      }
      wgmma_wait_for<0>(d[(kOfTurn - 1) % 2]);
      add_part(kOfTurn - 1);
      release(C::kStages - 1);
      ++turn;
    } while (--turns > 0);
  }

  // ---- the sum along K of windows that have amaxes
  // Warpgroups alternate, as in sm90/windows.cu: one adds a window while wgmma make that of the other. Named barriers 4
  // and 5: one waits for its turn, the other arrives.
  static __device__ __forceinline__ void wait_turn(int of) { named_sync(4 + of, 256); }
  static __device__ __forceinline__ void pass_turn(int of) { named_arrive(5 - of, 256); }
  // y = fl(y + fl(alpha * window)), alpha = fl(fl(amax_a amax_b) / divisor). The quotient is that of two products, with
  // a large and a small piece of a reciprocal that has 2^28 in it, where nothing is subnormal; else that of one product
  // in float64 (numerics_fast.h). Where products of amaxes are exact, the reciprocal is that of a row.
  __device__ __forceinline__ void add_window(Part& y, const Part& window, const float (&rows)[2], uint32_t tokens_at,
                                             uint32_t kinds) const {
    const auto fma = [](float x, float y, float z) { return __fmaf_rn(x, y, z); };
    const auto each = [&](const auto& term) {
#pragma unroll
      for (int e = 0; e < kPart; e += 8) {
        const uint4 four = load_shared128(tokens_at + e * 8);
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
  // Where sums of a window are exact, wgmma make them; else blocks are added one by one, as without windows.
  __device__ __forceinline__ void sum_windows(Part& y) {
    // By shuffles for uniform registers; the others are to be kept.
    const int own = __shfl_sync(~0u, wg(), 0), lane = threadIdx.x % 32;
    const uint32_t shared = __shfl_sync(~0u, smem, 0), amaxes = shared + C::kAtAmaxes;
    const uint32_t kinds_at = pin_register(amaxes + C::kRows * 4 + lane / 4 % 2 * C::kAmaxes + lane % 4 * 4);
    const uint32_t tokens_at = pin_register(amaxes + lane % 4 * 16);
    const uint32_t rows_at = pin_register(amaxes + C::kAmaxes + (own * 64 + fragment_row()) * 4);
    const auto load_kinds = [&](int w) {  // those of 32 of the tile's rows
      wait_for(w % C::kStages, turn + w / C::kStages);
      return load_shared32(kinds_at + w % C::kStages * C::kAmaxBytes);
    };
    Part window, d;
#pragma unroll
    for (int i = 0; i < kPart; ++i) y[i] = window[i] = d[i] = 0;
    const int windows = C::kStages * a.steps;
    uint32_t next = load_kinds(0);
#pragma unroll 1
    for (int w = 0; w < windows; ++w) {
      const int of = w % C::kStages, at = of * C::kAmaxBytes;
      const auto multiply = [&](Part& sums, int begin, int end) {
        const uint64_t rows = shared_matrix(shared + C::kAtLeft + of * C::kLeftBytes + own * 64 * 128);
        const uint64_t tokens = shared_matrix(shared + of * C::kTokenBytes);
        wgmma_fence();
#pragma unroll
        for (int block = begin; block < end; ++block)
          wgmma_shared<F16>(sums, rows + 2 * block, tokens + 2 * block, block > begin);
        wgmma_commit();
      };
      const uint32_t kinds = __reduce_or_sync(~0u, next);
      const bool exact = has_exact_sums(kinds);
      wait_turn(own);
      if (exact)
        multiply(window, 0, 4);
      else
        multiply(window, 0, 1);
      pass_turn(own);
      if (w + 1 < windows) next = load_kinds(w + 1);
      const float rows[2] = {float_of(load_shared32(rows_at + at)), float_of(load_shared32(rows_at + at + 8 * 4))};
      wgmma_wait_for<0>(window);
      if (!exact) {
#pragma unroll
        for (int block = 1; block < 4; ++block) {
          multiply(d, block, block + 1);
          wgmma_wait_for<0>(d), make_here(window);
          add(window, d);
        }
      }
      add_window(y, window, rows, tokens_at + at, kinds);
      make_here(y);
      release(of);
    }
    turn += a.steps;
  }

  // ---- the result
  __device__ __forceinline__ void finish(Sums& sums, const WorkTile& tile) const {
    const int of = __shfl_sync(~0u, wg(), 0), column = tile.column + cluster_rank() * C::kRows + of * 64;
    const uint32_t out = smem + C::kAtOut + of * C::Writer::kShared;
    if constexpr (C::kWindows) {  // which have had their alphas
      const typename C::Writer writer{a.g.result, a.tokens, a.columns, tile.matrix, tile.token, column, out, 1 + of};
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
        write(typename C::Result{a, tile.matrix, tile.token, tile.token_end, column, out, 1 + of});
      else
        write(typename C::Result{a, tile.matrix, tile.token, column, out, 1 + of});
    }
    __syncwarp();  // instructions for whole warps follow
  }
  __device__ __forceinline__ void run() {
    if (C::kWindows && wg() == 1) pass_turn(1);  // the first turn is that of warpgroup 0
    const typename C::Tiles tiles{a};
    TileScheduler<C, false> scheduler(tiles, smem);
    for (int i = scheduler.first(); i < tiles.end(); i = scheduler.next()) {
      float y[C::kParts][kPart];
      if constexpr (C::kWindows)
        sum_windows(y[0]);
      else
        sum(y);
      finish(reinterpret_cast<Sums&>(y), tiles[pin_register(i)]);  // there are no registers to keep the tile
    }
    if (C::kWindows && wg() == 0) wait_turn(0);  // no barrier is left half full
    if constexpr (C::kGrouped) clear_other_rows(a, C::kThreads - 128);
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sm90_pinned_kernel(const __grid_constant__ typename C::Args a, const __grid_constant__ FusedMaps maps) {
  run_pair<C>(
      a, [&] { prefetch_map(maps.data), prefetch_map(maps.scale), prefetch_map(maps.a); },
      [&](uint32_t smem) { load_windows<C>(a, maps, smem); }, [&](uint32_t smem) { PinnedConsumer<C>(a, smem).run(); });
}

}  // namespace jnvfp4
