// Launches the fused kernels of Hopper: the choice of a tile, tensor maps, and what runs before.
#include "../device.cuh"
#include "sm90_fused.h"

namespace jnvfp4 {
namespace {

// ---------------------------------------------------------------- tensor maps
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// From the driver that the runtime has loaded: a module that links to it would not load without one.
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

// Rows of `cols` elements, `pitch` bytes apart, and boxes of them: 128 bytes wide ones are swizzled.
struct MapSource {
  const void* data;
  CUtensorMapDataType type;
  int64_t bytes, cols, rows, pitch;  // bytes: of an element
  uint32_t box_cols, box_rows;
};

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

// ---------------------------------------------------------------- operands
// Rows of the right operand at a distance that a tensor map takes: where they lie, or a copy.
struct PitchedRows {
  const void* data;
  int64_t bytes, pitch;
};

cudaError_t pitched(const void* data, int64_t rows, int64_t bytes, void* copy, cudaStream_t stream, PitchedRows* out) {
  const int64_t pitch = row_pitch(bytes);
  *out = {pitch == bytes ? data : copy, bytes, pitch};
  return pitch == bytes ? cudaSuccess : launch_sm90_pitch(data, copy, rows, bytes, pitch, stream);
}

CUtensorMapDataType type_of(const MatmulOperand& a) {
  return !a.quantized() && a.kind == Float::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// Copies what must be copied, decodes a last, since the kernel that follows may start early, and describes it all.
cudaError_t prepare(const MatmulArgs& g, FusedTile tile, uint8_t* scratch, cudaStream_t stream, FusedMaps* maps) {
  const GemmShape& s = g.shape;
  const FusedScratch at = fused_scratch(s, g.a.quantized());
  const int64_t a_rows = s.batch * s.rows, b_rows = s.batch * s.cols;
  EncodeTiled encode;
  cudaError_t status = find_encoder(&encode);
  PitchedRows data{}, scale{};
  if (status == cudaSuccess) status = pitched(g.b.data, b_rows, s.depth / 2, scratch + at.data, stream, &data);
  if (status == cudaSuccess) status = pitched(g.b.scale, b_rows, s.depth / kBlock, scratch + at.scale, stream, &scale);
  const void* a = g.a.data;
  int64_t a_cols = s.depth;
  if (g.a.quantized()) {
    a = scratch + at.rows, a_cols = (s.depth + kWindow - 1) / kWindow * kWindow;
    if (status == cudaSuccess) status = launch_sm90_decode_fragments(g.a, scratch + at.rows, a_rows, s.depth, stream);
  }
  const bool wide = g.a.quantized() && tile != FusedTile::k256;
  const uint32_t tokens = fused_tile_rows(tile) / 2, rows = kFusedCols / 2;
  constexpr auto kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const MapSource of_a{a, type_of(g.a), 2, a_cols, a_rows, a_cols * 2, kWindow, tokens};
  const MapSource of_data{data.data, kBytes, 1, data.bytes, b_rows, data.pitch, wide ? 128u : 32u, rows};
  const MapSource of_scale{scale.data, kBytes, 1, scale.bytes, b_rows, scale.pitch, 16, rows};
  if (status == cudaSuccess) status = make_map(encode, of_a, &maps->a);
  if (status == cudaSuccess) status = make_map(encode, of_data, &maps->data);
  if (status == cudaSuccess) status = make_map(encode, of_scale, &maps->scale);
  return status;
}

}  // namespace

// Least time, counted in rows of a that every pair of thread blocks goes through. Decoding is twice as dense in tiles
// of 128, which then run at 0.82 of the speed of tiles of 256; an exchange costs about as much as 16 rows of K = 4096.
// The multiprocessors hold fewer clusters of four than a quarter of their number, because they lie in groups of 16
// or 18.
FusedTile choose_fused_tile(const GemmShape& s) {
  const int count = multiprocessors();
  const auto waves = [&](int rows, int clusters) {
    const int64_t tiles = s.batch * ((s.rows + rows - 1) / rows) * ((s.cols + kFusedCols - 1) / kFusedCols);
    return static_cast<double>((tiles + clusters - 1) / clusters);
  };
  const int pairs = std::max(count / 2, 1), fours = std::max(count / 4 - 1, 1);
  const double of_256 = waves(256, pairs) * 256, of_128 = waves(128, pairs) * 128 / 0.82;
  const double of_split = waves(128, fours) * (64 / 0.82 + 16);
  if (of_256 <= of_128 && of_256 <= of_split) return FusedTile::k256;
  return of_128 <= of_split ? FusedTile::k128 : FusedTile::k128Split;
}

cudaError_t launch_sm90_fused(const MatmulArgs& g, FusedTile tile, void* scratch, cudaStream_t stream) {
  const GemmShape& s = g.shape;
  const int64_t slots = (s.depth + 4 * kWindow - 1) / (4 * kWindow);  // of 256 along K
  const int64_t windows = 4 * (tile == FusedTile::k128Split ? (slots + 1) / 2 : slots);
  const int64_t tiles = s.batch * ((s.rows + 127) / 128) * ((s.cols + kFusedCols - 1) / kFusedCols);
  if (tiles > INT32_MAX) return cudaErrorInvalidConfiguration;  // more results than any memory holds
  FusedMaps maps;
  const cudaError_t status = prepare(g, tile, static_cast<uint8_t*>(scratch), stream, &maps);
  if (status != cudaSuccess) return status;
  const FusedArgs args{g, static_cast<int>(windows), g.a.quantized() && g.a.map.rows_per_amax % s.rows != 0,
                       g.b.map.rows_per_amax % s.cols != 0};
  if (g.a.quantized()) return launch_sm90_nvfp4_fused_tile(args, maps, tile, stream);
  return g.a.kind == Float::kBf16 ? launch_sm90_bf16_fused_tile(args, maps, tile, stream)
                                  : launch_sm90_f16_fused_tile(args, maps, tile, stream);
}

}  // namespace jnvfp4
