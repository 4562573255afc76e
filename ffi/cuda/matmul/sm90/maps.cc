#include "maps.h"

namespace jnvfp4 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Finds the encoder in the driver that the runtime has loaded: a module that links to it would not load without one.
cudaError_t find_encoder(EncodeTiled* encode) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  *encode = reinterpret_cast<EncodeTiled>(found);
  if (status != cudaSuccess) return status;
  return result == cudaDriverEntryPointSuccess && found ? cudaSuccess : cudaErrorInsufficientDriver;
}

cudaError_t make_map(EncodeTiled encode, const MapSource& s, CUtensorMap* map) {
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(s.cols), static_cast<cuuint64_t>(s.rows)};
  const cuuint64_t pitch[] = {static_cast<cuuint64_t>(s.pitch)};
  const cuuint32_t box[] = {s.box_cols, s.box_rows}, each[] = {1, 1};
  const bool swizzled = s.box_cols * s.bytes == 128;
  const CUresult status =
      encode(map, s.type, 2, const_cast<void*>(s.data), dims, pitch, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t make_maps(std::initializer_list<MapWanted> wanted) {
  static EncodeTiled encode;
  static const cudaError_t found = find_encoder(&encode);
  cudaError_t status = found;
  for (const MapWanted& w : wanted)
    if (status == cudaSuccess) status = make_map(encode, w.source, w.map);
  return status;
}

}  // namespace jnvfp4
