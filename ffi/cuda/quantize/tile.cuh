// Tiles of 64 x 128 elements of x in shared memory: which of them a CTA has, and how they come there.
//
// A team of two warps loads 16 rows and works on them by itself, along rows with two neighbouring blocks a thread,
// along columns with a block in each of two neighbouring columns. So a team has all of what shares an amax or a
// decision, except windows along columns, which teams exchange. What is done with tiles stands in passes.cuh.
#pragma once

#include "block.cuh"

namespace jnvfp4 {

constexpr int kTileRows = 64, kTileCols = 128;
constexpr int kTilesHeld = 4;  // in a run, of which the codes along columns are written together
constexpr int kTeam = 64, kTeams = kThreads / kTeam;

__device__ __forceinline__ int team() { return threadIdx.x / kTeam; }
__device__ __forceinline__ int team_thread() { return threadIdx.x % kTeam; }
__device__ __forceinline__ void sync_team() {
  asm volatile("bar.sync %0, %1;" ::"r"(team() + 1), "n"(kTeam) : "memory");
}

// CTAs an SM holds, which bounds registers.
template <class S>
inline constexpr int kTileBlocks = kChooses<S> || kStochastic<S> ? 2
                                   : kWindows<S>                 ? 3
                                                                 : 4;

// x / 16 for x not negative, without the care that signed division takes.
__device__ __forceinline__ int64_t blocks_of(int64_t x) { return x >> 4; }

// Rows are 16 bytes longer than their elements, and in the second half of a row of 16-bit elements neighbouring 32
// bytes change places: so neither reads along rows nor reads down columns meet in a bank.
template <class T>
struct Tile {
  using Stored = typename T::Stored;
  using Pair = std::conditional_t<Block<T>::kPairs, uint32_t, uint2>;  // of neighbours in a row
  static constexpr int kRowBytes = kTileCols * sizeof(Stored) + 16;
  alignas(16) char bytes[kTileRows * kRowBytes];

  // Offset of the bytes from `byte` of a row on, up to the next multiple of 32.
  __device__ __forceinline__ static int place(int row, int byte) {
    return row * kRowBytes + (Block<T>::kPairs ? byte ^ (byte >> 2 & 32) : byte);
  }
  __device__ __forceinline__ static int place_of_block(int row, int block) {
    return place(row, block * kBlock * static_cast<int>(sizeof(Stored)));
  }
  __device__ __forceinline__ static int place_of_pair(int row, int pair) {
    return place(row, pair * static_cast<int>(sizeof(Pair)));
  }
  template <class Word>
  __device__ __forceinline__ const Word& at(int place) const {
    return *reinterpret_cast<const Word*>(bytes + place);
  }
  template <class Word>
  __device__ __forceinline__ Word& at(int place) {
    return *reinterpret_cast<Word*>(bytes + place);
  }
  __device__ __forceinline__ const Block<T>& block(int place) const { return at<Block<T>>(place); }
  __device__ __forceinline__ Block<T>& block(int place) { return at<Block<T>>(place); }
  __device__ __forceinline__ float element(int row, int col) const {
    return T::load(at<Stored>(place(row, col * static_cast<int>(sizeof(Stored)))));
  }
};

// ---------------------------------------------------------------- which tiles
// x as it is stored.
struct StoredShape {
  int64_t batch, rows, cols;

  __host__ __device__ explicit StoredShape(const QuantShape& s)
      : batch(s.batch), rows(s.transposed ? s.cols : s.rows), cols(s.transposed ? s.rows : s.cols) {}
};

struct TilePlace {
  int64_t matrix, row, col;
};

// A run is some tiles down a strip of columns of a matrix: down, so that the codes of a column are neighbours, and
// those of several tiles can be written together. A CTA has a few runs, one below the other; the grid is
// strips, such groups and matrices. Columns can hold kTilesHeld tiles of a run. The hardware gives out CTAs as others
// end: with equal shares for all that are resident the slowest SM takes a tenth longer.
struct Runs {
  dim3 grid;
  int64_t rows;  // of a CTA
  int tiles;     // in a run

  Runs(const StoredShape& x, int resident, int most = kTilesHeld) {
    constexpr int64_t kMost = 32768;  // of the 65535 that grid dimensions y and z allow
    const int64_t multis = multiprocessors(), down = (x.rows + kTileRows - 1) / kTileRows;
    const int64_t strips = (x.cols + kTileCols - 1) / kTileCols;
    const auto count = [&](int64_t t) { return strips * ((down + t - 1) / t) * x.batch; };
    // Quarters of tiles that the busiest SM works on; a run costs about one more.
    const auto cost = [&](int64_t t) { return (count(t) + multis - 1) / multis * (4 * t + 1); };
    tiles = 1;
    for (int more = 2; more <= most; ++more)
      if (cost(more) < cost(tiles)) tiles = more;
    // Runs are longer, and the set-up of a CTA rarer, where there is enough work for all to the end.
    const int64_t wanted = std::clamp<int64_t>(count(tiles) / (5 * multis * resident), 1, 16);
    const int64_t each = tiles * std::max(wanted, (down + kMost * tiles - 1) / (kMost * tiles));
    rows = each * kTileRows;
    grid = dim3(static_cast<unsigned>(strips), static_cast<unsigned>((down + each - 1) / each),
                static_cast<unsigned>(std::min(x.batch, kMost)));
  }
};

// ---------------------------------------------------------------- loading
constexpr int kStages = 2;  // tiles in flight

template <class T>
struct Stages {
  Tile<T> tile[kStages];
};

__device__ __forceinline__ void copy_vector(char* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}

// Copies a team's rows of one tile after the other, down the rows, without registers in between; of float16 in a tile
// of float32 through registers.
template <class T>
class Loader {
  using Stored = typename T::Stored;
  // A thread has 16-byte words: the same one of every kRowsAtOnce-th row.
  static constexpr int kVector = 16 / sizeof(Stored);
  static constexpr int kVectors = kTileCols / kVector, kRowsAtOnce = kTeam / kVectors;

 public:
  __device__ __forceinline__ Loader(const void* x, Float kind, const StoredShape& source, const TilePlace& first,
                                    int rows)
      : widens_(widens<T>(kind)),
        cols_(source.cols),
        rows_left_(rows),
        cols_left_(static_cast<int>(source.cols - first.col < kTileCols ? source.cols - first.col : kTileCols)),
        aligned_(source.cols * size() % 16 == 0),
        whole_(aligned_ && cols_left_ == kTileCols) {
    const int64_t at = (first.matrix * source.rows + first.row + row()) * source.cols + first.col + col();
    next_ = static_cast<const char*>(x) + at * size();
  }

  // Loads a tile. Outside the matrix it stays as it is, or becomes 0 where x is widened; after the last row of the CTA
  // nothing is loaded.
  __device__ __forceinline__ void load(Tile<T>& tile) {
    char* to = tile.bytes + to_;
    const char* from = next_;
    if (!widens_ && whole_ && rows_left_ >= kTileRows) {
#pragma unroll
      for (int i = 0; i < kBlock; i += kRowsAtOnce, from += kRowsAtOnce * cols_ * sizeof(Stored))
        copy_vector(to + i * Tile<T>::kRowBytes, from);
    } else if (rows_left_ > 0) {
      if (!widens_)
        load_part(to, from, cols_, rows_left_, cols_left_, aligned_);
      else if constexpr (std::is_same_v<T, Wide>)
        widen(to, from, cols_, rows_left_, cols_left_, aligned_);
    }
    asm volatile("cp.async.commit_group;");
    next_ += kTileRows * cols_ * size();
    rows_left_ -= kTileRows;
  }

 private:
  __device__ __forceinline__ static int row() { return team() * kBlock + team_thread() / kVectors; }
  __device__ __forceinline__ static int col() { return team_thread() % kVectors * kVector; }
  __device__ __forceinline__ static int place() { return Tile<T>::place(row(), team_thread() % kVectors * 16); }
  __device__ __forceinline__ int size() const { return widens_ ? 2 : sizeof(Stored); }  // of an element of x

  __device__ __noinline__ static void load_part(char* to, const char* from, int64_t cols, int rows_left, int cols_left,
                                                bool aligned) {
#pragma unroll 1
    for (int i = 0; i < kBlock; i += kRowsAtOnce, to += kRowsAtOnce * Tile<T>::kRowBytes) {
      const auto* x = reinterpret_cast<const Stored*>(from) + i * cols;
      if (row() + i >= rows_left || col() >= cols_left) continue;
      if (aligned)
        copy_vector(to, x);
      else
#pragma unroll 1
        for (int e = 0; e < kVector && col() + e < cols_left; ++e) reinterpret_cast<Stored*>(to)[e] = x[e];
    }
  }

  __device__ __noinline__ static void widen(char* to, const char* from, int64_t cols, int rows_left, int cols_left,
                                            bool aligned) {
    const int here = cols_left - col();
    const auto* x = reinterpret_cast<const uint16_t*>(from);
    uint2 word[kBlock / kRowsAtOnce];  // of all rows at once in flight
#pragma unroll
    for (int i = 0; i < kBlock / kRowsAtOnce; ++i, x += kRowsAtOnce * cols) {
      word[i] = make_uint2(0, 0);
      if (row() + i * kRowsAtOnce >= rows_left || here <= 0) continue;
      if (aligned) {
        word[i] = __ldg(reinterpret_cast<const uint2*>(x));
      } else {
        word[i].x = x[0] | (here > 1 ? x[1] : 0u) << 16;
        word[i].y = (here > 2 ? x[2] : 0u) | (here > 3 ? x[3] : 0u) << 16;
      }
    }
#pragma unroll
    for (int i = 0; i < kBlock / kRowsAtOnce; ++i) {
      const uint2 w = word[i];
      *reinterpret_cast<float4*>(to + i * kRowsAtOnce * Tile<T>::kRowBytes) =
          make_float4(low_half<F16>(w.x), high_half<F16>(w.x), low_half<F16>(w.y), high_half<F16>(w.y));
    }
  }

  const char* next_;
  bool widens_;
  int64_t cols_;
  int to_ = pin_register(place());
  int rows_left_, cols_left_;
  bool aligned_, whole_;
};

// For each matrix of this CTA `prepare(matrix)`, and for each run `begin(first)` with its first place; then what that
// returned is called with each tile of x in turn, and last to finish them. Meanwhile the next tiles are in flight,
// those of the next run too.
template <class T, class Prepare, class Begin>
__device__ __forceinline__ void for_each_tile_of(const void* x, Float kind, Stages<T>& stages,
                                                 const StoredShape& source, const Runs& runs, const Prepare& prepare,
                                                 const Begin& begin) {
  for (int64_t matrix = blockIdx.z; matrix < source.batch; matrix += gridDim.z) {
    TilePlace first{matrix, blockIdx.y * runs.rows, static_cast<int64_t>(blockIdx.x) * kTileCols};
    const int rows = static_cast<int>(source.rows - first.row < runs.rows ? source.rows - first.row : runs.rows);
    Loader<T> loader(x, kind, source, first, rows);
#pragma unroll
    for (int i = 0; i < kStages; ++i) loader.load(stages.tile[i]);
    if (matrix != blockIdx.z) __syncthreads();  // nobody uses what the last matrix needed
    prepare(matrix);
    __syncthreads();
    unsigned stage = 0;
    for (int left = (rows + kTileRows - 1) / kTileRows; left > 0; left -= runs.tiles) {
      auto&& work = begin(first);
      const int tiles = left < runs.tiles ? left : runs.tiles;
      for (int i = 0; i < tiles; ++i, stage = (stage + 1) % kStages) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
        sync_team();
        work(stages.tile[stage]);
        sync_team();  // before a later tile overwrites this one
        loader.load(stages.tile[stage]);
      }
      work.finish(tiles);
      first.row += runs.tiles * kTileRows;
    }
  }
}

// ---------------------------------------------------------------- launch
// A kernel's shared memory is more than what may be declared: it is asked for at launch.
template <class Shared>
__device__ __forceinline__ Shared& shared_memory() {
  extern __shared__ uint4 memory[];
  return *reinterpret_cast<Shared*>(memory);
}

template <class Args>
cudaError_t launch_tiles(void (*kernel)(Args, Runs), const Runs& runs, cudaStream_t stream, const Args& args,
                         int bytes) {
  if (allow_shared(reinterpret_cast<const void*>(kernel), bytes) == cudaSuccess)
    kernel<<<runs.grid, kThreads, bytes, stream>>>(args, runs);
  return cudaGetLastError();  // of either, and not to be found by the next launch
}
template <class Shared, class Args>
cudaError_t launch_tiles(void (*kernel)(Args, Runs), const Runs& runs, cudaStream_t stream, const Args& args) {
  return launch_tiles(kernel, runs, stream, args, static_cast<int>(sizeof(Shared)));
}

}  // namespace jnvfp4
