// What the kernels of decode attention share: their arguments, and the results of segments.
#pragma once

#include "../../core/args.h"
#include "../../plan/decode_attention.h"
#include "../device.cuh"

namespace jnvfp4::attention {

struct Args {
  const void* q;  // [batch, kv_heads, group, D]
  KvRows k, v;
  const int32_t* lengths;
  const int32_t* pages;  // [batch, tokens / 64]; null: the cache is contiguous
  float* sums;           // [batch, kv_heads, max_segments, group, D]
  float4* heads;         // [batch, kv_heads, max_segments, group]: m, l, v
  void* out;
  bool f16;  // q and out, else bfloat16
  int batch, kv_heads, group, tokens, num_pages, max_segments;
  int share_most;      // of a CTA's segments, as many as are left over may be shared by warps
  float score_factor;  // as in plan/decode_attention.h

  __device__ __forceinline__ int length(int sequence) const { return min(max(__ldg(lengths + sequence), 0), tokens); }
  __device__ __forceinline__ int octets() const { return (group + 7) / 8; }
};

inline Args kernel_args(const DecodeAttentionArgs& a, void* scratch) {
  const KvCacheShape& c = a.cache;
  const auto narrow = [](int64_t v) { return static_cast<int>(v); };  // as the plan has checked; pages, memory
  const DecodeAttentionScratch s = decode_attention_scratch({c.batch, c.kv_heads, a.group, c.depth, c.tokens});
  auto* const bytes = static_cast<uint8_t*>(scratch);
  Args out{};
  out.q = a.q, out.k = a.keys, out.v = a.values, out.lengths = a.lengths, out.pages = c.pages, out.out = a.out;
  out.sums = reinterpret_cast<float*>(bytes + s.sums), out.heads = reinterpret_cast<float4*>(bytes + s.heads);
  out.f16 = a.kind == Float::kF16;
  out.batch = narrow(c.batch), out.kv_heads = narrow(c.kv_heads), out.group = narrow(a.group);
  out.tokens = narrow(c.tokens), out.num_pages = narrow(c.num_pages);
  out.max_segments = narrow(max_segments(c.tokens));
  out.score_factor = score_factor(a.sm_scale);
  return out;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^e for e from -127 on, where it is subnormal, to 127.
__device__ __forceinline__ float power_of_two(int e) {
  return float_of(e == -127 ? 1u << 22 : static_cast<uint32_t>(e + 127) << 23);
}

// Stores two tiles of the sums of a segment: of heads 2t and 2t + 1 each four of the D / 8 elements of g.
template <int D>
__device__ __forceinline__ void store_sums(const Args& a, int64_t at, int octet, int g, int t, int unit, float4 u,
                                           float4 v) {
  float* const to = a.sums + (at + 2 * t) * D + g * (D / 8) + unit * 4;
  if (octet * 8 + 2 * t < a.group) *reinterpret_cast<float4*>(to) = make_float4(u.x, u.z, v.x, v.z);
  if (octet * 8 + 2 * t + 1 < a.group) *reinterpret_cast<float4*>(to + D) = make_float4(u.y, u.w, v.y, v.w);
}

// Stores m, l and v of heads 2t and 2t + 1.
__device__ __forceinline__ void store_heads(const Args& a, int64_t at, int octet, int t, const float (&m)[2],
                                            const float (&l)[2], const float (&v)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (octet * 8 + 2 * t + i < a.group) a.heads[at + 2 * t + i] = make_float4(m[i], l[i], v[i], 0.0f);
}

// Adds the segments of all query heads. `early`: it starts before the kernel that makes them ends.
cudaError_t launch_combine(const Args& a, int depth, bool early, cudaStream_t stream);

}  // namespace jnvfp4::attention
