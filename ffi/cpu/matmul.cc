// matmul on the CPU, and groups of it, in the pinned order of docs/numerics.md: blocks of 16 ascending along K for two
// NVFP4 operands, single k ascending for a 16-bit left operand.
//
// Columns of the output are vector lanes, so the order along K is that of the rule whatever the vector
// width. A panel of the right operand is unpacked once and used by many rows.
#include "../calls/matmul.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <vector>

#include "../calls/grouped_matmul.h"
#include "parallel.h"

namespace jnvfp4 {
namespace {

constexpr int kPanel = 32;   // output columns per panel
constexpr int kRowTile = 4;  // output rows per pass over a panel
constexpr int64_t kRowChunk = 128;

float amax_at(const MatmulOperand& x, int64_t row, int64_t window) {
  return x.amax[x.map.at(row, window * kWindowBlocks)];
}
const uint8_t* codes_of(const MatmulOperand& x) { return static_cast<const uint8_t*>(x.data); }

// ---------------------------------------------------------------- unpacking
// Two codes of a byte as two bytes of twice their value, plus `offset` each.
constexpr std::array<uint16_t, 256> make_pairs(int32_t offset) {
  std::array<uint16_t, 256> t{};
  for (uint32_t i = 0; i < 256; ++i)
    t[i] = static_cast<uint16_t>((static_cast<uint32_t>(e2m1_twice(i & 15u) + offset) & 0xffu) |
                                 (static_cast<uint32_t>(e2m1_twice(i >> 4) + offset) & 0xffu) << 8);
  return t;
}
constexpr int32_t kOffset = 12;  // makes the right operand unsigned, as the byte dot instructions want
constexpr auto kSigned = make_pairs(0);
constexpr auto kUnsigned = make_pairs(kOffset);

// The left operand, unpacked for all rows: bytes of 2q, block scales, and -12 * sum(2q) of each block.
struct Left {
  std::vector<int8_t> value;
  std::vector<float> scale;
  std::vector<int32_t> correction;

  void resize(int64_t rows, int64_t depth) {
    value.resize(rows * depth);
    scale.resize(rows * depth / kBlock);
    correction.resize(rows * depth / kBlock);
  }
  void unpack(const MatmulArgs& g, int64_t begin, int64_t end) {  // blocks, over all rows
    const uint8_t* codes = codes_of(g.a);
    for (int64_t b = begin; b < end; ++b) {
      int32_t sum = 0;
      for (int i = 0; i < kBlock / 2; ++i) {
        const uint16_t pair = kSigned[codes[b * (kBlock / 2) + i]];
        std::memcpy(&value[b * kBlock + 2 * i], &pair, 2);
        sum += static_cast<int8_t>(pair & 0xff) + static_cast<int8_t>(pair >> 8);
      }
      correction[b] = -kOffset * sum;
      scale[b] = e4m3_decode(g.a.scale[b]);
    }
  }
};

// A panel of the right operand. `quads` is [K/4][kPanel][4] unsigned bytes of 2q + 12; `scale` is
// [K/16][kPanel] with a factor 1/4 for the two doublings, exact.
struct PanelInt {
  std::vector<uint32_t> quads;
  std::vector<float> scale;

  void unpack(const MatmulArgs& g, int64_t matrix_row, int64_t count) {
    const int64_t blocks = g.shape.depth / kBlock;
    quads.assign(g.shape.depth / 4 * kPanel, 0x0c0c0c0cu);
    scale.assign(blocks * kPanel, 0.0f);
    for (int64_t n = 0; n < count; ++n) {
      const uint8_t* codes = codes_of(g.b) + (matrix_row + n) * g.shape.depth / 2;
      const uint8_t* scales = g.b.scale + (matrix_row + n) * blocks;
      for (int64_t q = 0; q < g.shape.depth / 4; ++q)
        quads[q * kPanel + n] = kUnsigned[codes[2 * q]] | uint32_t{kUnsigned[codes[2 * q + 1]]} << 16;
      for (int64_t j = 0; j < blocks; ++j) scale[j * kPanel + n] = mul_rn(e4m3_decode(scales[j]), 0.25f);
    }
  }
};

// [K][kPanel] float32 values q * s.
struct PanelFloat {
  std::vector<float> value;

  void unpack(const MatmulArgs& g, int64_t matrix_row, int64_t count) {
    const int64_t blocks = g.shape.depth / kBlock;
    value.assign(g.shape.depth * kPanel, 0.0f);
    for (int64_t n = 0; n < count; ++n) {
      const uint8_t* codes = codes_of(g.b) + (matrix_row + n) * g.shape.depth / 2;
      const uint8_t* scales = g.b.scale + (matrix_row + n) * blocks;
      for (int64_t j = 0; j < blocks; ++j) {
        float decoded[kBlock];  // q * s for the 16 codes, exact
        for (uint32_t c = 0; c < kBlock; ++c) decoded[c] = mul_rn(e2m1_decode(c), e4m3_decode(scales[j]));
        for (int i = 0; i < kBlock / 2; ++i) {
          const uint8_t pair = codes[j * (kBlock / 2) + i];
          value[(j * kBlock + 2 * i) * kPanel + n] = decoded[pair & 15u];
          value[(j * kBlock + 2 * i + 1) * kPanel + n] = decoded[pair >> 4];
        }
      }
    }
  }
};

// ---------------------------------------------------------------- inner loops: y[rows][kPanel]
using Sums = float[kRowTile][kPanel];

// Blocks [begin, end) along K of rows whose first blocks are `stride` apart.
struct Span {
  int64_t first_block, stride, begin, end;
};

void sum_blocks_portable(const Left& l, const PanelInt& p, Span s, int rows, Sums& y) {
  for (int r = 0; r < rows; ++r) {
    for (int n = 0; n < kPanel; ++n) y[r][n] = 0.0f;
    for (int64_t j = s.begin; j < s.end; ++j) {
      const int64_t ab = s.first_block + r * s.stride + j;
      int32_t dot[kPanel];
      for (int n = 0; n < kPanel; ++n) dot[n] = l.correction[ab];
      for (int q = 0; q < 4; ++q)
        for (int n = 0; n < kPanel; ++n) {
          const uint32_t w = p.quads[(j * 4 + q) * kPanel + n];
          for (int i = 0; i < 4; ++i)
            dot[n] += static_cast<int32_t>(w >> (8 * i) & 0xffu) * l.value[ab * kBlock + q * 4 + i];
        }
      for (int n = 0; n < kPanel; ++n)
        y[r][n] = add_rn(y[r][n], mul_rn(mul_rn(l.scale[ab], p.scale[j * kPanel + n]), static_cast<float>(dot[n])));
    }
  }
}

#if defined(__x86_64__)
JNVFP4_HD int32_t load_quad(const int8_t* v) {
  int32_t q;
  std::memcpy(&q, v, sizeof q);
  return q;
}

// The product of scales and dot is exact in float32, so the fused multiply-add rounds once, as the
// rule's add does.
template <int R>
JNVFP4_AVX512 void sum_blocks_avx512(const Left& l, const PanelInt& p, Span s, Sums& out) {
  constexpr int V = kPanel / 16;
  __m512 y[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) y[r][v] = _mm512_setzero_ps();
  for (int64_t j = s.begin; j < s.end; ++j) {
    const uint32_t* quads = p.quads.data() + j * 4 * kPanel;
    __m512i w[4][V];
    for (int q = 0; q < 4; ++q)
      for (int v = 0; v < V; ++v) w[q][v] = _mm512_loadu_si512(quads + q * kPanel + v * 16);
    for (int r = 0; r < R; ++r) {
      const int64_t ab = s.first_block + r * s.stride + j;
      const int8_t* a = l.value.data() + ab * kBlock;
      const __m512 sa = _mm512_set1_ps(l.scale[ab]);
      for (int v = 0; v < V; ++v) {
        __m512i dot = _mm512_set1_epi32(l.correction[ab]);
        for (int q = 0; q < 4; ++q) dot = _mm512_dpbusd_epi32(dot, w[q][v], _mm512_set1_epi32(load_quad(a + 4 * q)));
        const __m512 scale = _mm512_mul_ps(sa, _mm512_loadu_ps(p.scale.data() + j * kPanel + v * 16));
        y[r][v] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dot), y[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(out[r] + v * 16, y[r][v]);
}

template <int R>
JNVFP4_AVX2 void sum_blocks_avx2(const Left& l, const PanelInt& p, Span s, Sums& out) {
  constexpr int V = kPanel / 8;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256 y[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) y[r][v] = _mm256_setzero_ps();
  for (int64_t j = s.begin; j < s.end; ++j) {
    const uint32_t* quads = p.quads.data() + j * 4 * kPanel;
    for (int r = 0; r < R; ++r) {
      const int64_t ab = s.first_block + r * s.stride + j;
      const int8_t* a = l.value.data() + ab * kBlock;
      const __m256 sa = _mm256_set1_ps(l.scale[ab]);
      for (int v = 0; v < V; ++v) {
        __m256i pairs = _mm256_setzero_si256();  // at most 4 * 2 * 24 * 12 = 2304
        for (int q = 0; q < 4; ++q) {
          const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(quads + q * kPanel + v * 8));
          pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w, _mm256_set1_epi32(load_quad(a + 4 * q))));
        }
        const __m256i dot = _mm256_add_epi32(_mm256_madd_epi16(pairs, ones), _mm256_set1_epi32(l.correction[ab]));
        const __m256 scale = _mm256_mul_ps(sa, _mm256_loadu_ps(p.scale.data() + j * kPanel + v * 8));
        y[r][v] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(dot), y[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) _mm256_storeu_ps(out[r] + v * 8, y[r][v]);
}
#elif defined(__aarch64__)
// Eight columns at a time: with more, compilers keep sums in memory. 2q + 12 is below 128, so the signed dot product
// serves.
template <int R>
JNVFP4_NEON_DOT void sum_blocks_neon_dot(const Left& l, const PanelInt& p, Span s, Sums& out) {
  constexpr int V = 2;
  for (int first = 0; first < kPanel; first += 4 * V) {
    float32x4_t y[R][V] = {};
    for (int64_t j = s.begin; j < s.end; ++j) {
      const uint32_t* quads = p.quads.data() + j * 4 * kPanel + first;
      for (int v = 0; v < V; ++v) {
        int8x16_t w[4];
        for (int q = 0; q < 4; ++q) w[q] = vreinterpretq_s8_u32(vld1q_u32(quads + q * kPanel + v * 4));
        const float32x4_t sb = vld1q_f32(p.scale.data() + j * kPanel + first + v * 4);
        for (int r = 0; r < R; ++r) {
          const int64_t ab = s.first_block + r * s.stride + j;
          const int8x16_t a = vld1q_s8(l.value.data() + ab * kBlock);
          int32x4_t dot = vdupq_n_s32(l.correction[ab]);
          dot = vdotq_laneq_s32(dot, w[0], a, 0), dot = vdotq_laneq_s32(dot, w[1], a, 1);
          dot = vdotq_laneq_s32(dot, w[2], a, 2), dot = vdotq_laneq_s32(dot, w[3], a, 3);
          y[r][v] = vfmaq_f32(y[r][v], vmulq_n_f32(sb, l.scale[ab]), vcvtq_f32_s32(dot));
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) vst1q_f32(out[r] + first + v * 4, y[r][v]);
  }
}
#endif

template <int R>
void sum_blocks_for(const Left& l, const PanelInt& p, Span s, Sums& y) {
#if defined(__x86_64__)
  if (isa() == Isa::kAvx512) return sum_blocks_avx512<R>(l, p, s, y);
  if (isa() == Isa::kAvx2) return sum_blocks_avx2<R>(l, p, s, y);
#elif defined(__aarch64__)
  if (isa() == Isa::kNeonDot) return sum_blocks_neon_dot<R>(l, p, s, y);
#endif
  sum_blocks_portable(l, p, s, R, y);
}

void sum_blocks_rows(const Left& l, const PanelInt& p, Span s, int rows, Sums& y) {
  switch (rows) {
    case 1: return sum_blocks_for<1>(l, p, s, y);
    case 2: return sum_blocks_for<2>(l, p, s, y);
    case 3: return sum_blocks_for<3>(l, p, s, y);
    default: return sum_blocks_for<kRowTile>(l, p, s, y);
  }
}

// y = fl(y + fl(alpha * sum of the window)), windows ascending.
void sum_windows_rows(const MatmulArgs& g, const Left& l, const PanelInt& p, Span s, int64_t a_row, int64_t b_row,
                      int rows, int count, Sums& y) {
  for (auto& row : y) std::fill(row, row + kPanel, 0.0f);
  for (int64_t w = 0; w < s.end / kWindowBlocks; ++w) {
    alignas(64) Sums window;
    sum_blocks_rows(l, p, {s.first_block, s.stride, w * kWindowBlocks, (w + 1) * kWindowBlocks}, rows, window);
    for (int r = 0; r < rows; ++r)
      for (int n = 0; n < count; ++n) {
        const float alpha =
            alpha_w4a4(amax_at(g.a, a_row + r, w), amax_at(g.b, b_row + n, w), g.a.e4m3_max, g.b.e4m3_max);
        y[r][n] = add_window(y[r][n], window[r][n], alpha);
      }
  }
}

// y = fl(y + fl(a * w)), k ascending. Not fused: a product that overflows is infinite.
using Lanes = float __attribute__((vector_size(64)));

template <int R>
JNVFP4_HD void sum_elements(const float* a, const PanelFloat& p, int64_t depth, Sums& y) {
  constexpr int V = kPanel / 16;
  Lanes sum[R][V] = {};
  for (int64_t k = 0; k < depth; ++k)
    for (int v = 0; v < V; ++v) {
      Lanes w;
      std::memcpy(&w, p.value.data() + k * kPanel + v * 16, sizeof w);
      for (int r = 0; r < R; ++r) sum[r][v] = sum[r][v] + a[r * depth + k] * w;
    }
  for (int r = 0; r < R; ++r) std::memcpy(y[r], sum[r], sizeof y[r]);
}

template <int R>
void sum_elements_portable(const float* a, const PanelFloat& p, int64_t d, Sums& y) {
  sum_elements<R>(a, p, d, y);
}
#if defined(__x86_64__)
template <int R>
JNVFP4_AVX2 void sum_elements_avx2(const float* a, const PanelFloat& p, int64_t d, Sums& y) {
  sum_elements<R>(a, p, d, y);
}
template <int R>
JNVFP4_AVX512 void sum_elements_avx512(const float* a, const PanelFloat& p, int64_t d, Sums& y) {
  sum_elements<R>(a, p, d, y);
}
#endif

template <int R>
void sum_elements_for(const float* a, const PanelFloat& p, int64_t d, Sums& y) {
#if defined(__x86_64__)
  if (isa() == Isa::kAvx512) return sum_elements_avx512<R>(a, p, d, y);
  if (isa() == Isa::kAvx2) return sum_elements_avx2<R>(a, p, d, y);
#endif
  sum_elements_portable<R>(a, p, d, y);
}

void sum_elements_rows(const float* a, const PanelFloat& p, int64_t d, int rows, Sums& y) {
  switch (rows) {
    case 1: return sum_elements_for<1>(a, p, d, y);
    case 2: return sum_elements_for<2>(a, p, d, y);
    case 3: return sum_elements_for<3>(a, p, d, y);
    default: return sum_elements_for<kRowTile>(a, p, d, y);
  }
}

// ---------------------------------------------------------------- one task: rows x one panel
void store(const MatmulArgs& g, int64_t i, float v) {
  with_float(g.result.kind, [&](auto t) {
    using T = decltype(t);
    static_cast<typename T::Stored*>(g.result.out)[i] = T::store(v);
  });
}

float alpha_of(const MatmulArgs& g, int64_t a_row, int64_t b_row) {
  if (!g.a.quantized()) return alpha_w4a16(amax_at(g.b, b_row, 0), g.b.e4m3_max);
  return alpha_w4a4(amax_at(g.a, a_row, 0), amax_at(g.b, b_row, 0), g.a.e4m3_max, g.b.e4m3_max);
}

// Rows [first, last) of the left operand times `count` rows of the right one. Rows are counted over all matrices.
struct Task {
  int64_t first, last;
  int64_t right;  // the first row of the right operand
  int64_t col;    // its column of the result
  int count;
};

void finish(const MatmulArgs& g, const Task& task, int64_t row, int rows, const Sums& y) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < task.count; ++n) {
      const float alpha = g.windows() ? 1.0f : alpha_of(g, row + r, task.right + n);
      const int64_t at = (row + r) * g.shape.cols + task.col + n;
      const float bias =
          g.result.bias ? load_float(g.result.bias, g.result.bias_kind, g.result.whole_bias ? at : task.col + n) : 0.0f;
      store(g, at, gemm_epilogue(y[r][n], alpha, bias, g.result.bias != nullptr));
    }
}

void run_task(const MatmulArgs& g, const Left& left, const Task& task) {
  PanelInt ints;
  PanelFloat floats;
  std::vector<float> a(g.a.quantized() ? 0 : kRowTile * g.shape.depth);
  if (g.a.quantized())
    ints.unpack(g, task.right, task.count);
  else
    floats.unpack(g, task.right, task.count);
  for (int64_t row = task.first; row < task.last; row += kRowTile) {
    const int rows = static_cast<int>(std::min<int64_t>(kRowTile, task.last - row));
    alignas(64) Sums y;
    const int64_t blocks = g.shape.depth / kBlock;
    if (g.a.quantized()) {
      const Span span{row * blocks, blocks, 0, blocks};
      if (g.windows())
        sum_windows_rows(g, left, ints, span, row, task.right, rows, task.count, y);
      else
        sum_blocks_rows(left, ints, span, rows, y);
    } else {
      with_float(g.a.kind, [&](auto t) {
        using T = decltype(t);
        const auto* stored = static_cast<const typename T::Stored*>(g.a.data) + row * g.shape.depth;
        for (int64_t i = 0; i < rows * g.shape.depth; ++i) a[i] = T::load(stored[i]);
      });
      sum_elements_rows(a.data(), floats, g.shape.depth, rows, y);
    }
    finish(g, task, row, rows, y);
  }
}

// Products of rows [first, last) of the left operand and the matrix `matrix` of the right one, one after another.
struct Part {
  int64_t first, last, matrix;
};

// Both kernels of the plans: the left operand says which.
void multiply(ffi::ThreadPool& pool, const MatmulArgs& g, const std::vector<Part>& parts, int64_t rows) {
  Left left;
  if (g.a.quantized()) {
    left.resize(rows, g.shape.depth);
    parallel_for(pool, rows * g.shape.depth / kBlock, 4096, [&](int64_t b, int64_t e) { left.unpack(g, b, e); });
  }
  const int64_t panels = (g.shape.cols + kPanel - 1) / kPanel;
  std::vector<int64_t> ends;  // of the tasks of each part
  for (const Part& part : parts)
    ends.push_back((ends.empty() ? 0 : ends.back()) + (part.last - part.first + kRowChunk - 1) / kRowChunk * panels);
  parallel_for(pool, ends.empty() ? 0 : ends.back(), 1, [&](int64_t b, int64_t e) {
    for (int64_t i = b; i < e; ++i) {
      const int64_t at = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
      const Part& part = parts[at];
      const int64_t task = i - (at ? ends[at - 1] : 0);
      const int64_t col = task % panels * kPanel, first = part.first + task / panels * kRowChunk;
      run_task(g, left,
               {first, std::min(part.last, first + kRowChunk), part.matrix * g.shape.cols + col, col,
                static_cast<int>(std::min<int64_t>(kPanel, g.shape.cols - col))});
    }
  });
}

ffi::Error run(ffi::ThreadPool pool, const MatmulArgs& g, std::string_view /* kernel */, void* /* scratch */) try {
  std::vector<Part> parts;
  for (int64_t i = 0; i < g.shape.batch; ++i) parts.push_back({i * g.shape.rows, (i + 1) * g.shape.rows, i});
  multiply(pool, g, parts, g.shape.batch * g.shape.rows);
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "matmul_nt: no memory for the unpacked operands");
}

ffi::Error run_grouped(ffi::ThreadPool pool, const GroupedArgs& args, std::string_view /* kernel */,
                       void* /* scratch */) try {
  const GroupedShape& s = args.shape;
  std::vector<Part> parts;
  int64_t end = 0;
  for (int64_t group = 0; group < s.groups; ++group) {
    const int64_t first = end;
    end = std::min<int64_t>(s.rows, first + std::max(args.sizes[group], 0));
    if (end > first) parts.push_back({first, end, group});
  }
  const MatmulArgs g{args.a, args.b, {nullptr, Float::kF32, args.out, args.kind}, {1, s.rows, s.cols, s.depth}};
  multiply(pool, g, parts, end);  // rows beyond are in no part: they would be unpacked for nothing
  const int64_t row_bytes = s.cols * (args.kind == Float::kF32 ? 4 : 2);
  std::memset(static_cast<uint8_t*>(args.out) + end * row_bytes, 0, (s.rows - end) * row_bytes);
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "grouped_matmul_nt: no memory for the unpacked operands");
}

Device device() { return {kCpu}; }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Matmul, (matmul_call<ffi::ThreadPool, run, device>),
                              matmul_binding().Ctx<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(GroupedMatmul, (grouped_matmul_call<ffi::ThreadPool, run_grouped, device>),
                              grouped_matmul_binding().Ctx<ffi::ThreadPool>());

}  // namespace jnvfp4
