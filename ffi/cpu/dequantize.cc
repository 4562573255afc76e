// dequantize on the CPU: sixteen blocks at a time (lanes.h).
#include "../calls/dequantize.h"

#include "lanes.h"
#include "parallel.h"
#include "steps.h"

namespace jnvfp4 {
namespace {

// Blocks [begin, end), at most 16.
template <class St, bool kRotateBack>
JNVFP4_HD void dequantize_tile(const DequantizeArgs& a, int64_t begin, int64_t end) {
  const int count = static_cast<int>(end - begin);
  Lanes<uint32_t> codes[2] = {}, scale = {};
  Lanes<float> amax = {}, factor;
  const int64_t first = begin / a.blocks_per_amax, last = (end - 1) / a.blocks_per_amax;
  for (int l = 0; l < count; ++l) {
    uint32_t half[2];
    std::memcpy(half, a.data + (begin + l) * sizeof half, sizeof half);
    codes[0][l] = half[0], codes[1][l] = half[1];
    scale[l] = a.scale[begin + l];
  }
  for (int l = 0; l < count; ++l) amax[l] = a.amax[first == last ? first : (begin + l) / a.blocks_per_amax];
  for (int l = 0; l < kLanes; ++l) factor[l] = dequantize_factor(scale[l], amax[l], a.e4m3_max);
  Tile t;
  for (int i = 0; i < kBlock; ++i)
    for (int l = 0; l < kLanes; ++l)
      t.value[i][l] = mul_rn(e2m1_decode(codes[i / 8][l] >> (4 * (i % 8)) & 0xfu), factor[l]);
  if constexpr (kRotateBack) rotate_back(t);
  store_rows<St>(t, count, static_cast<typename St::Stored*>(a.out) + begin * kBlock);
}

template <class St, bool kRotateBack>
struct DequantizeBlocks {
  static JNVFP4_HD void run(const DequantizeArgs& a, int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b += kLanes) dequantize_tile<St, kRotateBack>(a, b, std::min(end, b + kLanes));
  }
};

auto kernel_of(const DequantizeArgs& a) {
  Compiled<DequantizeBlocks<F32, false>>::Function kernel = nullptr;
  with_float(a.kind, [&](auto t) {
    using T = decltype(t);
    kernel = a.rotate_back ? Compiled<DequantizeBlocks<T, true>>::best() : Compiled<DequantizeBlocks<T, false>>::best();
  });
  return kernel;
}

ffi::Error run(ffi::ThreadPool pool, const DequantizeArgs& args) {
  dequantize(pool, args);
  return ffi::Error::Success();
}

}  // namespace

void dequantize(ffi::ThreadPool& pool, const DequantizeArgs& args) {
  const auto kernel = kernel_of(args);
  parallel_for(pool, args.blocks, 4096, [&](int64_t b, int64_t e) { kernel(args, b, e); });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dequantize, (dequantize_call<ffi::ThreadPool, run>),
                              dequantize_binding().Ctx<ffi::ThreadPool>());

}  // namespace jnvfp4
