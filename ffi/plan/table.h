// A table of kernels in order of preference, and which of them solves a problem on a device: one decision for the
// lowering in Python, which needs it before a device is known, and for the FFI handler, which knows the device. Plain
// C++ that runs on any machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace jnvfp4 {

// 10 * major + minor of a GPU. Without a device, what every supported GPU can run is planned.
inline constexpr int kCpu = 0, kAnyGpu = 80, kHopper = 90, kNewest = 999;

// All kernels have run on GPUs of this capability, and those for less are compiled from the same code. On newer GPUs
// none has run: what they give is checked there before it is used (jnvfp4/_native/self_check.py).
inline constexpr int kNewestRunOn = 90;
constexpr bool has_run_on(int capability) { return capability <= kNewestRunOn; }

// 10000 * major + 100 * minor + patch; newer than any.
inline constexpr int64_t kNewestCublasLt = 999999;

struct Device {
  int capability;
  std::string_view built_for = {};    // targets, such as "sm_90a compute_80"; empty without a build: any
  std::string_view no_cublaslt = {};  // why no copy of cuBLASLt was found; empty if one was
  int64_t cublaslt_version = kNewestCublasLt;
};

std::string dotted(int capability);
std::string device_text(int capability);
// What a kernel is compiled for: compute capabilities, and the target that alone has its machine code, if any.
struct Devices {
  int least, most;
  std::string_view needs = {};

  constexpr bool include(int capability) const { return least <= capability && capability <= most; }
};
inline constexpr Devices kCpuAlone{kCpu, kCpu}, kAnyGpuFrom80{kAnyGpu, kNewest}, kSm90a{kHopper, kHopper, "90a"};

// Why a kernel does not run on a device; empty if it does.
std::string wrong_device(std::string_view kernel, const Devices& devices, const Device& device);
// The error text where no plan on a device fits the program.
std::string no_plan(std::string_view planned, int64_t scratch, const Device& device, const std::string& cause);

// Why a kernel cannot run a problem: the first reason of several, or null.
template <auto... kNeeds, class Problem>
const char* all(const Problem& p) {
  const char* reason = nullptr;
  static_cast<void>(((reason = kNeeds(p)) || ...));
  return reason;
}

template <class Problem>
struct KernelRow {
  struct Options {
    int64_t (*scratch)(const Problem&) = nullptr;   // bytes of scratch memory; null: none
    std::string (*lacks)(const Device&) = nullptr;  // a library, which the text names; empty if nothing
    bool of_xla = false;                            // XLA operations, not the handler
    bool (*whole_bias)(const Problem&) = nullptr;   // adds a bias of the shape of the result; null: never
    bool (*norm)(const Problem&) = nullptr;         // normalizes the rows of a; null: never
  };

  std::string_view name;
  Devices devices;
  const char* (*cannot)(const Problem&);  // a reason, or null
  Options options = {};

  bool takes_whole_bias(const Problem& p) const { return options.whole_bias && options.whole_bias(p); }
  bool takes_norm(const Problem& p) const { return options.norm && options.norm(p); }
  int64_t scratch_bytes(const Problem& problem) const { return options.scratch ? options.scratch(problem) : 0; }

  // Why it cannot solve a problem on a device; empty if it can.
  std::string why_not(const Problem& problem, const Device& device) const {
    std::string elsewhere = wrong_device(name, devices, device);
    if (!elsewhere.empty()) return elsewhere;
    if (const char* reason = cannot(problem)) return std::string(name) + " cannot: " + reason;
    return options.lacks ? options.lacks(device) : std::string();
  }
};

template <class Problem>
class KernelTable {
 public:
  using Row = KernelRow<Problem>;

  template <size_t kRows>
  constexpr explicit KernelTable(const Row (&rows)[kRows]) : begin_(rows), end_(rows + kRows) {}
  const Row* begin() const { return begin_; }
  const Row* end() const { return end_; }

  // Null if no kernel has the name.
  const Row* find(std::string_view name) const {
    for (const Row& row : *this)
      if (row.name == name) return &row;
    return nullptr;
  }

  // The first kernel that can. Null if none can.
  const Row* plan(const Problem& problem, const Device& device) const {
    for (const Row& row : *this)
      if (row.why_not(problem, device).empty()) return &row;
    return nullptr;
  }

  // Finds the kernel that a handler runs on a device, where the program was lowered for `planned` and has that much
  // scratch: that kernel, or another one that fits. An error text, or empty.
  std::string adapt(std::string_view planned, const Problem& problem, const Device& device, int64_t scratch,
                    std::string_view* kernel) const {
    const Row* const wanted = find(planned);
    if (!wanted) return "kernel must be one that this version has, got " + std::string(planned);
    const auto fits = [&](const Row& row) { return !row.options.of_xla && row.scratch_bytes(problem) <= scratch; };
    const std::string reason = wanted->why_not(problem, device);
    const Row* const runs = reason.empty() && fits(*wanted) ? wanted : plan(problem, device);
    if (runs && fits(*runs)) return *kernel = runs->name, std::string();
    return no_plan(planned, scratch, device,
                   wanted->options.of_xla ? std::string(planned) + " is XLA operations, not a kernel of this call"
                   : reason.empty()       ? "it needs more scratch"
                                          : reason);
  }

 private:
  const Row *begin_, *end_;
};

}  // namespace jnvfp4
