// Launch arguments of the Hopper kernels of grouped GEMMs.
#pragma once

#include "fused.h"
#include "groups.h"

namespace jnvfp4 {

// The matrices of b are the groups; `tokens` are all rows.
struct GroupedFusedArgs : FusedArgs {
  GroupedHeader* header;  // followed by the tile list
  int max_tiles;
  // Whether the previous kernel has the same operands: this one starts when there is room, and only its end waits.
  bool overlapped;
};
struct GroupedMaps : FusedMaps {
  CUtensorMap half_a;  // as a, boxes of half the rows
};

// Launch the kernel for one type of decoded numbers; each is defined in a file of its own.
cudaError_t launch_sm90_f16_grouped(const GroupedFusedArgs& args, const GroupedMaps& maps, int tokens,
                                    cudaStream_t stream);
cudaError_t launch_sm90_bf16_grouped(const GroupedFusedArgs& args, const GroupedMaps& maps, int tokens,
                                     cudaStream_t stream);
// Prepares the rows of a as launch_sm90_prepare does, and makes the tile list.
cudaError_t launch_sm90_prepare_grouped(const MatmulOperand& a, Order order, void* out, int64_t rows, int64_t depth,
                                        const GroupedListings& lists, cudaStream_t stream);
// Launches the pinned order.
cudaError_t launch_sm90_pinned_grouped(const GroupedFusedArgs& args, const FusedMaps& maps, int tokens,
                                       cudaStream_t stream);
// Launches the kernel for few rows, which needs no scratch.
cudaError_t launch_sm90_grouped_small_m(const GroupedArgs& args, cudaStream_t stream);

}  // namespace jnvfp4
