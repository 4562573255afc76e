// Dynamic tile scheduler of the persistent kernels: a 2-CTA cluster begins with the work tile of its own index, and
// takes each next one from a work-tile counter in global memory. With a static schedule, clusters that find no SM at
// first, because another kernel holds some, would start when the others have ended, with all of their tiles to do.
//
//   producer thread, CTA 0 and 1     request | load tile 0 ...... | take, request | load tile 1 ...... | take, request
//   scheduler thread, CTA 0              atomicAdd, to both rings           atomicAdd, to both rings
//   consumer warps, CTA 0 and 1                | compute tile 0 ...... | take | compute tile 1 ...... | take
//
// The producer requests the next tile when it begins to load one, which hides the latency of the counter. It does not
// increment the counter itself: its loop would no longer be in uniform registers.
#pragma once

#include "../../../plan/sm90_fused.h"
#include "ptx.cuh"

namespace jnvfp4 {

// ---------------------------------------------------------------- work tiles
// Unit of work of a cluster: a tile of the result, or one split of its K.
struct WorkTile {
  int matrix;             // index of the right operand's matrix
  int token, token_end;   // first row of the left operand, and end of the rows to write
  int column;             // first column of the cluster
  int split, num_splits;  // split-K index and count
  int k_begin, k_end;     // range along K, in k-steps of the kernel
  int split_tile;         // index among the tiles whose K is split, or -1
};

// Returns a / b. The first loads wait for several, a division takes about a hundred clocks, and few are needed.
__device__ __forceinline__ int quick_quotient(int a, int b) { return b == 1 ? a : a < b ? 0 : a == b ? 1 : a / b; }

// Coordinates of a tile in a matrix. Rasterization: groups of 4 token tiles go along all columns, so that clusters that
// run together share both operands in L2.
struct TileCoord {
  int token_tile, column_tile;

  __device__ __forceinline__ TileCoord(int tile, int num_token_tiles, int num_column_tiles) {
    constexpr int kGroup = 4;
    const int first = quick_quotient(tile, num_column_tiles * kGroup) * kGroup;
    const int width = min(kGroup, num_token_tiles - first), rest = tile - first * num_column_tiles;
    column_tile = quick_quotient(rest, width), token_tile = first + rest - column_tile * width;
  }
};

// Work tiles of a dense GEMM: unsplit tiles, then the splits of each other one, so that a split waits only for work
// tiles before it. Every cluster of the launch has an initial tile (clusters_of).
template <class Args, int kTokens>
struct DenseTiles {
  const Args& a;

  __device__ __forceinline__ int num_initial() const { return gridDim.x / 2; }
  __device__ __forceinline__ bool has_initial() const { return true; }
  __device__ __forceinline__ int end() const { return a.num_work_tiles; }
  __device__ __forceinline__ uint32_t* counter() const { return a.counter; }
  __device__ __forceinline__ WorkTile operator[](int i) const {
    const int splits = i < a.num_unsplit ? 1 : a.num_splits;
    const int split_tile = i < a.num_unsplit ? 0 : quick_quotient(i - a.num_unsplit, a.num_splits);
    const int split = i < a.num_unsplit ? 0 : i - a.num_unsplit - split_tile * a.num_splits;
    const int tile_idx = i < a.num_unsplit ? i : a.num_unsplit + split_tile;
    const int matrix = quick_quotient(tile_idx, a.matrix_tiles);
    const TileCoord coord(tile_idx - matrix * a.matrix_tiles, quick_quotient(a.matrix_tiles, a.column_tiles),
                          a.column_tiles);
    WorkTile tile;
    tile.matrix = matrix;
    tile.token = coord.token_tile * kTokens, tile.token_end = a.tokens;
    tile.column = coord.column_tile * static_cast<int>(kFusedCols);
    tile.split = split, tile.num_splits = a.num_splits, tile.split_tile = splits > 1 ? split_tile : -1;
    tile.k_begin = quick_quotient(a.k_steps * split, splits);
    tile.k_end = quick_quotient(a.k_steps * (split + 1), splits);
    return tile;
  }
};

// ---------------------------------------------------------------- scheduler
// Ring of tile indices in the shared memory of each CTA: words that st.async writes, a full barrier each, and one
// barrier for requests. No empty barriers are needed: when index n + 1 is requested, tile n begins to be loaded; at
// most kInFlight tiles before it have stages that are not released, and a warp that has released a stage of the tile
// before those has read its index. The other team of warps may be one tile behind. So kInFlight + 3 words are in use.
template <int kInFlight>
struct TileRing {
  static constexpr uint32_t kWords = kInFlight + 3 <= 8 ? 8 : 16;
  static constexpr int kShared = 8 * (kWords + 1) + 4 * kWords;
  static_assert(kInFlight + 3 <= kWords, "a word is read before it is written again");

  uint32_t shared;  // address of kShared bytes

  __device__ __forceinline__ uint32_t full(uint32_t n) const { return shared + 8 * (n % kWords); }
  __device__ __forceinline__ uint32_t requested() const { return shared + 8 * kWords; }
  __device__ __forceinline__ uint32_t word(uint32_t n) const { return shared + 8 * (kWords + 1) + 4 * (n % kWords); }
  __device__ __forceinline__ void init_barriers() const {
    for (uint32_t i = 0; i <= kWords; ++i) barrier_init(shared + 8 * i, 1);
  }
};

// Tiles describes the work tiles of a launch, as DenseTiles and ListedTiles do:
//   int num_initial()     number of clusters that begin with the work tile of their index: initial_tiles(),
//   bool has_initial()    whether this cluster is one of them,
//   int end()             number of work tiles,
//   uint32_t* counter()   work tiles taken beyond the initial ones, 0 when the launch begins,
//   WorkTile [index].
// C has Tiles, Ring, and the ring's offset in shared memory. kProducer: the caller is the producer thread; else all
// threads of a warp call.
template <class C, bool kProducer>
class TileScheduler {
  using Tiles = typename C::Tiles;
  using Ring = typename C::Ring;

 public:
  __device__ __forceinline__ TileScheduler(const Tiles& tiles, uint32_t shared)
      : tiles_(tiles), ring_{shared + C::kTileRingOffset} {}

  // Return the index of the first tile, and of the next one; end() or more if there is none.
  __device__ __forceinline__ int first() {
    if (tiles_.has_initial()) return start(static_cast<int>(blockIdx.x / 2));
    request();
    return next();
  }
  __device__ __forceinline__ int next() { return is_dynamic() ? start(take()) : tiles_.end(); }

  // Serves requests until an index past the last tile has been handed out. Runs in the scheduler thread.
  __device__ __forceinline__ void serve() const {
    if (!is_dynamic()) return;
    int tile = 0;
    for (uint32_t n = 0; tile < tiles_.end(); ++n) {
      barrier_wait(ring_.requested(), n & 1);
      tile = tiles_.num_initial() + static_cast<int>(atomicAdd(tiles_.counter(), 1u));
      for (uint32_t rank = 0; rank < 2; ++rank) store_async_in(ring_.word(n), tile, ring_.full(n), rank);
    }
  }

 private:
  // Returns whether there are more tiles than initial ones.
  __device__ __forceinline__ bool is_dynamic() const { return tiles_.end() > tiles_.num_initial(); }
  __device__ __forceinline__ void request() const {
    if (!kProducer || !is_dynamic()) return;
    barrier_expect(ring_.full(num_taken_), 4);
    if (cluster_rank() == 0) barrier_arrive(ring_.requested());
  }
  __device__ __forceinline__ int start(int tile) const {
    if (tile < tiles_.end()) request();
    return tile;
  }
  // Waits for the next index. The shuffle keeps what follows from it in uniform registers.
  __device__ __forceinline__ int take() {
    barrier_wait_cluster(ring_.full(num_taken_), num_taken_ / Ring::kWords & 1);
    const uint32_t tile = load_shared32(ring_.word(num_taken_++));
    return static_cast<int>(__shfl_sync(kProducer ? 1u : ~0u, tile, 0));
  }

  const Tiles& tiles_;
  const Ring ring_;
  uint32_t num_taken_ = 0;
};

}  // namespace jnvfp4
