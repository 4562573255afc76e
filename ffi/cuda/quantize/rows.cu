// quantize on CUDA, blocks along contiguous memory.
#include "choose.cuh"
#include "rows.cuh"

namespace jnvfp4 {
namespace {

struct Quantize {
  using Args = QuantizeArgs;
  // With five, nvcc 13.0 spills for Blackwell, where it keeps more addresses of the loop over blocks in registers.
  template <class S, bool kConverts>
  static constexpr int kBlocks = kChooses<S> ? 3
                                 : kConverts ? 4
                                             : 5;
  template <class S, class T, class Scales>
  __device__ __forceinline__ static void run(const Args& a, const Scales& scales, const Block<T>& raw, At at) {
    const auto source = source_of<S>(raw);
    const uint32_t m = source.amax();
    encode_block<S>(
        source, source.signs(), m, scales, [&](int i) { return load_element<T>(a.x, a.kind, at.index() * kBlock + i); },
        [&](uint32_t (&bits)[4]) {
          if constexpr (kStochastic<S>) random_of(scales, a.shape, a.stream, at.index(), bits);
        })
        .store(a.data + at.first * (kBlock / 2), a.scale + at.first, at.i);
  }
};

}  // namespace

cudaError_t launch_quantize(const QuantizeArgs& args, const KernelSpec& spec, cudaStream_t stream) {
  const bool rows = !args.shape.transposed && spec.block_rows == 1;
  return rows ? launch_quantize_rows(args, spec, stream) : launch_quantize_tiles(args, spec, stream);
}

cudaError_t launch_quantize_rows(const QuantizeArgs& args, const KernelSpec& spec, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  dispatch(spec, CudaSpecs{}, [&](auto s) {
    using S = decltype(s);
    const auto launch = [&](auto t) { status = launch_rows<Quantize, S, decltype(t)>(args, stream); };
    if constexpr (S::spec.block_rows == 1 && kChooses<S>)
      with_bf16_or_wide(args.kind, launch);
    else if constexpr (S::spec.block_rows == 1)
      with_float(args.kind, launch);
  });
  return status;
}

}  // namespace jnvfp4
