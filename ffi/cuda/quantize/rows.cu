// quantize on CUDA, blocks along contiguous memory.
#include "choose.cuh"
#include "rows.cuh"

namespace jnvfp4 {
namespace {

struct Quantize {
  using Args = QuantizeArgs;
  template <class S>
  static constexpr bool kResident = true;
  template <class S>
  static constexpr int kBlocks = kChooses<S> ? 3 : 5;
  template <class S, class T, class Scales>
  __device__ __forceinline__ static void run(const Args& a, const Scales& scales, const Block<T>& raw, At at, bool) {
    const auto source = source_of<S>(raw);
    const uint32_t m = source.amax();
    const auto* x = static_cast<const typename T::Stored*>(a.x) + at.index() * kBlock;
    encode_block<S>(
        source, source.signs(), m, scales, [&](int i) { return T::load(x[i]); },
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
  dispatch(spec, SupportedSpecs{}, [&](auto s) {
    using S = decltype(s);
    if constexpr (S::spec.block_rows == 1)
      with_float(args.kind, [&](auto t) { status = launch_rows<Quantize, S, decltype(t)>(args, stream); });
  });
  return status;
}

}  // namespace jnvfp4
