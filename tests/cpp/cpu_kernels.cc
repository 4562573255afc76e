// The CPU kernels without Python and JAX, for processors that no test machine has: products with every instruction set
// of this processor against the rules, one element at a time; and a line for the bytes that each kernel makes, which
// are the same on all processors.
//   cpu_kernels    prints "isa" and the best instruction set, then the lines; exits with 1 if a product is wrong
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

// Not linked: its functions are of this file alone.
#include "cpu/matmul.cc"
#include "cpu/steps.h"

using namespace jnvfp4;

namespace {

// ---------------------------------------------------------------- a pool of threads in place of XLA's
std::vector<std::thread> threads;

XLA_FFI_Error* count_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) { return *args->num_threads = 3, nullptr; }
XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  threads.emplace_back([task = args->task, data = args->data] { task(data); });
  return nullptr;
}
void join_all() {
  for (std::thread& thread : threads) thread.join();
  threads.clear();
}

ffi::ThreadPool& pool() {
  static XLA_FFI_Api api = [] {
    XLA_FFI_Api made{};
    made.XLA_FFI_ThreadPool_NumThreads = count_threads, made.XLA_FFI_ThreadPool_Schedule = schedule;
    return made;
  }();
  static ffi::DiagnosticEngine diagnostic;
  static ffi::ThreadPool made = *ffi::CtxDecoding<ffi::ThreadPool>::Decode(&api, nullptr, diagnostic);
  return made;
}

// As XLA calls handlers.
void flush_subnormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040u);
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" ::"r"(uint64_t{1} << 24) : "memory");
#endif
}

// ---------------------------------------------------------------- numbers
struct Numbers {
  uint32_t state;

  uint32_t next() {
    state = state * 1664525u + 1013904223u;
    return (state ^ state >> 15) * 0x2c1b3c6du >> 3;
  }
  uint8_t byte() { return static_cast<uint8_t>(next() >> 7); }
  // Of either sign, with exponents from `least` on, `range` of them.
  float number(uint32_t least, uint32_t range) {
    return float_of((next() & 1u) << 31 | (least + next() % range) << 23 | (next() & 0x7fffffu));
  }
};

struct Bytes {
  std::vector<uint8_t> held;

  explicit Bytes(int64_t count, uint8_t fill = 0xee) : held(static_cast<size_t>(count), fill) {}
  uint8_t* data() { return held.data(); }
  bool operator==(const Bytes& o) const { return held == o.held; }
};

uint64_t digest(const std::vector<Bytes>& all) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const Bytes& bytes : all)
    for (const uint8_t b : bytes.held) h = (h ^ b) * 0x100000001b3u;
  return h;
}

int64_t size_of(Float kind) { return kind == Float::kF32 ? 4 : 2; }
constexpr const char* kFloatNames[] = {"float32", "bfloat16", "float16"};
constexpr Float kEvery[] = {Float::kF32, Float::kBf16, Float::kF16};

void put(Float kind, void* array, int64_t i, float v) {
  with_float(kind, [&](auto t) { static_cast<typename decltype(t)::Stored*>(array)[i] = t.store(v); });
}

// Numbers of many magnitudes, and now and then any bits at all.
Bytes random_floats(Numbers& numbers, Float kind, int64_t count) {
  Bytes array(count * size_of(kind));
  for (int64_t i = 0; i < count; ++i)
    put(kind, array.data(), i, i % 97 == 96 ? float_of(numbers.next() << 3) : numbers.number(118, 12));
  return array;
}

// ---------------------------------------------------------------- products
enum class Amax { kTensor, kRow, kWindow };
constexpr const char* kAmaxNames[] = {"tensor", "row", "window64"};

// An NVFP4 operand of any codes and scales. Small amaxes make subnormal factors.
struct Operand {
  Bytes codes, scale;
  std::vector<float> amax;
  AmaxMap map;

  Operand(Numbers& numbers, int64_t rows, int64_t depth, Amax kind)
      : codes(rows * depth / 2), scale(rows * depth / 16) {
    for (uint8_t& b : codes.held) b = numbers.byte();
    for (uint8_t& b : scale.held) b = numbers.next() % 251 == 0 ? kScaleNan : numbers.byte() % kScaleNan;
    map = kind == Amax::kWindow ? AmaxMap{1, depth / kWindow} : AmaxMap{kind == Amax::kRow ? 1 : rows, 0};
    amax.resize(static_cast<size_t>(kind == Amax::kWindow ? rows * depth / kWindow : kind == Amax::kRow ? rows : 1));
    for (float& v : amax) v = std::fabs(numbers.number(numbers.next() % 4 ? 120 : 1, 20));
  }
  MatmulOperand operand() { return {codes.data(), scale.data(), amax.data(), Float::kBf16, map, 448.0f}; }
  float value(int64_t at) const { return e2m1_decode(codes.held[at / 2] >> (at % 2 ? 4 : 0) & 15u); }
  float scale_of(int64_t block) const { return e4m3_decode(scale.held[block]); }
};

struct Product {
  int64_t rows, cols, depth;
  Amax a, b;
  int a_kind;  // of a 16-bit left operand, by kEvery; 0: NVFP4
  Float out;
  int bias;  // 0: none, 1: of columns, 2: of the shape of the result
};

// Blocks [begin, end) of a row of each operand, by the rule.
float sum_of_blocks(const Operand& a, const Operand& b, int64_t a_block, int64_t b_block, int64_t begin, int64_t end) {
  float y = 0.0f;
  for (int64_t j = begin; j < end; ++j) {
    float dot = 0.0f;
    for (int64_t i = 0; i < kBlock; ++i)
      dot += a.value((a_block + j) * kBlock + i) * b.value((b_block + j) * kBlock + i);  // exact
    y = add_block(y, a.scale_of(a_block + j), b.scale_of(b_block + j), dot);
  }
  return y;
}

float element_by_rule(const MatmulArgs& g, const Operand& a, const Operand& b, int64_t row, int64_t col) {
  const int64_t blocks = g.shape.depth / kBlock;
  if (!g.a.quantized()) {
    float y = 0.0f;
    for (int64_t k = 0; k < g.shape.depth; ++k) {
      const int64_t at = col * g.shape.depth + k;
      y = add_element(y, load_float(g.a.data, g.a.kind, row * g.shape.depth + k),
                      b.value(at) * b.scale_of(at / kBlock));
    }
    return y;
  }
  if (!g.windows()) return sum_of_blocks(a, b, row * blocks, col * blocks, 0, blocks);
  float y = 0.0f;
  for (int64_t w = 0; w < blocks / kWindowBlocks; ++w) {
    const float window = sum_of_blocks(a, b, row * blocks, col * blocks, w * kWindowBlocks, (w + 1) * kWindowBlocks);
    const float alpha = alpha_w4a4(amax_at(g.a, row, w), amax_at(g.b, col, w), g.a.e4m3_max, g.b.e4m3_max);
    y = add_window(y, window, alpha);
  }
  return y;
}

void product_by_rule(const MatmulArgs& g, const Operand& a, const Operand& b) {
  const KeepSubnormals guard;
  for (int64_t row = 0; row < g.shape.rows; ++row)
    for (int64_t col = 0; col < g.shape.cols; ++col) {
      const float alpha = g.windows() ? 1.0f : alpha_of(g, row, col);
      const int64_t at = g.result.whole_bias ? row * g.shape.cols + col : col;
      const float bias = g.result.bias ? load_float(g.result.bias, g.result.bias_kind, at) : 0.0f;
      const float y = gemm_epilogue(element_by_rule(g, a, b, row, col), alpha, bias, g.result.bias != nullptr);
      put(g.result.kind, g.result.out, row * g.shape.cols + col, y);
    }
}

// Whether each instruction set gives the bytes of the rule.
bool holds(const Product& p) {
  Numbers numbers{static_cast<uint32_t>(p.rows * 7919 + p.cols * 31 + p.depth)};
  Operand a(numbers, p.rows, p.depth, p.a), b(numbers, p.cols, p.depth, p.b);
  Bytes dense = random_floats(numbers, kEvery[p.a_kind], p.rows * p.depth);
  Bytes bias = random_floats(numbers, Float::kF32, p.bias == 2 ? p.rows * p.cols : p.cols);
  const MatmulResult result{p.bias ? bias.data() : nullptr, Float::kF32, nullptr, p.out, p.bias == 2};
  MatmulArgs g{a.operand(), b.operand(), result, {}};
  if (p.a_kind) g.a = {dense.data(), nullptr, nullptr, kEvery[p.a_kind], {}, 448.0f};
  g.shape = {1, p.rows, p.cols, p.depth};
  const int64_t count = p.rows * p.cols * size_of(p.out);
  Bytes want(count);
  g.result.out = want.data();
  product_by_rule(g, a, b);
  std::string line = std::string("product of ") + (p.a_kind ? kFloatNames[p.a_kind] : "nvfp4") + " " +
                     kAmaxNames[static_cast<int>(p.a)] + " " + kAmaxNames[static_cast<int>(p.b)] + " " +
                     std::to_string(p.rows) + "x" + std::to_string(p.cols) + "x" + std::to_string(p.depth) + " " +
                     kFloatNames[static_cast<int>(p.out)] +
                     (p.bias == 2 ? " residual"
                      : p.bias    ? " bias"
                                  : "");
  bool good = true;
  for (const auto& [name, set] : kIsaNames) {
    if (!use_isa(set)) continue;
    Bytes got(count, 0x55);
    g.result.out = got.data();
    good = run(pool(), g, {}, nullptr).success() && got == want && good;
    join_all();
    if (!(got == want)) line += std::string(" WRONG with ") + name;
  }
  std::printf("%s: %016llx\n", line.c_str(), static_cast<unsigned long long>(digest({want})));
  return good;
}

bool products_hold() {
  constexpr std::pair<Amax, Amax> kKinds[] = {{Amax::kTensor, Amax::kTensor},
                                              {Amax::kRow, Amax::kTensor},
                                              {Amax::kRow, Amax::kRow},
                                              {Amax::kWindow, Amax::kWindow},
                                              {Amax::kTensor, Amax::kWindow}};
  bool good = true;
  for (const int64_t rows : {1, 2, 3, 4, 7, 130})
    for (const int64_t cols : {1, 32, 77})
      for (const Float out : kEvery) {
        const int bias = static_cast<int>((rows + cols) % 3);
        for (const auto& [a, b] : kKinds)
          for (const int64_t depth : {64, 192}) good = holds({rows, cols, depth, a, b, 0, out, bias}) && good;
        good = holds({rows, cols, 16, Amax::kRow, Amax::kTensor, 0, out, bias}) && good;
        good = holds({rows, cols, 1040, Amax::kTensor, Amax::kRow, 0, out, bias}) && good;
        for (const int kind : {1, 2})
          for (const int64_t depth : {16, 208})
            good = holds({rows, cols, depth, Amax::kTensor, Amax::kRow, kind, out, bias}) && good;
      }
  return good;
}

// Whether what one thread throws, such as for want of memory, reaches the caller.
bool throws_again() {
  bool caught = false;
  try {
    parallel_for(pool(), 8, 1, [](int64_t begin, int64_t) {
      if (begin == 5) throw std::bad_alloc();
    });
  } catch (const std::bad_alloc&) {
    caught = true;
  }
  join_all();
  return caught;
}

// ---------------------------------------------------------------- quantizers
// A line for the codes, the scales and the decoded values of one spec.
void quantize_by(const KernelSpec& spec, Float kind, bool transposed, int number) {
  constexpr int64_t kBatch = 2, kRows = 48, kCols = 192;
  Numbers numbers{static_cast<uint32_t>(number)};
  Bytes x = random_floats(numbers, kind, kBatch * kRows * kCols);
  const AmaxMap map = spec.amax_scope == AmaxScope::kWindow64 ? AmaxMap{1, kCols / kWindow}
                      : spec.amax_scope == AmaxScope::kRow    ? AmaxMap{1, 0}
                                                              : AmaxMap{kRows, 0};
  std::vector<float> amax(kBatch * kRows * kCols / kWindow);
  amax[0] = 3.5f, amax[1] = 0x1p-130f;
  Bytes codes(kBatch * kRows * kCols / 2), scale(kBatch * kRows * kCols / 16);
  Bytes values(kBatch * kRows * kCols * size_of(kind)), found(static_cast<int64_t>(amax.size() * sizeof(float)));
  const uint32_t words[2 * 4] = {1, 2, 3, 0, 4, 5, 0xfffffff0u, 6};
  const bool given = spec.amax_scope == AmaxScope::kTensor;
  QuantizeArgs q{x.data(),     kind,         given ? amax.data() : nullptr, given ? nullptr : amax.data(),
                 codes.data(), scale.data(), {words, kCols / kBlock},       {kBatch, kRows, kCols, map, transposed},
                 448.0f,       kHeadroom};
  quantize(pool(), q, spec);
  join_all();
  dequantize(pool(), {codes.data(), scale.data(), amax.data(), values.data(), kind, kBatch * kRows * kCols / kBlock,
                      map.blocks_per_amax(kCols / kBlock), 448.0f, spec.rht});
  join_all();
  std::memcpy(found.data(), amax.data(), found.held.size());
  std::printf("spec %d of %s%s: %016llx\n", number, kFloatNames[static_cast<int>(kind)],
              transposed ? " transposed" : "", static_cast<unsigned long long>(digest({codes, scale, values, found})));
}

template <class... S>
void quantize_by_all(SpecList<S...>) {
  for (const Float kind : kEvery)
    for (const bool transposed : {false, true}) {
      int number = 0;
      (quantize_by(S::spec, kind, transposed, number++), ...);
    }
}

}  // namespace

int main() {
  std::printf("isa %s\n", kIsaNames[static_cast<int>(detect_isa())].first);
  flush_subnormals();
  const bool good = throws_again() && products_hold();
  use_isa(detect_isa());
  quantize_by_all(SupportedSpecs{});
  return good ? 0 : 1;
}
