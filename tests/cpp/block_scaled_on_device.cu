// Blackwell's product of two NVFP4 tensors in device memory, with the stand-in for cuBLASLt: all of it but the FP4
// tensor cores, on any GPU. Arrays are allocations of exactly their sizes, so that compute-sanitizer sees what is
// accessed outside. Results are compared, bit by bit, with a kernel that adds up one term after the other: numbers are
// such that every order has the same sum. test_block_scaled.py and .ci/run_gpu build and run it. How the library's
// failures are passed on, which no device changes, is in test_block_scaled.py.
//
// block_scaled_on_device all | quick  the absolute path of the stand-in
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "device_memory.h"
#include "plan/matmul.h"
#include "plan/sm100_cublaslt.h"
#include "rule.cuh"

using namespace jnvfp4;

namespace {

int cases = 0, failures = 0;
void expect(bool holds, const std::string& what) {
  ++cases;
  if (holds) return;
  if (++failures <= 20) std::printf("wrong: %s\n", what.c_str());
}

uint32_t random_state = 17;
int random_below(int n) {
  return static_cast<int>(((random_state = random_state * 1664525u + 1013904223u) >> 8) % static_cast<uint32_t>(n));
}

// ---------------------------------------------------------------- the stand-in
struct StandIn {
  void (*reset)();
  const char* (*complaint)();
  int (*alive)();

  explicit StandIn(const char* path) {
    void* const library = dlopen(path, RTLD_NOW);
    if (!library) std::fprintf(stderr, "%s\n", dlerror()), std::exit(1);
    const auto get = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function) std::fprintf(stderr, "%s has no %s\n", path, name), std::exit(1);
    };
    get(reset, "stand_in_reset"), get(complaint, "stand_in_complaint"), get(alive, "stand_in_alive");
  }
};

// ---------------------------------------------------------------- operands
enum class Scope { kTensor, kMatrix, kRow };  // what has one amax
enum class Scales { kThree, kEach, kNan };    // 1/2, 1 and 2; every one; the first, but NaN in two places

struct Options {
  Scope a_scope = Scope::kTensor, b_scope = Scope::kTensor;
  float a_max = 448.0f, b_max = 448.0f;  // of block scales
  Scales scales = Scales::kThree;
  float amax = -1;  // of all; negative: each has another, as in an ordinary tensor
};

std::vector<uint8_t> codes_of(int64_t count, bool identity, int64_t depth) {
  std::vector<uint8_t> codes(static_cast<size_t>(count / 2));
  for (uint8_t& pair : codes) pair = identity ? 0 : static_cast<uint8_t>(random_below(256));
  for (int64_t row = 0; identity && row < count / depth; ++row) {
    const int64_t i = row * depth + row % depth;
    codes[static_cast<size_t>(i / 2)] = i % 2 ? 0x20 : 0x02;  // 1.0
  }
  return codes;
}
std::vector<uint8_t> scales_of(int64_t count, Scales which, bool identity) {
  static constexpr uint8_t kThree[] = {0x30, 0x38, 0x40};
  std::vector<uint8_t> scales(static_cast<size_t>(count));
  for (size_t i = 0; i < scales.size(); ++i)
    scales[i] = identity ? 0x38 : which == Scales::kEach ? static_cast<uint8_t>(i % 0x7f) : kThree[random_below(3)];
  if (which == Scales::kNan) scales[scales.size() / 3] = scales[scales.size() - 1] = 0x7f;
  return scales;
}
// No powers of two, so that alpha is rounded.
std::vector<float> amaxes(int64_t count, float all) {
  std::vector<float> v(static_cast<size_t>(count));
  for (float& amax : v) amax = !(all < 0) ? all : 0.5f + 0.0013f * static_cast<float>(random_below(1000) + 1);
  return v;
}

struct Tensor {
  Buffer data, scale, amax;
  MatmulOperand operand;

  static int64_t rows_per_amax(Scope scope, int64_t batch, int64_t rows) {
    return scope == Scope::kRow ? 1 : scope == Scope::kMatrix ? rows : batch * rows;
  }
  Tensor(int64_t batch, int64_t rows, int64_t depth, Scope scope, float e4m3_max, const Options& o, bool identity)
      : data(codes_of(batch * rows * depth, identity, depth)),
        scale(scales_of(batch * rows * depth / kBlock, o.scales, identity)),
        amax(amaxes(batch * rows / rows_per_amax(scope, batch, rows), o.amax)),
        operand{data.as<void>(),
                scale.as<uint8_t>(),
                amax.as<float>(),
                Float::kBf16,
                {rows_per_amax(scope, batch, rows), 0},
                e4m3_max} {}
};

std::vector<uint8_t> bias_of(int64_t count, Float kind) {
  std::vector<uint8_t> bytes;
  for (int64_t i = 0; i < count; ++i)
    with_float(kind, [&](auto t) {
      const auto value = t.store(0.731f * static_cast<float>(i % 37) - 9.0f);
      const auto* first = reinterpret_cast<const uint8_t*>(&value);
      bytes.insert(bytes.end(), first, first + sizeof value);
    });
  return bytes;
}

// ---------------------------------------------------------------- the rule
// A thread for each result.
__global__ void rule_kernel(MatmulArgs g) {
  const GemmShape& s = g.shape;
  for (int64_t i = thread_index(); i < s.batch * s.rows * s.cols; i += thread_count()) {
    const int64_t a_row = i / s.cols, col = i % s.cols, b_row = a_row / s.rows * s.cols + col;
    const MatmulResult& r = g.result;
    const float bias = r.bias ? load_float(r.bias, r.bias_kind, col) : 0.0f;
    const float y = dot_by_rule(g.a, g.b, a_row, b_row, s.depth);
    store_result(r.kind, r.out, i, gemm_epilogue(y, alpha_by_rule(g.a, g.b, a_row, b_row), bias, r.bias != nullptr));
  }
}

// Keeps a stream busy, so that what does not wait for it comes too early.
__global__ void delay_kernel(int64_t cycles) {
  for (const int64_t start = clock64(); clock64() - start < cycles;) {
  }
}

// ---------------------------------------------------------------- a product
constexpr int kNoBias = 3;  // or an index of kFloats

struct Case {
  GemmShape shape;
  Float out = Float::kBf16;
  int bias = kNoBias;
  Options options = {};

  std::string text() const {
    const auto n = [](auto value) { return std::to_string(static_cast<int>(value)) + " "; };
    return n(shape.batch) + "x " + n(shape.rows) + "x " + n(shape.cols) + "x " + n(shape.depth) + "out " + n(out) +
           "bias " + n(bias) + "scopes " + n(options.a_scope) + n(options.b_scope) + "e4m3_max " + n(options.a_max) +
           n(options.b_max) + "scales " + n(options.scales) + "amax " + std::to_string(options.amax);
  }
};

struct Outcome {
  cudaError_t status;
  int64_t different;  // bytes of the result
};

Outcome multiply(const Case& c) {
  const GemmShape& s = c.shape;
  const Options& o = c.options;
  const Tensor a(s.batch, s.rows, s.depth, o.a_scope, o.a_max, o, false);
  const Tensor b(s.batch, s.cols, s.depth, o.b_scope, o.b_max, o, o.scales == Scales::kEach);
  const Float bias_kind = kFloats[c.bias % kNoBias];
  const Buffer bias(bias_of(s.cols, bias_kind));
  const int64_t bytes = s.batch * s.rows * s.cols * size_of(c.out);
  const Buffer out(bytes), want(bytes), scratch(block_scaled_scratch(s, c.out).bytes);
  const auto args = [&](const Buffer& to) {
    return MatmulArgs{
        a.operand, b.operand, {c.bias == kNoBias ? nullptr : bias.as<void>(), bias_kind, to.as<void>(), c.out}, s};
  };
  check(cudaDeviceSynchronize(), "operands");
  cudaStream_t stream = nullptr;  // does not wait for others
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  delay_kernel<<<1, 1, 0, stream>>>(200000);
  const cudaError_t status = launch_sm100_cublaslt_nvfp4(args(out), scratch.as<void>(), stream);
  check(cudaStreamSynchronize(stream), "sm100_cublaslt_nvfp4");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  rule_kernel<<<1024, kThreads>>>(args(want));
  check(cudaDeviceSynchronize(), "the rule");
  const std::vector<uint8_t> found = out.host(), right = want.host();
  int64_t different = 0;
  for (size_t i = 0; i < found.size(); ++i) different += found[i] != right[i];
  return {status, different};
}

void expect_right(const StandIn& lt, const Case& c) {
  const Outcome got = multiply(c);
  const std::string complaint = lt.complaint();
  expect(got.status == cudaSuccess && got.different == 0 && complaint.empty() && lt.alive() == 0,
         c.text() + ": status " + std::to_string(got.status) + ", " + std::to_string(got.different) +
             " bytes differ, " + std::to_string(lt.alive()) + " objects are left; " + complaint);
  lt.reset();
}

// ---------------------------------------------------------------- cases
constexpr GemmShape kShapes[] = {{1, 5, 7, 16},     {1, 1, 16, 32},    {1, 70, 131, 48}, {1, 129, 144, 64},
                                 {1, 130, 16, 80},  {1, 3, 272, 320},  {1, 131, 1, 272}, {1, 66, 48, 272},
                                 {1, 65, 33, 1040}, {1, 33, 32, 4112}, {1, 66, 35, 64}};

void shapes(const StandIn& lt, bool quick) {
  for (const GemmShape& s : kShapes)
    for (int out = 0; out < kNoBias; ++out)
      for (int bias = 0; bias <= kNoBias; ++bias)
        if (!quick || bias == out || bias == kNoBias) expect_right(lt, {s, kFloats[out], bias});
}

void formats(const StandIn& lt, bool quick) {
  constexpr Scope kScopes[] = {Scope::kTensor, Scope::kMatrix, Scope::kRow};
  constexpr GemmShape kBatches[] = {{3, 5, 7, 48}, {2, 130, 16, 64}, {6, 33, 34, 96}, {64, 2, 16, 32}};
  int i = 0;
  for (const GemmShape& s : kBatches)
    for (Scope a : kScopes)
      for (Scope b : kScopes)
        for (int narrow = 0; narrow < 4; ++narrow)
          for (int out = 0; out < kNoBias; ++out) {
            if (quick && i++ % 11) continue;  // no divisor of their number, so some of each
            const Options o{a, b, narrow & 1 ? 256.0f : 448.0f, narrow & 2 ? 256.0f : 448.0f};
            expect_right(lt, {s, kFloats[out], narrow == 3 ? out : kNoBias, o});
          }
}

void values(const StandIn& lt) {
  for (Float out : kFloats) {
    Options o;
    o.scales = Scales::kEach;
    expect_right(lt, {{1, 140, 128, 128}, out, kNoBias, o});
    expect_right(lt, {{1, 140, 112, 112}, out, kNoBias, o});
    for (const GemmShape& s : {GemmShape{1, 5, 7, 48}, GemmShape{2, 66, 32, 64}}) {
      o.scales = Scales::kNan, o.amax = -1;
      expect_right(lt, {s, out, 1, o});
      o.scales = Scales::kThree;
      for (float amax : {0.0f, INFINITY, NAN, 1e25f, 1e-25f, 1e-38f}) o.amax = amax, expect_right(lt, {s, out, 1, o});
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::string part = count == 3 ? arguments[1] : "";
  if (part != "all" && part != "quick") {
    std::fprintf(stderr, "usage: block_scaled_on_device all|quick PATH\n");
    return 1;
  }
  const bool quick = part == "quick";
  expect(multiply({{1, 70, 32, 64}}).status == cudaErrorSharedObjectInitFailed, "a product without a library");
  const CublasLtCopy copy = find_cublaslt(arguments[2]);
  if (!copy.reason.empty()) return std::fprintf(stderr, "%s\n", copy.reason.c_str()), 1;
  const StandIn lt(arguments[2]);
  shapes(lt, quick);
  formats(lt, quick);
  values(lt);
  std::printf("%d cases, %d wrong\n", cases, failures);
  return failures != 0;
}
