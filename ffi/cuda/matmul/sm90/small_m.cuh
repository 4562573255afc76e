// Products of few rows on Hopper: out = epilogue(a b^T), a of at most 16 rows, b NVFP4.
//
// b, which is nearly all of the bytes, is on the side of the MMA that has 16 rows, and is decoded in registers from the
// layout in which it is stored. The order of k inside an MMA is free as long as both operands agree: lane t of each
// four owns 32 neighbouring k, so that one load of 16 bytes feeds eight k16 steps and needs two scales. Decoding emits
// pairs (decode.cuh), and the rows of a are permuted likewise.
//
//             K ------------------------------------------------------------------->
//   group 0   | warp 0: unit 0 | warp 1: unit 1 | ... | warp 15 | warp 0: unit 16 | ...
//   group 1   | warp 0: unit 0 | warp 1: unit 1 | ... | warp 15 | warp 0: unit 16 | ...
//   ...         a group is 16 columns of the result, a unit 128 or 256 along K; there are 16 warps, or 12
//
//   CTA        some groups; rank r of a cluster of R = 1, 2, 4 or 8 has units [U r / R, U (r + 1) / R)   (Share)
//   warp       all groups of a unit, then of its next one, alone until the end                           (Walk)
//   prologue   the first stages of b by cp.async; after the kernel ahead, rows of a to registers         (Ring, Rows)
//   mainloop   private ring of 2 stages: cp.async | decode | mma, without __syncthreads
//   epilogue   sums over the warps in shared memory, over the ranks by DSMEM, alpha, bias, cast
//
// The factors of decoded numbers are taken back at the end. Sums are float32 in an order that depends only on the shape
// and the device: K is split over warps and over the CTAs of a cluster, whose sums are added in their order.
// No atomics, no scratch.
#pragma once

#include "../../../plan/matmul.h"
#include "../decode.cuh"
#include "../launchers.h"
#include "launch.cuh"
#include "ptx.cuh"

namespace jnvfp4::small_m {

using Left = MatmulProblem::Left;

// What all CTAs have in common is computed on the host: a division takes a thread about as long as a load.
struct Args {
  MatmulArgs g;
  int64_t first;            // the matrix of blockIdx.y == 0
  int units;                // of K
  int rank_bits;            // the CTAs of a cluster: a power of two
  int few, more;            // groups of 16 columns of every tile; the tiles that have one more
  bool each_row, each_col;  // whether rows of a matrix of a, or columns of the result, have an amax each
};

// ---------------------------------------------------------------- PTX
__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
// The same, or zeros. `from` is valid either way.
__device__ __forceinline__ void copy16_or_zero(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}
__device__ __forceinline__ void copy8_or_zero(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(there ? 8 : 0));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// From the shared memory of the CTA `rank` of the cluster.
__device__ __forceinline__ float4 load_from_rank(uint32_t address, int rank) {
  float4 v;
  asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %4, %5; ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [a];}"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address), "r"(rank));
  return v;
}

__device__ __forceinline__ uint32_t load_shared2(uint32_t at) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ void store_shared16(uint32_t at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared4(uint32_t at, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
// Stays where it is written: the compiler would move it down to its use.
__device__ __forceinline__ uint4 load_global16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// The type to which both operands are decoded.
template <Left left>
using DecodeFor = Decode<std::conditional_t<left == Left::kBf16, Bf16, F16>>;

// ---------------------------------------------------------------- the share of a CTA
// CTAs go along the columns of the result, which are the rows of b, in groups of 16. The CTAs of a
// cluster have the same columns and share K.
struct Share {
  int rank_bits, ranks, rank, units, most, groups, group0;
  int64_t matrix;

  Share() = default;
  __device__ __forceinline__ explicit Share(const Args& a)
      : rank_bits(a.rank_bits), ranks(1 << rank_bits), rank(blockIdx.x & (ranks - 1)), units(a.units) {
    const int tile = blockIdx.x >> rank_bits;
    most = a.few + (a.more != 0), groups = a.few + (tile < a.more), group0 = tile * a.few + min(tile, a.more);
    matrix = a.first + blockIdx.y;
  }
  // The first unit of K of a rank.
  __device__ __forceinline__ int unit(int of_rank) const { return units * of_rank >> rank_bits; }

  // What results are of: a matrix of b, and rows of a.
  struct Of {
    int64_t matrix;
    __device__ __forceinline__ int64_t first_row(int rows) const { return matrix * rows; }
    __device__ __forceinline__ int rows(const Args& a) const { return static_cast<int>(a.g.shape.rows); }
  };
  __device__ __forceinline__ Of of() const { return {matrix}; }
};

// ---------------------------------------------------------------- launches
constexpr int kMostShared = 227 << 10;  // bytes that a CTA of Hopper may have

// Clusters for each of tiles x batch. The grid's second axis may have 65535.
inline cudaError_t launch_clusters(void (*kernel)(Args), Args a, int tiles, int threads, int bytes,
                                   cudaStream_t stream) {
  const int ranks = 1 << a.rank_bits;
  cudaError_t status = cudaSuccess;
  constexpr int64_t kMost = 65535;
  for (a.first = 0; a.first < a.g.shape.batch && status == cudaSuccess; a.first += kMost) {
    const dim3 grid(static_cast<unsigned>(tiles * ranks),
                    static_cast<unsigned>(std::min(a.g.shape.batch - a.first, kMost)));
    status = launch_early(kernel, grid, static_cast<unsigned>(threads), static_cast<unsigned>(ranks), bytes, stream, a);
  }
  return status;
}

template <bool kBf16>
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  if constexpr (kBf16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

enum class Depth {
  kAny,     // K may end inside a unit, whose rest is zeros, and the operands' rows are aligned to no more than a block
  kUnits,   // a multiple of the unit
  kOneUnit  // the same, and no warp has more than one
};

// kRowTiles: of 8 rows of a. kParts: of 128 k in a unit. Registers limit the warps: 128 each for 16, 168 for 12.
template <int kRowTiles_, int kParts_, int kStages_, Depth kDepth, int kWarps_ = 16>
struct Shape {
  static constexpr int kRowTiles = kRowTiles_, kParts = kParts_, kStages = kStages_, kWarps = kWarps_;
  static_assert(kStages == 2);  // the next stage of a ring is the other one
  static constexpr bool kMasked = kDepth == Depth::kAny, kOneUnit = kDepth == Depth::kOneUnit;
  static constexpr int kUnit = kParts * 128;
  static constexpr int kScales = kParts * 1024, kStage = kScales + kParts * 128;  // bytes: 16 rows of codes, and scales
  static constexpr int kRing = kStages * kStage;

  // Bytes of a warp beside its ring: its rows of a, and its sums. If it has one unit, the sums take the place of the
  // rows.
  __host__ __device__ static constexpr int rows_bytes(Left left) {
    return left == Left::kNvfp4 ? 0 : kRowTiles * kParts * 2048;
  }
  __host__ __device__ static constexpr int beside(Left left, int groups) {
    const int sums = groups * kRowTiles * 512, rows = rows_bytes(left);
    return kOneUnit ? (sums > rows ? sums : rows) : sums + rows;
  }
  // In front of all that is what the threads keep for the end.
  static constexpr int kKept = kWarps * 32 * 6 * 4;
  static constexpr int bytes(Left left, int groups) { return kKept + kWarps * (kRing + beside(left, groups)); }
  // The groups of columns whose sums fit.
  static constexpr int most_groups(Left left) {
    return ((kMostShared - kKept) / kWarps - kRing - (kOneUnit ? 0 : rows_bytes(left))) / (kRowTiles * 512);
  }
};

// ---------------------------------------------------------------- the way of a warp
// Where a warp is in its share. The units of a rank are dealt to its warps in turns, so that they read pieces of a row
// that follow each other; a warp takes all groups of a unit. If the units of the last of several turns are at most half
// as many as the warps, 2, 4 or 8 warps share each of them, and its groups.
template <class S>
struct Walk {
  int unit, group, end, left;           // where it is; the end of its groups of this unit; full turns that are left
  int last_unit, last_group, last_end;  // in the last turn

  // How many warps share a unit of a turn of `rest` units, as the exponent of 2.
  __host__ __device__ static constexpr int sharing(int rest) {
    return (2 * rest <= S::kWarps) + (4 * rest <= S::kWarps) + (8 * rest <= S::kWarps);
  }

  __device__ __forceinline__ explicit Walk(const Share& share) : group(0) {
    const int groups = share.groups, warp = threadIdx.x / 32, first = share.unit(share.rank),
              units = share.unit(share.rank + 1) - first;
    left = S::kOneUnit ? 0 : units / S::kWarps, unit = first + warp, end = warp < units ? groups : 0;
    if (S::kOneUnit) return;
    const int rest = units - left * S::kWarps;
    const int bits = sharing(rest), part = warp & ((1 << bits) - 1);
    last_unit = first + left * S::kWarps + (warp >> bits), last_group = groups * part >> bits;
    last_end = warp >> bits < rest ? groups * (part + 1) >> bits : 0;
  }
  // Computes the last turn here, and not again where a warp waits for it.
  __device__ __forceinline__ void pin() {
    if (S::kOneUnit) return;
    last_unit = pin_register(last_unit), last_group = pin_register(last_group), last_end = pin_register(last_end);
  }
  // The first group of the next turn.
  __device__ __forceinline__ void next_turn() {
    unit += S::kWarps, group = 0;
    if (--left == 0) unit = last_unit, group = last_group, end = last_end;
    if (left < 0) end = 0;
  }
  __device__ __forceinline__ void next() {
    if (++group >= end) next_turn();
  }
  __device__ __forceinline__ bool over() const { return group >= end; }
};

// ---------------------------------------------------------------- a: the rows of one unit
// A lane has row lane / 4 of each 8, and in each 128 k the 32 from 32 * (lane % 4) on.
template <Left left, class S>
struct Rows {
  static constexpr bool kQuantized = left == Left::kNvfp4;
  static constexpr int kTiles = S::kRowTiles, kParts = S::kParts;
  using Fragments = uint32_t[kTiles][kParts][4][4];

  static constexpr bool kCopied = S::rows_bytes(left) > 0;
  static constexpr int kLoaded = 2 / kParts;  // rows of elements that a warp loads at a time

  const uint8_t* data;   // of this lane in the first unit: 16 bytes of its first row
  const uint8_t* scale;  // of the same
  int live, depth;       // rows that there are
  uint4 codes[kQuantized ? kTiles : 1][kParts];
  uint32_t scales[kQuantized ? kTiles : 1][kParts];

  __device__ __forceinline__ Rows(const MatmulArgs& g, int64_t row0, int rows)
      : live(rows), depth(static_cast<int>(g.shape.depth)) {
    const int lane = threadIdx.x % 32;
    const int64_t at =
        (row0 + (kQuantized ? lane / 4 : lane / (16 * kParts))) * (kQuantized ? depth >> 1 : int64_t{2} * depth) +
        lane % (kQuantized ? 4 : 16 * kParts) * 16;
    data = static_cast<const uint8_t*>(g.a.data) + at;
    scale = kQuantized ? g.a.scale + (at >> 3) : nullptr;
  }
  // 16-bit elements pass through a private buffer, since only whole rows are loaded at full speed. No bank conflicts.
  static __device__ __forceinline__ uint32_t chunk(uint32_t buffer, int row, int c) {
    return buffer + (row * 16 * kParts + (c ^ (c >> 3 & 1) ^ (row & 1) << 1)) * 16;
  }
  __device__ __forceinline__ void load(int unit, uint32_t buffer) {
    if constexpr (kQuantized)
      load_codes(unit);
    else
      load_elements(unit, buffer);
  }
  __device__ __forceinline__ void load_elements(int unit, uint32_t buffer) {
    const int lane = threadIdx.x % 32, c = lane % (16 * kParts), first = lane / (16 * kParts);
    const bool there = !S::kMasked || unit * S::kUnit + c * 8 < depth;
    const uint8_t* p = data + (there ? int64_t{unit} * (S::kUnit * 2) : -int64_t{c} * 16);
#pragma unroll
    for (int r = 0; r < kTiles * 8; r += kLoaded, p += int64_t{kLoaded * 2} * depth) {
      if (r + first >= live) continue;
      if constexpr (S::kMasked)
        copy16_or_zero(chunk(buffer, r + first, c), p, there);
      else
        copy16(chunk(buffer, r + first, c), p);
    }
  }
  __device__ __forceinline__ void load_codes(int unit) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint8_t* const p = data + (int64_t{n * 4} * depth + unit * (S::kUnit / 2));
      const uint8_t* const q = scale + (int64_t{n * 8} * (depth / kBlock) + unit * (S::kUnit / kBlock));
#pragma unroll
      for (int h = 0; h < kParts; ++h) {
        codes[n][h] = make_uint4(0, 0, 0, 0), scales[n][h] = 0;
        if (n * 8 + lane / 4 >= live) continue;
        if constexpr (S::kMasked) {
          const int k = unit * S::kUnit + h * 128 + lane % 4 * 32;
          load_block(p + h * 64, q + h * 8, k < depth, codes[n][h].x, codes[n][h].y, scales[n][h], 0);
          load_block(p + h * 64 + 8, q + h * 8 + 1, k + kBlock < depth, codes[n][h].z, codes[n][h].w, scales[n][h], 8);
        } else {
          codes[n][h] = load_global16(p + h * 64);
          scales[n][h] = __ldg(reinterpret_cast<const uint16_t*>(q + h * 8));
        }
      }
    }
  }
  static __device__ __forceinline__ void load_block(const uint8_t* p, const uint8_t* q, bool there, uint32_t& low,
                                                    uint32_t& high, uint32_t& two, int shift) {
    if (!there) return;
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
    low = v.x, high = v.y, two |= uint32_t{__ldg(q)} << shift;
  }
  __device__ __forceinline__ void fragments(uint32_t buffer, Fragments& b) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int h = 0; h < kParts; ++h) {
        if constexpr (kQuantized) {
          uint32_t s[2];
          DecodeFor<left>::scales(scales[n][h], s[0], s[1]);
          const uint32_t word[4] = {codes[n][h].x, codes[n][h].y, codes[n][h].z, codes[n][h].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) DecodeFor<left>::eight(word[i], s[i / 2], b[n][h][i]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            permute8(load_shared128(chunk(buffer, n * 8 + lane / 4, h * 16 + lane % 4 * 4 + i)), b[n][h][i]);
        }
      }
  }
};

// ---------------------------------------------------------------- b: the ring of a warp
// The groups of 16 columns of the result one after the other, then the same with the next unit of the warp. A column is
// a row of b; those that do not exist are read as the last one, and not written.
template <class S>
struct Ring {
  const uint8_t *data, *scale;       // of the first column of the CTA
  const uint8_t *low, *high, *thin;  // of this lane in the next stage: codes of columns g and g + 8; scales
  int wide, narrow;                  // bytes of a row of codes and of scales
  int last, depth;
  Walk<S> at;   // of the next stage
  uint32_t to;  // of this lane, in the next stage
  int both;     // the sum of its places in both stages
  bool ragged;

  __device__ __forceinline__ Ring(const MatmulArgs& g, const Share& share, uint32_t ring, const Walk<S>& start)
      : depth(static_cast<int>(g.shape.depth)), at(start) {
    const int lane = threadIdx.x % 32, cols = static_cast<int>(g.shape.cols), col0 = share.group0 * 16;
    const int64_t row0 = share.matrix * cols + col0;
    wide = depth >> 1, narrow = depth / kBlock;
    data = static_cast<const uint8_t*>(g.b.data) + row0 * wide, scale = g.b.scale + row0 * narrow;
    last = cols - 1 - col0, ragged = col0 + share.groups * 16 > cols;
    to = ring + lane * 16, both = static_cast<int>(2 * to + S::kStage);
    point();
  }
  __device__ __forceinline__ void pin(const Walk<S>& pinned) {
    both = pin_register(both);
    at.last_unit = pinned.last_unit, at.last_group = pinned.last_group, at.last_end = pinned.last_end;
  }
  __device__ __forceinline__ int row_of(int r) const { return min(at.group * 16 + r, last); }
  __device__ __forceinline__ void point() {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    low = data + int64_t{row_of(g)} * wide + (at.unit * (S::kUnit / 2) + t * 16);
    high = data + int64_t{row_of(g + 8)} * wide + (at.unit * (S::kUnit / 2) + t * 16);
    thin = scale + int64_t{row_of(lane % 16)} * narrow + at.unit * (S::kUnit / kBlock);
  }
  // Asks for the next stage, if there is one. Every call makes a group of copies.
  __device__ __forceinline__ void issue() {
    if (!at.over()) {
      if constexpr (S::kMasked)
        copy_masked();
      else
        copy();
      to = both - to;
    }
    commit_copies();
  }
  __device__ __forceinline__ void copy() {
    static_assert(S::kMasked || S::kParts == 2);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < S::kParts; ++h) copy16(to + h * 1024, low + h * 64), copy16(to + h * 1024 + 512, high + h * 64);
    if (lane < 16) copy16(to + S::kScales, thin);
    low += int64_t{16} * wide, high += int64_t{16} * wide, thin += int64_t{16} * narrow;
    if (++at.group == at.end || ragged) {
      if (!S::kOneUnit && at.group == at.end) at.next_turn();
      if (!at.over()) point();
    }
  }
  // By single blocks, since a row may start at any of them. The bytes of scales cannot be copied asynchronously.
  __device__ __forceinline__ void copy_masked() {
    static_assert(!S::kMasked || S::kParts == 1, "one part");
    const int lane = threadIdx.x % 32, k = at.unit * S::kUnit + lane % 4 * 32, block = at.unit * 8 + lane % 2 * 4;
    copy_blocks(to, row_of(lane / 4), k);
    copy_blocks(to + 512, row_of(lane / 4 + 8), k);
    const uint8_t* p = scale + int64_t{row_of(lane / 2)} * narrow;
    uint32_t four = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (block + i < narrow) four |= uint32_t{__ldg(p + block + i)} << (8 * i);
    store_shared4(to + S::kScales - lane * 12, four);
    at.next();
  }
  __device__ __forceinline__ void copy_blocks(uint32_t where, int row, int k) const {
    const uint8_t* p = data + int64_t{row} * wide;
#pragma unroll
    for (int i = 0; i < 2; ++i, k += kBlock) copy8_or_zero(where + i * 8, k < depth ? p + k / 2 : p, k < depth);
  }
};

// ---------------------------------------------------------------- the products of one stage
// d: for each 8 rows of a two chains of sums, so that an mma need not wait for the one before.
// codes, thin: of this lane in the stage.
template <Left left, class S>
__device__ __forceinline__ void multiply(uint32_t codes, uint32_t thin, const typename Rows<left, S>::Fragments& b,
                                         float (&d)[S::kRowTiles][2][4]) {
  using D = DecodeFor<left>;
#pragma unroll
  for (int h = 0; h < S::kParts; ++h) {
    const uint4 c0 = load_shared128(codes + h * 1024);
    const uint4 c1 = load_shared128(codes + h * 1024 + 512);
    uint32_t s0[2], s1[2];
    D::scales(load_shared2(thin + h * 8), s0[0], s0[1]);
    D::scales(load_shared2(thin + h * 8 + 64 * S::kParts), s1[0], s1[1]);
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

// Stores the sums of a group, or adds them to those of the units before.
template <int kTiles>
__device__ __forceinline__ void keep(uint32_t at, const float (&d)[kTiles][2][4], bool first) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n, at += 512) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = d[n][0][i] + d[n][1][i];
    if (!first) {
      const uint4 old = load_shared128(at);
      sum[0] += float_of(old.x), sum[1] += float_of(old.y), sum[2] += float_of(old.z), sum[3] += float_of(old.w);
    }
    store_shared16(at, make_uint4(bits_of(sum[0]), bits_of(sum[1]), bits_of(sum[2]), bits_of(sum[3])));
  }
}

// ---------------------------------------------------------------- the end
// Sums are kept by slots: what one lane has of 16 columns and 8 rows, which is rows 2t and 2t + 1 of columns g and g
// + 8.
template <Left left, class S, class Of>
struct Slot {
  const Args& a;
  Of of;
  int row, col;
  float alpha[2][2], bias[2];  // [column][row]

  template <class Share>
  __device__ __forceinline__ void place(const Share& share, int slot) {
    col = (share.group0 + slot / 32 / S::kRowTiles) * 16 + slot % 32 / 4;
    row = slot / 32 % S::kRowTiles * 8 + slot % 4 * 2;
  }
  // What the sums are to be multiplied by, and what is added. What does not exist has what the last row or column has.
  __device__ __forceinline__ void load() {
    const MatmulArgs& g = a.g;
    const int rows = of.rows(a), cols = static_cast<int>(g.shape.cols);
    float a_amax[2] = {}, b_amax[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = min(col + i * 8, cols - 1);
      b_amax[i] = i && !a.each_col ? b_amax[0] : amax_of(g.b, of.matrix * cols + c);
      bias[i] = g.result.bias ? load_float(g.result.bias, g.result.bias_kind, c) : 0.0f;
      if constexpr (left == Left::kNvfp4)
        a_amax[i] = i && !a.each_row ? a_amax[0] : amax_of(g.a, of.first_row(rows) + min(row + i, rows - 1));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        alpha[i][j] = i && !a.each_col       ? alpha[0][j]
                      : j && !a.each_row     ? alpha[i][0]
                      : left == Left::kNvfp4 ? alpha_w4a4(a_amax[j], b_amax[i], g.a.e4m3_max, g.b.e4m3_max)
                                             : alpha_w4a16(b_amax[i], g.b.e4m3_max);
  }
  // Shared memory has them while the thread needs its registers for products.
  __device__ __forceinline__ void keep(uint32_t at) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_shared(at + i * S::kWarps * 128, alpha[i / 2][i % 2]);
#pragma unroll
    for (int i = 0; i < 2; ++i) store_shared(at + (4 + i) * S::kWarps * 128, bias[i]);
  }
  __device__ __forceinline__ void take(uint32_t at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) alpha[i / 2][i % 2] = float_of(load_shared32(at + i * S::kWarps * 128));
#pragma unroll
    for (int i = 0; i < 2; ++i) bias[i] = float_of(load_shared32(at + (4 + i) * S::kWarps * 128));
  }
  // The sums are of decoded products. Undoing their power of two is exact, unless the product overflows as well.
  template <class T>
  __device__ __forceinline__ void store(const float (&sums)[4]) const {
    constexpr int kPower = DecodeFor<left>::kPower * (left == Left::kNvfp4 ? 2 : 1);
    const MatmulArgs& g = a.g;
    const int rows = of.rows(a), cols = static_cast<int>(g.shape.cols);
    auto* const out = static_cast<typename T::Stored*>(g.result.out) + (of.first_row(rows) + row) * cols + col;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (col + i / 2 * 8 < cols && row + i % 2 < rows)
        out[i % 2 * cols + i / 2 * 8] =
            T::store(gemm_epilogue(mul_rn(sums[i], static_cast<float>(1 << kPower)), alpha[i / 2][i % 2], bias[i / 2],
                                   g.result.bias != nullptr));
    }
  }
  __device__ __forceinline__ void store(const float (&sums)[4]) const {
    const Float kind = a.g.result.kind;
    if (kind == Float::kBf16)
      store<Bf16>(sums);
    else if (kind == Float::kF16)
      store<F16>(sums);
    else
      store<F32>(sums);
  }
};

__device__ __forceinline__ void add(float (&sums)[4], float4 v) {
  sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
}

// The slots of a thread: those of a cluster go to ranks and then to threads in turn.
template <class S>
struct SlotRange {
  int first, end, step;
  __device__ __forceinline__ explicit SlotRange(const Share& share)
      : first(static_cast<int>(threadIdx.x) << share.rank_bits | share.rank),
        end(share.groups * S::kRowTiles * 32),
        step(S::kWarps * 32 << share.rank_bits) {}
};

// What the first slot of a thread needs is looked up while the first columns are in flight, which is when there is
// time.
template <Left left, class S, class Share>
__device__ __forceinline__ void prepare_slots(const Args& a, const Share& share, uint32_t kept) {
  const SlotRange<S> range(share);
  if (range.first >= range.end) return;
  Slot<left, S, typename Share::Of> slot{a, share.of()};
  slot.place(share, range.first);
  slot.load();
  slot.keep(kept + threadIdx.x * 4);
}

// The sum of `live` warps in their order.
__device__ __forceinline__ void add_warps(float (&sum)[4], uint32_t at, int pitch, int live) {
#pragma unroll 8
  for (int w = 0; w < live; ++w) {
    const uint4 v = load_shared128(at + w * pitch);
    add(sum, make_float4(float_of(v.x), float_of(v.y), float_of(v.z), float_of(v.w)));
  }
}

// Adds the sums of warps, then those of ranks, in their order.
template <Left left, class S, class Share>
__device__ __forceinline__ void finish_slots(const Args& a, const Share& share, uint32_t kept, uint32_t sums, int pitch,
                                             int live) {
  const SlotRange<S> range(share);
  __syncthreads();
  if (share.ranks > 1) {  // each rank adds up its warps first, in the place of the first one
#pragma unroll 1
    for (int slot = threadIdx.x; slot < range.end; slot += S::kWarps * 32) {
      float s[4] = {};
      add_warps(s, sums + slot * 16, pitch, live);
      store_shared16(sums + slot * 16, make_uint4(bits_of(s[0]), bits_of(s[1]), bits_of(s[2]), bits_of(s[3])));
    }
    __syncwarp();
    cluster_sync();
  }
  uint32_t read = 0;  // of other CTAs
#pragma unroll 1
  for (int slot = range.first; slot < range.end; slot += range.step) {
    float s[4] = {};
    if (share.ranks == 1) {
      add_warps(s, sums + slot * 16, pitch, live);
    } else {
#pragma unroll 4
      for (int r = 0; r < share.ranks; ++r) add(s, load_from_rank(sums + slot * 16, r));
    }
#pragma unroll
    for (float sum : s) read |= bits_of(sum);
    Slot<left, S, typename Share::Of> of{a, share.of()};
    of.place(share, slot);
    if (slot == range.first)
      of.take(kept + threadIdx.x * 4);
    else
      of.load();
    of.store(s);
  }
  if (share.ranks > 1) {  // no CTA ends while another reads its sums
    // Of slots without a result too: the loads are over when an instruction uses them, here a store to the thread's
    // own place, which nobody reads any more.
    if (read == ~0u) store_shared4(kept + threadIdx.x * 4, read);
    __syncwarp();
    cluster_meet();
  }
}

// Grid: clusters along the columns; matrices. All rows of a, at most 8 * kRowTiles, are in one CTA.
template <Left left, class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1) sm90_small_m_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) uint8_t shared[];
  const MatmulArgs& g = a.g;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Share share(a);
  Walk<S> walk(share);
  const int pitch = S::beside(left, share.most);
  const uint32_t kept = shared_address(shared), rings = kept + S::kKept, sums = rings + S::kWarps * S::kRing;
  const uint32_t ring = rings + warp * S::kRing;
  const uint32_t own = sums + warp * pitch, own_sums = own + lane * 16;
  const uint32_t buffer = own + (S::kOneUnit ? 0 : share.groups * S::kRowTiles * 512);

  // The first loads are in flight before anything else is computed.
  wait_for_kernel_ahead();
  let_next_kernel_start();  // it waits for the end of this one
  Rows<left, S> rows(g, share.matrix * g.shape.rows, static_cast<int>(g.shape.rows));
  if (!walk.over()) rows.load(walk.unit, buffer);
  commit_copies();
  Ring<S> columns(g, share, ring, walk);
#pragma unroll
  for (int i = 0; i < S::kStages - 1; ++i) columns.issue();
  walk.pin(), columns.pin(walk);
  prepare_slots<left, S>(a, share, kept);

  typename Rows<left, S>::Fragments b;
  // Where this lane has codes in the stage, which changes between two places, and how far behind it has scales.
  int codes = pin_register(static_cast<int>(ring + lane * 16));
  const int both = pin_register(2 * codes + S::kStage);
  const int thin = pin_register(S::kScales - lane * 16 + lane / 4 * (8 * S::kParts) + lane % 4 * 2);
  const int live = min(S::kWarps, share.unit(share.rank + 1) - share.unit(share.rank));
  int taken = S::kStages;  // steps since the rows of this unit were asked for
  bool first = true;
#pragma unroll 1
  while (!walk.over()) {
    constexpr bool kCopied = Rows<left, S>::kCopied;
    if constexpr (kCopied) {
      // With few groups the rows of a later unit have come with one of the last stages.
      if (S::kOneUnit || taken >= S::kStages)
        wait_for_copies<S::kStages - 1>();
      else
        wait_for_copies<0>();
      __syncwarp();
    }
    rows.fragments(buffer, b);
    if constexpr (kCopied) __syncwarp();
    uint32_t at = own_sums + walk.group * (S::kRowTiles * 512);
    int steps = walk.end - walk.group;
    taken = steps;
    if constexpr (!S::kOneUnit) {
      walk.next_turn();
      if (!walk.over()) rows.load(walk.unit, buffer);
    }
#pragma unroll 1
    for (; steps > 0; --steps) {
      wait_for_copies<S::kStages - 2>();
      __syncwarp();
      columns.issue();
      float d[S::kRowTiles][2][4] = {};
      multiply<left, S>(codes, codes + thin, b, d);
      keep(at, d, S::kOneUnit || first);
      at += S::kRowTiles * 512, codes = both - codes;
    }
    first = false;
    if constexpr (S::kOneUnit) break;
  }
  finish_slots<left, S>(a, share, kept, sums, pitch, live);
}

// ---------------------------------------------------------------- launch
// Into how many tiles of columns to divide a product, where clusters of 2^bits CTAs divide K.
struct Division {
  int bits, groups, tiles, units;
  int64_t cost;  // in steps of a warp

  int most() const { return (groups + tiles - 1) / tiles; }  // groups of a tile
};

// The clusters that a device has room for. Those of four and eight do not find room on every SM.
inline int64_t clusters_at_once(int bits) {
  const int processors = multiprocessors();
  return std::max((bits > 1 ? processors - processors / 8 : processors) >> bits, 1);
}

template <Left left, class S>
Division divide(const GemmShape& shape, int bits) {
  const int groups = static_cast<int>((shape.cols + 15) / 16), most = S::most_groups(left);
  const int units = static_cast<int>((shape.depth + S::kUnit - 1) / S::kUnit);
  // As few tiles as fill every SM equally often.
  const int64_t at_once = clusters_at_once(bits), least = (groups + most - 1) / most;
  const int64_t waves = (least * shape.batch + at_once - 1) / at_once;
  const auto tiles = std::min<int64_t>(groups, std::max(least, waves * at_once / shape.batch));
  Division d{bits, groups, static_cast<int>(tiles), units, 0};
  const int mine = (units + (1 << bits) - 1) >> bits, turns = mine / S::kWarps, rest = mine % S::kWarps;
  const int shared = turns && rest ? Walk<S>::sharing(rest) : 0;
  const int steps = d.most() * turns + (rest ? (d.most() + (1 << shared) - 1) >> shared : 0);
  constexpr int kStart = 3;  // what the start and the end of a CTA take; rows of a take one step
  d.cost = (tiles * shape.batch + at_once - 1) / at_once * (steps + turns + (rest != 0) + kStart);
  return d;
}

template <Left left, class S>
cudaError_t launch_shape(const MatmulArgs& g, const Division& d, cudaStream_t stream) {
  const Args args{g,
                  0,
                  d.units,
                  d.bits,
                  d.groups / d.tiles,
                  d.groups % d.tiles,
                  left == Left::kNvfp4 && g.a.map.rows_per_amax % g.shape.rows != 0,
                  g.b.map.rows_per_amax % g.shape.cols != 0};
  return launch_clusters(sm90_small_m_kernel<left, S>, args, d.tiles, S::kWarps * 32, S::bytes(left, d.most()), stream);
}

// Clusters of two where they take no more steps, since each of their CTAs reads half of a. Few columns leave
// SMs free, so clusters of four or eight may divide K too. One: for the K of which a warp has one unit.
template <Left left, class One, class Any>
cudaError_t launch_best(const MatmulArgs& g, cudaStream_t stream) {
  const auto one = [&](int bits) { return g.shape.depth <= int64_t{One::kUnit} * One::kWarps << bits; };
  Division best{};
  for (int bits = 0; bits < 4; ++bits) {
    const Division d = one(bits) ? divide<left, One>(g.shape, bits) : divide<left, Any>(g.shape, bits);
    if (bits && 1 << bits > d.units) break;
    if (bits > 1 && d.groups * g.shape.batch > clusters_at_once(bits)) break;
    if (!bits || d.cost <= best.cost) best = d;
  }
  return one(best.bits) ? launch_shape<left, One>(g, best, stream) : launch_shape<left, Any>(g, best, stream);
}

template <Left left>
cudaError_t launch(const MatmulArgs& g, cudaStream_t stream) {
  using Masked = Shape<2, 1, 2, Depth::kAny>;
  if (g.shape.depth % 256) return launch_best<left, Masked, Masked>(g, stream);
  if (g.shape.rows <= 8)
    return launch_best<left, Shape<1, 2, 2, Depth::kOneUnit>, Shape<1, 2, 2, Depth::kUnits>>(g, stream);
  return launch_best<left, Shape<2, 2, 2, Depth::kOneUnit>, Shape<2, 2, 2, Depth::kUnits, 12>>(g, stream);
}

}  // namespace jnvfp4::small_m
