// Tiles of 64 x 128 elements of x in shared memory, and their quantization along either axis.
//
// Along rows a thread has two neighbouring blocks of a row, along columns 16 rows of two neighbouring columns. Either
// way a warp has all of what shares an amax or a decision (16x16 tiles, windows), and writes whole 32-byte sectors of
// codes.
#pragma once

#include <climits>

#include "block.cuh"

namespace jnvfp4 {

constexpr int kTileRows = 64, kTileCols = 128;
constexpr int kTilesHeld = 4;  // in a run, of which the codes along columns are written together

// Thread blocks a multiprocessor holds, which bounds registers.
template <class S>
inline constexpr int kTileBlocks = kChooses<S> || kStochastic<S> ? 2 : 4;

// x / 16 for x not negative, without the care that signed division takes.
__device__ __forceinline__ int64_t blocks_of(int64_t x) { return x >> 4; }

// Rows are 16 bytes longer than their elements, and 32 bytes more lie between groups of 16: so neither reads along rows
// nor reads down columns meet in a bank.
template <class T>
struct Tile {
  using Stored = typename T::Stored;
  using Pair = std::conditional_t<Block<T>::kPairs, uint32_t, uint2>;  // of neighbours in a row
  static constexpr int kElementBytes = kTileCols * sizeof(Stored), kRowBytes = kElementBytes + 16;
  alignas(16) char bytes[kTileRows * kRowBytes + kTileRows / kBlock * 32];

  __device__ __forceinline__ const char* row(int r) const { return bytes + r * kRowBytes + r / kBlock * 32; }
  __device__ __forceinline__ char* row(int r) { return bytes + r * kRowBytes + r / kBlock * 32; }
  __device__ __forceinline__ Block<T> block(int r, int c) const {  // the c-th of row r
    Block<T> b;
#pragma unroll
    for (int i = 0; i < Block<T>::kWords; ++i)
      b.word[i] = reinterpret_cast<const uint4*>(row(r))[c * Block<T>::kWords + i];
    return b;
  }
  __device__ __forceinline__ Pair pair(int r, int c) const { return reinterpret_cast<const Pair*>(row(r))[c]; }
  __device__ __forceinline__ float element(int r, int c) const {
    return T::load(reinterpret_cast<const Stored*>(row(r))[c]);
  }
};

// ---------------------------------------------------------------- which tiles
// x as it is stored.
struct Source {
  int64_t batch, rows, cols;

  __host__ __device__ explicit Source(const QuantShape& s)
      : batch(s.batch), rows(s.transposed ? s.cols : s.rows), cols(s.transposed ? s.rows : s.cols) {}
};

struct TilePlace {
  int64_t matrix, row, col;
};

// A thread block has a run of tiles down a strip of columns of a matrix: the grid is strips, runs, matrices. Down, so
// that the scales that share a sector of the transposed result are written close in time.
struct Runs {
  dim3 grid;
  int tiles;  // in a run

  Runs(const Source& x, int resident) {
    constexpr int64_t kMost = 32768;  // of the 65535 that grid dimensions y and z allow
    const int64_t strips = (x.cols + kTileCols - 1) / kTileCols, down = (x.rows + kTileRows - 1) / kTileRows;
    const int64_t all = strips * down * x.batch, places = static_cast<int64_t>(multiprocessors()) * resident;
    tiles = static_cast<int>(std::clamp<int64_t>((all + places - 1) / places, 1, kTilesHeld));
    grid = dim3(static_cast<unsigned>(strips), static_cast<unsigned>(std::min((down + tiles - 1) / tiles, kMost)),
                static_cast<unsigned>(std::min(x.batch, kMost)));
  }
};

// ---------------------------------------------------------------- shared memory
// The codes and scales of blocks along columns wait here until those of a run are together: 32 bytes of codes and 4 of
// scales a column and tile, each to a cache line of its own, are more requests than the L2 cache answers at the speed
// of memory.
struct Held {
  static constexpr int kBlocks = kTilesHeld * kTileRows / kBlock,
                       kPitch = kBlocks * kBlock / 2 + 16;  // against conflicts
  alignas(16) uint8_t codes[kTileCols][kPitch];
  alignas(16) uint8_t scales[kTileCols][kBlocks];
};

// ---------------------------------------------------------------- loading
// Tiles on their way.
template <class T>
struct Stages {
  static constexpr int kCount = Block<T>::kPairs ? 2 : 1;  // what fits 48 KB
  Tile<T> tile[kCount];
};

// Copies one tile after the other of a run, down the rows, without registers in between. A thread has the same 16-byte
// word of every kRowsAtOnce-th row.
template <class T>
class Loader {
  using Stored = typename T::Stored;
  static constexpr int kVector = 16 / sizeof(Stored), kVectors = kTileCols / kVector, kRowsAtOnce = kThreads / kVectors;

 public:
  __device__ __forceinline__ Loader(const void* x, const Source& source, const TilePlace& first)
      : next_(static_cast<const Stored*>(x) + (first.matrix * source.rows + first.row + own_row()) * source.cols +
              first.col + own_col()),
        stride_(kRowsAtOnce * source.cols),
        rows_left_(source.rows - first.row < INT_MAX ? static_cast<int>(source.rows - first.row) : INT_MAX),
        cols_left_(static_cast<int>(source.cols - first.col < kTileCols ? source.cols - first.col : kTileCols)),
        aligned_(source.cols * sizeof(Stored) % 16 == 0) {}

  // What is outside the matrix stays as it is in the tile.
  __device__ __forceinline__ void load(Tile<T>& tile) {
    char* to = tile.bytes + to_;
    if (aligned_ && rows_left_ >= kTileRows && cols_left_ == kTileCols) {
#pragma unroll
      for (int i = 0; i < kTileRows; i += kRowsAtOnce, next_ += stride_) copy_vector(to + below(i));
    } else {
#pragma unroll 1
      for (int i = 0; i < kTileRows; i += kRowsAtOnce, next_ += stride_) {
        if (own_row() + i >= rows_left_ || own_col() >= cols_left_) continue;
        if (aligned_)
          copy_vector(to + below(i));
        else
#pragma unroll 1
          for (int e = 0; e < kVector && own_col() + e < cols_left_; ++e)
            reinterpret_cast<Stored*>(to + below(i))[e] = next_[e];
      }
    }
    rows_left_ -= kTileRows;
  }

 private:
  __device__ __forceinline__ static int own_row() { return threadIdx.x / kVectors; }
  __device__ __forceinline__ static int own_col() { return threadIdx.x % kVectors * kVector; }
  // How far row own_row() + i is from row own_row(): kRowsAtOnce divides 16, and own_row() is less.
  __device__ __forceinline__ static constexpr int below(int i) { return i * Tile<T>::kRowBytes + i / kBlock * 32; }
  __device__ __forceinline__ void copy_vector(char* to) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(next_)
                 : "memory");
  }

  const Stored* next_;
  int64_t stride_;
  int to_ = own_row() * Tile<T>::kRowBytes + own_col() * static_cast<int>(sizeof(Stored));
  int rows_left_, cols_left_;
  bool aligned_;
};

// For each run of tiles of this thread block: `begin(first)` with its first place, then what that returned is called
// with each tile in turn, the next one on its way, and last to finish them.
template <class T, class Begin>
__device__ __forceinline__ void for_each_tile(Stages<T>& stages, const void* x, const Source& source, int tiles,
                                              const Begin& begin) {
  constexpr int kStages = Stages<T>::kCount;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kTileCols, step = static_cast<int64_t>(tiles) * kTileRows;
  for (int64_t matrix = blockIdx.z; matrix < source.batch; matrix += gridDim.z) {
    for (int64_t row = blockIdx.y * step; row < source.rows; row += gridDim.y * step) {
      const TilePlace first{matrix, row, col};
      const int64_t left = source.rows - row < step ? source.rows - row : step;
      const int count = static_cast<int>(left + kTileRows - 1) / kTileRows;
      Loader<T> loader(x, source, first);
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        if (i < count) loader.load(stages.tile[i]);
        asm volatile("cp.async.commit_group;");
      }
      auto&& work = begin(first);
      for (int i = 0; i < count; ++i) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
        __syncthreads();
        work(stages.tile[i % kStages]);
        __syncthreads();  // before a later tile overwrites this one
        if (i + kStages < count) loader.load(stages.tile[i % kStages]);
        asm volatile("cp.async.commit_group;");
      }
      work.finish(count);
    }
  }
}

// ---------------------------------------------------------------- what scales a line
template <class S>
__device__ __forceinline__ float given_amax(const QuantizeArgs& a, int64_t row) {
  if constexpr (S::spec.amax_scope == AmaxScope::kRow) return a.amax[row];
  return a.amax[a.shape.rows_per_amax == all_rows(a.shape) ? 0 : quotient(row, a.shape.rows_per_amax)];
}

// The amax of a window, given or found in `m`, from the index of a block in it.
__device__ __forceinline__ float window_amax(const QuantizeArgs& a, uint32_t m, int64_t block, bool here, bool writes) {
  const int64_t window = block >> 2;
  if (a.amax) return here ? a.amax[window] : 0.0f;
  const float found = float_of(canonical_nan(m));
  if (here && writes) a.found[window] = found;
  return found;
}

// Of a line; `shared` if all have one amax.
template <class S>
__device__ __forceinline__ decltype(auto) scales_of(const QuantizeArgs& a, const SharedScales<S>& shared, float amax) {
  if constexpr (kOneAmax<S>)
    return (shared);
  else
    return OwnScales<S>(amax, a.e4m3_max);
}

// What the rows of a pair found out about the 16x16 tiles of a tile, for its columns.
struct TileChoices {
  TileChoice of[kTileRows / kBlock][kTileCols / kBlock];
};

// ---------------------------------------------------------------- along rows
// A thread's row and its first block there: 16 rows x 4 blocks a warp for 16x16 tiles, else 8 whole rows.
template <bool kInTiles>
__device__ __forceinline__ int row_of_thread() {
  return kInTiles ? threadIdx.x / 64 * kBlock + threadIdx.x % 32 / 2 : threadIdx.x / 4;
}
template <bool kInTiles>
__device__ __forceinline__ int block_of_thread() {
  return kInTiles ? threadIdx.x / 32 % 2 * 4 + threadIdx.x % 2 * 2 : threadIdx.x % 4 * 2;
}

// Quantizes the tiles of a run along their rows. All threads of a thread block take part.
template <class S, class T>
class RowsPass {
 public:
  __device__ __forceinline__ RowsPass(const QuantizeArgs& args, const SharedScales<S>& shared, const TilePlace& first,
                                      TileChoices* choices = nullptr)
      : a_(args), shared_(shared), choices_(choices), blocks_(blocks_of(args.shape.cols)) {
    const int r = row_of_thread<kTiles<S>>(), c = block_of_thread<kTiles<S>>();
    row_ = first.matrix * a_.shape.rows + first.row + r;
    out_ = row_ * blocks_ + blocks_of(first.col) + c;
    const int64_t left = blocks_ - blocks_of(first.col) - c;
    inside_ = left >= 2 ? 2 : left > 0 ? left : 0;
    rows_left_ = static_cast<int>(a_.shape.rows - first.row - r < INT_MAX ? a_.shape.rows - first.row - r : INT_MAX);
    if constexpr (kStochastic<S>)
      place_ = static_cast<uint64_t>(first.row + r) * a_.stream.row_blocks + blocks_of(first.col) + c;
  }

  __device__ __forceinline__ void operator()(const Tile<T>& tile) {
    const bool here = rows_left_ > 0 && inside_ > 0;
    float amax = 0.0f;
    if constexpr (kWindows<S>) {
      uint32_t m = amax_bits(block(tile, 0).amax(), block(tile, 1).amax());
      m = amax_bits(m, __shfl_xor_sync(0xffffffffu, m, 1));
      amax = window_amax(a_, m, out_, here, threadIdx.x % 2 == 0);
    } else if constexpr (!kOneAmax<S>) {
      amax = here ? given_amax<S>(a_, row_) : 0.0f;
    }
    decltype(auto) scales = scales_of<S>(a_, shared_, amax);
    Encoded e[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) e[j] = encode(tile, j, scales);
    if (here) store(e);
    rows_left_ -= kTileRows;
    row_ += kTileRows;
    out_ += kTileRows * blocks_;
    if constexpr (kStochastic<S>) place_ += kTileRows * a_.stream.row_blocks;
  }
  __device__ __forceinline__ void finish(int) const {}

 private:
  using Rows = Lanes<2>;

  __device__ __forceinline__ static Block<T> block(const Tile<T>& tile, int j) {
    return tile.block(row_of_thread<kTiles<S>>(), block_of_thread<kTiles<S>>() + j);
  }

  template <class Scales>
  __device__ __forceinline__ Encoded encode(const Tile<T>& tile, int j, const Scales& scales) const {
    const auto x = source_of<S>(block(tile, j));
    uint32_t m = x.amax();
    if constexpr (kTiles<S>) m = Rows::max(m);
    Values v;
    x.values(v);
    const auto element = [&](int i) {
      return tile.element(row_of_thread<kTiles<S>>(), (block_of_thread<kTiles<S>>() + j) * kBlock + i);
    };
    if constexpr (kChooses<S> && kTiles<S>) {
      const Choice<S> choice(m, scales);
      const bool four = tile_takes_four<S, false>(
          choice, scales, [](const auto& error) { return Rows::sum(error(0)); },
          [&](int, Values& own) { x.values(own); }, [&](int, int i) { return element(i); },
          choices_ && threadIdx.x % 32 / 2 == 0  // one lane of a tile
              ? &choices_->of[row_of_thread<true>() / kBlock][block_of_thread<true>() + j]
              : nullptr);
      return encode_with(v, m, choice.scale(four), choice.encode(four), scales);
    } else {
      return encode_block<S>(v, m, scales, element, [&](uint32_t (&bits)[4]) {
        if constexpr (kStochastic<S>) shared_.random(place_ + j, false, bits);
      });
    }
  }

  __device__ __forceinline__ void store(const Encoded (&e)[2]) const {
    if (blocks_ % 2 == 0) {  // both inside, and aligned
      *reinterpret_cast<uint4*>(a_.data + out_ * (kBlock / 2)) =
          make_uint4(e[0].codes.x, e[0].codes.y, e[1].codes.x, e[1].codes.y);
      *reinterpret_cast<uint16_t*>(a_.scale + out_) = static_cast<uint16_t>(e[0].scale | e[1].scale << 8);
    } else {
      e[0].store(a_, out_);
      if (inside_ > 1) e[1].store(a_, out_ + 1);
    }
  }

  const QuantizeArgs& a_;
  const SharedScales<S>& shared_;
  TileChoices* choices_;    // to fill, if not null
  int64_t blocks_;          // in a row
  int64_t row_, out_;       // of the thread's blocks in this tile, and the index of the first
  int inside_, rows_left_;  // how many of the two blocks there are; rows from this one on
  uint64_t place_;          // of the first, for random bits
};

// ---------------------------------------------------------------- along columns
// A thread's pair of columns and its 16 rows: 8 pairs x 4 blocks of rows a warp.
__device__ __forceinline__ int pair_of_thread() { return threadIdx.x / 4; }
__device__ __forceinline__ int rows_of_thread() { return threadIdx.x % 4 * kBlock; }

// A block in each of two neighbouring columns.
template <class T>
struct Columns {
  typename Tile<T>::Pair row[kBlock];

  __device__ __forceinline__ void load(const Tile<T>& tile) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) row[i] = tile.pair(rows_of_thread() + i, pair_of_thread());
  }
  __device__ __forceinline__ void values(int j, Values& v) const {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      if constexpr (Block<T>::kPairs)
        v[i] = j ? high_half<T>(row[i]) : low_half<T>(row[i]);
      else
        v[i] = T::load(j ? row[i].y : row[i].x);
    }
  }
  __device__ __forceinline__ void amax(uint32_t (&m)[2]) const {
    if constexpr (Block<T>::kPairs) {
      uint32_t both = max_of_pairs<T>(row[0], row[1]);
#pragma unroll
      for (int i = 2; i < kBlock; ++i) both = max_of_pairs<T>(both, row[i]);
      both &= 0x7fff7fffu;
      m[0] = bits_of(low_half<T>(both)), m[1] = bits_of(high_half<T>(both));
    } else {
      m[0] = m[1] = 0;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        m[0] = amax_bits(m[0], row[i].x & kMagnitude);
        m[1] = amax_bits(m[1], row[i].y & kMagnitude);
      }
    }
  }
};

template <class T>
__device__ __forceinline__ Columns<Bf16> rotated(const Columns<T>& x) {
  Values v[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    x.values(j, v[j]);
    rotate<T>(v[j]);
  }
  Columns<Bf16> out;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) out.row[i] = bf16_pair(v[0][i], v[1][i]);
  return out;
}

// Quantizes the tiles of a run along their columns. All threads of a thread block take part.
template <class S, class T>
class ColumnsPass {
 public:
  __device__ __forceinline__ ColumnsPass(const QuantizeArgs& args, const SharedScales<S>& shared, Held& held,
                                         const TilePlace& first)
      : a_(args), shared_(shared), held_(held), blocks_(blocks_of(args.shape.cols)) {
    row_ = first.matrix * a_.shape.rows + first.col;
    out_ = row_ * blocks_ + blocks_of(first.row);
    const int64_t lines = a_.shape.rows - first.col;
    lines_ = static_cast<int>(lines < kTileCols ? lines : kTileCols);
    blocks_left_ =
        blocks_ - blocks_of(first.row) < INT_MAX ? static_cast<int>(blocks_ - blocks_of(first.row)) : INT_MAX;
    if constexpr (kStochastic<S>)
      place_ = static_cast<uint64_t>(first.col + 2 * pair_of_thread()) * a_.stream.row_blocks +
               blocks_of(first.row + rows_of_thread());
  }

  // `choices`, if not null, are those of the rows; kAfterRows says that there may be some.
  template <bool kAfterRows = false>
  __device__ __forceinline__ void quantize(const Tile<T>& tile, const TileChoices* choices) {
    Columns<T> stored;
    stored.load(tile);
    const auto x = source_of<S>(stored);
    uint32_t m[2];
    x.amax(m);
    if constexpr (kTiles<S>) m[0] = m[1] = Cols::max(amax_bits(m[0], m[1]));
    bool four = false;
    if constexpr (kChooses<S> && kTiles<S>) four = takes_four<kAfterRows>(tile, x, m[0], choices);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int line = 2 * pair_of_thread() + j, block = rows_of_thread() / kBlock;
      float amax = 0.0f;
      if constexpr (!kOneAmax<S>) {
        const bool here = line < lines_ && tile_ * kStep + block < blocks_left_;
        if constexpr (kWindows<S>)
          amax = window_amax(a_, window_max(m[j]), out_ + line * blocks_ + tile_ * kStep, here, block == 0);
        else
          amax = here ? given_amax<S>(a_, row_ + line) : 0.0f;
      }
      decltype(auto) scales = scales_of<S>(a_, shared_, amax);
      Values v;
      x.values(j, v);
      Encoded e;
      if constexpr (kChooses<S> && kTiles<S>) {
        const Choice<S> choice(m[j], scales);
        e = encode_with(v, m[j], choice.scale(four), choice.encode(four), scales);
      } else {
        e = encode_block<S>(
            v, m[j], scales, [&](int i) { return element(tile, j, i); },
            [&](uint32_t (&bits)[4]) {
              if constexpr (kStochastic<S>) shared_.random(place_ + j * a_.stream.row_blocks, true, bits);
            });
      }
      *reinterpret_cast<uint2*>(held_.codes[line] + (tile_ * kStep + block) * (kBlock / 2)) = e.codes;
      held_.scales[line][tile_ * kStep + block] = e.scale;
    }
    ++tile_;
    if constexpr (kStochastic<S>) place_ += kStep;
  }

  __device__ __forceinline__ void operator()(const Tile<T>& tile) { quantize(tile, nullptr); }

  // Writes what `tiles` tiles left, after the thread block synchronised.
  __device__ __forceinline__ void finish(int tiles) {
    const int blocks = tiles * kStep < blocks_left_ ? tiles * kStep : blocks_left_;
    uint8_t *codes = a_.data + out_ * (kBlock / 2), *scales = a_.scale + out_;
    if (blocks_ % 2 == 0 && blocks % 2 == 0)
      write<uint4, kBlock / 2>(codes, held_.codes, blocks);
    else
      write<uint2, kBlock / 2>(codes, held_.codes, blocks);
    if (blocks_ % 16 == 0 && blocks % 16 == 0 && out_ % 16 == 0)
      write<uint4, 1>(scales, held_.scales, blocks);
    else if (blocks_ % 4 == 0)
      write<uint32_t, 1>(scales, held_.scales, blocks);
    else
      write<uint8_t, 1>(scales, held_.scales, blocks);
  }

 private:
  using Cols = Lanes<4>;

  __device__ __forceinline__ static float element(const Tile<T>& tile, int j, int i) {
    return tile.element(rows_of_thread() + i, 2 * pair_of_thread() + j);
  }

  // The lines that wait, `kBytes` a block, in words that neighbouring threads write to neighbouring places.
  template <class Word, int kBytes, int kPitch>
  __device__ __forceinline__ void write(uint8_t* out, const uint8_t (&in)[kTileCols][kPitch], int blocks) const {
    constexpr int kWords = Held::kBlocks * kBytes / sizeof(Word), kLinesAtOnce = kThreads / kWords;
    const int first = threadIdx.x / kWords, at = threadIdx.x % kWords * sizeof(Word);
    if (at >= blocks * kBytes) return;
    out += first * blocks_ * kBytes + at;
#pragma unroll
    for (int line = first; line < kTileCols; line += kLinesAtOnce, out += kLinesAtOnce * blocks_ * kBytes)
      if (line < lines_) *reinterpret_cast<Word*>(out) = *reinterpret_cast<const Word*>(&in[line][at]);
  }

  template <bool kAfterRows, class X>
  __device__ __forceinline__ bool takes_four(const Tile<T>& tile, const X& x, uint32_t m,
                                             const TileChoices* choices) const {
    if (choices) {
      const TileChoice found = choices->of[rows_of_thread() / kBlock][2 * pair_of_thread() / kBlock];
      if (__all_sync(0xffffffffu, found != TileChoice::kClose)) return found == TileChoice::kFour;
    }
    return tile_takes_four<S, kAfterRows>(
        Choice<S>(m, shared_), shared_,
        [](const auto& error) {
          const float first = Cols::sum(error(0)), second = Cols::sum(error(1));
          return add_rn(first, second);
        },
        [&](int j, Values& v) { x.values(j, v); }, [&](int j, int i) { return element(tile, j, i); }, nullptr);
  }

  static constexpr int kStep = kTileRows / kBlock;

  const QuantizeArgs& a_;
  const SharedScales<S>& shared_;
  Held& held_;
  int64_t blocks_;     // in a line
  int64_t row_, out_;  // the tile's first line, and the index of the first block held
  int lines_;          // in the tile
  int blocks_left_;    // in a line, from the first held on
  int tile_ = 0;       // how many are held
  uint64_t place_;     // of the thread's first block, for random bits
};

// A kernel's shared memory is more than what may be declared: it is asked for at launch.
template <class Shared>
__device__ __forceinline__ Shared& shared_memory() {
  extern __shared__ uint4 memory[];
  return *reinterpret_cast<Shared*>(memory);
}

template <class Shared, class Args>
cudaError_t launch_tiles(void (*kernel)(Args, int), const Runs& runs, cudaStream_t stream, const Args& args) {
  const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Shared)));
  if (allowed != cudaSuccess) return allowed;
  kernel<<<runs.grid, kThreads, sizeof(Shared), stream>>>(args, runs.tiles);
  return cudaGetLastError();
}

// What a matrix has one of. The thread block then synchronises.
template <class S>
__device__ __forceinline__ void fill_scales(SharedScales<S>& shared, const QuantizeArgs& a, int64_t matrix) {
  if constexpr (kOneAmax<S>) shared.fill(given_amax<S>(a, matrix * a.shape.rows), a.e4m3_max);
  if constexpr (kStochastic<S>) shared.fill_keys(a.stream, matrix);
}

}  // namespace jnvfp4
