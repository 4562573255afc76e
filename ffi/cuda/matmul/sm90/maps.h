// Tensor maps of Hopper, made on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "../../../core/numerics.h"

namespace jnvfp4 {

// Rows of `cols` elements, `pitch` bytes apart, and boxes of them: 128 bytes wide ones are swizzled.
struct MapSource {
  const void* data;
  CUtensorMapDataType type;
  int64_t bytes, cols, rows, pitch;  // bytes: of an element
  uint32_t box_cols, box_rows;
};
// Rows of bytes, at a pitch that a tensor map takes.
struct PitchedRows {
  const void* data;
  int64_t bytes, pitch;
};
inline MapSource map_of_bytes(const PitchedRows& x, int64_t rows, uint32_t box_cols, uint32_t box_rows) {
  return {x.data, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, x.bytes, rows, x.pitch, box_cols, box_rows};
}
// Rows of `cols` decoded numbers; boxes have a window of each.
inline MapSource map_of_numbers(const void* data, int64_t rows, int64_t cols, uint32_t box_rows) {
  return {data, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, cols, rows, cols * 2, kWindow, box_rows};
}
struct MapWanted {
  MapSource source;
  CUtensorMap* map;
};
cudaError_t make_maps(std::initializer_list<MapWanted> wanted);

}  // namespace jnvfp4
