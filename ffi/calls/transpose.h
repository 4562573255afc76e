// The call nvfp4_transpose: its operands and results, and the checks of them.
#pragma once

#include "../core/args.h"
#include "checks.h"

namespace jnvfp4 {

inline auto transpose_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()   // data
      .Arg<ffi::AnyBuffer>()   // scale
      .Ret<ffi::AnyBuffer>()   // out data
      .Ret<ffi::AnyBuffer>();  // out scale
}

template <class Context, ffi::Error (*kRun)(Context, const TransposeArgs&)>
ffi::Error transpose_call(ffi::AnyBuffer data, ffi::AnyBuffer scale, ffi::Result<ffi::AnyBuffer> out_data,
                          ffi::Result<ffi::AnyBuffer> out_scale, Context context) {
  Checks check("transpose");
  const Matrices m(check, "data", data);
  const int64_t rows = m.rows, cols = 2 * m.cols;
  check.type("data", data, {Type::U8});
  check.that(rows % kBlock == 0 && cols % kBlock == 0,
             [&] { return "data must have 16x16 tiles of codes, got " + text_of(data); });
  check.array("scale", scale, kScales, {m.lead, {rows, cols / kBlock}});
  check.array("out data", *out_data, {Type::U8}, {m.lead, {cols, rows / 2}});
  check.array("out scale", *out_scale, kScales, {m.lead, {cols, rows / kBlock}});
  if (!check.ok()) return check.error();
  if (!m.count()) return ffi::Error::Success();
  return kRun(context,
              {static_cast<const uint8_t*>(data.untyped_data()), static_cast<const uint8_t*>(scale.untyped_data()),
               static_cast<uint8_t*>(out_data->untyped_data()), static_cast<uint8_t*>(out_scale->untyped_data()),
               m.batch, rows, cols});
}

}  // namespace jnvfp4
