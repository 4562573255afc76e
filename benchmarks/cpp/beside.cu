// GEMM kernels of Hopper beside a kernel that holds some SMs, as a collective of NCCL does, without JAX.
//
//   beside time w4a4:8192x8192x8192 ...       # microseconds, medians of 9
//   beside check SECONDS w4a4:1024x14336x4096 ...
//
// time: a product alone; beside 4 and 16 SMs that are held all the time, and 16 in clusters of four, as NCCL's; and
// four products in a chain, where 16 SMs are wanted for 735 us from 100 us after the start on. check: a digest of each
// result alone; then products in random order, one to three in a row, beside SMs that are held at random times: results
// must have the same digests.
//
// A case is LEFT:MxNxK. LEFT is w4a4, bf16 or fp16; fast-a, fast-b or fast-ab with window64 on these sides; or grouped,
// w4a4 with eight groups of different sizes. benchmarks/README.md has the commands that build it.
#include <chrono>
#include <functional>
#include <string>

#include "cuda/matmul/launchers.h"
#include "plan/sm90_grouped.h"
#include "plan/sm90_windows.h"
#include "timing.h"

namespace {

using namespace jnvfp4;

// ---------------------------------------------------------------- the kernel that holds SMs
__device__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
// One thread in each of some CTAs, which have an SM to themselves by their shared memory. Like a collective it begins
// when all of them are there.
__global__ void hold(uint32_t* there, uint32_t* running, uint64_t duration) {
  atomicAdd(there, 1u);
  while (*static_cast<volatile uint32_t*>(there) < gridDim.x) __nanosleep(100);
  const uint64_t start = nanoseconds();
  if (blockIdx.x == 0) *static_cast<volatile uint32_t*>(running) = 1, __threadfence_system();
  while (nanoseconds() - start < duration) __nanosleep(1000);
}

struct Held {
  int sms = 0, cluster = 1;
  double microseconds = 0;
};

class Holder {
 public:
  Holder() {
    int least = 0, greatest = 0;
    check(cudaHostAlloc(&running_, 4, cudaHostAllocMapped), "cudaHostAlloc");
    check(cudaMalloc(&there_, 4), "cudaMalloc");
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "stream");  // as XLA's collectives
    check(cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "cudaFuncSetAttribute");
  }
  void prepare() {
    *running_ = 0;
    check(cudaMemsetAsync(there_, 0, 4, stream_), "cudaMemsetAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  void start(const Held& h) {
    if (h.sms == 0) return;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(h.cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(h.sms)), config.blockDim = dim3(1), config.dynamicSmemBytes = kShared;
    config.stream = stream_, config.attrs = &attribute, config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, hold, there_, running_, static_cast<uint64_t>(h.microseconds * 1e3)), "hold");
  }
  void wait(const Held& h) const {
    while (h.sms && !*static_cast<volatile uint32_t*>(running_)) {
    }
  }
  void end() const { check(cudaStreamSynchronize(stream_), "hold"); }

 private:
  static constexpr int kShared = 231424;
  uint32_t *running_, *there_;
  cudaStream_t stream_;
};

// ---------------------------------------------------------------- products
struct Product {
  std::string name;
  int64_t bytes;
  uint8_t* out;
  std::function<cudaError_t(cudaStream_t)> run;

  void launch(cudaStream_t stream) const { check(run(stream), name.c_str()); }
};

// Its buffers stay to the end of the program.
Product product_of(const std::string& name) {
  char left[8] = {};
  long m = 0, n = 0, k = 0;
  if (std::sscanf(name.c_str(), "%7[^:]:%ldx%ldx%ld", left, &m, &n, &k) != 4) {
    std::fprintf(stderr, "a case must be LEFT:MxNxK, got %s\n", name.c_str());
    std::exit(2);
  }
  const std::string kind = left;
  const bool fast = kind.rfind("fast-", 0) == 0, grouped = kind == "grouped";
  const bool a_windows = kind == "fast-a" || kind == "fast-ab", b_windows = kind == "fast-b" || kind == "fast-ab";
  const bool dense = kind == "bf16" || kind == "fp16";
  const int64_t groups = grouped ? 8 : 1, windows = k / kWindow;
  auto* const amax = reinterpret_cast<float*>(random_bytes(4 * std::max(groups, std::max(m, n) * windows), 0, 0x45, 4));
  const MatmulOperand a{random_bytes(m * k * 2, 1, dense ? 0x3c : 0, 2),
                        dense ? nullptr : random_bytes(m * k / kBlock, 2, 0x38),
                        dense ? nullptr : amax,
                        kind == "bf16" ? Float::kBf16 : Float::kF16,
                        AmaxMap{m, a_windows ? windows : 0},
                        448.0f};
  const MatmulOperand b{random_bytes(groups * n * k / 2, 3),
                        random_bytes(groups * n * k / kBlock, 4, 0x38),
                        amax,
                        Float::kBf16,
                        AmaxMap{n, b_windows ? windows : 0},
                        448.0f};
  uint8_t* const out = random_bytes(m * n * 2, 5);
  if (grouped) {
    std::vector<int32_t> sizes(8);
    for (int i = 0; i < 8; ++i) sizes[i] = static_cast<int32_t>(m * (i + 1) / 36);  // the last rows are in no group
    auto* const on_device = reinterpret_cast<int32_t*>(random_bytes(32, 6));
    check(cudaMemcpy(on_device, sizes.data(), 32, cudaMemcpyHostToDevice), "cudaMemcpy");
    const GroupedArgs args{a, b, on_device, out, Float::kBf16, {m, groups, n, k}};
    const GroupedTiles tiles = plan_grouped_tiles(args.shape);
    uint8_t* const scratch = random_bytes(grouped_scratch(args.shape, tiles).bytes, 7);
    return {name, m * n * 2, out, [=](cudaStream_t s) { return launch_sm90_grouped(args, tiles, scratch, s); }};
  }
  const MatmulArgs args{a, b, {nullptr, Float::kBf16, out, Float::kBf16}, {1, m, n, k}};
  const FusedPlan plan = fast ? plan_windows(args.shape, a_windows, b_windows) : plan_fused(args.shape, !dense);
  const GemmShape shape = fused_shape(args.shape, plan);
  uint8_t* const scratch =
      random_bytes(fast ? windows_scratch(shape, plan).bytes : fused_scratch(shape, plan).bytes, 7);
  return {name, m * n * 2, out, [=](cudaStream_t s) {
            return fast ? launch_sm90_windows(args, plan, scratch, s) : launch_sm90_fused(args, plan, scratch, s);
          }};
}

// ---------------------------------------------------------------- time
// Microseconds of `count` products, the median of 9, where SMs are held before they start, or from 100 us after it on.
double median(const Product& product, int count, const Held& held = {}, bool after = false) {
  static Holder holder;
  static cudaStream_t stream;
  static cudaEvent_t start, end;
  if (!stream) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    for (cudaEvent_t* e : {&start, &end}) check(cudaEventCreate(e), "cudaEventCreate");
  }
  std::vector<float> times(9);
  for (float& milliseconds : times) {
    usleep(6000);
    holder.prepare();
    if (!after) holder.start(held), holder.wait(held);
    check(cudaEventRecord(start, stream), "cudaEventRecord");
    for (int i = 0; i < count; ++i) product.launch(stream);
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    const auto launched = std::chrono::steady_clock::now();
    while (after && std::chrono::steady_clock::now() - launched < std::chrono::microseconds(100)) {
    }
    if (after) holder.start(held);
    check(cudaStreamSynchronize(stream), product.name.c_str());
    holder.end();
    check(cudaEventElapsedTime(&milliseconds, start, end), "cudaEventElapsedTime");
  }
  std::nth_element(times.begin(), times.begin() + 4, times.end());
  return times[4] * 1e3;
}

void time(const Product& p) {
  median(p, 1);
  const double alone = median(p, 1), chain = median(p, 4);
  std::printf("%-28s alone %8.1f", p.name.c_str(), alone);
  for (const Held& h : {Held{4, 1, 3 * alone}, Held{16, 1, 3 * alone}, Held{16, 4, 3 * alone}}) {
    const double beside = median(p, 1, h);
    std::printf(" | %d%s %8.1f %.3f", h.sms, h.cluster > 1 ? " in fours" : "", beside, beside / alone);
  }
  const double beside = median(p, 4, {16, 4, 735}, true);
  std::printf(" | four in a chain %8.1f, beside %8.1f %+.0f\n", chain, beside, beside - chain);
  std::fflush(stdout);
}

// ---------------------------------------------------------------- bits
__global__ void digest(const uint32_t* words, int64_t count, unsigned long long* sum) {
  unsigned long long own = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const uint64_t h = (words[i] + static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u) * 0xd6e8feb86659fd93u;
    own += h ^ h >> 32;
  }
  atomicAdd(sum, own);
}

int check_bits(const std::vector<Product>& products, double seconds) {
  Holder holder;
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  unsigned long long* sums = nullptr;
  check(cudaMalloc(&sums, 3 * sizeof *sums), "cudaMalloc");
  // Of products in a row, each into memory without a result.
  const auto digests = [&](const std::vector<const Product*>& row, const std::function<void()>& after_first) {
    for (const Product* p : row) check(cudaMemsetAsync(p->out, 0x5a, p->bytes, stream), "cudaMemsetAsync");
    check(cudaMemsetAsync(sums, 0, 3 * sizeof *sums, stream), "cudaMemsetAsync");
    for (size_t i = 0; i < row.size(); ++i) {
      row[i]->launch(stream);
      if (i == 0) after_first();
    }
    for (size_t i = 0; i < row.size(); ++i)
      digest<<<1024, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(row[i]->out), row[i]->bytes / 4, sums + i);
    std::vector<uint64_t> found(row.size());
    check(cudaMemcpyAsync(found.data(), sums, found.size() * sizeof *sums, cudaMemcpyDeviceToHost, stream),
          "cudaMemcpy");
    check(cudaStreamSynchronize(stream), row[0]->name.c_str());
    holder.end();
    return found;
  };
  std::vector<uint64_t> expected;
  for (const Product& p : products) {
    expected.push_back(digests({&p}, [] {})[0]);
    std::printf("%-28s %016llx\n", p.name.c_str(), static_cast<unsigned long long>(expected.back()));
  }
  uint64_t state = 12345;
  const auto random_below = [&](int end) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int>((state >> 33) % static_cast<uint64_t>(end));
  };
  long count = 0, wrong = 0;
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < std::chrono::duration<double>(seconds)) {
    const Held held{random_below(7) * 4, 1 << random_below(3), 20.0 + random_below(400)};
    const bool before = random_below(2) == 0;
    std::vector<int> which(1 + random_below(3));
    std::vector<const Product*> row;
    for (int& i : which) row.push_back(&products[i = random_below(static_cast<int>(products.size()))]);
    holder.prepare();
    if (before) holder.start(held), holder.wait(held);
    const auto found = digests(row, [&] {
      if (!before) usleep(static_cast<unsigned>(random_below(60))), holder.start(held);
    });
    for (size_t i = 0; i < row.size(); ++i, ++count)
      if (found[i] != expected[which[i]] && ++wrong <= 20)
        std::printf("WRONG %s beside %d SMs in clusters of %d\n", row[i]->name.c_str(), held.sms, held.cluster);
  }
  std::printf("%ld products, %ld wrong\n", count, wrong);
  return wrong != 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what != "time" && what != "check") {
    std::fprintf(stderr, "beside time CASE... or beside check SECONDS CASE...\n");
    return 2;
  }
  check(cudaSetDeviceFlags(cudaDeviceScheduleSpin | cudaDeviceMapHost), "cudaSetDeviceFlags");
  std::vector<Product> products;
  for (int i = what == "time" ? 2 : 3; i < argc; ++i) products.push_back(product_of(argv[i]));
  if (what == "check") return check_bits(products, std::atof(argv[2]));
  for (const Product& p : products) time(p);
  return 0;
}
