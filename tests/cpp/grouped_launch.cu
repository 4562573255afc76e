// Runs the kernels of grouped products on odd shapes and sizes of groups, each buffer an allocation of its size, and
// compares bits with a kernel that adds up one term after the other: numbers are such that every order has the same
// sum. Graphs run with one list of sizes after another. compute-sanitizer watches it too. A name as an argument selects
// cases: quick, all, fused, few.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "device_memory.h"
#include "plan/sm90_grouped.h"
#include "rule.cuh"

using namespace jnvfp4;

namespace {

std::mt19937 random_engine(17);
int random_below(int n) { return static_cast<int>(random_engine() % static_cast<uint32_t>(n)); }

std::vector<uint8_t> random_codes(int64_t count) {
  std::vector<uint8_t> v(static_cast<size_t>(count / 2));
  for (uint8_t& byte : v) byte = static_cast<uint8_t>(random_engine() >> 8);
  return v;
}
// Powers of two.
std::vector<uint8_t> random_scales(int64_t count) {
  std::vector<uint8_t> v(static_cast<size_t>(count));
  for (uint8_t& byte : v) byte = random_below(2) ? 0x38 : 0x40;
  return v;
}
std::vector<float> random_amaxes(int64_t count) {
  std::vector<float> v(static_cast<size_t>(count));
  for (float& amax : v) amax = 0.5f + static_cast<float>(random_below(1 << 20)) / 65536.0f;
  return v;
}
// Integers up to 8.
std::vector<uint8_t> random_dense(int64_t count, Float kind) {
  std::vector<uint8_t> v(static_cast<size_t>(count) * 2);
  for (int64_t i = 0; i < count; ++i) {
    const float x = static_cast<float>(random_below(17) - 8);
    const uint16_t bits = kind == Float::kBf16 ? Bf16::store(x) : F16::store(x);
    std::memcpy(v.data() + i * 2, &bits, 2);
  }
  return v;
}

// ---------------------------------------------------------------- the reference
__global__ void reference(GroupedArgs g) {
  const int64_t col = blockIdx.x * int64_t{blockDim.x} + threadIdx.x, row = blockIdx.y;
  if (col >= g.shape.cols) return;
  int64_t group = -1, end = 0;
  for (int64_t i = 0; i < g.shape.groups && group < 0; ++i) {
    end += max(g.sizes[i], 0);
    if (row < end) group = i;
  }
  float y = 0;
  if (group >= 0) {
    const int64_t b_row = group * g.shape.cols + col;
    y = gemm_epilogue(dot_by_rule(g.a, g.b, row, b_row, g.shape.depth), alpha_by_rule(g.a, g.b, row, b_row), 0, false);
  }
  store_result(g.kind, g.out, row * g.shape.cols + col, y);
}

// ---------------------------------------------------------------- cases
struct Case {
  GroupedShape shape;
  std::vector<int32_t> sizes;
};
enum class How { kLaunch, kTwice, kGraph };
int failures = 0, products = 0;

const char* name_of_kind(Float kind) { return kind == Float::kF32 ? "f32" : kind == Float::kBf16 ? "bf16" : "f16"; }

// Sizes of groups, and the bytes of the results that they must have.
struct Round {
  std::vector<int32_t> sizes;
  std::vector<uint8_t> expected;
};

void compare(const GroupedArgs& args, const std::vector<uint8_t>& got, const std::vector<uint8_t>& expected,
             const std::string& what) {
  ++products;
  if (got == expected) return;
  const int64_t bytes = size_of(args.kind);
  int64_t wrong = 0, first = -1;
  for (int64_t i = 0; i < static_cast<int64_t>(got.size()) / bytes; ++i)
    if (std::memcmp(got.data() + i * bytes, expected.data() + i * bytes, static_cast<size_t>(bytes)) != 0) {
      if (first < 0) first = i;
      ++wrong;
    }
  if (++failures <= 20)
    std::printf("WRONG %s: %lld results, the first at row %lld column %lld\n", what.c_str(),
                static_cast<long long>(wrong), static_cast<long long>(first / args.shape.cols),
                static_cast<long long>(first % args.shape.cols));
}

void run_one(const GroupedArgs& args, const GroupedTiles& tiles, const Buffer& scratch, const Buffer& out,
             const Buffer& sizes, How how, const std::vector<Round>& rounds, const std::string& what) {
  scratch.poison();
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  cudaGraphExec_t program = nullptr;
  if (how == How::kGraph) {
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int i = 0; i < 3; ++i) check(launch_sm90_grouped(args, tiles, scratch.as<void>(), stream), "launch");
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&program, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  for (const Round& round : rounds) {
    out.poison(), sizes.set(round.sizes);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    if (program)
      check(cudaGraphLaunch(program, stream), "cudaGraphLaunch");
    else
      for (int i = 0; i < (how == How::kTwice ? 2 : 1); ++i)
        check(launch_sm90_grouped(args, tiles, scratch.as<void>(), stream), what.c_str());
    check(cudaStreamSynchronize(stream), what.c_str());
    compare(args, out.host(), round.expected, what);
  }
  if (program) check(cudaGraphExecDestroy(program), "cudaGraphExecDestroy");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

// Those of the case, and for graphs others of the same groups: all rows in the last one, none, and those of the case in
// the other order.
std::vector<std::vector<int32_t>> sizes_of_rounds(const Case& c, How how) {
  if (how != How::kGraph) return {c.sizes};
  std::vector<int32_t> last(c.sizes.size(), 0);
  last.back() = static_cast<int32_t>(c.shape.rows);
  return {c.sizes, last, std::vector<int32_t>(c.sizes.size(), 0), {c.sizes.rbegin(), c.sizes.rend()}};
}

// kinds: 0 NVFP4, 1 bfloat16, 2 float16 as a.
void run(const Case& c, int kind, Float out_kind, bool each, const std::vector<GroupedTiles>& every, How how) {
  const GroupedShape& s = c.shape;
  const Buffer sizes(c.sizes);
  const int64_t b_rows = s.groups * s.cols;
  const Buffer b(random_codes(b_rows * s.depth)), b_scale(random_scales(b_rows * s.depth / 16));
  const Buffer b_amax(random_amaxes(each ? b_rows : s.groups)), a_amax(random_amaxes(each ? s.rows : 1));
  const Float dense = kind == 2 ? Float::kF16 : Float::kBf16;
  const Buffer a(kind ? random_dense(s.rows * s.depth, dense) : random_codes(s.rows * s.depth));
  const Buffer a_scale(random_scales(kind ? 0 : s.rows * s.depth / 16));
  const int64_t bytes = s.rows * s.cols * size_of(out_kind);
  const Buffer out(bytes), expected(bytes);
  GroupedArgs args{};
  args.a = {a.as<void>(),
            kind ? nullptr : a_scale.as<uint8_t>(),
            kind ? nullptr : a_amax.as<float>(),
            dense,
            {each ? 1 : s.rows, 0},
            448.0f};
  args.b = {b.as<void>(), b_scale.as<uint8_t>(), b_amax.as<float>(), Float::kBf16, {each ? 1 : s.cols, 0}, 448.0f};
  args.sizes = sizes.as<int32_t>(), args.kind = out_kind, args.shape = s;
  args.out = expected.as<void>();
  std::vector<Round> rounds;
  for (const auto& v : sizes_of_rounds(c, how)) {
    rounds.push_back({v, {}});
    sizes.set(rounds.back().sizes);
    reference<<<dim3(static_cast<unsigned>((s.cols + 127) / 128), static_cast<unsigned>(s.rows)), 128>>>(args);
    check(cudaDeviceSynchronize(), "reference");
    rounds.back().expected = expected.host();
  }
  args.out = out.as<void>();
  for (const GroupedTiles& tiles : every) {
    if (tiles.pinned && kind) continue;
    const Buffer scratch(grouped_scratch(s, tiles).bytes + 1);
    char what[160];
    std::snprintf(what, sizeof what, "G%lld M%lld N%lld K%lld tokens %d%s%s a%d out %s each %d sizes %d %d %d how %d",
                  static_cast<long long>(s.groups), static_cast<long long>(s.rows), static_cast<long long>(s.cols),
                  static_cast<long long>(s.depth), tiles.tokens, tiles.tails ? " tails" : "",
                  tiles.pinned ? " pinned" : "", kind, name_of_kind(out_kind), each, c.sizes[0],
                  c.sizes.size() > 1 ? c.sizes[1] : -9, c.sizes.size() > 2 ? c.sizes[2] : -9, static_cast<int>(how));
    run_one(args, tiles, scratch, out, sizes, how, rounds, what);
  }
}

std::vector<int32_t> fuzzed(int64_t groups, int64_t rows) {
  constexpr int kSizes[] = {0,  0,  1,  1,  3,   7,   8,   9,   15,  16, 17,
                            31, 33, 63, 65, 127, 128, 129, 256, 300, -1, -2147483647};
  std::vector<int32_t> v(static_cast<size_t>(groups));
  for (int32_t& size : v) size = kSizes[random_below(22)];
  if (random_below(4) == 0) v[static_cast<size_t>(random_below(static_cast<int>(groups)))] = static_cast<int32_t>(rows);
  if (random_below(8) == 0) v[static_cast<size_t>(random_below(static_cast<int>(groups)))] = 2147483647;
  return v;
}

const std::vector<GroupedTiles> kTiles{
    {256}, {256, true}, {64}, {256, false, true}, {128, false, true}, {64, false, true}};
const std::vector<GroupedTiles> kFewRows{{0}};

void boundaries(bool quick) {
  const std::vector<std::vector<int32_t>> sizes{{0, 0, 0, 0},   {1, 15, 16, 17},  {0, 0, 90, 0},    {90, 0, 0, 0},
                                                {0, 0, 0, 300}, {20, 20, 20, 20}, {-5, 17, -1, 16}, {90, 1, 1, 1}};
  for (const auto& v : sizes)
    for (int64_t k : {16, 48, 272}) {
      run({{90, 4, 130, k}, v}, quick ? 0 : random_below(3), Float::kBf16, k == 48, kTiles, How::kLaunch);
    }
}

void fuzz(int count, int64_t most_rows, int64_t most_cols, bool few) {
  constexpr int64_t kDepths[] = {16, 48, 64, 128, 256, 320, 512, 1040, 2048, 4352};
  for (int i = 0; i < count; ++i) {
    const int64_t groups = i % 7 == 6 ? 300 + random_below(900) : 1 + random_below(12);
    const GroupedShape s{1 + random_below(static_cast<int>(most_rows)), groups,
                         groups > 100 ? 8 + random_below(40) : 1 + random_below(static_cast<int>(most_cols)),
                         groups > 100 ? 256 : kDepths[random_below(10)]};
    GroupedShape shape = s;
    if (random_below(2)) shape.cols = (s.cols + 7) / 8 * 8;
    run({shape, fuzzed(groups, s.rows)}, i % 3, kFloats[random_below(3)], random_below(2) != 0, few ? kFewRows : kTiles,
        static_cast<How>(random_below(3)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "all";
  const bool quick = which == "quick";
  if (which != "few") {
    boundaries(quick);
    fuzz(quick ? 12 : 150, quick ? 300 : 700, 700, false);
    if (!quick)
      run({{2000, 16, 512, 7168}, {600, 500, 300, 200, 100, 50, 20, 0, 0, 9, 8, 7, 6, 5, 4, 3}}, 0, Float::kBf16, false,
          kTiles, How::kTwice);
  }
  if (which != "fused") fuzz(quick ? 12 : 200, 40, 700, true);
  if (which != "fused" && !quick)
    for (int kind : {0, 1, 2})
      for (int64_t k : {4096, 7168}) {
        run({{16, 8, 1536, k}, {8, 3, 2, 1, 1, 1, 0, 0}}, kind, Float::kBf16, false, kFewRows, How::kTwice);
        run({{16, 3, 2048, k}, {14, 1, 1}}, kind, Float::kBf16, true, kFewRows, How::kLaunch);
        run({{100, 7, 1024, k}, {50, 20, 9, 8, 7, 0, 3}}, kind, Float::kF32, true, kFewRows, How::kLaunch);
      }
  std::printf("%d products, %d wrong\n", products, failures);
  return failures != 0;
}
