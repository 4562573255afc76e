// The call nvfp4_dequantize: its operands, result and attributes, and the checks of them.
#pragma once

#include "../core/args.h"
#include "checks.h"

namespace jnvfp4 {

inline auto dequantize_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // data
      .Arg<ffi::AnyBuffer>()  // scale
      .Arg<ffi::AnyBuffer>()  // amax
      .Ret<ffi::AnyBuffer>()  // out
      .Attr<int32_t>("e4m3_max")
      .Attr<bool>("windows")
      .Attr<bool>("rotate_back");
}

template <class Context, ffi::Error (*kRun)(Context, const DequantizeArgs&)>
ffi::Error dequantize_call(ffi::AnyBuffer data, ffi::AnyBuffer scale, ffi::AnyBuffer amax,
                           ffi::Result<ffi::AnyBuffer> out, int32_t e4m3_max, bool windows, bool rotate_back,
                           Context context) {
  Checks check("dequantize");
  check.e4m3_max("e4m3_max", e4m3_max);
  const Tensor t(check, "", data, scale, amax, windows);
  check.array("out", *out, kFloats, {t.lead, {t.rows, t.cols}});
  if (!check.ok()) return check.error();
  if (!t.count()) return ffi::Error::Success();
  const int64_t row_blocks = t.cols / kBlock;
  return kRun(
      context,
      {static_cast<const uint8_t*>(data.untyped_data()), static_cast<const uint8_t*>(scale.untyped_data()),
       static_cast<const float*>(amax.untyped_data()), out->untyped_data(), float_kind(out->element_type()),
       t.batch * t.rows * row_blocks, t.map.blocks_per_amax(row_blocks), static_cast<float>(e4m3_max), rotate_back});
}

}  // namespace jnvfp4
