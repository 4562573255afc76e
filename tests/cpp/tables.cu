// Writes the tables of tables.h as the device computes them: tables <folder>
#include "device_memory.h"
#include "tables.h"

namespace {
template <class Table>
__global__ void fill(uint32_t* entries) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < Table::size) entries[i] = Table::entry(i);
}
}  // namespace

template <class Table>
std::vector<uint32_t> jnvfp4::tables::filled() {
  const Buffer entries(Table::size * int64_t{4});
  fill<Table><<<(Table::size + 255) / 256, 256>>>(entries.as<uint32_t>());
  check(cudaGetLastError(), "fill");
  return entries.host<uint32_t>();
}

int main(int argc, char** argv) { return jnvfp4::tables::write_all(argc, argv); }
