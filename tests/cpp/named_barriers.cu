// The exchange of sums at the end of a tile of 64 tokens (sm90/fused.cuh) and nothing else: two teams of two warpgroups
// share a buffer for each pair of warpgroups, between named barriers that part of a CTA meets at. It is right by
// construction, and racecheck reports hazards, with the numbers of barriers in registers and with immediate ones.
//   compute-sanitizer --tool racecheck ./named_barriers register|immediate
#include <cstdint>
#include <cstdio>
#include <string>

namespace {

__device__ void store(uint32_t at, float v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %1, %1, %1};" ::"r"(at), "f"(v) : "memory");
}
__device__ float load(uint32_t at) {
  float x, y, z, w;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "r"(at) : "memory");
  return x + y + z + w;
}
template <bool kImmediate, int kOf0, int kOf1>
__device__ void meet(int rows, int threads) {
  if constexpr (!kImmediate)
    asm volatile("bar.sync %0, %1;" ::"r"(kOf0 + rows), "r"(threads) : "memory");
  else if (rows == 0)
    asm volatile("bar.sync %0, %1;" ::"n"(kOf0), "r"(threads) : "memory");
  else
    asm volatile("bar.sync %0, %1;" ::"n"(kOf1), "r"(threads) : "memory");
}

template <bool kImmediate>
__global__ void __launch_bounds__(544) exchange(float* out) {
  __shared__ float4 buffer[1024];
  const int team = threadIdx.x / 256, rows = threadIdx.x / 128 % 2, thread = threadIdx.x % 128;
  if (team == 2) return;  // the warp that loads takes no part
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(buffer)) + rows * 8192;
  float sum = threadIdx.x;
  for (int tile = 0; tile < 20; ++tile) {
    for (int round = 0; round < 2; ++round) {
      meet<kImmediate, 6, 7>(rows, 256);  // what was here has been read
      for (int i = 0; team == 1 && i < 4; ++i) store(shared + i * 2048 + thread * 16, sum + i);
      meet<kImmediate, 6, 7>(rows, 256);
      for (int i = 0; team == 0 && i < 4; ++i) sum += load(shared + i * 2048 + thread * 16);
    }
    if (team == 1) continue;
    meet<kImmediate, 1, 2>(rows, 128);  // all of them are read
    for (int i = 0; i < 4; ++i) store(shared + i * 2048 + thread * 16, sum);
    meet<kImmediate, 1, 2>(rows, 128);
    for (int i = 0; i < 4; ++i) sum += load(shared + i * 2048 + thread * 37 % 128 * 16);
  }
  out[threadIdx.x] = sum;
}

}  // namespace

int main(int argc, char** argv) {
  float* out;
  if (cudaMalloc(&out, 544 * sizeof(float)) != cudaSuccess) return 1;
  if (argc > 1 && std::string(argv[1]) == "immediate")
    exchange<true><<<4, 544>>>(out);
  else
    exchange<false><<<4, 544>>>(out);
  const cudaError_t error = cudaDeviceSynchronize();
  std::puts(cudaGetErrorString(error));
  return error != cudaSuccess;
}
