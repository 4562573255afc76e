// Which of the kernels for few rows on Hopper runs.
#include "sm90_small_m.cuh"

namespace jnvfp4 {
namespace {

// wgmma takes 64 columns and up to 64 rows at a time, mma 16 columns and 8 rows.
template <small_m::Left left>
cudaError_t launch(const MatmulArgs& g, cudaStream_t stream) {
  const bool wide = g.shape.rows > 16 && g.shape.depth % 256 == 0;
  return wide ? small_m::launch_wgmma<left>(g, stream) : small_m::launch_mma<left>(g, stream);
}

}  // namespace

cudaError_t launch_sm90_small_m(const MatmulArgs& g, cudaStream_t stream) {
  if (g.a.quantized()) return launch<small_m::Left::kNvfp4>(g, stream);
  return g.a.kind == Float::kBf16 ? launch<small_m::Left::kBf16>(g, stream) : launch<small_m::Left::kF16>(g, stream);
}

}  // namespace jnvfp4
