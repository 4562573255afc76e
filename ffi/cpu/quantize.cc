// quantize on the CPU: tiles of up to 16 rows x 16 columns, one block a row.
#include <vector>

#include "../check.h"
#include "../types.h"
#include "parallel.h"

namespace jnvfp4 {
namespace {

struct Tile {
  alignas(64) float value[kBlock][kBlock];
};

// Loads `count` rows of the tile at (row, col) of a matrix.
using LoadTile = void (*)(const void* matrix, const QuantShape& s, int64_t row, int64_t col, int count, Tile& t);

struct Args {
  const void* x;
  int64_t element_size;
  LoadTile load;
  const float* amax;
  uint8_t* data;
  uint8_t* scale;
  StreamArgs stream;
  QuantShape shape;
  float e4m3_max;

  int64_t groups_per_matrix() const { return (shape.rows + kBlock - 1) / kBlock; }
};

// Up to 16 rows of one matrix.
struct Group {
  int64_t batch, row;
  int count;
  const void* matrix;
  int64_t first_row;  // over all matrices

  Group(const Args& a, int64_t index)
      : batch(index / a.groups_per_matrix()),
        row(index % a.groups_per_matrix() * kBlock),
        count(static_cast<int>(std::min<int64_t>(kBlock, a.shape.rows - row))),
        matrix(static_cast<const char*>(a.x) + batch * a.shape.rows * a.shape.cols * a.element_size),
        first_row(batch * a.shape.rows + row) {}
};

template <class L>
JNVFP4_HD void load_tile(const void* x, const QuantShape& s, int64_t row, int64_t col, int count, Tile& t) {
  const auto* matrix = static_cast<const typename L::Stored*>(x);
  if (s.transposed) {
    for (int i = 0; i < kBlock; ++i)
      for (int r = 0; r < count; ++r) t.value[r][i] = L::load(matrix[(col + i) * s.rows + row + r]);
  } else {
    for (int r = 0; r < count; ++r)
      for (int i = 0; i < kBlock; ++i) t.value[r][i] = L::load(matrix[(row + r) * s.cols + col + i]);
  }
}

template <class S>
JNVFP4_HD void load_and_rotate(const Args& a, const Group& g, int64_t col, Tile& t) {
  a.load(g.matrix, a.shape, g.row, col, g.count, t);
  if constexpr (S::spec.rht)
    for (int r = 0; r < g.count; ++r) rht16(t.value[r]);
}

JNVFP4_HD uint32_t block_amax(const float* v) {
  uint32_t m = 0;
  for (int i = 0; i < kBlock; ++i) m = amax_bits(m, bits_of(v[i]) & kMagnitude);
  return m;
}

// ---------------------------------------------------------------- one block
JNVFP4_HD uint64_t pack(const uint32_t* code) {
  uint64_t packed = 0;
  for (int i = 0; i < kBlock; ++i) packed |= uint64_t{code[i]} << (4 * i);
  return packed;
}

// The 16 codes of a block. A NaN scale has only codes 0.
JNVFP4_HD void encode_block(const float* v, float enc, uint8_t scale, uint32_t* code) {
  const uint32_t keep = scale == kScaleNan ? 0u : 0xfu;
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t b = bits_of(mul_rn(v[i], enc));
    code[i] = (e2m1_magnitude(b & kMagnitude) | (b & kSign) >> 28) & keep;
  }
}

JNVFP4_HD void encode_block_stochastic(const float* v, float enc, uint8_t scale, const uint32_t (&random)[4],
                                       uint32_t* code) {
  const uint32_t keep = scale == kScaleNan ? 0u : 0xfu;
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t b = bits_of(mul_rn(v[i], enc)), r = random[i / 4] >> (8 * (i % 4)) & 0xffu;
    code[i] = (e2m1_magnitude_stochastic(b & kMagnitude, r) | (b & kSign) >> 28) & keep;
  }
}

// ---------------------------------------------------------------- one tile
struct Encoded {
  uint8_t scale[kBlock];
  uint64_t codes[kBlock];
};

template <class S>
JNVFP4_HD void encode_tile(const Args& a, const Group& g, const Tile& t, int64_t col, const uint32_t* amax,
                           const GlobalScale* global, Encoded& out) {
  for (int r = 0; r < g.count; ++r) {
    alignas(64) uint32_t code[kBlock];
    const uint8_t scale = block_scale(amax[r], global[r]);
    const float enc = block_encode_scale(scale, global[r]);
    if constexpr (S::spec.rounding == Rounding::kStochastic) {
      const uint32_t* words = a.stream.words + g.batch * 4;
      const uint64_t first = words[2] | uint64_t{words[3]} << 32;
      uint32_t random[4];
      random_bits({words[0], words[1]}, first + static_cast<uint64_t>((g.row + r) * a.stream.row_blocks + col / kBlock),
                  a.shape.transposed, random);
      encode_block_stochastic(t.value[r], enc, scale, random, code);
    } else {
      encode_block(t.value[r], enc, scale, code);
    }
    out.scale[r] = scale, out.codes[r] = pack(code);
  }
}

// 4over6: the errors of both candidates of each row, then the better one, of each row or of the tile.
template <class S>
JNVFP4_HD void encode_tile_four_over_six(const Group& g, const Tile& t, const uint32_t* amax, const GlobalScale* global,
                                         Encoded& out) {
  constexpr bool squared = S::spec.select == Select::kMse, scaled = S::spec.error_math == ErrorMath::kFp16;
  float error[2][kBlock];
  Candidates scales[kBlock];
  for (int r = 0; r < g.count; ++r) {
    scales[r] = candidate_scales(amax[r], global[r].encode);
    for (int c = 0; c < 2; ++c) {
      error[c][r] = 0.0f;
      if (scales[r].six == scales[r].four) continue;  // one scale, one error: a tie
      const uint8_t scale = c ? scales[r].four : scales[r].six;
      const float s = e4m3_decode(scale), enc = block_encode_scale(scale, global[r]);
      alignas(64) float q[kBlock];
      for (int i = 0; i < kBlock; ++i) q[i] = e2m1_round(mul_rn(t.value[r][i], enc));
      error[c][r] = scaled ? row_error_scaled(t.value[r], q, s, global[r], squared)
                           : row_error_strict(t.value[r], q, s, global[r], squared);
    }
  }
  if constexpr (S::spec.block_rows == kBlock)
    for (auto& rows : error) std::fill(rows, rows + kBlock, tile_error(rows));
  for (int r = 0; r < g.count; ++r) {
    const uint8_t scale = choose_four(error[0][r], error[1][r]) ? scales[r].four : scales[r].six;
    alignas(64) uint32_t code[kBlock];
    encode_block(t.value[r], block_encode_scale(scale, global[r]), scale, code);
    out.scale[r] = scale, out.codes[r] = pack(code);
  }
}

// Row groups [begin, end): 16 rows of one matrix each.
template <class S>
JNVFP4_HD void quantize_groups(const Args& a, int64_t begin, int64_t end) {
  const QuantShape& s = a.shape;
  constexpr bool windows = S::spec.amax_scope == AmaxScope::kWindow64;
  const int64_t blocks = s.cols / kBlock;
  for (int64_t index = begin; index < end; ++index) {
    const Group g(a, index);
    GlobalScale global[kBlock];
    for (int64_t c = 0; c < blocks; ++c) {
      if (windows ? c % (kWindow / kBlock) == 0 : c == 0)
        for (int r = 0; r < g.count; ++r) {
          const int64_t row = g.first_row + r;
          const int64_t i = windows ? (row * blocks + c) / (kWindow / kBlock) : row / s.rows_per_amax;
          global[r] = global_scale(a.amax[i], a.e4m3_max);
        }
      Tile t;
      load_and_rotate<S>(a, g, c * kBlock, t);
      uint32_t amax[kBlock];
      for (int r = 0; r < g.count; ++r) amax[r] = block_amax(t.value[r]);
      if constexpr (S::spec.block_rows == kBlock)
        std::fill(amax, amax + kBlock, *std::max_element(amax, amax + kBlock));
      Encoded out;
      if constexpr (S::spec.select == Select::kMax6)
        encode_tile<S>(a, g, t, c * kBlock, amax, global, out);
      else
        encode_tile_four_over_six<S>(g, t, amax, global, out);
      for (int r = 0; r < g.count; ++r) {
        const int64_t block = (g.first_row + r) * blocks + c;
        a.scale[block] = out.scale[r];
        std::memcpy(a.data + block * (kBlock / 2), &out.codes[r], sizeof out.codes[r]);
      }
    }
  }
}

// Row groups [begin, end): the amax of each row or window; of each matrix for a tensor scope, over all groups by
// atomic maxima of bits.
template <class S>
JNVFP4_HD void amax_groups(const Args& a, float* amax, int64_t begin, int64_t end) {
  const int64_t cols = a.shape.cols;
  for (int64_t index = begin; index < end; ++index) {
    const Group g(a, index);
    uint32_t m[kBlock] = {};
    for (int64_t c = 0; c < cols; c += kBlock) {
      Tile t;
      load_and_rotate<S>(a, g, c, t);
      for (int r = 0; r < g.count; ++r) m[r] = amax_bits(m[r], block_amax(t.value[r]));
      if constexpr (S::spec.amax_scope == AmaxScope::kWindow64) {
        if (c % kWindow != kWindow - kBlock) continue;
        for (int r = 0; r < g.count; ++r)
          amax[((g.first_row + r) * cols + c) / kWindow] = float_of(canonical_nan(m[r])), m[r] = 0;
      }
    }
    if constexpr (S::spec.amax_scope == AmaxScope::kRow)
      for (int r = 0; r < g.count; ++r) amax[g.first_row + r] = float_of(canonical_nan(m[r]));
    if constexpr (S::spec.amax_scope == AmaxScope::kTensor) {
      auto* word = reinterpret_cast<uint32_t*>(amax + g.first_row / a.shape.rows_per_amax);
      const uint32_t own = canonical_nan(*std::max_element(m, m + kBlock));
      uint32_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
      while (own > seen && !__atomic_compare_exchange_n(word, &seen, own, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      }
    }
  }
}

// ---------------------------------------------------------------- instruction sets
using Groups = void (*)(const Args&, int64_t, int64_t);
using AmaxGroups = void (*)(const Args&, float*, int64_t, int64_t);

// The same source compiled for each; the results are the same bits.
template <class L>
void load_portable(const void* x, const QuantShape& s, int64_t row, int64_t col, int count, Tile& t) {
  load_tile<L>(x, s, row, col, count, t);
}
template <class S>
void quantize_portable(const Args& a, int64_t b, int64_t e) {
  quantize_groups<S>(a, b, e);
}
template <class S>
void amax_portable(const Args& a, float* m, int64_t b, int64_t e) {
  amax_groups<S>(a, m, b, e);
}
#if defined(__x86_64__)
template <class L>
JNVFP4_AVX2 void load_avx2(const void* x, const QuantShape& s, int64_t row, int64_t col, int count, Tile& t) {
  load_tile<L>(x, s, row, col, count, t);
}
template <class L>
JNVFP4_AVX512 void load_avx512(const void* x, const QuantShape& s, int64_t row, int64_t col, int count, Tile& t) {
  load_tile<L>(x, s, row, col, count, t);
}
template <class S>
JNVFP4_AVX2 void quantize_avx2(const Args& a, int64_t b, int64_t e) {
  quantize_groups<S>(a, b, e);
}
template <class S>
JNVFP4_AVX512 void quantize_avx512(const Args& a, int64_t b, int64_t e) {
  quantize_groups<S>(a, b, e);
}
template <class S>
JNVFP4_AVX2 void amax_avx2(const Args& a, float* m, int64_t b, int64_t e) {
  amax_groups<S>(a, m, b, e);
}
template <class S>
JNVFP4_AVX512 void amax_avx512(const Args& a, float* m, int64_t b, int64_t e) {
  amax_groups<S>(a, m, b, e);
}
#endif

template <class L>
LoadTile load_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return load_avx512<L>;
  if (isa == Isa::kAvx2) return load_avx2<L>;
#endif
  (void)isa;
  return load_portable<L>;
}

template <class S>
Groups quantize_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return quantize_avx512<S>;
  if (isa == Isa::kAvx2) return quantize_avx2<S>;
#endif
  (void)isa;
  return quantize_portable<S>;
}

template <class S>
AmaxGroups amax_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return amax_avx512<S>;
  if (isa == Isa::kAvx2) return amax_avx2<S>;
#endif
  (void)isa;
  return amax_portable<S>;
}

// ---------------------------------------------------------------- handlers
// One orientation. `found` is where the amax of rows or windows goes when none is given.
struct Request {
  const float* amax;
  float* found;
  const uint32_t* stream;
  QuantBuffers buffers;
  bool transpose;
  SpecAttr attr;
  int64_t row_blocks;
};

std::string source(const ffi::AnyBuffer& x, Args* args) {
  Float kind;
  if (!float_kind(x.element_type(), &kind)) return "x must be float32, bfloat16 or float16";
  args->x = x.untyped_data();
  with_float(kind, [&](auto t) {
    args->element_size = sizeof(typename decltype(t)::Stored);
    args->load = load_for<decltype(t)>(isa());
  });
  return {};
}

int64_t grain_of(const QuantShape& s) {
  return std::max<int64_t>(1, (1 << 16) / (kBlock * std::max<int64_t>(1, s.cols)));
}

ffi::Error run(ffi::ThreadPool& pool, std::string_view op, const ffi::AnyBuffer& x, const Request& request) {
  if (!known(request.attr)) return unsupported(op, request.attr);
  const KernelSpec spec = kernel_spec(request.attr);
  Args args{};
  QuantBuffers buffers = request.buffers;
  std::string error = source(x, &args);
  if (error.empty()) error = quant_shape(x, buffers, request.transpose, spec, &args.shape);
  if (!error.empty()) return invalid(op, error);
  args.amax = request.amax;
  args.data = static_cast<uint8_t*>(buffers.data.untyped_data());
  args.scale = static_cast<uint8_t*>(buffers.scale.untyped_data());
  args.stream = {request.stream, request.row_blocks};
  args.e4m3_max = static_cast<float>(request.attr.e4m3_max);
  Groups quantize = nullptr;
  AmaxGroups amax = nullptr;
  if (!dispatch(spec, SupportedSpecs{}, [&](auto s) {
        quantize = quantize_for<decltype(s)>(isa());
        if constexpr (decltype(s)::spec.amax_scope == AmaxScope::kRow)
          amax = amax_for<RowScaled>(isa());
        else if constexpr (decltype(s)::spec.amax_scope == AmaxScope::kWindow64)
          amax = amax_for<Window64>(isa());
      }))
    return unsupported(op, request.attr);
  const int64_t groups = args.shape.batch * args.groups_per_matrix(), grain = grain_of(args.shape);
  if (request.found) {
    if (!amax) return invalid(op, "the amax of a tensor must be given");
    parallel_for(pool, groups, grain, [&](int64_t b, int64_t e) { amax(args, request.found, b, e); });
    args.amax = request.found;
  }
  parallel_for(pool, groups, grain, [&](int64_t b, int64_t e) { quantize(args, b, e); });
  return ffi::Error::Success();
}

ffi::Error quantize_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> amax,
                         ffi::Buffer<ffi::U32> stream, ffi::Result<ffi::AnyBuffer> data,
                         ffi::Result<ffi::AnyBuffer> scale, bool transpose, SpecAttr spec, int32_t row_blocks) {
  return run(pool, "quantize", x,
             {amax.typed_data(),
              nullptr,
              stream.typed_data(),
              {*data, *scale, count_of(amax), count_of(stream)},
              transpose,
              spec,
              row_blocks});
}

ffi::Error quantize_find_amax_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> data,
                                   ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::Buffer<ffi::F32>> amax,
                                   bool transpose, SpecAttr spec) {
  return run(pool, "quantize", x,
             {nullptr, amax->typed_data(), nullptr, {*data, *scale, count_of(*amax)}, transpose, spec, 0});
}

// Both orientations, one after the other: a CPU has no use for one pass.
ffi::Error quantize_pair_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> row_amax,
                              ffi::Buffer<ffi::F32> col_amax, ffi::Buffer<ffi::U32> row_stream,
                              ffi::Buffer<ffi::U32> col_stream, ffi::Result<ffi::AnyBuffer> row_data,
                              ffi::Result<ffi::AnyBuffer> row_scale, ffi::Result<ffi::AnyBuffer> col_data,
                              ffi::Result<ffi::AnyBuffer> col_scale, SpecAttr row_spec, SpecAttr col_spec,
                              int32_t row_blocks, int32_t col_blocks) {
  if (ffi::Error pair = check_pair(row_spec, col_spec); !pair.success()) return pair;
  ffi::Error first = run(pool, "quantize_pair", x,
                         {row_amax.typed_data(),
                          nullptr,
                          row_stream.typed_data(),
                          {*row_data, *row_scale, count_of(row_amax), count_of(row_stream)},
                          false,
                          row_spec,
                          row_blocks});
  if (!first.success()) return first;
  return run(pool, "quantize_pair", x,
             {col_amax.typed_data(),
              nullptr,
              col_stream.typed_data(),
              {*col_data, *col_scale, count_of(col_amax), count_of(col_stream)},
              true,
              col_spec,
              col_blocks});
}

ffi::Error quantize_pair_find_amax_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> row_data,
                                        ffi::Result<ffi::AnyBuffer> row_scale,
                                        ffi::Result<ffi::Buffer<ffi::F32>> row_amax,
                                        ffi::Result<ffi::AnyBuffer> col_data, ffi::Result<ffi::AnyBuffer> col_scale,
                                        ffi::Result<ffi::Buffer<ffi::F32>> col_amax, SpecAttr row_spec,
                                        SpecAttr col_spec) {
  if (ffi::Error pair = check_pair(row_spec, col_spec); !pair.success()) return pair;
  ffi::Error first =
      run(pool, "quantize_pair", x,
          {nullptr, row_amax->typed_data(), nullptr, {*row_data, *row_scale, count_of(*row_amax)}, false, row_spec, 0});
  if (!first.success()) return first;
  return run(
      pool, "quantize_pair", x,
      {nullptr, col_amax->typed_data(), nullptr, {*col_data, *col_scale, count_of(*col_amax)}, true, col_spec, 0});
}

ffi::Error rht_amax_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::Buffer<ffi::F32>> amax,
                         bool transpose, int32_t keep) {
  Args args{};
  std::string error = source(x, &args);
  if (error.empty()) error = rht_amax_shape(x, count_of(*amax), transpose, keep, &args.shape);
  if (!error.empty()) return invalid("quantize", error);
  std::fill_n(amax->typed_data(), count_of(*amax), 0.0f);
  const AmaxGroups kernel = amax_for<Nvfp4Rht>(isa());
  parallel_for(pool, args.shape.batch * args.groups_per_matrix(), grain_of(args.shape),
               [&](int64_t b, int64_t e) { kernel(args, amax->typed_data(), b, e); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Quantize, quantize_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::Buffer<ffi::F32>>()  // amax
                                  .Arg<ffi::Buffer<ffi::U32>>()  // stream, empty without
                                  .Ret<ffi::AnyBuffer>()         // data
                                  .Ret<ffi::AnyBuffer>()         // scale
                                  .Attr<bool>("transpose")
                                  .Attr<SpecAttr>("spec")
                                  .Attr<int32_t>("row_blocks"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeFindAmax, quantize_find_amax_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Ret<ffi::AnyBuffer>()         // data
                                  .Ret<ffi::AnyBuffer>()         // scale
                                  .Ret<ffi::Buffer<ffi::F32>>()  // amax, one per row or window
                                  .Attr<bool>("transpose")
                                  .Attr<SpecAttr>("spec"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizePair, quantize_pair_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::Buffer<ffi::F32>>()  // amax of rows
                                  .Arg<ffi::Buffer<ffi::F32>>()  // amax of columns
                                  .Arg<ffi::Buffer<ffi::U32>>()  // stream of rows, empty without
                                  .Arg<ffi::Buffer<ffi::U32>>()  // stream of columns, empty without
                                  .Ret<ffi::AnyBuffer>()         // data of rows
                                  .Ret<ffi::AnyBuffer>()         // scale of rows
                                  .Ret<ffi::AnyBuffer>()         // data of columns
                                  .Ret<ffi::AnyBuffer>()         // scale of columns
                                  .Attr<SpecAttr>("row_spec")
                                  .Attr<SpecAttr>("col_spec")
                                  .Attr<int32_t>("row_blocks")
                                  .Attr<int32_t>("col_blocks"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizePairFindAmax, quantize_pair_find_amax_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Ret<ffi::AnyBuffer>()         // data of rows
                                  .Ret<ffi::AnyBuffer>()         // scale of rows
                                  .Ret<ffi::Buffer<ffi::F32>>()  // amax of the windows of rows
                                  .Ret<ffi::AnyBuffer>()         // data of columns
                                  .Ret<ffi::AnyBuffer>()         // scale of columns
                                  .Ret<ffi::Buffer<ffi::F32>>()  // amax of the windows of columns
                                  .Attr<SpecAttr>("row_spec")
                                  .Attr<SpecAttr>("col_spec"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(RhtAmax, rht_amax_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Ret<ffi::Buffer<ffi::F32>>()  // amax
                                  .Attr<bool>("transpose")
                                  .Attr<int32_t>("keep"));

}  // namespace jnvfp4
