// dequantize on the CPU: one block at a time.
#include "../check.h"
#include "../types.h"
#include "parallel.h"

namespace jnvfp4 {
namespace {

struct Args {
  const uint8_t* data;
  const uint8_t* scale;
  const float* amax;
  void* out;
  int64_t blocks_per_amax;
  float e4m3_max;
};

template <class St, bool kRotateBack>
JNVFP4_HD void dequantize_blocks(const Args& a, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const float factor = dequantize_factor(a.scale[b], a.amax[b / a.blocks_per_amax], a.e4m3_max);
    uint64_t packed;
    std::memcpy(&packed, a.data + b * (kBlock / 2), sizeof packed);
    auto* out = static_cast<typename St::Stored*>(a.out) + b * kBlock;
    float value[kBlock];
    for (int i = 0; i < kBlock; ++i)
      value[i] = mul_rn(e2m1_decode(static_cast<uint32_t>(packed >> (4 * i)) & 0xfu), factor);
    if constexpr (kRotateBack) rht16_inverse(value);
    for (int i = 0; i < kBlock; ++i) out[i] = St::store(value[i]);
  }
}

using Blocks = void (*)(const Args&, int64_t, int64_t);

template <class St, bool kRotateBack>
void portable(const Args& a, int64_t b, int64_t e) {
  dequantize_blocks<St, kRotateBack>(a, b, e);
}
#if defined(__x86_64__)
template <class St, bool kRotateBack>
JNVFP4_AVX2 void avx2(const Args& a, int64_t b, int64_t e) {
  dequantize_blocks<St, kRotateBack>(a, b, e);
}
template <class St, bool kRotateBack>
JNVFP4_AVX512 void avx512(const Args& a, int64_t b, int64_t e) {
  dequantize_blocks<St, kRotateBack>(a, b, e);
}
#endif

template <class St, bool kRotateBack>
Blocks kernel_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return avx512<St, kRotateBack>;
  if (isa == Isa::kAvx2) return avx2<St, kRotateBack>;
#endif
  return portable<St, kRotateBack>;
}

ffi::Error dequantize_impl(ffi::ThreadPool pool, ffi::Buffer<ffi::U8> data, ffi::AnyBuffer scale,
                           ffi::Buffer<ffi::F32> amax, ffi::Result<ffi::AnyBuffer> out, int32_t e4m3_max, bool windows,
                           bool rotate_back) {
  int64_t blocks, blocks_per_amax;
  if (const std::string error = dequantize_shape(data, scale, amax, *out, windows, &blocks, &blocks_per_amax);
      !error.empty())
    return invalid("dequantize", error);
  Float kind;
  if (!float_kind(out->element_type(), &kind))
    return invalid("dequantize", "dtype must be float32, bfloat16 or float16");
  const Args args{data.typed_data(), static_cast<const uint8_t*>(scale.untyped_data()),
                  amax.typed_data(), out->untyped_data(),
                  blocks_per_amax,   static_cast<float>(e4m3_max)};
  Blocks kernel = nullptr;
  with_float(kind, [&](auto t) {
    using T = decltype(t);
    kernel = rotate_back ? kernel_for<T, true>(isa()) : kernel_for<T, false>(isa());
  });
  parallel_for(pool, blocks, 4096, [&](int64_t b, int64_t e) { kernel(args, b, e); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dequantize, dequantize_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::U8>>()   // data
                                  .Arg<ffi::AnyBuffer>()         // scale
                                  .Arg<ffi::Buffer<ffi::F32>>()  // amax
                                  .Ret<ffi::AnyBuffer>()         // out
                                  .Attr<int32_t>("e4m3_max")
                                  .Attr<bool>("windows")
                                  .Attr<bool>("rotate_back"));

}  // namespace jnvfp4
