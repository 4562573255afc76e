// Decode attention over an NVFP4 KV cache on any GPU: a plain kernel, in the order of sums that Hopper's has.
//
// A CTA has a segment of a sequence and kv head, for up to 8 query heads. Scores: a thread has a token and four heads.
// Values: a thread has an element, and all heads, or half of them if D is 64.
#include "../../../core/numerics_fast.h"
#include "../../matmul/launchers.h"
#include "../partial.cuh"

namespace jnvfp4::attention {
namespace {

constexpr int kHeads = 8, kCtaThreads = 128;

// Adds the products of a row and of four heads of q.
template <int D>
__device__ __forceinline__ void add_scores(const KvRows& rows, int64_t row, const float (*q)[D], float (&x)[4]) {
#pragma unroll 2
  for (int block = 0; block < D / kBlock; ++block) {
    const uint2 codes = __ldg(reinterpret_cast<const uint2*>(rows.data) + row * (D / kBlock) + block);
    const float scale = e4m3_decode(__ldg(rows.scale + row * (D / kBlock) + block));
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const float k = mul_rn(e2m1_decode_subnormal((i < 8 ? codes.x : codes.y) >> (4 * (i % 8)) & 15u), scale);
#pragma unroll
      for (int h = 0; h < 4; ++h) x[h] = __fmaf_rn(q[h][block * kBlock + i], k, x[h]);
    }
  }
}

template <int D>
__global__ void __launch_bounds__(kCtaThreads) sm80_attend_kernel(const __grid_constant__ Args a) {
  constexpr int kOwn = kHeads * D / kCtaThreads;  // heads of a thread that adds values
  __shared__ float q[kHeads][D], weight[kHeads][kChunkTokens], amax[kChunkTokens];  // weight: first the score
  __shared__ float reference[kHeads], total[kHeads];
  __shared__ int exponent;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  int rest = static_cast<int>(blockIdx.x);
  const int segment = rest % a.max_segments;
  rest /= a.max_segments;
  const int octet = rest % a.octets(), row = rest / a.octets(), sequence = row / a.kv_heads;
  const int length = a.length(sequence), each = segment_tokens(length);
  const int first = segment * each, tokens = min(each, length - first);
  if (tokens <= 0) return;
  const int heads = min(kHeads, a.group - octet * kHeads);
  const int64_t query = int64_t{row} * a.group + octet * kHeads;
  for (int i = tid; i < kHeads * D; i += kCtaThreads)
    q[i / D][i % D] = i / D < heads ? load_float(a.q, a.f16 ? Float::kF16 : Float::kBf16, query * D + i) : 0.0f;
  const int d = tid % D, own = tid / D * kOwn;
  float m[kOwn], v[kOwn], l[kOwn], sum[kOwn];
  for (int begin = 0; begin < tokens; begin += kChunkTokens) {
    const int left = min(kChunkTokens, tokens - begin), token = first + begin;
    int64_t row0 = int64_t{row} * a.tokens + token;
    if (a.pages) {
      const int page = a.pages[int64_t{sequence} * (a.tokens / kPageTokens) + token / kPageTokens];
      row0 = (int64_t{min(max(page, 0), a.num_pages - 1)} * a.kv_heads + row % a.kv_heads) * kPageTokens;
    }
    __syncthreads();  // q is there; the last chunk has been read
    {
      const int t = tid % kChunkTokens, h0 = tid / kChunkTokens * 4;
      float x[4] = {};
      if (t < left) add_scores<D>(a.k, row0 + t, q + h0, x);
      const float factor = t < left ? a.k.amax[row0 + t] * a.score_factor : 0.0f;
#pragma unroll
      for (int h = 0; h < 4; ++h) weight[h0 + h][t] = t < left ? x[h] * factor : -INFINITY;
      if (tid < kChunkTokens) amax[t] = t < left ? a.v.amax[row0 + t] : 0.0f;
    }
    __syncthreads();
    {
      const uint32_t most = max(bits_of(amax[lane]) & kMagnitude, bits_of(amax[lane + 32]) & kMagnitude);
      const int e = bounded_exponent(__reduce_max_sync(~0u, most));
      if (tid == 0) exponent = e;
#pragma unroll
      for (int i = 0; i < kHeads / 4; ++i) {
        const int h = warp * (kHeads / 4) + i;
        const float x[2] = {weight[h][lane], weight[h][lane + 32]};
        float highest = fmaxf(x[0], x[1]), sum_of_p = 0.0f;
#pragma unroll
        for (int k = 1; k < 32; k *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, k));
        highest = ceilf(highest);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float p = exp2_approx(x[k] - highest);
          sum_of_p += p, weight[h][lane + 32 * k] = p * (amax[lane + 32 * k] * power_of_two(-e));
        }
#pragma unroll
        for (int k = 1; k < 32; k *= 2) sum_of_p += __shfl_xor_sync(~0u, sum_of_p, k);
        if (lane == 0) reference[h] = highest, total[h] = sum_of_p;
      }
    }
    __syncthreads();
    float next[kOwn] = {};
    for (int t = 0; t < left; ++t) {
      const int64_t at = (row0 + t) * D + d;
      const float value = mul_rn(e2m1_decode_subnormal(__ldg(a.v.data + at / 2) >> (4 * (d % 2)) & 15u),
                                 e4m3_decode(__ldg(a.v.scale + at / kBlock)));
#pragma unroll
      for (int h = 0; h < kOwn; ++h) next[h] = __fmaf_rn(weight[own + h][t], value, next[h]);
    }
#pragma unroll
    for (int h = 0; h < kOwn; ++h) {
      const float chunk_m = reference[own + h], chunk_v = chunk_m + static_cast<float>(exponent);
      if (begin == 0) {
        m[h] = chunk_m, v[h] = chunk_v, l[h] = total[own + h], sum[h] = next[h];
        continue;
      }
      const float most_m = fmaxf(m[h], chunk_m), most_v = fmaxf(v[h], chunk_v);
      l[h] = __fmaf_rn(total[own + h], exp2_approx(chunk_m - most_m), l[h] * exp2_approx(m[h] - most_m));
      sum[h] = __fmaf_rn(next[h], exp2_approx(chunk_v - most_v), sum[h] * exp2_approx(v[h] - most_v));
      m[h] = most_m, v[h] = most_v;
    }
  }
  const int64_t at = (int64_t{row} * a.max_segments + segment) * a.group + octet * kHeads;
#pragma unroll
  for (int h = 0; h < kOwn; ++h) {
    if (own + h >= heads) continue;
    a.sums[(at + own + h) * D + d] = sum[h];
    if (d == 0) a.heads[at + own + h] = make_float4(m[h], l[h], v[h], 0.0f);
  }
}

cudaError_t launch_sm80(const DecodeAttentionArgs& args, void* scratch, cudaStream_t stream) {
  const Args a = kernel_args(args, scratch);
  const auto grid = static_cast<unsigned>(int64_t{a.batch} * a.kv_heads * ((a.group + 7) / 8) * a.max_segments);
  const int depth = static_cast<int>(args.cache.depth);
  if (depth == 128)
    sm80_attend_kernel<128><<<grid, kCtaThreads, 0, stream>>>(a);
  else
    sm80_attend_kernel<64><<<grid, kCtaThreads, 0, stream>>>(a);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? launch_combine(a, depth, false, stream) : status;
}

const Launchers<DecodeAttentionArgs> kLaunchers({{"sm80_nvfp4_attention", launch_sm80}});

}  // namespace
}  // namespace jnvfp4::attention
