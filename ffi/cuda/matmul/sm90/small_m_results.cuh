// How the GEMM of few rows (small_m.cuh) adds the sums of warps and ranks, and stores results.
#pragma once

#include "small_m_work.cuh"

namespace jnvfp4::small_m {

// Loads from the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ float4 load_from_rank(uint32_t address, int rank) {
  float4 v;
  asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %4, %5; ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [a];}"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address), "r"(rank));
  return v;
}

// ---------------------------------------------------------------- epilogue
// Slot: the four sums that one lane has of 16 columns and 8 rows, rows 2t and 2t + 1 of columns g and g + 8.
template <Left left, class S, class ResultRows>
struct EpilogueSlot {
  static constexpr int kBiasRows = S::kResidual ? 2 : 1;

  const Args& a;
  ResultRows result_rows;
  int row, col;
  float a_amax[2], b_amax[2];
  uint32_t bias_bits[2][kBiasRows];
  float alpha[2][2], bias[2][kBiasRows];  // [column][row]

  __device__ __forceinline__ void locate(const CtaWork& work, int slot) {
    col = (work.first_group + slot / 32 / S::kRowTiles) * 16 + slot % 32 / 4;
    row = slot / 32 % S::kRowTiles * 8 + slot % 4 * 2;
  }
  // Loads amaxes and biases; rows and columns past the end get those of the last one. With a residual there are more
  // loads, and none is waited for: what is loaded is neither converted nor copied here.
  __device__ __forceinline__ void load() {
    const MatmulArgs& g = a.g;
    const int rows = result_rows.num_rows(a), cols = static_cast<int>(g.shape.cols);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = min(col + i * 8, cols - 1);
      b_amax[i] = i && !a.amax_per_col ? again(b_amax[0]) : amax_of(g.b, result_rows.matrix * cols + c);
      if constexpr (!S::kResidual)
        bias[i][0] = g.result.bias ? load_float(g.result.bias, g.result.bias_kind, c) : 0.0f;
      else if (g.result.bias)
#pragma unroll
        for (int j = 0; j < 2; ++j) bias_bits[i][j] = load_bias(min(row + j, rows - 1), c);
      if constexpr (left == Left::kNvfp4)
        a_amax[i] = i && !a.amax_per_row ? again(a_amax[0])
                                         : amax_of(g.a, result_rows.first_row(rows) + min(row + i, rows - 1));
    }
  }
  // The first amax again, which convert() does not read.
  static __device__ __forceinline__ float again(float amax) { return S::kResidual ? 0.0f : amax; }
  __device__ __forceinline__ uint32_t load_bias(int r, int c) const {
    const MatmulResult& result = a.g.result;
    const int64_t first_row = result_rows.first_row(result_rows.num_rows(a));
    const int64_t i = result.whole_bias ? (first_row + r) * a.g.shape.cols + c : c;
    const auto* p = static_cast<const uint16_t*>(result.bias);
    return result.bias_kind == Float::kF32 ? *reinterpret_cast<const uint32_t*>(p + i * 2) : p[i];
  }
  __device__ __forceinline__ float bias_of(uint32_t bits) const {
    const Float kind = a.g.result.bias_kind;
    return kind == Float::kF32 ? float_of(bits) : kind == Float::kBf16 ? float_of(bits << 16) : F16::load(bits);
  }
  // Makes what the epilogue needs of what has been loaded.
  __device__ __forceinline__ void convert() {
    const MatmulArgs& g = a.g;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if constexpr (S::kResidual) bias[i][j] = g.result.bias ? bias_of(bias_bits[i][j]) : 0.0f;
        alpha[i][j] = i && !a.amax_per_col   ? alpha[0][j]
                      : j && !a.amax_per_row ? alpha[i][0]
                      : left == Left::kNvfp4 ? alpha_w4a4(a_amax[j], b_amax[i], g.a.e4m3_max, g.b.e4m3_max)
                                             : alpha_w4a16(b_amax[i], g.b.e4m3_max);
      }
  }
  // Save the operands in shared memory while the thread needs its registers for the mainloop, and restore them.
  __device__ __forceinline__ void save(uint32_t dst) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_shared(dst + i * S::kWarps * 128, alpha[i / 2][i % 2]);
#pragma unroll
    for (int i = 0; i < 2 * kBiasRows; ++i)
      store_shared(dst + (4 + i) * S::kWarps * 128, bias[i / kBiasRows][i % kBiasRows]);
  }
  __device__ __forceinline__ void restore(uint32_t src) {
#pragma unroll
    for (int i = 0; i < 4; ++i) alpha[i / 2][i % 2] = float_of(load_shared32(src + i * S::kWarps * 128));
#pragma unroll
    for (int i = 0; i < 2 * kBiasRows; ++i)
      bias[i / kBiasRows][i % kBiasRows] = float_of(load_shared32(src + (4 + i) * S::kWarps * 128));
  }
  // Stores sums of decoded numbers. Undoing their power of two is exact, unless the result overflows as well.
  template <class T>
  __device__ __forceinline__ void store(const float (&sums)[4]) const {
    constexpr int kPower = DecodeFor<left>::kPower * (left == Left::kNvfp4 ? 2 : 1);
    const MatmulArgs& g = a.g;
    const int rows = result_rows.num_rows(a), cols = static_cast<int>(g.shape.cols);
    auto* const out = static_cast<typename T::Stored*>(g.result.out) + (result_rows.first_row(rows) + row) * cols + col;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (col + i / 2 * 8 < cols && row + i % 2 < rows)
        out[i % 2 * cols + i / 2 * 8] =
            T::store(gemm_epilogue(mul_rn(sums[i], static_cast<float>(1 << kPower)), alpha[i / 2][i % 2],
                                   bias[i / 2][i % kBiasRows], g.result.bias != nullptr));
    }
  }
  __device__ __forceinline__ void store(const float (&sums)[4]) const {
    const Float kind = a.g.result.kind;
    if (kind == Float::kBf16)
      store<Bf16>(sums);
    else if (kind == Float::kF16)
      store<F16>(sums);
    else
      store<F32>(sums);
  }
};

__device__ __forceinline__ void add(float (&sums)[4], float4 v) {
  sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
}

// Slots of a thread: those of a cluster go to ranks and then to threads round-robin.
template <class S>
struct SlotRange {
  int first, end, step;
  __device__ __forceinline__ explicit SlotRange(const CtaWork& work)
      : first(static_cast<int>(threadIdx.x) << work.log2_ranks | work.rank),
        end(work.groups * S::kRowTiles * 32),
        step(S::kWarps * 32 << work.log2_ranks) {}
};

// Loads the operands of the thread's first slot, to be called while the first columns are in flight; `between` runs
// while they are in flight themselves.
template <Left left, class S, class Work, class Between>
__device__ __forceinline__ void prefetch_epilogue(const Args& a, const Work& work, uint32_t epilogue_smem,
                                                  const Between& between) {
  const SlotRange<S> range(work);
  EpilogueSlot<left, S, typename Work::ResultRows> slot{a, work.result_rows()};
  slot.locate(work, range.first);
  if (range.first < range.end) slot.load();
  between();
  if (range.first >= range.end) return;
  slot.convert();
  slot.save(epilogue_smem + threadIdx.x * 4);
}
template <Left left, class S, class Work>
__device__ __forceinline__ void prefetch_epilogue(const Args& a, const Work& work, uint32_t epilogue_smem) {
  prefetch_epilogue<left, S>(a, work, epilogue_smem, [] {});
}

// Adds the sums of the active warps in their order.
__device__ __forceinline__ void add_warps(float (&sum)[4], uint32_t src, int pitch, int active_warps) {
#pragma unroll 8
  for (int w = 0; w < active_warps; ++w) {
    const uint4 v = load_shared128(src + w * pitch);
    add(sum, make_float4(float_of(v.x), float_of(v.y), float_of(v.z), float_of(v.w)));
  }
}

// Adds the sums of warps, then those of ranks, in their order, and stores the results.
template <Left left, class S, class Work>
__device__ __forceinline__ void run_epilogue(const Args& a, const Work& work, uint32_t epilogue_smem, uint32_t sums,
                                             int pitch, int active_warps) {
  const SlotRange<S> range(work);
  __syncthreads();
  if (work.ranks > 1) {  // each rank adds up its warps first, into the sums of its first warp
#pragma unroll 1
    for (int slot_idx = threadIdx.x; slot_idx < range.end; slot_idx += S::kWarps * 32) {
      float s[4] = {};
      add_warps(s, sums + slot_idx * 16, pitch, active_warps);
      store_shared128(sums + slot_idx * 16, {bits_of(s[0]), bits_of(s[1]), bits_of(s[2]), bits_of(s[3])});
    }
    __syncwarp();
    cluster_sync();
  }
  uint32_t bits_read = 0;  // from other CTAs
#pragma unroll 1
  for (int slot_idx = range.first; slot_idx < range.end; slot_idx += range.step) {
    float s[4] = {};
    if (work.ranks == 1) {
      add_warps(s, sums + slot_idx * 16, pitch, active_warps);
    } else {
#pragma unroll 4
      for (int r = 0; r < work.ranks; ++r) add(s, load_from_rank(sums + slot_idx * 16, r));
    }
#pragma unroll
    for (float sum : s) bits_read |= bits_of(sum);
    EpilogueSlot<left, S, typename Work::ResultRows> slot{a, work.result_rows()};
    slot.locate(work, slot_idx);
    if (slot_idx == range.first)
      slot.restore(epilogue_smem + threadIdx.x * 4);
    else
      slot.load(), slot.convert();
    slot.store(s);
  }
  if (work.ranks > 1) {  // no CTA ends while another reads its sums
    // Loads of masked slots must end too. They have when an instruction uses them, here a store to the thread's own
    // saved operands, which nobody reads any more.
    if (bits_read == ~0u) store_shared32(epilogue_smem + threadIdx.x * 4, bits_read);
    __syncwarp();
    cluster_meet();
  }
}

}  // namespace jnvfp4::small_m
