// How the GEMM of few rows (small_m.cuh) loads its operands: rows of a to fragments, columns of b through rings.
#pragma once

#include "small_m_work.cuh"

namespace jnvfp4::small_m {

// ---------------------------------------------------------------- copies
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

// Loads where it is written: the compiler would move a plain load down to its use.
__device__ __forceinline__ uint4 load_global16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

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

}  // namespace jnvfp4::small_m
