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

#include "../../../plan/matmul.h"
#include "../decode.cuh"
#include "../launchers.h"
#include "launch.cuh"
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

// ---------------------------------------------------------------- PTX
__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
// Copies 16 or 8 bytes, or zeros; `from` is a valid address either way.
__device__ __forceinline__ void copy16_or_zero(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void copy8_or_zero(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid ? 8 : 0));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Loads from the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ float4 load_from_rank(uint32_t address, int rank) {
  float4 v;
  asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %4, %5; ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [a];}"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address), "r"(rank));
  return v;
}

__device__ __forceinline__ void store_shared128(uint32_t dst, const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(dst), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}
__device__ __forceinline__ void store_shared32(uint32_t dst, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(dst), "r"(v) : "memory");
}
// Loads where it is written: the compiler would move a plain load down to its use.
__device__ __forceinline__ uint4 load_global16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

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

// ---------------------------------------------------------------- launches
constexpr int kMaxShared = 227 << 10;  // bytes that a CTA of Hopper may have

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

// ---------------------------------------------------------------- a: the rows of one unit
// Loads rows of a, to fragments. A lane has row lane / 4 of each 8, and in each 128 k the 32 from 32 * (lane % 4) on.
template <Left left, class S>
struct RowLoader {
  static constexpr bool kQuantized = left == Left::kNvfp4;
  static constexpr int kTiles = S::kRowTiles, kChunks = S::kChunks;
  using Fragments = uint32_t[kTiles][kChunks][4][4];

  static constexpr bool kCopied = S::rows_bytes(left) > 0;
  static constexpr int kLoaded = 2 / kChunks;  // rows of elements that a warp loads at a time

  const uint8_t *data, *scale;  // addresses of this lane's first row in the first unit: 16 bytes, and their scales
  int valid_rows, depth;        // other rows are masked
  uint4 codes[kQuantized ? kTiles : 1][kChunks];
  uint32_t scales[kQuantized ? kTiles : 1][kChunks];
  float factor;  // of the norm of row `lane`

  __device__ __forceinline__ RowLoader(const MatmulArgs& g, int64_t row0, int rows)
      : valid_rows(rows), depth(static_cast<int>(g.shape.depth)) {
    const int lane = threadIdx.x % 32;
    const int64_t offset =
        (row0 + (kQuantized ? lane / 4 : lane / (16 * kChunks))) * (kQuantized ? depth >> 1 : int64_t{2} * depth) +
        lane % (kQuantized ? 4 : 16 * kChunks) * 16;
    data = static_cast<const uint8_t*>(g.a.data) + offset;
    scale = kQuantized ? g.a.scale + (offset >> 3) : nullptr;
  }
  // Address in the warp's buffer of 16-bit elements, since only whole rows are loaded fast. No bank conflicts.
  static __device__ __forceinline__ uint32_t buffer_address(uint32_t buffer, int row, int c) {
    return buffer + (row * 16 * kChunks + (c ^ (c >> 3 & 1) ^ (row & 1) << 1)) * 16;
  }
  __device__ __forceinline__ void load(int unit, uint32_t buffer) {
    if constexpr (kQuantized)
      load_codes(unit);
    else
      load_elements(unit, buffer);
  }
  __device__ __forceinline__ void load_elements(int unit, uint32_t buffer) {
    const int lane = threadIdx.x % 32, c = lane % (16 * kChunks), first = lane / (16 * kChunks);
    const bool valid = !S::kMasked || unit * S::kUnit + c * 8 < depth;
    const uint8_t* p = data + (valid ? int64_t{unit} * (S::kUnit * 2) : -int64_t{c} * 16);
#pragma unroll
    for (int r = 0; r < kTiles * 8; r += kLoaded, p += int64_t{kLoaded * 2} * depth) {
      if (r + first >= valid_rows) continue;
      if constexpr (S::kMasked)
        copy16_or_zero(buffer_address(buffer, r + first, c), p, valid);
      else
        copy16(buffer_address(buffer, r + first, c), p);
    }
  }
  // Sum of squares of 8 elements.
  static __device__ __forceinline__ float squares(uint4 v) {
    using T = std::conditional_t<left == Left::kF16, F16, Bf16>;
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = low_half<T>(word[i]), high = high_half<T>(word[i]);
      even = __fmaf_rn(low, low, even), odd = __fmaf_rn(high, high, odd);
    }
    return even + odd;
  }
  // Finds `factor` from the rows of all warps. `at`: kSquaresBytes of shared memory.
  __device__ __forceinline__ void find_factors(const MatmulArgs& g, int64_t row0, bool has_unit, bool whole_rows,
                                               uint32_t buffer, uint32_t at) {
    constexpr int kRows = kTiles * 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (S::kOneUnit && whole_rows) {  // the warps have all of K in their buffers: each lane reads what it has copied
      wait_for_copies<S::kStages - 1>();
#pragma unroll 4
      for (int r = 0; r < valid_rows; ++r) {
        const float sum = warp_sum(has_unit ? squares(load_shared128(buffer_address(buffer, r, lane))) : 0.0f);
        if (lane == 0) store_shared(at + (warp * kRows + r) * 4, sum);
      }
    } else {
      const uint4* row = static_cast<const uint4*>(g.a.data) + row0 * (depth / 8);
#pragma unroll 2
      for (int r = 0; r < valid_rows; ++r, row += depth / 8) {
        float sum = 0.0f;
#pragma unroll 2
        for (int c = threadIdx.x; c < depth / 8; c += S::kWarps * 32) sum += squares(__ldg(row + c));
        sum = warp_sum(sum);
        if (lane == 0) store_shared(at + (warp * kRows + r) * 4, sum);
      }
    }
    __syncthreads();
    float sum = 0.0f;
    if (lane < valid_rows)
#pragma unroll
      for (int w = 0; w < S::kWarps; ++w) sum += float_of(load_shared32(at + (w * kRows + lane) * 4));
    factor = __frsqrt_rn(add_rn(__fdiv_rn(sum, static_cast<float>(depth)), g.norm.epsilon));
  }
  static __device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) v += __shfl_xor_sync(0xffffffffu, v, i);
    return v;
  }
  // Gains of the 8 elements that this lane copies of each row of a unit.
  struct Gains {
    uint4 word[2];
    __device__ __forceinline__ void load(const RowNorm& norm, int unit) {
      static_assert(!S::kNorm || (kChunks == 2 && !S::kMasked), "a lane copies 8 elements of a row");
      const int64_t k = unit * S::kUnit + threadIdx.x % 32 * 8;
      const bool wide = norm.kind == Float::kF32;
      const auto* p = static_cast<const uint8_t*>(norm.gain) + k * (wide ? 4 : 2);
      word[0] = load_global16(p), word[1] = load_global16(p + (wide ? 16 : 0));
    }
    __device__ __forceinline__ void values(const RowNorm& norm, float (&v)[8]) const {
      const uint32_t w[8] = {word[0].x, word[0].y, word[0].z, word[0].w, word[1].x, word[1].y, word[1].z, word[1].w};
      const bool wide = norm.kind == Float::kF32;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        v[i] = wide                        ? float_of(w[i])
               : norm.kind == Float::kBf16 ? half_of<Bf16>(w[i / 2], i % 2)
                                           : half_of<F16>(w[i / 2], i % 2);
    }
  };
  // Normalizes the rows in the buffer, each lane what it has copied.
  __device__ __forceinline__ void normalize(const RowNorm& norm, const Gains& gains, uint32_t buffer) const {
    using T = std::conditional_t<left == Left::kF16, F16, Bf16>;
    float gain[8];
    gains.values(norm, gain);
#pragma unroll 2
    for (int r = 0; r < valid_rows; ++r) {
      const float f = __shfl_sync(0xffffffffu, factor, r);
      const uint32_t at = buffer_address(buffer, r, threadIdx.x % 32);
      const uint4 v = load_shared128(at);
      const uint32_t word[4] = {v.x, v.y, v.z, v.w};
      uint32_t out[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = mul_rn(mul_rn(low_half<T>(word[i]), f), gain[2 * i]);
        const float high = mul_rn(mul_rn(high_half<T>(word[i]), f), gain[2 * i + 1]);
        out[i] = left == Left::kF16 ? f16_pair(low, high) : bf16_pair(low, high);
      }
      store_shared128(at, out);
    }
  }
  __device__ __forceinline__ void load_codes(int unit) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint8_t* const p = data + (int64_t{n * 4} * depth + unit * (S::kUnit / 2));
      const uint8_t* const q = scale + (int64_t{n * 8} * (depth / kBlock) + unit * (S::kUnit / kBlock));
#pragma unroll
      for (int h = 0; h < kChunks; ++h) {
        codes[n][h] = make_uint4(0, 0, 0, 0), scales[n][h] = 0;
        if (n * 8 + lane / 4 >= valid_rows) continue;
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
  static __device__ __forceinline__ void load_block(const uint8_t* p, const uint8_t* q, bool valid, uint32_t& low,
                                                    uint32_t& high, uint32_t& two, int shift) {
    if (!valid) return;
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
    low = v.x, high = v.y, two |= uint32_t{__ldg(q)} << shift;
  }
  __device__ __forceinline__ void fragments(uint32_t buffer, Fragments& b) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int h = 0; h < kChunks; ++h) {
        if constexpr (kQuantized) {
          uint32_t s[2];
          DecodeFor<left>::scales(scales[n][h], s[0], s[1]);
          const uint32_t word[4] = {codes[n][h].x, codes[n][h].y, codes[n][h].z, codes[n][h].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) DecodeFor<left>::eight(word[i], s[i / 2], b[n][h][i]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            permute8(load_shared128(buffer_address(buffer, n * 8 + lane / 4, h * 16 + lane % 4 * 4 + i)), b[n][h][i]);
        }
      }
  }
};

// ---------------------------------------------------------------- b: the ring of a warp
// Private 2-stage ring of a warp: a stage is a group of 16 columns of the result in a unit, groups ascending, then
// units. A column is a row of b; columns past the end are read as the last one, and masked in the epilogue.
template <class S>
struct ColumnRing {
  const uint8_t *data, *scale;                        // of the first column of the CTA
  const uint8_t *codes_low, *codes_high, *scale_ptr;  // of this lane in the next stage: codes of columns g and g + 8
  int code_row_bytes, scale_row_bytes;
  int last_col, depth;
  WarpSchedule<S> next;  // position of the next stage
  uint32_t dst;          // of this lane in the next stage
  int toggle_sum;        // sum of its addresses in both stages
  bool ragged;

  __device__ __forceinline__ ColumnRing(const MatmulArgs& g, const CtaWork& work, uint32_t ring,
                                        const WarpSchedule<S>& start)
      : depth(static_cast<int>(g.shape.depth)), next(start) {
    const int lane = threadIdx.x % 32, cols = static_cast<int>(g.shape.cols), col0 = work.first_group * 16;
    const int64_t row0 = work.matrix * cols + col0;
    code_row_bytes = depth >> 1, scale_row_bytes = depth / kBlock;
    data = static_cast<const uint8_t*>(g.b.data) + row0 * code_row_bytes;
    scale = g.b.scale + row0 * scale_row_bytes;
    last_col = cols - 1 - col0, ragged = col0 + work.groups * 16 > cols;
    dst = ring + lane * 16, toggle_sum = static_cast<int>(2 * dst + S::kStage);
    set_pointers();
  }
  __device__ __forceinline__ void pin(const WarpSchedule<S>& pinned) {
    toggle_sum = pin_register(toggle_sum);
    next.last_unit = pinned.last_unit, next.last_group = pinned.last_group, next.last_end = pinned.last_end;
  }
  __device__ __forceinline__ int row_of(int r) const { return min(next.group * 16 + r, last_col); }
  __device__ __forceinline__ void set_pointers() {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    codes_low = data + int64_t{row_of(g)} * code_row_bytes + (next.unit * (S::kUnit / 2) + t * 16);
    codes_high = data + int64_t{row_of(g + 8)} * code_row_bytes + (next.unit * (S::kUnit / 2) + t * 16);
    scale_ptr = scale + int64_t{row_of(lane % 16)} * scale_row_bytes + next.unit * (S::kUnit / kBlock);
  }
  // Starts the copies of the next stage, if there is one. Every call makes a cp.async group.
  __device__ __forceinline__ void issue() {
    if (!next.done()) {
      if constexpr (S::kMasked)
        copy_masked();
      else
        copy();
      dst = toggle_sum - dst;
    }
    commit_copies();
  }
  __device__ __forceinline__ void copy() {
    static_assert(S::kMasked || S::kChunks == 2);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < S::kChunks; ++h)
      copy16(dst + h * 1024, codes_low + h * 64), copy16(dst + h * 1024 + 512, codes_high + h * 64);
    if (lane < 16) copy16(dst + S::kScales, scale_ptr);
    codes_low += int64_t{16} * code_row_bytes, codes_high += int64_t{16} * code_row_bytes,
        scale_ptr += int64_t{16} * scale_row_bytes;
    if (++next.group == next.end || ragged) {
      if (!S::kOneUnit && next.group == next.end) next.next_round();
      if (!next.done()) set_pointers();
    }
  }
  // Copies single blocks, since a row may start at any of them. The bytes of scales cannot be copied asynchronously.
  __device__ __forceinline__ void copy_masked() {
    static_assert(!S::kMasked || S::kChunks == 1, "one chunk");
    const int lane = threadIdx.x % 32, k = next.unit * S::kUnit + lane % 4 * 32, block = next.unit * 8 + lane % 2 * 4;
    copy_blocks(dst, row_of(lane / 4), k);
    copy_blocks(dst + 512, row_of(lane / 4 + 8), k);
    const uint8_t* p = scale + int64_t{row_of(lane / 2)} * scale_row_bytes;
    uint32_t four = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (block + i < scale_row_bytes) four |= uint32_t{__ldg(p + block + i)} << (8 * i);
    store_shared32(dst + S::kScales - lane * 12, four);
    next.next();
  }
  __device__ __forceinline__ void copy_blocks(uint32_t dst_bytes, int row, int k) const {
    const uint8_t* p = data + int64_t{row} * code_row_bytes;
#pragma unroll
    for (int i = 0; i < 2; ++i, k += kBlock) copy8_or_zero(dst_bytes + i * 8, k < depth ? p + k / 2 : p, k < depth);
  }
};

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

// ---------------------------------------------------------------- epilogue
// Slot: the four sums that one lane has of 16 columns and 8 rows, rows 2t and 2t + 1 of columns g and g + 8.
template <Left left, class S, class ResultRows>
struct EpilogueSlot {
  static constexpr int kBiasRows = S::kResidual ? 2 : 1;

  const Args& a;
  ResultRows result_rows;
  int row, col;
  float a_amax[2], b_amax[2];
  uint32_t bias_bits[2][kBiasRows];
  float alpha[2][2], bias[2][kBiasRows];  // [column][row]

  __device__ __forceinline__ void locate(const CtaWork& work, int slot) {
    col = (work.first_group + slot / 32 / S::kRowTiles) * 16 + slot % 32 / 4;
    row = slot / 32 % S::kRowTiles * 8 + slot % 4 * 2;
  }
  // Loads amaxes and biases; rows and columns past the end get those of the last one. With a residual there are more
  // loads, and none is waited for: what is loaded is neither converted nor copied here.
  __device__ __forceinline__ void load() {
    const MatmulArgs& g = a.g;
    const int rows = result_rows.num_rows(a), cols = static_cast<int>(g.shape.cols);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = min(col + i * 8, cols - 1);
      b_amax[i] = i && !a.amax_per_col ? again(b_amax[0]) : amax_of(g.b, result_rows.matrix * cols + c);
      if constexpr (!S::kResidual)
        bias[i][0] = g.result.bias ? load_float(g.result.bias, g.result.bias_kind, c) : 0.0f;
      else if (g.result.bias)
#pragma unroll
        for (int j = 0; j < 2; ++j) bias_bits[i][j] = load_bias(min(row + j, rows - 1), c);
      if constexpr (left == Left::kNvfp4)
        a_amax[i] = i && !a.amax_per_row ? again(a_amax[0])
                                         : amax_of(g.a, result_rows.first_row(rows) + min(row + i, rows - 1));
    }
  }
  // The first amax again, which convert() does not read.
  static __device__ __forceinline__ float again(float amax) { return S::kResidual ? 0.0f : amax; }
  __device__ __forceinline__ uint32_t load_bias(int r, int c) const {
    const MatmulResult& result = a.g.result;
    const int64_t first_row = result_rows.first_row(result_rows.num_rows(a));
    const int64_t i = result.whole_bias ? (first_row + r) * a.g.shape.cols + c : c;
    const auto* p = static_cast<const uint16_t*>(result.bias);
    return result.bias_kind == Float::kF32 ? *reinterpret_cast<const uint32_t*>(p + i * 2) : p[i];
  }
  __device__ __forceinline__ float bias_of(uint32_t bits) const {
    const Float kind = a.g.result.bias_kind;
    return kind == Float::kF32 ? float_of(bits) : kind == Float::kBf16 ? float_of(bits << 16) : F16::load(bits);
  }
  // Makes what the epilogue needs of what has been loaded.
  __device__ __forceinline__ void convert() {
    const MatmulArgs& g = a.g;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if constexpr (S::kResidual) bias[i][j] = g.result.bias ? bias_of(bias_bits[i][j]) : 0.0f;
        alpha[i][j] = i && !a.amax_per_col   ? alpha[0][j]
                      : j && !a.amax_per_row ? alpha[i][0]
                      : left == Left::kNvfp4 ? alpha_w4a4(a_amax[j], b_amax[i], g.a.e4m3_max, g.b.e4m3_max)
                                             : alpha_w4a16(b_amax[i], g.b.e4m3_max);
      }
  }
  // Save the operands in shared memory while the thread needs its registers for the mainloop, and restore them.
  __device__ __forceinline__ void save(uint32_t dst) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_shared(dst + i * S::kWarps * 128, alpha[i / 2][i % 2]);
#pragma unroll
    for (int i = 0; i < 2 * kBiasRows; ++i)
      store_shared(dst + (4 + i) * S::kWarps * 128, bias[i / kBiasRows][i % kBiasRows]);
  }
  __device__ __forceinline__ void restore(uint32_t src) {
#pragma unroll
    for (int i = 0; i < 4; ++i) alpha[i / 2][i % 2] = float_of(load_shared32(src + i * S::kWarps * 128));
#pragma unroll
    for (int i = 0; i < 2 * kBiasRows; ++i)
      bias[i / kBiasRows][i % kBiasRows] = float_of(load_shared32(src + (4 + i) * S::kWarps * 128));
  }
  // Stores sums of decoded numbers. Undoing their power of two is exact, unless the result overflows as well.
  template <class T>
  __device__ __forceinline__ void store(const float (&sums)[4]) const {
    constexpr int kPower = DecodeFor<left>::kPower * (left == Left::kNvfp4 ? 2 : 1);
    const MatmulArgs& g = a.g;
    const int rows = result_rows.num_rows(a), cols = static_cast<int>(g.shape.cols);
    auto* const out = static_cast<typename T::Stored*>(g.result.out) + (result_rows.first_row(rows) + row) * cols + col;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (col + i / 2 * 8 < cols && row + i % 2 < rows)
        out[i % 2 * cols + i / 2 * 8] =
            T::store(gemm_epilogue(mul_rn(sums[i], static_cast<float>(1 << kPower)), alpha[i / 2][i % 2],
                                   bias[i / 2][i % kBiasRows], g.result.bias != nullptr));
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

// Slots of a thread: those of a cluster go to ranks and then to threads round-robin.
template <class S>
struct SlotRange {
  int first, end, step;
  __device__ __forceinline__ explicit SlotRange(const CtaWork& work)
      : first(static_cast<int>(threadIdx.x) << work.log2_ranks | work.rank),
        end(work.groups * S::kRowTiles * 32),
        step(S::kWarps * 32 << work.log2_ranks) {}
};

// Loads the operands of the thread's first slot, to be called while the first columns are in flight; `between` runs
// while they are in flight themselves.
template <Left left, class S, class Work, class Between>
__device__ __forceinline__ void prefetch_epilogue(const Args& a, const Work& work, uint32_t epilogue_smem,
                                                  const Between& between) {
  const SlotRange<S> range(work);
  EpilogueSlot<left, S, typename Work::ResultRows> slot{a, work.result_rows()};
  slot.locate(work, range.first);
  if (range.first < range.end) slot.load();
  between();
  if (range.first >= range.end) return;
  slot.convert();
  slot.save(epilogue_smem + threadIdx.x * 4);
}
template <Left left, class S, class Work>
__device__ __forceinline__ void prefetch_epilogue(const Args& a, const Work& work, uint32_t epilogue_smem) {
  prefetch_epilogue<left, S>(a, work, epilogue_smem, [] {});
}

// Adds the sums of the active warps in their order.
__device__ __forceinline__ void add_warps(float (&sum)[4], uint32_t src, int pitch, int active_warps) {
#pragma unroll 8
  for (int w = 0; w < active_warps; ++w) {
    const uint4 v = load_shared128(src + w * pitch);
    add(sum, make_float4(float_of(v.x), float_of(v.y), float_of(v.z), float_of(v.w)));
  }
}

// Adds the sums of warps, then those of ranks, in their order, and stores the results.
template <Left left, class S, class Work>
__device__ __forceinline__ void run_epilogue(const Args& a, const Work& work, uint32_t epilogue_smem, uint32_t sums,
                                             int pitch, int active_warps) {
  const SlotRange<S> range(work);
  __syncthreads();
  if (work.ranks > 1) {  // each rank adds up its warps first, into the sums of its first warp
#pragma unroll 1
    for (int slot_idx = threadIdx.x; slot_idx < range.end; slot_idx += S::kWarps * 32) {
      float s[4] = {};
      add_warps(s, sums + slot_idx * 16, pitch, active_warps);
      store_shared128(sums + slot_idx * 16, {bits_of(s[0]), bits_of(s[1]), bits_of(s[2]), bits_of(s[3])});
    }
    __syncwarp();
    cluster_sync();
  }
  uint32_t bits_read = 0;  // from other CTAs
#pragma unroll 1
  for (int slot_idx = range.first; slot_idx < range.end; slot_idx += range.step) {
    float s[4] = {};
    if (work.ranks == 1) {
      add_warps(s, sums + slot_idx * 16, pitch, active_warps);
    } else {
#pragma unroll 4
      for (int r = 0; r < work.ranks; ++r) add(s, load_from_rank(sums + slot_idx * 16, r));
    }
#pragma unroll
    for (float sum : s) bits_read |= bits_of(sum);
    EpilogueSlot<left, S, typename Work::ResultRows> slot{a, work.result_rows()};
    slot.locate(work, slot_idx);
    if (slot_idx == range.first)
      slot.restore(epilogue_smem + threadIdx.x * 4);
    else
      slot.load(), slot.convert();
    slot.store(s);
  }
  if (work.ranks > 1) {  // no CTA ends while another reads its sums
    // Loads of masked slots must end too. They have when an instruction uses them, here a store to the thread's own
    // saved operands, which nobody reads any more.
    if (bits_read == ~0u) store_shared32(epilogue_smem + threadIdx.x * 4, bits_read);
    __syncwarp();
    cluster_meet();
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
