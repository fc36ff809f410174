// head_rows_sm90_cluster: the blocks of a cluster keep rows in shared memory, each its run of
// strips of `slots` rows. One read of the logits (and of the teacher), one write of the gradient.
//
//   the load warp       bulk copies of the rows to come, each as soon as its slot is free
//   16 column warps     each its span of strips: the sums of the next row -> the block's table; the
//                       gradient of this row, from shared memory to global; the extras of the next
//                       row, where some are asked for
//   the send warp       strips to sections -> every block's table; of a block alone, the terms'
//                       warp makes the sections
//   the terms' warp     sections to the row's sums -> terms -> RowWord, and the row's outputs
//
// So while sums travel, the column warps write the gradient of the row before: nobody waits for a
// row's terms in steady state.
//
// Tables, words and their barriers alternate between rows. A row's sums are formed after the block
// has the words of the row before last, so a table of strips and a word are free again two rows
// later. A row's sections are sent after the block has the words of the row before. Hence a table
// of sections is free again three rows later: a block that then sends has the words of the row one
// after, which every block had a part in once it was done with the row itself. Extras are formed
// after every block has sent the row's sums: two rows later.
#pragma once

#include "cuda/head_logits/column_warp.cuh"
#include "cuda/head_logits/load_warp.cuh"
#include "cuda/head_logits/send_warp.cuh"
#include "cuda/head_logits/terms_warp.cuh"

namespace ullage::lossk::cuda {

template <class Kind>
__global__ void __launch_bounds__((kMaxColumnWarps + kOtherWarps) * 32, 1)
    cluster_rows(const __grid_constant__ HeadParams p) {
#if ULLAGE_SM90
  extern __shared__ __align__(128) std::byte cluster_shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t start = ptx::kept_shared_address(cluster_shared);
  const ClusterShared<Kind> shared{
      .p = p,
      .base = cluster_shared,
      .has_extras = Kind::kFamily == Family::kMixed || wants_extra(p),
      .warps = p.strips_per_block / p.strips_per_warp,
      .slots_start = start,
      .barriers = start + static_cast<uint32_t>(p.slots * p.slot_bytes + p.table_bytes +
                                                2 * kRowWordBytes)};
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  ptx::cluster_sync();  // every block's barriers are ready before a peer counts on them
  const ClusterRowsOf rows(p);
  if (warp < shared.warps) {
    ColumnWarp<Kind>(shared, rows, warp, lane).run();
  } else if (warp == shared.warps) {
    TermsWarp<Kind>(shared, rows, lane).run();
  } else if (warp == shared.warps + 1) {
    LoadWarp<Kind>(shared, rows, lane).run();
  } else {
    SendWarp<Kind>(shared, rows, lane).run();
  }
  __syncwarp();
  ptx::cluster_sync();  // a peer may still send to this block
#endif
}

struct ClusterRows {
  template <class Kind>
  static const void* of() {
    return reinterpret_cast<const void*>(&cluster_rows<Kind>);
  }
};

}  // namespace ullage::lossk::cuda
