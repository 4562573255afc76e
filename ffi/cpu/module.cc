// The extension module jnvfp4._cpu.
#include "../module.h"

#include <nanobind/stl/string_view.h>

#include <string_view>
#include <utility>

#include "parallel.h"

extern "C" {
jnvfp4::Handler Quantize, QuantizeFindAmax, QuantizePair, QuantizePairFindAmax, RhtAmax, Produce, Dequantize, FakeQuant,
    Matmul, MatmulWeightOnly;
}

NB_MODULE(_cpu, m) {
  jnvfp4::define_module(m, {{"nvfp4_quantize", Quantize},
                            {"nvfp4_quantize_find_amax", QuantizeFindAmax},
                            {"nvfp4_quantize_pair", QuantizePair},
                            {"nvfp4_quantize_pair_find_amax", QuantizePairFindAmax},
                            {"nvfp4_rht_amax", RhtAmax},
                            {"nvfp4_produce", Produce},
                            {"nvfp4_dequantize", Dequantize},
                            {"nvfp4_fake_quant", FakeQuant},
                            {"nvfp4_matmul", Matmul},
                            {"nvfp4_matmul_weight_only", MatmulWeightOnly}});
  static constexpr std::pair<const char*, jnvfp4::Isa> kNames[] = {
      {"portable", jnvfp4::Isa::kPortable}, {"avx2", jnvfp4::Isa::kAvx2}, {"avx512", jnvfp4::Isa::kAvx512}};
  m.def("isa", [] { return kNames[static_cast<int>(jnvfp4::isa())].first; });
  m.def("use_isa", [](std::string_view name) {
    for (const auto& [known, value] : kNames)
      if (name == known) return jnvfp4::use_isa(value);
    return false;
  });
}
