// How decode attention runs on Hopper (attend.cuh).
#include "../../matmul/launchers.h"
#include "attend.cuh"

namespace jnvfp4::attention {
namespace {

// Warps of a CTA, of which a multiprocessor has one, and each warp's slots for half a chunk: as many as there is room
// for.
constexpr int kWarps = 12;
constexpr int num_slots(int depth) { return depth == 128 ? 3 : 6; }

template <int D, bool kPaged>
cudaError_t launch_slice(const Args& a, int blocks, cudaStream_t stream) {
  return launch_attend<D, kPaged, kWarps, num_slots(D)>(a, stream, blocks);
}

// Sequences [begin, begin + count).
Args slice(const Args& a, int begin, int count, int depth) {
  Args s = a;
  const int64_t rows = int64_t{begin} * a.kv_heads;
  s.batch = count, s.lengths += begin;
  s.q = static_cast<const uint16_t*>(a.q) + rows * a.group * depth;
  s.sums += rows * a.max_segments * a.group * depth, s.heads += rows * a.max_segments * a.group;
  if (a.pages) {
    s.pages += int64_t{begin} * (a.tokens / kPageTokens);
  } else {
    for (KvRows* r : {&s.k, &s.v})
      r->data += rows * a.tokens * depth / 2, r->scale += rows * a.tokens * depth / kBlock, r->amax += rows * a.tokens;
  }
  return s;
}

cudaError_t launch_sm90(const DecodeAttentionArgs& args, void* scratch, cudaStream_t stream) {
  Args a = kernel_args(args, scratch);
  const int depth = static_cast<int>(args.cache.depth), blocks = multiprocessors();
  a.share_most = kWarps / kSharers * (kSharers - 1);  // then they take less time than an item of a warp
  const auto kernel = depth == 128 ? (a.pages ? launch_slice<128, true> : launch_slice<128, false>)
                                   : (a.pages ? launch_slice<64, true> : launch_slice<64, false>);
  cudaError_t status = cudaSuccess;
  for (int begin = 0; begin < a.batch && status == cudaSuccess; begin += kMostBatch)
    status = kernel(slice(a, begin, std::min(kMostBatch, a.batch - begin), depth), blocks, stream);
  return status == cudaSuccess ? launch_combine(a, depth, true, stream) : status;
}

const Launchers<DecodeAttentionArgs> kLaunchers({{"sm90_nvfp4_attention", launch_sm90}});

}  // namespace
}  // namespace jnvfp4::attention
