// What the products of few rows share on Hopper (sm_90a): out = epilogue(a b^T), a of at most 64 rows, b NVFP4.
//
// b, which is nearly all of the bytes, is on the side of the MMA that has 16 or 64 rows, and is decoded in registers
// from the layout in which it is stored. The order of k inside an MMA is free as long as both operands agree: lane t of
// each four owns 32 neighbouring k, so that one load of 16 bytes feeds eight k16 steps and needs two scales. Decoding
// emits the pairs (k, k + 4) of each 8, and the rows of a are permuted likewise.
//
// Every q * s is exact in bfloat16 and float16 times a power of two, which the end takes back. Sums are float32 in an
// order that depends only on the shape and the device: K is split over warps and over the thread blocks of a cluster,
// whose sums are added in their order. No atomics, no scratch.
#pragma once

#include "../device.cuh"
#include "../kernels.h"

namespace jnvfp4::small_m {

using Left = MatmulProblem::Left;

struct Args {
  MatmulArgs g;
  int64_t first;  // the matrix of blockIdx.z == 0
  int tiles;      // into which the columns of the result are divided
};

// ---------------------------------------------------------------- PTX
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void copy8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from));
}
// The same, or zeros. `from` is valid either way.
__device__ __forceinline__ void copy16_or_zero(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}
__device__ __forceinline__ void copy8_or_zero(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(there ? 8 : 0));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

__device__ __forceinline__ int cluster_rank() {
  int r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ int cluster_size() {
  int r;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
}
// Of all threads of a cluster; one thread block needs no more than __syncthreads.
__device__ __forceinline__ void sync_ranks(int ranks) {
  __syncwarp();
  if (ranks > 1)
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  else
    __syncthreads();
}
// From the shared memory of the thread block `rank` of the cluster.
__device__ __forceinline__ float4 load_from_rank(uint32_t address, int rank) {
  float4 v;
  asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %4, %5; ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [a];}"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address), "r"(rank));
  return v;
}

__device__ __forceinline__ uint4 load_shared16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ __forceinline__ uint32_t load_shared4(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ uint32_t load_shared2(uint32_t at) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ void store_shared16(uint32_t at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared4(uint32_t at, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
// Stays where it is written: the compiler would move it down to its use.
__device__ __forceinline__ uint4 load_global16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// ---------------------------------------------------------------- exact decode
// 16-bit values q * s * 2^-kPower: float16, with a left operand that is float16 or NVFP4.
template <Left left>
struct Decode {
  static constexpr int kPower = 14;
  static constexpr bool kBf16 = false;
  // Two E4M3 bytes to two words with the scale in both halves. NaN stays NaN.
  static __device__ __forceinline__ void scales(uint32_t two, uint32_t& s0, uint32_t& s1) {
    uint32_t h;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(static_cast<uint16_t>(two)));
    s0 = __byte_perm(h, 0, 0x1010), s1 = __byte_perm(h, 0, 0x3232);
  }
  // Eight codes to the pairs (k0,k4) (k1,k5) (k2,k6) (k3,k7), times the scale.
  static __device__ __forceinline__ void eight(uint32_t codes, uint32_t scale, uint32_t (&pair)[4]) {
    // The high bytes of float16(q) * 2^-14, of odd and of even k.
    const uint32_t odd = (codes & 0x80808080u) | (codes >> 3 & 0x0e0e0e0eu);
    const uint32_t even = (codes << 4 & 0x80808080u) | (codes << 1 & 0x0e0e0e0eu);
    const uint32_t raw[4] = {__byte_perm(even, 0, 0x2404), __byte_perm(odd, 0, 0x2404), even & 0xff00ff00u,
                             odd & 0xff00ff00u};
#pragma unroll
    for (int i = 0; i < 4; ++i) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair[i]) : "r"(raw[i]), "r"(scale));
  }
};

template <>
struct Decode<Left::kBf16> {
  static constexpr int kPower = 8;
  static constexpr bool kBf16 = true;
  static __device__ __forceinline__ void scales(uint32_t two, uint32_t& s0, uint32_t& s1) {
    uint32_t h;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(static_cast<uint16_t>(two)));
    const float a = low_half<F16>(h) * 0x1p118f, b = high_half<F16>(h) * 0x1p118f;
    s0 = bf16_pair(a, a), s1 = bf16_pair(b, b);
  }
  static __device__ __forceinline__ void eight(uint32_t codes, uint32_t scale, uint32_t (&pair)[4]) {
    // One multiplication puts the sign at bit 15 and the magnitude at bits 8 to 6: bfloat16(q) * 2^-126.
    const uint32_t high = codes >> 8;
    const uint32_t raw[4] = {
        (codes & 0x000f000fu) * 0x1040u & 0x81c081c0u, (codes & 0x00f000f0u) * 0x0104u & 0x81c081c0u,
        (high & 0x000f000fu) * 0x1040u & 0x81c081c0u, (high & 0x00f000f0u) * 0x0104u & 0x81c081c0u};
#pragma unroll
    for (int i = 0; i < 4; ++i) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair[i]) : "r"(raw[i]), "r"(scale));
  }
};

// Eight 16-bit elements to the same pairs.
__device__ __forceinline__ void permute8(uint4 v, uint32_t (&pair)[4]) {
  pair[0] = __byte_perm(v.x, v.z, 0x5410), pair[1] = __byte_perm(v.x, v.z, 0x7632);
  pair[2] = __byte_perm(v.y, v.w, 0x5410), pair[3] = __byte_perm(v.y, v.w, 0x7632);
}

// ---------------------------------------------------------------- the share of a thread block
// Thread blocks go along the columns of the result, which are the rows of b, in groups of 16. The thread blocks of a
// cluster have the same columns and share K.
struct Share {
  int ranks, rank, most, groups, group0;
  int64_t matrix;

  __device__ __forceinline__ explicit Share(const Args& a) : ranks(cluster_size()), rank(cluster_rank()) {
    const int tile = blockIdx.x / ranks, all = (static_cast<int>(a.g.shape.cols) + 15) / 16;
    const int few = all / a.tiles, more = all % a.tiles;
    most = few + (more != 0), groups = few + (tile < more), group0 = tile * few + min(tile, more);
    matrix = a.first + blockIdx.z;
  }
  // The first of the `units` of K of a rank.
  __device__ __forceinline__ int unit(int units, int of_rank) const { return units * of_rank / ranks; }
};

// ---------------------------------------------------------------- the end
__device__ __forceinline__ float amax_of(const MatmulOperand& x, int64_t row) {
  return __ldg(x.amax + (x.map.rows_per_amax == 1 ? row : quotient(row, x.map.rows_per_amax)));
}

template <Left left>
__device__ __forceinline__ float amax_of_row(const MatmulArgs& g, int64_t row) {
  return left == Left::kNvfp4 ? amax_of(g.a, row) : 1.0f;
}

__device__ __forceinline__ uint32_t encode16(Float kind, float v) {
  return kind == Float::kBf16 ? bf16_encode(v) : f16_encode(v);
}
__device__ __forceinline__ void store_result(const MatmulResult& r, int64_t i, float v) {
  if (r.kind == Float::kF32)
    static_cast<uint32_t*>(r.out)[i] = bits_of(f32_encode(v));
  else
    static_cast<uint16_t*>(r.out)[i] = static_cast<uint16_t>(encode16(r.kind, v));
}
// The address is a multiple of the four elements' size.
__device__ __forceinline__ void store_results(const MatmulResult& r, int64_t i, const float (&v)[4]) {
  if (r.kind == Float::kF32)
    *reinterpret_cast<uint4*>(static_cast<uint32_t*>(r.out) + i) = make_uint4(
        bits_of(f32_encode(v[0])), bits_of(f32_encode(v[1])), bits_of(f32_encode(v[2])), bits_of(f32_encode(v[3])));
  else
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(r.out) + i) = make_uint2(
        encode16(r.kind, v[0]) | encode16(r.kind, v[1]) << 16, encode16(r.kind, v[2]) | encode16(r.kind, v[3]) << 16);
}

// What the outputs of kCols columns have in common. Columns that do not exist are not read.
template <Left left, int kCols>
struct Columns {
  float amax[kCols], bias[kCols];

  // The columns col, col + step ...
  __device__ __forceinline__ void load(const MatmulArgs& g, int64_t matrix, int col, int step) {
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
      amax[i] = 0.0f, bias[i] = 0.0f;
      const int n = col + i * step;
      if (n >= g.shape.cols) continue;
      amax[i] = amax_of(g.b, matrix * g.shape.cols + n);
      if (g.result.bias) bias[i] = load_float(g.result.bias, g.result.bias_kind, n);
    }
  }
  __device__ __forceinline__ float alpha(const MatmulArgs& g, int i, float a_amax) const {
    return left == Left::kNvfp4 ? alpha_w4a4(a_amax, amax[i], g.a.e4m3_max, g.b.e4m3_max)
                                : alpha_w4a16(amax[i], g.b.e4m3_max);
  }
  // From a sum of decoded products. Undoing their power of two is exact, unless the product overflows as well.
  __device__ __forceinline__ float finish(const MatmulArgs& g, float sum, int i, float alpha) const {
    constexpr int kPower = Decode<left>::kPower * (left == Left::kNvfp4 ? 2 : 1);
    return gemm_epilogue(mul_rn(sum, static_cast<float>(1 << kPower)), alpha, bias[i], g.result.bias != nullptr);
  }
  // Four neighbouring columns of one row, of which `there` exist.
  __device__ __forceinline__ void store_four(const MatmulArgs& g, float4 sum, float a_amax, int64_t at,
                                             int there) const {
    const bool each = g.b.map.rows_per_amax == 1;
    const float s[4] = {sum.x, sum.y, sum.z, sum.w};
    float v[4], factor = alpha(g, 0, a_amax);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i && each) factor = alpha(g, i, a_amax);
      v[i] = finish(g, s[i], i, factor);
    }
    if (g.shape.cols % 4 == 0) {
      if (there > 0) store_results(g.result, at, v);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < there) store_result(g.result, at + i, v[i]);
  }
};

// ---------------------------------------------------------------- launches
constexpr int kMostShared = 227 << 10;  // bytes that a thread block of Hopper may have

// Into how many tiles to divide `groups` groups of columns: at most `most` groups each, and as few as fill every
// multiprocessor equally often. `others` thread blocks have the same columns.
inline int tiles_of(int groups, int most, int64_t others) {
  const int64_t least = (groups + most - 1) / most, processors = multiprocessors();
  const int64_t waves = (least * others + processors - 1) / processors;
  return static_cast<int>(std::min<int64_t>(groups, std::max(least, waves * processors / others)));
}

// Clusters of `ranks` thread blocks for each of a.tiles x row_tiles x batch. The grid's last axis may have 65535.
inline cudaError_t launch_clusters(void (*kernel)(Args), Args a, int ranks, int row_tiles, int threads, int bytes,
                                   cudaStream_t stream) {
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(ranks), cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(static_cast<unsigned>(threads)), config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream, config.attrs = &cluster, config.numAttrs = ranks > 1;
  constexpr int64_t kMost = 65535;
  for (a.first = 0; a.first < a.g.shape.batch && status == cudaSuccess; a.first += kMost) {
    const auto matrices = static_cast<unsigned>(std::min(a.g.shape.batch - a.first, kMost));
    config.gridDim = dim3(static_cast<unsigned>(a.tiles * ranks), static_cast<unsigned>(row_tiles), matrices);
    status = cudaLaunchKernelEx(&config, kernel, a);
  }
  if (status != cudaSuccess) cudaGetLastError();  // it is returned, and not to be found by the next launch
  return status;
}

// One for each algorithm and type of the left operand, so that they compile side by side. `launch_mma` takes any K and
// 16 rows at a time, `launch_wgmma` K that is a multiple of 256 and up to 64 rows.
template <Left left>
cudaError_t launch_mma(const MatmulArgs& g, cudaStream_t stream);
template <Left left>
cudaError_t launch_wgmma(const MatmulArgs& g, cudaStream_t stream);

}  // namespace jnvfp4::small_m
