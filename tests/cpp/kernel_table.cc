// A table with a row for an architecture that has no kernels yet: what runs on a device, and why not the first row.
#include <cstdio>

#include "plan/table.h"

using namespace jnvfp4;

namespace {

const char* any(const int&) { return nullptr; }
constexpr KernelRow<int> kRows[] = {{"sm120_stand_in", {120, 129, "120f"}, any}, {"sm80_any", kAnyGpuFrom80, any}};
constexpr KernelTable<int> kTable(kRows);

}  // namespace

int main() {
  for (const Device& device : {Device{121, "sm_90a sm_120f"}, Device{120, "sm_90a sm_120"}, Device{90, "sm_120f"}})
    std::printf("%s: %s\n", kTable.plan(0, device)->name.data(), kRows[0].why_not(0, device).c_str());
}
