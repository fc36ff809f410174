// head_rows_sm90_cluster: the blocks of a cluster keep rows in shared memory, each its run of
// strips of `slots` rows. One read of the logits (and of the teacher), one write of the gradient.
//
//   the load warp      bulk copies of the rows to come, each as soon as its slot is free. Of the
//                      first block: tells every block which row is next
//   the column warps   each its span of strips: the sums of the next row -> the block's table; the
//                      gradient of this row, from shared memory to global; the extras of the next
//                      row, where there are some. Short rows and rows that are only summed: groups
//                      of warps, which take rows in turn
//   the send warp      strips to sections -> every block's table; the label's logit. Of a block
//                      alone, the terms' warps do both
//   the terms' warps   in turn a row each: sections to the row's sums -> terms -> RowWord, and the
//                      row's outputs
//
// So while sums travel, the column warps write the gradient of the row before: nobody waits for a
// row's terms in steady state.
//
// Every row passes every barrier and every exchange, whether it counts or not: a barrier's phase is
// known from the row, and no block leaves its peers behind. What is written for row i is free
// again, with g groups and t tables (at least 2 g, or 4 g for sums without extras):
//   strips' sums    for row i + t, which a group sums once it has the word of row i + t - 2 g
//   sections' sums  for row i + t: a row's are sent once the block has the word of t / 2 rows
//                   before, so who sends for row i + t has the word of row i + t / 2, which every
//                   block had a part in that had the word of row i
//   extras          for row i + g: they are formed once the group has the word of row i
//   slot            when the gradient is written; without one, when the row is summed
//   word            for row i + t, summed once the gradient of row i is written
//   id              for row i + 2 slots + t, told when the first block has row
//                   i + 2 slots + t - 2 g and so has emptied the slot of row i + slots + t - 2 g,
//                   which every block had a part in that had emptied the slot of row i and had its
//                   word
//
// The terms' warps wait for sums by the parity of their table's barrier, and must not take those of
// row i - t for row i's. In a cluster there are two, and t is even: the one that waits for row i
// had row i - t. In a block alone, with three, there are as many tables as rows can be on the way,
// its slots and those told ahead.
//
// tests/cuda/cluster_rows_model.py runs all this under random schedulers: change it there first.
#pragma once

#include "cuda/head_logits/column_warp.cuh"
#include "cuda/head_logits/load_warp.cuh"
#include "cuda/head_logits/send_warp.cuh"
#include "cuda/head_logits/terms_warp.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

// -inf behind the last columns of a row, up to a whole round and the word after, in every slot: but
// for a row's last word and the next (LoadWarp::Slice), copies never reach there.
template <class Kind>
__device__ inline void pad_slots(const ClusterShared<Kind>& shared) {
  using T = typename Kind::Element;
  const HeadParams& p = shared.p;
  const int first = static_cast<int>(ptx::cluster_rank()) * p.strips_per_block;
  const int columns = columns_between(p, first, first + p.strips_per_block);
  const int pad = (-columns & (kWarpColumns - 1)) + (p.in_whole_words ? 0 : kPerWord<T>);
  const int matrices = Kind::kMatrices * p.slots;
  for (int i = threadIdx.x; i < matrices * pad; i += blockDim.x) {
    const int matrix = i / pad, slot = Kind::kHasTeacher ? matrix / 2 : matrix;
    const int of_slot = Kind::kHasTeacher && matrix % 2 != 0 ? p.matrix_bytes : 0;
    reinterpret_cast<T*>(shared.slot(slot) + of_slot)[columns + i % pad] = minus_infinity<T>();
  }
  ptx::fence_async_shared();
}

#endif

template <class Kind>
__global__ void __launch_bounds__((kMaxColumnWarps + kOtherWarps) * 32, 1)
    cluster_rows(const __grid_constant__ HeadParams p) {
#if ULLAGE_SM90
  extern __shared__ __align__(128) std::byte cluster_shared[];
  const int warp = ptx::warp_of_block(), lane = threadIdx.x % 32;
  const uint32_t start = ptx::kept_shared_address(cluster_shared);
  const ClusterShared<Kind> shared{
      .p = p,
      .base = cluster_shared,
      .n_extras =
          wants_extra<Kind::kFamily>(p) ? kExtras<Kind::kFamily> : kOwnExtras<Kind::kFamily>,
      .slots_start = start,
      .barriers = start + static_cast<uint32_t>(p.slots * p.slot_bytes + p.table_bytes +
                                                p.tables * kRowWordBytes)};
  if (threadIdx.x == 0) shared.init_barriers();
  pad_slots(shared);
  __syncthreads();
  ptx::cluster_sync();  // every block's barriers are ready before a peer counts on them
  const int other = warp - p.row_warps * p.groups;
  if (other < 0) {
    run_column_warp(shared, warp, lane);
  } else if (other == 0) {
    LoadWarp<Kind>(shared, lane).run(ptx::cluster_rank() == 0);
  } else if (other <= p.terms_warps) {
    TermsWarp<Kind>(shared, other - 1, lane).run();
  } else {
    SendWarp<Kind>(shared, lane).run();
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
