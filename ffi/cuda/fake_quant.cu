// fake_quant on CUDA: a thread has a block of 16, whose values it rounds to the grid of the scale. No codes.
#include "rows.cuh"

namespace jnvfp4 {
namespace {

// The values that a block quantizes to with `scale`. `round(r)` gives their magnitudes on the grid, over 64, and can
// where `quick`: powers of two commute with the rounding of the product.
template <class S, class T, class Scales, class Round>
__device__ __forceinline__ Block<T> decode(Values& v, uint32_t scale, const Scales& scales, float e4m3_max, bool quick,
                                           const uint32_t (&random)[4], const Round& round) {
  const float factor = dequantize_factor(scale, fabsf(scales.amax), e4m3_max);
  if (quick && factor < kFiniteFactor) {
    Values r;
    round(r);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = copysignf(mul_rn(r[i], factor * 64.0f), v[i]);
  } else {
    const float encode = block_encode_scale(scale, scales.global());
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const float a = mul_rn(v[i], encode);
      const float q = kStochastic<S> ? e2m1_round_stochastic(a, random[i / 4] >> (8 * (i % 4)) & 0xffu) : e2m1_round(a);
      v[i] = mul_rn(q, factor);
    }
  }
  if constexpr (S::spec.rht) rht16_inverse(v);
  return rounded_block<T>(v, factor);
}

// In a warp that has two 16x16 tiles, lane 2 * line + tile, or any blocks of 1x16.
struct FakeQuant {
  using Args = FakeQuantArgs;
  using Lines = Lanes<16, 2>;

  template <class S, class T, class Scales>
  __device__ __forceinline__ static Block<T> values(const Args& a, const Scales& scales, const Block<T>& raw,
                                                    int64_t block) {
    const auto source = source_of<S>(raw);
    uint32_t m = source.amax(), random[4] = {};
    if constexpr (kTiles<S>) m = Lines::max(m);
    Values v;
    source.values(v);
    if constexpr (kChooses<S>) {
      const Choice<S> choice(m, scales);
      const auto* x = static_cast<const typename T::Stored*>(a.x) + block * kBlock;
      const auto element = [&](int i) { return T::load(x[i]); };
      bool four;
      if constexpr (kTiles<S>) {
        Magnitudes unused[1];
        const auto sum = [](const auto& error) { return Lines::sum(error(0)); };
        four = tile_takes_four<S, false>(
            choice, scales, sum, [&](int, Values& own) { source.magnitudes(own); }, [&](int, int i) { return element(i); },
            nullptr, unused);
      } else {
        Magnitudes unused;
        Values magnitudes;
        source.magnitudes(magnitudes);
        four = block_takes_four<S>(magnitudes, choice, scales, element, unused);
      }
      const float encode = choice.encode(four);
      return decode<S, T>(v, choice.scale(four), scales, a.e4m3_max, choice.quick, random,
                          [&](Values& r) { nearest_over_64(v, encode, r); });
    } else {
      const uint32_t scale = plain_scale(m, scales);
      const float encode = scales.factors(scale).encode;
      if constexpr (kStochastic<S>) random_of(scales, a.shape, a.stream, block, random);
      return decode<S, T>(v, scale, scales, a.e4m3_max, below_seven(m, encode), random, [&](Values& r) {
        if constexpr (kStochastic<S>) {
          stochastic_over_64(v, encode, random, r);
#pragma unroll
          for (int i = 0; i < kBlock; ++i) r[i] = fminf(r[i], 6.0f / 64.0f);
        } else
          nearest_over_64(v, encode, r);
      });
    }
  }

  template <class S, class T, class Scales>
  __device__ __forceinline__ static void run(const Args& a, const Scales& scales, const Block<T>& raw, int64_t block,
                                             bool all) {
    store_blocks<T>(static_cast<typename T::Stored*>(a.out), block, values<S>(a, scales, raw, block), all);
  }
};

// Pairs of tiles, a warp each; the second tile of the last pair in a band may be the first once more.
template <class S, class T, bool kOneForAll>
__global__ void __launch_bounds__(kThreads, kRowBlocks<S>)
    tiles_kernel(FakeQuantArgs a, int64_t row_blocks, int64_t pairs) {
  const auto place = [&](int64_t i) {
    const int64_t band = quotient(i / 32, pairs), pair = i / 32 - band * pairs, row = band * kBlock + i % 32 / 2;
    return row * row_blocks + min(2 * pair + i % 2, row_blocks - 1);
  };
  const auto for_each = [&](const auto& scales_of) {
    for_each_block<T>(a.x, all_rows(a.shape) * 2 * pairs, place, [&](int64_t b, const Block<T>& x, bool) {
      FakeQuant::run<S>(a, scales_of(b), x, b, row_blocks % 2 == 0);
    });
  };
  if constexpr (kOneForAll) {
    __shared__ SharedScales<S> scales;
    fill_scales_of_all(scales, a);
    __syncthreads();
    for_each([&](int64_t) -> const SharedScales<S>& { return scales; });
  } else {
    const int64_t per_amax = a.shape.rows_per_amax * row_blocks;
    for_each([&](int64_t b) { return OwnScales<S>(a.amax[quotient(b, per_amax)], a.e4m3_max); });
  }
}

template <class S, class T>
cudaError_t launch_tiles(const FakeQuantArgs& a, cudaStream_t stream) {
  const int64_t row_blocks = a.shape.cols / kBlock, pairs = (row_blocks + 1) / 2;
  const unsigned grid = resident_grid(all_rows(a.shape) * 2 * pairs, kThreads, kRowBlocks<S>);
  if (one_for_all<S>(a.shape))
    tiles_kernel<S, T, true><<<grid, kThreads, 0, stream>>>(a, row_blocks, pairs);
  else
    tiles_kernel<S, T, false><<<grid, kThreads, 0, stream>>>(a, row_blocks, pairs);
  return cudaGetLastError();
}

}  // namespace

bool launch_fake_quant(const FakeQuantArgs& args, const KernelSpec& spec, cudaStream_t stream, cudaError_t* status) {
  return dispatch(spec, SupportedSpecs{}, [&](auto s) {
    using S = decltype(s);
    with_float(args.kind, [&](auto t) {
      if constexpr (kTiles<S>)
        *status = launch_tiles<S, decltype(t)>(args, stream);
      else
        *status = launch_rows<FakeQuant, S, decltype(t)>(args, stream);
    });
  });
}

}  // namespace jnvfp4
