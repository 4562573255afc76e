// fake_quant on the CPU: a few rows at a time become codes in a buffer that fits a cache, and are decoded from there.
#include "../calls/fake_quant.h"

#include <memory>

#include "parallel.h"
#include "steps.h"

namespace jnvfp4 {
namespace {

struct Job : FakeQuantArgs {
  KernelSpec spec;
  int64_t element_size;

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

  Piece(const Job& a, int64_t index)
      : matrix(index / a.pieces()),
        row(index % a.pieces() * a.rows_at_once()),
        rows(std::min(a.rows_at_once(), a.shape.rows - row)),
        first_row(matrix * a.shape.rows + row) {}
};

// What stands between the two steps.
struct Buffer {
  std::unique_ptr<uint8_t[]> data, scale;
  std::unique_ptr<float[]> amax;

  explicit Buffer(const Job& a) {
    const int64_t blocks = a.rows_at_once() * a.row_blocks();
    data.reset(new uint8_t[blocks * (kBlock / 2)]);
    scale.reset(new uint8_t[blocks]);
    amax.reset(new float[std::max(a.rows_at_once(), blocks * kBlock / kWindow)]);
  }
};

// The amaxes of a piece, as the quantizer sees it: an array of its own.
struct PieceAmax {
  int64_t first, count;  // among all amaxes
  AmaxMap map;

  PieceAmax(const Job& a, const Piece& p) {
    const AmaxMap& all = a.shape.amax;
    const bool shared = !all.windows() && all.rows_per_amax != 1;
    first = all.at(p.first_row, 0);
    count = shared ? 1 : p.rows * std::max<int64_t>(1, all.windows_per_row);
    map = {shared ? p.rows : 1, all.windows_per_row};
  }
};

void fake_quant_piece(const Job& a, const Piece& p, const Buffer& buffer) {
  const int64_t offset = p.first_row * a.shape.cols * a.element_size, blocks = p.rows * a.row_blocks();
  const PieceAmax piece(a, p);
  const RowStream stream =
      a.spec.rounding == Rounding::kStochastic ? RowStream(a.stream, p.matrix, p.row) : RowStream();
  float* amax = buffer.amax.get();
  for (int64_t i = 0; a.amax && i < piece.count; ++i) amax[i] = float_of(bits_of(a.amax[piece.first + i]) & kMagnitude);
  const char* x = static_cast<const char*>(a.x) + offset;
  quantize_step({x,
                 a.kind,
                 a.amax ? amax : nullptr,
                 amax,
                 buffer.data.get(),
                 buffer.scale.get(),
                 stream.args(),
                 {1, p.rows, a.shape.cols, piece.map, false},
                 a.e4m3_max,
                 a.headroom},
                a.spec);
  dequantize_step({buffer.data.get(), buffer.scale.get(), amax, static_cast<char*>(a.out) + offset, a.kind, blocks,
                   piece.map.blocks_per_amax(a.row_blocks()), a.e4m3_max, a.spec.rht});
}

ffi::Error run(ffi::ThreadPool pool, const FakeQuantArgs& args, const KernelSpec& spec) {
  Job a{args, spec, 0};
  with_float(a.kind, [&](auto t) { a.element_size = sizeof(typename decltype(t)::Stored); });
  const int64_t grain = (1 << 16) / (a.rows_at_once() * std::max<int64_t>(1, a.shape.cols));
  parallel_for(pool, a.shape.batch * a.pieces(), grain, [&](int64_t begin, int64_t end) {
    const Buffer buffer(a);
    for (int64_t i = begin; i < end; ++i) fake_quant_piece(a, Piece(a, i), buffer);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(FakeQuant, (fake_quant_call<ffi::ThreadPool, run>),
                              fake_quant_binding().Ctx<ffi::ThreadPool>());

}  // namespace jnvfp4
