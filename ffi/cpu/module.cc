// The extension module jnvfp4._cpu.
#include "../module.h"

#include "parallel.h"

extern "C" {
jnvfp4::Handler Quantize, QuantizeFindAmax, Dequantize, Matmul, MatmulWeightOnly;
}

NB_MODULE(_cpu, m) {
  jnvfp4::define_module(m, {{"nvfp4_quantize", Quantize},
                            {"nvfp4_quantize_find_amax", QuantizeFindAmax},
                            {"nvfp4_dequantize", Dequantize},
                            {"nvfp4_matmul", Matmul},
                            {"nvfp4_matmul_weight_only", MatmulWeightOnly}});
  const jnvfp4::Isa isa = jnvfp4::isa();
  m.attr("isa") = isa == jnvfp4::Isa::kAvx512 ? "avx512" : isa == jnvfp4::Isa::kAvx2 ? "avx2" : "portable";
}
