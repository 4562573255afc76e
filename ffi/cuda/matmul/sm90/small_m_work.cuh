// How the GEMM of few rows (small_m.cuh) divides a product: over CTAs, warps and shared memory.
#pragma once

#include "../../../plan/matmul.h"
#include "../decode.cuh"
#include "ptx.cuh"

namespace jnvfp4::small_m {

using Left = MatmulProblem::Left;

// Arguments that are the same in all CTAs come from the host: a division takes a thread about as long as a load.
struct Args {
  MatmulArgs g;
  int64_t first_matrix;                   // of blockIdx.y == 0
  int units;                              // along K
  int log2_ranks;                         // CTAs of a cluster
  int groups_per_tile, tiles_with_extra;  // groups of 16 columns per tile; the tiles that have one more
  bool amax_per_row, amax_per_col;        // whether rows of a matrix of a, or columns of the result, have an amax each
};

// Decoder of the type to which both operands are decoded.
template <Left left>
using DecodeFor = Decode<std::conditional_t<left == Left::kBf16, Bf16, F16>>;

// ---------------------------------------------------------------- work of a CTA
// CTAs go along the columns of the result, which are the rows of b, in groups of 16. The CTAs of a cluster have the
// same columns and split K: rank r of R has units [U r / R, U (r + 1) / R).
struct CtaWork {
  int log2_ranks, ranks, rank, units, max_groups, groups, first_group;
  int64_t matrix;

  // First unit of K of a rank.
  __device__ __forceinline__ int first_unit(int of_rank) const { return units * of_rank >> log2_ranks; }
};

struct DenseWork : CtaWork {
  // Rows of the result: those of a matrix.
  struct ResultRows {
    int64_t matrix;
    __device__ __forceinline__ int64_t first_row(int rows) const { return matrix * rows; }
    __device__ __forceinline__ int num_rows(const Args& a) const { return static_cast<int>(a.g.shape.rows); }
  };
  __device__ __forceinline__ ResultRows result_rows() const { return {matrix}; }

  __device__ __forceinline__ explicit DenseWork(const Args& a) {
    log2_ranks = a.log2_ranks, ranks = 1 << log2_ranks, rank = blockIdx.x & (ranks - 1), units = a.units;
    const int tile = blockIdx.x >> log2_ranks;
    max_groups = a.groups_per_tile + (a.tiles_with_extra != 0);
    groups = a.groups_per_tile + (tile < a.tiles_with_extra);
    first_group = tile * a.groups_per_tile + min(tile, a.tiles_with_extra);
    matrix = a.first_matrix + blockIdx.y;
  }
};

// ---------------------------------------------------------------- shared memory
constexpr int kMaxShared = 227 << 10;  // bytes that a CTA of Hopper may have

__device__ __forceinline__ void store_shared128(uint32_t dst, const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(dst), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}
__device__ __forceinline__ void store_shared32(uint32_t dst, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(dst), "r"(v) : "memory");
}
enum class Depth {
  kAny,     // K may end inside a unit, whose rest is zeros, and the operands' rows are aligned to no more than a block
  kUnits,   // K is a multiple of the unit
  kOneUnit  // K is too, and no warp has more than one unit
};

// What a kernel does beside the product. Each is an instance of its own, so that the others have no instruction for it.
enum class Extra {
  kNone,
  kResidual,  // adds a bias of the shape of the result
  kNorm       // multiplies the norm of a, and adds such a bias if there is one
};

// kRowTiles: tiles of 8 rows of a. kChunks: chunks of 128 k in a unit. 16 warps have 128 registers each, 12 have 168.
template <int kRowTiles_, int kChunks_, int kStages_, Depth kDepth, int kWarps_ = 16, Extra kExtra = Extra::kNone>
struct Tiling {
  static constexpr bool kResidual = kExtra != Extra::kNone, kNorm = kExtra == Extra::kNorm;
  static constexpr int kRowTiles = kRowTiles_, kChunks = kChunks_, kStages = kStages_, kWarps = kWarps_;
  static_assert(kStages == 2);  // x = toggle_sum - x goes to the other stage
  static constexpr bool kMasked = kDepth == Depth::kAny, kOneUnit = kDepth == Depth::kOneUnit;
  static constexpr int kUnit = kChunks * 128;
  static constexpr int kScales = kChunks * 1024,
                       kStage = kScales + kChunks * 128;  // bytes: 16 rows of codes, and scales
  static constexpr int kRing = kStages * kStage;

  // Bytes of a warp besides its ring: its rows of a, and its sums. If it has one unit, the sums overwrite the rows.
  __host__ __device__ static constexpr int rows_bytes(Left left) {
    return left == Left::kNvfp4 ? 0 : kRowTiles * kChunks * 2048;
  }
  __host__ __device__ static constexpr int work_bytes(Left left, int groups) {
    const int sums = groups * kRowTiles * 512, rows = rows_bytes(left);
    return kOneUnit ? (sums > rows ? sums : rows) : sums + rows;
  }
  // Bytes in front of all that, where threads save operands of the epilogue, after sums of squares of each warp.
  static constexpr int kSquaresBytes = kNorm ? kWarps * kRowTiles * 8 * 4 : 0;
  static constexpr int kEpilogueBytes = kSquaresBytes + kWarps * 32 * (kResidual ? 8 : 6) * 4;
  static constexpr int bytes(Left left, int groups) {
    return kEpilogueBytes + kWarps * (kRing + work_bytes(left, groups));
  }
  // Groups of columns whose sums fit.
  static constexpr int max_groups(Left left) {
    return ((kMaxShared - kEpilogueBytes) / kWarps - kRing - (kOneUnit ? 0 : rows_bytes(left))) / (kRowTiles * 512);
  }
};

// ---------------------------------------------------------------- schedule of a warp
// Position of a warp in the work of its CTA. The units of a rank are dealt to its warps round-robin, so that they read
// adjacent pieces of a row; a warp takes all groups of a unit. If the last of several rounds has at most half as many
// units as there are warps, 2, 4 or 8 warps share each of them, and its groups.
template <class S>
struct WarpSchedule {
  int unit, group, end, rounds_left;    // position; end of its groups of this unit; full rounds that are left
  int last_unit, last_group, last_end;  // position in the last round

  // Log2 of the warps that share a unit of a round of `rest` units.
  __host__ __device__ static constexpr int log2_sharers(int rest) {
    return (2 * rest <= S::kWarps) + (4 * rest <= S::kWarps) + (8 * rest <= S::kWarps);
  }

  __device__ __forceinline__ explicit WarpSchedule(const CtaWork& work) : group(0) {
    const int groups = work.groups, warp = threadIdx.x / 32, first = work.first_unit(work.rank),
              units = work.first_unit(work.rank + 1) - first;
    rounds_left = S::kOneUnit ? 0 : units / S::kWarps, unit = first + warp, end = warp < units ? groups : 0;
    if (S::kOneUnit) return;
    const int rest = units - rounds_left * S::kWarps;
    const int bits = log2_sharers(rest), part = warp & ((1 << bits) - 1);
    last_unit = first + rounds_left * S::kWarps + (warp >> bits), last_group = groups * part >> bits;
    last_end = warp >> bits < rest ? groups * (part + 1) >> bits : 0;
  }
  // Computes the last round here, and not again where a warp waits for it.
  __device__ __forceinline__ void pin() {
    if (S::kOneUnit) return;
    last_unit = pin_register(last_unit), last_group = pin_register(last_group), last_end = pin_register(last_end);
  }
  // Goes to the first group of the next round.
  __device__ __forceinline__ void next_round() {
    unit += S::kWarps, group = 0;
    if (--rounds_left == 0) unit = last_unit, group = last_group, end = last_end;
    if (rounds_left < 0) end = 0;
  }
  __device__ __forceinline__ void next() {
    if (++group >= end) next_round();
  }
  __device__ __forceinline__ bool done() const { return group >= end; }
};

}  // namespace jnvfp4::small_m
