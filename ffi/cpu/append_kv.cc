// append_kv on the CPU: a row of K and of V for each sequence and kv head.
#include "../calls/attention.h"
#include "parallel.h"

namespace jnvfp4 {
namespace {

// `from`: the first of depth elements.
template <class T>
void append_row(const KvRowsOut& out, int64_t row, const typename T::Stored* from, int64_t depth) {
  constexpr int64_t kMostBlocks = 128 / kBlock;
  const int64_t blocks = depth / kBlock;
  float v[kMostBlocks][kBlock];
  uint32_t amax = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    for (int i = 0; i < kBlock; ++i) v[b][i] = T::load(from[b * kBlock + i]);
    amax = amax_bits(amax, block_amax(v[b]));
  }
  out.amax[row] = float_of(canonical_nan(amax));
  const GlobalScale g = global_scale(out.amax[row], 448.0f);
  for (int64_t b = 0; b < blocks; ++b) put_block(out, row * blocks + b, v[b], g);
}

ffi::Error run(ffi::ThreadPool pool, const AppendKvArgs& a) {
  constexpr int64_t kGrain = 256;
  const KvCacheShape& c = a.cache;
  with_float(a.kind, [&](auto t) {
    using T = decltype(t);
    const auto *const k = static_cast<const typename T::Stored*>(a.k), *const v =
                                                                           static_cast<const typename T::Stored*>(a.v);
    parallel_for(pool, c.batch * c.kv_heads, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t sequence = i / c.kv_heads, position = a.positions[sequence];
        if (!c.has(sequence, position)) continue;
        const int64_t row = c.row(sequence, i % c.kv_heads, position);
        append_row<T>(a.keys, row, k + i * c.depth, c.depth), append_row<T>(a.values, row, v + i * c.depth, c.depth);
      }
    });
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AppendKv, (append_kv_call<ffi::ThreadPool, run>),
                              append_kv_binding().Ctx<ffi::ThreadPool>());

}  // namespace jnvfp4
