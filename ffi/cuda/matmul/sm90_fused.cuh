// out = a b^T on Hopper, in one kernel: b is NVFP4 and is decoded in registers, a has 16 bits an element.
//
// The sides of wgmma change places: rows of b are its 64 rows, from registers, and rows of a ("tokens") its columns,
// from shared memory. A warpgroup decodes its own 64 rows of b, one window (64 along K) at a time, while its last four
// wgmmas run. Two thread blocks of a cluster have the same tokens and neighbouring rows of b; each loads half of the
// tokens for both. Thread blocks are persistent: one thread loads, two warpgroups compute.
//
// The sum along K: the tensor core's, windows ascending, in one accumulator; with kSplit that of either half of K,
// which are then added. Fixed by shape and tile, so runs have the same bits.
#pragma once

#include "sm90_decode.cuh"
#include "sm90_fused.h"
#include "sm90_ptx.cuh"

namespace jnvfp4 {

// kFragments: a is float16 in fragment order, scaled like b (sm90_decode.cuh). Else it is an array of Left.
// kWide: codes come 256 along K at a time. kTurns: the warpgroups take turns on the tensor cores.
// kSplit: four thread blocks, of which two have the first half of K and two the second.
template <class Left, bool kFragments_, int kTokens_, int kStages_, bool kWide_, bool kTurns_, bool kSplit_>
struct FusedConfig {
  using Type = Left;
  static constexpr bool kFragments = kFragments_, kWide = kWide_, kTurns = kTurns_, kSplit = kSplit_;
  static constexpr int kTokens = kTokens_, kStages = kStages_, kCluster = kSplit ? 4 : 2;
  static constexpr int kConsumers = 2, kRows = 64 * kConsumers, kThreads = 128 * (kConsumers + 1);
  static constexpr int kSums = kTokens / 2;  // of a thread
  static constexpr float kUnscale =
      kFragments ? jnvfp4::kUnscale<Left> * jnvfp4::kUnscale<Left> : jnvfp4::kUnscale<Left>;

  // A stage has one window; a slot of the ring has what comes 256 along K at a time.
  static constexpr int kRing = 3;
  static constexpr int kA = kTokens * 128, kData = kRows * (kWide ? 128 : 32), kScale = kRows * 16;
  static constexpr int kStageBytes = kA + (kWide ? 0 : kData), kSlotBytes = kScale + (kWide ? kData : 0);
  // Sums on their way to the result: rows of 64 columns, padded so that neither side meets in a bank.
  static constexpr int kOutTokens = 64, kOutPitch = 64 + 4, kOut = kOutTokens * kOutPitch * 4;

  static constexpr int kAtData = kStages * kA, kAtScale = kAtData + (kWide ? kRing : kStages) * kData;
  static constexpr int kAtOut = kAtScale + kRing * kScale, kAtFull = kAtOut + kConsumers * kOut;
  static constexpr int kAtEmpty = kAtFull + 8 * kStages, kAtSent = kAtEmpty + 8 * kStages;
  static constexpr int kAtTaken = kAtSent + 8 * kConsumers;
  static constexpr int kShared = kAtTaken + 8 * kConsumers + 1024;  // to align the start
  static_assert(kStages <= 4 * kRing - 3, "a slot is read before it is filled again");
  static_assert(kStages >= 3 && kShared <= 232448);
  static_assert(!kTurns || kConsumers == 2);
  static_assert(!kSplit || kTokens == 2 * kOutTokens);
};

// ---------------------------------------------------------------- tiles
struct FusedTilePlace {
  int matrix, row, col;  // the first row, and the first column of the pair of thread blocks
};

// Groups of 4 tiles of rows go along all columns, so that blocks that run together share both operands in L2.
template <class C>
__device__ __forceinline__ FusedTilePlace place_of(const FusedGrid& grid, int i) {
  constexpr int kGroup = 4;
  const int matrix = i / grid.matrix_tiles, tile = i - matrix * grid.matrix_tiles;
  const int per = grid.pairs * kGroup, first = tile / per * kGroup;
  const int width = min(kGroup, grid.matrix_tiles / grid.pairs - first), rest = tile - first * grid.pairs;
  return {matrix, (first + rest % width) * C::kTokens, rest / width * kFusedCols};
}

// ---------------------------------------------------------------- the thread that loads
template <class C>
__device__ __forceinline__ void load_tiles(const FusedArgs& a, const FusedMaps& maps, const FusedGrid& grid,
                                           uint32_t smem) {
  const int rank = cluster_rank(), side = rank % 2, pair = rank / 2;
  const int rows = static_cast<int>(a.g.shape.rows), cols = static_cast<int>(a.g.shape.cols);
  constexpr int kHalf = C::kTokens / 2;
  int stage = 0, phase = 0, slot = 0;
  bool first_load = true;
  for (int i = blockIdx.x / C::kCluster; i < grid.tiles; i += gridDim.x / C::kCluster) {
    const FusedTilePlace place = place_of<C>(grid, i);
    const int b_row = place.matrix * cols + place.col + side * C::kRows;
    const int a_row = place.matrix * rows + place.row + side * kHalf;
    const int end = (pair + 1) * a.windows;
    for (int w = pair * a.windows; w < end; ++w) {
      barrier_wait(smem + C::kAtEmpty + 8 * stage, phase ^ 1);
      const uint32_t bar = smem + C::kAtFull + 8 * stage;
      const bool new_slot = w % 4 == 0;
      barrier_expect(bar, C::kStageBytes + (new_slot ? C::kSlotBytes : 0));
      if constexpr (!C::kWide) load_box(smem + C::kAtData + stage * C::kData, maps.data, bar, w * 32, b_row);
      if (new_slot) {
        if constexpr (C::kWide) load_box(smem + C::kAtData + slot * C::kData, maps.data, bar, w * 32, b_row);
        load_box(smem + C::kAtScale + slot * C::kScale, maps.scale, bar, w * 4, b_row);
        if (++slot == C::kRing) slot = 0;
      }
      if (C::kFragments && first_load) wait_for_kernel_ahead(), first_load = false;  // it decodes a
      load_box_to(static_cast<uint16_t>(3 << 2 * pair), smem + stage * C::kA + side * kHalf * 128, maps.a, bar, w * 64,
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
// Codes and scales of a thread for one window: of rows r and r + 8.
template <class C>
struct RawWindow {
  uint32_t codes[C::kFragments ? 4 : 16];
  uint32_t scales[2];

  // `part`: which of the four windows of the slot.
  __device__ __forceinline__ void load(uint32_t data, uint32_t scale, int part, int row, int t) {
    if constexpr (C::kFragments) {
      constexpr int kPitch = C::kWide ? 128 : 32;
      // The 128-byte pattern exchanges 16-byte words; rows 8 apart have the same.
      const int byte = C::kWide ? ((2 * part + t / 2) ^ (row % 8)) * 16 + t % 2 * 8 : t * 8;
      const uint32_t at = data + row * kPitch + byte;
      const uint2 low = load_shared64(at), high = load_shared64(at + 8 * kPitch);
      codes[0] = low.x, codes[1] = low.y, codes[2] = high.x, codes[3] = high.y;
      const uint32_t of_row = scale + row * 16 + part * 4 + t;
      scales[0] = load_shared8(of_row) | load_shared8(of_row + 8 * 16) << 8;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 v = load_shared128(data + (row + i / 2 * 8) * 32 + i % 2 * 16);
        codes[4 * i] = v.x, codes[4 * i + 1] = v.y, codes[4 * i + 2] = v.z, codes[4 * i + 3] = v.w;
      }
      const uint32_t of_row = scale + row * 16 + part * 4;
      scales[0] = load_shared32(of_row), scales[1] = load_shared32(of_row + 8 * 16);
    }
  }

  // The fragments of four k16 steps.
  __device__ __forceinline__ void decode(uint32_t (&f)[16], int t) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if constexpr (C::kFragments)
          decode_block_half(f, half, row);
        else
          decode_two_steps(f, half, row, t);
      }
  }

 private:
  __device__ __forceinline__ void decode_block_half(uint32_t (&f)[16], int half, int row) const {
    const uint32_t pair = scale_pair<F16>(scales[0]), scale = row ? high_twice(pair) : low_twice(pair);
    uint32_t* at = f + 8 * half + row;
    decode_word(codes[2 * row + half], scale, at[0], at[2], at[4], at[6]);
  }
  // In natural order: every lane has all codes of the row and takes its byte of each word.
  __device__ __forceinline__ void decode_two_steps(uint32_t (&f)[16], int half, int row, int t) const {
    using T = typename C::Type;
    const uint32_t mine = 0x4440u | t, pair = scale_pair<T>(half ? scales[row] >> 16 : scales[row]);
#pragma unroll
    for (int step = 2 * half; step < 2 * half + 2; ++step) {
      const uint32_t scale = step % 2 ? high_twice(pair) : low_twice(pair);
#pragma unroll
      for (int word = 0; word < 2; ++word)
        f[4 * step + 2 * word + row] = decode_byte<T>(__byte_perm(codes[8 * row + 2 * step + word], 0, mine), scale);
    }
  }
};

// ---------------------------------------------------------------- sums to results
__device__ __forceinline__ float amax_of(const MatmulOperand& x, int64_t row) {
  return __ldg(x.amax + (x.map.rows_per_amax == 1 ? row : quotient(row, x.map.rows_per_amax)));
}

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
    set_alpha(matrix * g.shape.rows);
  }
  // Of a row over all matrices.
  __device__ __forceinline__ void set_alpha(int64_t row) {
    const MatmulOperand &x = a.g.a, &y = a.g.b;
    const float left = C::kFragments ? amax_of(x, row) : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      alpha[i] = i && !a.each_col ? alpha[0]
                 : C::kFragments  ? alpha_w4a4(left, amax[i], x.e4m3_max, y.e4m3_max)
                                  : alpha_w4a16(amax[i], y.e4m3_max);
  }
  __device__ __forceinline__ void write(int64_t row, float4 sums) {
    if (C::kFragments && a.each_row) set_alpha(row);
    float v[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)  // the addition makes -0 the rule's 0
      v[i] = gemm_epilogue(__fmaf_rn(v[i], C::kUnscale, 0.0f), alpha[i], bias[i], a.g.result.bias != nullptr);
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
  int rank, wg, lane, t;  // wg by a shuffle, so that it is in a uniform register
  int row;                // of b, in the thread block's tile, of the first register of a fragment
  int stage = 0, phase = 0, slot = 0, part = 0;  // of the window to load next
  int run_stage = 0;                             // of the window to multiply next
  int exchange_phase = 0;

  __device__ __forceinline__ FusedConsumer(const FusedArgs& args, uint32_t shared)
      : a(args),
        smem(shared),
        rank(cluster_rank()),
        wg(__shfl_sync(~0u, threadIdx.x / 128 - 1, 0)),
        lane(threadIdx.x % 32),
        t(lane % 4),
        row(wg * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4) {}

  // ---- the sum along K
  __device__ __forceinline__ void fetch(RawWindow<C>& r) {
    barrier_wait(smem + C::kAtFull + 8 * stage, phase);
    r.load(smem + C::kAtData + (C::kWide ? slot : stage) * C::kData, smem + C::kAtScale + slot * C::kScale, part, row,
           t);
    if (++stage == C::kStages) stage = 0, phase ^= 1;
    if (++part == 4) {
      part = 0;
      if (++slot == C::kRing) slot = 0;
    }
  }
  // The last stage that has run is free, in both blocks that load for it.
  __device__ __forceinline__ void release(int last) {
    if (lane < 2) barrier_arrive_in(smem + C::kAtEmpty + 8 * last, rank / 2 * 2 + lane);
  }
  __device__ __forceinline__ int last_stage() const { return run_stage == 0 ? C::kStages - 1 : run_stage - 1; }

  // Without turns both warpgroups multiply at the same time, and then both decode while the tensor cores rest. Named
  // barriers 4 and 5: one warpgroup waits, the other arrives.
  __device__ __forceinline__ void wait_turn() {
    if constexpr (C::kTurns) named_sync(4 + wg, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (C::kTurns) named_arrive(5 - wg, 256);
  }

  // Multiplies the window in f while the next one is decoded to g.
  __device__ __forceinline__ void step(Sums& sums, Fragments& f, Fragments& g, bool first, bool last) {
    const int before = last_stage();
    wait_turn();
    wgmma_fence();
    const uint64_t tokens = shared_matrix(smem + run_stage * C::kA);
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma<typename C::Type>(sums, f + 4 * j, tokens + 2 * j, !first || j > 0);
    if (++run_stage == C::kStages) run_stage = 0;
    wgmma_commit();
    pass_turn();
    RawWindow<C> r;
    if (!last) fetch(r);
    wgmma_wait<1>();  // the window before has run: its stage and g are free
    if (!first) release(before);
    if (!last) r.decode(g, t);
  }
  __device__ __forceinline__ void sum(Sums& sums) {
    Fragments f, g;
    RawWindow<C> r;
    fetch(r);
    r.decode(f, t);
    for (int w = 0; w < a.windows; w += 2) {
      step(sums, f, g, w == 0, false);
      step(sums, g, f, false, w + 2 >= a.windows);
    }
    wgmma_wait<0>();
    release(last_stage());
  }

  // ---- the result
  __device__ __forceinline__ uint32_t out() const { return smem + C::kAtOut + wg * C::kOut; }
  // Where the sums of 64 tokens go: four of each 8 tokens `eight`, as wgmma has them.
  template <class F>
  __device__ __forceinline__ void for_each_sum(uint32_t first, const F& f) const {
    const uint32_t base = first + (2 * t * C::kOutPitch + row - wg * 64) * 4;
#pragma unroll
    for (int eight = 0; eight < C::kOutTokens / 8; ++eight)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(base + ((8 * eight + i % 2) * C::kOutPitch + i / 2 * 8) * 4, 4 * eight + i);
  }
  template <int kFirst>
  __device__ __forceinline__ void stage_sums(const Sums& sums) const {
    for_each_sum(out(), [&](uint32_t at, int i) { store_shared(at, sums[kFirst + i]); });
  }
  // Sums of 64 tokens, the `chunk`th of the tile. Registers have no index that is known late, hence the cases.
  __device__ __forceinline__ void stage_chunk(const Sums& sums, int chunk) const {
    constexpr int kEach = C::kOutTokens / 2;
    if (chunk == 0) stage_sums<0>(sums);
    if (chunk == 1) stage_sums<kEach>(sums);
    if constexpr (C::kTokens == 256) {
      if (chunk == 2) stage_sums<2 * kEach>(sums);
      if (chunk == 3) stage_sums<3 * kEach>(sums);
    }
  }
  // This block has the first or second 64 tokens: it sends its sums of the others to the block with the other half of
  // K, and adds what that one sends.
  __device__ __forceinline__ void exchange_sums(const Sums& sums) {
    constexpr int kOther = C::kOutTokens / 2;
    const bool second = rank / 2;
    const int other = rank ^ 2;
    const uint32_t sent = smem + C::kAtSent + 8 * wg, taken = smem + C::kAtTaken + 8 * wg;
    barrier_acquire(taken, exchange_phase ^ 1);  // the other block has read what was sent before
    for_each_sum(address_in(out(), other),
                 [&](uint32_t at, int i) { store_in_cluster(at, second ? sums[i] : sums[kOther + i]); });
    barrier_release_in(sent, other);
    barrier_acquire(sent, exchange_phase);
    exchange_phase ^= 1;
    for_each_sum(out(), [&](uint32_t at, int i) {
      store_shared(at, float_of(load_shared32(at)) + (second ? sums[kOther + i] : sums[i]));
    });
  }
  __device__ __forceinline__ void write_chunk(FusedColumns<C>& columns, int64_t matrix, int first_row) {
    if (columns.col >= a.g.shape.cols) return;
    const int thread = threadIdx.x % 128;
    const uint32_t at = out() + thread % 16 * 16;
#pragma unroll 1
    for (int token = thread / 16; token < C::kOutTokens; token += 8) {
      if (first_row + token >= a.g.shape.rows) return;
      const uint4 v = load_shared128(at + token * C::kOutPitch * 4);
      columns.write(matrix * a.g.shape.rows + first_row + token,
                    {float_of(v.x), float_of(v.y), float_of(v.z), float_of(v.w)});
    }
  }
  __device__ __forceinline__ void finish(const Sums& sums, const FusedTilePlace& place) {
    FusedColumns<C> columns(a, place.matrix, place.col + rank % 2 * C::kRows + wg * 64 + threadIdx.x % 16 * 4);
    if constexpr (C::kSplit) {
      exchange_sums(sums);
      named_sync(1 + wg, 128);
      write_chunk(columns, place.matrix, place.row + rank / 2 * C::kOutTokens);
      __syncwarp();  // instructions for whole warps follow
      barrier_release_in(smem + C::kAtTaken + 8 * wg, rank ^ 2);
    } else {
#pragma unroll 1
      for (int chunk = 0; chunk < C::kTokens / C::kOutTokens; ++chunk) {
        named_sync(1 + wg, 128);  // the last chunk has been read
        stage_chunk(sums, chunk);
        named_sync(1 + wg, 128);
        write_chunk(columns, place.matrix, place.row + chunk * C::kOutTokens);
        __syncwarp();  // instructions for whole warps follow
      }
    }
  }

  __device__ __forceinline__ void run(const FusedGrid& grid) {
    if (wg == 1) pass_turn();  // the first turn is that of warpgroup 0
    for (int i = blockIdx.x / C::kCluster; i < grid.tiles; i += gridDim.x / C::kCluster) {
      Sums sums;
      sum(sums);
      finish(sums, place_of<C>(grid, i));
    }
    if (wg == 0) wait_turn();  // no barrier is left half full
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sm90_fused_kernel(const __grid_constant__ FusedArgs a, const __grid_constant__ FusedMaps maps,
                      const __grid_constant__ FusedGrid grid) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t any_shared[];
  const uint32_t smem = (shared_address(any_shared) + 1023) & ~1023u;  // the same in every block of a cluster
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      barrier_init(smem + C::kAtFull + 8 * i, 1);
      barrier_init(smem + C::kAtEmpty + 8 * i, 4 * C::kConsumers * 2);  // a lane of each warp of both blocks
    }
    for (int i = 0; i < C::kConsumers; ++i) {
      barrier_init(smem + C::kAtSent + 8 * i, 128);
      barrier_init(smem + C::kAtTaken + 8 * i, 128);
    }
    fence_barrier_init();
    prefetch_map(maps.a), prefetch_map(maps.data), prefetch_map(maps.scale);
  }
  cluster_sync();
  if (threadIdx.x < 128) {
    give_registers<40>();  // 40 and twice 232 are what a launch with three times 168 has
    if (threadIdx.x == 0) load_tiles<C>(a, maps, grid, smem);
    __syncwarp();
  } else {
    take_registers<232>();
    FusedConsumer<C>(a, smem).run(grid);
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
  const FusedGrid grid(args.g.shape, C::kTokens);
  const int clusters = std::max(1, std::min(grid.tiles, multiprocessors() / C::kCluster));
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {C::kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * C::kCluster), config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kShared, config.stream = stream;
  // With fragments the kernel ahead is their decode, which says when this one may start.
  config.attrs = attributes, config.numAttrs = C::kFragments ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args, maps, grid);
}

// The three tiles of a type of rows.
template <class Left, bool kFragments>
cudaError_t launch_fused_tile(const FusedArgs& args, const FusedMaps& maps, FusedTile tile, cudaStream_t stream) {
  switch (tile) {
    case FusedTile::k256:
      return launch_fused_config<FusedConfig<Left, kFragments, 256, 4, false, kFragments, false>>(args, maps, stream);
    case FusedTile::k128:
      return launch_fused_config<FusedConfig<Left, kFragments, 128, 8, kFragments, false, false>>(args, maps, stream);
    case FusedTile::k128Split:
      return launch_fused_config<FusedConfig<Left, kFragments, 128, 8, kFragments, false, true>>(args, maps, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jnvfp4
