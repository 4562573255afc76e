// Tensor maps of Hopper, made on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

namespace jnvfp4 {

// Rows of `cols` elements, `pitch` bytes apart, and boxes of them: 128 bytes wide ones are swizzled.
struct MapSource {
  const void* data;
  CUtensorMapDataType type;
  int64_t bytes, cols, rows, pitch;  // bytes: of an element
  uint32_t box_cols, box_rows;
};
struct MapWanted {
  MapSource source;
  CUtensorMap* map;
};
cudaError_t make_maps(std::initializer_list<MapWanted> wanted);

}  // namespace jnvfp4
