// Instructions of Hopper alone: mbarriers, tensor maps, clusters, wgmma. A file that uses them is compiled for 90a.
// Addresses of shared memory are 32 bits, of this CTA unless a function says otherwise.
#pragma once

#include <cuda.h>

#include "../../device.cuh"

namespace jnvfp4 {

// ---------------------------------------------------------------- shared memory
__device__ __forceinline__ uint32_t load_shared8(uint32_t a) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}
template <class T>
__device__ __forceinline__ T load_shared(uint32_t a) {
  T v;
  if constexpr (sizeof(T) == 2)
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a));
  else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}
__device__ __forceinline__ uint32_t load_shared32(uint32_t a) { return load_shared<uint32_t>(a); }
__device__ __forceinline__ uint2 load_shared64(uint32_t a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
__device__ __forceinline__ uint4 load_shared128(uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t a, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory");
}
__device__ __forceinline__ void store_shared64(uint32_t a, float v, float w) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(v), "f"(w) : "memory");
}
__device__ __forceinline__ void store_shared128(uint32_t a, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
// Four 8 x 8 matrices of 16-bit numbers that a warp has as mma has them. Each lane gives the address of a row of 16
// bytes: of the matrices, or, transposed, of their columns.
template <bool kTransposed>
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t* m) {
  if constexpr (kTransposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]),
                 "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]),
                 "r"(m[2]), "r"(m[3])
                 : "memory");
}
// The address of the same place in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in(uint32_t a, uint32_t rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank));
  return r;
}

// ---------------------------------------------------------------- mbarriers
__device__ __forceinline__ void barrier_init(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
// For the other CTA of a cluster, and for tensor maps that this thread loads through next.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
// Arrives, and lets the phase wait for `bytes` that tensor maps bring.
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrives at the barrier of the same place in CTA `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_in(uint32_t bar, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(bar, rank)) : "memory");
}
// A warp arrives at the barriers of the same place in both CTAs of a cluster, kArrivals times.
__device__ __forceinline__ void barrier_arrive_in_both(uint32_t bar) {
  if constexpr (kArrivals == 1) {
    if (threadIdx.x % 32 < 2) barrier_arrive_in(bar, threadIdx.x % 32);
  } else {
    barrier_arrive_in(bar, 0), barrier_arrive_in(bar, 1);
  }
}
// Waits for the end of a phase. Not of cluster scope, which would put a fence into each wait: what it waits for is
// written by tensor maps, or is the end of reads.
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
  } while (!done);
}
// barrier_wait for a word of store_async_in. It fences, so it is not for waits in a mainloop.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t bar, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
  } while (!done);
}
// Stores a word in CTA `rank` and brings its 4 bytes to a barrier there, both given by their addresses in this CTA.
__device__ __forceinline__ void store_async_in(uint32_t to, uint32_t v, uint32_t bar, uint32_t rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address_in(to, rank)),
               "r"(v), "r"(address_in(bar, rank))
               : "memory");
}

// ---------------------------------------------------------------- flags in global memory
// A thread that sees a flag sees all that the one that raised it has written or has seen written.
__device__ __forceinline__ void raise_flag(uint32_t* flag) {
  asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}
__device__ __forceinline__ void wait_for_flag(const uint32_t* flag) {
  uint32_t raised;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
  } while (!raised);
}

// ---------------------------------------------------------------- named barriers and clusters
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// named_sync for several places of the code, which the aligned instruction above does not allow.
__device__ __forceinline__ void named_meet(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ int cluster_rank() {
  int r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// Orders nothing but the initialisation of barriers, after a fence_barrier_init, or the end of reads whose values an
// instruction before has used. A thread with loads in flight would wait for them in cluster_sync.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---------------------------------------------------------------- tensor maps
// A box of a matrix whose first element is (x, y), to shared memory; zeros outside of the matrix.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, uint32_t bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(&map), "r"(bar), "r"(x), "r"(y)
      : "memory");
}
// load_box with multicast to each CTA of the cluster whose bit is in `mask`.
__device__ __forceinline__ void load_box_to(uint16_t mask, uint32_t to, const CUtensorMap& map, uint32_t bar, int x,
                                            int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(&map), "r"(bar), "r"(x), "r"(y), "h"(mask)
      : "memory");
}
// Bytes as they lie, a multiple of 16 from and to addresses that are.
__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---------------------------------------------------------------- programmatic dependent launch (PDL)
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Loads that follow, also through tensor maps, see what was written before this launch started.
__device__ __forceinline__ void fence_acquire() { asm volatile("fence.acq_rel.gpu;\nfence.proxy.async;" ::: "memory"); }

// ---------------------------------------------------------------- registers of a warpgroup
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---------------------------------------------------------------- wgmma
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kLeft groups run.
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Rows of 128 bytes, swizzled by the 128-byte pattern, which repeats after 8 rows (1024 bytes).
__device__ __forceinline__ uint64_t shared_matrix(uint32_t address) {
  return uint64_t{(address & 0x3ffffu) >> 4} | uint64_t{1} << 16 | uint64_t{64} << 32 | uint64_t{1} << 62;
}

// Rows of 16 bytes, eight of which lie together, in steps of 128 bytes. The other 16 bytes that a multiplication takes
// of each row are the same ones again.
__device__ __forceinline__ uint64_t shared_rows_of_16(uint32_t address) {
  return uint64_t{(address & 0x3ffffu) >> 4} | uint64_t{8} << 32;
}

#define JNVFP4_OPERANDS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define JNVFP4_OPERANDS_32 JNVFP4_OPERANDS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define JNVFP4_OPERANDS_64                                                                                            \
  JNVFP4_OPERANDS_32                                                                                                  \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"
#define JNVFP4_OPERANDS_96                                                                                            \
  JNVFP4_OPERANDS_64                                                                                                  \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91," \
  "%92,%93,%94,%95"
#define JNVFP4_OPERANDS_128                                                                                         \
  JNVFP4_OPERANDS_96                                                                                                \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118" \
  ",%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define JNVFP4_SUMS_8(d, i)                                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define JNVFP4_SUMS_16(d, i) JNVFP4_SUMS_8(d, i), JNVFP4_SUMS_8(d, i + 8)
#define JNVFP4_SUMS_32(d, i) JNVFP4_SUMS_16(d, i), JNVFP4_SUMS_16(d, i + 16)
#define JNVFP4_SUMS_64(d, i) JNVFP4_SUMS_32(d, i), JNVFP4_SUMS_32(d, i + 32)
#define JNVFP4_SUMS_96(d, i) JNVFP4_SUMS_64(d, i), JNVFP4_SUMS_32(d, i + 64)
#define JNVFP4_SUMS_128(d, i) JNVFP4_SUMS_64(d, i), JNVFP4_SUMS_64(d, i + 64)
// The numbers of the operands after the sums: four registers, the matrix in shared memory, keep.
#define JNVFP4_WGMMA(type, n, sums, a0, a1, a2, a3, matrix, flag)                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag                                                   \
               ", 0;\n"                                                                                   \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" JNVFP4_OPERANDS_##sums \
               "}, {" a0 "," a1 "," a2 "," a3 "}, " matrix ", p, 1, 1, 0;\n}\n"                           \
               : JNVFP4_SUMS_##sums(d, 0)                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep))
// Adds to d, or sets it unless `keep`: 64 x 16 numbers in registers times the 16 x n of shared memory.
#define JNVFP4_DEFINE_WGMMA(n, sums, a0, a1, a2, a3, matrix, flag)                                   \
  template <class T>                                                                                 \
  __device__ __forceinline__ void wgmma(float (&d)[sums], const uint32_t* a, uint64_t b, int keep) { \
    if constexpr (std::is_same_v<T, Bf16>)                                                           \
      JNVFP4_WGMMA("bf16", n, sums, a0, a1, a2, a3, matrix, flag);                                   \
    else                                                                                             \
      JNVFP4_WGMMA("f16", n, sums, a0, a1, a2, a3, matrix, flag);                                    \
  }

JNVFP4_DEFINE_WGMMA("32", 16, "%16", "%17", "%18", "%19", "%20", "%21")
JNVFP4_DEFINE_WGMMA("64", 32, "%32", "%33", "%34", "%35", "%36", "%37")
JNVFP4_DEFINE_WGMMA("128", 64, "%64", "%65", "%66", "%67", "%68", "%69")
JNVFP4_DEFINE_WGMMA("256", 128, "%128", "%129", "%130", "%131", "%132", "%133")

// wgmma with both operands in shared memory.
#define JNVFP4_WGMMA_SHARED(type, n, sums, a_matrix, b_matrix, flag)                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag                                                   \
               ", 0;\n"                                                                                   \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" JNVFP4_OPERANDS_##sums \
               "}, " a_matrix ", " b_matrix ", p, 1, 1, 0, 0;\n}\n"                                       \
               : JNVFP4_SUMS_##sums(d, 0)                                                                 \
               : "l"(a), "l"(b), "r"(keep))
#define JNVFP4_DEFINE_WGMMA_SHARED(n, sums, a_matrix, b_matrix, flag)                                \
  template <class T>                                                                                 \
  __device__ __forceinline__ void wgmma_shared(float (&d)[sums], uint64_t a, uint64_t b, int keep) { \
    if constexpr (std::is_same_v<T, Bf16>)                                                           \
      JNVFP4_WGMMA_SHARED("bf16", n, sums, a_matrix, b_matrix, flag);                                \
    else                                                                                             \
      JNVFP4_WGMMA_SHARED("f16", n, sums, a_matrix, b_matrix, flag);                                 \
  }

JNVFP4_DEFINE_WGMMA_SHARED("128", 64, "%64", "%65", "%66")
JNVFP4_DEFINE_WGMMA_SHARED("192", 96, "%96", "%97", "%98")

// wgmma_wait for the group that makes these sums, which nothing that reads them goes before; and for sums that other
// instructions make, which are made where this stands.
#define JNVFP4_DEFINE_ORDER(sums)                                                                                 \
  template <int kLeft>                                                                                            \
  __device__ __forceinline__ void wgmma_wait_for(float (&d)[sums]) {                                              \
    asm volatile("wgmma.wait_group.sync.aligned %" #sums ";" : JNVFP4_SUMS_##sums(d, 0) : "n"(kLeft) : "memory"); \
  }                                                                                                               \
  __device__ __forceinline__ void make_here(float (&d)[sums]) { asm volatile("" : JNVFP4_SUMS_##sums(d, 0)); }

JNVFP4_DEFINE_ORDER(32)
JNVFP4_DEFINE_ORDER(64)

#undef JNVFP4_DEFINE_ORDER
#undef JNVFP4_DEFINE_WGMMA_SHARED
#undef JNVFP4_WGMMA_SHARED
#undef JNVFP4_DEFINE_WGMMA
#undef JNVFP4_WGMMA
#undef JNVFP4_SUMS_128
#undef JNVFP4_SUMS_96
#undef JNVFP4_SUMS_64
#undef JNVFP4_SUMS_32
#undef JNVFP4_SUMS_16
#undef JNVFP4_SUMS_8
#undef JNVFP4_OPERANDS_128
#undef JNVFP4_OPERANDS_96
#undef JNVFP4_OPERANDS_64
#undef JNVFP4_OPERANDS_32
#undef JNVFP4_OPERANDS_16

}  // namespace jnvfp4
