// Device memory of exactly the size that is asked for, so that compute-sanitizer sees every access outside.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/arrays.h"

constexpr jnvfp4::Float kFloats[] = {jnvfp4::Float::kF32, jnvfp4::Float::kBf16, jnvfp4::Float::kF16};
inline int64_t size_of(jnvfp4::Float kind) { return kind == jnvfp4::Float::kF32 ? 4 : 2; }

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// What a launch returns, and what the kernel that it launched does.
inline void check_run(cudaError_t status, const char* what) {
  check(status, what);
  check(cudaDeviceSynchronize(), what);
}

class Buffer {
 public:
  explicit Buffer(int64_t bytes) : size_(static_cast<size_t>(bytes)) {
    check(cudaMalloc(&data_, size_ ? size_ : 1), "cudaMalloc");
    poison();
  }
  template <class T>
  explicit Buffer(const std::vector<T>& host) : Buffer(static_cast<int64_t>(host.size() * sizeof(T))) {
    set(host);
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;

  template <class T>
  void set(const std::vector<T>& host) const {
    check(cudaMemcpy(data_, host.data(), size_, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  // NaN in every type.
  void poison() const { check(cudaMemset(data_, 0xff, size_), "cudaMemset"); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  template <class T = uint8_t>
  std::vector<T> host() const {
    std::vector<T> out(size_ / sizeof(T));
    check(cudaMemcpy(out.data(), data_, size_, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return out;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
};
