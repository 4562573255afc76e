// Launches every CUDA kernel on small, odd shapes, each buffer an allocation of exactly its size: the program that
// compute-sanitizer watches (.ci/run_gpu). An access outside a buffer, which a framework's memory pool would hide,
// is an error here. Built by .ci/run_gpu, which knows the architecture of each source.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cuda/matmul/cublaslt/prepare.h"
#include "cuda/matmul/launchers.h"
#include "device_memory.h"
#include "plan/decode_attention.h"
#include "plan/matmul.h"
#include "plan/sm100_cublaslt.h"
#include "plan/sm90_pinned.h"
#include "plan/sm90_windows.h"

using namespace jnvfp4;

namespace {

// racecheck reports the exchange of sums by two teams, which is right (named_barriers.cu): its build leaves it out.
#if defined(JNVFP4_RACECHECK)
constexpr bool kRacecheck = true;
#else
constexpr bool kRacecheck = false;
#endif
bool is_left_out(const FusedPlan& plan) { return kRacecheck && fused_teams(plan.tokens) == 2; }

// Small, varied bytes that are no NaN in any of the types read from them.
class Varied : public Buffer {
 public:
  explicit Varied(int64_t bytes) : Buffer(bytes) {
    std::vector<uint8_t> host(bytes);
    for (int64_t i = 0; i < bytes; ++i) host[i] = static_cast<uint8_t>((i * 37 + i / 7) % 59);
    set(host);
  }
};

struct Shape {
  int64_t batch, rows, cols;
};

template <class... S>
std::vector<KernelSpec> specs_of(SpecList<S...>) {
  return {S::spec...};
}

template <class... P>
std::vector<std::pair<KernelSpec, KernelSpec>> pairs_of(PairList<P...>) {
  return {{P::Row::spec, P::Col::spec}...};
}

enum class Amax { kOne, kEach, kFound };  // for everything; per matrix, row or window; found by the kernel

// The buffers of one orientation. `s` is oriented like the result.
struct Result {
  Varied amax, data, scale, stream;
  QuantizeArgs args;

  static int64_t count(const Shape& s, const KernelSpec& spec, Amax amax) {
    if (spec.amax_scope == AmaxScope::kWindow64) return s.batch * s.rows * s.cols / 64;
    if (spec.amax_scope == AmaxScope::kRow) return s.batch * s.rows;
    return amax == Amax::kOne ? 1 : s.batch;
  }
  Result(const Shape& s, const KernelSpec& spec, Amax how, const Varied& x, Float kind, bool transposed)
      : amax(count(s, spec, how) * 4),
        data(s.batch * s.rows * s.cols / 2),
        scale(s.batch * s.rows * s.cols / 16),
        stream(s.batch * 16),
        args{x.as<void>(),
             kind,
             how == Amax::kFound ? nullptr : amax.as<float>(),
             how == Amax::kFound ? amax.as<float>() : nullptr,
             data.as<uint8_t>(),
             scale.as<uint8_t>(),
             {stream.as<uint32_t>(), s.cols / 16 + 3},
             {s.batch, s.rows, s.cols, map(s, spec, how), transposed},
             448.0f,
             kHeadroom} {}
  static AmaxMap map(const Shape& s, const KernelSpec& spec, Amax how) {
    return {std::max<int64_t>(1, s.batch * s.rows / count(s, spec, how)),
            spec.amax_scope == AmaxScope::kWindow64 ? s.cols / 64 : 0};
  }
};

bool fits(const Shape& s, const KernelSpec& spec) {
  return s.cols % (spec.amax_scope == AmaxScope::kWindow64 ? 64 : 16) == 0 && s.rows % spec.block_rows == 0;
}
Shape turned(const Shape& s) { return {s.batch, s.cols, s.rows}; }

void quantize(const Shape& s, const KernelSpec& spec, Float kind, bool transposed, Amax how) {
  if (!fits(s, spec) || (how == Amax::kFound && spec.amax_scope == AmaxScope::kTensor)) return;
  Varied x(s.batch * s.rows * s.cols * size_of(kind));
  Result r(s, spec, how, x, kind, transposed);
  check_run(launch_quantize(r.args, spec, nullptr), "quantize");
}

void quantize_pair(const Shape& s, const KernelSpec& row, const KernelSpec& col, Float kind) {
  if (!fits(s, row) || !fits(turned(s), col)) return;
  const Amax how = row.amax_scope == AmaxScope::kWindow64 ? Amax::kFound : Amax::kEach;
  Varied x(s.batch * s.rows * s.cols * size_of(kind));
  Result r(s, row, how, x, kind, false), c(turned(s), col, how, x, kind, true);
  check_run(launch_quantize_pair({r.args, c.args}, row, col, nullptr), "quantize_pair");
}

void rht_amax(const Shape& s, Float kind, bool transposed, int64_t count) {
  Varied x(s.batch * s.rows * s.cols * size_of(kind)), amax(count * 4), plain(count * 4);
  check_run(launch_rht_amax({x.as<void>(),
                             kind,
                             amax.as<float>(),
                             plain.as<float>(),
                             {s.batch, s.rows, s.cols, {s.batch * s.rows / count, 0}, transposed}},
                            nullptr),
            "rht_amax");
}

// An operand of `rows` rows: an NVFP4 tensor with one amax for each `rows_per_amax` rows or for each window.
struct Tensor {
  Varied data, scale, amax;
  MatmulOperand operand;

  Tensor(int64_t rows, int64_t k, int64_t rows_per_amax, bool windows)
      : data(rows * k / 2),
        scale(rows * k / 16),
        amax((windows ? rows * k / 64 : rows / rows_per_amax) * 4),
        operand{
            data.as<void>(), scale.as<uint8_t>(), amax.as<float>(), Float::kBf16, {rows_per_amax, windows ? k / 64 : 0},
            448.0f} {}
};

#if defined(JNVFP4_SM90A)
constexpr const char* kBuiltFor = "sm_90a";
#else
constexpr const char* kBuiltFor = "compute_80";
#endif

// Without cuBLASLt, for whose kernel block_scaled_on_device.cu has a stand-in.
Device this_device() {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "cudaDeviceGetAttribute");
  return {10 * major + minor, kBuiltFor, "none"};
}

// Every kernel of the plan that takes the operands.
void planned(const MatmulArgs& args) {
  using Left = MatmulProblem::Left;
  const Left left = args.a.quantized() ? Left::kNvfp4 : args.a.kind == Float::kBf16 ? Left::kBf16 : Left::kF16;
  const MatmulProblem problem{args.shape, left, args.windows(), args.result.kind, false};
  for (const KernelRow<MatmulProblem>& row : kMatmulKernels) {
    if (row.options.of_xla || !row.why_not(problem, this_device()).empty()) continue;
    const std::string name(row.name);
    const bool fused = name == "sm90_nvfp4_fused" || name == "sm90_dense_fused";
    if (fused && is_left_out(plan_fused(args.shape, args.a.quantized()))) continue;
    Varied scratch(row.scratch_bytes(problem));
    check_run(launch_matmul(args, row.name, scratch.as<void>(), nullptr), name.c_str());
  }
}

void matmul(int64_t batch, int64_t m, int64_t n, int64_t k, Float kind, bool a_windows, bool b_windows, bool each) {
  const Tensor a(batch * m, k, each ? 1 : batch * m, a_windows), b(batch * n, k, each ? 1 : batch * n, b_windows);
  Varied x(batch * m * k * 2), bias(n * 2), out(batch * m * n * size_of(kind));
  const MatmulResult result{bias.as<void>(), Float::kBf16, out.as<void>(), kind};
  const MatmulArgs args{a.operand, b.operand, result, {batch, m, n, k}};
  planned(args);
  for (int tokens : {8, 16, 32, 64}) {
    check_run(launch_sm80_nvfp4_blocks_small_m(args, nullptr, tokens), "sm80_nvfp4_blocks_small_m");
  }
  for (Float dense : {Float::kBf16, Float::kF16})
    planned({{x.as<void>(), nullptr, nullptr, dense, {}, 448.0f}, b.operand, result, args.shape});
}

#if defined(JNVFP4_SM90A)
void small_m(int64_t batch, int64_t m, int64_t n, int64_t k, Float kind, bool each) {
  const Tensor a(batch * m, k, each ? 1 : m, false), b(batch * n, k, each ? 1 : batch * n, false);
  Varied x(batch * m * k * 2), bias(n * 2), out(batch * m * n * size_of(kind)), residual(batch * m * n * 2),
      gain(k * 4);
  const MatmulResult result{each ? bias.as<void>() : nullptr, Float::kBf16, out.as<void>(), kind};
  const MatmulResult sum{residual.as<void>(), each ? Float::kBf16 : Float::kF16, out.as<void>(), kind, true};
  const MatmulOperand bf16{x.as<void>(), nullptr, nullptr, Float::kBf16, {}, 448.0f};
  const MatmulOperand f16{x.as<void>(), nullptr, nullptr, Float::kF16, {}, 448.0f};
  for (const MatmulOperand& left : {a.operand, bf16, f16}) {
    check_run(launch_sm90_small_m({left, b.operand, result, {batch, m, n, k}}, nullptr), "sm90_small_m");
    if (k % kSmallUnit) continue;
    check_run(launch_sm90_small_m({left, b.operand, sum, {batch, m, n, k}}, nullptr), "sm90_small_m, residual");
    if (left.quantized() || m > kNormRows) continue;
    for (Float of_gain : {Float::kF32, Float::kBf16, Float::kF16})
      check_run(
          launch_sm90_small_m(
              {left, b.operand, each ? sum : result, {batch, m, n, k}, {gain.as<void>(), of_gain, 1e-5f}}, nullptr),
          "sm90_small_m, norm");
  }
}

void fused(const MatmulOperand& a, const MatmulOperand& b, const MatmulResult& result, const GemmShape& s) {
  for (int tokens : {32, 64, 128, 256})
    for (int splits : {1, 2, 5}) {
      if (splits > 1 && 2 * splits > (s.depth + kFusedDepth - 1) / kFusedDepth) continue;
      for (bool swapped : {false, true}) {
        if (swapped && (tokens < 128 || !a.quantized())) continue;
        for (int64_t whole : {0, 1}) {  // clusters begin with whole tiles and with parts
          const FusedPlan plan{tokens, splits, swapped, whole};
          if (whole && (splits == 1 || fused_tiles(fused_shape(s, plan), tokens) == 1)) continue;
          if (is_left_out(plan)) continue;
          Varied scratch(fused_scratch(fused_shape(s, plan), plan).bytes);
          check_run(launch_sm90_fused({a, b, result, s}, plan, scratch.as<void>(), nullptr), "sm90_fused");
        }
      }
    }
}

void fused_windows(int64_t batch, int64_t m, int64_t n, int64_t k, Float kind, bool a_windows, bool b_windows) {
  const Tensor a(batch * m, k, m, a_windows), b(batch * n, k, n, b_windows);
  Varied bias(n * 2), out(batch * m * n * size_of(kind));
  const GemmShape shape{batch, m, n, k};
  for (int splits : {1, 2}) {
    if (splits > 1 && k < 4 * kFusedDepth) continue;
    const FusedPlan plan{a_windows && b_windows ? kBothWindowsTokens : kWindowsTokens, splits, !b_windows};
    Varied scratch(windows_scratch(fused_shape(shape, plan), plan).bytes);
    check_run(launch_sm90_windows({a.operand, b.operand, {bias.as<void>(), Float::kBf16, out.as<void>(), kind}, shape},
                                  plan, scratch.as<void>(), nullptr),
              "sm90_windows");
  }
}

// Every tile of the pinned order, and b in each form; `sides` that have windows: 1 for a, 2 for b.
void pinned(int64_t batch, int64_t m, int64_t n, int64_t k, Float kind, bool each, int sides) {
  const Tensor a(batch * m, k, each ? 1 : m, sides & 1), b(batch * n, k, each ? 1 : n, sides & 2);
  Varied bias(n * 2), out(batch * m * n * size_of(kind));
  const MatmulResult result{each ? bias.as<void>() : nullptr, Float::kBf16, out.as<void>(), kind};
  std::vector<PinnedPlan> plans{plan_pinned_prepared(sides)};
  for (int tokens : {64, 128, 256})
    if (!sides) plans.push_back({tokens, Pinned::kCodes});
  for (const PinnedPlan& plan : plans) {
    Varied scratch(pinned_scratch({batch, m, n, k}, plan).bytes);
    check_run(launch_sm90_pinned({a.operand, b.operand, result, {batch, m, n, k}}, plan, scratch.as<void>(), nullptr),
              "sm90_pinned");
  }
}

// Every tile, whatever the shape; `each` row or column with its own amax, or each matrix.
void fused_matmul(int64_t batch, int64_t m, int64_t n, int64_t k, Float kind, bool each) {
  const Tensor a(batch * m, k, each ? 1 : m, false), b(batch * n, k, each ? 1 : n, false);
  Varied bias(n * 2), out(batch * m * n * size_of(kind)), x(batch * m * k * 2);
  const MatmulResult result{each ? bias.as<void>() : nullptr, Float::kBf16, out.as<void>(), kind};
  fused(a.operand, b.operand, result, {batch, m, n, k});
  for (Float dense : {Float::kBf16, Float::kF16})
    fused({x.as<void>(), nullptr, nullptr, dense, {}, 448.0f}, b.operand, result, {batch, m, n, k});
}
#endif

// What surrounds the product of Blackwell, which only such a GPU can make.
void blackwell(int64_t batch, int64_t m, int64_t n, int64_t k, Float kind) {
  const Tensor a(batch * m, k, m, false), b(batch * n, k, batch * n, false);
  const GemmShape shape{batch, m, n, k};
  const BlockScaledScratch at = block_scaled_scratch(shape, kind);
  const int64_t blocks = k / 16, out_pieces = at.depth / 16;
  Varied a_tiles(batch * tiled_scale_bytes(m, blocks)), b_tiles(batch * tiled_scale_bytes(n, blocks));
  Varied a_codes(batch * m * at.depth / 2), b_codes(batch * at.cols * at.depth / 2), factors((batch + 1) * 4);
  check_run(launch_sm100_prepare(
                {{a.operand.scale, a_tiles.as<uint8_t>(), batch, m, blocks},
                 {b.operand.scale, b_tiles.as<uint8_t>(), batch, n, blocks},
                 {a.operand.data, at.depth == k ? nullptr : a_codes.as<void>(), batch, m, blocks, m, out_pieces},
                 {b.operand.data, b_codes.as<void>(), batch, n, blocks, at.cols, out_pieces},
                 {a.operand, b.operand, shape, false, factors.as<float>()}},
                nullptr),
            "sm100_prepare");
  Varied sums(batch * m * at.cols * 4), bias(n * 2), out(batch * m * n * size_of(kind));
  const MatmulResult result{bias.as<void>(), Float::kBf16, out.as<void>(), kind};
  check_run(launch_epilogue({sums.as<float>(), at.cols, true, a.operand, b.operand, result, shape}, nullptr),
            "epilogue");
}

void dequantize(const Shape& s, Float kind, int64_t amax_count, bool rotate_back) {
  const int64_t blocks = s.batch * s.rows * s.cols / 16;
  Varied data(blocks * 8), scale(blocks), amax(amax_count * 4), out(blocks * 16 * size_of(kind));
  check_run(launch_dequantize({data.as<uint8_t>(), scale.as<uint8_t>(), amax.as<float>(), out.as<void>(), kind, blocks,
                               blocks / amax_count, 448.0f, rotate_back},
                              nullptr),
            "dequantize");
  if (kind != Float::kF32)
    check_run(launch_decode({data.as<uint8_t>(), scale.as<uint8_t>(), out.as<void>(), kind, blocks}, nullptr),
              "decode");
}

void transpose(const Shape& s) {
  const int64_t blocks = s.batch * s.rows * s.cols / 16;
  Varied data(blocks * 8), scale(blocks), out_data(blocks * 8), out_scale(blocks);
  check_run(launch_transpose({data.as<uint8_t>(), scale.as<uint8_t>(), out_data.as<uint8_t>(), out_scale.as<uint8_t>(),
                              s.batch, s.rows, s.cols},
                             nullptr),
            "transpose");
}

void epilogue(const Shape& s, Float out_kind, bool per_row, bool with_bias, bool quantized_a) {
  const int64_t elements = s.batch * s.rows * s.cols;
  const int64_t a_count = per_row ? s.batch * s.rows : 1, b_count = per_row ? s.batch * s.cols : s.batch;
  Varied y(elements * 4), a_amax(a_count * 4), b_amax(b_count * 4), bias(s.cols * 2), out(elements * size_of(out_kind));
  EpilogueArgs args{};
  args.y = y.as<float>(), args.pitch = s.cols, args.quantized_a = quantized_a;
  args.a = {nullptr, nullptr, a_amax.as<float>(), {}, {s.batch * s.rows / a_count, 0}, 448.0f};
  args.b = {nullptr, nullptr, b_amax.as<float>(), {}, {s.batch * s.cols / b_count, 0}, 448.0f};
  args.result = {with_bias ? bias.as<void>() : nullptr, Float::kBf16, out.as<void>(), out_kind};
  args.shape = {s.batch, s.rows, s.cols, 0};
  check_run(launch_epilogue(args, nullptr), "epilogue");
}

// Six sequences of other lengths, in pages or not; `scale` lengthens them.
void attention(const char* kernel, int64_t depth, bool paged, Float kind, int scale) {
  const std::vector<int32_t> ends{0, scale, 64 * scale, 200 * scale, 320 * scale, 77 * scale};
  const int64_t batch = static_cast<int64_t>(ends.size()), heads = 2, group = 9, tokens = 320 * scale;
  const int64_t per = tokens / kPageTokens, rows = batch * heads * tokens;
  std::vector<int32_t> table(batch * per);
  for (int64_t i = 0; i < batch * per; ++i) table[i] = static_cast<int32_t>(batch * per - 1 - i);
  Varied codes(rows * depth / 2), scales(rows * depth / 16), q(batch * heads * group * depth * 2);
  const Buffer amax(std::vector<float>(rows, 3.0f)), lengths(ends), pages(table),
      out(batch * heads * group * depth * 2);
  const KvRows cached{codes.as<uint8_t>(), scales.as<uint8_t>(), amax.as<float>()};
  const KvCacheShape shape{batch, heads, tokens, depth, batch * per, paged ? pages.as<int32_t>() : nullptr};
  const Buffer scratch(decode_attention_scratch({batch, heads, group, depth, tokens}).bytes);
  const DecodeAttentionArgs args{q.as<void>(), out.as<void>(),        kind,  cached, cached,
                                 shape,        lengths.as<int32_t>(), group, 0.1f};
  check_run(launch_decode_attention(args, kernel, scratch.as<void>(), nullptr), kernel);
}

void append(int64_t depth, bool paged, Float kind) {
  const std::vector<int32_t> places{-1, 0, 319, 320, 64, 5},
      table{1, -1, 0, 4, 2, 3, 9, 5, 6, 7, 8, 5, 99, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7};
  const int64_t batch = static_cast<int64_t>(places.size()), heads = 3, tokens = 320, num_pages = 10;
  const int64_t rows = paged ? num_pages * heads * kPageTokens : batch * heads * tokens;
  Varied k(batch * heads * depth * size_of(kind)), v(batch * heads * depth * size_of(kind));
  const Buffer codes(rows * depth), scales(rows * depth / 8), amax(rows * 8), positions(places), pages(table);
  const auto side = [&](int64_t i) {
    return KvRowsOut{codes.as<uint8_t>() + i * rows * depth / 2, scales.as<uint8_t>() + i * rows * depth / 16,
                     amax.as<float>() + i * rows};
  };
  const KvCacheShape shape{batch, heads, tokens, depth, num_pages, paged ? pages.as<int32_t>() : nullptr};
  check_run(
      launch_append_kv({k.as<void>(), v.as<void>(), kind, side(0), side(1), shape, positions.as<int32_t>()}, nullptr),
      "append_kv");
}

void caches(Float kind) {
  for (const int64_t depth : {64, 128})
    for (const bool paged : {false, true}) {
      append(depth, paged, kind);
      if (kind == Float::kF32) continue;
      attention("sm80_nvfp4_attention", depth, paged, kind, 1);
#if defined(JNVFP4_SM90A)
      for (const int scale : {1, 40}) attention("sm90_nvfp4_attention", depth, paged, kind, scale);
#endif
    }
}

const std::vector<Shape> kWhole{{1, 16, 16}, {2, 80, 144}, {1, 64, 64}, {2, 64, 192}, {3, 48, 272}};
const std::vector<Shape> kRagged{{1, 1, 16}, {2, 33, 48}, {1, 35, 64}, {1, 259, 2112}};

void transpositions() {
  for (const Shape& s : kWhole) transpose(s);
  transpose({2, 272, 544});  // whole squares and parts of them
  transpose({1, 1024, 512});
  for (const Shape& s : {Shape{140, 80, 144}, Shape{140, 272, 544}}) transpose(s);  // squares for every SM
}

void quantizers(Float kind) {
  for (const std::vector<Shape>& shapes : {kWhole, kRagged})
    for (const Shape& s : shapes) {
      for (const KernelSpec& spec : specs_of(CudaSpecs{}))
        for (bool transposed : {false, true})
          for (Amax how : {Amax::kOne, Amax::kEach, Amax::kFound}) quantize(s, spec, kind, transposed, how);
      for (const auto& [row, col] : pairs_of(FusedPairs{})) quantize_pair(s, row, col, kind);
      for (bool transposed : {false, true}) {
        rht_amax(s, kind, transposed, 1);
        rht_amax(s, kind, transposed, s.batch);
      }
    }
  for (const Shape& s : {Shape{1, 2, 8208}, Shape{1, 3, 16464}})  // more than a CTA holds of a row
    for (const KernelSpec& spec : specs_of(CudaSpecs{})) quantize(s, spec, kind, false, Amax::kFound);
  // x is stored 16400 x 272: a CTA has three tiles or six and reuses the stages.
  for (bool transposed : {false, true}) {
    const Shape deep = transposed ? Shape{1, 272, 16400} : Shape{1, 16400, 272};
    for (const KernelSpec& spec : specs_of(CudaSpecs{})) quantize(deep, spec, kind, transposed, Amax::kOne);
    rht_amax(deep, kind, transposed, 1);
  }
  for (const auto& [row, col] : pairs_of(FusedPairs{})) quantize_pair({1, 16400, 272}, row, col, kind);
  for (const Shape& s : kRagged) {
    dequantize(s, kind, 1, false);
    dequantize(s, kind, s.batch * s.rows, true);
  }
}

void products(Float kind) {
  for (const Shape& s : {Shape{1, 1, 64}, Shape{2, 70, 192}, Shape{1, 131, 128}})
    for (int flags = 0; flags < 4; ++flags)
      matmul(s.batch, s.rows, s.rows + 5, s.cols, kind, flags & 1, flags & 2, s.batch > 1);
  for (int64_t k : {16, 64, 1040}) {
    blackwell(1, 131, 20, k, kind);
    blackwell(3, 5, 7, k, kind);
  }
  for (int64_t k : {16, 48, 80, 1296})  // the last slab is not full
    for (bool each : {false, true}) matmul(2, 66, 3, k, kind, false, false, each);
  for (int flags = 0; flags < 4; ++flags)  // whole stages, more than the ring has
    for (int64_t k : {2048, 1600}) matmul(1, 41, 130, k, kind, flags & 1, flags & 2, false);
  for (const Shape& s : kRagged)
    for (int flags = 0; flags < 8; ++flags) {
      epilogue(s, kind, flags & 1, flags & 2, flags & 4);
      epilogue({s.batch, s.rows, s.cols + 1}, kind, flags & 1, flags & 2, flags & 4);
    }
}

#if defined(JNVFP4_SM90A)  // the GPU is one of Hopper
void hopper_products(Float kind) {
  for (int64_t m : {1, 4, 8, 13})
    for (int64_t k : {48, 256, 1040, 4352}) small_m(1, m, 67, k, kind, k == 256);
  for (int64_t m : {5, 16}) small_m(3, m, 35, 512, kind, m == 16);
  for (int64_t m : {3, 7, 16}) small_m(1, m, 2200, 4352, kind, false);  // more than one unit a warp
  small_m(1, 9, 2200, 2064, kind, false);                               // the same, masked
  for (bool each : {false, true}) {
    for (int64_t k : {16, 32, 48, 64, 320, 512}) fused_matmul(1, 70, 131, k, kind, each);  // copied or not, ragged
    fused_matmul(3, 5, 4, 272, kind, each);
    fused_matmul(1, 300, 600, 2816, kind, each);  // every stage is used again, and five parts of K
  }
  for (int64_t k : {16, 64, 80, 272, 1040}) pinned(1, 70, 131, k, kind, k != 80, 0);
  pinned(3, 300, 270, 576, kind, false, 0);
  for (int sides : {1, 2, 3}) {
    for (int64_t k : {64, 320}) pinned(2, 150, 131, k, kind, k == 320, sides);
    for (int64_t k : {64, 320, 1088}) fused_windows(1, 70, 131, k, kind, sides & 1, sides & 2);
    fused_windows(3, 300, 270, 576, kind, sides & 1, sides & 2);
  }
}
#endif

}  // namespace

// launch_all [part] [the absolute path of libcublasLt], where the part is one of those below, or all: under racecheck,
// which is slow, they run one by one, since it must watch every kernel of a process.
int main(int count, char** arguments) {
  const std::string part = count > 1 ? arguments[1] : "all";
  bool known = false;
  const auto runs = [&](const char* name) { return part == "all" || part == name ? known = true : false; };
  if (runs("transpose")) transpositions();
  for (Float kind : kFloats) {
    if (runs("quantize")) quantizers(kind);
    if (runs("products")) products(kind);
    if (runs("attention")) caches(kind);
#if defined(JNVFP4_SM90A)
    if (runs("hopper")) hopper_products(kind);
#endif
  }
  if (!known) {
    std::fprintf(stderr, "there is no part %s\n", part.c_str());
    return 1;
  }
  std::printf("every kernel of %s ran\n", part.c_str());
}
