// Passes over tiles (tile.cuh): their quantization along either axis.
#pragma once

#include <climits>

#include "choose.cuh"
#include "tile.cuh"

namespace jnvfp4 {

// ---------------------------------------------------------------- what scales a line
// The amax of a window, given or found in `m`, from the index of a block in it.
__device__ __forceinline__ float window_amax(const QuantizeArgs& a, uint32_t m, int64_t block, bool here, bool writes) {
  const int64_t window = block >> 2;
  if (a.amax) return here ? a.amax[window] : 0.0f;
  const float found = float_of(canonical_nan(m));
  if (here && writes) a.found[window] = found;
  return found;
}

// Returns the scales of a line: `shared` if all have one amax.
template <class S>
__device__ __forceinline__ decltype(auto) scales_of(const QuantizeArgs& a, const SharedScales<S>& shared, float amax) {
  if constexpr (kOneAmax<S>)
    return (shared);
  else
    return OwnScales<S>(amax, a.e4m3_max);
}

// Choices that the rows of a pair made for each team's 16x16 tiles, for its columns.
struct TileChoices {
  alignas(8) TileChoice of[kTeams][kTileCols / kBlock];
};

// ---------------------------------------------------------------- along rows
// A thread's row, one of its team's, and its first block there: 16 rows x 4 blocks a warp for 16x16 tiles, else 8 whole
// rows.
template <bool kInTiles>
__device__ __forceinline__ int row_of_thread() {
  return kInTiles ? threadIdx.x / 64 * kBlock + threadIdx.x % 32 / 2 : threadIdx.x / 4;
}
template <bool kInTiles>
__device__ __forceinline__ int block_of_thread() {
  return kInTiles ? threadIdx.x / 32 % 2 * 4 + threadIdx.x % 2 * 2 : threadIdx.x % 4 * 2;
}

// Quantizes the tiles of a run along their rows. All threads of a CTA take part. Which blocks a thread writes
// is said by kOutInTiles.
template <class S, class T, bool kOutInTiles = kTiles<S>>
class RowsPass {
 public:
  __device__ __forceinline__ RowsPass(const QuantizeArgs& args, const SharedScales<S>& shared, const TilePlace& first,
                                      TileChoices* choices = nullptr)
      : a_(args), shared_(shared), choices_(choices) {
    const int64_t blocks = blocks_of(a_.shape.cols);
    const int r = row_of_thread<kOutInTiles>(), c = block_of_thread<kOutInTiles>();
    row_ = first.matrix * a_.shape.rows + first.row + r;
    out_ = row_ * blocks + blocks_of(first.col) + c;
    const int64_t left = blocks - blocks_of(first.col) - c;
    inside_ = pin_register(left >= 2 ? blocks % 2 ? 2 : kAligned : left > 0 ? 1 : 0);
    rows_left_ = static_cast<int>(a_.shape.rows - first.row - r < INT_MAX ? a_.shape.rows - first.row - r : INT_MAX);
    if constexpr (kStochastic<S>)
      place_ = static_cast<uint64_t>(first.row + r) * a_.stream.row_blocks + blocks_of(first.col) + c;
  }

  __device__ __forceinline__ void operator()(const Tile<T>& tile) {
    Encoded e[2];
    encode(tile, e);
    store(e);
  }

  __device__ __forceinline__ void encode(const Tile<T>& tile, Encoded (&e)[2]) const {
    const bool here = rows_left_ > 0 && inside_ > 0;
    float amax = 0.0f;
    if constexpr (kWindows<S>) {
      uint32_t m = amax_bits(tile.block(at_[0]).amax(), tile.block(at_[1]).amax());
      m = amax_bits(m, __shfl_xor_sync(0xffffffffu, m, 1));
      amax = window_amax(a_, m, out_, here, threadIdx.x % 2 == 0);
    } else if constexpr (!kOneAmax<S>) {
      amax = here ? given_amax<S>(a_, row_) : 0.0f;
    }
    decltype(auto) scales = scales_of<S>(a_, shared_, amax);
#pragma unroll
    for (int j = 0; j < 2; ++j) e[j] = encode(tile, j, scales);
  }
  // And goes on to the next tile.
  __device__ __forceinline__ void store(const Encoded (&e)[2]) {
    if (rows_left_ > 0 && inside_ > 0) {
      if (inside_ == kAligned) {
        *reinterpret_cast<uint4*>(a_.data + out_ * (kBlock / 2)) =
            make_uint4(e[0].codes.x, e[0].codes.y, e[1].codes.x, e[1].codes.y);
        *reinterpret_cast<uint16_t*>(a_.scale + out_) = static_cast<uint16_t>(e[0].scale + (e[1].scale << 8));
      } else {
        e[0].store(a_, out_);
        if (inside_ > 1) e[1].store(a_, out_ + 1);
      }
    }
    rows_left_ -= kTileRows;
    row_ += kTileRows;
    out_ += kTileRows / kBlock * a_.shape.cols;
    if constexpr (kStochastic<S>) place_ += kTileRows * a_.stream.row_blocks;
  }
  __device__ __forceinline__ void finish(int) const {}

 private:
  using Rows = LaneGroup<16, 2>;

  template <class Scales>
  __device__ __forceinline__ Encoded encode(const Tile<T>& tile, int j, const Scales& scales) const {
    const auto x = source_of<S>(Block<T>(tile.block(at_[j])));
    uint32_t m = x.amax();
    if constexpr (kTiles<S>) m = Rows::max(m);
    const auto element = [&](int i) {
      return tile.element(row_of_thread<kTiles<S>>(), (block_of_thread<kTiles<S>>() + j) * kBlock + i);
    };
    if constexpr (kChooses<S> && kTiles<S>) {
      const Choice<S> choice(m, scales);
      Magnitudes chosen[1];
      const bool four = tile_takes_four<S, false, Rows>(
          choice, scales, [&](int, Values& own) { x.magnitudes(own); }, [&](int, int i) { return element(i); },
          choices_ && threadIdx.x % 32 / 2 == 0  // one lane of a tile
              ? &choices_->of[team()][block_of_thread<true>() + j]
              : nullptr,
          chosen);
      return encode_chosen(x, x.signs(), choice, four, chosen[0], scales);
    } else {
      return encode_block<S>(x, x.signs(), m, scales, element, [&](uint32_t (&bits)[4]) {
        if constexpr (kStochastic<S>) shared_.random(place_ + j, false, bits);
      });
    }
  }

  static constexpr int kAligned = 3;

  const QuantizeArgs& a_;
  const SharedScales<S>& shared_;
  TileChoices* choices_;  // to fill, if not null
  int64_t row_, out_;     // of the thread's blocks in this tile, and the index of the first
  int inside_;            // how many of the two blocks there are, or kAligned
  int rows_left_;         // from this one on
  uint64_t place_;        // of the first, for random bits
  const int at_[2] = {
      pin_register(Tile<T>::place_of_block(row_of_thread<kTiles<S>>(), block_of_thread<kTiles<S>>())),
      pin_register(Tile<T>::place_of_block(row_of_thread<kTiles<S>>(), block_of_thread<kTiles<S>>() + 1))};
};

// ---------------------------------------------------------------- along columns
// A thread's pair of columns and its 16 rows.
__device__ __forceinline__ int pair_of_thread() { return team_thread(); }
__device__ __forceinline__ int rows_of_thread() { return team() * kBlock; }

// A block in each of two neighbouring columns.
template <class T>
struct Columns {
  typename Tile<T>::Pair row[kBlock];

  __device__ __forceinline__ void load(const Tile<T>& tile, int place) {  // of the first row's
#pragma unroll
    for (int i = 0; i < kBlock; ++i) row[i] = tile.template at<typename Tile<T>::Pair>(place + i * Tile<T>::kRowBytes);
  }
  __device__ __forceinline__ static int place() { return Tile<T>::place_of_pair(rows_of_thread(), pair_of_thread()); }
  struct Column {
    const Columns& x;
    int j;

    __device__ __forceinline__ void values(Values& v) const { each(v, kSign | kMagnitude, 0xffffffffu); }
    __device__ __forceinline__ void finite_values(Values& v) const {
      if constexpr (Block<T>::kPairs) {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) v[i] = finite_half_of<T>(x.row[i], j);
      } else {
        values(v);
      }
    }
    __device__ __forceinline__ void magnitudes(Values& v) const { each(v, kMagnitude, 0x7fff7fffu); }

   private:
    __device__ __forceinline__ void each(Values& v, uint32_t mask, uint32_t pair_mask) const {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        if constexpr (Block<T>::kPairs)
          v[i] = half_of<T>(x.row[i] & pair_mask, j);
        else
          v[i] = T::load((j ? x.row[i].y : x.row[i].x) & mask);
      }
    }
  };
  __device__ __forceinline__ Column column(int j) const { return {*this, j}; }
  // `code_signs` of each column's halves.
  __device__ __forceinline__ void signs(uint2 (&out)[2]) const {
    const auto half = [&](int h, uint32_t& first, uint32_t& second) {
      const auto four = [&](int i, uint32_t& a, uint32_t& b) {  // rows i, i + 2, i + 4 and i + 6 of either column
        const auto* r = row + 8 * h + i;
        if constexpr (Block<T>::kPairs) {
          const uint32_t low = half_signs(r[0], r[2]), high = half_signs(r[4], r[6]);
          a = __byte_perm(low, high, 0x5410), b = __byte_perm(low, high, 0x7632);
        } else {
          a = __byte_perm(word_signs(r[0].x, r[2].x), word_signs(r[4].x, r[6].x), 0x5410);
          b = __byte_perm(word_signs(r[0].y, r[2].y), word_signs(r[4].y, r[6].y), 0x5410);
        }
      };
      uint32_t even[2], odd[2];
      four(0, even[0], even[1]);
      four(1, odd[0], odd[1]);
      first = code_signs(even[0], odd[0]), second = code_signs(even[1], odd[1]);
    };
    half(0, out[0].x, out[1].x);
    half(1, out[0].y, out[1].y);
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
    x.column(j).values(v[j]);
    rotate<T>(v[j]);
  }
  Columns<Bf16> out;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) out.row[i] = bf16_pair(v[0][i], v[1][i]);
  return out;
}

// The codes and scales of blocks along columns wait here until those of a run are together: 32 bytes of codes and 4 of
// scales a column and tile, each to a cache line of its own, are more requests than the L2 cache answers at the speed
// of memory. Which 8 bytes of a line a block's codes are in depends on the line, so that neighbouring lines do not meet
// in a bank.
struct Held {
  static constexpr int kBlocks = kTilesHeld * kTileRows / kBlock;
  alignas(128) uint8_t codes[kTileCols][kBlocks * kBlock / 2];
  alignas(4) uint8_t scales[kBlocks][kTileCols + 4];

  // Byte offset of a block's codes in their line. Two blocks from an even one on are neighbours.
  __device__ __forceinline__ static int place(int line, int block) {
    return block * (kBlock / 2) ^ (line & 14) * kBlock / 2;
  }
};

// Shared memory of columns.
struct Windows {  // the largest magnitudes of blocks, of two tiles in turn
  alignas(8) uint32_t max[2][kTeams][kTileCols];
};
struct NoWindows {};
template <class S>
struct ColumnsShared : Held, std::conditional_t<kWindows<S>, Windows, NoWindows> {};

// Quantizes the tiles of a run along their columns. All threads of a CTA take part.
template <class S, class T>
class ColumnsPass {
 public:
  __device__ __forceinline__ ColumnsPass(const QuantizeArgs& args, const SharedScales<S>& scales,
                                         ColumnsShared<S>& shared, const TilePlace& first)
      : a_(args), scales_(scales), shared_(shared), blocks_(blocks_of(args.shape.cols)) {
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
    stored.load(tile, at_);
    const auto x = source_of<S>(stored);
    uint32_t m[2], window[2];
    x.amax(m);
    if constexpr (kTiles<S>) m[0] = m[1] = Cols::max(amax_bits(m[0], m[1]));
    if constexpr (kWindows<S>) exchange(m, window);
    bool four = false;
    Magnitudes chosen[2];
    if constexpr (kChooses<S> && kTiles<S>) four = takes_four<kAfterRows>(tile, x, m[0], choices, chosen);
    uint2 signs[2];
    x.signs(signs);
    Encoded e[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int line = 2 * pair_of_thread() + j;
      float amax = 0.0f;
      if constexpr (!kOneAmax<S>) {
        const bool here = line < lines_ && tile_ * kStep + team() < blocks_left_;
        if constexpr (kWindows<S>)
          amax = window_amax(a_, window[j], out_ + line * blocks_ + tile_ * kStep, here, team() == 0);
        else
          amax = here ? given_amax<S>(a_, row_ + line) : 0.0f;
      }
      decltype(auto) scales = scales_of<S>(a_, scales_, amax);
      const auto own = x.column(j);
      if constexpr (kChooses<S> && kTiles<S>) {
        const Choice<S> choice(m[j], scales);
        e[j] = kAfterRows ? encode_with(own, signs[j], m[j], choice.scale(four), choice.encode(four), scales)
                          : encode_chosen(own, signs[j], choice, four, chosen[j], scales);
      } else {
        e[j] = encode_block<S>(
            own, signs[j], m[j], scales, [&](int i) { return element(tile, j, i); },
            [&](uint32_t (&bits)[4]) {
              if constexpr (kStochastic<S>) scales_.random(place_ + j * a_.stream.row_blocks, true, bits);
            });
      }
      *reinterpret_cast<uint2*>(&shared_.codes[j][codes_at_ ^ tile_ * kStep * kBlock / 2]) = e[j].codes;
    }
    *reinterpret_cast<uint16_t*>(&shared_.scales[tile_ * kStep][scales_at_]) =
        static_cast<uint16_t>(e[0].scale + (e[1].scale << 8));
    next();
  }

  __device__ __forceinline__ void operator()(const Tile<T>& tile) { quantize(tile, nullptr); }

  // Holds four lines' codes of half a block, from `line` on, and their scales.
  __device__ __forceinline__ void hold(int line, int half, const uint32_t (&codes)[4], uint8_t scale) {
    const int block = tile_ * kStep + team();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      *reinterpret_cast<uint32_t*>(&shared_.codes[line + k][Held::place(line + k, block) + half * 4]) = codes[k];
    if (half == 0) *reinterpret_cast<uint32_t*>(&shared_.scales[block][line]) = scale * 0x01010101u;
  }
  __device__ __forceinline__ void next() {
    ++tile_;
    if constexpr (kStochastic<S>) place_ += kStep;
  }

  // Writes what `tiles` tiles left.
  __device__ __forceinline__ void finish(int tiles) {
    __syncthreads();  // it is there
    const int blocks = tiles * kStep < blocks_left_ ? tiles * kStep : blocks_left_;
    uint8_t* codes = a_.data + out_ * (kBlock / 2);
    if (blocks_ % 2 == 0 && blocks % 2 == 0)
      write<uint4, 2>(codes, blocks, [&](int line, int block) { return held<uint4>(line, block); });
    else
      write<uint2, 1>(codes, blocks, [&](int line, int block) { return held<uint2>(line, block); });
    uint8_t* scales = a_.scale + out_;
    if (blocks_ % 4 == 0)
      write<uint32_t, 4>(scales, blocks, [&](int line, int block) {
        const auto scale = [&](int i) { return uint32_t{shared_.scales[block + i][line]}; };
        return __byte_perm(scale(0) | scale(1) << 8, scale(2) | scale(3) << 8, 0x5410);
      });
    else
      write<uint8_t, 1>(scales, blocks, [&](int line, int block) { return shared_.scales[block][line]; });
    __syncthreads();  // before it is overwritten
  }

 private:
  using Cols = LaneGroup<4, 1>;

  __device__ __forceinline__ static float element(const Tile<T>& tile, int j, int i) {
    return tile.element(rows_of_thread() + i, 2 * pair_of_thread() + j);
  }

  template <class Word>
  __device__ __forceinline__ const Word& held(int line, int block) const {
    return *reinterpret_cast<const Word*>(&shared_.codes[line][Held::place(line, block)]);
  }

  // The words of lines, `kBlocks` blocks each, which neighbouring threads write to neighbouring places.
  template <class Word, int kBlocks, class Read>
  __device__ __forceinline__ void write(uint8_t* out, int blocks, const Read& read) const {
    constexpr int kWords = Held::kBlocks / kBlocks, kLinesAtOnce = kThreads / kWords;
    constexpr int kBytes = sizeof(Word) / kBlocks;  // of a block
    const int first = threadIdx.x / kWords, block = threadIdx.x % kWords * kBlocks;
    if (block >= blocks) return;
    out += (first * blocks_ + block) * kBytes;
#pragma unroll
    for (int line = first; line < kTileCols; line += kLinesAtOnce, out += kLinesAtOnce * blocks_ * kBytes)
      if (line < lines_) *reinterpret_cast<Word*>(out) = read(line, block);
  }

  // The amax of windows from those of their blocks, which other teams have.
  __device__ __forceinline__ void exchange(const uint32_t (&m)[2], uint32_t (&window)[2]) {
    auto& max = shared_.max[tile_ % 2];
    *reinterpret_cast<uint2*>(&max[team()][2 * pair_of_thread()]) = make_uint2(m[0], m[1]);
    __syncthreads();
    window[0] = window[1] = 0;
#pragma unroll
    for (int t = 0; t < kTeams; ++t) {
      const uint2 of = *reinterpret_cast<const uint2*>(&max[t][2 * pair_of_thread()]);
      window[0] = amax_bits(window[0], of.x), window[1] = amax_bits(window[1], of.y);
    }
  }

  template <bool kAfterRows, class X>
  __device__ __forceinline__ bool takes_four(const Tile<T>& tile, const X& x, uint32_t m, const TileChoices* choices,
                                             Magnitudes (&chosen)[2]) const {
    if (choices) {
      const TileChoice found = choices->of[rows_of_thread() / kBlock][2 * pair_of_thread() / kBlock];
      if (__all_sync(0xffffffffu, found != TileChoice::kClose)) return found == TileChoice::kFour;
    }
    return tile_takes_four<S, kAfterRows, Cols>(
        Choice<S>(m, scales_), scales_, [&](int j, Values& v) { x.column(j).magnitudes(v); },
        [&](int j, int i) { return element(tile, j, i); }, nullptr, chosen);
  }

  static constexpr int kStep = kTileRows / kBlock;

  const QuantizeArgs& a_;
  const SharedScales<S>& scales_;
  ColumnsShared<S>& shared_;
  int64_t blocks_;     // in a line
  int64_t row_, out_;  // the tile's first line, and the index of the first block held
  int lines_;          // in the tile
  int blocks_left_;    // in a line, from the first held on
  int tile_ = 0;       // how many are held
  const int at_ = pin_register(Columns<T>::place());
  const int codes_at_ = pin_register(2 * pair_of_thread() * static_cast<int>(sizeof(Held::codes[0])) +
                                     Held::place(2 * pair_of_thread(), team()));
  const int scales_at_ = pin_register(team() * static_cast<int>(sizeof(Held::scales[0])) + 2 * pair_of_thread());
  uint64_t place_;  // of the thread's first block, for random bits
};

}  // namespace jnvfp4
