// out = a b^T on Hopper, for operands that have an amax for each window (64 along K). sm90_prepare.cu has decoded both
// to float16, in the same order along K, and has made factors of their amaxes.
//
// Rows of one operand are the 64 rows of wgmma ("columns", since they are columns of the result), rows of the other its
// columns ("tokens"), both from shared memory. A warpgroup sums a window in one set of registers, and adds it, times
// the factors of that window, to another. Meanwhile another warpgroup multiplies: they take turns on the tensor cores.
// Two thread blocks of a cluster have the same tokens and neighbouring columns; each loads half of the tokens for both.
// Thread blocks are persistent: one thread loads, two warpgroups compute.
//
// Columns have windows. Tokens may have too; if not, their factors come last. If only a has windows, operands are
// exchanged: tokens are then rows of b.
//
// The sum along K: the tensor core's in a window, windows ascending, and for each of `splits` parts of K, to the last
// of which the others are added in their order. Fixed by the shape, so runs have the same bits.
#include <cuda.h>

#include "../device.cuh"
#include "sm90_maps.h"
#include "sm90_ptx.cuh"
#include "sm90_windows.h"

namespace jnvfp4 {
namespace {

struct WindowsArgs {
  MatmulResult result;
  int64_t result_cols;
  bool exchanged;
  int tokens, columns;      // of one matrix
  int pairs, matrix_tiles;  // tiles along columns, and of one matrix
  int items, splits;        // parts of K of all tiles, and of one
  int windows;
  const float *token_factors, *column_factors;  // WindowsOperand::factors
  float* sums;                                  // of all splits but the last
  uint32_t* flags;                              // one for each warpgroup that writes sums: 0 until it has
};

// 64 along K of the rows of half a tile of tokens, and of a thread block's columns.
struct WindowsMaps {
  CUtensorMap tokens, columns;
};

// kBoth: whether tokens have windows.
template <bool kBoth_>
struct WindowsConfig {
  static constexpr bool kBoth = kBoth_;
  static constexpr int kTokens = kWindowsTokens, kColumns = kFusedCols / 2;
  static constexpr int kThreads = 128 * 3, kSums = kTokens / 2;  // of a thread
  // Registers of the loading warpgroup and of the others.
  static constexpr int kLoading = 40, kComputing = 232;
  // Factors have a slot more than numbers have stages, which are released before factors are read.
  static constexpr int kStages = 4, kSlots = kStages + 1;
  static constexpr int kTokenBytes = kTokens * 128, kColumnBytes = kColumns * 128;
  static constexpr int kColumnFactors = kColumns * 4, kTokenFactors = kBoth ? kTokens * 4 : 0;
  static constexpr int kFactors = kColumnFactors + kTokenFactors;
  // Sums on their way to the result, 64 tokens and 64 columns: padded so that neither side meets in a bank.
  static constexpr int kOutTokens = 64, kOutPitch = 64 + 4, kExchangedPitch = 64 + 8;
  static constexpr int kOut = 64 * (kBoth ? kOutPitch : kExchangedPitch) * 4;

  static constexpr int kAtColumns = kStages * kTokenBytes, kAtFactors = kAtColumns + kStages * kColumnBytes;
  static constexpr int kAtOut = kAtFactors + kSlots * kFactors, kAtAlpha = kAtOut + 2 * kOut;
  static constexpr int kAtFull = kAtAlpha + 2 * kTokens * 4, kAtEmpty = kAtFull + 8 * kStages;
  static constexpr int kShared = kAtEmpty + 8 * kStages + 1024;  // to align the start
  static_assert(kTokens % kOutTokens == 0 && kShared <= 232448);
};

// ---------------------------------------------------------------- what a thread block computes
struct WindowsItem {
  int matrix, token, column;  // the first token, and the first column of the pair of thread blocks
  int split, first, end;      // windows
  int64_t tile;
};

// Splits of a tile follow each other, so that the last one waits only for blocks that have started before. Groups of 4
// tiles of tokens go along all columns, so that blocks that run together share both operands in L2.
template <class C>
__device__ __forceinline__ WindowsItem item_of(const WindowsArgs& a, int i) {
  constexpr int kGroup = 4;
  const int all = i / a.splits, split = i - all * a.splits, matrix = all / a.matrix_tiles;
  const int tile = all - matrix * a.matrix_tiles;
  const int per = a.pairs * kGroup, first = tile / per * kGroup;
  const int width = min(kGroup, a.matrix_tiles / a.pairs - first), rest = tile - first * a.pairs;
  const auto part = [&](int s) { return static_cast<int>(int64_t{a.windows} * s / a.splits); };
  return {
      matrix, (first + rest % width) * C::kTokens, rest / width * 2 * C::kColumns, split, part(split), part(split + 1),
      all};
}

// ---------------------------------------------------------------- the thread that loads
template <class C>
__device__ __forceinline__ void load_tiles(const WindowsArgs& a, const WindowsMaps& maps, uint32_t smem) {
  const int rank = cluster_rank(), token_tiles = a.matrix_tiles / a.pairs;
  constexpr int kHalf = C::kTokens / 2;
  int stage = 0, phase = 0, slot = 0;
  for (int i = blockIdx.x / 2; i < a.items; i += gridDim.x / 2) {
    const WindowsItem item = item_of<C>(a, i);
    const int token = item.matrix * a.tokens + item.token + rank * kHalf;
    const int column = item.matrix * a.columns + item.column + rank * C::kColumns;
    const int64_t token_tile = int64_t{item.matrix} * token_tiles + item.token / C::kTokens;
    const int64_t column_tile = int64_t{item.matrix} * a.pairs * 2 + item.column / C::kColumns + rank;
    constexpr int kOfTokens = C::kTokenFactors / 4, kOfColumns = C::kColumnFactors / 4;
    const float* of_tokens = a.token_factors + (token_tile * a.windows + item.first) * kOfTokens;
    const float* of_columns = a.column_factors + (column_tile * a.windows + item.first) * kOfColumns;
    for (int w = item.first; w < item.end; ++w, of_tokens += kOfTokens, of_columns += kOfColumns) {
      barrier_wait(smem + C::kAtEmpty + 8 * stage, phase ^ 1);
      const uint32_t bar = smem + C::kAtFull + 8 * stage, factors = smem + C::kAtFactors + slot * C::kFactors;
      barrier_expect(bar, C::kTokenBytes + C::kColumnBytes + C::kFactors);
      load_box_to(3, smem + stage * C::kTokenBytes + rank * kHalf * 128, maps.tokens, bar, w * kWindow, token);
      load_box(smem + C::kAtColumns + stage * C::kColumnBytes, maps.columns, bar, w * kWindow, column);
      load_bytes(factors, of_columns, C::kColumnFactors, bar);
      if constexpr (C::kBoth) load_bytes(factors + C::kColumnFactors, of_tokens, C::kTokenFactors, bar);
      if (++stage == C::kStages) stage = 0, phase ^= 1;
      if (++slot == C::kSlots) slot = 0;
    }
  }
  // Stays until the other block has read what this one has loaded for it.
  for (int i = 0; i < C::kStages; ++i) {
    barrier_wait(smem + C::kAtEmpty + 8 * stage, phase ^ 1);
    if (++stage == C::kStages) stage = 0, phase ^= 1;
  }
}

// ---------------------------------------------------------------- sums to results
// Four neighbouring columns of the result.
struct FourResults {
  float alpha[4], bias[4];

  __device__ __forceinline__ void load_bias(const WindowsArgs& a, int col) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      bias[i] = a.result.bias ? load_float(a.result.bias, a.result.bias_kind, min(int64_t{col} + i, a.result_cols - 1))
                              : 0.0f;
  }
  // Of a row over all matrices.
  __device__ __forceinline__ void write(const WindowsArgs& a, int64_t row, int col, uint4 sums) const {
    float v[4] = {float_of(sums.x), float_of(sums.y), float_of(sums.z), float_of(sums.w)};
#pragma unroll
    for (int i = 0; i < 4; ++i)  // the addition makes -0 the rule's 0
      v[i] = gemm_epilogue(__fadd_rn(v[i], 0.0f), alpha[i], bias[i], a.result.bias != nullptr);
    const int64_t at = row * a.result_cols + col;
    if (a.result.kind == Float::kBf16)
      store<Bf16>(a, at, col, v);
    else if (a.result.kind == Float::kF16)
      store<F16>(a, at, col, v);
    else
      store<F32>(a, at, col, v);
  }

 private:
  template <class T>
  static __device__ __forceinline__ void store(const WindowsArgs& a, int64_t at, int col, const float (&v)[4]) {
    auto* p = static_cast<typename T::Stored*>(a.result.out) + at;
    if (a.result_cols % 4 == 0) {
      if constexpr (sizeof(typename T::Stored) == 4)
        *reinterpret_cast<uint4*>(p) = make_uint4(T::store(v[0]), T::store(v[1]), T::store(v[2]), T::store(v[3]));
      else
        *reinterpret_cast<uint2*>(p) = make_uint2(pair<T>(v[0], v[1]), pair<T>(v[2], v[3]));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (col + i < a.result_cols) p[i] = T::store(v[i]);
    }
  }
  // The conversion instructions have another NaN than the stored one.
  template <class T>
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    if (isnan(low) || isnan(high)) return T::store(low) | uint32_t{T::store(high)} << 16;
    return std::is_same_v<T, Bf16> ? bf16_pair(low, high) : f16_pair(low, high);
  }
};

// ---------------------------------------------------------------- a warpgroup that computes
template <class C>
struct WindowsConsumer {
  using Sums = float[C::kSums];

  const WindowsArgs& a;
  uint32_t smem;
  int rank, wg;              // smem and wg by a shuffle, so that they are kept in uniform registers
  uint64_t tokens, columns;  // in the first stage
  int stage = 0, phase = 0, slot = 0;

  __device__ __forceinline__ WindowsConsumer(const WindowsArgs& args, uint32_t shared)
      : a(args),
        smem(__shfl_sync(~0u, shared, 0)),
        rank(cluster_rank()),
        wg(__shfl_sync(~0u, threadIdx.x / 128 - 1, 0)),
        tokens(shared_matrix(smem)),
        columns(shared_matrix(smem + C::kAtColumns + wg * 64 * 128)) {}

  // Of the warpgroup's 64 columns, that of the first register of a fragment.
  static __device__ __forceinline__ int fragment_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

  // ---- the sum along K
  // Named barriers 4 and 5: one warpgroup waits, the other arrives. With windows on both sides a warpgroup adds for
  // longer than the other multiplies, and turns would only cost.
  __device__ __forceinline__ void wait_turn() {
    if constexpr (!C::kBoth) named_sync(4 + wg, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (!C::kBoth) named_arrive(5 - wg, 256);
  }
  // The stage is free, in both blocks that load for it.
  __device__ __forceinline__ void release() {
    if (threadIdx.x % 32 < 2) barrier_arrive_in(smem + C::kAtEmpty + 8 * stage, threadIdx.x % 32);
  }

  __device__ __forceinline__ void wait_for_stage() { barrier_wait(smem + C::kAtFull + 8 * stage, phase); }
  // Starts the sum of a window.
  __device__ __forceinline__ void multiply(Sums& window) {
    wait_turn();
    wgmma_fence();
    const uint64_t of_tokens = tokens + stage * (C::kTokenBytes / 16),
                   of_columns = columns + stage * (C::kColumnBytes / 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma_shared(window, of_columns + 2 * j, of_tokens + 2 * j, j > 0);
    wgmma_commit();
    pass_turn();
  }

  // The factors of a thread's two columns of a window.
  __device__ __forceinline__ float2 load_factors(int place) const {
    const uint32_t at = smem + C::kAtFactors + slot * C::kFactors + (wg * 64 + place) * 4;
    return {float_of(load_shared32(at)), float_of(load_shared32(at + 8 * 4))};
  }
  // Adds a window, times the factors of its columns, which come before the wait for a turn.
  __device__ __forceinline__ void add_window_of_columns(Sums& sums) {
    Sums window;
    const float2 columns = load_factors(fragment_row());
    multiply(window);
    wgmma_wait<0>();
    release();
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) sums[i] = __fmaf_rn(window[i], i % 4 < 2 ? columns.x : columns.y, sums[i]);
  }
  // The same, times also the factors of its tokens, of which a lane has four of 16 together. Some come before the wait,
  // for which registers do not suffice for all.
  __device__ __forceinline__ void add_window_of_both(Sums& sums) {
    constexpr int kParts = C::kTokens / 16, kAhead = 4;
    Sums window;
    multiply(window);
    const uint32_t at = smem + C::kAtFactors + slot * C::kFactors + C::kColumnFactors + threadIdx.x % 4 * 16;
    const float2 columns = load_factors(fragment_row());
    uint4 tokens[kAhead];
#pragma unroll
    for (int p = 0; p < kAhead; ++p) tokens[p] = load_shared128(at + p * 64);
    wgmma_wait<0>();
    release();
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const uint4 v = tokens[p % kAhead];
      const float factor[4] = {float_of(v.x), float_of(v.y), float_of(v.z), float_of(v.w)};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float both = factor[i / 4 * 2 + i % 2] * (i % 4 < 2 ? columns.x : columns.y);
        sums[8 * p + i] = __fmaf_rn(window[8 * p + i], both, sums[8 * p + i]);
      }
      if (p + kAhead < kParts) tokens[p % kAhead] = load_shared128(at + (p + kAhead) * 64);
    }
  }
  __device__ __forceinline__ void sum(Sums& sums, int windows) {
#pragma unroll
    for (float& s : sums) s = 0;
    for (int w = 0; w < windows; ++w) {
      wait_for_stage();
      if constexpr (C::kBoth)
        add_window_of_both(sums);
      else
        add_window_of_columns(sums);
      if (++stage == C::kStages) stage = 0, phase ^= 1;
      if (++slot == C::kSlots) slot = 0;
    }
  }

  // ---- parts of K
  __device__ __forceinline__ void sync_warpgroup() const { named_sync(1 + wg, 128); }
  // Of this warpgroup, in the order in which threads have the sums.
  __device__ __forceinline__ int64_t place_of(const WindowsItem& item, int split) const {
    return ((item.tile * (a.splits - 1) + split) * 2 + rank) * 2 + wg;
  }
  __device__ __forceinline__ float4* partial(const WindowsItem& item, int split) const {
    return reinterpret_cast<float4*>(a.sums) + place_of(item, split) * C::kTokens * 16 + threadIdx.x % 128;
  }
  __device__ __forceinline__ void keep_partial(const Sums& sums, const WindowsItem& item) const {
    float4* const to = partial(item, item.split);
#pragma unroll
    for (int i = 0; i < C::kSums; i += 4) to[i * 32] = {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
    sync_warpgroup();
    if (threadIdx.x % 128 == 0) raise_flag(a.flags + place_of(item, item.split));
    __syncwarp();  // instructions for whole warps follow
  }
  __device__ __forceinline__ void add_partials(Sums& sums, const WindowsItem& item) const {
    if (threadIdx.x % 128 == 0)
      for (int split = 0; split < item.split; ++split) wait_for_flag(a.flags + place_of(item, split));
    __syncwarp();
    sync_warpgroup();
    for (int split = 0; split < item.split; ++split) {
      const float4* const from = partial(item, split);
#pragma unroll
      for (int i = 0; i < C::kSums; i += 4) {
        const float4 p = __ldcg(from + i * 32);
        sums[i] += p.x, sums[i + 1] += p.y, sums[i + 2] += p.z, sums[i + 3] += p.w;
      }
    }
  }

  // ---- the result
  __device__ __forceinline__ uint32_t out() const { return smem + C::kAtOut + wg * C::kOut; }
  __device__ __forceinline__ uint32_t alphas() const { return smem + C::kAtAlpha + wg * C::kTokens * 4; }

  // The sums of the `chunk`th tokens of the tile. Registers have no index that is known late, hence the cases.
  template <bool kExchanged, int kChunk>
  __device__ __forceinline__ void stage_chunk(const Sums& sums, int chunk) const {
    constexpr int kToken = kExchanged ? 1 : C::kOutPitch, kColumn = kExchanged ? C::kExchangedPitch : 1;
    if (chunk != kChunk) return;
    const uint32_t base = out() + (threadIdx.x % 4 * 2 * kToken + fragment_row() * kColumn) * 4;
#pragma unroll
    for (int eight = 0; eight < C::kOutTokens / 8; ++eight)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_shared(base + ((8 * eight + i % 2) * kToken + i / 2 * 8 * kColumn) * 4,
                     sums[kChunk * C::kOutTokens / 2 + 4 * eight + i]);
  }
  template <bool kExchanged>
  __device__ __forceinline__ void stage_chunk(const Sums& sums, int chunk) const {
    static_assert(C::kTokens == 3 * C::kOutTokens);
    stage_chunk<kExchanged, 0>(sums, chunk);
    stage_chunk<kExchanged, 1>(sums, chunk);
    stage_chunk<kExchanged, 2>(sums, chunk);
  }

  // A thread has four columns of every eighth token of a chunk. Little code, not unrolled: the instruction cache misses
  // it at every tile.
  __device__ __forceinline__ void write_chunk(FourResults& four, const WindowsItem& item, int col, int chunk) const {
    const int thread = threadIdx.x % 128, first = chunk * C::kOutTokens + thread / 16;
    const int end = min(a.tokens - item.token, (chunk + 1) * C::kOutTokens);
    if (col >= a.columns) return;
    uint32_t at = out() + (thread / 16 * C::kOutPitch + thread % 16 * 4) * 4;
#pragma unroll 1
    for (int token = first; token < end; token += 8, at += 8 * C::kOutPitch * 4) {
      if constexpr (!C::kBoth)
#pragma unroll
        for (float& alpha : four.alpha) alpha = float_of(load_shared32(alphas() + token * 4));
      four.write(a, int64_t{item.matrix} * a.tokens + item.token + token, col, load_shared128(at));
    }
  }
  // Tokens are columns of the result: a thread has four of them in every eighth row.
  __device__ __forceinline__ void write_exchanged_chunk(FourResults& four, const WindowsItem& item, int first_row,
                                                        int chunk) const {
    const int thread = threadIdx.x % 128, token = chunk * C::kOutTokens + thread % 16 * 4, col = item.token + token;
    const int rows = min(64, a.columns - first_row);
    if (col >= a.tokens) return;
    four.load_bias(a, col);
#pragma unroll
    for (int i = 0; i < 4; ++i) four.alpha[i] = float_of(load_shared32(alphas() + (token + i) * 4));
    uint32_t at = out() + (thread / 16 * C::kExchangedPitch + thread % 16 * 4) * 4;
#pragma unroll 1
    for (int row = thread / 16; row < rows; row += 8, at += 8 * C::kExchangedPitch * 4)
      four.write(a, int64_t{item.matrix} * a.columns + first_row + row, col, load_shared128(at));
  }

  // The factors of tokens that have no windows. No need to wait for other warps: a sum is staged before they are read.
  __device__ __forceinline__ void stage_alphas(const WindowsItem& item) const {
    const int tile = item.matrix * (a.matrix_tiles / a.pairs) + item.token / C::kTokens;
    const float* const from = a.token_factors + int64_t{tile} * C::kTokens;
    for (int token = threadIdx.x % 128; token < C::kTokens; token += 128)
      store_shared(alphas() + token * 4, __ldg(from + token));
    __syncwarp();
  }
  template <bool kExchanged>
  __device__ __forceinline__ void write(const Sums& sums, const WindowsItem& item) const {
    const int first = item.column + rank * C::kColumns + wg * 64, col = first + threadIdx.x % 16 * 4;
    FourResults four{{1.0f, 1.0f, 1.0f, 1.0f}, {}};
    if constexpr (!kExchanged) four.load_bias(a, col);
#pragma unroll 1
    for (int chunk = 0; chunk < C::kTokens / C::kOutTokens; ++chunk) {
      sync_warpgroup();  // the last chunk has been read
      if (!C::kBoth && chunk == 0) stage_alphas(item);
      stage_chunk<kExchanged>(sums, chunk);
      sync_warpgroup();
      if constexpr (kExchanged)
        write_exchanged_chunk(four, item, first, chunk);
      else
        write_chunk(four, item, col, chunk);
      __syncwarp();  // instructions for whole warps follow
    }
  }
  __device__ __forceinline__ void finish(Sums& sums, const WindowsItem& item) const {
    if (item.split < a.splits - 1) return keep_partial(sums, item);
    if (a.splits > 1) add_partials(sums, item);
    if constexpr (!C::kBoth)
      if (a.exchanged) return write<true>(sums, item);
    write<false>(sums, item);
  }

  __device__ __forceinline__ void run() {
    if (wg == 1) pass_turn();  // the first turn is that of warpgroup 0
    for (int i = blockIdx.x / 2; i < a.items; i += gridDim.x / 2) {
      const WindowsItem item = item_of<C>(a, i);
      Sums sums;
      sum(sums, item.end - item.first);
      finish(sums, item);
    }
    if (wg == 0) wait_turn();  // no barrier is left half full
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sm90_windows_kernel(const __grid_constant__ WindowsArgs a, const __grid_constant__ WindowsMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t any_shared[];
  const uint32_t smem = (shared_address(any_shared) + 1023) & ~1023u;  // the same in both blocks of a cluster
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      barrier_init(smem + C::kAtFull + 8 * i, 1);
      barrier_init(smem + C::kAtEmpty + 8 * i, 4 * 2 * 2);  // a lane of each warp that computes, in both blocks
    }
    fence_barrier_init();
    prefetch_map(maps.tokens), prefetch_map(maps.columns);
  }
  __syncwarp();  // instructions for whole warps follow
  cluster_sync();
  wait_for_kernel_ahead();  // it makes all that is read here
  if (threadIdx.x < 128) {
    let_next_kernel_start();  // it waits for the end of this one
    give_registers<C::kLoading>();
    if (threadIdx.x == 0) load_tiles<C>(a, maps, smem);
    __syncwarp();
  } else {
    take_registers<C::kComputing>();
    WindowsConsumer<C>(a, smem).run();
  }
  cluster_sync();  // no block leaves while another may still arrive or write here
#else
  __trap();  // compiled for another architecture
#endif
}

// ---------------------------------------------------------------- launch
template <class C>
cudaError_t launch_config(const WindowsArgs& args, const WindowsMaps& maps, cudaStream_t stream) {
  const auto kernel = sm90_windows_kernel<C>;
  const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kShared);
  if (allowed != cudaSuccess) return allowed;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = 2, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  // All parts of a tile at a time: then a part waits only for blocks that have started before.
  const int most = std::max(multiprocessors() / 2 / args.splits, 1) * args.splits;
  config.gridDim = dim3(2 * std::min(args.items, most)), config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kShared, config.stream = stream;
  config.attrs = attributes, config.numAttrs = 2;  // the kernel ahead says when this one may start
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, args, maps);
  if (status != cudaSuccess) cudaGetLastError();  // it is returned, and not to be found by the next launch
  return status;
}

cudaError_t make_windows_maps(const WindowsPreparation& p, const WindowsScratch& at, WindowsMaps* maps) {
  const auto source = [&](const WindowsOperand& x, int64_t rows, int box_rows) {
    return MapSource{x.numbers, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, p.depth, rows, p.depth * 2,
                     kWindow,   static_cast<uint32_t>(box_rows)};
  };
  return make_maps({{source(p.tokens, at.token_rows, p.tokens.tile_rows / 2), &maps->tokens},
                    {source(p.columns, at.column_rows, p.columns.tile_rows), &maps->columns}});
}

}  // namespace

cudaError_t launch_sm90_windows(const MatmulArgs& g, const FusedPlan& plan, void* scratch, cudaStream_t stream) {
  const GemmShape s = fused_shape(g.shape, plan);
  const MatmulOperand &tokens = plan.exchanged ? g.b : g.a, &columns = plan.exchanged ? g.a : g.b;
  const int64_t pairs = (s.cols + kFusedCols - 1) / kFusedCols, token_tiles = (s.rows + plan.tokens - 1) / plan.tokens;
  const int64_t items = fused_tiles(s, plan) * plan.splits, windows = s.depth / kWindow;
  const bool both = tokens.map.windows();
  if (items > INT32_MAX) return cudaErrorInvalidConfiguration;  // more results than any memory holds
  if (!columns.map.windows() || s.depth % kWindow || plan.tokens != kWindowsTokens || plan.splits > windows)
    return cudaErrorInvalidValue;  // plan_windows makes no such plans
  auto* const bytes = static_cast<uint8_t*>(scratch);
  const WindowsScratch at = windows_scratch(s, plan);
  const auto floats = [&](int64_t offset) { return reinterpret_cast<float*>(bytes + offset); };
  const WindowsPreparation p{
      {tokens, s.batch, s.rows, token_tiles, kWindowsTokens, both ? FactorsOf::kSixteens : FactorsOf::kRows, 1.0f,
       bytes + at.tokens, floats(at.token_factors)},
      {columns, s.batch, s.cols, 2 * pairs, kFusedCols / 2, FactorsOf::kWindows, 0x1p28f, bytes + at.columns,
       floats(at.column_factors)},
      s.depth,
      reinterpret_cast<uint32_t*>(bytes + at.flags),
      at.flag_count};
  WindowsMaps maps;
  cudaError_t status = make_windows_maps(p, at, &maps);
  if (status == cudaSuccess) status = launch_sm90_prepare_windows(p, stream);
  if (status != cudaSuccess) return status;
  const WindowsArgs args{g.result,
                         g.shape.cols,
                         plan.exchanged,
                         static_cast<int>(s.rows),
                         static_cast<int>(s.cols),
                         static_cast<int>(pairs),
                         static_cast<int>(pairs * token_tiles),
                         static_cast<int>(items),
                         plan.splits,
                         static_cast<int>(windows),
                         p.tokens.factors,
                         p.columns.factors,
                         floats(at.sums),
                         p.flags};
  return both ? launch_config<WindowsConfig<true>>(args, maps, stream)
              : launch_config<WindowsConfig<false>>(args, maps, stream);
}

}  // namespace jnvfp4
