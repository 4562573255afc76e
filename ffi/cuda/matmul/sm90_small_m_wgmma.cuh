// 17 to 64 rows by wgmma. Consumer warpgroups decode 16 columns of the result a warp, from private cp.async rings, into
// wgmma's A registers. Four producer warps bring 128 k of the rows of a at a time and permute (or decode) them in place
// into wgmma's plain K-major layout: [k16 step][half of k][row][8].
#pragma once

#include "sm90_small_m.cuh"

namespace jnvfp4::small_m {

// ---------------------------------------------------------------- PTX
__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\nL: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void fence_mma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_mma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wait_for_mma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// d += a b for 64 columns of the result and kRows rows of a; b is a descriptor of shared memory.
template <int kRows, bool kBf16>
__device__ __forceinline__ void wgmma(float (&d)[kRows / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                      uint64_t b);
#define JNVFP4_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define JNVFP4_D16(i) JNVFP4_D4(i), JNVFP4_D4(i + 4), JNVFP4_D4(i + 8), JNVFP4_D4(i + 12)
#define JNVFP4_WGMMA(ROWS, BF16, TYPE, LIST, A0, A1, A2, A3, B, ...)                                               \
  template <>                                                                                                      \
  __device__ __forceinline__ void wgmma<ROWS, BF16>(float (&d)[ROWS / 2], uint32_t a0, uint32_t a1, uint32_t a2,   \
                                                    uint32_t a3, uint64_t b) {                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32." TYPE " {" LIST "}, {%" #A0 ",%" #A1 ",%" #A2 \
                 ",%" #A3 "}, %" #B ", 1, 1, 1, 0;"                                                                \
                 : __VA_ARGS__                                                                                     \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                                    \
  }
#define JNVFP4_LIST16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define JNVFP4_LIST32 JNVFP4_LIST16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
JNVFP4_WGMMA(32, true, "bf16.bf16", JNVFP4_LIST16, 16, 17, 18, 19, 20, JNVFP4_D16(0))
JNVFP4_WGMMA(32, false, "f16.f16", JNVFP4_LIST16, 16, 17, 18, 19, 20, JNVFP4_D16(0))
JNVFP4_WGMMA(64, true, "bf16.bf16", JNVFP4_LIST32, 32, 33, 34, 35, 36, JNVFP4_D16(0), JNVFP4_D16(16))
JNVFP4_WGMMA(64, false, "f16.f16", JNVFP4_LIST32, 32, 33, 34, 35, 36, JNVFP4_D16(0), JNVFP4_D16(16))
#undef JNVFP4_D4
#undef JNVFP4_D16
#undef JNVFP4_WGMMA
#undef JNVFP4_LIST16
#undef JNVFP4_LIST32

// ---------------------------------------------------------------- shared memory
constexpr int kUnit = 256, kProducers = 128;                    // of K in a stage of b; threads
constexpr int kStageBytes = 16 * (kUnit / 2 + kUnit / kBlock);  // 16 rows of codes, and scales

// kGroups: consumer warpgroups, of 64 columns of the result. kRows: of a, as many as wgmma takes. kStages: of b, each
// warp its own. kRowStages: of a. The sums take the place of both rings in the end.
template <int kGroups_, int kRows_, int kStages_, int kRowStages_>
struct WideShape {
  static constexpr int kGroups = kGroups_, kRows = kRows_, kStages = kStages_, kRowStages = kRowStages_;
  static constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + kProducers;
  static constexpr int kRing = kGroups * 4 * kStages * kStageBytes, kRowStage = kRows * 256;
  static constexpr int kPitch = 64 * kGroups + 4;  // floats of a row of sums
  static constexpr int kRings = kRing + kRowStages * kRowStage, kSums = kRows * kPitch * 4;
  static constexpr int kBarriers = kRings > kSums ? kRings : kSums, kBytes = kBarriers + 16 * kRowStages;
  static_assert(kBytes <= kMostShared && kBarriers % 8 == 0 && kRing % 128 == 0, "shared memory");
};

// ---------------------------------------------------------------- a: the producer warps
// A warp brings 128 k of eight rows at a time, whole rows at once, into the 16 x 8 slots of 16 bytes that the rows fill
// once permuted, and converts them in place. A slot is (block of kRows, row); the order in which raw chunks take the
// slots keeps both accesses free of bank conflicts.
template <Left left, int kRows>
struct RowStage {
  static constexpr bool kQuantized = left == Left::kNvfp4;
  const uint8_t* data;
  const uint8_t* scale;
  int64_t depth;
  int live;

  __device__ __forceinline__ RowStage(const MatmulArgs& g, int64_t matrix)
      : depth(g.shape.depth), live(static_cast<int>(g.shape.rows)) {
    const int64_t first = matrix * g.shape.rows * depth;
    data = static_cast<const uint8_t*>(g.a.data) + (kQuantized ? first / 2 : first * 2);
    scale = kQuantized ? g.a.scale + first / kBlock : nullptr;
  }
  static __device__ __forceinline__ uint32_t slot(uint32_t stage, int j, int at) {
    return stage + ((at >> 3) * kRows + j * 8 + (at & 7)) * 16;
  }
  // Chunk c of row m of the j-th eight: of 16, or of 4 with codes.
  static __device__ __forceinline__ uint32_t raw(uint32_t stage, int j, int m, int c) {
    return slot(stage, j, kQuantized ? m * 4 + (c ^ m >> 1) : m * 16 + (c ^ m));
  }
  __device__ __forceinline__ void fetch(int k0, uint32_t stage, int lane) const {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      if constexpr (kQuantized) {
        const int m = lane / 4, c = lane % 4;
        if (j * 8 + m >= live) continue;
        const int64_t k = (j * 8 + m) * depth + k0;
        copy16(raw(stage, j, m, c), data + k / 2 + c * 16);
        if (c == 0) copy8(slot(stage, j, 32 + m), scale + k / kBlock);
      } else {
#pragma unroll
        for (int r = 0; r < 8; r += 2) {
          const int m = r + lane / 16, c = lane % 16;
          if (j * 8 + m < live) copy16(raw(stage, j, m, c), data + ((j * 8 + m) * depth + k0 + c * 8) * 2);
        }
      }
    }
  }
  // A lane has 8 k of each 32 of one row. Every lane reads before one writes.
  static __device__ __forceinline__ void convert(uint32_t stage, int lane) {
    const int m = lane % 8, i = lane / 8;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      uint32_t pair[4][4];
      if constexpr (kQuantized) {
        uint32_t word[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) word[t] = load_shared4(raw(stage, j, m, t) + i * 4);
        const uint32_t s[2] = {load_shared4(slot(stage, j, 32 + m)), load_shared4(slot(stage, j, 32 + m) + 4)};
        __syncwarp();
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          uint32_t s0, s1;
          Decode<left>::scales(s[t / 2] >> (t % 2 * 16), s0, s1);
          Decode<left>::eight(word[t], i < 2 ? s0 : s1, pair[t]);
        }
      } else {
        uint4 v[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) v[t] = load_shared16(raw(stage, j, m, t * 4 + i));
        __syncwarp();
#pragma unroll
        for (int t = 0; t < 4; ++t) permute8(v[t], pair[t]);
      }
#pragma unroll
      for (int q = 0; q < 4; ++q)
        store_shared16(slot(stage, j, (i * 4 + q) * 8 + m), make_uint4(pair[0][q], pair[1][q], pair[2][q], pair[3][q]));
    }
  }
};

// Where the stages of a and their barriers are.
template <class S>
struct Stages {
  uint32_t ring, full;
  __device__ __forceinline__ explicit Stages(uint32_t base) : ring(base + S::kRing), full(base + S::kBarriers) {}
  __device__ __forceinline__ uint32_t stage(int i) const { return ring + i * S::kRowStage; }
  __device__ __forceinline__ uint32_t is_full(int i) const { return full + 8 * i; }
  __device__ __forceinline__ uint32_t is_empty(int i) const { return full + 8 * (S::kRowStages + i); }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < S::kRowStages; ++i) init_barrier(is_full(i), 32), init_barrier(is_empty(i), S::kGroups * 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// Producer p takes every fourth stage from the p-th on, so that the latencies of four stages overlap.
template <Left left, class S>
__device__ __forceinline__ void produce(const MatmulArgs& g, int64_t matrix, const Stages<S>& stages, int producer,
                                        int unit0, int unit1) {
  using R = RowStage<left, S::kRows>;
  const R rows(g, matrix);
  const int lane = threadIdx.x % 32, count = 2 * (unit1 - unit0);
  const auto fetch = [&](int c) {
    if (c < count) {
      wait_for(stages.is_empty(c % S::kRowStages), (c / S::kRowStages & 1) ^ 1);
      rows.fetch(unit0 * kUnit + c * 128, stages.stage(c % S::kRowStages), lane);
    }
    commit_copies();
  };
  fetch(producer);
  for (int c = producer; c < count; c += 4) {
    wait_for_copies<0>();
    R::convert(stages.stage(c % S::kRowStages), lane);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what the lanes wrote
    arrive(stages.is_full(c % S::kRowStages));
    fetch(c + 4);
  }
}

// ---------------------------------------------------------------- b: the ring of a consumer warp
// `live` of the 16 columns exist; the others are not loaded, and what they multiply is not written.
template <class S>
struct WideRing {
  const uint8_t *data, *scale;  // of this lane: codes of column g; scales of column `lane`
  int64_t depth;
  uint32_t ring;
  int live, unit, end, next;

  __device__ __forceinline__ WideRing(const MatmulArgs& g, int64_t row, int live_, uint32_t ring_, int unit0, int unit1)
      : depth(g.shape.depth), ring(ring_), live(live_), unit(unit0), end(unit1), next(0) {
    const int lane = threadIdx.x % 32;
    data = static_cast<const uint8_t*>(g.b.data) + (row + lane / 4) * (depth / 2) + lane % 4 * 16;
    scale = g.b.scale + (row + lane) * (depth / kBlock);
  }
  // Asks for the next stage, if there is one. Every call makes a group of copies.
  __device__ __forceinline__ void issue() {
    if (unit < end) {
      const int lane = threadIdx.x % 32, g = lane / 4;
      const uint32_t to = ring + next * kStageBytes;
      const uint8_t* p = data + static_cast<int64_t>(unit) * (kUnit / 2);
      if (g < live) copy16(to + lane * 16, p), copy16(to + 512 + lane * 16, p + 64);
      p += 4 * depth;  // eight rows
      if (g + 8 < live) copy16(to + 1024 + lane * 16, p), copy16(to + 1536 + lane * 16, p + 64);
      if (lane < live) copy16(to + 2048 + lane * 16, scale + static_cast<int64_t>(unit) * (kUnit / kBlock));
      ++unit;
      if (++next == S::kStages) next = 0;
    }
    commit_copies();
  }
};

// The codes and scales of 128 k of a lane.
template <Left left>
struct Half {
  uint4 c0, c1;
  uint32_t s0[2], s1[2];

  __device__ __forceinline__ Half(uint32_t stage, int h) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    c0 = load_shared16(stage + h * 512 + lane * 16), c1 = load_shared16(stage + 1024 + h * 512 + lane * 16);
    Decode<left>::scales(load_shared2(stage + 2048 + g * 16 + h * 8 + t * 2), s0[0], s0[1]);
    Decode<left>::scales(load_shared2(stage + 2048 + (g + 8) * 16 + h * 8 + t * 2), s1[0], s1[1]);
  }
  // The A registers of two k16 steps, of the i-th 8 of each 32 k.
  __device__ __forceinline__ void fragment(int i, uint32_t (&a)[8]) const {
    const uint32_t w0[4] = {c0.x, c0.y, c0.z, c0.w}, w1[4] = {c1.x, c1.y, c1.z, c1.w};
    uint32_t p0[4], p1[4];
    Decode<left>::eight(w0[i], s0[i / 2], p0);
    Decode<left>::eight(w1[i], s1[i / 2], p1);
#pragma unroll
    for (int j = 0; j < 4; ++j) a[2 * j] = p0[j], a[2 * j + 1] = p1[j];
  }
};

template <Left left, class S>
__device__ __forceinline__ void consume(WideRing<S>& columns, const Stages<S>& stages, int unit0, int unit1,
                                        float (&d)[S::kRows / 2]) {
  // Start address, then the strides between halves of k and between eights of rows, in units of 16 bytes.
  constexpr uint64_t kLayout = static_cast<uint64_t>(S::kRows) << 16 | uint64_t{8} << 32;
  const int lane = threadIdx.x % 32;
  int stage = 0, row_stage = 0, parity = 0, done = -1;
  uint32_t a[2][8] = {};  // wgmma reads one while the other is decoded
  for (int unit = unit0; unit < unit1; ++unit) {
    wait_for_copies<S::kStages - 2>();
    __syncwarp();
    columns.issue();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Half<left> half(columns.ring + stage * kStageBytes, h);
      // In a cluster the upper bits of an address are the rank.
      const uint64_t b = kLayout | (stages.stage(row_stage) & 0x3ffff) >> 4;
      wait_for(stages.is_full(row_stage), parity);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wait_for_mma<1>();
        if (i == 1) {  // nothing reads the stage before any more
          if (done >= 0 && lane == 0) arrive(stages.is_empty(done));
          done = row_stage;
        }
        uint32_t (&p)[8] = a[i % 2];
        if (columns.live > 0) half.fragment(i, p);  // the branch also keeps the compiler from moving it up
        fence_mma();
        wgmma<S::kRows, Decode<left>::kBf16>(d, p[0], p[1], p[2], p[3], b + i * 4 * S::kRows);
        wgmma<S::kRows, Decode<left>::kBf16>(d, p[4], p[5], p[6], p[7], b + (i * 4 + 2) * S::kRows);
        commit_mma();
      }
      if (++row_stage == S::kRowStages) row_stage = 0, parity ^= 1;
    }
    if (++stage == S::kStages) stage = 0;
  }
  wait_for_mma<0>();
  wait_for_copies<0>();
}

// ---------------------------------------------------------------- the end
// Each rank adds and writes its share of the rows: a warp takes a row at a time, a lane four columns.
template <Left left, class S>
__device__ __forceinline__ void finish_rows(const MatmulArgs& g, const Share& share, uint32_t sums) {
  constexpr int kWarps = S::kThreads / 32;
  const int lane = threadIdx.x % 32, rows = static_cast<int>(g.shape.rows), cols = static_cast<int>(g.shape.cols);
  const int first = rows * share.rank / share.ranks + static_cast<int>(threadIdx.x) / 32;
  const int end = rows * (share.rank + 1) / share.ranks;
  Columns<left, 4> columns;
  int quad = lane;
  const auto col = [&] { return (share.group0 * 4 + quad) * 4; };
  columns.load(g, share.matrix, col(), 1);
  sync_ranks(share.ranks);
  for (; quad < share.groups * 4; quad += 32, columns.load(g, share.matrix, col(), 1)) {
    for (int m = first; m < end; m += kWarps) {
      float4 s = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int r = 0; r < share.ranks; ++r) {
        const float4 v = load_from_rank(sums + (m * S::kPitch + quad * 4) * 4, r);
        s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
      }
      const int64_t row = share.matrix * g.shape.rows + m, at = row * g.shape.cols + col();
      columns.store_four(g, s, amax_of_row<left>(g, row), at, cols - col());
    }
  }
  if (share.ranks > 1) sync_ranks(share.ranks);  // no thread block ends while another reads its sums
}

template <Left left, class S>
__global__ void __launch_bounds__(S::kThreads, 1) small_m_wgmma_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const MatmulArgs& g = args.g;
  const uint32_t base = shared_address(shared);
  const int lane = threadIdx.x % 32, producer = threadIdx.x / 32;
  const int warp = producer - kProducers / 32;  // the scheduler prefers old warps
  const Share share(args);
  const int units = static_cast<int>(g.shape.depth) / kUnit;
  const int unit0 = share.unit(units, share.rank), unit1 = share.unit(units, share.rank + 1);
  const int col = (share.group0 + warp) * 16, left_cols = static_cast<int>(g.shape.cols) - col;
  const int live = warp >= 0 && warp < share.groups ? min(16, left_cols) : 0;
  const Stages<S> stages(base);
  WideRing<S> columns(g, share.matrix * g.shape.cols + col, live, base + warp * S::kStages * kStageBytes, unit0, unit1);
  if (warp >= 0) {
#pragma unroll
    for (int i = 0; i < S::kStages - 1; ++i) columns.issue();
  }
  if (threadIdx.x == 0) stages.init();
  __syncthreads();
  if (warp < 0) {
    produce<left, S>(g, share.matrix, stages, producer, unit0, unit1);
  } else {
    float d[S::kRows / 2] = {};
    consume<left, S>(columns, stages, unit0, unit1, d);
    asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory");  // nobody needs the rings any more
    float* sums = reinterpret_cast<float*>(shared);                   // [row of a][column]
    const int g8 = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < S::kRows / 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[(n * 8 + t * 2 + j % 2) * S::kPitch + warp * 16 + g8 + j / 2 * 8] = d[n * 4 + j];
  }
  finish_rows<left, S>(g, share, base);
}

// ---------------------------------------------------------------- launch
// Consumer warpgroups, thread blocks of a cluster, and tiles of the columns.
struct WidePlan {
  int warpgroups, ranks, tiles;
};

// How many clusters of `ranks` thread blocks run at once. Of four not as many fit as there are multiprocessors for,
// which only the driver knows; the GPUs of one machine are alike, and a wrong number costs time alone.
template <class S>
int resident_clusters(void (*kernel)(Args), int ranks) {
  const int processors = multiprocessors();
  if (ranks < 4) return processors / ranks;
  static const int four = [&] {
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 4, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(4 * 64), config.blockDim = dim3(S::kThreads), config.dynamicSmemBytes = S::kBytes;
    config.attrs = &cluster, config.numAttrs = 1;
    int count = 0;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes) != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess)
      cudaGetLastError();  // the launch that follows reports what is wrong
    return count;
  }();
  return std::min(processors / 4, four);
}

// The least of: waves, times the units of a thread block, times what a unit costs: as much as four groups of columns,
// and each group. The three shapes that were measured (docs/kernels.md) come out as the best that was found there.
template <class Most>
WidePlan plan_wide(int groups, int units, int64_t batch, const Most& resident) {
  WidePlan best{4, 1, 1};
  int64_t least = INT64_MAX;
  for (int ranks = 1; ranks <= 4 && (ranks == 1 || ranks <= units); ranks *= 2) {
    const int64_t clusters = resident(ranks);
    if (clusters < 1) continue;
    const int64_t tiles_least = (groups + 15) / 16;  // four warpgroups have 16 groups of columns
    const int64_t waves = (tiles_least * batch + clusters - 1) / clusters;
    const int64_t tiles = std::min<int64_t>(groups, std::max(tiles_least, waves * clusters / batch));
    const int64_t most = (groups + tiles - 1) / tiles, cost = waves * ((units + ranks - 1) / ranks) * (4 + most);
    if (cost >= least) continue;
    least = cost;
    best = {static_cast<int>(std::max<int64_t>(2, (most + 3) / 4)), ranks, static_cast<int>(tiles)};
  }
  return best;
}

template <Left left, class S>
cudaError_t launch_wide(const MatmulArgs& g, const WidePlan& plan, cudaStream_t stream) {
  return launch_clusters(small_m_wgmma_kernel<left, S>, {g, 0, plan.tiles}, plan.ranks, 1, S::kThreads, S::kBytes,
                         stream);
}

template <Left left>
cudaError_t launch_wgmma(const MatmulArgs& g, cudaStream_t stream) {
  using Wide4 = WideShape<4, 64, 2, 8>;
  const WidePlan plan =
      plan_wide(static_cast<int>((g.shape.cols + 15) / 16), static_cast<int>(g.shape.depth / kUnit), g.shape.batch,
                [](int ranks) { return resident_clusters<Wide4>(small_m_wgmma_kernel<left, Wide4>, ranks); });
  const bool few = g.shape.rows <= 32;
  switch (plan.warpgroups) {
    case 2:
      return few ? launch_wide<left, WideShape<2, 32, 4, 8>>(g, plan, stream)
                 : launch_wide<left, WideShape<2, 64, 4, 8>>(g, plan, stream);
    case 3:
      return few ? launch_wide<left, WideShape<3, 32, 3, 10>>(g, plan, stream)
                 : launch_wide<left, WideShape<3, 64, 3, 8>>(g, plan, stream);
    default:
      return few ? launch_wide<left, WideShape<4, 32, 2, 8>>(g, plan, stream)
                 : launch_wide<left, WideShape<4, 64, 2, 8>>(g, plan, stream);
  }
}

}  // namespace jnvfp4::small_m
