// Decode attention over an NVFP4 KV cache on Hopper: the results of segments.
//
// Warps stream chunks of 64 tokens through private rings of shared memory: a slot holds the codes, block scales and
// amaxes of K or of V of a chunk. A chunk's result (largest score, sum of weights, weighted sum of V) has references of
// its own; chunks are merged in ascending order. So it does not matter who computes a chunk: a warp takes whole
// segments, or four warps share one where there are few.
//
//   scores   A = K, 16 tokens x 16 of D: lane t of a quad owns D / 4 neighbours. B = q^T, 8 heads.
//   weights  p = 2^(x - m) sums to l in float32; P = p * amax of the V row, in float16.
//   values   A = V^T, 16 of D x 16 tokens. B = P^T, by movmatrix.
//
// V needs no transpose: words of two tokens are joined before they are decoded, so that decoding eight codes gives
// pairs (k, k + 4) that are two tokens of one element each.
#pragma once

#include <type_traits>

#include "../../../core/args.h"
#include "../../../plan/decode_attention.h"
#include "../../matmul/decode.cuh"
#include "../../matmul/sm90/launch.cuh"
#include "../../matmul/sm90/ptx.cuh"
#include "../partial.cuh"

namespace jnvfp4::attention {

constexpr int kSharers = 4;       // warps that share a segment
constexpr int kAhead = 4;         // segments that a warp has taken and not ended, at most
constexpr int kMostBatch = 512;   // sequences of a launch: their lengths are in shared memory
constexpr int kWeightPower = 14;  // P is at most 2^15, below the largest float16

// ---------------------------------------------------------------- instructions
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t m) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(m));
  return r;
}
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float load_sharedf(uint32_t a) { return float_of(load_shared32(a)); }
__device__ __forceinline__ float4 load_shared4(uint32_t a) {
  const uint4 v = load_shared128(a);
  return make_float4(float_of(v.x), float_of(v.y), float_of(v.z), float_of(v.w));
}

// Decode<F16>::eight with one instruction less: where signs and magnitudes are joined, what else the signs have is
// taken from neither. The compiler would take this for the same thing as two masks.
__device__ __forceinline__ uint32_t join(uint32_t signs, uint32_t magnitudes) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xd8;" : "=r"(r) : "r"(signs), "r"(magnitudes), "r"(0x0e0e0e0eu));
  return r;
}
__device__ __forceinline__ void decode_eight(uint32_t codes, uint32_t scale, uint32_t (&pair)[4]) {
  uint32_t signs = codes & 0x88888888u;
  asm("" : "+r"(signs));  // else its shift is computed from the codes, by two instructions more
  const uint32_t odd = join(signs, codes >> 3), even = join(signs << 4, codes << 1);
  pair[0] = multiply_halves(__byte_perm(even, 0, 0x2404), scale);
  pair[1] = multiply_halves(__byte_perm(odd, 0, 0x2404), scale);
  pair[2] = multiply_halves(even & 0xff00ff00u, scale), pair[3] = multiply_halves(odd & 0xff00ff00u, scale);
}

// ---------------------------------------------------------------- shared memory
template <int D, int kNumWarps, int kNumSlots>
struct Layout {
  static constexpr int kWarps = kNumWarps, kSlots = kNumSlots;
  static constexpr int kCodes = kChunkTokens * D / 2, kScales = kChunkTokens * D / 16, kAmaxes = kChunkTokens * 4;
  static constexpr int kScalesAt = kCodes, kAmaxesAt = kCodes + kScales;
  static constexpr int kSlot = kCodes + kScales + kAmaxes;
  static constexpr int kSums = 32 * D;  // of the 8 x D accumulators of a warp, in bytes
  static constexpr int kSumsAt = kWarps * kSlots * kSlot;
  static constexpr int kBytes = kSumsAt + kWarps * kSums;
};

// ---------------------------------------------------------------- items
// A segment of a sequence and kv head, for up to 8 of its query heads: their octet. Without tokens it is none.
struct Item {
  int sequence, row, octet, segment, first, tokens;  // row: sequence * kv_heads + kv head; first: of its tokens
  __device__ __forceinline__ int chunks() const { return (tokens + kChunkTokens - 1) / kChunkTokens; }
};

// All items of a launch. CTAs divide them evenly. A CTA's warps take whole items in turn, as many each; what is left
// over is shared, an item by four warps, if that ends sooner.
struct Work {
  int first_of[kMostBatch + 1];  // items before each sequence
  int length_of[kMostBatch];
  int next;  // that a warp takes whole, counted in the CTA

  // By one warp.
  __device__ __forceinline__ void fill(const Args& a, int lane) {
    int sum = 0;
    for (int b0 = 0; b0 < a.batch; b0 += 32) {
      const bool there = b0 + lane < a.batch;
      const int length = there ? a.length(b0 + lane) : 0;
      int n = num_segments(length) * a.kv_heads * a.octets();
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int before = __shfl_up_sync(~0u, n, d);
        if (lane >= d) n += before;
      }
      if (there) length_of[b0 + lane] = length, first_of[b0 + lane + 1] = sum + n;
      sum += __shfl_sync(~0u, n, 31);
    }
    if (lane == 0) first_of[0] = 0, next = 0;
  }

  __device__ __forceinline__ Item open(const Args& a, int item) const {
    int low = 0, high = a.batch;  // the last sequence with first_of <= item
    while (high - low > 1) {
      const int mid = (low + high) / 2;
      if (first_of[mid] <= item)
        low = mid;
      else
        high = mid;
    }
    const int length = length_of[low], each = segment_tokens(length), n = (length + each - 1) / each;
    int rest = item - first_of[low];
    Item i{};
    i.sequence = low;
    i.octet = rest % a.octets(), rest /= a.octets();
    i.row = low * a.kv_heads + rest / n, i.segment = rest % n;
    i.first = i.segment * each, i.tokens = min(each, length - i.first);
    return i;
  }
};

// The items of a CTA: [begin, shared) are taken whole, [shared, end) are shared.
template <int kWarps>
struct Items {
  int begin, shared, end;

  __device__ __forceinline__ Items(const Args& a, const Work& work) {
    const int total = work.first_of[a.batch];
    begin = static_cast<int>(int64_t{total} * blockIdx.x / gridDim.x);
    end = static_cast<int>(int64_t{total} * (blockIdx.x + 1) / gridDim.x);
    const int over = a.share_most < kWarps ? (end - begin) % kWarps : end - begin;
    shared = over > a.share_most ? end : end - over;
  }
  // Number `count` of those that four warps share.
  __device__ __forceinline__ Item shared_item(const Args& a, const Work& work, int warp, int count) const {
    const int number = shared + warp / kSharers + count * (kWarps / kSharers);
    return number < end ? work.open(a, number) : Item{};
  }
};

// Chunks of an item that are a warp's: rank, rank + step, ...
struct Turns {
  int rank, step;
  __device__ __forceinline__ Turns(bool shared, int warp)
      : rank(shared ? warp % kSharers : 0), step(shared ? kSharers : 1) {}
};

// ---------------------------------------------------------------- copies
// Copies chunks to the slots of a warp, in the order in which it computes them. Lanes 0 to 2 copy codes, scales and
// amaxes of K, 3 to 5 those of V.
template <bool kPaged, class L>
struct Copies {
  const Args& a;
  Work& work;
  const Items<L::kWarps>& items;
  Item* queue;  // of this warp: the last kAhead items that it has taken
  uint32_t slots, bars;
  int lane, warp;

  const uint8_t* base;
  int bytes, offset;     // of a copy; in the slot
  bool sharing = false;  // whether the item is shared; then all that follow are
  int taken = 0;         // items of this kind
  int left = 0;          // chunks of the last of them
  int chunk = 0;         // the next, over the whole cache
  int head = 0;          // kv head
  const int32_t* page = nullptr;

  __device__ __forceinline__ void start() {
    const int part = lane % 3;
    const KvRows& rows = lane < 3 ? a.k : a.v;
    base = part == 0 ? rows.data : part == 1 ? rows.scale : reinterpret_cast<const uint8_t*>(rows.amax);
    bytes = part == 0 ? L::kCodes : part == 1 ? L::kScales : L::kAmaxes;
    offset = part == 0 ? 0 : part == 1 ? L::kScalesAt : L::kAmaxesAt;
    take();
#pragma unroll
    for (int s = 0; s < L::kSlots; s += 2) {
      copy<false>(s);
      if (s + 1 < L::kSlots) copy<true>(s + 1);
    }
  }

  // K or V of the next chunk. After V comes another chunk.
  template <bool kV>
  __device__ __forceinline__ void copy(int slot) {
    if (left == 0) return;
    if (lane / 3 == kV) {
      barrier_expect(bars + slot * 8, bytes);
      load_bytes(slots + slot * L::kSlot + offset, base + int64_t{chunk} * bytes, bytes, bars + slot * 8);
    }
    if constexpr (kV) {
      if (--left == 0) return take();
      if constexpr (kPaged)
        page += Turns(sharing, warp).step, chunk = chunk_of_page();
      else
        chunk += Turns(sharing, warp).step;
    }
  }

 private:
  // Takes the next item of which this warp has chunks.
  __device__ __forceinline__ void take() {
    while (left == 0) {
      Item item{};
      if (!sharing) {
        item = take_whole();
        if (item.tokens == 0) sharing = true, taken = 0;
      }
      if (sharing) item = items.shared_item(a, work, warp, taken);
      ++taken;
      if (item.tokens == 0) return;
      const Turns turns(sharing, warp);
      left = (item.chunks() - turns.rank + turns.step - 1) / turns.step;
      const int first = item.first / kChunkTokens + turns.rank;
      if constexpr (kPaged) {
        head = item.row % a.kv_heads, page = a.pages + int64_t{item.sequence} * (a.tokens / kChunkTokens) + first;
        if (left) chunk = chunk_of_page();
      } else {
        chunk = item.row * (a.tokens / kChunkTokens) + first;
      }
    }
  }
  __device__ __forceinline__ Item take_whole() {
    int number = 0;
    if (lane == 0) number = items.begin + atomicAdd(&work.next, 1);
    number = __shfl_sync(~0u, number, 0);
    const Item item = number < items.shared ? work.open(a, number) : Item{};
    if (lane == 0) queue[taken % kAhead] = item;
    return item;
  }
  __device__ __forceinline__ int chunk_of_page() const {
    return min(max(__ldg(page), 0), a.num_pages - 1) * a.kv_heads + head;
  }
};

// ---------------------------------------------------------------- merging
// Two numbers of a lane are of query heads 2t and 2t + 1.
struct State {
  float m[2], v[2], l[2];  // references of scores and of sums; sum of weights
};

// Merges `next` into `state`: the factors of the sums of both.
__device__ __forceinline__ void merge(State& state, const State& next, float (&keep)[2], float (&add)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float m = fmaxf(state.m[i], next.m[i]), v = fmaxf(state.v[i], next.v[i]);
    state.l[i] = __fmaf_rn(next.l[i], exp2_approx(next.m[i] - m), state.l[i] * exp2_approx(state.m[i] - m));
    keep[i] = exp2_approx(state.v[i] - v), add[i] = exp2_approx(next.v[i] - v);
    state.m[i] = m, state.v[i] = v;
  }
}
__device__ __forceinline__ float4 merged(float4 sum, float4 next, const float (&keep)[2], const float (&add)[2]) {
  return make_float4(__fmaf_rn(next.x, add[0], sum.x * keep[0]), __fmaf_rn(next.y, add[1], sum.y * keep[1]),
                     __fmaf_rn(next.z, add[0], sum.z * keep[0]), __fmaf_rn(next.w, add[1], sum.w * keep[1]));
}

// Which of 8 tokens is row g of a tile of K. Neighbouring quads then read V rows of both parities: fewer bank
// conflicts.
__device__ __forceinline__ int token_of(int g) { return g ^ (g >> 1 & 1); }

template <int D>
struct Query {
  uint32_t pair[D / 32][4];  // B operands of D / 16 steps
  float factor[2];           // of scores of heads 2t and 2t + 1, but for the amax of K

  __device__ __forceinline__ void load(const Args& a, const Item& item, int g, int t) {
    const int head = item.octet * 8 + g;
    const bool there = head < a.group;
    const int64_t at = (int64_t{item.row} * a.group + head) * D + t * (D / 4);
    float f[D / 4], big = 0.0f;
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (there) v = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.q) + at) + c);
#pragma unroll
      for (int i = 0; i < 8; ++i) f[c * 8 + i] = element(a, (&v.x)[i / 2], i % 2);
    }
#pragma unroll
    for (int i = 0; i < D / 4; ++i) big = fmaxf(big, fabsf(f[i]));
    big = fmaxf(big, __shfl_xor_sync(~0u, big, 1)), big = fmaxf(big, __shfl_xor_sync(~0u, big, 2));
    // 2^(14 - e) brings the largest into [2^14, 2^15): bfloat16 is then exact in float16 down to 2^-31 of it.
    const int e = max(static_cast<int>(bits_of(big) >> 23), 20) - 127;
    const float up = float_of(static_cast<uint32_t>(14 - e + 127) << 23),
                down = float_of(static_cast<uint32_t>(e + 127) << 23);
#pragma unroll
    for (int c = 0; c < D / 32; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) pair[c][i] = f16_pair(f[c * 8 + i] * up, f[c * 8 + i + 4] * up);
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = __shfl_sync(~0u, down, t * 8 + 4 * i) * a.score_factor;
  }
  static __device__ __forceinline__ float element(const Args& a, uint32_t two, bool high) {
    return a.f16 ? half_of<F16>(two, high) : half_of<Bf16>(two, high);
  }
};

// Scores of a chunk: x[s][i] of token 16 s + token_of(g) + 8 (i / 2) and head 2t + i % 2, in powers of two.
template <int D, class L>
__device__ __forceinline__ void scores(uint32_t slot, const Query<D>& q, int g, int t, float (&x)[4][4]) {
  constexpr int kRow = D / 2, kScaleRow = D / 16, kWords = D / 32;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const int token = s * 16 + token_of(g);
    const uint32_t row = slot + token * kRow + t * (D / 8),
                   scale = slot + L::kScalesAt + token * kScaleRow + t * (D / 64);
    uint32_t w0[kWords], w1[kWords], s0[kWords / 2], s1[kWords / 2];
    if constexpr (D == 128) {
      const uint4 u = load_shared128(row), v = load_shared128(row + 8 * kRow);
      w0[0] = u.x, w0[1] = u.y, w0[2] = u.z, w0[3] = u.w, w1[0] = v.x, w1[1] = v.y, w1[2] = v.z, w1[3] = v.w;
      Decode<F16>::scales(load_shared<uint16_t>(scale), s0[0], s0[1]);
      Decode<F16>::scales(load_shared<uint16_t>(scale + 8 * kScaleRow), s1[0], s1[1]);
    } else {
      const uint2 u = load_shared64(row), v = load_shared64(row + 8 * kRow);
      w0[0] = u.x, w0[1] = u.y, w1[0] = v.x, w1[1] = v.y;
      Decode<F16>::scales(load_shared8(scale) | load_shared8(scale + 8 * kScaleRow) << 8, s0[0], s1[0]);
    }
    float d[2][4] = {};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t p0[4], p1[4];
      decode_eight(w0[i], s0[i / 2], p0), decode_eight(w1[i], s1[i / 2], p1);
      mma(d[0], p0[0], p1[0], p0[1], p1[1], q.pair[i][0], q.pair[i][1]);
      mma(d[1], p0[2], p1[2], p0[3], p1[3], q.pair[i][2], q.pair[i][3]);
    }
    const uint32_t amax = slot + L::kAmaxesAt + token * 4;
    const float a0 = load_sharedf(amax), a1 = load_sharedf(amax + 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[s][i] = (d[0][i] + d[1][i]) * ((i < 2 ? a0 : a1) * q.factor[i % 2]);
  }
}

// Hides the scores of tokens that are not there.
__device__ __forceinline__ void hide_behind(int left, int g, float (&x)[4][4]) {
#pragma unroll
  for (int s = 0; s < 4; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (s * 16 + token_of(g) + i / 2 * 8 >= left) x[s][i] = -INFINITY;
}

// Makes the V of tokens that are not there zero: it may be NaN.
template <int D, class L>
__device__ __forceinline__ void clear_behind(uint32_t slot, int left, int lane) {
  for (int token = lane; token < kChunkTokens; token += 32) {
    if (token < left) continue;
    store_shared(slot + L::kAmaxesAt + token * 4, 0.0f);
    for (int i = 0; i < D / 64; ++i) store_shared(slot + L::kScalesAt + token * (D / 16) + 4 * i, 0.0f);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before the copy that comes next to the slot
  __syncwarp();
}

// From scores to weights, as B operands of the values. Returns v - m of `state`.
template <class L>
__device__ __forceinline__ float weights(uint32_t slot, int lane, const float (&x)[4][4], State& state,
                                         uint32_t (&b)[4][2]) {
  const int g = lane / 4;
  const uint2 both = load_shared64(slot + L::kAmaxesAt + lane * 8);
  const uint32_t mine = max(both.x & kMagnitude, both.y & kMagnitude);
  const int e = bounded_exponent(__reduce_max_sync(~0u, mine));
  const float up = float_of(static_cast<uint32_t>(kWeightPower - e + 127) << 23);
#pragma unroll
  for (int i = 0; i < 2; ++i) state.v[i] = state.m[i] + static_cast<float>(e), state.l[i] = 0.0f;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const int token = s * 16 + token_of(g);
    const uint32_t amax = slot + L::kAmaxesAt + token * 4;
    const float a[2] = {load_sharedf(amax) * up, load_sharedf(amax + 32) * up};
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[i] = exp2_approx(x[s][i] - state.m[i % 2]);
      state.l[i % 2] += p[i];
      p[i] *= a[i / 2];
    }
    b[s][0] = transpose_matrix(f16_pair(p[0], p[1])), b[s][1] = transpose_matrix(f16_pair(p[2], p[3]));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int d = 4; d < 32; d *= 2) state.l[i] += __shfl_xor_sync(~0u, state.l[i], d);
  return static_cast<float>(e);
}

// acc[j]: elements g * D / 8 + 2j and the next, of heads 2t and 2t + 1: (2j, 2t), (2j, 2t + 1), (2j + 1, 2t), ...
template <int D, class L>
__device__ __forceinline__ void values(uint32_t slot, int g, int t, const uint32_t (&b)[4][2],
                                       float (&acc)[D / 16][4]) {
  constexpr int kRow = D / 2, kScaleRow = D / 16;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const int token[2] = {s * 16 + token_of(2 * t), s * 16 + token_of(2 * t + 1)};
    uint32_t w[4][D / 64], c[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int at = token[k % 2] + k / 2 * 8;
      const uint32_t row = slot + at * kRow + g * (D / 16);
      if constexpr (D == 128) {
        const uint2 v = load_shared64(row);
        w[k][0] = v.x, w[k][1] = v.y;
      } else {
        w[k][0] = load_shared32(row);
      }
      c[k] = load_shared8(slot + L::kScalesAt + at * kScaleRow + g * (D / 16) / 8);
    }
    uint32_t scale[2];  // each of two tokens
#pragma unroll
    for (int k = 0; k < 2; ++k)
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(scale[k]) : "h"(static_cast<uint16_t>(c[2 * k] | c[2 * k + 1] << 8)));
#pragma unroll
    for (int i = 0; i < D / 64; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t select = half ? 0x7632 : 0x5410;
        uint32_t p0[4], p1[4];
        decode_eight(__byte_perm(w[0][i], w[1][i], select), scale[0], p0);
        decode_eight(__byte_perm(w[2][i], w[3][i], select), scale[1], p1);
        mma(acc[i * 4 + half * 2], p0[0], p0[1], p1[0], p1[1], b[s][0], b[s][1]);
        mma(acc[i * 4 + half * 2 + 1], p0[2], p0[3], p1[2], p1[3], b[s][0], b[s][1]);
      }
  }
}

// The references of a chunk's scores: the largest, rounded up to an integer.
__device__ __forceinline__ void refer(const float (&x)[4][4], float (&m)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float most = fmaxf(x[0][i], x[0][2 + i]);
#pragma unroll
    for (int s = 1; s < 4; ++s) most = fmaxf(most, fmaxf(x[s][i], x[s][2 + i]));
#pragma unroll
    for (int d = 4; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    m[i] = ceilf(most);
  }
}

// What warps that share a segment tell each other of their chunks, beside the sums.
struct Told {
  float4 heads[4];  // m, l of head 2t and of head 2t + 1
  float exponent;   // v - m
};

// Merges the chunks of four warps in ascending order into `state`, and a part of their sums into `unit`, if it is
// `mine`: `part` is where the first warp has it. `first`: there was no chunk before.
template <class L>
__device__ __forceinline__ void merge_shared(const Told* told, uint32_t part, int chunks, bool first, bool mine, int t,
                                             State& state, float4 (&unit)[2]) {
#pragma unroll 1
  for (int k = 0; k < chunks; ++k, first = false) {
    const float4 h = told[k].heads[t];
    const float e = told[k].exponent;
    const State next{{h.x, h.z}, {h.x + e, h.z + e}, {h.y, h.w}};
    float keep[2], add[2];
    if (first)
      state = next;
    else
      merge(state, next, keep, add);
    if (!mine) continue;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 sum = load_shared4(part + k * L::kSums + j * 512);
      unit[j] = first ? sum : merged(unit[j], sum, keep, add);
    }
  }
}

// Merges a chunk of an item that a warp has alone into `state`, and its sums `acc` into those at `sums`, where they are
// between chunks; the last chunk stores the sums of the segment.
template <int D>
__device__ __forceinline__ void add_whole(const Args& a, const Item& item, int64_t at, int lane, uint32_t sums,
                                          int chunk, const State& next, const float (&acc)[D / 16][4], State& state) {
  const bool first = chunk == 0, last = chunk + 1 == item.chunks();
  float keep[2], add[2];
  if (first)
    state = next;
  else
    merge(state, next, keep, add);
  float4 sum[D / 16];
#pragma unroll
  for (int j = 0; j < D / 16; ++j) {
    sum[j] = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
    if (!first) sum[j] = merged(load_shared4(sums + j * 512), sum[j], keep, add);
    if (!last) store_shared128(sums + j * 512, sum[j]);
  }
  if (last)
#pragma unroll
    for (int j = 0; j < D / 32; ++j)
      store_sums<D>(a, at, item.octet, lane / 4, lane % 4, j, sum[2 * j], sum[2 * j + 1]);
}

// Does the same for up to four chunks from `first` on, of as many warps, one of which is this warp's if `there`: they
// tell each other m, l and sums, and each merges two tiles of the sums. Between chunks a warp's part of the sums so far
// is where its own sums of that part were, which only it reads.
template <int D, class L>
__device__ __forceinline__ void add_shared(const Args& a, const Item& item, int64_t at, int lane, int warp,
                                           uint32_t sums, Told* told, int first, bool there, float exponent,
                                           const State& next, const float (&acc)[D / 16][4], State& state) {
  const int g = lane / 4, t = lane % 4, rank = warp % kSharers, chunks = item.chunks();
  float4 unit[2];
  const bool mine = rank < D / 32;
  const uint32_t part = sums + rank * 1024;
  if (mine && first != 0) unit[0] = load_shared4(part), unit[1] = load_shared4(part + 512);
  if (there) {
#pragma unroll
    for (int j = 0; j < D / 16; ++j)
      store_shared128(sums + j * 512, make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]));
    if (g == 0) told[warp].heads[t] = make_float4(next.m[0], next.l[0], next.m[1], next.l[1]);
    if (lane == 0) told[warp].exponent = exponent;
  }
  named_meet(1 + warp / kSharers, kSharers * 32);
  merge_shared<L>(told + warp - rank, part - rank * L::kSums, min(kSharers, chunks - first), first == 0, mine, t, state,
                  unit);
  named_meet(1 + warp / kSharers, kSharers * 32);
  if (!mine) return;
  if (first + kSharers < chunks)
    store_shared128(part, unit[0]), store_shared128(part + 512, unit[1]);
  else
    store_sums<D>(a, at, item.octet, g, t, rank, unit[0], unit[1]);
}

// ---------------------------------------------------------------- the kernel
template <int D, bool kPaged, int kWarps, int kSlots>
__global__ void __launch_bounds__(kWarps * 32, 1) attend_kernel(const __grid_constant__ Args a) {
  using L = Layout<D, kWarps, kSlots>;
  static_assert(kSlots / 2 + 1 <= kAhead, "the queue holds what the slots are ahead");
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Work work;
  __shared__ Item queue[kWarps][kAhead];
  __shared__ __align__(8) uint64_t all_bars[kWarps * kSlots];
  __shared__ Told told[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const uint32_t slots = shared_address(shared) + warp * kSlots * L::kSlot;
  const uint32_t sums = shared_address(shared) + L::kSumsAt + warp * L::kSums + lane * 16;  // tiles are 512 bytes apart
  const uint32_t bars = shared_address(&all_bars[warp * kSlots]);
  if (lane < kSlots) barrier_init(bars + lane * 8, 3);
  fence_barrier_init();
  wait_for_previous_kernel();
  if (warp == 0) work.fill(a, lane);
  __syncthreads();
  launch_dependents();  // not earlier: combine_kernel reads lengths before it waits
  const Items<kWarps> items(a, work);
  Copies<kPaged, L> copies{a, work, items, queue[warp], slots, bars, lane, warp};
  copies.start();

  int slot = 0, parity = 0;
  // Gives the slot of K or V to the copy of the half that is kSlots ahead.
  const auto release = [&](auto is_v) {
    constexpr bool kV = decltype(is_v)::value;
    __syncwarp();
    copies.template copy<(kV + kSlots) % 2 == 1>(slot);
    slot = slot + 1 == kSlots ? 0 : slot + 1;
    if (slot == 0) parity ^= 1;
  };
  Query<D> q;
  int have = -1;  // whose q that is
  bool sharing = false;
#pragma unroll 1
  for (int count = 0;; ++count) {
    __syncwarp();  // the queue is written
    const Item item = sharing ? items.shared_item(a, work, warp, count) : queue[warp][count % kAhead];
    if (item.tokens == 0) {
      if (sharing) break;
      sharing = true, count = -1;
      continue;
    }
    const Turns turns(sharing, warp);
    const int whose = item.row * a.octets() + item.octet;
    if (have != whose) have = whose, q.load(a, item, g, t);
    const int64_t at = (int64_t{item.row} * a.max_segments + item.segment) * a.group + item.octet * 8;
    const int chunks = item.chunks();
    State state;
#pragma unroll 1
    for (int first = 0; first < chunks; first += turns.step) {
      const int chunk = first + turns.rank, left = item.tokens - chunk * kChunkTokens;
      float acc[D / 16][4] = {}, e = 0.0f;
      State next;
      if (left > 0) {
        float x[4][4];
        uint32_t b[4][2];
        barrier_wait(bars + slot * 8, parity);
        scores<D, L>(slots + slot * L::kSlot, q, g, t, x);
        release(std::false_type{});
        if (left < kChunkTokens) hide_behind(left, g, x);
        refer(x, next.m);
        barrier_wait(bars + slot * 8, parity);
        if (left < kChunkTokens) clear_behind<D, L>(slots + slot * L::kSlot, left, lane);
        e = weights<L>(slots + slot * L::kSlot, lane, x, next, b);
        values<D, L>(slots + slot * L::kSlot, g, t, b, acc);
        release(std::true_type{});
      }
      if (!sharing)
        add_whole<D>(a, item, at, lane, sums, first, next, acc, state);
      else
        add_shared<D, L>(a, item, at, lane, warp, sums, told, first, left > 0, e, next, acc, state);
    }
    if (g == 0 && turns.rank == 0) store_heads(a, at, item.octet, t, state.m, state.l, state.v);
  }
}

// ---------------------------------------------------------------- launch
template <int D, bool kPaged, int kWarps, int kSlots>
cudaError_t launch_attend(const Args& a, cudaStream_t stream, int blocks) {
  return launch_early(attend_kernel<D, kPaged, kWarps, kSlots>, dim3(blocks), kWarps * 32, 1,
                      Layout<D, kWarps, kSlots>::kBytes, stream, a);
}

}  // namespace jnvfp4::attention
