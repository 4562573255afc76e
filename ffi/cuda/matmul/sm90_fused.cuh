// out = a b^T on Hopper, in one kernel: b is NVFP4 and is decoded in registers. a, as 16-bit floats in the order along
// K of the decoded b, comes from sm90_prepare.cu.
//
// The sides of wgmma change places: rows of b are its 64 rows, from registers, and rows of a ("tokens") its columns,
// from shared memory. A warpgroup decodes its own 64 rows of b, one window (64 along K) at a time, while its last four
// wgmmas run. Two thread blocks of a cluster have the same tokens and neighbouring rows of b; each loads half of the
// tokens for both. Thread blocks are persistent: one thread loads, two or four warpgroups compute.
//
// The sum along K: the tensor core's, windows ascending, in one accumulator, or in two that are then added if four
// warpgroups compute; and for each of `splits` parts of K, to the last of which the others are added in their order.
// Fixed by the shape, so runs have the same bits.
#pragma once

#include "sm90_decode.cuh"
#include "sm90_fused.h"
#include "sm90_ptx.cuh"

namespace jnvfp4 {

// T: the type of the decoded numbers, F16 or Bf16.
//
// To decode a window takes longer than the tensor cores need for up to 64 tokens. So there are two teams of two
// warpgroups then, which share K. With 256 tokens the two warpgroups of one team take turns on the tensor cores.
template <class T_, int kTokens_>
struct FusedConfig {
  using T = T_;
  static constexpr int kTokens = kTokens_, kTeams = fused_teams(kTokens), kRows = 128;
  static constexpr bool kTurns = kTokens == 256;
  static constexpr int kThreads = 128 * (1 + 2 * kTeams);
  static constexpr int kSums = kTokens / 2;  // of a thread
  // Whether amaxes of rows of a come from shared memory: tiles of few rows load few, and have no registers to spare.
  static constexpr bool kStaged = kTokens >= 128;
  // Registers in a launch, of the loading warpgroup, of the others: the sum over all may not grow.
  static constexpr int kLaunched = kTeams == 1 ? 168 : 96, kLoading = kTeams == 1 ? 40 : 32;
  static constexpr int kComputing = kTeams == 1 ? 232 : 112;

  // A slot has codes and scales of 256 along K, a stage the tokens of kStageDepth windows.
  static constexpr int kStageDepth = kTokens <= 64 ? 4 : 1, kPerSlot = 4 / kStageDepth;
  static constexpr int kRing = kTokens <= 64 ? 4 : 3, kStages = kTokens == 128 ? 8 : 4;
  static constexpr int kWindow = kTokens * 128, kData = kRows * 128, kScale = kRows * 16;
  // Sums on their way to the result: rows of 64 columns, padded so that neither side meets in a bank. If operands are
  // exchanged, rows of 64 tokens, padded for reading; two writes meet.
  static constexpr bool kExchanges = kTokens >= 128 && std::is_same_v<T, F16>;
  static constexpr int kOutTokens = kTokens <= 64 ? 32 : 64, kOutPitch = 64 + 4, kExchangedPitch = 64 + 8;
  static constexpr int kOut = kExchanges ? 64 * kExchangedPitch * 4 : kOutTokens * kOutPitch * 4;

  static constexpr int kAtData = kStages * kStageDepth * kWindow, kAtScale = kAtData + kRing * kData;
  static constexpr int kAtOut = kAtScale + kRing * kScale, kAtAmax = kAtOut + 2 * kOut;  // of the tokens, twice
  static constexpr int kAtFull = kAtAmax + 2 * kTokens * 4;
  static constexpr int kAtEmpty = kAtFull + 8 * kStages, kAtSlot = kAtEmpty + 8 * kStages;
  static constexpr int kShared = kAtSlot + 8 * kRing + 1024;  // to align the start
  static_assert(kLoading + 2 * kTeams * kComputing <= (1 + 2 * kTeams) * kLaunched);
  static_assert(kStages * kStageDepth <= 4 * kRing - 3 || kStageDepth == 4, "a slot is read before it is filled again");
  static_assert(kStages % kPerSlot == 0 && kShared <= 232448);
};

// ---------------------------------------------------------------- what a thread block computes
struct FusedItem {
  int matrix, row, col;   // the first row, and the first column of the pair of thread blocks
  int split, first, end;  // of 256 along K
  int64_t tile;
};

// Splits of a tile follow each other, so that the last one waits only for blocks that have started before. Groups of 4
// tiles of rows go along all columns, so that blocks that run together share both operands in L2.
template <class C>
__device__ __forceinline__ FusedItem item_of(const FusedArgs& a, int i) {
  constexpr int kGroup = 4;
  const int all = i / a.splits, split = i - all * a.splits, matrix = all / a.matrix_tiles;
  const int tile = all - matrix * a.matrix_tiles;
  const int per = a.pairs * kGroup, first = tile / per * kGroup;
  const int width = min(kGroup, a.matrix_tiles / a.pairs - first), rest = tile - first * a.pairs;
  return {matrix, (first + rest % width) * C::kTokens, rest / width * static_cast<int>(kFusedCols),
          split,  a.slots * split / a.splits,          a.slots * (split + 1) / a.splits,
          all};
}

// ---------------------------------------------------------------- the thread that loads
template <class C>
__device__ __forceinline__ void load_tiles(const FusedArgs& a, const FusedMaps& maps, uint32_t smem) {
  const int rank = cluster_rank();
  constexpr int kHalf = C::kTokens / 2;
  int stage = 0, phase = 0, slot = 0;
  bool first_load = true;
  for (int i = blockIdx.x / 2; i < a.items; i += gridDim.x / 2) {
    const FusedItem item = item_of<C>(a, i);
    const int b_row = item.matrix * a.columns + item.col + rank * C::kRows;
    const int a_row = item.matrix * a.tokens + item.row + rank * kHalf;
    for (int w = item.first * 4; w < item.end * 4; w += C::kStageDepth) {
      barrier_wait(smem + C::kAtEmpty + 8 * stage, phase ^ 1);
      const uint32_t bar = smem + C::kAtFull + 8 * stage;
      if (w % 4 == 0) {
        const uint32_t of_slot = smem + C::kAtSlot + 8 * slot;
        barrier_expect(of_slot, C::kData + C::kScale);
        load_box(smem + C::kAtData + slot * C::kData, maps.data, of_slot, w * 32, b_row);
        load_box(smem + C::kAtScale + slot * C::kScale, maps.scale, of_slot, w * 4, b_row);
        if (++slot == C::kRing) slot = 0;
      }
      if (first_load) wait_for_kernel_ahead(), first_load = false;  // it writes a
      barrier_expect(bar, C::kStageDepth * C::kWindow);
#pragma unroll
      for (int q = 0; q < C::kStageDepth; ++q)
        load_box_to(3, smem + (stage * C::kStageDepth + q) * C::kWindow + rank * kHalf * 128, maps.a, bar, (w + q) * 64,
                    a_row);
      if (++stage == C::kStages) stage = 0, phase ^= 1;
    }
  }
  // Stays until the other block has read what this one has loaded for it.
  for (int i = 0; i < C::kStages; ++i) {
    barrier_wait(smem + C::kAtEmpty + 8 * stage, phase ^ 1);
    if (++stage == C::kStages) stage = 0, phase ^= 1;
  }
}

// ---------------------------------------------------------------- codes to fragments
// Codes and scales of a thread for one window: of rows r and r + 8. Lane t of four has the t-th 16 along K.
template <class T>
struct RawWindow {
  uint32_t codes[4], scales;

  // Addresses of the slot for this row and t. `quarter`: which of the four windows.
  __device__ __forceinline__ void load(uint32_t data, uint32_t scale, int quarter) {
    const uint32_t at = data ^ quarter * 32;  // the 128-byte pattern exchanges 16-byte words
    const uint2 low = load_shared64(at), high = load_shared64(at + 8 * 128);  // which is the same 8 rows further
    codes[0] = low.x, codes[1] = low.y, codes[2] = high.x, codes[3] = high.y;
    scales = load_shared8(scale + quarter * 4) | load_shared8(scale + quarter * 4 + 8 * 16) << 8;
  }
  // The fragments of four k16 steps.
  __device__ __forceinline__ void decode(uint32_t (&f)[16]) const {
    uint32_t scale[2];
    Decode<T>::scales(scales, scale[0], scale[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        uint32_t pair[4];
        Decode<T>::eight(codes[2 * row + half], scale[row], pair);
#pragma unroll
        for (int q = 0; q < 4; ++q) f[8 * half + 2 * q + row] = pair[q];
      }
  }
};

// ---------------------------------------------------------------- sums to results
// Four neighbouring columns of a matrix of the result.
template <class C>
struct FusedColumns {
  const FusedArgs& a;
  int64_t col;
  float amax[4], bias[4], alpha[4];

  __device__ __forceinline__ FusedColumns(const FusedArgs& args, int64_t matrix, int64_t first) : a(args), col(first) {
    const MatmulArgs& g = a.g;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t c = min(col + i, g.shape.cols - 1);
      amax[i] = i && !a.each_col ? amax[0] : amax_of(g.b, matrix * g.shape.cols + c);
      bias[i] = g.result.bias ? load_float(g.result.bias, g.result.bias_kind, c) : 0.0f;
    }
    set_alpha(g.a.quantized() && !a.each_row ? amax_of(g.a, matrix * g.shape.rows) : 1.0f);
  }
  // `left`: the amax of a row, if a is quantized.
  __device__ __forceinline__ void set_alpha(float left) {
    const MatmulOperand &x = a.g.a, &y = a.g.b;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      alpha[i] = i && !a.each_col ? alpha[0]
                 : x.quantized()  ? alpha_w4a4(left, amax[i], x.e4m3_max, y.e4m3_max)
                                  : alpha_w4a16(amax[i], y.e4m3_max);
  }
  // Of a row over all matrices.
  __device__ __forceinline__ void write(int64_t row, float4 sums) {
    float v[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)  // the addition makes -0 the rule's 0
      v[i] = gemm_epilogue(__fmaf_rn(v[i], a.unscale, 0.0f), alpha[i], bias[i], a.g.result.bias != nullptr);
    const Float kind = a.g.result.kind;
    if (kind == Float::kBf16)
      store<Bf16>(row, v);
    else if (kind == Float::kF16)
      store<F16>(row, v);
    else
      store<F32>(row, v);
  }

 private:
  template <class T>
  __device__ __forceinline__ void store(int64_t row, const float (&v)[4]) const {
    const int64_t cols = a.g.shape.cols;
    auto* p = static_cast<typename T::Stored*>(a.g.result.out) + row * cols + col;
    if (cols % 4 == 0) {
      if constexpr (sizeof(typename T::Stored) == 4)
        *reinterpret_cast<uint4*>(p) = make_uint4(T::store(v[0]), T::store(v[1]), T::store(v[2]), T::store(v[3]));
      else
        *reinterpret_cast<uint2*>(p) = make_uint2(pair<T>(v[0], v[1]), pair<T>(v[2], v[3]));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (col + i < cols) p[i] = T::store(v[i]);
    }
  }
  // The conversion instructions have another NaN than the stored one.
  template <class T>
  __device__ __forceinline__ static uint32_t pair(float low, float high) {
    if (isnan(low) || isnan(high)) return T::store(low) | uint32_t{T::store(high)} << 16;
    return std::is_same_v<T, Bf16> ? bf16_pair(low, high) : f16_pair(low, high);
  }
};

// ---------------------------------------------------------------- a warpgroup that computes
template <class C>
struct FusedConsumer {
  using Sums = float[C::kSums];
  using Fragments = uint32_t[16];

  const FusedArgs& a;
  uint32_t smem;
  int rank, team, wg;    // wg of its team. Both by a shuffle, so that they are in uniform registers
  uint32_t data, scale;  // where its codes and scales are in the first slot
  uint32_t begun = 0;    // slots of all items before

  __device__ __forceinline__ FusedConsumer(const FusedArgs& args, uint32_t shared)
      : a(args), smem(shared), rank(cluster_rank()) {
    const int all = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);
    team = all / 2, wg = all % 2;
    const int row = wg * 64 + fragment_row(), t = threadIdx.x % 4;
    data = smem + C::kAtData + row * 128 + (t / 2 ^ row % 8) * 16 + t % 2 * 8;
    scale = smem + C::kAtScale + row * 16 + t;
  }

  // Of the warpgroup's 64 rows of b, that of the first register of a fragment.
  static __device__ __forceinline__ int fragment_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

  // ---- the sum along K
  // Without turns both warpgroups multiply at the same time, and then both decode while the tensor cores rest. Named
  // barriers 4 and 5: one warpgroup waits, the other arrives.
  __device__ __forceinline__ void wait_turn() {
    if constexpr (C::kTurns) named_sync(4 + wg, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (C::kTurns) named_arrive(5 - wg, 256);
  }
  // The stage of window q of the n-th slot since the start.
  static __device__ __forceinline__ int stage_of(uint32_t n, int q) {
    return C::kStageDepth == 4 ? n % C::kStages : n % (C::kStages / C::kPerSlot) * C::kPerSlot + q;
  }
  static __device__ __forceinline__ int phase_of(uint32_t n) { return n / (C::kStages / C::kPerSlot) & 1; }

  __device__ __forceinline__ void wait_for_slot(uint32_t n) {
    barrier_wait(smem + C::kAtSlot + 8 * (n % C::kRing), n / C::kRing & 1);
  }
  __device__ __forceinline__ void load(RawWindow<typename C::T>& r, uint32_t n, int q) {
    const uint32_t slot = n % C::kRing;
    r.load(data + slot * C::kData, scale + slot * C::kScale, q);
  }
  // The stage is free, in both blocks that load for it.
  __device__ __forceinline__ void release(int stage) {
    if (threadIdx.x % 32 < 2) barrier_arrive_in(smem + C::kAtEmpty + 8 * stage, threadIdx.x % 32);
  }
  __device__ __forceinline__ void multiply(Sums& sums, const Fragments& f, uint32_t n, int q, bool first) {
    const int stage = stage_of(n, q);
    if (q % C::kStageDepth == 0) barrier_wait(smem + C::kAtFull + 8 * stage, phase_of(n));
    wait_turn();
    wgmma_fence();
    const uint64_t tokens = shared_matrix(smem + (stage * C::kStageDepth + q % C::kStageDepth) * C::kWindow);
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma<typename C::T>(sums, f + 4 * j, tokens + 2 * j, !first || j > 0);
    wgmma_commit();
    pass_turn();
  }
  // If window q is the last of its stage.
  __device__ __forceinline__ void release(uint32_t n, int q) {
    if (q % C::kStageDepth == C::kStageDepth - 1) release(stage_of(n, q));
  }

  // A window runs while the next one is decoded.
  __device__ __forceinline__ void sum(Sums& sums, int slots) {
    Fragments f[2];
    RawWindow<typename C::T> r;
    uint32_t n = begun + team;
    begun += slots;
    if (C::kTeams == 2 && n >= begun) {  // K has one slot, which is the other team's
#pragma unroll
      for (float& s : sums) s = 0;
      return;
    }
    wait_for_slot(n);
    load(r, n, 0);
    r.decode(f[0]);
    for (bool first = true; n < begun; first = false, n += C::kTeams) {
      const bool last = n + C::kTeams >= begun;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        multiply(sums, f[q % 2], n, q, first && q == 0);
        if (q < 3) {
          load(r, n, q + 1);
        } else if (!last) {
          wait_for_slot(n + C::kTeams);
          load(r, n + C::kTeams, 0);
        }
        wgmma_wait<1>();  // the window before has run: its stage and fragments are free
        if (q > 0)
          release(n, q - 1);
        else if (!first)
          release(n - C::kTeams, 3);
        if (q < 3 || !last) r.decode(f[(q + 1) % 2]);
      }
    }
    wgmma_wait<0>();
    release(n - C::kTeams, 3);
  }

  // ---- the result
  __device__ __forceinline__ uint32_t out() const { return smem + C::kAtOut + wg * C::kOut; }
  // Where the sums of kOutTokens tokens go: four of each 8 tokens `eight`, as wgmma has them.
  template <bool kExchanged, class F>
  __device__ __forceinline__ void for_each_sum(const F& f) const {
    constexpr int kToken = kExchanged ? 1 : C::kOutPitch, kColumn = kExchanged ? C::kExchangedPitch : 1;
    const uint32_t base = out() + (2 * (threadIdx.x % 4) * kToken + fragment_row() * kColumn) * 4;
#pragma unroll
    for (int eight = 0; eight < C::kOutTokens / 8; ++eight)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(base + ((8 * eight + i % 2) * kToken + i / 2 * 8 * kColumn) * 4, 4 * eight + i);
  }
  // The sums of the `chunk`th tokens of the tile. Team 1 writes its own, to which team 0 adds. Registers have no index
  // that is known late, hence the cases.
  template <bool kExchanged, int kChunk>
  __device__ __forceinline__ void stage_chunk(const Sums& sums, int chunk) const {
    if (chunk != kChunk) return;
    constexpr int kFirst = kChunk * C::kOutTokens / 2;
    static_assert(kFirst < C::kSums);
    for_each_sum<kExchanged>([&](uint32_t at, int i) {
      const float other = C::kTeams == 2 && team == 0 ? float_of(load_shared32(at)) : 0.0f;
      store_shared(at, C::kTeams == 2 && team == 0 ? __fadd_rn(sums[kFirst + i], other) : sums[kFirst + i]);
    });
  }
  template <bool kExchanged = false>
  __device__ __forceinline__ void stage_chunk(const Sums& sums, int chunk) const {
    constexpr int kChunks = C::kTokens / C::kOutTokens;
    stage_chunk<kExchanged, 0>(sums, chunk);
    if constexpr (kChunks > 1) stage_chunk<kExchanged, 1>(sums, chunk);
    if constexpr (kChunks > 2) stage_chunk<kExchanged, 2>(sums, chunk), stage_chunk<kExchanged, 3>(sums, chunk);
  }
  // ---- parts of K
  // Of this warpgroup, in the order in which threads have the sums.
  __device__ __forceinline__ int64_t place_of(const FusedItem& item, int split) const {
    return ((item.tile * (a.splits - 1) + split) * 2 + rank) * 2 * C::kTeams + team * 2 + wg;
  }
  __device__ __forceinline__ float4* partial(const FusedItem& item, int split) const {
    return reinterpret_cast<float4*>(a.sums) + place_of(item, split) * C::kTokens * 16 + threadIdx.x % 128;
  }
  // With the warpgroup of the other team that has the same rows.
  __device__ __forceinline__ void meet_other_team() const {
    if constexpr (C::kTeams == 2) named_meet(6 + wg, 256);
  }
  __device__ __forceinline__ void sync_warpgroup() const { named_sync(team == 0 ? 1 + wg : 8 + wg, 128); }
  __device__ __forceinline__ void keep_partial(const Sums& sums, const FusedItem& item) const {
    float4* const to = partial(item, item.split);
#pragma unroll
    for (int i = 0; i < C::kSums; i += 4) to[i * 32] = {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
    sync_warpgroup();
    if (threadIdx.x % 128 == 0) raise_flag(a.flags + place_of(item, item.split));
  }
  __device__ __forceinline__ void add_partials(Sums& sums, const FusedItem& item) const {
    if (threadIdx.x % 128 == 0)
      for (int split = 0; split < item.split; ++split) wait_for_flag(a.flags + place_of(item, split));
    __syncwarp();  // instructions for whole warps follow
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

  // The amaxes of the tokens, which would take as long as anything else here to load one by one.
  __device__ __forceinline__ uint32_t amaxes() const { return smem + C::kAtAmax + wg * C::kTokens * 4; }
  __device__ __forceinline__ void stage_amaxes(const FusedItem& item) const {
    const int rows = static_cast<int>(a.g.shape.rows);
    for (int token = threadIdx.x % 128; token < min(C::kTokens, rows - item.row); token += 128)
      store_shared(amaxes() + token * 4, amax_of(a.g.a, int64_t{item.matrix} * rows + item.row + token));
    __syncwarp();
  }

  // A thread has four columns of every eighth token of a chunk. Little code, not unrolled: the instruction cache misses
  // it at every tile.
  __device__ __forceinline__ void write_chunk(FusedColumns<C>& columns, const FusedItem& item, int chunk) const {
    const int thread = threadIdx.x % 128, first = chunk * C::kOutTokens + thread / 16;
    const int end = min(static_cast<int>(a.g.shape.rows) - item.row, (chunk + 1) * C::kOutTokens);
    if (columns.col >= a.g.shape.cols) return;
    uint32_t at = out() + thread / 16 * C::kOutPitch * 4 + thread % 16 * 16;
#pragma unroll 1
    for (int token = first; token < end; token += 8, at += 8 * C::kOutPitch * 4) {
      const uint4 v = load_shared128(at);
      const int64_t row = int64_t{item.matrix} * a.g.shape.rows + item.row + token;
      if (a.each_row)
        columns.set_alpha(C::kStaged ? float_of(load_shared32(amaxes() + token * 4)) : amax_of(a.g.a, row));
      columns.write(row, {float_of(v.x), float_of(v.y), float_of(v.z), float_of(v.w)});
    }
  }

  // ---- the result, if operands are exchanged
  // The amaxes of the 64 rows of a.
  __device__ __forceinline__ void stage_row_amaxes(int64_t first_row, int rows) const {
    const int row = threadIdx.x % 128;
    if (row < rows) store_shared(amaxes() + row * 4, amax_of(a.g.a, first_row + row));
    __syncwarp();
  }
  // Tokens are columns of the result: a thread has four of them in every eighth row of a.
  __device__ __forceinline__ void write_exchanged_chunk(const FusedItem& item, int64_t first_row, int rows,
                                                        int chunk) const {
    const int thread = threadIdx.x % 128, col = item.row + chunk * C::kOutTokens + thread % 16 * 4;
    if (col >= a.tokens) return;
    FusedColumns<C> columns(a, item.matrix, col);
    uint32_t at = out() + (thread / 16 * C::kExchangedPitch + thread % 16 * 4) * 4;
#pragma unroll 1
    for (int row = thread / 16; row < rows; row += 8, at += 8 * C::kExchangedPitch * 4) {
      const uint4 v = load_shared128(at);
      if (a.each_row) columns.set_alpha(float_of(load_shared32(amaxes() + row * 4)));
      columns.write(first_row + row, {float_of(v.x), float_of(v.y), float_of(v.z), float_of(v.w)});
    }
  }
  __device__ __forceinline__ void write_exchanged(const Sums& sums, const FusedItem& item) const {
    static_assert(C::kTeams == 1 && C::kOutTokens == 64);
    const int first = item.col + rank * C::kRows + wg * 64, rows = min(64, a.columns - first);
    const int64_t first_row = int64_t{item.matrix} * a.columns + first;
#pragma unroll 1
    for (int chunk = 0; chunk < C::kTokens / C::kOutTokens; ++chunk) {
      sync_warpgroup();  // the last chunk has been read
      if (chunk == 0 && a.each_row) stage_row_amaxes(first_row, rows);
      stage_chunk<true>(sums, chunk);
      sync_warpgroup();
      write_exchanged_chunk(item, first_row, rows, chunk);
      __syncwarp();
    }
  }

  // Named barriers 1 and 2, 8 and 9: a warpgroup of team 0 or 1. 6 and 7: two with the same rows.
  __device__ __forceinline__ void finish(Sums& sums, const FusedItem& item) {
    constexpr int kChunks = C::kTokens / C::kOutTokens;
    if (a.splits > 1) {
      wait_for_kernel_ahead();  // it has lowered the flags
      if (item.split < a.splits - 1) {
        meet_other_team();  // so that neither is ahead by a whole ring, whose phases it could not tell apart
        keep_partial(sums, item);
        __syncwarp();  // instructions for whole warps follow
        return;
      }
      add_partials(sums, item);
    }
    if constexpr (C::kExchanges)
      if (a.exchanged) return write_exchanged(sums, item);
    FusedColumns<C> columns(a, item.matrix, item.col + rank * C::kRows + wg * 64 + threadIdx.x % 16 * 4);
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      meet_other_team();  // the last chunk has been read
      if (C::kTeams == 2 && team == 1) stage_chunk(sums, chunk);
      meet_other_team();
      if (C::kTeams == 2 && team == 1) continue;
      if constexpr (C::kTeams == 1) sync_warpgroup();
      if (C::kStaged && chunk == 0 && a.each_row) stage_amaxes(item);
      stage_chunk(sums, chunk);
      sync_warpgroup();
      write_chunk(columns, item, chunk);
      __syncwarp();
    }
  }

  __device__ __forceinline__ void run() {
    if (wg == 1) pass_turn();  // the first turn is that of warpgroup 0
    for (int i = blockIdx.x / 2; i < a.items; i += gridDim.x / 2) {
      const FusedItem item = item_of<C>(a, i);
      Sums sums;
      sum(sums, item.end - item.first);
      finish(sums, item);
    }
    if (wg == 0) wait_turn();  // no barrier is left half full
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sm90_fused_kernel(const __grid_constant__ FusedArgs a, const __grid_constant__ FusedMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t any_shared[];
  const uint32_t smem = (shared_address(any_shared) + 1023) & ~1023u;  // the same in both blocks of a cluster
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      barrier_init(smem + C::kAtFull + 8 * i, 1);
      barrier_init(smem + C::kAtEmpty + 8 * i, 4 * 2 * 2);  // a lane of each warp of a team, in both blocks
    }
    for (int i = 0; i < C::kRing; ++i) barrier_init(smem + C::kAtSlot + 8 * i, 1);
    fence_barrier_init();
    prefetch_map(maps.a), prefetch_map(maps.data), prefetch_map(maps.scale);
  }
  __syncwarp();  // instructions for whole warps follow
  cluster_sync();
  if (threadIdx.x < 128) {
    let_next_kernel_start();  // it waits for the end of this one
    give_registers<C::kLoading>();
    if (threadIdx.x == 0) load_tiles<C>(a, maps, smem);
    __syncwarp();
  } else {
    take_registers<C::kComputing>();
    FusedConsumer<C>(a, smem).run();
  }
  cluster_sync();  // no block leaves while another may still arrive or write here
#else
  __trap();  // compiled for another architecture
#endif
}

// ---------------------------------------------------------------- launch
template <class C>
cudaError_t launch_fused_config(const FusedArgs& args, const FusedMaps& maps, cudaStream_t stream) {
  const auto kernel = sm90_fused_kernel<C>;
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

template <class T>
cudaError_t launch_fused_tokens(const FusedArgs& args, const FusedMaps& maps, int tokens, cudaStream_t stream) {
  switch (tokens) {
    case 32: return launch_fused_config<FusedConfig<T, 32>>(args, maps, stream);
    case 64: return launch_fused_config<FusedConfig<T, 64>>(args, maps, stream);
    case 128: return launch_fused_config<FusedConfig<T, 128>>(args, maps, stream);
    case 256: return launch_fused_config<FusedConfig<T, 256>>(args, maps, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jnvfp4
