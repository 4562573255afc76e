// What the programs of this folder share: random operands, and the time of a graph of products.
#pragma once

#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace jnvfp4 {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// Random bytes; with `exponent` the last of every `step` has it, so that no number is special. Those of 4 are amaxes,
// which are positive.
static __global__ void fill(uint8_t* p, int64_t size, uint32_t seed, int exponent, int step) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size; i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h = (h ^ h >> 15) * 2246822519u;
    h = (h ^ h >> 13) * 3266489917u;
    p[i] = static_cast<uint8_t>(exponent && i % step == step - 1 ? exponent | (step == 4 ? 0u : h & 0x80u) : h >> 24);
  }
}

inline uint8_t* random_bytes(int64_t size, uint32_t seed, int exponent = 0, int step = 1) {
  void* p = nullptr;
  check(cudaMalloc(&p, static_cast<size_t>(size) + 1), "cudaMalloc");
  fill<<<1024, 256>>>(static_cast<uint8_t*>(p), size, seed, exponent, step);
  check(cudaGetLastError(), "fill");
  return static_cast<uint8_t*>(p);
}

// The median time of a product, in microseconds: `graphs` graphs of `count` products, product(i), after a rest each.
template <class F>
float time_products(cudaStream_t stream, int count, int graphs, const F& product) {
  product(0);
  check(cudaStreamSynchronize(stream), "the first launch");
  cudaGraph_t graph;
  cudaGraphExec_t program;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  for (int i = 0; i < count; ++i) product(i);
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&program, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t start, end;
  check(cudaEventCreate(&start), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times(static_cast<size_t>(graphs));
  for (float& microseconds : times) {
    usleep(12000);
    check(cudaEventRecord(start, stream), "cudaEventRecord");
    check(cudaGraphLaunch(program, stream), "cudaGraphLaunch");
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check(cudaEventElapsedTime(&microseconds, start, end), "cudaEventElapsedTime");
    microseconds *= 1e3f / static_cast<float>(count);
  }
  check(cudaEventDestroy(start), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
  check(cudaGraphExecDestroy(program), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  const auto middle = times.begin() + graphs / 2;
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

}  // namespace jnvfp4
