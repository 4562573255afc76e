// The producers on the CPU: 16 rows at a time from their operands to bfloat16, then quantized while they are in cache.
// For columns, whose blocks run over many rows, the values are kept.
#include "../calls/produce.h"

#include <algorithm>
#include <vector>

#include "../producers.h"
#include "parallel.h"
#include "steps.h"

namespace jnvfp4 {
namespace {

// Writes the bfloat16 values of one row; `t` has room for the row in float32 twice. The zeros that a sum by halves is
// padded with are those that `t` begins with: they are in the upper half, which no sum writes.
using ProduceRow = void (*)(const void* a, const void* b, int64_t cols, float eps, float* t, uint16_t* y);

template <class A, class B>
JNVFP4_HD void norm_row(const void* x, const void* weight, int64_t cols, float eps, float* t, uint16_t* y) {
  const auto* a = static_cast<const typename A::Stored*>(x);
  const auto* w = static_cast<const typename B::Stored*>(weight);
  float* v = t + cols;
  for (int64_t i = 0; i < cols; ++i) v[i] = A::load(a[i]);
  const int64_t blocks = cols / kBlock, padded = padded_blocks(blocks);
  for (int64_t k = 0; k < blocks; ++k) t[k] = block_squares(v + k * kBlock);
  const float factor = norm_factor(sum_by_halves(t, padded), cols, eps);
  for (int64_t i = 0; i < cols; ++i) y[i] = bf16_encode(norm_scale(v[i], factor, B::load(w[i])));
}

template <class T>
JNVFP4_HD void gate_row(const void* gate, const void* up, int64_t cols, uint16_t* y) {
  const auto* g = static_cast<const typename T::Stored*>(gate);
  const auto* u = static_cast<const typename T::Stored*>(up);
  for (int64_t i = 0; i < cols; ++i) y[i] = bf16_encode(silu_mul(T::load(g[i]), T::load(u[i])));
}

template <class A, class B>
struct NormRow {
  static JNVFP4_HD void run(const void* a, const void* b, int64_t cols, float eps, float* t, uint16_t* y) {
    norm_row<A, B>(a, b, cols, eps, t, y);
  }
};
template <class T>
struct GateRow {
  static JNVFP4_HD void run(const void* a, const void* b, int64_t cols, float, float*, uint16_t* y) {
    gate_row<T>(a, b, cols, y);
  }
};
ProduceRow kernel_for(const ProducerOperands& s) {
  ProduceRow kernel = nullptr;
  with_float(s.a_kind, [&](auto a) {
    if (s.producer == Producer::kSiluMul) return void(kernel = Compiled<GateRow<decltype(a)>>::best());
    with_float(s.b_kind, [&](auto b) { kernel = Compiled<NormRow<decltype(a), decltype(b)>>::best(); });
  });
  return kernel;
}

int64_t size_of(Float kind) { return kind == Float::kF32 ? 4 : 2; }

struct RowProducer {
  ProducerOperands s;
  ProduceRow kernel;

  explicit RowProducer(const ProducerOperands& sources) : s(sources), kernel(kernel_for(sources)) {}

  void produce(int64_t row, float* t, uint16_t* y) const {
    const int64_t b = s.producer == Producer::kSiluMul ? row : row / s.rows_per_weight;
    kernel(static_cast<const char*>(s.a) + row * s.cols * size_of(s.a_kind),
           static_cast<const char*>(s.b) + b * s.cols * size_of(s.b_kind), s.cols, s.eps, t, y);
  }
};

// Calls f(row, count, y) for groups of up to 16 rows of a matrix, with their values at y: in `kept` or in cache.
template <class F>
void for_each_group(ffi::ThreadPool& pool, const RowProducer& producer, uint16_t* kept, const F& f) {
  const ProducerOperands& s = producer.s;
  const int64_t per_matrix = (s.rows + kBlock - 1) / kBlock;
  const int64_t grain = (1 << 16) / (kBlock * std::max<int64_t>(1, s.cols));
  parallel_for(pool, s.batch * per_matrix, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> t(2 * s.cols);
    std::vector<uint16_t> own(kept ? 0 : kBlock * s.cols);
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group % per_matrix * kBlock, count = std::min<int64_t>(kBlock, s.rows - first);
      const int64_t row = group / per_matrix * s.rows + first;
      uint16_t* y = kept ? kept + row * s.cols : own.data();
      for (int64_t r = 0; r < count; ++r) producer.produce(row + r, t.data(), y + r * s.cols);
      f(row, count, y);
    }
  });
}

// Quantizes `count` rows from `row` over all matrices, which belong to one matrix and are at `y`.
void quantize_rows(const QuantizeArgs& all, const KernelSpec& spec, const uint16_t* y, int64_t row, int64_t count) {
  const int64_t cols = all.shape.cols, matrix = row / all.shape.rows;
  const AmaxMap& map = all.shape.amax;
  const int64_t amax = map.at(row, 0);
  const RowStream stream = spec.rounding == Rounding::kStochastic
                               ? RowStream(all.stream, matrix, row - matrix * all.shape.rows)
                               : RowStream();
  QuantizeArgs own = all;
  own.x = y, own.kind = Float::kBf16;
  own.amax = all.amax ? all.amax + amax : nullptr, own.found = all.amax ? nullptr : all.found + amax;
  own.data += row * (cols / 2), own.scale += row * (cols / kBlock);
  own.stream = stream.args();
  own.shape = {1, count, cols, {map.rows_per_amax == 1 ? 1 : count, map.windows_per_row}, false};
  quantize_step(own, spec);
}

// The values as an array to be quantized.
QuantizeArgs of_values(QuantizeArgs args, const uint16_t* values) {
  args.x = values, args.kind = Float::kBf16;
  return args;
}

ffi::Error run(ffi::ThreadPool pool, const ProduceArgs& args, const KernelSpec& row, const KernelSpec& col) {
  const RowProducer producer(args.sources);
  uint16_t* kept = args.values ? args.values : static_cast<uint16_t*>(args.scratch);
  if (args.row.data && !args.col.data) {
    for_each_group(pool, producer, kept, [&](int64_t first, int64_t count, const uint16_t* y) {
      quantize_rows(args.row, row, y, first, count);
    });
    return ffi::Error::Success();
  }
  for_each_group(pool, producer, kept, [](int64_t, int64_t, const uint16_t*) {});
  if (args.row.data) quantize(pool, of_values(args.row, kept), row);
  if (args.col.data) quantize(pool, of_values(args.col, kept), col);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Produce, (produce_call<true, ffi::ThreadPool, run>),
                              produce_binding().Ctx<ffi::ThreadPool>());

}  // namespace jnvfp4
