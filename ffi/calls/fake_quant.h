// The call nvfp4_fake_quant: its operands, result and attributes, and the checks of them. An amax without elements
// means that the kernel finds one for each row or window.
#pragma once

#include "quantize.h"

namespace jnvfp4 {

inline auto fake_quant_binding() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // x
      .Arg<ffi::AnyBuffer>()  // amax
      .Arg<ffi::AnyBuffer>()  // stream, empty without stochastic rounding
      .Ret<ffi::AnyBuffer>()  // out
      .Attr<SpecAttr>("spec")
      .Attr<int32_t>("row_blocks");
}

template <class Context, ffi::Error (*kRun)(Context, const FakeQuantArgs&, const KernelSpec&)>
ffi::Error fake_quant_call(ffi::AnyBuffer x, ffi::AnyBuffer amax, ffi::AnyBuffer stream,
                           ffi::Result<ffi::AnyBuffer> out, SpecAttr attr, int32_t row_blocks, Context context) {
  Checks check("fake_quant");
  const KernelSpec spec = kernel_spec(check, "spec", attr);
  check.type("x", x, kFloats);
  if (!check.ok()) return check.error();
  const Matrices m = oriented(check, "x", x, spec, false);
  check.type("amax", amax, {Type::F32});
  AmaxMap map = found_map(m, spec.amax_scope);
  if (present(amax))
    map = scope_amax(check, "amax", amax, m, spec.amax_scope);
  else
    check_found(check, "amax", amax, m, spec.amax_scope);
  const StreamArgs random = side_stream(check, "stream", stream, "row_blocks", row_blocks, m, spec);
  check.array("out", *out, {x.element_type()}, {m.lead, {m.rows, m.cols}});
  if (!check.ok()) return check.error();
  if (!present(x)) return ffi::Error::Success();
  return kRun(context,
              {x.untyped_data(),
               out->untyped_data(),
               float_kind(x.element_type()),
               present(amax) ? static_cast<const float*>(amax.untyped_data()) : nullptr,
               random,
               {m.batch, m.rows, m.cols, map, false},
               static_cast<float>(attr.e4m3_max),
               attr.headroom()},
              spec);
}

}  // namespace jnvfp4
