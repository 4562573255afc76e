// Decode GEMM on Hopper: out = epilogue(a b^T), a of at most 16 rows, b NVFP4. Memory-bound on b, which is read once.
//
// A and B of the MMA are swapped: b is the operand of 16 rows, and is decoded in registers from the layout in which it
// is stored. The order of k inside an MMA is free as long as both operands agree: lane t of each four owns 32
// neighbouring k, so that one load of 16 bytes feeds eight k16 steps and needs two scales. Decoding emits pairs
// (decode.cuh), and the rows of a are permuted likewise.
//
//             K ------------------------------------------------------------------->
//   group 0   | warp 0: unit 0 | warp 1: unit 1 | ... | warp 15 | warp 0: unit 16 | ...
//   group 1   | warp 0: unit 0 | warp 1: unit 1 | ... | warp 15 | warp 0: unit 16 | ...
//   ...         a group is 16 columns of the result, a unit 128 or 256 along K; there are 16 warps, or 12
//
// Split-K: over the warps of a CTA, and over the CTAs of a cluster; sums are float32, added in an order that depends
// only on the shape and the device. No atomics, no scratch.
#pragma once

#include "../launchers.h"
#include "launch.cuh"
#include "small_m_operands.cuh"
#include "small_m_results.cuh"

namespace jnvfp4::small_m {

#define JNVFP4_MMA(type)                                                    \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
template <bool kBf16>
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  if constexpr (kBf16)
    JNVFP4_MMA("bf16");
  else
    JNVFP4_MMA("f16");
}
#undef JNVFP4_MMA

// ---------------------------------------------------------------- mainloop
// Multiplies a stage, given this lane's addresses there. d: two chains of sums per 8 rows of a, for mma's latency.
template <Left left, class S>
__device__ __forceinline__ void multiply(uint32_t codes, uint32_t scales,
                                         const typename RowLoader<left, S>::Fragments& b,
                                         float (&d)[S::kRowTiles][2][4]) {
  using D = DecodeFor<left>;
#pragma unroll
  for (int h = 0; h < S::kChunks; ++h) {
    const uint4 c0 = load_shared128(codes + h * 1024);
    const uint4 c1 = load_shared128(codes + h * 1024 + 512);
    uint32_t s0[2], s1[2];
    D::scales(load_shared<uint16_t>(scales + h * 8), s0[0], s0[1]);
    D::scales(load_shared<uint16_t>(scales + h * 8 + 64 * S::kChunks), s1[0], s1[1]);
    const uint32_t w0[4] = {c0.x, c0.y, c0.z, c0.w}, w1[4] = {c1.x, c1.y, c1.z, c1.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t p0[4], p1[4];
      D::eight(w0[i], s0[i / 2], p0);
      D::eight(w1[i], s1[i / 2], p1);
#pragma unroll
      for (int n = 0; n < S::kRowTiles; ++n) {
        mma<left == Left::kBf16>(d[n][0], p0[0], p1[0], p0[1], p1[1], b[n][h][i][0], b[n][h][i][1]);
        mma<left == Left::kBf16>(d[n][1], p0[2], p1[2], p0[3], p1[3], b[n][h][i][2], b[n][h][i][3]);
      }
    }
  }
}

// Stores the sums of a group, or adds them to those of previous units.
template <int kTiles>
__device__ __forceinline__ void store_sums(uint32_t dst, const float (&d)[kTiles][2][4], bool first) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n, dst += 512) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = d[n][0][i] + d[n][1][i];
    if (!first) {
      const uint4 old = load_shared128(dst);
      sum[0] += float_of(old.x), sum[1] += float_of(old.y), sum[2] += float_of(old.z), sum[3] += float_of(old.w);
    }
    store_shared128(dst, {bits_of(sum[0]), bits_of(sum[1]), bits_of(sum[2]), bits_of(sum[3])});
  }
}

// Sums all units of a warp, without __syncthreads. The rows of the first one and the first stage of columns are in
// flight. `codes` and `codes + scales_offset`: this lane's addresses in the stage that is multiplied first.
template <Left left, class S>
__device__ __forceinline__ void sum_units(WarpSchedule<S>& schedule, RowLoader<left, S>& rows, ColumnRing<S>& columns,
                                          int codes, int toggle_sum, int scales_offset, uint32_t buffer, uint32_t sums,
                                          const RowNorm& norm = {}) {
  constexpr bool kCopied = RowLoader<left, S>::kCopied;
  typename RowLoader<left, S>::Fragments b;
  int steps_since_load = S::kStages;  // of the rows of this unit
  bool first = true;
#pragma unroll 1
  while (!schedule.done()) {
    if constexpr (kCopied) {
      // With few groups, a later unit's rows come with one of the last stages.
      if (S::kOneUnit || steps_since_load >= S::kStages)
        wait_for_copies<S::kStages - 1>();
      else
        wait_for_copies<0>();
      if constexpr (S::kNorm && !S::kOneUnit) {
        typename RowLoader<left, S>::Gains gains;
        gains.load(norm, schedule.unit);
        rows.normalize(norm, gains, buffer);
      }
      __syncwarp();
    }
    rows.fragments(buffer, b);
    if constexpr (kCopied) __syncwarp();
    uint32_t dst = sums + schedule.group * (S::kRowTiles * 512);
    int steps = schedule.end - schedule.group;
    steps_since_load = steps;
    if constexpr (!S::kOneUnit) {
      schedule.next_round();
      if (!schedule.done()) rows.load(schedule.unit, buffer);
    }
#pragma unroll 1
    for (; steps > 0; --steps) {
      wait_for_copies<S::kStages - 2>();
      __syncwarp();
      columns.issue();
      float d[S::kRowTiles][2][4] = {};
      multiply<left, S>(codes, codes + scales_offset, b, d);
      store_sums(dst, d, S::kOneUnit || first);
      dst += S::kRowTiles * 512, codes = toggle_sum - codes;
    }
    first = false;
    if constexpr (S::kOneUnit) break;
  }
}

// ---------------------------------------------------------------- kernel
// Grid: clusters along the columns; matrices. All rows of a, at most 8 * kRowTiles, are in one CTA. In time order, each
// warp on its own between set-up and epilogue:
//
//   set-up      wait for the previous kernel, launch dependents
//               first unit: rows of a -> registers, or by cp.async -> buffer; first group by cp.async -> ring
//               [norm: squares of all rows -> factors of rows; a unit's rows are normalized in the buffer]
//               alpha and bias of the thread's first slot -> epilogue_smem, while those are in flight
//   mainloop    per unit of the warp (sum_units):
//     wait for the rows; decode or permute them -> fragments of a, which stay in registers for all groups
//     start the loads of the next unit's rows
//     per group of 16 columns:
//       wait for the stage; start cp.async of the next group or unit -> the other stage
//       decode codes times scales -> fragments of b; 8 mma per 128 k and 8 rows, in two chains
//       sums -> shared memory of the warp, added to those of its previous units
//   epilogue    __syncthreads; per slot of four results:
//     [cluster: sum of the rank's warps, cluster barrier, sum over ranks by DSMEM] else sum over warps
//     times alpha, plus bias, cast -> result, masked at the ends
//     [cluster: barrier, so that no CTA ends while another reads its sums]
template <Left left, class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1) sm90_small_m_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) uint8_t shared[];
  const MatmulArgs& g = a.g;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const DenseWork work(a);
  WarpSchedule<S> schedule(work);
  const int pitch = S::work_bytes(left, work.max_groups);
  const uint32_t squares = shared_address(shared), epilogue_smem = squares + S::kSquaresBytes;
  const uint32_t rings = squares + S::kEpilogueBytes;
  const uint32_t ring = rings + warp * S::kRing, sums = rings + S::kWarps * S::kRing;
  const uint32_t warp_smem = sums + warp * pitch, warp_sums = warp_smem + lane * 16;
  const uint32_t buffer = warp_smem + (S::kOneUnit ? 0 : work.groups * S::kRowTiles * 512);

  // The first loads are in flight before anything else is computed.
  wait_for_previous_kernel();
  launch_dependents();  // the next kernel waits for the end of this one
  const int64_t row0 = work.matrix * g.shape.rows;
  RowLoader<left, S> rows(g, row0, static_cast<int>(g.shape.rows));
  const bool has_unit = !schedule.done();
  if (has_unit) rows.load(schedule.unit, buffer);
  commit_copies();
  ColumnRing<S> columns(g, work, ring, schedule);
#pragma unroll
  for (int i = 0; i < S::kStages - 1; ++i) columns.issue();
  schedule.pin(), columns.pin(schedule);
  if constexpr (S::kNorm) {
    typename RowLoader<left, S>::Gains gains;  // of the first unit
    gains.load(g.norm, has_unit ? schedule.unit : 0);
    prefetch_epilogue<left, S>(a, work, epilogue_smem, [&] {
      rows.find_factors(g, row0, has_unit, work.ranks == 1, buffer, squares);
      if (S::kOneUnit && has_unit) {
        wait_for_copies<S::kStages - 1>();
        rows.normalize(g.norm, gains, buffer);
      }
    });
  } else {
    prefetch_epilogue<left, S>(a, work, epilogue_smem);
  }

  const int codes = pin_register(static_cast<int>(ring + lane * 16)), toggle_sum = pin_register(2 * codes + S::kStage);
  const int scales_offset = pin_register(S::kScales - lane * 16 + lane / 4 * (8 * S::kChunks) + lane % 4 * 2);
  const int active_warps = min(S::kWarps, work.first_unit(work.rank + 1) - work.first_unit(work.rank));
  sum_units<left, S>(schedule, rows, columns, codes, toggle_sum, scales_offset, buffer, warp_sums, g.norm);
  run_epilogue<left, S>(a, work, epilogue_smem, sums, pitch, active_warps);
}

// ---------------------------------------------------------------- launch
// Launches a cluster for each of tiles x batch. The grid's second axis may have 65535.
inline cudaError_t launch_clusters(void (*kernel)(Args), Args a, int tiles, int threads, int bytes,
                                   cudaStream_t stream) {
  const int ranks = 1 << a.log2_ranks;
  cudaError_t status = cudaSuccess;
  constexpr int64_t kMaxBatch = 65535;
  for (a.first_matrix = 0; a.first_matrix < a.g.shape.batch && status == cudaSuccess; a.first_matrix += kMaxBatch) {
    const dim3 grid(static_cast<unsigned>(tiles * ranks),
                    static_cast<unsigned>(std::min(a.g.shape.batch - a.first_matrix, kMaxBatch)));
    status = launch_early(kernel, grid, static_cast<unsigned>(threads), static_cast<unsigned>(ranks), bytes, stream, a);
  }
  return status;
}

// Partition of a GEMM into tiles of columns, where clusters of 2^log2_ranks CTAs split K.
struct Partition {
  int log2_ranks, groups, tiles, units;
  int64_t cost;  // in steps of a warp

  int max_groups() const { return (groups + tiles - 1) / tiles; }  // of a tile
};

// Returns the clusters that a device has room for. Those of four and eight do not find room on every SM.
inline int64_t max_resident_clusters(int bits) {
  const int processors = multiprocessors();
  return std::max((bits > 1 ? processors - processors / 8 : processors) >> bits, 1);
}

template <Left left, class S>
Partition partition(const GemmShape& shape, int bits) {
  const int groups = static_cast<int>((shape.cols + 15) / 16), max_groups = S::max_groups(left);
  const int units = static_cast<int>((shape.depth + S::kUnit - 1) / S::kUnit);
  // As few tiles as fill every SM equally often.
  const int64_t at_once = max_resident_clusters(bits), least = (groups + max_groups - 1) / max_groups;
  const int64_t waves = (least * shape.batch + at_once - 1) / at_once;
  const auto tiles = std::min<int64_t>(groups, std::max(least, waves * at_once / shape.batch));
  Partition d{bits, groups, static_cast<int>(tiles), units, 0};
  const int mine = (units + (1 << bits) - 1) >> bits, turns = mine / S::kWarps, rest = mine % S::kWarps;
  const int shared = turns && rest ? WarpSchedule<S>::log2_sharers(rest) : 0;
  const int steps = d.max_groups() * turns + (rest ? (d.max_groups() + (1 << shared) - 1) >> shared : 0);
  constexpr int kStart = 3;  // what the start and the end of a CTA take; rows of a take one step
  d.cost = (tiles * shape.batch + at_once - 1) / at_once * (steps + turns + (rest != 0) + kStart);
  return d;
}

template <Left left, class S>
cudaError_t launch_shape(const MatmulArgs& g, const Partition& d, cudaStream_t stream) {
  const Args args{g,
                  0,
                  d.units,
                  d.log2_ranks,
                  d.groups / d.tiles,
                  d.groups % d.tiles,
                  left == Left::kNvfp4 && g.a.map.rows_per_amax % g.shape.rows != 0,
                  g.b.map.rows_per_amax % g.shape.cols != 0};
  return launch_clusters(sm90_small_m_kernel<left, S>, args, d.tiles, S::kWarps * 32, S::bytes(left, d.max_groups()),
                         stream);
}

// Clusters of two where they take no more steps, since each of their CTAs reads half of a. Few columns leave
// SMs free, so clusters of four or eight may divide K too. One: for the K of which a warp has one unit.
template <Left left, class One, class Any>
cudaError_t launch_best(const MatmulArgs& g, cudaStream_t stream) {
  const auto one = [&](int bits) { return g.shape.depth <= int64_t{One::kUnit} * One::kWarps << bits; };
  Partition best{};
  for (int bits = 0; bits < 4; ++bits) {
    const Partition d = one(bits) ? partition<left, One>(g.shape, bits) : partition<left, Any>(g.shape, bits);
    if (bits && 1 << bits > d.units) break;
    if (bits > 1 && d.groups * g.shape.batch > max_resident_clusters(bits)) break;
    if (!bits || d.cost <= best.cost) best = d;
  }
  return one(best.log2_ranks) ? launch_shape<left, One>(g, best, stream) : launch_shape<left, Any>(g, best, stream);
}

template <Left left, Extra kExtra>
cudaError_t launch_units(const MatmulArgs& g, cudaStream_t stream) {
  if (g.shape.rows <= 8)
    return launch_best<left, Tiling<1, 2, 2, Depth::kOneUnit, 16, kExtra>, Tiling<1, 2, 2, Depth::kUnits, 16, kExtra>>(
        g, stream);
  if constexpr (kExtra == Extra::kNorm)
    return cudaErrorInvalidValue;  // the plan does not ask for it
  else
    return launch_best<left, Tiling<2, 2, 2, Depth::kOneUnit, 16, kExtra>, Tiling<2, 2, 2, Depth::kUnits, 12, kExtra>>(
        g, stream);
}

template <Left left>
cudaError_t launch(const MatmulArgs& g, cudaStream_t stream) {
  using Masked = Tiling<2, 1, 2, Depth::kAny>;
  const bool whole_units = g.shape.depth % kSmallUnit == 0;
  if (!whole_units && (g.norm.gain || g.result.whole_bias)) return cudaErrorInvalidValue;
  if (!whole_units) return launch_best<left, Masked, Masked>(g, stream);
  if constexpr (left != Left::kNvfp4)
    if (g.norm.gain) return launch_units<left, Extra::kNorm>(g, stream);
  if (g.result.whole_bias) return launch_units<left, Extra::kResidual>(g, stream);
  return launch_units<left, Extra::kNone>(g, stream);
}

}  // namespace jnvfp4::small_m
