// The kernels for few rows on Hopper, for each type of the left operand.
#include "small_m.cuh"

namespace jnvfp4 {

cudaError_t launch_sm90_small_m(const MatmulArgs& g, cudaStream_t stream) {
  using small_m::Left;
  if (g.a.quantized()) return small_m::launch<Left::kNvfp4>(g, stream);
  return g.a.kind == Float::kBf16 ? small_m::launch<Left::kBf16>(g, stream) : small_m::launch<Left::kF16>(g, stream);
}

}  // namespace jnvfp4
