// Adds the segments of decode attention.
#include "../matmul/sm90/launch.cuh"
#include "partial.cuh"

namespace jnvfp4::attention {
namespace {

// Where the kernel was launched early: what the kernel before it writes is there afterwards.
__device__ __forceinline__ void wait_for_segments() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Adds the segments of a query head, a CTA each: four sums of every fourth, in ascending order. All loads are in flight
// at once.
template <int D, class T>
__global__ void __launch_bounds__(4 * D) combine_kernel(const __grid_constant__ Args a) {
  constexpr int kEach = kMostSegments / 4, kOfLane = (kMostSegments + 31) / 32;
  __shared__ float sums[4][D];
  const int head = blockIdx.x % a.group, row = blockIdx.x / a.group, sequence = row / a.kv_heads;
  const int lane = threadIdx.x % 32, d = threadIdx.x % D, quarter = threadIdx.x / D;
  const int n = num_segments(a.length(sequence));
  const int64_t at = int64_t{row} * a.max_segments * a.group + head;
  wait_for_segments();
  float part[kEach];
  float4 h[kOfLane];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    h[i] = make_float4(-INFINITY, 0.0f, -INFINITY, 0.0f);
    if (lane + 32 * i < n) h[i] = a.heads[at + int64_t{lane + 32 * i} * a.group];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    part[i] = quarter + 4 * i < n ? a.sums[(at + int64_t{quarter + 4 * i} * a.group) * D + d] : 0.0f;
  float m = -INFINITY, v = -INFINITY, l = 0.0f, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) m = fmaxf(m, h[i].x), v = fmaxf(v, h[i].z);
#pragma unroll
  for (int k = 1; k < 32; k *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, k)), v = fmaxf(v, __shfl_xor_sync(~0u, v, k));
#pragma unroll
  for (int i = 0; i < kOfLane; ++i)
    if (lane + 32 * i < n) l = __fmaf_rn(h[i].y, exp2_approx(h[i].x - m), l), h[i].z = exp2_approx(h[i].z - v);
#pragma unroll
  for (int k = 1; k < 32; k *= 2) l += __shfl_xor_sync(~0u, l, k);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float weight = __shfl_sync(~0u, h[4 * i / 32].z, (quarter + 4 * i) % 32);
    if (quarter + 4 * i < n) sum = __fmaf_rn(part[i], weight, sum);
  }
  sums[quarter][d] = sum;
  __syncthreads();
  if (quarter) return;
#pragma unroll
  for (int k = 1; k < 4; ++k) sum += sums[k][d];
  const float out = n ? sum / l * (exp2_approx(v - m) * (1.0f / 2688.0f)) : 0.0f;
  static_cast<typename T::Stored*>(a.out)[int64_t{blockIdx.x} * D + d] = T::store(out);
}

template <int D, class T>
cudaError_t launch(const Args& a, bool early, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(a.batch) * static_cast<unsigned>(a.kv_heads * a.group);
  if (early) return launch_early(combine_kernel<D, T>, dim3(grid), 4 * D, 1, 0, stream, a);
  combine_kernel<D, T><<<grid, 4 * D, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_combine(const Args& a, int depth, bool early, cudaStream_t stream) {
  if (depth == 128) return a.f16 ? launch<128, F16>(a, early, stream) : launch<128, Bf16>(a, early, stream);
  return a.f16 ? launch<64, F16>(a, early, stream) : launch<64, Bf16>(a, early, stream);
}

}  // namespace jnvfp4::attention
