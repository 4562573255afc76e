// What the fused kernels of Hopper need before they start.
#include "sm90_decode.cuh"
#include "sm90_fused.h"
#include "sm90_ptx.cuh"

namespace jnvfp4 {
namespace {

// ---------------------------------------------------------------- the left operand, decoded
// Exchanges words among the four threads whose numbers in a group of eight are two apart: thread t of them gets, of all
// four, the word t. A transpose of 4 x 4.
__device__ __forceinline__ void transpose_words(uint32_t (&p)[4], int t) {
  const bool odd = t & 1, up = t & 2;
  uint32_t x = __shfl_xor_sync(~0u, odd ? p[0] : p[1], 2), y = __shfl_xor_sync(~0u, odd ? p[2] : p[3], 2);
  if (odd)
    p[0] = x, p[2] = y;
  else
    p[1] = x, p[3] = y;
  x = __shfl_xor_sync(~0u, up ? p[0] : p[2], 4), y = __shfl_xor_sync(~0u, up ? p[1] : p[3], 4);
  if (up)
    p[0] = x, p[1] = y;
  else
    p[2] = x, p[3] = y;
}

// A thread has 8 elements at a time, kSteps of them on their way. Eight threads have a window, and write it in fragment
// order (sm90_decode.cuh): the 16 bytes 2 j and 2 j + 1 of step j each have one pair of each block.
template <int kSteps>
__global__ void __launch_bounds__(kThreads)
    sm90_decode_fragments_kernel(const uint32_t* data, const uint8_t* scale, uint4* out, int64_t rows, int64_t depth) {
#if __CUDA_ARCH__ >= 900
  let_next_kernel_start();  // it waits before it reads `out`
#endif
  const int64_t here = depth / 8, padded = (depth + kWindow - 1) / kWindow * 8;  // eights of a row
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kSteps + threadIdx.x;
  uint32_t codes[kSteps], scales[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int64_t at = first + i * kThreads, row = here == padded ? 0 : quotient(at, padded), eight = at - row * padded;
    codes[i] = scales[i] = 0;
    if (at >= rows * padded || (here != padded && eight >= here)) continue;
    codes[i] = __ldcs(data + row * here + eight);
    scales[i] = __ldg(scale + (row * here + eight) / 2);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int64_t at = first + i * kThreads;
    uint32_t p[4];
    decode_word(codes[i], low_twice(scale_pair<F16>(scales[i])), p[0], p[1], p[2], p[3]);
    transpose_words(p, threadIdx.x / 2 % 4);  // all threads: a shuffle is of whole warps
    const int lane = threadIdx.x % 8;
    if (at < rows * padded) out[at - lane + lane % 2 * 4 + lane / 2] = make_uint4(p[0], p[1], p[2], p[3]);
  }
}

// ---------------------------------------------------------------- rows whose pitch no tensor map takes
template <class Word>
__global__ void __launch_bounds__(kThreads)
    sm90_pitch_kernel(const Word* from, Word* to, int64_t rows, int64_t words, int64_t pitch) {
  for (int64_t i = thread_index(); i < rows * words; i += thread_count()) {
    const int64_t row = quotient(i, words);
    to[row * pitch + i - row * words] = __ldg(from + i);
  }
}

template <class Word>
void launch_pitch(const void* from, void* to, int64_t rows, int64_t bytes, int64_t pitch, cudaStream_t stream) {
  constexpr int64_t kSize = sizeof(Word);
  sm90_pitch_kernel<<<grid_for(rows * bytes / kSize, kThreads), kThreads, 0, stream>>>(
      static_cast<const Word*>(from), static_cast<Word*>(to), rows, bytes / kSize, pitch / kSize);
}

}  // namespace

cudaError_t launch_sm90_decode_fragments(const MatmulOperand& a, void* out, int64_t rows, int64_t depth,
                                         cudaStream_t stream) {
  const int64_t eights = rows * ((depth + kWindow - 1) / kWindow) * 8;
  const auto launch = [&](auto kernel, int64_t steps) {
    const int64_t per = kThreads * steps;
    kernel<<<static_cast<unsigned>((eights + per - 1) / per), kThreads, 0, stream>>>(
        static_cast<const uint32_t*>(a.data), a.scale, static_cast<uint4*>(out), rows, depth);
  };
  if (eights > int64_t{multiprocessors()} * 8 * kThreads * 8)  // all resident threads have work at once
    launch(sm90_decode_fragments_kernel<8>, 8);
  else
    launch(sm90_decode_fragments_kernel<2>, 2);
  return cudaGetLastError();
}

cudaError_t launch_sm90_pitch(const void* from, void* to, int64_t rows, int64_t bytes, int64_t pitch,
                              cudaStream_t stream) {
  if (bytes % 8 == 0)
    launch_pitch<uint2>(from, to, rows, bytes, pitch, stream);
  else if (bytes % 4 == 0)
    launch_pitch<uint32_t>(from, to, rows, bytes, pitch, stream);
  else
    launch_pitch<uint8_t>(from, to, rows, bytes, pitch, stream);
  return cudaGetLastError();
}

}  // namespace jnvfp4
