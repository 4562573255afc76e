// a b^T of two NVFP4 operands in the pinned order of docs/numerics.md, for few rows of a ("tokens").
//
// No split of K is allowed, so a warp has 16 rows of b and 8, 16 or 32 tokens for all of K, and does as little as it
// can for a block of 16: one mma m16n8k16 of float16 for each 8 tokens, and one fused multiply-add for each output. b
// is on the side of 16 rows, as it is stored, and is decoded in registers, once for all tokens of the warp. Tokens are
// decoded by the thread block, times their scales, into fragments in shared memory.
//
// These are the rule's bits. A decoded token is q s 2^-14, and that of b q 2^-14: multiples of 2^-24 and 2^-15 with at
// most 6 and 2 significant bits, so float16 holds them exactly. With s_a = c 2^e, c below 16, the 16 products of a
// block are multiples of c 2^(e - 30), and so is each of their partial sums, of at most 16 * 144 times that: at most 16
// bits. A tensor core adds with the precision of float32 at least, so in any order it makes s_a dot16 2^-28 exactly.
// Times s_b that has 20 bits, so the fused multiply-add is fl(y + s_a s_b dot16), with everything times 2^-28. Nothing
// comes near the ends of float32's range: what is not zero has magnitudes from 2^-48 to 36 K 448^2 2^-28. The end takes
// 2^-28 back, exactly. y starts as +0 and is never -0, so signs of zeros do not matter. A NaN scale of a makes its
// token's 16 elements NaN, one of b the factor.
//
// A thread block has 64 rows of b. Codes, scales and amaxes come by cp.async through a ring of stages, some windows of
// K each. The order of k in a block is free: lane t of four has the t-th quarter of the block in both operands.
#include "halves.cuh"
#include "sm80_nvfp4_blocks.cuh"

namespace jnvfp4 {
namespace {

constexpr int kWarps = 4, kFewThreads = 32 * kWarps;
constexpr int kCols = 16 * kWarps;  // rows of b, which are columns of the result
constexpr int kWindowCodes = kWindow / 2;
constexpr float kUnit = 0x1p28f;

// What a thread block has at a time. Tokens are in tiles of 8.
template <int kTiles_, bool kWindows_>
struct Config {
  static constexpr int kTiles = kTiles_, kTokens = 8 * kTiles, kRows = kCols + kTokens;
  static constexpr bool kWindows = kWindows_;
  static constexpr int kDepth = kTiles == 4 ? 2 : 4;   // windows of K in a stage
  static constexpr int kStages = kTiles == 1 ? 6 : 5;  // two are in use
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kBlocks = 3;  // on a multiprocessor; its shared memory has room for no more
#else
  static constexpr int kBlocks = kTiles == 4 && !kWindows ? 4 : 3;  // on a multiprocessor
#endif
  static constexpr int kPairs = kDepth * kWindowBlocks / 2;  // of blocks
  static constexpr int kParts = kDepth * kWindowCodes / 16;  // of 16 bytes of codes, of a row
  // Codes, then scales. 8 rows are in different banks.
  static constexpr int kScales = kDepth * kWindowCodes, kPitch = (kScales + kDepth * kWindowBlocks + 15) / 16 * 16;

  // Rows of b, then tokens.
  struct Stage {
    alignas(16) uint8_t row[kRows][kPitch];
    float amax[kWindows ? kRows : 1][kDepth];
  };
  // Of each pair of blocks and tile of tokens, fragments of 32 lanes: the right operand of an mma for either block.
  using Fragments = uint4[kPairs][kTiles][32];
  struct Inputs {
    Stage stage[kStages];
    alignas(16) Fragments tokens[2];
  };
  union Shared {
    Inputs in;
    float sums[kTokens][kCols + 4];  // in the end
  };
};

// ---------------------------------------------------------------- PTX
// Copies, or zeros. `from` is valid either way.
template <int kBytes>
__device__ __forceinline__ void copy_or_zero(void* to, const void* from, bool there) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(kBytes),
                 "r"(there ? kBytes : 0)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// Two E4M3 bytes, as float16 in one word.
__device__ __forceinline__ uint32_t halves_of_scales(uint32_t two) {
#if __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(two)));
  return pair;
#else
  return f16_pair(e4m3_decode(static_cast<uint8_t>(two)), e4m3_decode(static_cast<uint8_t>(two >> 8)));
#endif
}
// Of the four blocks of a window.
__device__ __forceinline__ void scales_of_window(uint32_t four, float (&scale)[kWindowBlocks]) {
#if __CUDA_ARCH__ >= 890
#pragma unroll
  for (int i = 0; i < kWindowBlocks; i += 2) {
    const uint32_t pair = halves_of_scales(four >> (8 * i));
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(pair));
    scale[i] = both.x, scale[i + 1] = both.y;
  }
#else
#pragma unroll
  for (int i = 0; i < kWindowBlocks; ++i) scale[i] = e4m3_decode(static_cast<uint8_t>(four >> (8 * i)));
#endif
}

__device__ __forceinline__ uint32_t word_at(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }

// Of a word of each of two rows or blocks, two neighbouring bytes, which are a quarter of a block: the low ones, then
// the high ones. Its codes 0 and 4, 1 and 5 are of the first, 2 and 6, 3 and 7 of the second.
__device__ __forceinline__ uint32_t quarters(uint32_t first, uint32_t second, int quarter) {
  return __byte_perm(first, second, quarter % 2 ? 0x7362u : 0x5140u);
}

// ---------------------------------------------------------------- from global to shared memory
// What a thread copies of each stage: 16 bytes of codes of some rows, and the scales and amaxes of one row. In place of
// rows of b that do not exist, and of what is past the end of K, come zeros, in place of tokens the last one.
template <class C>
struct Source {
  static constexpr int kStep = kFewThreads / C::kParts;  // rows from one copy of a thread to the next
  static constexpr int kScaleBytes = C::kDepth * kWindowBlocks;
  static_assert(C::kTokens <= kStep, "a thread copies codes of one token");
  const uint8_t* data;  // some valid address
  // Of the next stage.
  const uint8_t *cols, *token, *scale;
  const float* amax;
  int64_t step;                            // from `cols` to the thread's next row
  int rows_left, code_bytes, scale_bytes;  // rows of b from that of `cols` on; to the end of K
  bool whole, aligned, has_row, has_windows;

  __device__ __forceinline__ Source(const MatmulArgs& g, const Operand& a, const Operand& b, int64_t a_row,
                                    int64_t b_row, int64_t tokens, int64_t columns)
      : data(b.data),
        code_bytes(static_cast<int>(g.shape.depth / 2)),
        scale_bytes(static_cast<int>(g.shape.depth / kBlock)) {
    const int part = threadIdx.x % C::kParts, first = threadIdx.x / C::kParts;
    const int last = static_cast<int>(min(tokens, int64_t{C::kTokens})) - 1;
    step = int64_t{kStep} * code_bytes;
    cols = b.data + (b_row + first) * code_bytes + part * 16;
    token = a.data + (a_row + min(first, last)) * code_bytes + part * 16;
    const bool of_b = threadIdx.x < kCols;
    const int i = threadIdx.x;
    has_row = !of_b || i < columns;
    const int64_t row = of_b ? b_row + (has_row ? i : 0) : a_row + min(i - kCols, last);
    scale = (of_b ? b.scale : a.scale) + row * scale_bytes;
    amax = of_b ? b.amax_at(row, 0) : a.amax_at(row, 0), has_windows = of_b ? b.windows : a.windows;
    rows_left = static_cast<int>(min(columns, int64_t{kCols})) - first;
    aligned = code_bytes % 16 == 0;
    whole = columns >= kCols && scale_bytes % kScaleBytes == 0;
    code_bytes -= part * 16;
  }

  __device__ __forceinline__ void copy(typename C::Stage& to) {
    const int part = threadIdx.x % C::kParts, row = threadIdx.x / C::kParts;
    uint8_t *const codes = to.row[row] + part * 16, *const scales = to.row[threadIdx.x] + C::kScales;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kCols / kStep; ++i) copy_or_zero<16>(codes + i * kStep * C::kPitch, cols + i * step, true);
      if (row < C::kTokens) copy_or_zero<16>(codes + kCols * C::kPitch, token, true);
      if (threadIdx.x < C::kRows) copy_or_zero<kScaleBytes>(scales, scale, true);
    } else {
#pragma unroll
      for (int i = 0; i < kCols / kStep; ++i)
        copy_codes(codes + i * kStep * C::kPitch, cols + i * step, i * kStep < rows_left ? code_bytes : 0);
      if (row < C::kTokens) copy_codes(codes + kCols * C::kPitch, token, code_bytes);
      if (threadIdx.x < C::kRows) copy_scales(scales);
    }
    if constexpr (C::kWindows)
      if (threadIdx.x < C::kRows) {
#pragma unroll
        for (int w = 0; w < C::kDepth; ++w) {
          const bool there = has_row && w * kWindowBlocks < scale_bytes;
          copy_or_zero<4>(&to.amax[threadIdx.x][w], amax + (there && has_windows ? w : 0), there);
        }
        if (has_windows) amax += C::kDepth;
      }
    cols += C::kScales, token += C::kScales, scale += kScaleBytes;
    code_bytes -= C::kScales, scale_bytes -= kScaleBytes;
  }

 private:
  __device__ __forceinline__ void copy_codes(uint8_t* to, const uint8_t* from, int left) const {
    if (aligned) return copy_or_zero<16>(to, left > 0 ? from : data, left > 0);
    copy_or_zero<8>(to, left > 0 ? from : data, left > 0);
    copy_or_zero<8>(to + 8, left > 8 ? from + 8 : data, left > 8);
  }
  __device__ __forceinline__ void copy_scales(uint8_t* to) const {
#pragma unroll
    for (int w = 0; w < kScaleBytes; w += kWindowBlocks) {
      const bool there = has_row && w < scale_bytes;
      if (scale_bytes % kWindowBlocks == 0) {
        copy_or_zero<4>(to + w, there ? scale + w : data, there);
        continue;
      }
      uint32_t four = 0;
#pragma unroll
      for (int j = w; j < w + kWindowBlocks; ++j)
        if (there && j < scale_bytes) four |= uint32_t{__ldg(scale + j)} << (8 * (j - w));
      *reinterpret_cast<uint32_t*>(to + w) = four;
    }
  }
};

// ---------------------------------------------------------------- from shared memory to sums
// A lane's place in a fragment: eight lanes write to, and read from, different banks.
__device__ __forceinline__ int place(int group, int quarter) { return group * 4 + (quarter ^ group / 2); }

// Tokens of a stage on their way to fragments. A thread has half of some pairs of blocks of a token.
template <class C>
struct Tokens {
  static constexpr int kItems = 2 * C::kPairs * C::kTokens / kFewThreads;
  uint32_t first[kItems], second[kItems], scales[kItems];  // of the blocks of a pair

  static __device__ __forceinline__ int token() { return threadIdx.x % C::kTokens; }
  static __device__ __forceinline__ int half(int i) { return item(i) % 2; }
  static __device__ __forceinline__ int pair(int i) { return item(i) / 2; }
  __device__ __forceinline__ void load(const typename C::Stage& stage) {
    const uint8_t* row = stage.row[kCols + token()];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint8_t* codes = row + pair(i) * 16 + half(i) * 4;
      first[i] = word_at(codes), second[i] = word_at(codes + 8);
      scales[i] = *reinterpret_cast<const uint16_t*>(row + C::kScales + pair(i) * 2);
    }
  }
  __device__ __forceinline__ void decode(typename C::Fragments& to) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t both = halves_of_scales(scales[i]);
      const uint32_t scale[2] = {__byte_perm(both, 0, 0x1010), __byte_perm(both, 0, 0x3232)};
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        uint32_t v[4];
        halves_of_codes(quarters(first[i], second[i], q), v);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = multiply_halves(v[j], scale[j / 2]);
        to[pair(i)][token() / 8][place(token() % 8, 2 * half(i) + q)] = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }

 private:
  static __device__ __forceinline__ int item(int i) {
    return threadIdx.x / C::kTokens + i * (kFewThreads / C::kTokens);
  }
};

// Outputs of a thread: rows lane / 4 and 8 below of the warp's 16 of b, tokens 2 * (lane % 4) and the next of each
// tile.
struct Lane {
  int row, group, quarter;

  __device__ __forceinline__ Lane()
      : row(threadIdx.x / 32 * 16), group(threadIdx.x % 32 / 4), quarter(threadIdx.x % 4) {}
  __device__ __forceinline__ int col_of(int i) const { return row + group + i / 2 * 8; }
  __device__ __forceinline__ int token_of(int tile, int i) const { return tile * 8 + quarter * 2 + i % 2; }
};

template <class C>
using TokenSums = float[C::kTiles][4];

// Adds the four blocks of a window of the stage.
template <class C>
__device__ __forceinline__ void add_blocks(TokenSums<C>& sum, const typename C::Stage& stage,
                                           const typename C::Fragments& tokens, const Lane& lane, int window) {
  const uint8_t* rows[2] = {stage.row[lane.col_of(0)], stage.row[lane.col_of(2)]};
  float scale[2][kWindowBlocks];
#pragma unroll
  for (int i = 0; i < 2; ++i) scales_of_window(word_at(rows[i] + C::kScales + window * kWindowBlocks), scale[i]);
#pragma unroll
  for (int pair = 0; pair < kWindowBlocks / 2; ++pair) {
    uint4 right[C::kTiles];
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n)
      right[n] = tokens[window * kWindowBlocks / 2 + pair][n][place(lane.group, lane.quarter)];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int block = 2 * pair + j, at = window * kWindowCodes + block * 8 + lane.quarter / 2 * 4;
      uint32_t v[4];
      halves_of_codes(quarters(word_at(rows[0] + at), word_at(rows[1] + at), lane.quarter), v);
      const uint32_t left[4] = {v[0], v[2], v[1], v[3]};
#pragma unroll
      for (int n = 0; n < C::kTiles; ++n) {
        float d[4];
        multiply(d, left, j ? right[n].z : right[n].x, j ? right[n].w : right[n].y);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[n][i] = __fmaf_rn(d[i], scale[i / 2][block], sum[n][i]);
      }
    }
  }
}

// Whether the product of two such amaxes is 0 or from 2^-60 to 2^60, so that `div_by_steps` divides it.
__device__ __forceinline__ bool is_usual(float amax) {
  return bits_of(amax) == 0u || bits_of(amax) - (97u << 23) < 60u << 23;
}
__device__ __noinline__ float alpha_of_any(float amax_a, float amax_b, float divisor) {
  return div_rn(mul_rn(amax_a, amax_b), divisor);
}

// y = add_window(y, sum, alpha) with the alpha of each output.
template <class C>
__device__ __forceinline__ void add_windows(TokenSums<C>& y, const TokenSums<C>& sum, const typename C::Stage& stage,
                                            const Lane& lane, int window, const WindowAlpha& alpha_of) {
  float col[2], token[C::kTiles][2];
  bool usual = true;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    usual &= is_usual(col[i] = stage.amax[lane.col_of(2 * i)][window]);
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n)
      usual &= is_usual(token[n][i] = stage.amax[kCols + lane.token_of(n, i)][window]);
  }
  const auto add = [&](const auto& alpha) {
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        y[n][i] = add_window(y[n][i], mul_rn(sum[n][i], kUnit), alpha(token[n][i % 2], col[i / 2]));
  };
  if (usual)
    add([&](float a, float b) { return alpha_of.usual(a, b); });
  else
    add([&](float a, float b) { return alpha_of_any(a, b, alpha_of.divisor); });
}

// With windows each has its own sum.
template <class C>
__device__ __forceinline__ void add_stage(TokenSums<C>& y, const typename C::Stage& stage,
                                          const typename C::Fragments& tokens, const Lane& lane,
                                          const WindowAlpha& alpha_of) {
#pragma unroll
  for (int window = 0; window < C::kDepth; ++window) {
    if constexpr (C::kWindows) {
      TokenSums<C> sum{};
      add_blocks<C>(sum, stage, tokens, lane, window);
      add_windows<C>(y, sum, stage, lane, window, alpha_of);
    } else {
      add_blocks<C>(y, stage, tokens, lane, window);
    }
  }
}

__device__ __forceinline__ void store_output(const MatmulResult& r, int64_t i, float v) {
  if (r.kind == Float::kF32)
    static_cast<uint32_t*>(r.out)[i] = F32::store(v);
  else
    static_cast<uint16_t*>(r.out)[i] = r.kind == Float::kBf16 ? Bf16::store(v) : F16::store(v);
}

template <class C>
__global__ void __launch_bounds__(kFewThreads, C::kBlocks) sm80_nvfp4_blocks_small_m_kernel(MatmulArgs g) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<typename C::Shared*>(memory);
  const GemmShape& s = g.shape;
  const Operand a(g.a, s.depth), b(g.b, s.depth);
  const Lane lane;
  const WindowAlpha alpha_of(g);
  const int stages = static_cast<int>((s.depth + C::kDepth * kWindow - 1) / (C::kDepth * kWindow));
  // Neighbouring thread blocks have the same rows of b.
  const auto token_tiles = static_cast<unsigned>((s.rows + C::kTokens - 1) / C::kTokens);
  const int64_t token0 = static_cast<int64_t>(blockIdx.x % token_tiles) * C::kTokens;
  const int64_t col0 = static_cast<int64_t>(blockIdx.x / token_tiles) * kCols;
  for (int64_t matrix = blockIdx.y; matrix < s.batch; matrix += gridDim.y) {
    Source<C> source(g, a, b, matrix * s.rows + token0, matrix * s.cols + col0, s.rows - token0, s.cols - col0);
    // A group of copies for each stage, also where there are none.
    const auto start = [&](int i, int slot) {
      if (i < stages) source.copy(shared.in.stage[slot]);
      commit_copies();
    };
#pragma unroll
    for (int i = 0; i < C::kStages - 1; ++i) start(i, i);
    wait_for_copies<C::kStages - 2>();
    __syncthreads();
    Tokens<C> tokens;
    tokens.load(shared.in.stage[0]);
    tokens.decode(shared.in.tokens[0]);
    TokenSums<C> y{};
    int slot = 0, last = C::kStages - 1;  // of stage i, and of stage i - 1
    for (int i = 0; i < stages; ++i) {
      const int next = slot + 1 == C::kStages ? 0 : slot + 1;
      wait_for_copies<C::kStages - 3>();
      __syncthreads();  // stage i + 1 is here, tokens of stage i are decoded, and stage i - 1 has been used
      if (i + 1 < stages) tokens.load(shared.in.stage[next]);
      start(i + C::kStages - 1, last);
      if (i + 1 < stages) tokens.decode(shared.in.tokens[(i + 1) % 2]);
      add_stage<C>(y, shared.in.stage[slot], shared.in.tokens[i % 2], lane, alpha_of);
      last = slot, slot = next;
    }
    __syncthreads();  // the last stage has been used
#pragma unroll
    for (int n = 0; n < C::kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        shared.sums[lane.token_of(n, i)][lane.col_of(i)] = C::kWindows ? y[n][i] : mul_rn(y[n][i], kUnit);
    __syncthreads();
    for (int i = threadIdx.x; i < C::kTokens * kCols; i += kFewThreads) {
      const int64_t row = token0 + i / kCols, col = col0 + i % kCols;
      if (row < s.rows && col < s.cols)
        store_output(g.result, (matrix * s.rows + row) * s.cols + col,
                     finish_sum<C::kWindows>(g, shared.sums[i / kCols][i % kCols], matrix, row, col));
    }
    __syncthreads();
  }
}

int64_t thread_blocks(const GemmShape& s, int tiles) {
  return (s.rows + 8 * tiles - 1) / (8 * tiles) * ((s.cols + kCols - 1) / kCols);
}

// As many tokens for a decoded block of b as leave work for every multiprocessor. The result is the same.
int tiles_for(const GemmShape& s) {
  int tiles = s.rows <= 8 ? 1 : s.rows <= 16 ? 2 : 4;
  while (tiles > 1 && s.batch * thread_blocks(s, tiles / 2) <= multiprocessors()) tiles /= 2;
  return tiles;
}

template <class C>
cudaError_t launch(const MatmulArgs& g, cudaStream_t stream) {
  constexpr int64_t kMost = 32768;  // of the 65535 that grid dimension y allows
  constexpr int kBytes = sizeof(typename C::Shared);
  static_assert(kBytes <= 99 << 10, "what every GPU from 8.0 allows");
  const auto kernel = sm80_nvfp4_blocks_small_m_kernel<C>;
  const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (allowed != cudaSuccess) return allowed;
  const dim3 grid(static_cast<unsigned>(thread_blocks(g.shape, C::kTiles)),
                  static_cast<unsigned>(std::min(g.shape.batch, kMost)));
  kernel<<<grid, kFewThreads, kBytes, stream>>>(g);
  return cudaGetLastError();
}

template <int kTiles>
cudaError_t launch(const MatmulArgs& g, cudaStream_t stream) {
  return g.windows() ? launch<Config<kTiles, true>>(g, stream) : launch<Config<kTiles, false>>(g, stream);
}

}  // namespace

cudaError_t launch_sm80_nvfp4_blocks_small_m(const MatmulArgs& g, cudaStream_t stream, int tokens) {
  switch (tokens ? tokens / 8 : tiles_for(g.shape)) {
    case 1: return launch<1>(g, stream);
    case 2: return launch<2>(g, stream);
    default: return launch<4>(g, stream);
  }
}

}  // namespace jnvfp4
