// What the fused kernels of Hopper need before they start.
#include "sm90_decode.cuh"
#include "sm90_fused.h"
#include "sm90_ptx.cuh"

namespace jnvfp4 {
namespace {

// ---------------------------------------------------------------- the left operand
// Fragment order, inside a window of 64 along K: position 16 j + 8 q + 2 t + b holds element 16 t + 8 (j / 2) +
// 2 (j % 2) + q + 4 b. Lane t of a quad then needs for the four k16 steps j of wgmma exactly the elements of block t: 8
// neighbouring bytes of codes and one scale of a row of b.

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

// Eight elements as the pairs (k, k + 4) of fragment order.
struct Codes {
  const uint32_t* data;
  const uint8_t* scale;

  struct Raw {
    uint32_t codes, scale;
  };
  __device__ __forceinline__ Raw load(int64_t i) const { return {__ldcs(data + i), __ldg(scale + i / 2)}; }
  static __device__ __forceinline__ void pairs(const Raw& raw, uint32_t (&p)[4]) {
    uint32_t scale, unused;
    Decode<F16>::scales(raw.scale, scale, unused);
    Decode<F16>::eight(raw.codes, scale, p);
  }
};
struct Halves {
  const uint4* data;

  using Raw = uint4;
  __device__ __forceinline__ Raw load(int64_t i) const { return __ldcs(data + i); }
  static __device__ __forceinline__ void pairs(const Raw& raw, uint32_t (&p)[4]) { permute8(raw, p); }
};

// A thread has 8 elements at a time, kSteps of them on their way. Eight threads have a window, and write it in fragment
// order: 16 bytes have one pair of each block.
template <class Source, int kSteps>
__global__ void __launch_bounds__(kThreads)
    sm90_prepare_kernel(Source source, uint4* out, int64_t rows, int64_t depth, uint32_t* flags, int64_t flag_count) {
#if __CUDA_ARCH__ >= 900
  wait_for_kernel_ahead();  // which may make a, or read what `out` was before
  let_next_kernel_start();  // it waits before it reads `out`
#endif
  for (int64_t i = thread_index(); i < flag_count; i += thread_count()) flags[i] = 0;
  const int64_t here = depth / 8, padded = (depth + kWindow - 1) / kWindow * 8;  // eights of a row
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kSteps + threadIdx.x;
  typename Source::Raw raw[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int64_t at = first + i * kThreads, row = here == padded ? 0 : quotient(at, padded), eight = at - row * padded;
    raw[i] = {};
    if (at < rows * padded && (here == padded || eight < here)) raw[i] = source.load(row * here + eight);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int64_t at = first + i * kThreads;
    uint32_t p[4];
    Source::pairs(raw[i], p);
    transpose_words(p, threadIdx.x / 2 % 4);  // all threads: a shuffle is of whole warps
    const int lane = threadIdx.x % 8;
    if (at < rows * padded) out[at - lane + lane % 2 * 4 + lane / 2] = make_uint4(p[0], p[1], p[2], p[3]);
  }
}

// Launches before the kernel ahead ends. The kernel waits for that end itself.
template <class... Args>
cudaError_t launch_early(void (*kernel)(Args...), unsigned blocks, cudaStream_t stream, Args... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(kThreads), config.stream = stream;
  config.attrs = &early, config.numAttrs = 1;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, args...);
  if (status != cudaSuccess) cudaGetLastError();  // it is returned, and not to be found by the next launch
  return status;
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

cudaError_t launch_sm90_prepare(const MatmulOperand& a, void* out, int64_t rows, int64_t depth, uint32_t* flags,
                                int64_t flag_count, cudaStream_t stream) {
  const int64_t eights = rows * ((depth + kWindow - 1) / kWindow) * 8;
  const bool many = eights > int64_t{multiprocessors()} * 8 * kThreads * 8;  // all resident threads have work at once
  const auto launch = [&](auto source, auto kernel, int64_t steps) {
    const int64_t per = kThreads * steps;
    return launch_early(kernel, static_cast<unsigned>((eights + per - 1) / per), stream, source,
                        static_cast<uint4*>(out), rows, depth, flags, flag_count);
  };
  const auto launch_source = [&](auto source) {
    using Source = decltype(source);
    return many ? launch(source, sm90_prepare_kernel<Source, 8>, 8) : launch(source, sm90_prepare_kernel<Source, 2>, 2);
  };
  return a.quantized() ? launch_source(Codes{static_cast<const uint32_t*>(a.data), a.scale})
                       : launch_source(Halves{static_cast<const uint4*>(a.data)});
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
