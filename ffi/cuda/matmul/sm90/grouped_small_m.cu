// Grouped decode GEMM on Hopper: the mainloop of sm90/small_m.cuh over tiles of 8 rows of a group.
//
// A CTA per SM; they divide the columns of all tiles evenly, in groups of 16. A CTA computes its part of a tile in
// pieces whose sums fit into shared memory. Every CTA makes the tile list itself, from the sizes of groups.
#include "grouped.h"
#include "groups.cuh"
#include "launch.cuh"
#include "small_m.cuh"

namespace jnvfp4 {
namespace {

using namespace small_m;

struct GroupedSmallArgs : Args {
  const int32_t* sizes;
  int num_groups;        // of rows
  int column_groups;     // of 16 columns
  int max_piece_groups;  // column groups of a piece
  int max_tiles;         // for which the list has room
};

// Work of a CTA at a time: column groups of one tile.
struct PieceWork : CtaWork {
  // Rows of the result: those of the tile.
  struct ResultRows {
    int64_t matrix;
    int row, valid_rows;
    __device__ __forceinline__ int64_t first_row(int) const { return row; }
    __device__ __forceinline__ int num_rows(const Args&) const { return valid_rows; }
  };
  __device__ __forceinline__ ResultRows result_rows() const { return {matrix, row, valid_rows}; }

  int row, valid_rows;
};

// ---------------------------------------------------------------- tile list
constexpr int kTileRows = 8;

// Writes tiles to `list`, each four words: group, first row, rows. Returns their number, and the `rows` of all groups.
template <int kBlockThreads>
__device__ __forceinline__ int list_small_tiles(const GroupedSmallArgs& a, uint4* list, int& rows) {
  const auto end_of_rows = static_cast<uint64_t>(a.g.shape.rows);
  uint64_t before = 0;
  int tiles = 0;
  for (int first = 0; first < a.num_groups; first += kBlockThreads) {
    const int group = first + static_cast<int>(threadIdx.x);
    const uint64_t size = size_of(a.sizes, group, a.num_groups);
    uint64_t all;
    const uint64_t begin = before + scan_block<kBlockThreads>(size, all);
    before += all;
    const int start = static_cast<int>(min(begin, end_of_rows)), end = static_cast<int>(min(begin + size, end_of_rows));
    const int group_tiles = (end - start + kTileRows - 1) / kTileRows;
    const int tile_idx = tiles + static_cast<int>(scan_block<kBlockThreads>(static_cast<uint64_t>(group_tiles), all));
    tiles += static_cast<int>(all);
    for (int t = 0; t < group_tiles; ++t) {
      const int row = start + t * kTileRows;
      list[tile_idx + t] = make_uint4(group, row, min(end - row, kTileRows), 0);
    }
  }
  rows = static_cast<int>(min(before, end_of_rows));
  __syncthreads();
  return tiles;
}

// ---------------------------------------------------------------- pieces
// Iterator over the pieces of a CTA.
struct PieceIterator {
  const GroupedSmallArgs& a;
  const uint4* list;
  int64_t next_group, end;  // column groups, of all tiles

  __device__ __forceinline__ PieceIterator(const GroupedSmallArgs& args, const uint4* tiles, int num_tiles)
      : a(args), list(tiles) {
    const int64_t all = int64_t{num_tiles} * a.column_groups;
    next_group = quotient(all * blockIdx.x, gridDim.x), end = quotient(all * (blockIdx.x + 1), gridDim.x);
  }
  __device__ __forceinline__ bool done() const { return next_group >= end; }
  // Returns the next piece. Pieces of a tile differ by one column group at most.
  __device__ __forceinline__ PieceWork next() {
    const int tile = static_cast<int>(quotient(next_group, a.column_groups)),
              first = static_cast<int>(next_group - int64_t{tile} * a.column_groups);
    const int tile_groups = static_cast<int>(min(end - next_group, int64_t{a.column_groups - first}));
    const int pieces = (tile_groups + a.max_piece_groups - 1) / a.max_piece_groups;
    const uint4 listed = list[tile];
    PieceWork p;
    p.log2_ranks = p.rank = 0, p.ranks = 1, p.units = a.units, p.max_groups = a.max_piece_groups;
    p.groups = (tile_groups + pieces - 1) / pieces, p.first_group = first, p.matrix = listed.x;
    p.row = static_cast<int>(listed.y), p.valid_rows = static_cast<int>(listed.z);
    next_group += p.groups;
    return p;
  }
};

// Zeroes the rows of no group, from `first_row` on.
__device__ __forceinline__ void clear_rows(const GroupedSmallArgs& a, int first_row) {
  const int64_t words = a.g.shape.cols * (a.g.result.kind == Float::kF32 ? 2 : 1);  // of 16 bits
  auto* const out = static_cast<uint16_t*>(a.g.result.out);
  const int64_t first = first_row * words + int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < a.g.shape.rows * words; i += int64_t{gridDim.x} * blockDim.x) out[i] = 0;
}

// In time order, on a grid of one CTA per SM; see sm90_small_m_kernel for what stands in <>:
//
//   set-up      wait for the previous kernel, launch dependents
//               list the tiles in shared memory, by prefix sums of the sizes; zero the rows of no group
//               CTA i of n gets column groups [i * all / n, (i + 1) * all / n) of all tiles; done if it has none
//               start the loads of piece 0: rows of a of its tile, first group of columns
//   per piece, at most max_piece_groups column groups of one tile:
//     alpha and bias of the thread's first slot -> epilogue_smem
//     <mainloop>   each warp sums its units of K over the column groups
//     start the loads of the next piece, in flight during the epilogue of this one
//     <epilogue>   without clusters; masked to the rows of the tile
//     __syncthreads, since the next piece overwrites the sums
template <Left left, class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    sm90_grouped_small_m_kernel(const __grid_constant__ GroupedSmallArgs a) {
  static_assert(S::kStages == 2 && !S::kOneUnit);
  extern __shared__ __align__(128) uint8_t shared[];
  const MatmulArgs& g = a.g;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pitch = S::work_bytes(left, a.max_piece_groups);
  const uint32_t epilogue_smem = shared_address(shared), rings = epilogue_smem + S::kEpilogueBytes;
  const uint32_t ring = rings + warp * S::kRing, sums = rings + S::kWarps * S::kRing;
  const uint32_t warp_smem = sums + warp * pitch, warp_sums = warp_smem + lane * 16;
  const uint32_t buffer = warp_smem + a.max_piece_groups * S::kRowTiles * 512;
  auto* const list = reinterpret_cast<uint4*>(shared + S::kEpilogueBytes + S::kWarps * (S::kRing + pitch));

  wait_for_previous_kernel();
  launch_dependents();
  int rows_of_groups;
  const int num_tiles = list_small_tiles<S::kWarps * 32>(a, list, rows_of_groups);
  clear_rows(a, rows_of_groups);
  PieceIterator pieces(a, list, num_tiles);
  if (pieces.done()) return;

  PieceWork piece = pieces.next();
  WarpSchedule<S> schedule(piece);
  RowLoader<left, S> rows(g, piece.row, piece.valid_rows);
  if (!schedule.done()) rows.load(schedule.unit, buffer);
  commit_copies();
  ColumnRing<S> columns(g, piece, ring, schedule);
  columns.issue();
  const int codes = pin_register(static_cast<int>(ring + lane * 16)), toggle_sum = pin_register(2 * codes + S::kStage);
  const int scales_offset = pin_register(S::kScales - lane * 16 + lane / 4 * (8 * S::kChunks) + lane % 4 * 2);
  const int active_warps = min(S::kWarps, a.units);
#pragma unroll 1
  while (true) {
    prefetch_epilogue<left, S>(a, piece, epilogue_smem);
    sum_units<left, S>(schedule, rows, columns, codes, toggle_sum, scales_offset, buffer, warp_sums);
    const PieceWork computed = piece;
    const bool more = !pieces.done();
    if (more) {
      __syncwarp();
      piece = pieces.next();
      schedule = WarpSchedule<S>(piece);
      rows = RowLoader<left, S>(g, piece.row, piece.valid_rows);
      if (!schedule.done()) rows.load(schedule.unit, buffer);
      commit_copies();
      columns = ColumnRing<S>(g, piece, ring, schedule);
      columns.issue();
    }
    run_epilogue<left, S>(a, computed, epilogue_smem, sums, pitch, active_warps);
    if (!more) return;
    __syncthreads();  // the sums have been read
  }
}

// ---------------------------------------------------------------- launch
template <Left left, class S>
cudaError_t launch_pieces(const GroupedArgs& g, cudaStream_t stream) {
  GroupedSmallArgs a{};
  const auto s = g.shape;
  a.g = {g.a, g.b, {nullptr, Float::kBf16, g.out, g.kind}, {1, s.rows, s.cols, s.depth}};
  a.units = static_cast<int>((s.depth + S::kUnit - 1) / S::kUnit);
  a.amax_per_row = left == Left::kNvfp4 && g.a.map.rows_per_amax < s.rows,
  a.amax_per_col = g.b.map.rows_per_amax < s.cols;
  a.sizes = g.sizes, a.num_groups = static_cast<int>(s.groups), a.column_groups = static_cast<int>((s.cols + 15) / 16);
  a.max_tiles = static_cast<int>(s.rows);  // each has a row at least
  // The list leaves less room for column groups.
  const int list = a.max_tiles * 16, group_bytes = S::kWarps * S::kRowTiles * 512;
  a.max_piece_groups = std::min(S::max_groups(left) - (list + 1024 + group_bytes - 1) / group_bytes, a.column_groups);
  const int bytes = S::bytes(left, a.max_piece_groups) + list;
  return launch_early(sm90_grouped_small_m_kernel<left, S>, static_cast<unsigned>(multiprocessors()), S::kWarps * 32, 1,
                      bytes, stream, a);
}

template <Left left>
cudaError_t launch_depth(const GroupedArgs& g, cudaStream_t stream) {
  if (g.shape.depth % 256) return launch_pieces<left, Tiling<1, 1, 2, Depth::kAny>>(g, stream);
  return launch_pieces<left, Tiling<1, 2, 2, Depth::kUnits>>(g, stream);
}

}  // namespace

cudaError_t launch_sm90_grouped_small_m(const GroupedArgs& g, cudaStream_t stream) {
  if (g.shape.rows > kGroupedFewRows) return cudaErrorInvalidValue;  // the plan does not ask for it
  if (g.a.quantized()) return launch_depth<Left::kNvfp4>(g, stream);
  return g.a.kind == Float::kBf16 ? launch_depth<Left::kBf16>(g, stream) : launch_depth<Left::kF16>(g, stream);
}

}  // namespace jnvfp4
