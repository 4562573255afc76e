// a b^T of two NVFP4 operands in the pinned order of docs/numerics.md, for few rows of a ("tokens"). "Pinned" means
// that the order of sums is fixed, so that results are the same bitwise.
//
// That order allows no split-K, so an mma warp has 16 rows of b and up to 64 tokens for all of K, and does as little as
// it can for a block of 16: one mma m16n8k16 of float16 per 8 tokens, and one FMA per output. A and B of the mma are
// swapped: b is the operand of 16 rows, and is decoded in registers, once for all tokens of the warp. Other warps copy
// and decode.
//
// These are the rule's bits. A decoded token is q s 2^-14, and that of b q 2^-14: multiples of 2^-24 and 2^-15 with at
// most 6 and 2 significant bits, so float16 holds them exactly. With s_a = c 2^e, c below 16, the 16 products of a
// block are multiples of c 2^(e - 30), and so is each of their partial sums, of at most 16 * 144 times that: at most 16
// bits. A tensor core adds with the precision of float32 at least, so in any order it makes s_a dot16 2^-28 exactly.
// Times s_b that has 20 bits, so the FMA is fl(y + s_a s_b dot16), with everything times 2^-28. Nothing comes near the
// ends of float32's range: nonzero magnitudes are from 2^-48 to 36 K 448^2 2^-28. The epilogue takes 2^-28 back,
// exactly. y starts as +0 and is never -0, so signs of zeros do not matter. A NaN scale of a makes its token's 16
// elements NaN, one of b the factor.
// The order of k in a block is free: lane t of four has the t-th quarter of the block in both operands.
#include "../decode.cuh"
#include "nvfp4_blocks.cuh"

namespace jnvfp4 {
namespace {

// Roles of warps: decode warps, in one or two teams that alternate, copy warps, mma warps. Registers suffice for 12.
constexpr int kDecodeWarps = 4, kMaxCopyWarps = 4, kAllWarps = 12;
constexpr int kMaxMmaWarps = 7, kMaxCols = 16 * kMaxMmaWarps;  // rows of b, which are columns of the result
constexpr int kMaxThreads = 32 * kAllWarps;
constexpr int kWindowCodes = kWindow / 2;
constexpr float kUnit = 0x1p28f;

// Tiles, rings and shared memory of a CTA. Tokens are in tiles of 8.
template <int kTiles_, bool kWindows_>
struct Config {
  static constexpr int kTiles = kTiles_, kTokens = 8 * kTiles;
  static constexpr bool kWindows = kWindows_;
  static constexpr int kTeams = kWindows ? 1 : 2, kTeamThreads = 32 * kDecodeWarps / kTeams;
  static constexpr bool kShort = kTiles == 8 || (kTiles == 4 && kWindows);
  static constexpr int kDepth = kShort ? 2 : 4;                     // windows of 64 along K in a stage
  static constexpr int kStages = kTiles == 4 && !kWindows ? 5 : 7;  // of the raw ring
  static constexpr int kDecodedStages = kTiles < 4 || (kTiles == 4 && kWindows) ? 4 : 3;  // of the decoded ring
  // Barriers have one phase bit: a warp must not be more than one trip round the ring ahead.
  static_assert(kTeams <= kDecodedStages && kMaxCopyWarps <= kStages);
  static constexpr int kPairs = kDepth * kWindowBlocks / 2;  // pairs of blocks
  static constexpr int kParts = kDepth * kWindowCodes / 16;  // 16-byte parts of a row's codes
  // Row of a stage: codes, then scales. 8 rows have no bank conflicts.
  static constexpr int kScales = kDepth * kWindowCodes, kPitch = (kScales + kDepth * kWindowBlocks + 15) / 16 * 16;
  static constexpr int kFragments = kPairs * kTiles * 32 * 16;  // bytes
  // Register ring of mma results: each is added kLag tiles later, which hides the latency of the mma.
  static constexpr int kRing = kTiles >= 4 ? 8 : 4, kLag = kTiles >= 4 ? 6 : kTiles + 1;

  // Bytes of shared memory.
  static constexpr int kBarrierBytes = 256;
  static __host__ __device__ constexpr int rows(int cols) { return kTokens + cols; }
  static __host__ __device__ constexpr int stage_bytes(int cols) {
    return rows(cols) * (kPitch + (kWindows ? 4 * kDepth : 0));
  }
  static __host__ __device__ constexpr int decoded_bytes(int cols) { return kFragments + kDepth * cols * 16 + 16; }
  static __host__ __device__ constexpr int bytes(int cols) {
    return kBarrierBytes + kStages * stage_bytes(cols) + kDecodedStages * decoded_bytes(cols);
  }
};

// Raw stage, as copied: rows of tokens, then of b, each codes and scales; then amaxes of windows.
template <class C>
struct RawStage {
  uint8_t* at;
  int cols;
  __device__ __forceinline__ uint8_t* token(int i) const { return at + i * C::kPitch; }
  __device__ __forceinline__ uint8_t* col(int i) const { return token(C::kTokens + i); }
  __device__ __forceinline__ float* amax(int window) const {
    return reinterpret_cast<float*>(at + C::rows(cols) * C::kPitch) + window * C::rows(cols);
  }
};
// Decoded stage: per pair of blocks and tile of 8 tokens, fragments of 32 lanes, the right operand of an mma for either
// block; per window and row of b, the scales of four blocks as floats.
template <class C>
struct DecodedStage {
  uint8_t* at;
  int cols;
  __device__ __forceinline__ uint4* fragments(int pair, int tile) const {
    return reinterpret_cast<uint4*>(at) + (pair * C::kTiles + tile) * 32;
  }
  __device__ __forceinline__ float4* scales(int window) const {
    return reinterpret_cast<float4*>(at + C::kFragments) + window * cols;
  }
  // Flags, a byte for each of the team's four warps: whether one of its amaxes is unusual.
  __device__ __forceinline__ uint32_t* unusual() const {
    return reinterpret_cast<uint32_t*>(at + C::kFragments + C::kDepth * cols * 16);
  }
};
template <class C>
struct SharedMemory {
  uint8_t* at;
  int cols;
  // Full and empty barriers of the raw ring and of the decoded ring.
  __device__ __forceinline__ uint64_t* raw_full(int slot) const { return reinterpret_cast<uint64_t*>(at) + slot; }
  __device__ __forceinline__ uint64_t* raw_empty(int slot) const { return raw_full(C::kStages + slot); }
  __device__ __forceinline__ uint64_t* decoded(int slot) const { return raw_full(2 * C::kStages + slot); }
  __device__ __forceinline__ uint64_t* decoded_empty(int slot) const { return decoded(C::kDecodedStages + slot); }
  __device__ __forceinline__ uint8_t* stages() const { return at + C::kBarrierBytes; }
  __device__ __forceinline__ RawStage<C> stage_at(int slot) const {
    return {stages() + slot * C::stage_bytes(cols), cols};
  }
  __device__ __forceinline__ DecodedStage<C> decoded_at(int slot) const {
    return {stages() + C::kStages * C::stage_bytes(cols) + slot * C::decoded_bytes(cols), cols};
  }
  // Sums of a token, which overwrite the stages in the epilogue.
  __device__ __forceinline__ float* sums(int token) const {
    return reinterpret_cast<float*>(stages()) + token * (cols + 4);
  }
};

// Slot of a stage in a ring of kSlots, and phase: trips round the ring, modulo 2.
template <int kSlots>
struct RingPosition {
  int slot = 0, phase = 0;
  __device__ __forceinline__ RingPosition next() const {
    return slot + 1 == kSlots ? RingPosition{0, phase ^ 1} : RingPosition{slot + 1, phase};
  }
};

// ---------------------------------------------------------------- PTX
// Copies kBytes, or zeros; `from` is a valid address either way.
template <int kBytes>
__device__ __forceinline__ void copy_or_zero(void* to, const void* from, bool valid) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes),
                 "r"(valid ? kBytes : 0)
                 : "memory");
}
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
               : "memory");
}
// Arrives when the thread's copies have.
__device__ __forceinline__ void arrive_with_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void wait(uint64_t* barrier, int phase) {
  uint32_t done;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#endif
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(phase)
                 : "memory");
  } while (!done);
}

__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// Converts two E4M3 bytes to float16 in one word.
__device__ __forceinline__ uint32_t halves_of_scales(uint32_t two) {
#if __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(two)));
  return pair;
#else
  return f16_pair(e4m3_decode(static_cast<uint8_t>(two)), e4m3_decode(static_cast<uint8_t>(two >> 8)));
#endif
}
// Converts the four scales of a window.
__device__ __forceinline__ float4 scales_of_window(uint32_t four) {
  float scale[kWindowBlocks];
#if __CUDA_ARCH__ >= 890
#pragma unroll
  for (int i = 0; i < kWindowBlocks; i += 2) {
    const uint32_t pair = halves_of_scales(four >> (8 * i));
    const float2 two = __half22float2(reinterpret_cast<const __half2&>(pair));
    scale[i] = two.x, scale[i + 1] = two.y;
  }
#else
#pragma unroll
  for (int i = 0; i < kWindowBlocks; ++i) scale[i] = e4m3_decode(static_cast<uint8_t>(four >> (8 * i)));
#endif
  return make_float4(scale[0], scale[1], scale[2], scale[3]);
}

__device__ __forceinline__ uint32_t word_at(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }

// Selects two neighbouring bytes, a quarter of a block, from a word of each of two rows or blocks: the low ones, then
// the high ones. Codes 0 and 4, 1 and 5 of the result are of the first, 2 and 6, 3 and 7 of the second.
__device__ __forceinline__ uint32_t quarters(uint32_t first, uint32_t second, int quarter) {
  return __byte_perm(first, second, quarter % 2 ? 0x7362u : 0x5140u);
}

// ---------------------------------------------------------------- copy warps
// Source addresses of a lane: it copies 16 bytes of codes of some rows, and the scales and amaxes of others. Rows of b
// past the end, and K past its end, become zeros; tokens past the end become the last one.
template <class C>
struct CopySource {
  static constexpr int kStep = 32 / C::kParts;  // rows between copies of codes
  static constexpr int kScaleBytes = C::kDepth * kWindowBlocks;
  static constexpr int kTokenCopies = C::kTokens / kStep, kColCopies = kMaxCols / kStep;
  static constexpr int kTokenPasses = (C::kTokens + 31) / 32, kColPasses = (kMaxCols + 31) / 32;
  const uint8_t* data;                                   // a valid address
  const uint8_t *token, *col, *token_scale, *col_scale;  // addresses of the lane's first row, in the first stage
  const float *token_amax[kTokenPasses], *col_amax[kColPasses];
  int lane, part, first, code_bytes, scale_bytes;
  int cols, columns, last;  // of the CTA: columns of its tile, and those that exist; the last token
  bool whole, aligned, token_windows, col_windows;

  __device__ __forceinline__ CopySource(const Operand& a, const Operand& b, int64_t a_row, int64_t b_row,
                                        int64_t tokens, int64_t columns_left, int cols)
      : data(b.data),
        lane(static_cast<int>(threadIdx.x) % 32),
        part(lane % C::kParts),
        first(lane / C::kParts),
        code_bytes(static_cast<int>(b.depth / 2)),
        scale_bytes(static_cast<int>(b.depth / kBlock)),
        cols(cols),
        columns(static_cast<int>(min(columns_left, int64_t{cols}))),
        last(static_cast<int>(min(tokens, int64_t{C::kTokens})) - 1),
        whole(columns == cols && scale_bytes % kScaleBytes == 0),
        aligned(code_bytes % 16 == 0),
        token_windows(a.windows),
        col_windows(b.windows) {
    token = a.data + a_row * code_bytes + part * 16, col = b.data + (b_row + first) * code_bytes + part * 16;
    token_scale = a.scale + a_row * scale_bytes, col_scale = b.scale + (b_row + lane) * scale_bytes;
    if constexpr (C::kWindows) {
#pragma unroll
      for (int i = 0; i < kTokenPasses; ++i) token_amax[i] = a.amax_at(a_row + min(lane + 32 * i, last), 0);
#pragma unroll
      for (int i = 0; i < kColPasses; ++i) col_amax[i] = b.amax_at(b_row + min(lane + 32 * i, columns - 1), 0);
    }
  }

  __device__ __forceinline__ void copy(const RawStage<C>& to, int stage) const {
    if (whole)
      copy_rows<true>(to, stage);
    else
      copy_rows<false>(to, stage);
    if constexpr (C::kWindows) {
#pragma unroll
      for (int i = 0; i < kTokenPasses; ++i)
        if (lane + 32 * i < C::kTokens) copy_amaxes(to, stage, lane + 32 * i, token_amax[i], token_windows, true);
#pragma unroll
      for (int i = 0; i < kColPasses; ++i)
        if (lane + 32 * i < cols)
          copy_amaxes(to, stage, C::kTokens + lane + 32 * i, col_amax[i], col_windows, lane + 32 * i < columns);
    }
  }

 private:
  template <bool kWhole>
  __device__ __forceinline__ void copy_rows(const RawStage<C>& to, int stage) const {
    uint8_t *const codes = to.token(first) + part * 16, *const scales = to.token(lane) + C::kScales;
    constexpr int kCols = C::kTokens * C::kPitch;  // from tokens to rows of b
    const int done = stage * C::kScales, done_scales = stage * kScaleBytes;
    const uint8_t *const tokens_at = token + done, *const cols_at = col + done;
    const uint8_t *const token_scales = token_scale + done_scales, *const col_scales = col_scale + done_scales;
#pragma unroll
    for (int i = 0; i < kTokenCopies; ++i)
      copy_codes<kWhole>(codes + i * kStep * C::kPitch, tokens_at + int64_t{min(first + i * kStep, last)} * code_bytes,
                         code_bytes - done);
#pragma unroll
    for (int i = 0; i < kColCopies; ++i)
      if (i * kStep < cols)
        copy_codes<kWhole>(codes + kCols + i * kStep * C::kPitch, cols_at + int64_t{i * kStep} * code_bytes,
                           first + i * kStep < columns ? code_bytes - done : 0);
#pragma unroll
    for (int i = 0; i < kTokenPasses; ++i)
      if (lane + 32 * i < C::kTokens)
        copy_scales<kWhole>(scales + 32 * i * C::kPitch, token_scales + int64_t{min(lane + 32 * i, last)} * scale_bytes,
                            scale_bytes - done_scales);
#pragma unroll
    for (int i = 0; i < kColPasses; ++i)
      if (lane + 32 * i < cols)
        copy_scales<kWhole>(scales + kCols + 32 * i * C::kPitch, col_scales + int64_t{32 * i} * scale_bytes,
                            lane + 32 * i < columns ? scale_bytes - done_scales : 0);
  }
  // Copies 16 bytes of a row that has `bytes_left` bytes from the first lane's on.
  template <bool kWhole>
  __device__ __forceinline__ void copy_codes(uint8_t* to, const uint8_t* from, int bytes_left) const {
    bytes_left -= part * 16;
    if (kWhole || aligned)
      return copy_or_zero<16>(to, kWhole || bytes_left > 0 ? from : data, kWhole || bytes_left > 0);
    copy_or_zero<8>(to, bytes_left > 0 ? from : data, bytes_left > 0);
    copy_or_zero<8>(to + 8, bytes_left > 8 ? from + 8 : data, bytes_left > 8);
  }
  template <bool kWhole>
  __device__ __forceinline__ void copy_scales(uint8_t* to, const uint8_t* from, int bytes_left) const {
    if constexpr (kWhole) {
      copy_or_zero<kScaleBytes>(to, from, true);
    } else {
#pragma unroll
      for (int w = 0; w < kScaleBytes; w += kWindowBlocks) {
        if (scale_bytes % kWindowBlocks == 0) {
          copy_or_zero<4>(to + w, w < bytes_left ? from + w : data, w < bytes_left);
          continue;
        }
        uint32_t four = 0;
#pragma unroll
        for (int j = w; j < w + kWindowBlocks; ++j)
          if (j < bytes_left) four |= uint32_t{__ldg(from + j)} << (8 * (j - w));
        *reinterpret_cast<uint32_t*>(to + w) = four;
      }
    }
  }
  __device__ __forceinline__ void copy_amaxes(const RawStage<C>& to, int stage, int row, const float* of, bool windows,
                                              bool has_row) const {
#pragma unroll
    for (int w = 0; w < C::kDepth; ++w) {
      const int window = stage * C::kDepth + w;
      const bool valid = has_row && window * kWindowBlocks < scale_bytes;
      copy_or_zero<4>(to.amax(w) + row, of + (valid && windows ? window : 0), valid);
    }
  }
};

// ---------------------------------------------------------------- decode warps
// Slot of a lane in a fragment, without bank conflicts for eight lanes that write or read.
__device__ __forceinline__ int fragment_slot(int group, int quarter) { return group * 4 + (quarter ^ group / 2); }

// Decodes tokens to fragments. A thread has some pairs of blocks of a token.
template <class C>
__device__ __forceinline__ void decode_tokens(const DecodedStage<C>& to, const RawStage<C>& stage) {
  const int thread = static_cast<int>(threadIdx.x) % C::kTeamThreads;
  constexpr int kItems = C::kPairs * C::kTokens;
  static_assert(C::kWindows || kItems % C::kTeamThreads == 0);
#pragma unroll
  for (int i = 0; i < kItems; i += C::kTeamThreads) {
    if (kItems < C::kTeamThreads && thread >= kItems) break;
    const int pair = (i + thread) / C::kTokens, token = (i + thread) % C::kTokens;
    const uint8_t* row = stage.token(token);
    const uint4 codes = *reinterpret_cast<const uint4*>(row + pair * 16);
    const uint32_t two_scales = halves_of_scales(*reinterpret_cast<const uint16_t*>(row + C::kScales + pair * 2));
    const uint32_t scale[2] = {__byte_perm(two_scales, 0, 0x1010), __byte_perm(two_scales, 0, 0x3232)};
    uint4* fragments = to.fragments(pair, token / 8);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t v[4];
      halves_of_codes(quarters(q < 2 ? codes.x : codes.y, q < 2 ? codes.z : codes.w, q), v);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = multiply_halves(v[j], scale[j / 2]);
      fragments[fragment_slot(token % 8, q)] = make_uint4(v[0], v[1], v[2], v[3]);
    }
  }
}

// Returns whether the product of two such amaxes is 0 or from 2^-60 to 2^60, so that `div_by_steps` divides it.
__device__ __forceinline__ bool is_usual(float amax) {
  return bits_of(amax) == 0u || bits_of(amax) - (97u << 23) < 60u << 23;
}

template <class C>
__device__ __forceinline__ void decode_scales(const DecodedStage<C>& to, const RawStage<C>& stage) {
  const int thread = static_cast<int>(threadIdx.x) % C::kTeamThreads;
#pragma unroll
  for (int i = thread; i < kMaxCols; i += C::kTeamThreads)
    if (i < stage.cols) {
#pragma unroll
      for (int w = 0; w < C::kDepth; ++w)
        to.scales(w)[i] = scales_of_window(word_at(stage.col(i) + C::kScales + w * kWindowBlocks));
    }
  if constexpr (C::kWindows) {
    bool usual = true;
#pragma unroll
    for (int i = 0; i < C::rows(kMaxCols); i += C::kTeamThreads)
      if (i + thread < C::rows(stage.cols)) {
#pragma unroll
        for (int w = 0; w < C::kDepth; ++w) usual &= is_usual(stage.amax(w)[i + thread]);
      }
    const bool unusual = __any_sync(0xffffffffu, !usual);
    if (thread % 32 == 0) reinterpret_cast<uint8_t*>(to.unusual())[thread / 32] = unusual;
  }
}

// Copies the stages of a matrix, after `before` stages of others; copy warps take stages round-robin.
template <class C>
__device__ __forceinline__ void copy_stages(const CopySource<C>& source, const SharedMemory<C>& memory, int stages,
                                            int copy_warp, int copy_warps, int64_t before) {
  const int started = static_cast<int>(before % (2 * C::kStages));
#pragma unroll 1
  for (int i = copy_warp; i < stages; i += copy_warps) {
    const int slot = (started + i) % C::kStages, phase = (started + i) / C::kStages % 2;
    if (before + i >= C::kStages) wait(memory.raw_empty(slot), phase ^ 1);
    source.copy(memory.stage_at(slot), i);
    arrive_with_copies(memory.raw_full(slot));
    arrive(memory.raw_full(slot));  // with what the thread stored itself
  }
}

// Decodes the stages of a matrix; teams take stages alternately.
template <class C>
__device__ __forceinline__ void decode_stages(const SharedMemory<C>& memory, int stages, int team, int64_t before) {
  const int raw_full = static_cast<int>(before % (2 * C::kStages)),
            decoded = static_cast<int>(before % (2 * C::kDecodedStages));
#pragma unroll 1
  for (int i = team; i < stages; i += C::kTeams) {
    const int from = (raw_full + i) % C::kStages, to = (decoded + i) % C::kDecodedStages;
    wait(memory.raw_full(from), (raw_full + i) / C::kStages % 2);
    if (before + i >= C::kDecodedStages) wait(memory.decoded_empty(to), (decoded + i) / C::kDecodedStages % 2 ^ 1);
    decode_tokens<C>(memory.decoded_at(to), memory.stage_at(from));
    decode_scales<C>(memory.decoded_at(to), memory.stage_at(from));
    arrive(memory.decoded(to));
  }
}

// ---------------------------------------------------------------- mma warps
// Outputs of a lane, in a 16x8 fragment per tile: rows g and g + 8 of the warp's 16 of b, tokens 2 t and 2 t + 1.
struct Lane {
  int row, group, quarter;

  __device__ __forceinline__ explicit Lane(int warp)
      : row(warp * 16), group(threadIdx.x % 32 / 4), quarter(threadIdx.x % 4) {}
  __device__ __forceinline__ int col_of(int i) const { return row + group + i / 2 * 8; }
  __device__ __forceinline__ int token_of(int tile, int i) const { return tile * 8 + quarter * 2 + i % 2; }
};

template <class C>
using TokenSums = float[C::kTiles][4];

__device__ __noinline__ float alpha_of_any(float amax_a, float amax_b, float divisor) {
  return div_rn(mul_rn(amax_a, amax_b), divisor);
}

// Adds the sums of a window times the alpha of each output.
template <class C>
__device__ __forceinline__ void add_windows(TokenSums<C>& y, const TokenSums<C>& sum, const float* amax,
                                            const Lane& lane, bool usual, const WindowAlpha& alpha_of) {
  const float col[2] = {amax[C::kTokens + lane.col_of(0)], amax[C::kTokens + lane.col_of(2)]};
  const auto add = [&](const auto& add_one) {
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n) {
      const float2 two = *reinterpret_cast<const float2*>(amax + lane.token_of(n, 0));
#pragma unroll
      for (int i = 0; i < 4; ++i) y[n][i] = add_one(y[n][i], sum[n][i], i % 2 ? two.y : two.x, col[i / 2]);
    }
  };
  // alpha times 2^28, exactly.
  WindowAlpha unit_alpha = alpha_of;
  unit_alpha.divisor *= 1 / kUnit, unit_alpha.reciprocal *= kUnit;
  if (usual)
    add([&](float y, float sum, float a, float b) { return add_window(y, sum, unit_alpha.usual(a, b)); });
  else
    add([&](float y, float sum, float a, float b) {
      return add_window(y, mul_rn(sum, kUnit), alpha_of_any(a, b, alpha_of.divisor));
    });
}

// Codes and scales of the lane's two rows in a window.
struct LaneRows {
  uint32_t codes[2][kWindowBlocks];
  float scale[2][kWindowBlocks];

  template <class C>
  __device__ __forceinline__ void load(const RawStage<C>& stage, const DecodedStage<C>& decoded, const Lane& lane,
                                       int window) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int col = lane.col_of(2 * r);
      const uint8_t* codes_of = stage.col(col) + window * kWindowCodes + lane.quarter / 2 * 4;
#pragma unroll
      for (int j = 0; j < kWindowBlocks; ++j) codes[r][j] = word_at(codes_of + j * 8);
      const float4 four = decoded.scales(window)[col];
      scale[r][0] = four.x, scale[r][1] = four.y, scale[r][2] = four.z, scale[r][3] = four.w;
    }
  }
  __device__ __forceinline__ void decode(int block, const Lane& lane, uint32_t (&row_fragments)[4]) const {
    uint32_t v[4];
    halves_of_codes(quarters(codes[0][block], codes[1][block], lane.quarter), v);
    row_fragments[0] = v[0], row_fragments[1] = v[2], row_fragments[2] = v[1], row_fragments[3] = v[3];
  }
};

// Multiplies the stages of a matrix. Four software pipelines hide latencies, relative to the mma of (block, tile):
//   two blocks ahead     load codes and scales of a window; before them, wait for the next stage at the end of one
//   a pair ahead         load token fragments into the registers whose last use this mma is
//   a block ahead        decode b
//   kLag tiles behind    y = fma(result of an mma, s_b, y); the scales of the previous window stay until then
template <class C>
__device__ __forceinline__ void mma_stages(TokenSums<C>& y, const SharedMemory<C>& memory, int stages,
                                           RingPosition<C::kStages> raw_full, RingPosition<C::kDecodedStages> decoded,
                                           const Lane& lane, const WindowAlpha& alpha_of) {
  constexpr int kSteps = kWindowBlocks * C::kTiles;  // tiles of a window
  constexpr int kBuffers = C::kTiles >= 8 ? 1 : 2;   // of fragments
  static_assert(kSteps % C::kRing == 0 && C::kLag < C::kRing && C::kLag <= 2 * C::kTiles);
  const int lane_slot = fragment_slot(lane.group, lane.quarter);
  float d[C::kRing][4] = {};
  uint4 token_fragments[kBuffers][C::kTiles];
  uint32_t row_fragments[2][4];
  LaneRows rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < kWindowBlocks; ++j) rows[1].scale[i][j] = 0.0f;
  RawStage<C> stage = memory.stage_at(raw_full.slot);
  DecodedStage<C> ready = memory.decoded_at(decoded.slot);
  wait(memory.decoded(decoded.slot), decoded.phase);
  rows[0].load(stage, ready, lane, 0);
  rows[0].decode(0, lane, row_fragments[0]);
#pragma unroll
  for (int n = 0; n < C::kTiles; ++n) token_fragments[0][n] = ready.fragments(0, n)[lane_slot];
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    const auto following = decoded.next();
    const auto following_copy = raw_full.next();
    const RawStage<C> next_stage = memory.stage_at(following_copy.slot);
    const DecodedStage<C> next_ready = memory.decoded_at(following.slot);
#pragma unroll
    for (int w = 0; w < C::kDepth; ++w) {
      LaneRows &now = rows[w % 2], &other = rows[(w + 1) % 2];
      TokenSums<C> window_sum{};
      auto& sum = C::kWindows ? window_sum : y;
#pragma unroll
      for (int block = 0; block < kWindowBlocks; ++block) {
        constexpr int kLast = kWindowBlocks - 1;
        const bool end = w + 1 == C::kDepth;
        if (block == 2) {
          if (end && i + 1 < stages) wait(memory.decoded(following.slot), following.phase);
          // Past the end of K this loads values that are not used.
          other.load(end ? next_stage : stage, end ? next_ready : ready, lane, end ? 0 : w + 1);
        }
        if (block < kLast)
          now.decode(block + 1, lane, row_fragments[(block + 1) % 2]);
        else
          other.decode(0, lane, row_fragments[0]);
#pragma unroll
        for (int n = 0; n < C::kTiles; ++n) {
          const int pair = block / 2, step = block * C::kTiles + n;
          uint4& tokens = token_fragments[pair % kBuffers][n];
          multiply(d[step % C::kRing], row_fragments[block % 2], block % 2 ? tokens.z : tokens.x,
                   block % 2 ? tokens.w : tokens.y);
          if (block % 2 == 2 - kBuffers) {  // the last use of these registers
            const DecodedStage<C>& from = pair == 1 && end ? next_ready : ready;
            token_fragments[(pair + 1) % kBuffers][n] =
                from.fragments(pair == 1 ? (end ? 0 : 2 * w + 2) : 2 * w + 1, n)[lane_slot];
          }
          const int added = step - C::kLag;
          if (C::kWindows && added < 0) continue;
          const int tile_idx = (added + kSteps) % kSteps;
          // Until its last use, `other` is the previous window.
          const LaneRows& added_rows = added < 0 ? other : now;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sum[tile_idx % C::kTiles][j] = __fmaf_rn(
                d[tile_idx % C::kRing][j], added_rows.scale[j / 2][tile_idx / C::kTiles], sum[tile_idx % C::kTiles][j]);
        }
      }
      if constexpr (C::kWindows) {
#pragma unroll
        for (int tile_idx = kSteps - C::kLag; tile_idx < kSteps; ++tile_idx)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sum[tile_idx % C::kTiles][j] = __fmaf_rn(d[tile_idx % C::kRing][j], now.scale[j / 2][tile_idx / C::kTiles],
                                                     sum[tile_idx % C::kTiles][j]);
        add_windows<C>(y, sum, stage.amax(w), lane, *ready.unusual() == 0, alpha_of);
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 < kArrivals)
      arrive(memory.raw_empty(raw_full.slot)), arrive(memory.decoded_empty(decoded.slot));
    raw_full = following_copy, decoded = following, stage = next_stage, ready = next_ready;
  }
  if constexpr (!C::kWindows) {
#pragma unroll
    for (int tile_idx = kSteps - C::kLag; tile_idx < kSteps; ++tile_idx)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        y[tile_idx % C::kTiles][j] = __fmaf_rn(d[tile_idx % C::kRing][j], rows[1].scale[j / 2][tile_idx / C::kTiles],
                                               y[tile_idx % C::kTiles][j]);
  }
}

// Stores every `step`-th output of a column.
template <class C>
__device__ __forceinline__ void store_column(const MatmulArgs& g, const SharedMemory<C>& memory, int64_t matrix,
                                             int64_t token0, int64_t col0, int i, int step,
                                             const WindowAlpha& alpha_of) {
  const GemmShape& s = g.shape;
  const Operand a(g.a, s.depth), b(g.b, s.depth);
  const int64_t col = col0 + i;
  const float bias = g.result.bias ? load_float(g.result.bias, g.result.bias_kind, col) : 0.0f;
  const float col_amax = C::kWindows ? 0.0f : b.amax_of(matrix * s.cols + col, 0);
  const int tokens = static_cast<int>(min(s.rows - token0, int64_t{C::kTokens}));
  for (int token = static_cast<int>(threadIdx.x) / memory.cols; token < tokens; token += step) {
    const int64_t row = matrix * s.rows + token0 + token;
    const float alpha = C::kWindows ? 1.0f : alpha_of(a.amax_of(row, 0), col_amax);
    store_output(g.result, row * s.cols + col,
                 gemm_epilogue(memory.sums(token)[i], alpha, bias, g.result.bias != nullptr));
  }
}

// __syncthreads() that warps may reach from several places of the code.
__device__ __forceinline__ void sync_all_warps() { asm volatile("barrier.sync 0;" ::: "memory"); }

// One CTA in time order, per matrix; rings go on over matrices:
//
//   set-up         init full and empty barriers of the raw ring (kStages) and of the decoded ring (kDecodedStages)
//   copy warps     per stage, round-robin: wait raw_empty
//                  cp.async codes and scales of kTokens tokens and 16 * mma_warps rows of b, [windows: their amaxes]
//                  arrive at raw_full when they have come
//   decode warps   per stage, teams alternately: wait raw_full, decoded_empty
//                  tokens: q s_a -> float16 fragments; s_b -> float; [windows: are all amaxes usual?]
//                  arrive at decoded_full
//   mma warps      per stage: wait decoded_full, which implies raw_full
//                  per block of 16 along K, decoded a block ahead: codes of b from the raw stage -> fragment
//                    per tile of 8 tokens: mma = s_a dot16, exact; y = fma(mma of kLag tiles before, s_b, y)
//                  [windows: that sum is one of a window; y += alpha * sum]
//                  arrive at raw_empty, decoded_empty
//   all warps      barrier; mma warps put y into shared memory; __syncthreads
//                  per output: alpha, bias, cast -> result, masked at the ends; __syncthreads
template <class C>
__global__ void __launch_bounds__(kMaxThreads, 1) sm80_nvfp4_blocks_small_m_kernel(MatmulArgs g, int warps) {
  extern __shared__ uint4 shared[];
  const int threads = static_cast<int>(blockDim.x), cols = 16 * warps;
  const SharedMemory<C> memory{reinterpret_cast<uint8_t*>(shared), cols};
  const GemmShape& s = g.shape;
  const Operand a(g.a, s.depth), b(g.b, s.depth);
  const WindowAlpha alpha_of(g);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int copy_warps = threads / 32 - kDecodeWarps - warps;
  const int stages = static_cast<int>((s.depth + C::kDepth * kWindow - 1) / (C::kDepth * kWindow));
  if (threadIdx.x == 0) {
    const int readers = warps * kArrivals;
    for (int i = 0; i < C::kStages; ++i)
      init_barrier(memory.raw_full(i), 2 * 32), init_barrier(memory.raw_empty(i), readers);
    for (int i = 0; i < C::kDecodedStages; ++i)
      init_barrier(memory.decoded(i), C::kTeamThreads), init_barrier(memory.decoded_empty(i), readers);
  }
  __syncthreads();
  // Neighbouring CTAs have the same rows of b, for L2.
  const auto token_tiles = static_cast<unsigned>((s.rows + C::kTokens - 1) / C::kTokens);
  const int64_t token0 = static_cast<int64_t>(blockIdx.x % token_tiles) * C::kTokens;
  const int64_t col0 = static_cast<int64_t>(blockIdx.x / token_tiles) * cols;
  int64_t before = 0;  // stages of previous matrices
  for (int64_t matrix = blockIdx.y; matrix < s.batch; matrix += gridDim.y, before += stages) {
    const RingPosition<C::kStages> raw_full{static_cast<int>(before % C::kStages),
                                            static_cast<int>(before / C::kStages % 2)};
    const RingPosition<C::kDecodedStages> decoded{static_cast<int>(before % C::kDecodedStages),
                                                  static_cast<int>(before / C::kDecodedStages % 2)};
    if (warp < kDecodeWarps) {
      decode_stages<C>(memory, stages, warp * C::kTeams / kDecodeWarps, before);
      sync_all_warps();
    } else if (warp < kDecodeWarps + copy_warps) {
      const CopySource<C> source(a, b, matrix * s.rows + token0, matrix * s.cols + col0, s.rows - token0, s.cols - col0,
                                 cols);
      copy_stages<C>(source, memory, stages, warp - kDecodeWarps, copy_warps, before);
      sync_all_warps();
    } else {
      const Lane lane(warp - kDecodeWarps - copy_warps);
      TokenSums<C> y{};
      mma_stages<C>(y, memory, stages, raw_full, decoded, lane, alpha_of);
      sync_all_warps();  // all stages have been used
#pragma unroll
      for (int n = 0; n < C::kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          memory.sums(lane.token_of(n, i))[lane.col_of(i)] = C::kWindows ? y[n][i] : mul_rn(y[n][i], kUnit);
    }
    __syncthreads();
    const int i = static_cast<int>(threadIdx.x) % cols, at_once = threads / cols;
    if (col0 + i < s.cols && static_cast<int>(threadIdx.x) < at_once * cols)
      store_column<C>(g, memory, matrix, token0, col0, i, at_once, alpha_of);
    __syncthreads();
  }
}

// ---------------------------------------------------------------- launch
struct Tile {
  int tiles, warps;
};

int64_t num_ctas(const GemmShape& s, const Tile& t) {
  return (s.rows + 8 * t.tiles - 1) / (8 * t.tiles) * ((s.cols + 16 * t.warps - 1) / (16 * t.warps));
}

// Calls f with the Config of a tile.
template <bool kWindows, class F>
auto with_config(const Tile& t, const F& f) {
  switch (t.tiles) {
    case 1: return f(Config<1, kWindows>());
    case 2: return f(Config<2, kWindows>());
    case 4: return f(Config<4, kWindows>());
    default: return f(Config<8, kWindows>());
  }
}
template <class F>
auto with_config(const Tile& t, bool windows, const F& f) {
  return windows ? with_config<true>(t, f) : with_config<false>(t, f);
}

// Estimates the clocks of an SM for a block of 16 and all outputs, counted in instructions.
double clocks(const GemmShape& s, const Tile& t, bool windows, int processors) {
  const double multiplying = (windows ? 14.0 : 5.5) * t.tiles + 15.0, helping = 2.2 * t.tiles + 0.5 * t.warps;
  const auto rounds = (s.batch * num_ctas(s, t) + processors - 1) / processors;
  return static_cast<double>(rounds) * ((t.warps + 3) / 4 * multiplying + helping);
}

// Returns the fastest tile. The result is the same with each.
Tile tile_for(const GemmShape& s, bool windows, int tiles) {
  const int processors = multiprocessors(), memory = shared_memory();
  Tile best{tiles ? tiles : 1, 1};
  double least = 1e30;
  for (int t : {1, 2, 4, 8}) {
    if (tiles ? t != tiles : t > 1 && s.rows <= 4 * t) continue;
    for (int w = 1; w <= kMaxMmaWarps; ++w) {
      const Tile tile{t, w};
      if (with_config(tile, windows, [&](auto c) { return c.bytes(16 * w); }) > memory) break;
      const double time = clocks(s, tile, windows, processors);
      if (time < least) least = time, best = tile;
    }
  }
  return best;
}

template <class C>
cudaError_t launch(const MatmulArgs& g, const Tile& tile, cudaStream_t stream) {
  constexpr int64_t kMaxBatch = 32768;  // of the 65535 that grid dimension y allows
  static_assert(C::bytes(16) <= 99 << 10, "what every GPU from 8.0 allows");
  const auto kernel = sm80_nvfp4_blocks_small_m_kernel<C>;
  const int bytes = C::bytes(16 * tile.warps);
  const dim3 grid(static_cast<unsigned>(num_ctas(g.shape, tile)),
                  static_cast<unsigned>(std::min(g.shape.batch, kMaxBatch)));
  const int copy_warps = std::min(kMaxCopyWarps, kAllWarps - kDecodeWarps - tile.warps);
  if (allow_shared(reinterpret_cast<const void*>(kernel), bytes) == cudaSuccess)
    kernel<<<grid, 32 * (kDecodeWarps + copy_warps + tile.warps), bytes, stream>>>(g, tile.warps);
  return cudaGetLastError();  // of either, and not to be found by the next launch
}

}  // namespace

cudaError_t launch_sm80_nvfp4_blocks_small_m(const MatmulArgs& g, cudaStream_t stream, int tokens) {
  const Tile tile = tile_for(g.shape, g.windows(), tokens / 8);
  return with_config(tile, g.windows(), [&](auto c) { return launch<decltype(c)>(g, tile, stream); });
}

}  // namespace jnvfp4
