// The extension module jnvfp4._cpu. It also answers what needs no device: which kernel multiplies.
#include "../module.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "../matmul_plan.h"
#include "parallel.h"

extern "C" {
jnvfp4::Handler Quantize, QuantizePair, RhtAmax, Produce, Dequantize, Transpose, FakeQuant, Matmul;
}

namespace {

using namespace jnvfp4;

Float float_named(std::string_view dtype) {
  if (dtype == "float32") return Float::kF32;
  if (dtype == "bfloat16") return Float::kBf16;
  if (dtype == "float16") return Float::kF16;
  throw nb::value_error("dtype must be float32, bfloat16 or float16");
}

// (kernel, bytes of scratch, reason why there is none). `wanted` names a kernel, or is empty for the best.
std::tuple<std::string, int64_t, std::string> plan(int64_t batch, int64_t rows, int64_t cols, int64_t depth,
                                                   std::string_view a, bool windows, std::string_view out, bool pinned,
                                                   int capability, bool sm90a, std::string_view no_cublaslt,
                                                   std::string_view wanted) {
  const Device device{capability, sm90a, no_cublaslt};
  using Left = MatmulProblem::Left;
  const Left left = a == "nvfp4" ? Left::kNvfp4 : float_named(a) == Float::kBf16 ? Left::kBf16 : Left::kF16;
  const MatmulProblem problem{{batch, rows, cols, depth}, left, windows, float_named(out), pinned};
  MatmulPlan best{};
  if (wanted.empty()) {
    if (plan_matmul(problem, device, &best)) return {std::string(name_of(best.kernel)), best.scratch_bytes, ""};
    return {"", 0, "no kernel multiplies these operands there"};
  }
  MatmulKernel kernel;
  if (!find_kernel(wanted, &kernel)) return {"", 0, "no kernel has the name " + std::string(wanted)};
  return {std::string(wanted), scratch_bytes(kernel, problem), why_not(kernel, problem, device)};
}

}  // namespace

NB_MODULE(_cpu, m) {
  jnvfp4::define_module(m, {{"nvfp4_quantize", Quantize},
                            {"nvfp4_quantize_pair", QuantizePair},
                            {"nvfp4_rht_amax", RhtAmax},
                            {"nvfp4_produce", Produce},
                            {"nvfp4_dequantize", Dequantize},
                            {"nvfp4_transpose", Transpose},
                            {"nvfp4_fake_quant", FakeQuant},
                            {"nvfp4_matmul", Matmul}});
  static constexpr std::pair<const char*, jnvfp4::Isa> kNames[] = {
      {"portable", jnvfp4::Isa::kPortable}, {"avx2", jnvfp4::Isa::kAvx2}, {"avx512", jnvfp4::Isa::kAvx512}};
  m.def("isa", [] { return kNames[static_cast<int>(jnvfp4::isa())].first; });
  m.def("use_isa", [](std::string_view name) {
    for (const auto& [known, value] : kNames)
      if (name == known) return jnvfp4::use_isa(value);
    return false;
  });
  m.def("plan_matmul", plan, nb::arg("batch"), nb::arg("rows"), nb::arg("cols"), nb::arg("depth"), nb::arg("a"),
        nb::arg("windows"), nb::arg("out"), nb::arg("pinned"), nb::arg("capability"), nb::arg("sm90a"),
        nb::arg("no_cublaslt"), nb::arg("wanted"));
  m.def("plan_fused", [](int64_t batch, int64_t rows, int64_t cols, int64_t depth, bool nvfp4_a) {
    const jnvfp4::FusedPlan found = jnvfp4::plan_fused({batch, rows, cols, depth}, nvfp4_a);
    return std::tuple{found.tokens, found.splits, found.exchanged, found.whole};
  });
  m.def("plan_windows", [](int64_t batch, int64_t rows, int64_t cols, int64_t depth, bool a_windows, bool b_windows) {
    return jnvfp4::plan_windows({batch, rows, cols, depth}, a_windows, b_windows).splits;
  });
  nb::list kernels;
  for (int i = 0; i < jnvfp4::kMatmulKernels; ++i)
    kernels.append(std::string(jnvfp4::name_of(static_cast<jnvfp4::MatmulKernel>(i))));
  m.attr("matmul_kernels") = nb::tuple(kernels);
  m.attr("any_gpu") = jnvfp4::kAnyGpu;
}
