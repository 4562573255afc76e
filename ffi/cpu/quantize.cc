// quantize on the CPU: sixteen blocks at a time (lanes.h), one after the other along the rows of the result, or
// one of each of 16 rows where x is stored transposed or tiles are 16x16.
#include "../calls/quantize.h"

#include "lanes.h"
#include "parallel.h"
#include "steps.h"

namespace jnvfp4 {
namespace {

// ---------------------------------------------------------------- what is compiled for each instruction set
template <class L>
struct LoadRows {
  static JNVFP4_HD void run(const void* x, int64_t stride, int count, Tile& t) { load_rows<L>(x, stride, count, t); }
};
template <class L>
struct LoadColumns {
  static JNVFP4_HD void run(const void* x, int64_t stride, int count, Tile& t) { load_columns<L>(x, stride, count, t); }
};
template <class S>
struct QuantizeBatch {
  static JNVFP4_HD void run(Work* work, int count, bool transposed, float headroom) {
    quantize_batch<S>(work, count, transposed, headroom);
  }
};
template <bool kRotate>
struct RaiseAmax {
  static JNVFP4_HD void run(Tile& t, Lanes<uint32_t>& m) {
    if constexpr (kRotate) rotate(t);
    raise_amax(t, m);
  }
};
struct SetGlobal {
  static JNVFP4_HD void run(GlobalLanes& g, const Lanes<float>& amax, float e4m3_max) { g.set(amax, e4m3_max); }
};
template <class L>
struct RowAmax {
  static JNVFP4_HD void run(const void* x, int64_t count, float* amax) { *amax = row_amax<L>(x, count); }
};
template <class L>
struct ColumnAmax {
  static JNVFP4_HD void run(const void* x, int64_t stride, int64_t count, int width, float* amax) {
    column_amax<L>(x, stride, count, width, amax);
  }
};

template <class F>
using Function = typename Compiled<F>::Function;

// ---------------------------------------------------------------- the work
static_assert(kBatch == kWindowBlocks, "a batch across rows must hold whole windows");

// The arguments, and the kernels that they need.
struct Job : QuantizeArgs {
  int64_t element_size;
  bool across;  // lanes are rows of the result

  Function<LoadRows<F32>> load;
  Function<RaiseAmax<false>> raise;
  Function<SetGlobal> set_global;
  Function<RowAmax<F32>> row_amax;
  Function<ColumnAmax<F32>> column_amax;
  Function<QuantizeBatch<Nvfp4>> quantize;

  int64_t row_blocks() const { return shape.cols / kBlock; }
  int64_t blocks() const { return shape.batch * shape.rows * row_blocks(); }
  int64_t blocks_per_amax() const { return shape.amax.blocks_per_amax(row_blocks()); }
  const void* at(int64_t element) const { return static_cast<const char*>(x) + element * element_size; }
  bool finds_row_amax() const { return !amax && !shape.amax.windows(); }
};

Group group_along(const Job& a, int64_t block, int64_t end) {
  return {a.at(block * kBlock), kBlock, static_cast<int>(std::min<int64_t>(kLanes, end - block)), block, 1};
}

Group group_across(const Job& a, int64_t batch, int64_t row, int64_t col_block) {
  const QuantShape& s = a.shape;
  const int64_t col = col_block * kBlock, element = s.transposed ? col * s.rows + row : row * s.cols + col;
  return {a.at(batch * s.rows * s.cols + element), s.transposed ? s.rows : s.cols,
          static_cast<int>(std::min<int64_t>(kLanes, s.rows - row)),
          (batch * s.rows + row) * a.row_blocks() + col_block, a.row_blocks()};
}

// The global scales of a group, which neighbouring groups often share.
class Globals {
 public:
  void set(const Job& a, Work& w) {
    const Group& g = w.group;
    const int64_t per = a.blocks_per_amax();
    const int64_t first = g.block / per, last = (g.block + (g.count - 1) * g.step) / per;
    if (first == first_ && last == last_ && g.count == count_) return;
    Lanes<float> amax = {};
    for (int l = 0; l < g.count; ++l) amax[l] = a.amax[first == last ? first : (g.block + l * g.step) / per];
    a.set_global(w.global, amax, a.e4m3_max);
    first_ = first, last_ = last, count_ = g.count;
  }

 private:
  int64_t first_ = -1, last_ = -1;
  int count_ = 0;
};

void find_places(const Job& a, const Group& g, RandomPlaces& places) {
  const int64_t blocks = a.row_blocks();
  int64_t row = g.block / blocks, col = g.block % blocks, batch = row / a.shape.rows;
  row %= a.shape.rows;
  for (int l = 0; l < g.count; ++l) {
    const uint32_t* words = a.stream.words + batch * 4;
    const uint64_t first = words[2] | uint64_t{words[3]} << 32;
    const uint64_t block = first + static_cast<uint64_t>(row * a.stream.row_blocks + col);
    places.key[0][l] = words[0], places.key[1][l] = words[1];
    places.low[l] = static_cast<uint32_t>(block), places.high[l] = static_cast<uint32_t>(block >> 32);
    if (g.step == 1 && ++col < blocks) continue;
    if (g.step == 1) col = 0;
    if (++row == a.shape.rows) row = 0, ++batch;
  }
}

void store(const Job& a, const Group& g, const Encoded& out) {
  constexpr int64_t kCodes = sizeof out.codes[0];
  if (g.step == 1) {
    std::memcpy(a.data + g.block * kCodes, out.codes.lane, g.count * kCodes);
    std::memcpy(a.scale + g.block, out.scale.lane, g.count);
    return;
  }
  for (int l = 0; l < g.count; ++l) {
    const int64_t block = g.block + l * g.step;
    std::memcpy(a.data + block * kCodes, &out.codes[l], kCodes);
    a.scale[block] = out.scale[l];
  }
}

// The amax of windows, from those of their blocks: neighbouring lanes, or the lane of each group.
void find_windows(const Job& a, Work* work, int count) {
  Lanes<uint32_t> m[kBatch] = {};
  for (int k = 0; k < count; ++k) a.raise(work[k].tile, m[a.across ? 0 : k]);
  for (int k = 0; k < count; ++k) {
    const Group& g = work[k].group;
    Lanes<float> amax;
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t* first = &m[a.across ? 0 : k][a.across ? l : l & ~3];
      amax[l] = float_of(canonical_nan(a.across ? *first : *std::max_element(first, first + kWindowBlocks)));
    }
    for (int l = 0; l < g.count; ++l) a.found[(g.block + l * g.step) / kWindowBlocks] = amax[l];
    a.set_global(work[k].global, amax, a.e4m3_max);
  }
}

// Up to kBatch groups at a time.
class Batch {
 public:
  explicit Batch(const Job& a) : a_(a) {}

  void add(const Group& g) {
    work_[count_++].group = g;
    if (count_ == kBatch) run();
  }

  void run() {
    for (int k = 0; k < count_; ++k) {
      const Group& g = work_[k].group;
      a_.load(g.source, g.stride, g.count, work_[k].tile);
    }
    if (!a_.amax) find_windows(a_, work_, count_);
    for (int k = 0; k < count_; ++k) {
      if (a_.amax) globals_[k].set(a_, work_[k]);
      if (a_.stream.words) find_places(a_, work_[k].group, work_[k].places);
    }
    a_.quantize(work_, count_, a_.shape.transposed, a_.headroom);
    for (int k = 0; k < count_; ++k) store(a_, work_[k].group, work_[k].out);
    count_ = 0;
  }

 private:
  const Job& a_;
  int count_ = 0;
  Globals globals_[kBatch];
  Work work_[kBatch];
};

// ---------------------------------------------------------------- along rows
// Blocks [begin, end).
void quantize_along(const Job& a, int64_t begin, int64_t end) {
  Batch batch(a);
  for (int64_t block = begin; block < end; block += kLanes) batch.add(group_along(a, block, end));
  batch.run();
}

// ---------------------------------------------------------------- across rows
// A piece of one matrix: up to 64 rows of a transposed source, so that whole cache lines are used at once, or 16.
constexpr int64_t kMaxStripRows = 64, kPieceElements = 1 << 15;

struct Strips {
  int64_t rows, blocks;            // of a piece
  int64_t row_pieces, col_pieces;  // in a matrix

  Strips(const Job& a, bool whole_rows)
      : rows(a.shape.transposed ? kMaxStripRows : kLanes),
        blocks(whole_rows ? a.row_blocks() : std::min(a.row_blocks(), kPieceElements / (rows * kBlock))),
        row_pieces((a.shape.rows + rows - 1) / rows),
        col_pieces(blocks ? (a.row_blocks() + blocks - 1) / blocks : 0) {}

  int64_t count(const Job& a) const { return a.shape.batch * row_pieces * col_pieces; }
};

struct Piece {
  int64_t batch, row, row_end, block, block_end;

  Piece(const Job& a, const Strips& s, int64_t index)
      : batch(index / (s.row_pieces * s.col_pieces)),
        row(index / s.col_pieces % s.row_pieces * s.rows),
        row_end(std::min(a.shape.rows, row + s.rows)),
        block(index % s.col_pieces * s.blocks),
        block_end(std::min(a.row_blocks(), block + s.blocks)) {}
};

// A batch is the rows of a column of blocks, so that the lines of a transposed source are used at once; or four blocks
// of 16 rows, which are windows.
void quantize_across(const Job& a, const Piece& p) {
  Batch batch(a);
  const bool down = a.shape.transposed && a.amax;
  const int64_t blocks = down ? 1 : kBatch;
  for (int64_t first = p.block; first < p.block_end; first += blocks)
    for (int64_t row = p.row; row < p.row_end; row += kLanes) {
      for (int64_t block = first; block < std::min(p.block_end, first + blocks); ++block)
        batch.add(group_across(a, p.batch, row, block));
      if (!down) batch.run();
    }
  batch.run();
}

// ---------------------------------------------------------------- amax
// Find the amaxes of rows of the result, which are rows of x or, transposed, columns.
void find_rows_along(const Job& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) a.row_amax(a.at(row * a.shape.cols), a.shape.cols, a.found + row);
}

void find_rows_across(const Job& a, const Piece& p) {
  const QuantShape& s = a.shape;
  a.column_amax(a.at(p.batch * s.rows * s.cols + p.row), s.rows, s.cols, static_cast<int>(p.row_end - p.row),
                a.found + p.batch * s.rows + p.row);
}

void raise_to(float* amax, const Lanes<uint32_t>& m) {
  auto* word = reinterpret_cast<uint32_t*>(amax);
  const uint32_t own = canonical_nan(*std::max_element(m.lane, m.lane + kLanes));
  uint32_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (own > seen && !__atomic_compare_exchange_n(word, &seen, own, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// Finds the amaxes of each tensor, rotated and not, over all its pieces by atomic maxima of bits.
void find_tensors(const RhtAmaxArgs& args, const Job& a, const Piece& p) {
  const auto raise_rotated = Compiled<RaiseAmax<true>>::best();
  Lanes<uint32_t> rotated = {}, plain = {};
  for (int64_t block = p.block; block < p.block_end; ++block)
    for (int64_t row = p.row; row < p.row_end; row += kLanes) {
      const Group g = group_across(a, p.batch, row, block);
      Tile t;
      a.load(g.source, g.stride, g.count, t);
      a.raise(t, plain);
      raise_rotated(t, rotated);
    }
  const int64_t at = a.shape.amax.at(p.batch * a.shape.rows + p.row, 0);
  raise_to(args.rotated + at, rotated);
  raise_to(args.plain + at, plain);
}

// ---------------------------------------------------------------- what runs
constexpr int64_t kGrainElements = 1 << 16;  // a thread's share of work, of some microseconds

void set_source(Job& job) {
  const bool transposed = job.shape.transposed;
  with_float(job.kind, [&](auto t) {
    using T = decltype(t);
    job.element_size = sizeof(typename T::Stored);
    job.load = transposed ? Compiled<LoadColumns<T>>::best() : Compiled<LoadRows<T>>::best();
    job.row_amax = Compiled<RowAmax<T>>::best();
    job.column_amax = Compiled<ColumnAmax<T>>::best();
  });
  job.set_global = Compiled<SetGlobal>::best();
}

Job job_of(const QuantizeArgs& args, const KernelSpec& spec) {
  Job job{};
  static_cast<QuantizeArgs&>(job) = args;
  set_source(job);
  job.across = args.shape.transposed || spec.block_rows == kBlock;
  job.raise = Compiled<RaiseAmax<false>>::best();
  dispatch(spec, SupportedSpecs{}, [&](auto s) { job.quantize = Compiled<QuantizeBatch<decltype(s)>>::best(); });
  return job;
}

void run_along(ffi::ThreadPool& pool, const Job& a) {
  const int64_t unit = a.finds_row_amax() ? a.row_blocks() : kLanes;  // blocks
  if (!unit) return;
  parallel_for(pool, (a.blocks() + unit - 1) / unit, kGrainElements / (unit * kBlock), [&](int64_t begin, int64_t end) {
    Job own = a;
    if (a.finds_row_amax()) find_rows_along(a, begin, end), own.amax = a.found;
    quantize_along(own, begin * unit, std::min(a.blocks(), end * unit));
  });
}

void run_across(ffi::ThreadPool& pool, const Job& a) {
  const Strips strips(a, a.finds_row_amax());
  parallel_for(pool, strips.count(a), kGrainElements / kPieceElements, [&](int64_t begin, int64_t end) {
    Job own = a;
    if (a.finds_row_amax()) own.amax = a.found;
    for (int64_t i = begin; i < end; ++i) {
      const Piece p(a, strips, i);
      if (a.finds_row_amax()) find_rows_across(a, p);
      quantize_across(own, p);
    }
  });
}

ffi::Error run_handler(ffi::ThreadPool pool, const QuantizeArgs& args, const KernelSpec& spec) {
  quantize(pool, args, spec);
  return ffi::Error::Success();
}

ffi::Error run_pair(ffi::ThreadPool pool, const PairArgs& args, const KernelSpec& row, const KernelSpec& col) {
  quantize(pool, args.row, row);
  quantize(pool, args.col, col);
  return ffi::Error::Success();
}

ffi::Error run_rht_amax(ffi::ThreadPool pool, const RhtAmaxArgs& args) {
  Job job{};
  job.x = args.x, job.kind = args.kind, job.shape = args.shape;
  set_source(job);
  job.raise = Compiled<RaiseAmax<false>>::best();
  const int64_t count = args.shape.batch * args.shape.rows / args.shape.amax.rows_per_amax;
  std::fill_n(args.rotated, count, 0.0f), std::fill_n(args.plain, count, 0.0f);
  const Strips strips(job, false);
  parallel_for(pool, strips.count(job), kGrainElements / kPieceElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) find_tensors(args, job, Piece(job, strips, i));
  });
  return ffi::Error::Success();
}

}  // namespace

void quantize(ffi::ThreadPool& pool, const QuantizeArgs& args, const KernelSpec& spec) {
  const Job job = job_of(args, spec);
  job.across ? run_across(pool, job) : run_along(pool, job);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Quantize, (quantize_call<ffi::ThreadPool, run_handler>),
                              quantize_binding().Ctx<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizePair, (quantize_pair_call<ffi::ThreadPool, run_pair>),
                              quantize_pair_binding().Ctx<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(RhtAmax, (rht_amax_call<ffi::ThreadPool, run_rht_amax>),
                              rht_amax_binding().Ctx<ffi::ThreadPool>());

}  // namespace jnvfp4
