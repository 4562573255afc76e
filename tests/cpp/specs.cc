// Prints the lists of ffi/core/spec.h, one line each: "spec" and its settings, "pair" and those of rows and columns.
#include <cstdio>

#include "core/spec.h"

using namespace jnvfp4;

namespace {

void print(const KernelSpec& s) {
  std::printf(" %d %d %d %d %d %d", static_cast<int>(s.amax_scope), s.rht, s.block_rows, static_cast<int>(s.select),
              static_cast<int>(s.error_math), static_cast<int>(s.rounding));
}

template <class... S>
void print_all(SpecList<S...>) {
  ((std::printf("spec"), print(S::spec), std::printf("\n")), ...);
}

template <class... P>
void print_all(PairList<P...>) {
  ((std::printf("pair"), print(P::Row::spec), print(P::Col::spec), std::printf("\n")), ...);
}

}  // namespace

int main() {
  print_all(SupportedSpecs{});
  print_all(FusedPairs{});
}
