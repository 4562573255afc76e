// Writes the tables of tables.h as the device computes them: tables <folder>
#include <cuda_runtime.h>

#include <cstdlib>

#include "tables.h"

namespace {
template <class Table>
__global__ void fill(uint32_t* entries) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < Table::size) entries[i] = Table::entry(i);
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

struct Fill {
  template <class Table>
  std::vector<uint32_t> operator()() const {
    std::vector<uint32_t> entries(Table::size);
    uint32_t* device = nullptr;
    check(cudaMalloc(&device, Table::size * sizeof(uint32_t)));
    fill<Table><<<(Table::size + 255) / 256, 256>>>(device);
    check(cudaGetLastError());
    check(cudaMemcpy(entries.data(), device, Table::size * sizeof(uint32_t), cudaMemcpyDeviceToHost));
    check(cudaFree(device));
    return entries;
  }
};
}  // namespace

int main(int argc, char** argv) { return jnvfp4::tables::write_all(argc, argv, Fill{}); }
