// Launches every CUDA kernel on small, odd shapes, each buffer an allocation of exactly its size: the program that
// compute-sanitizer watches (.ci/run_gpu). An access outside a buffer, which a framework's memory pool would hide,
// is an error here. Build: nvcc -std=c++17 -fmad=false -lineinfo -I ffi launch_all.cc ffi/cuda/*.cu
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/kernels.h"

using namespace jnvfp4;

namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
  }
}

class Buffer {
 public:
  // Filled with small, varied bytes that are no NaN in any of the types read from it.
  explicit Buffer(int64_t bytes) {
    std::vector<uint8_t> host(bytes);
    for (int64_t i = 0; i < bytes; ++i) host[i] = static_cast<uint8_t>((i * 37 + i / 7) % 59);
    check(cudaMalloc(&data_, bytes), "cudaMalloc");
    check(cudaMemcpy(data_, host.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

constexpr Float kFloats[] = {Float::kF32, Float::kBf16, Float::kF16};
int64_t size_of(Float kind) { return kind == Float::kF32 ? 4 : 2; }

struct Shape {
  int64_t batch, rows, cols;
};

template <class... S>
std::vector<KernelSpec> specs_of(SpecList<S...>) {
  return {S::spec...};
}

void quantize(const Shape& s, const KernelSpec& spec, Float kind, bool transposed, int64_t amax_count) {
  const int64_t elements = s.batch * s.rows * s.cols, rows = s.batch * s.rows;
  Buffer x(elements * size_of(kind)), amax((amax_count ? amax_count : rows) * 4), data(elements / 2),
      scale(elements / 16);
  QuantizeArgs args{x.as<void>(),
                    kind,
                    amax_count ? amax.as<float>() : nullptr,
                    amax_count ? nullptr : amax.as<float>(),
                    data.as<uint8_t>(),
                    scale.as<uint8_t>(),
                    {s.batch, s.rows, s.cols, amax_count ? rows / amax_count : 1, transposed},
                    448.0f};
  cudaError_t status = cudaSuccess;
  if (!launch_quantize(args, spec, nullptr, &status)) std::exit(2);
  check(status, "quantize");
  check(cudaDeviceSynchronize(), "quantize");
}

void dequantize(const Shape& s, Float kind, int64_t amax_count) {
  const int64_t blocks = s.batch * s.rows * s.cols / 16;
  Buffer data(blocks * 8), scale(blocks), amax(amax_count * 4), out(blocks * 16 * size_of(kind));
  check(launch_dequantize({data.as<uint8_t>(), scale.as<uint8_t>(), amax.as<float>(), out.as<void>(), kind, blocks,
                           blocks / amax_count, 448.0f},
                          nullptr),
        "dequantize");
  if (kind != Float::kF32)
    check(launch_decode({data.as<uint8_t>(), scale.as<uint8_t>(), out.as<void>(), kind, blocks}, nullptr), "decode");
  check(cudaDeviceSynchronize(), "dequantize");
}

void epilogue(const Shape& s, Float out_kind, bool per_row, bool with_bias, bool quantized_a) {
  const int64_t elements = s.batch * s.rows * s.cols;
  const int64_t a_count = per_row ? s.batch * s.rows : 1, b_count = per_row ? s.batch * s.cols : 1;
  Buffer y(elements * 4), a_amax(a_count * 4), b_amax(b_count * 4), bias(s.cols * 2), out(elements * size_of(out_kind));
  EpilogueArgs args{y.as<float>(),
                    a_amax.as<float>(),
                    b_amax.as<float>(),
                    with_bias ? bias.as<void>() : nullptr,
                    Float::kBf16,
                    out.as<void>(),
                    out_kind,
                    s.batch,
                    s.rows,
                    s.cols,
                    per_row ? AmaxStride{s.rows, 1} : AmaxStride{0, 0},
                    per_row ? AmaxStride{s.cols, 1} : AmaxStride{0, 0},
                    quantized_a ? 448.0f : 0.0f,
                    448.0f};
  check(launch_epilogue(args, nullptr), "epilogue");
  check(cudaDeviceSynchronize(), "epilogue");
}

}  // namespace

int main() {
  const Shape whole[] = {{1, 16, 16}, {2, 80, 144}, {1, 64, 64}, {3, 48, 272}};
  const Shape ragged[] = {{1, 1, 16}, {2, 33, 48}, {1, 35, 64}, {1, 259, 2064}};
  for (Float kind : kFloats) {
    for (const KernelSpec& spec : specs_of(SupportedSpecs{}))
      for (bool transposed : {false, true}) {
        const bool per_row = spec.amax_scope == AmaxScope::kRow;
        auto run = [&](const Shape& s) {
          quantize(s, spec, kind, transposed, per_row ? s.batch * s.rows : 1);
          if (per_row)
            quantize(s, spec, kind, transposed, 0);
          else
            quantize(s, spec, kind, transposed, s.batch);
        };
        for (const Shape& s : whole) run(s);
        if (spec.block_rows == 1)
          for (const Shape& s : ragged) run(s);
      }
    for (const Shape& s : ragged) {
      dequantize(s, kind, 1);
      dequantize(s, kind, s.batch * s.rows);
      for (int flags = 0; flags < 8; ++flags) {
        epilogue(s, kind, flags & 1, flags & 2, flags & 4);
        epilogue({s.batch, s.rows, s.cols + 1}, kind, flags & 1, flags & 2, flags & 4);
      }
    }
  }
  std::puts("every kernel ran");
}
