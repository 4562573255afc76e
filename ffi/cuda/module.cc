// The extension module jnvfp4._cuda. Importing it needs neither a GPU nor a driver.
#include "../calls/module.h"

#include <cuda_runtime_api.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <tuple>

#include "kernels.h"

extern "C" {
jnvfp4::Handler Quantize, QuantizePair, RhtAmax, Dequantize, Transpose, Matmul, GroupedMatmul, Decode, Epilogue,
    DecodeAttention, AppendKv;
}

namespace nb = nanobind;

NB_MODULE(_cuda, m) {
  jnvfp4::define_module(m, {{"nvfp4_quantize", Quantize},
                            {"nvfp4_quantize_pair", QuantizePair},
                            {"nvfp4_rht_amax", RhtAmax},
                            {"nvfp4_dequantize", Dequantize},
                            {"nvfp4_transpose", Transpose},
                            {"nvfp4_matmul", Matmul},
                            {"nvfp4_grouped_matmul", GroupedMatmul},
                            {"nvfp4_decode", Decode},
                            {"nvfp4_epilogue", Epilogue},
                            {"nvfp4_decode_attention", DecodeAttention},
                            {"nvfp4_append_kv", AppendKv}});
  m.attr("built_for") = JNVFP4_CUDA_BUILT_FOR;
  m.attr("cuda_version") = CUDART_VERSION;  // of the runtime that is linked: 1000 * major + 10 * minor
  // (path, version, reason why there is none); `path` is of the copy to load if the process has loaded none.
  m.def(
      "find_cublaslt",
      [](const std::string& path) {
        jnvfp4::CublasLtCopy found = jnvfp4::find_cublaslt(path);
        return std::tuple{found.path, found.version, found.reason};
      },
      nb::arg("path"));
}
