// append_kv: a thread quantizes a block of 16 of a new row of K or V, in place.
#include "../../core/args.h"
#include "../device.cuh"
#include "../kernels.h"

namespace jnvfp4 {
namespace {

template <class T, int D>
__global__ void __launch_bounds__(kThreads) append_kv_kernel(const __grid_constant__ AppendKvArgs a) {
  constexpr int kBlocks = D / kBlock;  // neighbouring lanes
  const KvCacheShape& c = a.cache;
  const int lane = threadIdx.x % 32;
  const uint32_t lanes = ((1u << kBlocks) - 1) << (lane / kBlocks * kBlocks);  // of the row
  for (int64_t i = thread_index(); i < c.batch * c.kv_heads * 2 * kBlocks; i += thread_count()) {
    const int64_t block = i % kBlocks, pair = i / kBlocks, of = pair / 2;  // of: sequence and kv head
    const bool is_v = pair % 2;
    Block<T> x;
    x.load(static_cast<const typename T::Stored*>(is_v ? a.v : a.k) + of * D + block * kBlock);
    float v[kBlock];
    x.values(v);
    uint32_t amax = block_amax(v);
#pragma unroll
    for (int d = 1; d < kBlocks; d *= 2) amax = amax_bits(amax, __shfl_xor_sync(lanes, amax, d));
    const int64_t sequence = of / c.kv_heads, position = a.positions[sequence];
    if (!c.has(sequence, position)) continue;
    const int64_t row = c.row(sequence, of % c.kv_heads, position);
    const KvRowsOut& out = is_v ? a.values : a.keys;
    const float row_amax = float_of(canonical_nan(amax));
    put_block(out, row * kBlocks + block, v, global_scale(row_amax, 448.0f));
    if (block == 0) out.amax[row] = row_amax;
  }
}

template <class T>
cudaError_t launch(const AppendKvArgs& a, cudaStream_t stream) {
  const int64_t blocks = a.cache.batch * a.cache.kv_heads * 2 * (a.cache.depth / kBlock);
  const unsigned grid = grid_for(blocks, kThreads);
  if (a.cache.depth == 128)
    append_kv_kernel<T, 128><<<grid, kThreads, 0, stream>>>(a);
  else
    append_kv_kernel<T, 64><<<grid, kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_append_kv(const AppendKvArgs& a, cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  with_float(a.kind, [&](auto t) { status = launch<decltype(t)>(a, stream); });
  return status;
}

}  // namespace jnvfp4
