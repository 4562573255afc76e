// fake_quant on the CPU: a few rows at a time become codes in a buffer that fits a cache, and are decoded from there.
#include <memory>

#include "../check.h"
#include "../types.h"
#include "parallel.h"
#include "steps.h"

namespace jnvfp4 {
namespace {

struct Args {
  const char* x;
  char* out;
  Float kind;
  int64_t element_size;
  const float* amax;  // null: find it
  StreamArgs stream;
  QuantShape shape;
  float e4m3_max;
  KernelSpec spec;

  bool windows() const { return spec.amax_scope == AmaxScope::kWindow64; }
  int64_t row_blocks() const { return shape.cols / kBlock; }
  // A multiple of what the quantizer takes at a time; 18 KB of codes and scales where rows are no longer than that.
  int64_t rows_at_once() const {
    return std::max<int64_t>(1, (1 << 15) / (kBlock * std::max<int64_t>(1, shape.cols))) * kBlock;
  }
  int64_t pieces() const { return (shape.rows + rows_at_once() - 1) / rows_at_once(); }  // of a matrix
};

// Rows of one matrix that are quantized as an array of their own.
struct Piece {
  int64_t matrix, row, rows;
  int64_t first_row;  // over all matrices

  Piece(const Args& a, int64_t index)
      : matrix(index / a.pieces()),
        row(index % a.pieces() * a.rows_at_once()),
        rows(std::min(a.rows_at_once(), a.shape.rows - row)),
        first_row(matrix * a.shape.rows + row) {}
};

// What stands between the two steps.
struct Buffer {
  std::unique_ptr<uint8_t[]> data, scale;
  std::unique_ptr<float[]> amax;

  explicit Buffer(const Args& a) {
    const int64_t blocks = a.rows_at_once() * a.row_blocks();
    data.reset(new uint8_t[blocks * (kBlock / 2)]);
    scale.reset(new uint8_t[blocks]);
    amax.reset(new float[std::max(a.rows_at_once(), blocks * kBlock / kWindow)]);
  }
};

// Copies the magnitudes of a piece's amaxes.
void take_amax(const Args& a, const Piece& p, float* amax) {
  const int64_t per_row = a.windows() ? a.shape.cols / kWindow : 1;
  const bool shared = !a.windows() && a.shape.rows_per_amax != 1;
  const int64_t first = shared ? p.first_row / a.shape.rows_per_amax : p.first_row * per_row;
  const int64_t count = shared ? 1 : p.rows * per_row;
  for (int64_t i = 0; i < count; ++i) amax[i] = float_of(bits_of(a.amax[first + i]) & kMagnitude);
}

void fake_quant_piece(const Args& a, const Piece& p, const Buffer& buffer) {
  const int64_t offset = p.first_row * a.shape.cols * a.element_size, blocks = p.rows * a.row_blocks();
  const bool shared = !a.windows() && a.shape.rows_per_amax != 1;
  const RowStream stream =
      a.spec.rounding == Rounding::kStochastic ? RowStream(a.stream, p.matrix, p.row) : RowStream();
  if (a.amax) take_amax(a, p, buffer.amax.get());
  quantize_step({a.x + offset,
                 a.kind,
                 a.amax ? buffer.amax.get() : nullptr,
                 buffer.amax.get(),
                 buffer.data.get(),
                 buffer.scale.get(),
                 stream.args(),
                 {1, p.rows, a.shape.cols, shared ? p.rows : 1, false},
                 a.e4m3_max},
                a.spec);
  const int64_t blocks_per_amax = a.windows() ? kWindow / kBlock : shared ? blocks : a.row_blocks();
  dequantize_step({buffer.data.get(), buffer.scale.get(), buffer.amax.get(), a.out + offset, a.kind, blocks,
                   blocks_per_amax, a.e4m3_max, a.spec.rht});
}

ffi::Error fake_quant_impl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> amax,
                           ffi::Buffer<ffi::U32> stream, ffi::Result<ffi::AnyBuffer> out, SpecAttr spec,
                           int32_t row_blocks) {
  if (!known(spec) || !dispatch(kernel_spec(spec), SupportedSpecs{}, [](auto) {}))
    return unsupported("fake_quant", spec);
  Args a{};
  a.spec = kernel_spec(spec), a.e4m3_max = static_cast<float>(spec.e4m3_max);
  if (!float_kind(x.element_type(), &a.kind)) return invalid("fake_quant", "x must be float32, bfloat16 or float16");
  if (const std::string error = fake_quant_shape(x, *out, count_of(amax), count_of(stream), a.spec, &a.shape);
      !error.empty())
    return invalid("fake_quant", error);
  a.x = static_cast<const char*>(x.untyped_data()), a.out = static_cast<char*>(out->untyped_data());
  a.amax = count_of(amax) ? amax.typed_data() : nullptr;
  a.stream = {stream.typed_data(), row_blocks};
  with_float(a.kind, [&](auto t) { a.element_size = sizeof(typename decltype(t)::Stored); });
  const int64_t grain = (1 << 16) / (a.rows_at_once() * std::max<int64_t>(1, a.shape.cols));
  parallel_for(pool, a.shape.batch * a.pieces(), grain, [&](int64_t begin, int64_t end) {
    const Buffer buffer(a);
    for (int64_t i = begin; i < end; ++i) fake_quant_piece(a, Piece(a, i), buffer);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(FakeQuant, fake_quant_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::Buffer<ffi::F32>>()  // amax, empty where it is to be found
                                  .Arg<ffi::Buffer<ffi::U32>>()  // stream, empty without
                                  .Ret<ffi::AnyBuffer>()         // out
                                  .Attr<SpecAttr>("spec")
                                  .Attr<int32_t>("row_blocks"));

}  // namespace jnvfp4
