// quantize on the CPU: tiles of up to 16 rows x 16 columns, one block a row.
#include "../check.h"
#include "../types.h"
#include "parallel.h"

namespace jnvfp4 {
namespace {

struct Args {
  const void* x;
  const float* amax;
  uint8_t* data;
  uint8_t* scale;
  QuantShape shape;
  float e4m3_max;

  int64_t groups_per_matrix() const { return (shape.rows + kBlock - 1) / kBlock; }
};

struct Tile {
  alignas(64) float value[kBlock][kBlock];
};

template <class L>
JNVFP4_HD void load_tile(const typename L::Stored* matrix, const QuantShape& s, int64_t row, int64_t col, int count,
                         Tile& t) {
  if (s.transposed) {
    for (int i = 0; i < kBlock; ++i)
      for (int r = 0; r < count; ++r) t.value[r][i] = L::load(matrix[(col + i) * s.rows + row + r]);
  } else {
    for (int r = 0; r < count; ++r)
      for (int i = 0; i < kBlock; ++i) t.value[r][i] = L::load(matrix[(row + r) * s.cols + col + i]);
  }
}

JNVFP4_HD uint32_t block_amax(const float* v) {
  uint32_t m = 0;
  for (int i = 0; i < kBlock; ++i) m = amax_bits(m, bits_of(v[i]) & kMagnitude);
  return m;
}

// The 16 codes of a block, packed two a byte. A NaN scale has only codes 0.
JNVFP4_HD void encode_block(const float* v, float enc, uint8_t scale, uint8_t* out) {
  alignas(64) uint32_t code[kBlock];
  const uint32_t keep = scale == kScaleNan ? 0u : 0xfu;
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t b = bits_of(mul_rn(v[i], enc));
    code[i] = (e2m1_magnitude(b & kMagnitude) | (b & kSign) >> 28) & keep;
  }
  uint64_t packed = 0;
  for (int i = 0; i < kBlock; ++i) packed |= uint64_t{code[i]} << (4 * i);
  std::memcpy(out, &packed, sizeof packed);
}

// Row groups [begin, end): 16 rows of one matrix each.
template <class S, class L>
JNVFP4_HD void quantize_groups(const Args& a, int64_t begin, int64_t end) {
  const QuantShape& s = a.shape;
  const int64_t blocks = s.cols / kBlock;
  for (int64_t g = begin; g < end; ++g) {
    const int64_t batch = g / a.groups_per_matrix();
    const int64_t row = g % a.groups_per_matrix() * kBlock;
    const int count = static_cast<int>(std::min<int64_t>(kBlock, s.rows - row));
    const auto* matrix = static_cast<const typename L::Stored*>(a.x) + batch * s.rows * s.cols;
    GlobalScale global[kBlock];
    for (int r = 0; r < count; ++r)
      global[r] = global_scale(a.amax[(batch * s.rows + row + r) / s.rows_per_amax], a.e4m3_max);
    for (int64_t c = 0; c < blocks; ++c) {
      Tile t;
      load_tile<L>(matrix, s, row, c * kBlock, count, t);
      uint32_t amax[kBlock];
      for (int r = 0; r < count; ++r) amax[r] = block_amax(t.value[r]);
      if constexpr (S::spec.block_rows == 16) {
        for (int r = 1; r < kBlock; ++r) amax[0] = amax_bits(amax[0], amax[r]);
        for (int r = 1; r < kBlock; ++r) amax[r] = amax[0];
      }
      for (int r = 0; r < count; ++r) {
        const int64_t block = (batch * s.rows + row + r) * blocks + c;
        const uint8_t scale = block_scale(amax[r], global[r]);
        a.scale[block] = scale;
        encode_block(t.value[r], block_encode_scale(scale, global[r]), scale, a.data + block * (kBlock / 2));
      }
    }
  }
}

// Row groups [begin, end): the amax of each row, for specs whose amax is per row and not given.
template <class L>
JNVFP4_HD void amax_groups(const Args& a, float* amax, int64_t begin, int64_t end) {
  const QuantShape& s = a.shape;
  for (int64_t g = begin; g < end; ++g) {
    const int64_t batch = g / a.groups_per_matrix();
    const int64_t row = g % a.groups_per_matrix() * kBlock;
    const int count = static_cast<int>(std::min<int64_t>(kBlock, s.rows - row));
    const auto* matrix = static_cast<const typename L::Stored*>(a.x) + batch * s.rows * s.cols;
    uint32_t m[kBlock] = {};
    for (int64_t c = 0; c < s.cols; c += kBlock) {
      Tile t;
      load_tile<L>(matrix, s, row, c, count, t);
      for (int r = 0; r < count; ++r) m[r] = amax_bits(m[r], block_amax(t.value[r]));
    }
    for (int r = 0; r < count; ++r) amax[batch * s.rows + row + r] = float_of(canonical_nan(m[r]));
  }
}

using Groups = void (*)(const Args&, int64_t, int64_t);
using AmaxGroups = void (*)(const Args&, float*, int64_t, int64_t);

// The same source compiled for each instruction set; the results are the same bits.
template <class S, class L>
void quantize_portable(const Args& a, int64_t b, int64_t e) {
  quantize_groups<S, L>(a, b, e);
}
template <class L>
void amax_portable(const Args& a, float* m, int64_t b, int64_t e) {
  amax_groups<L>(a, m, b, e);
}
#if defined(__x86_64__)
template <class S, class L>
JNVFP4_AVX2 void quantize_avx2(const Args& a, int64_t b, int64_t e) {
  quantize_groups<S, L>(a, b, e);
}
template <class S, class L>
JNVFP4_AVX512 void quantize_avx512(const Args& a, int64_t b, int64_t e) {
  quantize_groups<S, L>(a, b, e);
}
template <class L>
JNVFP4_AVX2 void amax_avx2(const Args& a, float* m, int64_t b, int64_t e) {
  amax_groups<L>(a, m, b, e);
}
template <class L>
JNVFP4_AVX512 void amax_avx512(const Args& a, float* m, int64_t b, int64_t e) {
  amax_groups<L>(a, m, b, e);
}
#endif

template <class S, class L>
Groups quantize_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return quantize_avx512<S, L>;
  if (isa == Isa::kAvx2) return quantize_avx2<S, L>;
#endif
  return quantize_portable<S, L>;
}

template <class L>
AmaxGroups amax_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return amax_avx512<L>;
  if (isa == Isa::kAvx2) return amax_avx2<L>;
#endif
  return amax_portable<L>;
}

struct Kernels {
  Groups quantize = nullptr;
  AmaxGroups amax = nullptr;
};

template <class S>
Kernels kernels_for(Float kind) {
  Kernels k;
  with_float(kind, [&](auto t) { k = {quantize_for<S, decltype(t)>(isa()), amax_for<decltype(t)>(isa())}; });
  return k;
}

// `found` is where a per-row amax goes when none is given.
ffi::Error run(ffi::ThreadPool pool, const ffi::AnyBuffer& x, const float* amax, int64_t amax_count,
               ffi::AnyBuffer data, ffi::AnyBuffer scale, float* found, bool transpose, const SpecAttr& attr) {
  const KernelSpec spec = kernel_spec(attr);
  Float kind;
  if (!float_kind(x.element_type(), &kind)) return invalid("quantize", "x must be float32, bfloat16 or float16");
  Args args{x.untyped_data(),
            amax,
            static_cast<uint8_t*>(data.untyped_data()),
            static_cast<uint8_t*>(scale.untyped_data()),
            {},
            static_cast<float>(attr.e4m3_max)};
  const std::string error = quant_shape(x, data, scale, amax_count, transpose, spec, &args.shape);
  if (!error.empty()) return invalid("quantize", error);
  Kernels kernels;
  if (!dispatch(spec, SupportedSpecs{}, [&](auto s) { kernels = kernels_for<decltype(s)>(kind); }))
    return unsupported("quantize", attr);
  const int64_t groups = args.shape.batch * args.groups_per_matrix();
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / (kBlock * std::max<int64_t>(1, args.shape.cols)));
  if (found) {
    parallel_for(pool, groups, grain, [&](int64_t b, int64_t e) { kernels.amax(args, found, b, e); });
    args.amax = found;
  }
  parallel_for(pool, groups, grain, [&](int64_t b, int64_t e) { kernels.quantize(args, b, e); });
  return ffi::Error::Success();
}

ffi::Error quantize_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> amax,
                         ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> scale, bool transpose,
                         SpecAttr spec) {
  return run(pool, x, amax.typed_data(), static_cast<int64_t>(amax.element_count()), *data, *scale, nullptr, transpose,
             spec);
}

ffi::Error quantize_find_amax_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> data,
                                   ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::Buffer<ffi::F32>> amax,
                                   bool transpose, SpecAttr spec) {
  return run(pool, x, nullptr, static_cast<int64_t>(amax->element_count()), *data, *scale, amax->typed_data(),
             transpose, spec);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Quantize, quantize_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::Buffer<ffi::F32>>()  // amax
                                  .Ret<ffi::AnyBuffer>()         // data
                                  .Ret<ffi::AnyBuffer>()         // scale
                                  .Attr<bool>("transpose")
                                  .Attr<SpecAttr>("spec"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeFindAmax, quantize_find_amax_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Ret<ffi::AnyBuffer>()         // data
                                  .Ret<ffi::AnyBuffer>()         // scale
                                  .Ret<ffi::Buffer<ffi::F32>>()  // amax, one per row
                                  .Attr<bool>("transpose")
                                  .Attr<SpecAttr>("spec"));

}  // namespace jnvfp4
