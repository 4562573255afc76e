// Grouped products of few rows on Hopper: the kernel of sm90/small_m.cuh over tiles of 8 rows of a group.
//
// As many CTAs as SMs divide the columns of all tiles evenly, in groups of 16. What one has of a
// tile it computes in pieces whose sums fit into shared memory; the first loads of a piece are in flight while the
// sums of the piece before are added up. Every CTA makes the list of tiles itself, from the sizes of groups.
#include "grouped.h"
#include "groups.cuh"
#include "launch.cuh"
#include "small_m.cuh"

namespace jnvfp4 {
namespace {

using namespace small_m;

struct GroupedSmallArgs : Args {
  const int32_t* sizes;
  int count;        // of groups of rows
  int col_groups;   // of 16 columns
  int most, tiles;  // col_groups of a piece; tiles for which there is room
};

// Of tiles. `share.groups` are groups of columns.
struct Piece : Share {
  int row, live;

  struct Of {
    int64_t matrix;
    int row, live;
    __device__ __forceinline__ int64_t first_row(int) const { return row; }
    __device__ __forceinline__ int rows(const Args&) const { return live; }
  };
  __device__ __forceinline__ Of of() const { return {matrix, row, live}; }
};

// ---------------------------------------------------------------- the list of tiles
constexpr int kTileRows = 8;

// Tiles to `list`, each four words: group, first row, rows. Returns how many there are; `rows` are those of all groups.
template <int kBlockThreads>
__device__ __forceinline__ int list_small_tiles(const GroupedSmallArgs& a, uint4* list, int& rows) {
  const auto most = static_cast<uint64_t>(a.g.shape.rows);
  uint64_t before = 0;
  int tiles = 0;
  for (int first = 0; first < a.count; first += kBlockThreads) {
    const int group = first + static_cast<int>(threadIdx.x);
    const uint64_t size = size_of(a.sizes, group, a.count);
    uint64_t all;
    const uint64_t at = before + scan_block<kBlockThreads>(size, all);
    before += all;
    const int start = static_cast<int>(min(at, most)), end = static_cast<int>(min(at + size, most));
    const int own = (end - start + kTileRows - 1) / kTileRows;
    const int place = tiles + static_cast<int>(scan_block<kBlockThreads>(static_cast<uint64_t>(own), all));
    tiles += static_cast<int>(all);
    for (int t = 0; t < own; ++t) {
      const int row = start + t * kTileRows;
      list[place + t] = make_uint4(group, row, min(end - row, kTileRows), 0);
    }
  }
  rows = static_cast<int>(min(before, most));
  __syncthreads();
  return tiles;
}

// ---------------------------------------------------------------- pieces
// The pieces of a CTA, one after the other.
struct Pieces {
  const GroupedSmallArgs& a;
  const uint4* list;
  int64_t at, end;  // groups of columns, of all tiles

  __device__ __forceinline__ Pieces(const GroupedSmallArgs& args, const uint4* tiles, int count)
      : a(args), list(tiles) {
    const int64_t all = int64_t{count} * a.col_groups;
    at = quotient(all * blockIdx.x, gridDim.x), end = quotient(all * (blockIdx.x + 1), gridDim.x);
  }
  __device__ __forceinline__ bool over() const { return at >= end; }
  // Pieces of a tile differ by one group of columns at most.
  __device__ __forceinline__ Piece next() {
    const int tile = static_cast<int>(quotient(at, a.col_groups)),
              first = static_cast<int>(at - int64_t{tile} * a.col_groups);
    const int here = static_cast<int>(min(end - at, int64_t{a.col_groups - first}));
    const int pieces = (here + a.most - 1) / a.most;
    const uint4 of = list[tile];
    Piece p;
    p.rank_bits = p.rank = 0, p.ranks = 1, p.units = a.units, p.most = a.most;
    p.groups = (here + pieces - 1) / pieces, p.group0 = first, p.matrix = of.x;
    p.row = static_cast<int>(of.y), p.live = static_cast<int>(of.z);
    at += p.groups;
    return p;
  }
};

__device__ __forceinline__ void clear_rows(const GroupedSmallArgs& a, int from) {
  const int64_t words = a.g.shape.cols * (a.g.result.kind == Float::kF32 ? 2 : 1);  // of 16 bits
  auto* const out = static_cast<uint16_t*>(a.g.result.out);
  const int64_t first = from * words + int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < a.g.shape.rows * words; i += int64_t{gridDim.x} * blockDim.x) out[i] = 0;
}

template <Left left, class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    sm90_grouped_small_m_kernel(const __grid_constant__ GroupedSmallArgs a) {
  extern __shared__ __align__(128) uint8_t shared[];
  const MatmulArgs& g = a.g;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pitch = S::beside(left, a.most);
  const uint32_t kept = shared_address(shared), rings = kept + S::kKept, sums = rings + S::kWarps * S::kRing;
  const uint32_t ring = rings + warp * S::kRing, own = sums + warp * pitch, own_sums = own + lane * 16;
  const uint32_t buffer = own + a.most * S::kRowTiles * 512;
  auto* const list = reinterpret_cast<uint4*>(shared + S::kKept + S::kWarps * (S::kRing + pitch));

  wait_for_kernel_ahead();
  let_next_kernel_start();
  int rows_of_groups;
  const int tiles = list_small_tiles<S::kWarps * 32>(a, list, rows_of_groups);
  clear_rows(a, rows_of_groups);
  Pieces pieces(a, list, tiles);
  if (pieces.over()) return;

  Piece piece = pieces.next();
  Walk<S> walk(piece);
  Rows<left, S> rows(g, piece.row, piece.live);
  if (!walk.over()) rows.load(walk.unit, buffer);
  commit_copies();
  Ring<S> columns(g, piece, ring, walk);
  static_assert(S::kStages == 2 && !S::kOneUnit);
  columns.issue();
  const int codes0 = pin_register(static_cast<int>(ring + lane * 16)), both = pin_register(2 * codes0 + S::kStage);
  const int thin = pin_register(S::kScales - lane * 16 + lane / 4 * (8 * S::kParts) + lane % 4 * 2);
  const int live = min(S::kWarps, a.units);
#pragma unroll 1
  while (true) {
    prepare_slots<left, S>(a, piece, kept);
    typename Rows<left, S>::Fragments b;
    int codes = codes0;
    int taken = S::kStages;  // steps since the rows of this unit were asked for
    bool first = true;
#pragma unroll 1
    while (!walk.over()) {
      constexpr bool kCopied = Rows<left, S>::kCopied;
      if constexpr (kCopied) {
        if (taken >= S::kStages)
          wait_for_copies<S::kStages - 1>();
        else
          wait_for_copies<0>();
        __syncwarp();
      }
      rows.fragments(buffer, b);
      if constexpr (kCopied) __syncwarp();
      uint32_t at = own_sums + walk.group * (S::kRowTiles * 512);
      int steps = walk.end - walk.group;
      taken = steps;
      walk.next_turn();
      if (!walk.over()) rows.load(walk.unit, buffer);
#pragma unroll 1
      for (; steps > 0; --steps) {
        wait_for_copies<0>();
        __syncwarp();
        columns.issue();
        float d[S::kRowTiles][2][4] = {};
        multiply<left, S>(codes, codes + thin, b, d);
        keep(at, d, first);
        at += S::kRowTiles * 512, codes = both - codes;
      }
      first = false;
    }
    const Piece done = piece;
    const bool more = !pieces.over();
    if (more) {  // the first loads of the next piece, before the end of this one
      __syncwarp();
      piece = pieces.next();
      walk = Walk<S>(piece);
      rows = Rows<left, S>(g, piece.row, piece.live);
      if (!walk.over()) rows.load(walk.unit, buffer);
      commit_copies();
      columns = Ring<S>(g, piece, ring, walk);
      columns.issue();
    }
    finish_slots<left, S>(a, done, kept, sums, pitch, live);
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
  a.each_row = left == Left::kNvfp4 && g.a.map.rows_per_amax < s.rows, a.each_col = g.b.map.rows_per_amax < s.cols;
  a.sizes = g.sizes, a.count = static_cast<int>(s.groups), a.col_groups = static_cast<int>((s.cols + 15) / 16);
  a.tiles = static_cast<int>(s.rows);  // each has a row at least
  // The list takes the place of groups of columns.
  const int list = a.tiles * 16, of_group = S::kWarps * S::kRowTiles * 512;
  a.most = std::min(S::most_groups(left) - (list + 1024 + of_group - 1) / of_group, a.col_groups);
  const int bytes = S::bytes(left, a.most) + list;
  return launch_early(sm90_grouped_small_m_kernel<left, S>, static_cast<unsigned>(multiprocessors()), S::kWarps * 32, 1,
                      bytes, stream, a);
}

template <Left left>
cudaError_t launch_depth(const GroupedArgs& g, cudaStream_t stream) {
  if (g.shape.depth % 256) return launch_pieces<left, Shape<1, 1, 2, Depth::kAny>>(g, stream);
  return launch_pieces<left, Shape<1, 2, 2, Depth::kUnits>>(g, stream);
}

}  // namespace

cudaError_t launch_sm90_grouped_small_m(const GroupedArgs& g, cudaStream_t stream) {
  if (g.shape.rows > kGroupedFewRows) return cudaErrorInvalidValue;  // the plan does not ask for it
  if (g.a.quantized()) return launch_depth<Left::kNvfp4>(g, stream);
  return g.a.kind == Float::kBf16 ? launch_depth<Left::kBf16>(g, stream) : launch_depth<Left::kF16>(g, stream);
}

}  // namespace jnvfp4
