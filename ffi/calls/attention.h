// The calls of decode attention over an NVFP4 KV cache, and of appending to one: nvfp4_decode_attention,
// nvfp4_append_kv.
#pragma once

#include "../core/args.h"
#include "../plan/decode_attention.h"
#include "checks.h"

namespace jnvfp4 {

// ---------------------------------------------------------------- what the calls share
inline bool check_rank(Checks& check, std::string_view name, const ffi::AnyBuffer& x, size_t rank) {
  return check.that(x.dimensions().size() == rank, [&] {
    return std::string(name) + " must have rank " + std::to_string(rank) + ", got " + text_of(x);
  });
}

// Keys or values of a cache: `side` begins their names in errors.
struct CacheBuffers {
  std::string_view side;
  const ffi::AnyBuffer &data, &scale, &amax;

  std::string name(std::string_view part) const { return std::string(side).append(" ").append(part); }
};

// The shape of a cache by its keys, for `batch` sequences, and the checks of keys and values. `pages` has no elements
// if the cache is contiguous.
inline KvCacheShape cache_shape(Checks& check, const CacheBuffers& keys, const CacheBuffers& values,
                                const ffi::AnyBuffer& pages, int64_t batch, int64_t kv_heads, int64_t depth) {
  KvCacheShape s{batch, kv_heads, 0, depth, 0, nullptr};
  check.that(depth == 64 || depth == 128, [&] { return "D must be 64 or 128, got " + std::to_string(depth); });
  check.type("pages", pages, {Type::S32});
  const bool paged = present(pages);
  if (paged) check_rank(check, "pages", pages, 2);
  if (!check_rank(check, keys.name("data"), keys.data, 4)) return s;
  const Dims dims = keys.data.dimensions();
  if (paged) {
    s.tokens = pages.dimensions()[1] * kPageTokens, s.num_pages = dims[0];
    s.pages = static_cast<const int32_t*>(pages.untyped_data());
    check.dims("pages", pages, {{}, {batch, pages.dimensions()[1]}});
    check.that(dims[2] == kPageTokens && s.num_pages > 0, [&] {
      return keys.name("data") + " must have one or more pages of 64 tokens, [pages, kv heads, 64, D/2], got " +
             text_of(keys.data);
    });
  } else {
    s.tokens = dims[2];
    check.that(dims[0] == batch && s.tokens % kPageTokens == 0 && s.tokens > 0, [&] {
      return keys.name("data") + " must have room for " + std::to_string(batch) +
             " sequences of a multiple of 64 tokens, not 0, [B, kv heads, tokens, D/2], got " + text_of(keys.data);
    });
  }
  for (const CacheBuffers* b : {&keys, &values}) {
    check.array(b->name("data"), b->data, {Type::U8}, {dims.first(1), {kv_heads, dims[2], depth / 2}});
    check.array(b->name("scale"), b->scale, kScales, {dims.first(1), {kv_heads, dims[2], depth / kBlock}});
    check.array(b->name("amax"), b->amax, {Type::F32}, {dims.first(1), {kv_heads, dims[2]}});
  }
  return s;
}

// ---------------------------------------------------------------- nvfp4_decode_attention
inline auto decode_attention_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // q [B, kv heads, G, D]
      .Arg<ffi::AnyBuffer>()  // keys data [B, kv heads, tokens, D/2], or [pages, kv heads, 64, D/2]
      .Arg<ffi::AnyBuffer>()  // keys scale
      .Arg<ffi::AnyBuffer>()  // keys amax
      .Arg<ffi::AnyBuffer>()  // values data
      .Arg<ffi::AnyBuffer>()  // values scale
      .Arg<ffi::AnyBuffer>()  // values amax
      .Arg<ffi::AnyBuffer>()  // lengths [B]
      .Arg<ffi::AnyBuffer>()  // pages [B, tokens / 64], empty if the cache is contiguous
      .Ret<ffi::AnyBuffer>()  // out
      .Ret<ffi::AnyBuffer>()  // scratch
      .Attr<float>("sm_scale");
}

// `kDevice` and kRun as in matmul_call.
template <class Context,
          ffi::Error (*kRun)(Context, const DecodeAttentionArgs&, std::string_view kernel, void* scratch),
          Device (*kDevice)()>
ffi::Error decode_attention_call(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer k_scale, ffi::AnyBuffer k_amax,
                                 ffi::AnyBuffer v, ffi::AnyBuffer v_scale, ffi::AnyBuffer v_amax,
                                 ffi::AnyBuffer lengths, ffi::AnyBuffer pages, ffi::Result<ffi::AnyBuffer> out,
                                 ffi::Result<ffi::AnyBuffer> scratch, float sm_scale, Context context) {
  Checks check("decode_attention");
  check.type("q", q, kFloats16);
  if (!check_rank(check, "q", q, 4)) return check.error();
  const Dims dims = q.dimensions();
  const KvCacheShape cache = cache_shape(check, {"keys", k, k_scale, k_amax}, {"values", v, v_scale, v_amax}, pages,
                                         dims[0], dims[1], dims[3]);
  check.array("lengths", lengths, {Type::S32}, {{}, {dims[0]}});
  check.array("out", *out, {q.element_type()}, {dims, {}});
  check.type("scratch", *scratch, {Type::U8});
  if (!check.ok()) return check.error();
  if (!present(q)) return ffi::Error::Success();
  const auto rows = [](const ffi::AnyBuffer& data, const ffi::AnyBuffer& scale, const ffi::AnyBuffer& amax) {
    return KvRows{static_cast<const uint8_t*>(data.untyped_data()), static_cast<const uint8_t*>(scale.untyped_data()),
                  static_cast<const float*>(amax.untyped_data())};
  };
  const DecodeAttentionArgs args{q.untyped_data(),
                                 out->untyped_data(),
                                 float_kind(q.element_type()),
                                 rows(k, k_scale, k_amax),
                                 rows(v, v_scale, v_amax),
                                 cache,
                                 static_cast<const int32_t*>(lengths.untyped_data()),
                                 dims[2],
                                 sm_scale};
  const DecodeAttentionProblem problem{cache.batch, cache.kv_heads, args.group, cache.depth, cache.tokens};
  const auto* const kernel = kDecodeAttentionKernels.plan(problem, kDevice());
  check.that(kernel != nullptr,
             [&] { return "no kernel takes these sizes: q " + text_of(q) + ", keys " + text_of(k); });
  if (!check.ok()) return check.error();
  const int64_t bytes = kernel->scratch_bytes(problem);
  check.that(count_of(*scratch) >= bytes, [&] {
    return "scratch must have at least " + std::to_string(bytes) + " bytes, got " + text_of(*scratch) +
           "; lower the program again for this device";
  });
  return check.ok() ? kRun(context, args, kernel->name, scratch->untyped_data()) : check.error();
}

// ---------------------------------------------------------------- nvfp4_append_kv
inline auto append_kv_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()   // keys data, a cache as above; results are the same memory
      .Arg<ffi::AnyBuffer>()   // keys scale
      .Arg<ffi::AnyBuffer>()   // keys amax
      .Arg<ffi::AnyBuffer>()   // values data
      .Arg<ffi::AnyBuffer>()   // values scale
      .Arg<ffi::AnyBuffer>()   // values amax
      .Arg<ffi::AnyBuffer>()   // k [B, kv heads, D]
      .Arg<ffi::AnyBuffer>()   // v
      .Arg<ffi::AnyBuffer>()   // positions [B]
      .Arg<ffi::AnyBuffer>()   // pages
      .Ret<ffi::AnyBuffer>()   // keys data
      .Ret<ffi::AnyBuffer>()   // keys scale
      .Ret<ffi::AnyBuffer>()   // keys amax
      .Ret<ffi::AnyBuffer>()   // values data
      .Ret<ffi::AnyBuffer>()   // values scale
      .Ret<ffi::AnyBuffer>();  // values amax
}

// A part of the cache and the result that is it.
inline void check_same(Checks& check, const std::string& name, const ffi::AnyBuffer& in, const ffi::AnyBuffer& out) {
  check.array("result of " + name, out, {in.element_type()}, {in.dimensions(), {}});
  check.that(in.untyped_data() == out.untyped_data(),
             [&] { return name + " must be the memory of its result: alias them (input_output_aliases)"; });
}

template <class Context, ffi::Error (*kRun)(Context, const AppendKvArgs&)>
ffi::Error append_kv_call(ffi::AnyBuffer k_data, ffi::AnyBuffer k_scale, ffi::AnyBuffer k_amax, ffi::AnyBuffer v_data,
                          ffi::AnyBuffer v_scale, ffi::AnyBuffer v_amax, ffi::AnyBuffer k, ffi::AnyBuffer v,
                          ffi::AnyBuffer positions, ffi::AnyBuffer pages, ffi::Result<ffi::AnyBuffer> k_data_out,
                          ffi::Result<ffi::AnyBuffer> k_scale_out, ffi::Result<ffi::AnyBuffer> k_amax_out,
                          ffi::Result<ffi::AnyBuffer> v_data_out, ffi::Result<ffi::AnyBuffer> v_scale_out,
                          ffi::Result<ffi::AnyBuffer> v_amax_out, Context context) {
  Checks check("append_kv");
  check.type("k", k, kFloats);
  if (!check_rank(check, "k", k, 3)) return check.error();
  const Dims dims = k.dimensions();
  const CacheBuffers keys{"keys", k_data, k_scale, k_amax}, values{"values", v_data, v_scale, v_amax};
  const KvCacheShape cache = cache_shape(check, keys, values, pages, dims[0], dims[1], dims[2]);
  check.array("v", v, {k.element_type()}, {dims, {}});
  check.array("positions", positions, {Type::S32}, {{}, {dims[0]}});
  check_same(check, keys.name("data"), k_data, *k_data_out);
  check_same(check, keys.name("scale"), k_scale, *k_scale_out);
  check_same(check, keys.name("amax"), k_amax, *k_amax_out);
  check_same(check, values.name("data"), v_data, *v_data_out);
  check_same(check, values.name("scale"), v_scale, *v_scale_out);
  check_same(check, values.name("amax"), v_amax, *v_amax_out);
  if (!check.ok()) return check.error();
  if (!present(k) || !present(k_data)) return ffi::Error::Success();
  const auto rows = [](ffi::AnyBuffer& data, ffi::AnyBuffer& scale, ffi::AnyBuffer& amax) {
    return KvRowsOut{static_cast<uint8_t*>(data.untyped_data()), static_cast<uint8_t*>(scale.untyped_data()),
                     static_cast<float*>(amax.untyped_data())};
  };
  return kRun(context, {k.untyped_data(), v.untyped_data(), float_kind(k.element_type()),
                        rows(*k_data_out, *k_scale_out, *k_amax_out), rows(*v_data_out, *v_scale_out, *v_amax_out),
                        cache, static_cast<const int32_t*>(positions.untyped_data())});
}

}  // namespace jnvfp4
