// The extension module jnvfp4._cpu. It also answers what needs no device: which kernel multiplies.
#include "../calls/module.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "../plan/decode_attention.h"
#include "../plan/grouped.h"
#include "../plan/matmul.h"
#include "../plan/sm90_fused.h"
#include "../plan/sm90_windows.h"
#include "parallel.h"

extern "C" {
jnvfp4::Handler Quantize, QuantizePair, RhtAmax, Dequantize, Transpose, Matmul, GroupedMatmul, DecodeAttention,
    AppendKv;
}

namespace {

using namespace jnvfp4;

Float float_named(std::string_view dtype) {
  if (dtype == "float32") return Float::kF32;
  if (dtype == "bfloat16") return Float::kBf16;
  if (dtype == "float16") return Float::kF16;
  throw nb::value_error("dtype must be float32, bfloat16 or float16");
}

MatmulProblem::Left left_named(std::string_view a) {
  using Left = MatmulProblem::Left;
  return a == "nvfp4" ? Left::kNvfp4 : float_named(a) == Float::kBf16 ? Left::kBf16 : Left::kF16;
}

// Kernel, bytes of scratch, reason why there is none, whether it takes a bias of the shape of the result and a norm.
using Answer = std::tuple<std::string, int64_t, std::string, bool, bool>;

// `wanted` names a kernel, or is empty for the best.
template <class Problem>
Answer answer(const KernelTable<Problem>& kernels, const Problem& problem, const Device& device,
              std::string_view wanted) {
  const KernelRow<Problem>* row = wanted.empty() ? kernels.plan(problem, device) : kernels.find(wanted);
  if (row)
    return {std::string(row->name), row->scratch_bytes(problem), row->why_not(problem, device),
            row->takes_whole_bias(problem), row->takes_norm(problem)};
  if (wanted.empty()) return {"", 0, "no kernel multiplies these operands there", false, false};
  return {"", 0, "no kernel has the name " + std::string(wanted), false, false};
}

Answer plan(int64_t batch, int64_t rows, int64_t cols, int64_t depth, std::string_view a, bool windows,
            std::string_view out, bool pinned, int capability, std::string_view built_for, std::string_view no_cublaslt,
            int64_t cublaslt_version, std::string_view wanted) {
  const MatmulProblem problem{{batch, rows, cols, depth}, left_named(a), windows, float_named(out), pinned};
  return answer(kMatmulKernels, problem, {capability, built_for, no_cublaslt, cublaslt_version}, wanted);
}

Answer plan_groups(int64_t rows, int64_t groups, int64_t cols, int64_t depth, std::string_view a, std::string_view out,
                   bool pinned, int capability, std::string_view built_for, std::string_view wanted) {
  const GroupedProblem problem{{rows, groups, cols, depth}, left_named(a), float_named(out), pinned};
  return answer(kGroupedKernels, problem, {capability, built_for}, wanted);
}

// Bytes of scratch, and why no kernel runs there, or an empty text.
std::tuple<int64_t, std::string> plan_attention(int64_t batch, int64_t kv_heads, int64_t group, int64_t head_dim,
                                                int64_t tokens, int capability) {
  const DecodeAttentionProblem problem{batch, kv_heads, group, head_dim, tokens};
  const Device device{capability};
  if (const auto* row = kDecodeAttentionKernels.plan(problem, device)) return {row->scratch_bytes(problem), ""};
  std::string reason;
  for (const auto& row : kDecodeAttentionKernels)
    if (row.devices.include(capability)) reason = row.why_not(problem, device);
  return {0, reason};
}

template <class Problem>
nb::tuple names_of(const KernelTable<Problem>& kernels) {
  nb::list names;
  for (const KernelRow<Problem>& row : kernels) names.append(std::string(row.name));
  return nb::tuple(names);
}

}  // namespace

NB_MODULE(_cpu, m) {
  jnvfp4::define_module(m, {{"nvfp4_quantize", Quantize},
                            {"nvfp4_quantize_pair", QuantizePair},
                            {"nvfp4_rht_amax", RhtAmax},
                            {"nvfp4_dequantize", Dequantize},
                            {"nvfp4_transpose", Transpose},
                            {"nvfp4_matmul", Matmul},
                            {"nvfp4_grouped_matmul", GroupedMatmul},
                            {"nvfp4_decode_attention", DecodeAttention},
                            {"nvfp4_append_kv", AppendKv}});
  m.def("isa", [] { return jnvfp4::kIsaNames[static_cast<int>(jnvfp4::isa())].first; });
  m.def("use_isa", [](std::string_view name) {
    for (const auto& [known, value] : jnvfp4::kIsaNames)
      if (name == known) return jnvfp4::use_isa(value);
    return false;
  });
  m.def("plan_matmul", plan, nb::arg("batch"), nb::arg("rows"), nb::arg("cols"), nb::arg("depth"), nb::arg("a"),
        nb::arg("windows"), nb::arg("out"), nb::arg("pinned"), nb::arg("capability"), nb::arg("built_for"),
        nb::arg("no_cublaslt"), nb::arg("cublaslt_version"), nb::arg("wanted"));
  m.def("has_run_on", jnvfp4::has_run_on, nb::arg("capability"));
  m.def("has_block_scaled", jnvfp4::has_block_scaled, nb::arg("capability"));
  m.def(
      "no_block_scaled",
      [](int capability, std::string_view no_cublaslt, int64_t cublaslt_version) {
        return no_block_scaled({capability, {}, no_cublaslt, cublaslt_version});
      },
      nb::arg("capability"), nb::arg("no_cublaslt"), nb::arg("cublaslt_version"));
  m.def("plan_fused", [](int64_t batch, int64_t rows, int64_t cols, int64_t depth, bool nvfp4_a) {
    const jnvfp4::FusedPlan found = jnvfp4::plan_fused({batch, rows, cols, depth}, nvfp4_a);
    return std::tuple{found.tokens, found.splits, found.swapped, found.whole};
  });
  m.def("plan_windows", [](int64_t batch, int64_t rows, int64_t cols, int64_t depth, bool a_windows, bool b_windows) {
    return jnvfp4::plan_windows({batch, rows, cols, depth}, a_windows, b_windows).splits;
  });
  m.def("plan_grouped", plan_groups, nb::arg("rows"), nb::arg("groups"), nb::arg("cols"), nb::arg("depth"),
        nb::arg("a"), nb::arg("out"), nb::arg("pinned"), nb::arg("capability"), nb::arg("built_for"),
        nb::arg("wanted"));
  m.def("plan_decode_attention", plan_attention, nb::arg("batch"), nb::arg("kv_heads"), nb::arg("group"),
        nb::arg("head_dim"), nb::arg("tokens"), nb::arg("capability"));
  m.attr("matmul_kernels") = names_of(kMatmulKernels);
  m.attr("grouped_kernels") = names_of(kGroupedKernels);
  m.attr("attention_kernels") = names_of(kDecodeAttentionKernels);
  m.attr("any_gpu") = jnvfp4::kAnyGpu;
  m.attr("newest_cublaslt") = jnvfp4::kNewestCublasLt;
}
