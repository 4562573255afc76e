// Exports of every extension module: its FFI targets and how it was built.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace jnvfp4 {

namespace nb = nanobind;
using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

// `targets()` gives {FFI target name: capsule}; the FFI version and source hash let Python refuse a
// module that does not belong to it before JAX sees a handler.
inline void define_module(nb::module_& m, std::initializer_list<std::pair<const char*, Handler*>> targets) {
  nb::dict registrations;
  for (const auto& [name, handler] : targets) registrations[name] = nb::capsule(reinterpret_cast<void*>(handler));
  m.attr("targets") = registrations;
  m.attr("ffi_api") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("source_hash") = JNVFP4_SOURCE_HASH;
}

}  // namespace jnvfp4
