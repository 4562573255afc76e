// The kernels of Hopper of grouped products: what a launch needs.
#pragma once

#include "fused.h"
#include "groups.h"

namespace jnvfp4 {

// The matrices of b are the groups; `tokens` are all rows.
struct GroupedFusedArgs : FusedArgs {
  GroupedHeader* header;  // and the tiles
  int most_tiles;
  // Whether the kernel ahead has the same operands: this one starts when there is room, and only its end waits.
  bool beside;
};
// few: as a, of half the rows.
struct GroupedMaps : FusedMaps {
  CUtensorMap few;
};

// Each defined in a file of its own, for one type of decoded numbers.
cudaError_t launch_sm90_f16_grouped(const GroupedFusedArgs& args, const GroupedMaps& maps, int tokens,
                                    cudaStream_t stream);
cudaError_t launch_sm90_bf16_grouped(const GroupedFusedArgs& args, const GroupedMaps& maps, int tokens,
                                     cudaStream_t stream);
// The rows of a as launch_sm90_prepare makes them, and the list of tiles.
cudaError_t launch_sm90_prepare_grouped(const MatmulOperand& a, Order order, void* out, int64_t rows, int64_t depth,
                                        const GroupedListings& lists, cudaStream_t stream);
// The pinned order.
cudaError_t launch_sm90_pinned_grouped(const GroupedFusedArgs& args, const FusedMaps& maps, int tokens,
                                       cudaStream_t stream);
// Of few rows; needs no scratch.
cudaError_t launch_sm90_grouped_small_m(const GroupedArgs& args, cudaStream_t stream);

}  // namespace jnvfp4
