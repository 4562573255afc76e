// The producers on CUDA with blocks along rows, and without the quantizer.
#include "../quantize/choose.cuh"
#include "../quantize/rows.cuh"
#include "values.cuh"

namespace jnvfp4 {
namespace {

struct Values16 {  // where the bfloat16 values go, or null
  uint16_t* values;

  __device__ __forceinline__ void store(const Block<Bf16>& y, int64_t block) const {
    if (!values) return;
    auto* q = reinterpret_cast<uint4*>(values + block * kBlock);
    q[0] = stored_values(y.word[0]), q[1] = stored_values(y.word[1]);
  }
};

struct None {  // instead of a spec: values only
  static constexpr KernelSpec spec = {};
};
template <class S>
constexpr bool kQuantizes = !std::is_same_v<S, None>;

template <class S, class Scales, class Random>
__device__ __forceinline__ void encode(const Block<Bf16>& y, const Scales& scales, const QuantizeArgs& a, int64_t block,
                                       const Random& random) {
  const auto source = source_of<S>(y);
  const auto element = [&](int i) {  // rare: without an array that a number indexes
    uint32_t pair = 0;
#pragma unroll
    for (int k = 0; k < kBlock / 2; ++k) pair = i / 2 == k ? y.part(k) : pair;
    return i % 2 ? high_half<Bf16>(pair) : low_half<Bf16>(pair);
  };
  encode_block<S>(source, source.signs(), source.amax(), scales, element, random).store(a, block);
}

// The amax of a block's window, given or found. The four lanes of a window are all here, others perhaps not.
__device__ __forceinline__ float window_amax(const Block<Bf16>& y, const QuantizeArgs& a, int64_t block) {
  const int64_t window = block / (kWindow / kBlock);
  if (a.amax) return a.amax[window];
  const unsigned lanes = 0xfu << (threadIdx.x & 28u);
  uint32_t m = y.amax();
  m = amax_bits(m, __shfl_xor_sync(lanes, m, 1));
  const float found = float_of(canonical_nan(amax_bits(m, __shfl_xor_sync(lanes, m, 2))));
  if (block % (kWindow / kBlock) == 0) a.found[window] = found;
  return found;
}

// ---------------------------------------------------------------- a gate, element by element
template <class T>
__device__ __forceinline__ Block<Bf16> gate_block(const ProducerOperands& s, int64_t block) {
  const Float kind = std::is_same_v<T, Bf16> ? Float::kBf16 : s.a_kind;
  Block<Bf16> y;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float g[8], u[8];
    load_eight(s.a, kind, block * kBlock + 8 * h, g);
    load_eight(s.b, kind, block * kBlock + 8 * h, u);
    y.word[h] = gate_eight(g, u);
  }
  return y;
}

// Thread blocks a multiprocessor holds, which bounds registers. With six, nvcc 13.0 spills for Blackwell.
template <class S, class T>
inline constexpr int kGateBlocks = kChooses<S>                ? (std::is_same_v<T, Bf16> ? 4 : 3)
                                   : !std::is_same_v<T, Bf16> ? 4
                                   : kStochastic<S> || kE2M1  ? 5
                                                              : 6;

// The scales and keys of a matrix in shared memory, or those of each block.
template <class S, class T>
__global__ void __launch_bounds__(kThreads, (kGateBlocks<S, T>))
    gate_kernel(ProducerOperands s, QuantizeArgs a, Values16 out, Matrices matrices) {
  if constexpr (kQuantizes<S> && kOneAmax<S>) {
    __shared__ SharedScales<S> scales;
    const int64_t matrix = matrices.own(), first = matrix * matrices.blocks;
    if (matrix >= matrices.count) return;
    fill_scales_of_matrix(scales, a, matrix);
    __syncthreads();
    for (int64_t b = first + thread_index(); b < first + matrices.blocks; b += thread_count()) {
      const Block<Bf16> y = gate_block<T>(s, b);
      out.store(y, b);
      encode<S>(y, scales, a, b, [&](uint32_t (&bits)[4]) { random_of(scales, a.shape, a.stream, b, bits); });
    }
  } else {
    for (int64_t b = thread_index(); b < matrices.blocks; b += thread_count()) {
      const Block<Bf16> y = gate_block<T>(s, b);
      out.store(y, b);
      if constexpr (kQuantizes<S>) {
        const float amax = kWindows<S> ? window_amax(y, a, b) : a.amax[quotient(b, s.cols / kBlock)];
        encode<S>(y, OwnScales<S>(amax, a.e4m3_max), a, b, [](uint32_t (&)[4]) {});
      }
    }
  }
}

// ---------------------------------------------------------------- a thread block a row
constexpr int kMostThreads = 256;  // of a row; a power of two, as the order of the sum needs

// What a thread block keeps of a row between reading and encoding it: each thread the blocks that it has, in slots of
// shared memory. Null where a row does not fit.
struct Slots {
  uint4* slots;

  template <class B>
  __device__ __forceinline__ void put(int j, const B& block) const {
    constexpr int kWords = sizeof(B) / sizeof(uint4);
    const auto* words = reinterpret_cast<const uint4*>(&block);
#pragma unroll
    for (int w = 0; w < kWords; ++w) slots[(j * kWords + w) * blockDim.x + threadIdx.x] = words[w];
  }
  template <class B>
  __device__ __forceinline__ B get(int j) const {
    constexpr int kWords = sizeof(B) / sizeof(uint4);
    B block;
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      reinterpret_cast<uint4*>(&block)[w] = slots[(j * kWords + w) * blockDim.x + threadIdx.x];
    return block;
  }
};

// The sum over the thread block, each thread's first, by halves: over warps, then over lanes.
__device__ __forceinline__ float block_wide_sum(float sum) {
  __shared__ float partial[kMostThreads];
  partial[threadIdx.x] = sum;
  __syncthreads();
  float t[kMostThreads / 32];
#pragma unroll
  for (int k = 0; k < kMostThreads / 32; ++k) t[k] = k * 32 < blockDim.x ? partial[k * 32 + threadIdx.x % 32] : 0.0f;
#pragma unroll
  for (int half = kMostThreads / 64; half; half /= 2)
#pragma unroll
    for (int k = 0; k < half; ++k) t[k] = add_rn(t[k], t[k + half]);
#pragma unroll
  for (int half = 16; half; half /= 2) t[0] = add_rn(t[0], __shfl_xor_sync(0xffffffffu, t[0], half));
  __syncthreads();  // `partial` is free for the next row
  return t[0];
}

// The sum of a row's block sums, by halves. `squares(j)` is that of the thread's j-th block, 0 where it has none: zeros
// that follow do not change a sum of squares.
template <class F>
__device__ __forceinline__ float row_sum(int64_t blocks, const F& squares) {
  if (blocks <= 4 * blockDim.x) {
    const float t0 = squares(0), t1 = squares(1), t2 = squares(2), t3 = squares(3);
    return block_wide_sum(add_rn(add_rn(t0, t2), add_rn(t1, t3)));
  }
  // Blocks in the order in which halves meet, that of reversed bits; two sums of equal size are added at once.
  int bits = 3;
  while (int64_t{blockDim.x} << bits < blocks) ++bits;
  float waiting[27], sum = 0.0f;
#pragma unroll 1
  for (unsigned i = 0; i < 1u << bits; ++i) {
    sum = squares(static_cast<int>(__brev(i) >> (32 - bits)));
    int level = 0;
    for (; i >> level & 1; ++level) sum = add_rn(waiting[level], sum);
    waiting[level] = sum;
  }
  return block_wide_sum(sum);
}

// One row of values.
template <Producer P, class T>
struct Row {
  const ProducerOperands& s;
  Slots held;
  int64_t row, blocks;
  float factor;  // of a norm
  int64_t weights;

  __device__ __forceinline__ bool has(int j) const { return threadIdx.x + j * int64_t{blockDim.x} < blocks; }
  __device__ __forceinline__ int64_t col(int j) const { return (threadIdx.x + j * int64_t{blockDim.x}) * kBlock; }
  __device__ __forceinline__ int64_t block(int j) const { return row * blocks + col(j) / kBlock; }
  __device__ __forceinline__ Block<T> load(int j) const { return load_block<T>(s.a, s.a_kind, block(j), 0); }

  __device__ __forceinline__ Row(const ProducerOperands& s, Slots held, int64_t row)
      : s(s), held(held), row(row), blocks(s.cols / kBlock) {
    if constexpr (P == Producer::kRmsNorm) {
      const float sum = row_sum(blocks, [&](int j) { return has(j) ? squares(j) : 0.0f; });
      factor = norm_factor(sum, s.cols, s.eps);
      weights = weights_of(s, row);
    }
  }
  __device__ __forceinline__ float squares(int j) const {
    Block<T> x = load(j);
    if (held.slots) held.put(j, x);
    Values v;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = x.value(i);
    return block_squares(v);
  }
  __device__ __forceinline__ Block<Bf16> values(int j) const {
    if constexpr (P == Producer::kSiluMul) {
      return gate_block<T>(s, block(j));
    } else {
      Block<T> x = held.slots ? held.get<Block<T>>(j) : load(j);
      Block<Bf16> y;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float own[8], w[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) own[k] = x.value(8 * h + k);
        load_eight(s.b, s.b_kind, weights + col(j) + 8 * h, w);
        y.word[h] = norm_eight(own, factor, w);
      }
      return y;
    }
  }
};

// A row with one amax. Where it is found, the values are held from the maximum to the codes, or computed again.
template <class S, Producer P, class T>
__device__ __forceinline__ void quantize_row(const Row<P, T>& x, const QuantizeArgs& a, const Values16& out) {
  const bool finds = !a.amax, holds = finds && x.held.slots;
  uint32_t m = 0;
  if (finds) {
#pragma unroll 1
    for (int j = 0; x.has(j); ++j) {
      const Block<Bf16> y = x.values(j);
      out.store(y, x.block(j));
      if (holds) x.held.put(j, y);  // over what a norm held of x, by the same thread
      m = amax_bits(m, y.amax());
    }
    m = canonical_nan(block_wide_max(m));
    if (threadIdx.x == 0) a.found[x.row] = float_of(m);
  }
  const OwnScales<S> scales(finds ? float_of(m) : a.amax[x.row], a.e4m3_max);
#pragma unroll 1
  for (int j = 0; x.has(j); ++j) {
    const Block<Bf16> y = holds ? x.held.template get<Block<Bf16>>(j) : x.values(j);
    if (!finds) out.store(y, x.block(j));
    encode<S>(y, scales, a, x.block(j), [](uint32_t (&)[4]) {});
  }
}

template <class S, Producer P, class T>
__global__ void __launch_bounds__(kMostThreads)
    produce_rows_kernel(ProducerOperands s, QuantizeArgs a, Values16 out, float* factors, bool holds) {
  extern __shared__ uint4 slots[];
  __shared__ SharedScales<S> shared;  // of a matrix, if a spec has one amax for it
  int64_t matrix = -1;
  for (int64_t row = blockIdx.x; row < s.batch * s.rows; row += gridDim.x) {
    if constexpr (kQuantizes<S> && kOneAmax<S>)
      if (const int64_t own = quotient(row, s.rows); own != matrix) {
        __syncthreads();  // the last row is encoded
        matrix = own;
        shared.fill(a.amax[quotient(row, a.shape.amax.rows_per_amax)], a.e4m3_max);
        if constexpr (kStochastic<S>) shared.fill_random(a, matrix);
      }  // the sum of the row synchronises
    const Row<P, T> x(s, Slots{holds ? slots : nullptr}, row);
    if constexpr (!kQuantizes<S>) {
      if (factors && threadIdx.x == 0) factors[row] = x.factor;
      if (!out.values) continue;
#pragma unroll 1
      for (int j = 0; x.has(j); ++j) out.store(x.values(j), x.block(j));
    } else if constexpr (S::spec.amax_scope == AmaxScope::kRow) {
      quantize_row<S>(x, a, out);
    } else {
#pragma unroll 1
      for (int j = 0; x.has(j); ++j) {
        const Block<Bf16> y = x.values(j);
        out.store(y, x.block(j));
        if constexpr (kOneAmax<S>) {
          const uint64_t place = (row - matrix * s.rows) * a.stream.row_blocks + x.col(j) / kBlock;
          encode<S>(y, shared, a, x.block(j), [&](uint32_t (&bits)[4]) { shared.random(place, false, bits); });
        } else {
          encode<S>(y, OwnScales<S>(window_amax(y, a, x.block(j)), a.e4m3_max), a, x.block(j), [](uint32_t (&)[4]) {});
        }
      }
    }
  }
}

template <class S, Producer P, class T>
cudaError_t launch_rows(const ProducerOperands& s, const QuantizeArgs& a, uint16_t* values, float* factors,
                        cudaStream_t stream) {
  const auto kernel = produce_rows_kernel<S, P, T>;
  const int64_t row_blocks = s.cols / kBlock;
  // About four blocks a thread, but as many threads as fill shared scales.
  const int64_t threads = std::clamp<int64_t>(padded_blocks(row_blocks) / 4, 128, kMostThreads);
  const int64_t slots = (row_blocks + threads - 1) / threads * threads;
  const int64_t size = P == Producer::kRmsNorm ? sizeof(Block<T>) : sizeof(Block<Bf16>);
  constexpr int64_t kAlways = 40 << 10, kMost = 90 << 10;  // bytes beside the static ones; more needs asking
  int64_t bytes = P == Producer::kRmsNorm && !kQuantizes<S> && !values ? 0 : slots * size;
  if (bytes > kMost) bytes = 0;
  if (bytes > kAlways && cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              static_cast<int>(bytes)) != cudaSuccess) {
    cudaGetLastError();  // this device has less
    bytes = 0;
  }
  const int resident = static_cast<int>(std::clamp<int64_t>((200 << 10) / (bytes + 4096), 1, 1536 / threads));
  const unsigned grid = resident_grid(s.batch * s.rows, 1, resident);
  kernel<<<grid, static_cast<unsigned>(threads), static_cast<size_t>(bytes), stream>>>(s, a, Values16{values}, factors,
                                                                                       bytes != 0);
  return cudaGetLastError();
}

template <class S, class T>
cudaError_t launch_gate(const ProducerOperands& s, const QuantizeArgs& a, uint16_t* values, cudaStream_t stream) {
  Matrices matrices{1, s.batch * s.rows * (s.cols / kBlock)};
  if constexpr (kQuantizes<S>) {
    if constexpr (S::spec.amax_scope == AmaxScope::kRow)
      if (!a.amax) return launch_rows<S, Producer::kSiluMul, T>(s, a, values, nullptr, stream);
    matrices = matrices_of<S>(a.shape);
  }
  const dim3 grid = matrices.grid(grid_for(matrices.blocks, kThreads));
  gate_kernel<S, T><<<grid, kThreads, 0, stream>>>(s, a, Values16{values}, matrices);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_produce_values(const ProducerOperands& s, uint16_t* values, float* factors, cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  with_bf16_or_wide(s.a_kind, [&](auto t) {
    using T = decltype(t);
    if (s.producer == Producer::kRmsNorm)
      status = launch_rows<None, Producer::kRmsNorm, T>(s, {}, values, factors, stream);
    else
      status = launch_gate<None, T>(s, {}, values, stream);
  });
  return status;
}

cudaError_t launch_produce_rows(const ProducerOperands& s, const QuantizeArgs& args, uint16_t* values,
                                const KernelSpec& spec, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  dispatch(spec, SupportedSpecs{}, [&](auto q) {
    using S = decltype(q);
    if constexpr (S::spec.block_rows == 1)
      with_bf16_or_wide(s.a_kind, [&](auto t) {
        using T = decltype(t);
        if (s.producer == Producer::kRmsNorm)
          status = launch_rows<S, Producer::kRmsNorm, T>(s, args, values, nullptr, stream);
        else
          status = launch_gate<S, T>(s, args, values, stream);
      });
  });
  return status;
}

}  // namespace jnvfp4
