// The parts of Blackwell's product that any GPU can run: its kernels, with the bytes of the CPU; and what cuBLASLt does
// for it, with 16-bit operands: alpha in device memory, a bias, a 16-bit result. Then a product of FP4 operands is
// asked for, which a GPU without FP4 tensor cores must refuse without a crash. test_block_scaled.py builds and runs it.
//
// blackwell_parts prepare | finish | refuse [the absolute path of libcublasLt]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/matmul/cublaslt/gemm.h"
#include "device_memory.h"
#include "plan/sm100_cublaslt.h"
#include "prepare_on_cpu.h"

using namespace jnvfp4;

namespace {

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

// An array on the device and its copy on the host, of bytes that no kernel writes by chance.
template <class T>
class Both {
 public:
  explicit Both(int64_t count) : host(std::max<int64_t>(count, 1)) {
    check(cudaMalloc(&device, bytes()), "cudaMalloc");
    std::memset(static_cast<void*>(host.data()), 0xee, bytes());
    up();
  }
  ~Both() { cudaFree(device); }
  Both(const Both&) = delete;
  void up() { check(cudaMemcpy(device, host.data(), bytes(), cudaMemcpyHostToDevice), "cudaMemcpy"); }
  std::vector<T> down() const {
    std::vector<T> found(host.size());
    check(cudaMemcpy(found.data(), device, bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return found;
  }
  size_t bytes() const { return host.size() * sizeof(T); }

  std::vector<T> host;
  T* device = nullptr;
};

template <class T>
void fill(Both<T>& array, int64_t seed, uint32_t most) {
  uint32_t state = static_cast<uint32_t>(seed) * 2654435761u + 1;
  for (T& value : array.host) value = static_cast<T>((state = state * 1664525u + 1013904223u) >> 8) % most + 1;
  array.up();
}

// Every byte that the kernels write, for a of `rows` and b of `cols` rows; K is 16 times `blocks`.
void prepare(int64_t matrices, int64_t rows, int64_t cols, int64_t blocks) {
  const int64_t pieces = blocks, out_pieces = (blocks + 1) / 2 * 2, out_cols = (cols + 15) / 16 * 16;
  Both<uint8_t> a_scale(matrices * rows * blocks), b_scale(matrices * cols * blocks);
  Both<uint8_t> a_tiles(matrices * tiled_scale_bytes(rows, blocks)),
      b_tiles(matrices * tiled_scale_bytes(cols, blocks));
  Both<uint64_t> a_data(matrices * rows * pieces), b_data(matrices * cols * pieces);
  Both<uint64_t> a_out(matrices * rows * out_pieces), b_out(matrices * out_cols * out_pieces);
  Both<float> a_amax(matrices), b_amax(1), factors(matrices + 1);
  fill(a_scale, 1, 255), fill(b_scale, 2, 255), fill(a_data, 3, 1u << 23), fill(b_data, 4, 1u << 23);
  for (int64_t i = 0; i < matrices; ++i) a_amax.host[i] = 0.37f * static_cast<float>(i + 1);
  b_amax.host[0] = 1.9f, a_amax.up(), b_amax.up();
  const auto args = [&](bool device) {
    const auto of = [&](auto& array) { return device ? array.device : array.host.data(); };
    const MatmulOperand a{nullptr, nullptr, of(a_amax), Float::kBf16, {rows, 0}, 448.0f};
    const MatmulOperand b{nullptr, nullptr, of(b_amax), Float::kBf16, {matrices * cols, 0}, 256.0f};
    return PrepareArgs{{of(a_scale), of(a_tiles), matrices, rows, blocks},
                       {of(b_scale), of(b_tiles), matrices, cols, blocks},
                       {of(a_data), blocks % 2 ? of(a_out) : nullptr, matrices, rows, pieces, rows, out_pieces},
                       {of(b_data), of(b_out), matrices, cols, pieces, out_cols, out_pieces},
                       {a, b, {matrices, rows, cols, 16 * blocks}, false, of(factors)}};
  };
  check(launch_sm100_prepare(args(true), nullptr), "prepare");
  prepare_on_cpu(args(false));
  const std::string shape =
      std::to_string(rows) + " and " + std::to_string(cols) + " rows of " + std::to_string(blocks);
  require(a_tiles.down() == a_tiles.host && b_tiles.down() == b_tiles.host, "tiles differ: " + shape);
  require(a_out.down() == a_out.host && b_out.down() == b_out.host, "codes differ: " + shape);
  require(factors.down() == factors.host, "factors differ: " + shape);
}

int type_of(Float kind) { return kind == Float::kF32 ? lt::kR32F : kind == Float::kBf16 ? lt::kR16BF : lt::kR16F; }

struct Library {
  const CublasLt* lt = cublaslt();
  lt::Handle handle = nullptr;
  Both<uint8_t> workspace{kCublasLtWorkspace};

  Library() {
    require(lt, "there is no cuBLASLt");
    require(handle_of_device(*lt, &handle) == lt::kSuccess, "no handle");
  }
};

// The results of small integers that differ from the rule's: cast(alpha * y + bias).
template <class T>
int64_t finish(Library& library, const GemmShape& s, Float kind, bool with_bias) {
  using Stored = typename T::Stored;
  Both<uint16_t> a(s.rows * s.depth), b(s.cols * s.depth);
  Both<Stored> bias(s.cols), out(s.rows * s.cols);
  Both<float> factors(2);
  const auto integers = [](Both<uint16_t>& array, int seed) {
    fill(array, seed, 17);
    for (uint16_t& value : array.host) value = Bf16::store(static_cast<float>(value) - 9.0f);
    array.up();
  };
  integers(a, 5), integers(b, 6);
  for (int64_t i = 0; i < s.cols; ++i) bias.host[i] = T::store(0.731f * static_cast<float>(i % 37) - 9.0f);
  factors.host = {0.0123456f, 0.0f};
  bias.up(), factors.up();
  CublasLtGemm gemm(*library.lt, {s.rows, s.cols, s.depth, lt::kR16BF, type_of(kind), nullptr, nullptr, true,
                                  with_bias ? bias.device : nullptr});
  if (gemm.choose(library.handle) != lt::kSuccess) return -1;
  require(gemm.run(library.handle, a.device, b.device, out.device, library.workspace.device, nullptr, factors.device,
                   factors.device + 1) == lt::kSuccess,
          "the product failed");
  const std::vector<Stored> found = out.down();
  int64_t different = 0;
  for (int64_t row = 0; row < s.rows; ++row)
    for (int64_t col = 0; col < s.cols; ++col) {
      float y = 0;  // exact
      for (int64_t i = 0; i < s.depth; ++i)
        y += Bf16::load(a.host[row * s.depth + i]) * Bf16::load(b.host[col * s.depth + i]);
      different +=
          found[row * s.cols + col] != T::store(gemm_epilogue(y, factors.host[0], T::load(bias.host[col]), with_bias));
    }
  return different;
}

bool finish_all() {
  Library library;
  bool right = true;
  for (const GemmShape& s : {GemmShape{1, 5, 16, 32}, GemmShape{1, 130, 144, 96}, GemmShape{1, 65, 1008, 4096}})
    for (bool with_bias : {false, true}) {
      const auto report = [&](const char* type, int64_t different) {
        std::printf("%s %lld x %lld x %lld%s: ", type, static_cast<long long>(s.rows), static_cast<long long>(s.cols),
                    static_cast<long long>(s.depth), with_bias ? " with a bias" : "");
        if (different < 0)
          std::printf("refused\n");
        else
          std::printf("%lld results differ\n", static_cast<long long>(different));
        right = right && different <= 0;
      };
      report("bfloat16", finish<Bf16>(library, s, Float::kBf16, with_bias));
      if (!with_bias) report("float32", finish<F32>(library, s, Float::kF32, false));
    }
  return right;
}

bool refuse() {
  Library library;
  Both<uint8_t> scales(tiled_scale_bytes(128, 8));
  CublasLtGemm gemm(*library.lt,
                    {128, 128, 128, lt::kR4FE2M1, lt::kR16BF, scales.device, scales.device, false, nullptr});
  const lt::Status status = gemm.choose(library.handle);
  std::printf("a product of FP4 operands: status %d\n", status);
  return status == lt::kNotSupported || status == lt::kArchMismatch || status == lt::kInvalidValue;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string part = count > 1 ? arguments[1] : "";
  find_cublaslt(count > 2 ? arguments[2] : "");
  if (part == "prepare") {
    for (int64_t rows = 1; rows <= 300; ++rows)
      for (int64_t blocks = 1; blocks <= 40; ++blocks) prepare(1, rows, 301 - rows, blocks);
    for (int64_t blocks : {1, 5, 64, 129}) prepare(3, 257, 130, blocks);
    prepare(1, 40000, 5, 33);
    return 0;
  }
  if (part == "finish") return finish_all() ? 0 : 1;
  if (part == "refuse") return refuse() ? 0 : 1;
  std::fprintf(stderr, "there is no part %s\n", part.c_str());
  return 1;
}
