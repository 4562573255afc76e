// The producers on CUDA through tiles in shared memory: 16x16 tiles, and both orientations in one pass.
#include "../quantize/passes.cuh"
#include "values.cuh"

namespace jnvfp4 {
namespace {

template <class Row, class Col>
struct Shared {
  Stages<Bf16> stages;
  SharedScales<Row> row_scales;
  SharedScales<Col> col_scales;
  ColumnsShared<Col> columns;
  Stages<Bf16> second;  // last: only a gate asks for it
};
template <class Row>
struct Shared<Row, void> {
  Stages<Bf16> stages;
  SharedScales<Row> row_scales;
  Stages<Bf16> second;
};

struct TilesArgs : ProduceArgs {
  bool ahead;  // operands are loaded ahead: not float32 ones, nor where weights change within a matrix
};

// Loads what a team's rows of one tile after the other are made of, and makes them where they arrive. Values are stored
// where they are wanted.
class Producing {
 public:
  __device__ __forceinline__ Producing(const TilesArgs& a, Stages<Bf16>& stages, Stages<Bf16>& second,
                                       const TilePlace& first)
      : a_(a),
        row_(first.matrix * a.sources.rows + first.row + Own::row()),
        col_(first.col + Own::col()),
        next_(row_ * a.sources.cols + col_),
        from_second_(static_cast<int>(reinterpret_cast<char*>(&second) - reinterpret_cast<char*>(&stages))) {
    const ProducerOperands& s = a.sources;
    rows_left_ = rows_unmade_ = static_cast<int>(min(s.rows - first.row - Own::row(), int64_t{INT_MAX}));
    if (a.ahead && s.producer == Producer::kRmsNorm && col_ < s.cols)
      load_eight(s.b, s.b_kind, weights_of(s, first.matrix * s.rows) + col_, weights_);
  }

  __device__ __forceinline__ void load(Tile<Bf16>& tile) {
    const ProducerOperands& s = a_.sources;
    if (a_.ahead && col_ < s.cols) {
      const auto* from = static_cast<const uint16_t*>(s.a) + next_;
      const int64_t to_second = static_cast<const uint16_t*>(s.b) - static_cast<const uint16_t*>(s.a);
#pragma unroll
      for (int r = 0; r < kBlock; r += kRowsAtOnce, from += kRowsAtOnce * s.cols) {
        if (r >= rows_left_) break;
        copy_vector(own_word(tile, r), from);
        if (s.producer == Producer::kSiluMul) copy_vector(own_word(tile, r) + from_second_, from + to_second);
      }
    }
    next_ += kTileRows * s.cols;
    rows_left_ -= kTileRows;
  }

  __device__ __forceinline__ void arrived(Tile<Bf16>& tile) {
    if (!a_.ahead)
      make_now(a_, own_word(tile, 0), row_, col_, rows_unmade_);
    else if (a_.sources.producer == Producer::kSiluMul)
      make(tile, [&](int, const Eight& first, const char* word) {
        Eight second;
        second.word[0] = *reinterpret_cast<const uint4*>(word + from_second_);
        float g[8], u[8];
        first.values16(a_.sources.a_kind, g);
        second.values16(a_.sources.b_kind, u);
        return gate_eight(g, u);
      });
    else
      make(tile, [&](int r, const Eight& first, const char*) {
        float v[8];
        first.values16(a_.sources.a_kind, v);
        return norm_eight(v, static_cast<const float*>(a_.scratch)[row_ + r], weights_);
      });
    row_ += kTileRows;
    rows_unmade_ -= kTileRows;
  }

 private:
  using Own = OwnWords<Bf16>;
  static constexpr int kRowsAtOnce = Own::kRowsAtOnce;

  // `f(r, first, word)` for each row r of the thread, of what arrived at `word`.
  template <class F>
  __device__ __forceinline__ void make(Tile<Bf16>& tile, const F& f) const {
    if (col_ >= a_.sources.cols) return;
#pragma unroll 2
    for (int r = 0; r < kBlock; r += kRowsAtOnce) {
      if (r >= rows_unmade_) return;
      char* word = own_word(tile, r);
      Eight first;
      first.word[0] = *reinterpret_cast<const uint4*>(word);
      const uint4 y = f(r, first, word);
      *reinterpret_cast<uint4*>(word) = y;
      if (a_.values) *reinterpret_cast<uint4*>(a_.values + (row_ + r) * a_.sources.cols + col_) = stored_values(y);
    }
  }
  // Of operands that were not loaded ahead.
  __device__ __noinline__ static void make_now(const ProduceArgs& a, char* word, int64_t row, int64_t col,
                                               int rows_left) {
    const ProducerOperands& s = a.sources;
#pragma unroll 1
    for (int r = 0; r < kBlock; r += kRowsAtOnce, word += kRowsAtOnce * Tile<Bf16>::kRowBytes) {
      if (r >= rows_left || col >= s.cols) return;
      Eight first, second;
      first.load(s.a, s.a_kind, (row + r) * s.cols + col);
      second.load(s.b, s.b_kind, second_of(s, row + r) + col);
      const uint4 y = produce_eight(s, static_cast<const float*>(a.scratch), row + r, first, second);
      *reinterpret_cast<uint4*>(word) = y;
      if (a.values) *reinterpret_cast<uint4*>(a.values + (row + r) * s.cols + col) = stored_values(y);
    }
  }
  __device__ __forceinline__ char* own_word(Tile<Bf16>& tile, int r) const {
    return tile.bytes + at_ + r * Tile<Bf16>::kRowBytes;
  }

  const TilesArgs& a_;
  float weights_[8];   // of a norm
  int64_t row_, col_;  // of the thread's first word in the next tile that arrives
  int64_t next_;       // where its first word in the next tile to load is
  int from_second_;
  int at_ = pin_register(Own::place());
  int rows_left_, rows_unmade_;  // from the thread's first row on, of what is to be loaded and made
};

// Along rows as Row says, along columns as Col; not at all if that is void.
template <class Row, class Col>
class Passes {
 public:
  __device__ __forceinline__ Passes(const TilesArgs& a, Shared<Row, Col>& shared, const TilePlace& first)
      : rows_(a.row, shared.row_scales, first), columns_(a.col, shared.col_scales, shared.columns, first) {}
  __device__ __forceinline__ void operator()(const Tile<Bf16>& tile) {
    rows_(tile);
    columns_(tile);
  }
  __device__ __forceinline__ void finish(int tiles) { columns_.finish(tiles); }

 private:
  RowsPass<Row, Bf16> rows_;
  ColumnsPass<Col, Bf16> columns_;
};
template <class Row>
struct Passes<Row, void> : RowsPass<Row, Bf16> {
  __device__ __forceinline__ Passes(const TilesArgs& a, Shared<Row, void>& shared, const TilePlace& first)
      : RowsPass<Row, Bf16>(a.row, shared.row_scales, first) {}
};

template <class Row>
inline constexpr int kProducerBlocks = kChooses<Row> || kStochastic<Row> ? 2 : 3;

template <class Row, class Col>
__global__ void __launch_bounds__(kThreads, kProducerBlocks<Row>)
    produce_tiles_kernel(const __grid_constant__ TilesArgs a, Runs runs) {
  auto& shared = shared_memory<Shared<Row, Col>>();
  for_each_tile(
      shared.stages, StoredShape(a.row.shape), runs,
      [&](const TilePlace& first) { return Producing(a, shared.stages, shared.second, first); },
      [&](int64_t matrix) {
        fill_scales(shared.row_scales, a.row, matrix, 0);
        if constexpr (!std::is_void_v<Col>) fill_scales(shared.col_scales, a.col, matrix, kThreads / 2);
      },
      [&](const TilePlace& first) { return Passes<Row, Col>(a, shared, first); });
}

template <class Row, class Col>
cudaError_t launch(const ProduceArgs& a, cudaStream_t stream) {
  const ProducerOperands& s = a.sources;
  const bool gate = s.producer == Producer::kSiluMul;
  const bool ahead = s.a_kind != Float::kF32 && (gate ? s.b_kind != Float::kF32 : s.rows_per_weight % s.rows == 0);
  const int bytes = static_cast<int>(sizeof(Shared<Row, Col>) - (gate ? 0 : sizeof(Stages<Bf16>)));
  return launch_tiles(produce_tiles_kernel<Row, Col>, Runs(StoredShape(a.row.shape), gate ? 2 : kProducerBlocks<Row>),
                      stream, TilesArgs{a, ahead}, bytes);
}

}  // namespace

cudaError_t launch_produce_tiles(const ProduceArgs& args, const KernelSpec& spec, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  dispatch(spec, SupportedSpecs{}, [&](auto s) {
    using S = decltype(s);
    if constexpr (S::spec.block_rows == kBlock) status = launch<S, void>(args, stream);
  });
  return status;
}

cudaError_t launch_produce_pair(const ProduceArgs& args, const KernelSpec& row, const KernelSpec& col,
                                cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  dispatch(row, col, FusedPairs{},
           [&](auto p) { status = launch<typename decltype(p)::Row, typename decltype(p)::Col>(args, stream); });
  return status;
}

}  // namespace jnvfp4
