// Prints the lists of ffi/core/spec.h, one line each: "spec" or "cuda" and the settings of a spec, "pair" and those of
// rows and columns.
#include <cstdio>

#include "core/spec.h"

using namespace jnvfp4;

namespace {

void print(const KernelSpec& s) {
  std::printf(" %d %d %d %d %d %d", static_cast<int>(s.amax_scope), s.rht, s.block_rows, static_cast<int>(s.select),
              static_cast<int>(s.error_math), static_cast<int>(s.rounding));
}

template <class... S>
void print_all(const char* kind, SpecList<S...>) {
  ((std::printf("%s", kind), print(S::spec), std::printf("\n")), ...);
}

template <class... P>
void print_all(PairList<P...>) {
  ((std::printf("pair"), print(P::Row::spec), print(P::Col::spec), std::printf("\n")), ...);
}

}  // namespace

int main() {
  print_all("spec", SupportedSpecs{});
  print_all("cuda", CudaSpecs{});
  print_all(FusedPairs{});
}
