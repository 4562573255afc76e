// What the host files of ffi/cuda/matmul use of CUDA's header, for a test that runs them on a machine without CUDA.
#pragma once

struct CUstream_st;
using cudaStream_t = CUstream_st*;

enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorSharedObjectInitFailed = 303,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
  cudaErrorUnknown = 999,
};
enum cudaStreamCaptureMode : int { cudaStreamCaptureModeRelaxed = 2 };

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
