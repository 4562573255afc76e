// Which tiles a 2-CTA cluster of a persistent kernel computes: it begins with the tile of its own number, and its next
// one is always the first that no cluster has yet. With fixed shares, clusters that find no room at first, because
// another kernel holds some SMs, would begin when the others have ended, with all of their tiles to do.
//
//   loading thread, CTA 0 and 1    ask | load tile 0 .......... | take, ask | load tile 1 .......... | take, ask
//   scheduling thread, CTA 0           atomicAdd, to both rings             atomicAdd, to both rings
//   computing warps, CTA 0 and 1            | compute tile 0 .......... | take | compute tile 1 .......... | take
//
// The next tile is asked for when a thread begins to load one, so that nobody waits for the counter in global memory.
// The loading thread does not count itself: its loop would no longer be in uniform registers.
#pragma once

#include "../../../plan/sm90_fused.h"
#include "ptx.cuh"

namespace jnvfp4 {

// ---------------------------------------------------------------- what a cluster computes at a time
// A tile of the result, or one of the parts of K that it is divided into.
struct WorkTile {
  int matrix;            // of the right operand
  int token, token_end;  // the first row of the left operand, and the end of those that are its own
  int column;            // the first column of the cluster
  int split, splits;     // which part of K, of how many
  int k_begin, k_end;    // in steps of the kernel along K
  int partial;           // its number among the tiles that have parts, or -1
};

// a / b. The first loads wait for several of them, a division takes about a hundred clocks, and few are needed.
__device__ __forceinline__ int quick_quotient(int a, int b) { return b == 1 ? a : a < b ? 0 : a == b ? 1 : a / b; }

// Where a tile is in a matrix of so many tiles of tokens and of columns. Groups of 4 tiles of tokens go along all
// columns, so that clusters that run together share both operands in L2.
struct TilePlace {
  int tokens, columns;

  __device__ __forceinline__ TilePlace(int tile, int token_tiles, int column_tiles) {
    constexpr int kGroup = 4;
    const int first = quick_quotient(tile, column_tiles * kGroup) * kGroup, width = min(kGroup, token_tiles - first);
    const int rest = tile - first * column_tiles;
    columns = quick_quotient(rest, width), tokens = first + rest - columns * width;
  }
};

// The work tiles of a product: whole tiles, then the parts of each other one, so that a part waits only for work tiles
// before it. A launch has as many clusters as begin with the work tile of their number (clusters_of).
template <class Args, int kTokens>
struct DenseTiles {
  const Args& a;

  __device__ __forceinline__ int own() const { return gridDim.x / 2; }
  __device__ __forceinline__ bool has_own() const { return true; }
  __device__ __forceinline__ int end() const { return a.work_tiles; }
  __device__ __forceinline__ uint32_t* counter() const { return a.counter; }
  __device__ __forceinline__ WorkTile operator[](int i) const {
    const int parts = i < a.whole ? 1 : a.splits, divided = i < a.whole ? 0 : quick_quotient(i - a.whole, a.splits);
    const int split = i < a.whole ? 0 : i - a.whole - divided * a.splits, all = i < a.whole ? i : a.whole + divided;
    const int matrix = quick_quotient(all, a.matrix_tiles);
    const TilePlace place(all - matrix * a.matrix_tiles, quick_quotient(a.matrix_tiles, a.pairs), a.pairs);
    WorkTile tile;
    tile.matrix = matrix;
    tile.token = place.tokens * kTokens, tile.token_end = a.tokens;
    tile.column = place.columns * static_cast<int>(kFusedCols);
    tile.split = split, tile.splits = a.splits, tile.partial = parts > 1 ? divided : -1;
    tile.k_begin = quick_quotient(a.steps * split, parts), tile.k_end = quick_quotient(a.steps * (split + 1), parts);
    return tile;
  }
};

// ---------------------------------------------------------------- who computes it
// A ring of tile numbers in the shared memory of each CTA: words that st.async writes, a barrier for each, and a
// barrier of those who ask. That a word has been read is known without one. When number n + 1 is asked for, tile n
// begins to be loaded; at most kInFlight tiles before it have stages that are not released, and who has released a
// stage of the one before these has read its number. The other team of warps may be one tile behind. So kInFlight + 3
// words are in use.
template <int kInFlight>
struct TileRing {
  static constexpr uint32_t kWords = kInFlight + 3 <= 8 ? 8 : 16;
  static constexpr int kShared = 8 * (kWords + 1) + 4 * kWords;
  static_assert(kInFlight + 3 <= kWords, "a word is read before it is written again");

  uint32_t shared;  // the address of kShared bytes

  __device__ __forceinline__ uint32_t arrived(uint32_t n) const { return shared + 8 * (n % kWords); }
  __device__ __forceinline__ uint32_t asked() const { return shared + 8 * kWords; }
  __device__ __forceinline__ uint32_t word(uint32_t n) const { return shared + 8 * (kWords + 1) + 4 * (n % kWords); }
  __device__ __forceinline__ void init_barriers() const {
    for (uint32_t i = 0; i <= kWords; ++i) barrier_init(shared + 8 * i, 1);
  }
};

// Tiles says what a launch has, as DenseTiles and ListedTiles do:
//   int own()             how many clusters begin with the work tile of their number: own_tiles(),
//   bool has_own()        whether this one does,
//   int end()             how many work tiles there are,
//   uint32_t* counter()   of those taken, 0 when the launch begins,
//   WorkTile [number].
// C has Tiles, Ring, and where in shared memory that is. kLoads: for the loading thread; else for all threads of a
// warp.
template <class C, bool kLoads>
class TileScheduler {
  using Tiles = typename C::Tiles;
  using Ring = typename C::Ring;

 public:
  __device__ __forceinline__ TileScheduler(const Tiles& tiles, uint32_t shared)
      : tiles_(tiles), ring_{shared + C::kAtTiles} {}

  // The number of the first tile, and of the next one: end() or more if there is none.
  __device__ __forceinline__ int first() {
    if (tiles_.has_own()) return begin(static_cast<int>(blockIdx.x / 2));
    ask();
    return next();
  }
  __device__ __forceinline__ int next() { return counts() ? begin(take()) : tiles_.end(); }

  // The scheduling thread: until it has handed out a number past the last tile.
  __device__ __forceinline__ void hand_out() const {
    if (!counts()) return;
    int tile = 0;
    for (uint32_t n = 0; tile < tiles_.end(); ++n) {
      barrier_wait(ring_.asked(), n & 1);
      tile = tiles_.own() + static_cast<int>(atomicAdd(tiles_.counter(), 1u));
      for (uint32_t rank = 0; rank < 2; ++rank) store_async_in(ring_.word(n), tile, ring_.arrived(n), rank);
    }
  }

 private:
  // Whether there are more tiles than clusters begin with.
  __device__ __forceinline__ bool counts() const { return tiles_.end() > tiles_.own(); }
  __device__ __forceinline__ void ask() const {
    if (!kLoads || !counts()) return;
    barrier_expect(ring_.arrived(taken_), 4);
    if (cluster_rank() == 0) barrier_arrive(ring_.asked());
  }
  __device__ __forceinline__ int begin(int tile) const {
    if (tile < tiles_.end()) ask();
    return tile;
  }
  // By a shuffle, so that what follows from the number is in uniform registers.
  __device__ __forceinline__ int take() {
    barrier_wait_cluster(ring_.arrived(taken_), taken_ / Ring::kWords & 1);
    const uint32_t tile = load_shared32(ring_.word(taken_++));
    return static_cast<int>(__shfl_sync(kLoads ? 1u : ~0u, tile, 0));
  }

  const Tiles& tiles_;
  const Ring ring_;
  uint32_t taken_ = 0;
};

}  // namespace jnvfp4
