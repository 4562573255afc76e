// What the GEMMs of Hopper share whose CTAs work in pairs, clusters of two: the sums of parts of K, the barriers of
// stages, and the frame of a kernel with one warpgroup that loads and two that compute.
#pragma once

#include <algorithm>

#include "../../../plan/sm90_fused.h"
#include "../../device.cuh"
#include "ptx.cuh"
#include "scheduler.cuh"

namespace jnvfp4 {

// Of a warpgroup, in the order in which its threads have the sums; `place` counts warpgroups of all parts but the last
// of all tiles. `barrier`: a named one of the warpgroup.
template <int kSums>
struct PartSums {
  float* sums;
  uint32_t* flags;  // one for each place: 0 until the sums are there
  int barrier;

  __device__ __forceinline__ void keep(const float (&from)[kSums], int64_t place) const {
    float4* const to = at(place);
#pragma unroll
    for (int i = 0; i < kSums; i += 4) to[i * 32] = {from[i], from[i + 1], from[i + 2], from[i + 3]};
    named_sync(barrier, 128);
    if (threadIdx.x % 128 == 0) raise_flag(flags + place);
    __syncwarp();  // instructions for whole warps follow
  }
  // Those of the first `count` parts, in their order, which `place_of` gives the places of.
  template <class F>
  __device__ __forceinline__ void add(float (&to)[kSums], int count, const F& place_of) const {
    if (threadIdx.x % 128 == 0)
      for (int part = 0; part < count; ++part) wait_for_flag(flags + place_of(part));
    __syncwarp();  // instructions for whole warps follow
    named_sync(barrier, 128);
    for (int part = 0; part < count; ++part) {
      const float4* const from = at(place_of(part));
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        const float4 p = __ldcg(from + i * 32);
        to[i] += p.x, to[i + 1] += p.y, to[i + 2] += p.z, to[i + 3] += p.w;
      }
    }
  }

 private:
  __device__ __forceinline__ float4* at(int64_t place) const {
    return reinterpret_cast<float4*>(sums) + place * kSums * 32 + threadIdx.x % 128;
  }
};

// ---------------------------------------------------------------- a kernel
// A stage is full when the loads of one thread have arrived, and empty when the warps that read it have.
template <class C>
__device__ __forceinline__ void init_stage_barriers(uint32_t smem) {
  for (int i = 0; i < C::kStages; ++i) {
    barrier_init(smem + C::kAtFull + 8 * i, 1);
    barrier_init(smem + C::kAtEmpty + 8 * i, 4 * 2 * 2 * kArrivals);  // of each warp of a team, in both CTAs
  }
}
// `prefetch` begins with tensor maps, in the thread that will `load`; `compute` is for all threads of two warpgroups.
template <class C, class Args, class Prefetch, class Load, class Compute>
__device__ __forceinline__ void run_pair(const Args& a, const Prefetch& prefetch, const Load& load,
                                         const Compute& compute) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t any_shared[];
  const uint32_t smem = (shared_address(any_shared) + 1023) & ~1023u;  // the same in both CTAs of a cluster
  if (threadIdx.x == 0) {
    init_stage_barriers<C>(smem);
    typename C::Ring{smem + C::kAtTiles}.init_barriers();
    fence_barrier_init();
    prefetch();
  }
  __syncwarp();  // instructions for whole warps follow
  cluster_meet();
  wait_for_kernel_ahead();  // it makes all that is read here
  if (threadIdx.x < 128) {
    let_next_kernel_start();  // it waits for the end of this one
    give_registers<C::kLoading>();
    if (threadIdx.x == 0) load(smem);
    if (threadIdx.x == 32 && cluster_rank() == 0) {
      const typename C::Tiles tiles{a};
      TileScheduler<C, false>(tiles, smem).hand_out();
    }
    __syncwarp();
  } else {
    take_registers<C::kComputing>();
    compute(smem);
  }
  cluster_sync();  // no CTA leaves while another may still arrive or write here
#else
  __trap();  // compiled for another architecture
#endif
}

// Clusters of a launch, which all begin with the work tile of their number. With fewer SMs than a tile has parts, they
// start one after the other.
inline int clusters_of(int work_tiles, int whole, int splits) {
  const int own = own_tiles(multiprocessors() / 2, whole, splits);
  return std::min(work_tiles, own ? own : splits);
}

}  // namespace jnvfp4
