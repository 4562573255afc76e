// quantize_pair on CUDA: each tile of x is read once and quantized along both axes.
#include "passes.cuh"

namespace jnvfp4 {
namespace {

// 16x16 tiles have the same codes along both axes, transposed, where both amax and both choices are the same.
template <class P>
inline constexpr bool kTransposes = kTiles<typename P::Row> && std::is_same_v<typename P::Row, typename P::Col>;

// The codes of a team's rows, in flight to columns.
struct TeamCodes {
  alignas(16) uint8_t codes[kBlock][kTileCols / 2 + 32];  // what is more keeps writes out of one bank
  alignas(2) uint8_t scales[kTileCols / kBlock];

  // A thread has one part of the codes, and writes another.
  __device__ __forceinline__ void put(const Encoded (&e)[2]) {
    const int row = row_of_thread<true>() % kBlock, block = block_of_thread<true>();
    *reinterpret_cast<uint4*>(&codes[row][block * kBlock / 2]) =
        make_uint4(e[0].codes.x, e[0].codes.y, e[1].codes.x, e[1].codes.y);
    if (row == 0) *reinterpret_cast<uint16_t*>(&scales[block]) = static_cast<uint16_t>(e[0].scale | e[1].scale << 8);
  }
  __device__ __forceinline__ void take(Encoded (&e)[2]) const {
    const int row = row_of_thread<false>() % kBlock, block = block_of_thread<false>();
    const uint4 w = *reinterpret_cast<const uint4*>(&codes[row][block * kBlock / 2]);
    e[0] = {make_uint2(w.x, w.y), scales[block]}, e[1] = {make_uint2(w.z, w.w), scales[block + 1]};
  }
  // Loads four columns from `col` on, eight codes each, from `row` on.
  __device__ __forceinline__ void columns(int row, int col, uint32_t (&out)[4]) const {
    const auto two_rows = [&](int r) {  // and the next but one
      const auto four = [&](int r) { return uint32_t{*reinterpret_cast<const uint16_t*>(&codes[r][col / 2])}; };
      return four(r) | four(r + 2) << 16;
    };
    uint32_t even[2], odd[2];  // bytes of columns 0 2 0 2 and 1 3 1 3, two rows each
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t a = two_rows(row + 4 * h), b = two_rows(row + 4 * h + 1);
      even[h] = (a & 0x0f0f0f0fu) | (b << 4 & 0xf0f0f0f0u);
      odd[h] = (a >> 4 & 0x0f0f0f0fu) | (b & 0xf0f0f0f0u);
    }
    out[0] = __byte_perm(even[0], even[1], 0x6420), out[1] = __byte_perm(odd[0], odd[1], 0x6420);
    out[2] = __byte_perm(even[0], even[1], 0x7531), out[3] = __byte_perm(odd[0], odd[1], 0x7531);
  }
};
struct NoCodes {};

template <class P, class T>
struct PairShared {
  Stages<T> stages;
  SharedScales<typename P::Row> row_scales;
  SharedScales<typename P::Col> col_scales;
  ColumnsShared<typename P::Col> columns;
  std::conditional_t<kTransposes<P>, TeamCodes[kTeams], NoCodes> rows;
  TileChoices choices;
};

template <class P, class T>
class PairPass {
 public:
  __device__ __forceinline__ PairPass(const PairArgs& a, PairShared<P, T>& shared, const TilePlace& first)
      : shared_(shared),
        rows_(a.row, shared.row_scales, first, kChoices ? &shared.choices : nullptr),
        columns_(a.col, shared.col_scales, shared.columns, first) {
    if constexpr (kTransposes<P>)
      same_ = shared.row_scales.amax == shared.col_scales.amax && a.row.e4m3_max == a.col.e4m3_max;
  }

  __device__ __forceinline__ void operator()(const Tile<T>& tile) {
    if constexpr (kTransposes<P>) {
      TeamCodes& codes = shared_.rows[team()];
      Encoded e[2];
      rows_.encode(tile, e);
      codes.put(e);
      sync_team();  // codes and choices are there
      codes.take(e);
      rows_.store(e);
      if (same_ && !close()) {
        const int col = team_thread() % 32 * 4, half = team_thread() / 32;
        uint32_t out[4];
        codes.columns(half * 8, col, out);
        columns_.hold(col, half, out, codes.scales[col / kBlock]);
        columns_.next();
      } else {
        columns_.template quantize<kChoices>(tile, same_ ? &shared_.choices : nullptr);
      }
    } else {
      rows_(tile);
      columns_(tile);
    }
  }
  __device__ __forceinline__ void finish(int tiles) { columns_.finish(tiles); }

 private:
  static constexpr bool kChoices = kTransposes<P> && kChooses<typename P::Row>;

  // Whether columns must look at a tile of the team themselves.
  __device__ __forceinline__ bool close() const {
    if constexpr (!kChoices) return false;
    const uint2 of = *reinterpret_cast<const uint2*>(shared_.choices.of[team()]);
    return ((of.x | of.y) & 0x01010101u * static_cast<uint32_t>(TileChoice::kClose)) != 0;
  }

  PairShared<P, T>& shared_;
  RowsPass<typename P::Row, T, !kTransposes<P> && kTiles<typename P::Row>> rows_;
  ColumnsPass<typename P::Col, T> columns_;
  bool same_ = false;  // the amax along both axes
};

template <class P>
inline constexpr int kPairBlocks =
    (kTransposes<P> && !kChooses<typename P::Col>) || kStochastic<typename P::Col> ? 3 : kTileBlocks<typename P::Col>;

template <class P, class T>
__global__ void __launch_bounds__(kThreads, kPairBlocks<P>) quantize_pair_kernel(PairArgs a, Runs runs) {
  auto& shared = shared_memory<PairShared<P, T>>();
  for_each_tile_of(
      a.row.x, a.row.kind, shared.stages, StoredShape(a.row.shape), runs,
      [&](int64_t matrix) {
        fill_scales(shared.row_scales, a.row, matrix, 0);
        fill_scales(shared.col_scales, a.col, matrix, kThreads / 2);
      },
      [&](const TilePlace& first) { return PairPass<P, T>(a, shared, first); });
}

}  // namespace

cudaError_t launch_quantize_pair(const PairArgs& args, const KernelSpec& row, const KernelSpec& col,
                                 cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  dispatch(row, col, FusedPairs{}, [&](auto p) {
    with_bf16_or_wide(args.row.kind, [&](auto t) {
      using P = decltype(p);
      using T = decltype(t);
      const Runs runs(StoredShape(args.row.shape), kPairBlocks<P>);
      status = launch_tiles<PairShared<P, T>>(quantize_pair_kernel<P, T>, runs, stream, args);
    });
  });
  return status;
}

}  // namespace jnvfp4
