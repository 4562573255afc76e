// quantize and dequantize by their arguments, without the buffers of an XLA call: tests/cpp/cpu_kernels.cc runs them
// so.
#pragma once

#include "../core/args.h"
#include "xla/ffi/api/ffi.h"

namespace jnvfp4 {

// `spec` is one of SupportedSpecs.
void quantize(::xla::ffi::ThreadPool& pool, const QuantizeArgs& args, const KernelSpec& spec);
void dequantize(::xla::ffi::ThreadPool& pool, const DequantizeArgs& args);

}  // namespace jnvfp4
