// Common parts of the Hopper GEMMs with clusters of two CTAs: split-K sums, barriers of stages, ping-pong of two
// consumer warpgroups, and the frame of a warp-specialized kernel.
#pragma once

#include <algorithm>

#include "../../../plan/sm90_fused.h"
#include "../../device.cuh"
#include "ptx.cuh"
#include "scheduler.cuh"

namespace jnvfp4 {

// ---------------------------------------------------------------- split-K
// Sums of a warpgroup in scratch, in the order in which its threads have them. A `slot` is that of one warpgroup in one
// split; the last split of a tile has none, since it adds the others. `barrier_id`: named barrier of the warpgroup.
template <int kSums>
struct SplitSums {
  float* sums;
  uint32_t* flags;  // one per slot: 0 until the sums are there
  int barrier_id;

  __device__ __forceinline__ void store(const float (&from)[kSums], int64_t slot) const {
    float4* const to = address_of(slot);
#pragma unroll
    for (int i = 0; i < kSums; i += 4) to[i * 32] = {from[i], from[i + 1], from[i + 2], from[i + 3]};
    named_sync(barrier_id, 128);
    if (threadIdx.x % 128 == 0) raise_flag(flags + slot);
    __syncwarp();  // instructions for whole warps follow
  }
  // Adds the first `num_splits` splits, whose slots `slot_of` gives, in their order.
  template <class F>
  __device__ __forceinline__ void add(float (&to)[kSums], int num_splits, const F& slot_of) const {
    if (threadIdx.x % 128 == 0)
      for (int split = 0; split < num_splits; ++split) wait_for_flag(flags + slot_of(split));
    __syncwarp();  // instructions for whole warps follow
    named_sync(barrier_id, 128);
    for (int split = 0; split < num_splits; ++split) {
      const float4* const from = address_of(slot_of(split));
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        const float4 p = __ldcg(from + i * 32);
        to[i] += p.x, to[i + 1] += p.y, to[i + 2] += p.z, to[i + 3] += p.w;
      }
    }
  }

 private:
  __device__ __forceinline__ float4* address_of(int64_t slot) const {
    return reinterpret_cast<float4*>(sums) + slot * kSums * 32 + threadIdx.x % 128;
  }
};

// ---------------------------------------------------------------- ping-pong
// Warpgroups 0 and 1 alternate on the tensor cores, by named barriers 4 and 5: one waits, the other arrives.
__device__ __forceinline__ void wait_turn(int wg) { named_sync(4 + wg, 256); }
__device__ __forceinline__ void pass_turn(int wg) { named_arrive(5 - wg, 256); }

// ---------------------------------------------------------------- kernel frame
// A stage is full when the producer's loads have arrived, and empty when the warps that read it have, in both CTAs.
template <class C>
__device__ __forceinline__ void init_stage_barriers(uint32_t smem) {
  for (int i = 0; i < C::kStages; ++i) {
    barrier_init(smem + C::kFullBarriers + 8 * i, 1);
    barrier_init(smem + C::kEmptyBarriers + 8 * i, 4 * 2 * 2 * kArrivals);  // warps of a team, in both CTAs
  }
}
// Runs `prefetch` and then `produce` in the producer thread, the scheduler in another thread of warpgroup 0, and
// `consume` in all threads of two consumer warpgroups.
template <class C, class Args, class Prefetch, class Produce, class Consume>
__device__ __forceinline__ void run_warp_specialized(const Args& a, const Prefetch& prefetch, const Produce& produce,
                                                     const Consume& consume) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t any_shared[];
  const uint32_t smem = (shared_address(any_shared) + 1023) & ~1023u;  // the same in both CTAs of a cluster
  if (threadIdx.x == 0) {
    init_stage_barriers<C>(smem);
    typename C::Ring{smem + C::kTileRingOffset}.init_barriers();
    fence_barrier_init();
    prefetch();
  }
  __syncwarp();  // instructions for whole warps follow
  cluster_meet();
  wait_for_previous_kernel();  // it makes all that is read here
  if (threadIdx.x < 128) {
    launch_dependents();  // the next kernel waits for the end of this one
    give_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) produce(smem);
    if (threadIdx.x == 32 && cluster_rank() == 0) {
      const typename C::Tiles tiles{a};
      TileScheduler<C, false>(tiles, smem).serve();
    }
    __syncwarp();
  } else {
    take_registers<C::kConsumerRegisters>();
    consume(smem);
  }
  cluster_sync();  // no CTA leaves while another may still arrive or write here
#else
  __trap();  // compiled for another architecture
#endif
}

// Returns the clusters of a launch. Each has an initial tile; if a tile has more splits than SMs, they start in order.
inline int clusters_of(int num_work_tiles, int num_unsplit, int num_splits) {
  const int initial = initial_tiles(multiprocessors() / 2, num_unsplit, num_splits);
  return std::min(num_work_tiles, initial ? initial : num_splits);
}

}  // namespace jnvfp4
