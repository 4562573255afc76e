// Kernels that prepare the operands of the fused, pinned and windows kernels of Hopper, and run before them.
#include "../decode.cuh"
#include "fused.h"
#include "grouped.h"
#include "groups.cuh"
#include "launch.cuh"
#include "pinned.h"
#include "ptx.cuh"
#include "windows.h"

namespace jnvfp4 {
namespace {

// ---------------------------------------------------------------- the left operand of the fused kernels
// Fragment order, inside a window of 64 along K: position 16 j + 8 q + 2 t + b holds element 16 t + 8 (j / 2) +
// 2 (j % 2) + q + 4 b. Lane t of a quad then needs for the four k16 steps j of wgmma exactly the elements of block t: 8
// neighbouring bytes of codes and one scale of a row of b.

// Transposes 4 x 4 words among the four threads of eight whose indices are two apart: thread t gets word t of each.
__device__ __forceinline__ void transpose_words(uint32_t (&p)[4], int t) {
  const bool odd = t & 1, up = t & 2;
  uint32_t x = __shfl_xor_sync(~0u, odd ? p[0] : p[1], 2), y = __shfl_xor_sync(~0u, odd ? p[2] : p[3], 2);
  if (odd)
    p[0] = x, p[2] = y;
  else
    p[1] = x, p[3] = y;
  x = __shfl_xor_sync(~0u, up ? p[0] : p[2], 4), y = __shfl_xor_sync(~0u, up ? p[1] : p[3], 4);
  if (up)
    p[0] = x, p[1] = y;
  else
    p[2] = x, p[3] = y;
}

// Puts a window, which eight threads have, into fragment order: one pair of each block. Returns the index to write to.
__device__ __forceinline__ int64_t arrange_window(uint32_t (&p)[4], int64_t src) {
  transpose_words(p, threadIdx.x / 2 % 4);
  const int lane = threadIdx.x % 8;
  return src - lane + lane % 2 * 4 + lane / 2;
}

// Source of NVFP4 codes: eight elements as the pairs (k, k + 4) of fragment order.
struct Codes {
  const uint32_t* data;
  const uint8_t* scale;

  struct Raw {
    uint32_t codes, scale;
  };
  __device__ __forceinline__ Raw load(int64_t i) const { return {__ldcs(data + i), __ldg(scale + i / 2)}; }
  static __device__ __forceinline__ void pairs(const Raw& raw, uint32_t (&p)[4]) {
    uint32_t scale, unused;
    Decode<F16>::scales(raw.scale, scale, unused);
    Decode<F16>::eight(raw.codes, scale, p);
  }
  // Puts pairs into fragment order. Returns the index to write to.
  static __device__ __forceinline__ int64_t arrange(uint32_t (&p)[4], int64_t at) { return arrange_window(p, at); }
};
// Source for the pinned kernel, which multiplies block by block: position 8 q + 2 t + b of a block holds element
// 4 t + q + 2 b, so that lane t needs a quarter of a block.
struct BlockCodes : Codes {
  static __device__ __forceinline__ void pairs(const Raw& raw, uint32_t (&p)[4]) {
    Codes::pairs({__byte_perm(raw.codes, 0, 0x3120), raw.scale}, p);
  }
  // Two threads have a block, and exchange words.
  static __device__ __forceinline__ int64_t arrange(uint32_t (&p)[4], int64_t at) {
    const bool odd = threadIdx.x & 1;
    const uint32_t x = __shfl_xor_sync(~0u, odd ? p[0] : p[1], 1), y = __shfl_xor_sync(~0u, odd ? p[2] : p[3], 1);
    if (odd)
      p[2] = p[1], p[0] = x, p[1] = y;
    else
      p[1] = p[2], p[2] = x, p[3] = y;
    return at;
  }
};
struct Halves {
  const uint4* data;

  using Raw = uint4;
  __device__ __forceinline__ Raw load(int64_t i) const { return __ldcs(data + i); }
  static __device__ __forceinline__ void pairs(const Raw& raw, uint32_t (&p)[4]) { permute8(raw, p); }
  static __device__ __forceinline__ int64_t arrange(uint32_t (&p)[4], int64_t at) { return arrange_window(p, at); }
};

// Prepares rows; a thread has 8 elements at a time, kSteps of them in flight.
template <class Source, int kSteps>
__device__ __forceinline__ void prepare_rows(const Source& source, uint4* out, int64_t rows, int64_t depth,
                                             int64_t block) {
  const int64_t here = depth / 8, padded = (depth + kWindow - 1) / kWindow * 8;  // eights of a row
  const int64_t first = block * kThreads * kSteps + threadIdx.x;
  typename Source::Raw raw[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int64_t at = first + i * kThreads, row = here == padded ? 0 : quotient(at, padded), eight = at - row * padded;
    raw[i] = {};
    if (at < rows * padded && (here == padded || eight < here)) raw[i] = source.load(row * here + eight);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int64_t at = first + i * kThreads;
    uint32_t p[4];
    Source::pairs(raw[i], p);
    const int64_t to = Source::arrange(p, at);  // all threads: a shuffle is of whole warps
    if (at < rows * padded) out[to] = make_uint4(p[0], p[1], p[2], p[3]);
  }
}

template <class Source, int kSteps>
__global__ void __launch_bounds__(kThreads)
    sm90_prepare_kernel(Source source, uint4* out, int64_t rows, int64_t depth, uint32_t* flags, int64_t flag_count) {
  wait_for_previous_kernel();  // which may make a, or read what `out` was before
  launch_dependents();         // it waits before it reads `out`
  for (int64_t i = thread_index(); i < flag_count; i += thread_count()) flags[i] = 0;
  prepare_rows<Source, kSteps>(source, out, rows, depth, blockIdx.x);
}

// ---------------------------------------------------------------- grouped GEMMs
// The first CTAs make the lists of tiles, the others have rows.
template <class Source, int kSteps>
__global__ void __launch_bounds__(kThreads)
    sm90_prepare_grouped_kernel(Source source, uint4* out, int64_t rows, int64_t depth,
                                const __grid_constant__ GroupedListings lists) {
  wait_for_previous_kernel();
  launch_dependents();
  constexpr int kLists = 2;
  if (blockIdx.x >= kLists)
    prepare_rows<Source, kSteps>(source, out, rows, depth, int64_t{blockIdx.x} - kLists);
  else if (blockIdx.x == 0)
    list_tiles(lists.rows);
  else if (lists.tails.header)
    list_tiles(lists.tails);
}

// ---------------------------------------------------------------- operands with windows
// Computes decode_scale of the rule.
__device__ __forceinline__ float decode_factor(float amax, const MatmulOperand& x) {
  return div_rn(amax, 6.0f * x.e4m3_max);
}

// Splits a factor into eight bfloat16, so that the dot product of a column's and a token's is the factors' product.
// Three bfloat16 have all bits of a float; of their nine products the least one is left out. A small piece is taken
// times a power of two, which the piece that it meets is divided by: so those of factors from 2^-118 on are not
// subnormal. No piece of a factor is 0 unless the factor is, and all have its sign, so that an infinity gives
// infinities of one sign.
__device__ __forceinline__ uint4 pieces_of(float factor, bool column) {
  const auto high = [](float v) { return float_of(bits_of(v) & 0xffff0000u); };
  float p[3] = {isnan(factor) ? float_of(kNan) : high(factor), 0, 0};
  if (isfinite(factor)) {
    const float rest = sub_rn(factor, p[0]);
    p[1] = high(rest), p[2] = sub_rn(rest, p[1]);
  }
  const uint32_t least = factor == 0 ? 0u : (bits_of(factor) >> 16 & 0x8000u) | 1u;
  const auto piece = [&](int i, float power) { return max(bits_of(mul_rn(p[i], power)) >> 16, least); };
  const auto two = [&](int i, float of_i, int j, float of_j) { return piece(i, of_i) | piece(j, of_j) << 16; };
  constexpr float kMore = 0x1p8f, kLess = 0x1p-8f;
  return column
             ? make_uint4(two(0, 1, 0, kLess), two(1, kMore, 0, kLess), two(2, kMore, 1, 1), two(1, 0x1p-4f, 2, 0x1p4f))
             : make_uint4(two(0, 1, 1, kMore), two(0, kLess, 2, kMore), two(0, kLess, 1, 1),
                          two(2, 0x1p4f, 1, 0x1p-4f));
}

// Makes the factors of eight windows of a row, which are a sector of its amaxes, or the one of a row.
__device__ __forceinline__ void make_factors(const WindowsOperand& x, int64_t thread) {
  const bool windows = x.factors_of != FactorsOf::kRows;
  const int64_t count = windows ? x.source.map.windows_per_row : 1, eights = (count + 7) / 8;
  const int64_t piece = quotient(thread, x.tile_rows), tile = quotient(piece, eights), matrix = quotient(tile, x.tiles);
  if (tile >= x.matrices * x.tiles) return;
  const int place = static_cast<int>(thread - piece * x.tile_rows);
  const int64_t row = (tile - matrix * x.tiles) * x.tile_rows + place, row_of_all = matrix * x.rows + row;
  const int64_t first = (piece - tile * eights) * 8;
  for (int64_t w = first; w < min(first + 8, count); ++w) {
    float amax = 0;
    if (row < x.rows) amax = windows ? __ldg(x.source.amax + row_of_all * count + w) : amax_of(x.source, row_of_all);
    const float factor = decode_factor(amax, x.source) * x.unscale;
    const int64_t at = (tile * count + w) * x.tile_rows + place;
    if (x.factors_of == FactorsOf::kColumnPieces || x.factors_of == FactorsOf::kTokenPieces)
      static_cast<uint4*>(x.factors)[at] = pieces_of(factor, x.factors_of == FactorsOf::kColumnPieces);
    else
      static_cast<float*>(x.factors)[at] = factor;
  }
}

// Decodes rows; a thread has 8 elements at a time, kSteps of them in flight.
template <int kSteps>
__device__ __forceinline__ void decode_rows(const WindowsOperand& x, int64_t eights, int64_t block) {
  const Codes source{static_cast<const uint32_t*>(x.source.data), x.source.scale};
  const int64_t first = block * kThreads * kSteps + threadIdx.x;
  Codes::Raw raw[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    if (first + i * kThreads < eights) raw[i] = source.load(first + i * kThreads);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    uint32_t p[4];
    Codes::pairs(raw[i], p);
    if (first + i * kThreads < eights)
      static_cast<uint4*>(x.numbers)[first + i * kThreads] = make_uint4(p[0], p[1], p[2], p[3]);
  }
}

// CTAs for an operand: first for its factors, then for its numbers.
struct WindowsBlocks {
  int64_t factors, numbers;
};
WindowsBlocks windows_blocks(const WindowsOperand& x, int64_t depth, int steps) {
  const auto blocks = [](int64_t items, int64_t per) { return (items + per - 1) / per; };
  const int64_t pieces = x.factors_of == FactorsOf::kRows ? 1 : (x.source.map.windows_per_row + 7) / 8;
  return {blocks(x.matrices * x.tiles * x.tile_rows * pieces, kThreads),
          blocks(x.matrices * x.rows * (depth / 8), int64_t{kThreads} * steps)};
}

template <int kSteps>
__global__ void __launch_bounds__(kThreads)
    sm90_prepare_windows_kernel(const __grid_constant__ WindowsPreparation p, WindowsBlocks a, WindowsBlocks b) {
  wait_for_previous_kernel();
  launch_dependents();
  for (int64_t i = thread_index(); i < p.flag_count; i += thread_count()) p.flags[i] = 0;
  int64_t block = blockIdx.x;
  const bool second = block >= a.factors + a.numbers;
  if (second) block -= a.factors + a.numbers;
  const WindowsOperand& x = second ? p.columns : p.tokens;
  const int64_t factors = second ? b.factors : a.factors;
  if (block < factors)
    make_factors(x, block * kThreads + threadIdx.x);
  else
    decode_rows<kSteps>(x, x.matrices * x.rows * (p.depth / 8), block - factors);
}

// Arranges amaxes and kinds (window_sums.h), those of one thread of pinned.cuh adjacent. A thread has eight windows.
__global__ void __launch_bounds__(kThreads) sm90_amaxes_kernel(MatmulOperand x, float* out, int64_t batch, int64_t rows,
                                                               int64_t padded_rows, int64_t depth, bool of_tokens) {
  wait_for_previous_kernel();
  launch_dependents();
  constexpr int kTile = kFusedCols / 2;
  const int64_t count = depth / kWindow, windows = (depth + kFusedDepth - 1) / kFusedDepth * (kFusedDepth / kWindow);
  const int64_t pieces = (windows + 7) / 8;
  const int place = threadIdx.x % kTile;
  const int in = of_tokens ? place / 16 * 16 + place / 2 % 2 * 8 + place % 16 / 4 * 2 + place % 2 : place;
  for (int64_t i = thread_index(); i < batch * padded_rows * pieces; i += thread_count()) {
    const int64_t piece = quotient(i, kTile), tile = quotient(piece, pieces), first = (piece - tile * pieces) * 8;
    const int64_t row_of_all = tile * kTile + in, matrix = quotient(row_of_all, padded_rows);
    const int64_t row = row_of_all - matrix * padded_rows, from = matrix * rows + row;
    for (int64_t w = first; w < min(first + 8, windows); ++w) {
      float amax = 0;
      int size = 0;
      if (row < rows && w < count) {
        const int64_t window = from * count + w;
        const uint4* const codes = static_cast<const uint4*>(x.data) + 2 * window;
        const uint4 low = __ldg(codes), high = __ldg(codes + 1);
        amax = x.map.windows() ? __ldg(x.amax + window) : amax_of(x, from);
        size = size_of_window({low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w},
                              __ldg(reinterpret_cast<const uint32_t*>(x.scale) + window));
      }
      float* const to = out + (tile * windows + w) * kPinnedAmaxes;
      to[place] = amax;
      const uint32_t sizes = bits_of_size(size) << (of_tokens ? kTokenSize : kColumnSize);
      const uint32_t kinds = __reduce_or_sync(~0u, kinds_of(amax) | sizes);
      if (place % 32 == 0) reinterpret_cast<uint32_t*>(to)[kTile + place / 32] = kinds;
    }
  }
}

// ---------------------------------------------------------------- copies of rows whose pitch no tensor map takes
template <class Word>
__global__ void __launch_bounds__(kThreads)
    sm90_pitch_kernel(const Word* from, Word* to, int64_t rows, int64_t words, int64_t pitch) {
  for (int64_t i = thread_index(); i < rows * words; i += thread_count()) {
    const int64_t row = quotient(i, words);
    to[row * pitch + i - row * words] = __ldg(from + i);
  }
}

template <class Word>
void launch_pitch(const void* from, void* to, int64_t rows, int64_t bytes, int64_t pitch, cudaStream_t stream) {
  constexpr int64_t kSize = sizeof(Word);
  sm90_pitch_kernel<<<grid_for(rows * bytes / kSize, kThreads), kThreads, 0, stream>>>(
      static_cast<const Word*>(from), static_cast<Word*>(to), rows, bytes / kSize, pitch / kSize);
}

// Calls f with the source of an operand.
template <class F>
cudaError_t with_source(const MatmulOperand& x, Order order, const F& f) {
  if (!x.quantized()) return f(Halves{static_cast<const uint4*>(x.data)});
  const Codes codes{static_cast<const uint32_t*>(x.data), x.scale};
  return order == Order::kBlocks ? f(BlockCodes{codes}) : f(codes);
}

// Returns whether a launch has so much work that all resident threads have it at once, kSteps = 8, else 2.
bool has_many(int64_t eights) { return eights > int64_t{multiprocessors()} * 8 * kThreads * 8; }

// Launches a kernel over rows, after `lists` CTAs of other work. kernel_of(source, steps): the kernel.
template <class KernelOf, class... Args>
cudaError_t launch_rows(const MatmulOperand& a, Order order, void* out, int64_t rows, int64_t depth, int64_t lists,
                        cudaStream_t stream, const KernelOf& kernel_of, const Args&... args) {
  const int64_t eights = rows * ((depth + kWindow - 1) / kWindow) * 8;
  const auto launch = [&](auto source, auto steps) {
    const int64_t per_cta = int64_t{kThreads} * steps;
    return launch_early(kernel_of(source, steps), static_cast<unsigned>(lists + (eights + per_cta - 1) / per_cta),
                        kThreads, 1, 0, stream, source, static_cast<uint4*>(out), rows, depth, args...);
  };
  return with_source(a, order, [&](auto source) {
    return has_many(eights) ? launch(source, std::integral_constant<int, 8>())
                            : launch(source, std::integral_constant<int, 2>());
  });
}

}  // namespace

cudaError_t launch_sm90_prepare(const MatmulOperand& a, Order order, void* out, int64_t rows, int64_t depth,
                                uint32_t* flags, int64_t flag_count, cudaStream_t stream) {
  const auto kernel_of = [](auto source, auto steps) { return sm90_prepare_kernel<decltype(source), steps>; };
  return launch_rows(a, order, out, rows, depth, 0, stream, kernel_of, flags, flag_count);
}

cudaError_t launch_sm90_amaxes(const MatmulOperand& x, float* out, int64_t batch, int64_t rows, int tile_rows,
                               int64_t depth, bool of_tokens, cudaStream_t stream) {
  const int64_t padded = round_up(rows, tile_rows);
  return launch_early(sm90_amaxes_kernel, grid_for(batch * padded * (depth / kWindow + 7) / 8, kThreads), kThreads, 1,
                      0, stream, x, out, batch, rows, padded, depth, of_tokens);
}

cudaError_t launch_sm90_prepare_grouped(const MatmulOperand& a, Order order, void* out, int64_t rows, int64_t depth,
                                        const GroupedListings& lists, cudaStream_t stream) {
  const auto kernel_of = [](auto source, auto steps) { return sm90_prepare_grouped_kernel<decltype(source), steps>; };
  return launch_rows(a, order, out, rows, depth, 2, stream, kernel_of, lists);
}

cudaError_t launch_sm90_prepare_windows(const WindowsPreparation& p, cudaStream_t stream) {
  const int64_t eights = (p.tokens.matrices * p.tokens.rows + p.columns.matrices * p.columns.rows) * (p.depth / 8);
  const bool many = has_many(eights);
  const int steps = many ? 8 : 2;
  const WindowsBlocks a = windows_blocks(p.tokens, p.depth, steps), b = windows_blocks(p.columns, p.depth, steps);
  const int64_t blocks = a.factors + a.numbers + b.factors + b.numbers;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;  // more than any memory holds
  const auto kernel = many ? sm90_prepare_windows_kernel<8> : sm90_prepare_windows_kernel<2>;
  return launch_early(kernel, static_cast<unsigned>(blocks), kThreads, 1, 0, stream, p, a, b);
}

cudaError_t launch_sm90_pitch(const void* from, void* to, int64_t rows, int64_t bytes, int64_t pitch,
                              cudaStream_t stream) {
  if (bytes % 8 == 0)
    launch_pitch<uint2>(from, to, rows, bytes, pitch, stream);
  else if (bytes % 4 == 0)
    launch_pitch<uint32_t>(from, to, rows, bytes, pitch, stream);
  else
    launch_pitch<uint8_t>(from, to, rows, bytes, pitch, stream);
  return cudaGetLastError();
}

}  // namespace jnvfp4
