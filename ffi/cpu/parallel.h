// Work sharing over XLA's thread pool, the floating point environment, and instruction set dispatch.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

namespace jnvfp4 {

// XLA:CPU runs handlers with subnormals flushed to zero. The numerics need them.
class KeepSubnormals {
 public:
#if defined(__x86_64__)
  KeepSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }  // FTZ, DAZ
  ~KeepSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  KeepSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~(uint64_t{1} << 24)) : "memory");  // FZ
  }
  ~KeepSubnormals() { asm volatile("msr fpcr, %0" ::"r"(saved_) : "memory"); }

 private:
  uint64_t saved_;
#else
#error "jnvfp4: how to keep subnormals on this processor is not known"
#endif
};

// NEON is part of every 64-bit Arm processor, so the portable kernels use it. Its dot products of bytes came later.
enum class Isa { kPortable, kAvx2, kAvx512, kNeonDot };

inline bool has_isa(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (isa == Isa::kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::kAvx512)
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__) && defined(__linux__)
  if (isa == Isa::kNeonDot) return (getauxval(AT_HWCAP) & uint64_t{1} << 20) != 0;  // HWCAP_ASIMDDP
#elif defined(__ARM_FEATURE_DOTPROD)  // all processors that the compiler makes code for
  if (isa == Isa::kNeonDot) return true;
#endif
  return isa == Isa::kPortable;
}

inline Isa detect_isa() {
  for (const Isa best : {Isa::kAvx512, Isa::kAvx2, Isa::kNeonDot})
    if (has_isa(best)) return best;
  return Isa::kPortable;
}

inline std::atomic<Isa>& isa_in_use() {
  static std::atomic<Isa> chosen{detect_isa()};
  return chosen;
}

// The kernels to run; the best the processor has, unless a test asked for a lesser one. Same bits either way.
inline Isa isa() { return isa_in_use().load(std::memory_order_relaxed); }

// False if the processor does not have it.
inline bool use_isa(Isa wanted) {
  if (!has_isa(wanted)) return false;
  isa_in_use() = wanted;
  return true;
}

inline constexpr std::pair<const char*, Isa> kIsaNames[] = {
    {"portable", Isa::kPortable}, {"avx2", Isa::kAvx2}, {"avx512", Isa::kAvx512}, {"neon_dot", Isa::kNeonDot}};

#if defined(__x86_64__)
#define JNVFP4_AVX2 __attribute__((target("avx2,fma")))
#define JNVFP4_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#elif defined(__aarch64__)
#define JNVFP4_NEON_DOT __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

// F::run, always inlined, compiled for each instruction set; the results are the same bits.
template <class F, class Signature = decltype(F::run)>
struct Compiled;
template <class F, class... A>
struct Compiled<F, void(A...)> {
  using Function = void (*)(A...);

  static void portable(A... a) { F::run(a...); }
#if defined(__x86_64__)
  JNVFP4_AVX2 static void avx2(A... a) { F::run(a...); }
  JNVFP4_AVX512 static void avx512(A... a) { F::run(a...); }
#endif

  static Function best() {
#if defined(__x86_64__)
    if (isa() == Isa::kAvx512) return avx512;
    if (isa() == Isa::kAvx2) return avx2;
#endif
    return portable;
  }
};

// Runs f(begin, end) over [0, n) in pieces of `grain`. The calling thread takes pieces too and waits only
// for pieces that were taken, so a pool whose threads are all busy cannot block it. An exception of f is thrown
// again here, after all pieces.
template <class F>
void parallel_for(::xla::ffi::ThreadPool& pool, int64_t n, int64_t grain, const F& f) {
  grain = std::max<int64_t>(grain, 1);
  const int64_t pieces = (n + grain - 1) / grain;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), pieces) - 1;
  if (helpers <= 0) {
    KeepSubnormals guard;
    if (n > 0) f(int64_t{0}, n);
    return;
  }
  struct State {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_done;
    int64_t done = 0;
    std::exception_ptr error;
  };
  auto state = std::make_shared<State>();
  auto work = [state, pieces, grain, n, &f] {  // f is touched only while a piece is held
    KeepSubnormals guard;
    for (int64_t i; (i = state->next.fetch_add(1)) < pieces;) {
      std::exception_ptr error;
      try {
        f(i * grain, std::min(n, (i + 1) * grain));
      } catch (...) {
        error = std::current_exception();
      }
      std::lock_guard<std::mutex> lock(state->mutex);
      if (error) state->error = error;
      if (++state->done == pieces) state->all_done.notify_all();
    }
  };
  for (int64_t i = 0; i < helpers; ++i) {
    auto task = work;
    pool.Schedule(std::move(task));
  }
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done == pieces; });
  if (state->error) std::rethrow_exception(state->error);
}

}  // namespace jnvfp4
