// fake_quant on CUDA: a thread has a block of 16, whose values it rounds to the grid of the scale. No codes.
#include "choose.cuh"
#include "passes.cuh"
#include "rows.cuh"

namespace jnvfp4 {
namespace {

// The values that a block quantizes to with `scale`. `round(r)` gives their magnitudes on the grid, over kOver, and can
// where `quick`: powers of two commute with the rounding of the product.
template <class S, class T, class Scales, class Round>
__device__ __forceinline__ Block<T> decode(Values& v, uint32_t scale, const Scales& scales, float e4m3_max, bool quick,
                                           const uint32_t (&random)[4], const Round& round) {
  const float factor = dequantize_factor(scale, fabsf(scales.amax), e4m3_max);
  if (quick && factor < kFiniteFactor) {
    Values r;
    round(r);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) v[i] = copysignf(mul_rn(r[i], factor * kOver), v[i]);
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

__device__ __forceinline__ Block<F16> narrowed(const Block<Wide>& x) {
  Block<F16> y;
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i)
    y.part(i) = f16_encode(x.value(2 * i)) | uint32_t{f16_encode(x.value(2 * i + 1))} << 16;
  return y;
}

// In a warp that has 16x16 tiles side by side, lane 2 * line + tile, or any blocks of 1x16.
struct FakeQuant {
  using Args = FakeQuantArgs;
  template <class S>
  static constexpr bool kResident = kChooses<S> || S::spec.rht;
  template <class S, bool>
  static constexpr int kBlocks = kChooses<S>                     ? 3
                                 : kStochastic<S> || S::spec.rht ? 5
                                                                 : 4;
  using Lines = LaneGroup<16, 2>;

  // `element(i)` is the i-th again; `random` gives the random bits of the block.
  template <class S, class T, class Scales, class Element, class Random>
  __device__ __forceinline__ static Block<T> values(const Args& a, const Scales& scales, const Block<T>& raw,
                                                    const Element& element, const Random& random) {
    const auto source = source_of<S>(raw);
    uint32_t m = source.amax(), bits[4] = {};
    if constexpr (kTiles<S>) m = Lines::max(m);
    Values v;
    source.values(v);
    if constexpr (kChooses<S>) {
      const Choice<S> choice(m, scales);
      bool four;
      if constexpr (kTiles<S>) {
        Magnitudes unused[1];
        four = tile_takes_four<S, false, Lines>(
            choice, scales, [&](int, Values& own) { source.magnitudes(own); }, [&](int, int i) { return element(i); },
            nullptr, unused);
      } else {
        Magnitudes unused;
        Values magnitudes;
        source.magnitudes(magnitudes);
        four = block_takes_four<S>(magnitudes, choice, scales, element, unused);
      }
      const float encode = choice.encode(four);
      return decode<S, T>(v, choice.scale(four), scales, a.e4m3_max, choice.quick, bits,
                          [&](Values& r) { nearest_over(v, encode, r); });
    } else {
      const uint32_t scale = plain_scale<S>(m, scales);
      const float encode = scales.factors(scale).encode;
      if constexpr (kStochastic<S>) random(bits);
      return decode<S, T>(v, scale, scales, a.e4m3_max, below_seven(m, encode), bits, [&](Values& r) {
        if constexpr (kStochastic<S>) {
          stochastic_over(v, encode, bits, r);
#pragma unroll
          for (int i = 0; i < kBlock; ++i) r[i] = fminf(r[i], 6.0f / kOver);
        } else
          nearest_over(v, encode, r);
      });
    }
  }

  template <class S, class T, class Scales>
  __device__ __forceinline__ static void run(const Args& a, const Scales& scales, const Block<T>& raw, At at,
                                             bool all) {
    const auto element = [&](int i) { return load_element<T>(a.x, a.kind, at.index() * kBlock + i); };
    const auto random = [&](uint32_t (&bits)[4]) {
      if constexpr (kStochastic<S>) random_of(scales, a.shape, a.stream, at.index(), bits);
    };
    const auto y = values<S>(a, scales, raw, element, random);
    if constexpr (std::is_same_v<T, Wide>)
      if (widens<T>(a.kind))
        return store_blocks<F16>(static_cast<uint16_t*>(a.out) + at.first * kBlock, at.i, narrowed(y), all);
    store_blocks<T>(static_cast<typename T::Stored*>(a.out) + at.first * kBlock, at.i, y, all);
  }
};

// 16x16 tiles, where they arrive in shared memory: a thread has two neighbouring blocks of a row, and writes 16-byte
// words of several, so that a warp writes whole rows.
template <class S, class T>
class TilesPass {
  using Stored = typename T::Stored;
  using Own = OwnWords<T>;
  static constexpr int kRowsAtOnce = Own::kRowsAtOnce;

 public:
  __device__ __forceinline__ TilesPass(const FakeQuantArgs& a, const SharedScales<S>& scales, const TilePlace& first)
      : a_(a),
        scales_(scales),
        size_(widens<T>(a.kind) ? 2 : sizeof(Stored)),
        out_(static_cast<char*>(a.out) +
             ((first.matrix * a.shape.rows + first.row + Own::row()) * a.shape.cols + first.col + Own::col()) * size_),
        rows_left_(static_cast<int>(min(a.shape.rows - first.row - Own::row(), int64_t{INT_MAX}))),
        here_(Own::col() < a.shape.cols - first.col) {}

  __device__ __forceinline__ void operator()(Tile<T>& tile) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      Block<T>& x = tile.block(at_[j]);
      const int row = row_of_thread<true>(), col = (block_of_thread<true>() + j) * kBlock;
      x = FakeQuant::values<S>(
          a_, scales_, Block<T>(x), [&](int i) { return tile.element(row, col + i); }, [](uint32_t (&)[4]) {});
    }
    sync_team();
    const char* from = tile.bytes + from_;
    char* to = out_;
#pragma unroll
    for (int r = 0; r < kBlock; r += kRowsAtOnce, from += kRowsAtOnce * Tile<T>::kRowBytes) {
      if (r < rows_left_ && here_) write(to, from);
      to += kRowsAtOnce * a_.shape.cols * size_;
    }
    out_ += kTileRows * a_.shape.cols * size_;
    rows_left_ -= kTileRows;
  }
  __device__ __forceinline__ void finish(int) const {}

 private:
  // 16 bytes of the tile.
  __device__ __forceinline__ void write(char* to, const char* from) const {
    if (widens<T>(a_.kind)) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      const auto pair = [](float low, float high) { return f16_encode(low) | uint32_t{f16_encode(high)} << 16; };
      *reinterpret_cast<uint2*>(to) = make_uint2(pair(v.x, v.y), pair(v.z, v.w));
    } else {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    }
  }

  const FakeQuantArgs& a_;
  const SharedScales<S>& scales_;
  const int size_;  // of an element in memory
  char* out_;       // of the thread's first word
  int rows_left_;
  bool here_;
  const int at_[2] = {pin_register(Tile<T>::place_of_block(row_of_thread<true>(), block_of_thread<true>())),
                      pin_register(Tile<T>::place_of_block(row_of_thread<true>(), block_of_thread<true>() + 1))};
  const int from_ = pin_register(Own::place());
};

template <class S, class T>
struct TilesMemory {
  Stages<T> stages;
  SharedScales<S> scales;
};

template <class S, class T>
__global__ void __launch_bounds__(kThreads, kTileBlocks<S>) fake_quant_tiles_kernel(FakeQuantArgs a, Runs runs) {
  auto& shared = shared_memory<TilesMemory<S, T>>();
  for_each_tile_of(
      a.x, a.kind, shared.stages, StoredShape(a.shape), runs,
      [&](int64_t matrix) { fill_scales(shared.scales, a, matrix); },
      [&](const TilePlace& first) { return TilesPass<S, T>(a, shared.scales, first); });
}

}  // namespace

cudaError_t launch_fake_quant(const FakeQuantArgs& args, const KernelSpec& spec, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  dispatch(spec, SupportedSpecs{}, [&](auto s) {
    using S = decltype(s);
    with_bf16_or_wide(args.kind, [&](auto t) {
      if constexpr (kTiles<S>)
        status = launch_tiles<TilesMemory<S, decltype(t)>>(fake_quant_tiles_kernel<S, decltype(t)>,
                                                           Runs(StoredShape(args.shape), kTileBlocks<S>), stream, args);
      else
        status = launch_rows<FakeQuant, S, decltype(t)>(args, stream);
    });
  });
  return status;
}

}  // namespace jnvfp4
