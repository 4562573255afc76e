// Adds the segments of decode attention.
#include "../matmul/sm90/launch.cuh"
#include "partial.cuh"

namespace jnvfp4::attention {
namespace {

// Where the kernel was launched early: what the kernel before it writes is there afterwards. Lengths are read before:
// attend_kernel lets this one start only after its own wait.
__device__ __forceinline__ void wait_for_segments() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A load where it stands, ahead of what follows: the compiler would put it where it is used.
__device__ __forceinline__ float4 load_now(const float4* p) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Adds the segments of a query head, a CTA each: four sums of every fourth, in ascending order. A thread has four
// elements of one of them.
template <int D, class T>
__global__ void __launch_bounds__(D) combine_kernel(const __grid_constant__ Args a) {
  constexpr int kEach = kMostSegments / 4, kOfLane = (kMostSegments + 31) / 32, kFours = D / 4;
  __shared__ float4 sums[4][kFours];
  const int head = blockIdx.x % a.group, row = blockIdx.x / a.group, sequence = row / a.kv_heads;
  const int lane = threadIdx.x % 32, d = threadIdx.x % kFours, quarter = threadIdx.x / kFours;
  const int n = num_segments(a.length(sequence));
  const int64_t at = int64_t{row} * a.max_segments * a.group + head;
  struct alignas(4 * sizeof(typename T::Stored)) Four {
    typename T::Stored element[4];
  };
  Four* const to = static_cast<Four*>(a.out) + int64_t{blockIdx.x} * kFours + d;
  wait_for_segments();
  if (n == 0) {
    if (quarter == 0) *to = Four{};
    return;
  }
  float4 part[kEach], h[kOfLane];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    h[i] = make_float4(-INFINITY, 0.0f, -INFINITY, 0.0f);
    if (lane + 32 * i < n) h[i] = a.heads[at + int64_t{lane + 32 * i} * a.group];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int s = quarter + 4 * i;
    const int64_t from = at + int64_t{min(s, n - 1)} * a.group;
    part[i] = load_now(reinterpret_cast<const float4*>(a.sums) + from * kFours + d);
  }
  float m = -INFINITY, v = -INFINITY, l = 0.0f;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) m = fmaxf(m, h[i].x), v = fmaxf(v, h[i].z);
#pragma unroll
  for (int k = 1; k < 32; k *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, k)), v = fmaxf(v, __shfl_xor_sync(~0u, v, k));
#pragma unroll
  for (int i = 0; i < kOfLane; ++i)
    if (lane + 32 * i < n) l = __fmaf_rn(h[i].y, exp2_approx(h[i].x - m), l), h[i].z = exp2_approx(h[i].z - v);
#pragma unroll
  for (int k = 1; k < 32; k *= 2) l += __shfl_xor_sync(~0u, l, k);
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int s = quarter + 4 * i;
    const float weight = __shfl_sync(~0u, h[4 * i / 32].z, s % 32);
    if (s >= n) continue;
#pragma unroll
    for (int k = 0; k < 4; ++k) (&sum.x)[k] = __fmaf_rn((&part[i].x)[k], weight, (&sum.x)[k]);
  }
  sums[quarter][d] = sum;
  __syncthreads();
  if (quarter) return;
  Four out;
  const float factor = exp2_approx(v - m) * (1.0f / 2688.0f);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float x = (&sum.x)[k];
#pragma unroll
    for (int i = 1; i < 4; ++i) x += (&sums[i][d].x)[k];
    out.element[k] = T::store(x / l * factor);
  }
  *to = out;
}

template <int D, class T>
cudaError_t launch(const Args& a, bool early, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(a.batch) * static_cast<unsigned>(a.kv_heads * a.group);
  if (early) return launch_early(combine_kernel<D, T>, dim3(grid), D, 1, 0, stream, a);
  combine_kernel<D, T><<<grid, D, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_combine(const Args& a, int depth, bool early, cudaStream_t stream) {
  if (depth == 128) return a.f16 ? launch<128, F16>(a, early, stream) : launch<128, Bf16>(a, early, stream);
  return a.f16 ? launch<64, F16>(a, early, stream) : launch<64, Bf16>(a, early, stream);
}

}  // namespace jnvfp4::attention
