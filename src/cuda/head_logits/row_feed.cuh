// Which row a cluster takes next: one warp of its first block finds out and tells every block
// (cluster_rows.cuh).
#pragma once

#include "cuda/head_logits/cluster_shared.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

// The first rows, two for each group, by the cluster's place; the others to whom they come first:
// multiprocessors differ in how far they are from memory, and with equal shares the first were done
// after three quarters of the time (H200).
template <class Kind>
class RowFeed {
 public:
  __device__ RowFeed(const ClusterShared<Kind>& shared, int lane)
      : p_(shared.p),
        shared_(shared),
        lane_(lane),
        blocks_(static_cast<int>(ptx::cluster_size())),
        ahead_(2 * p_.groups) {
    const uint32_t here = shared.slots_start;
    to_block_ = ptx::address_in_block(here, lane < blocks_ ? lane : 0) - here;
  }

  // Rows that are told before any is loaded.
  __device__ int ahead() const { return ahead_; }

  // The cluster's i-th row, ascending.
  __device__ void tell(int i) {
    if (ends_ == shared_.ends()) return;
    const int64_t row = ends_ > 0 ? p_.n_rows : take(i);
    RowId told{RowId::kNoRow, 0};
    if (row < p_.n_rows) {
      const int64_t of_all = p_.first_row + row;
      const int64_t label = stored_label(p_, of_all);
      told.id = static_cast<int>(row_counts(p_, of_all, label) ? row : ~row);
      told.label = static_cast<int>(column_of_label(p_, label));
    } else {
      ++ends_;
    }
    __syncwarp();
    if (blocks_ > 1) {
      if (lane_ < blocks_) {
        ptx::store_pair_in_block(ptx::shared_address(shared_.id_place(i)) + to_block_, told.id,
                                 told.label, shared_.id_there(i) + to_block_);
      }
    } else if (lane_ == 0) {
      *shared_.id_place(i) = told;
      ptx::barrier_arrive(shared_.id_there(i));
    }
    __syncwarp();
  }

  // After the last: the last cluster leaves the counts as it found them.
  __device__ void reset() const {
    ptx::wait_for_previous_kernel();
    if (lane_ != 0) return;
    Census& census = *p_.census;
    if (atomicAdd(&census.clusters_ended, 1) + 1 != static_cast<int>(ptx::n_clusters())) return;
    census.rows_taken = census.clusters_ended = 0;
  }

  // By a warp of its own: each row when the one `ahead` before it has come.
  __device__ void run() {
    RingCursor slot;
    for (int i = 0; ends_ < shared_.ends(); ++i) {
      if (i >= ahead_) {
        ptx::barrier_wait(shared_.loaded(slot.at), slot.parity);
        slot.advance(p_.slots);
      }
      tell(i);
    }
    reset();
  }

 private:
  // The launch's row that is the cluster's i-th.
  __device__ int64_t take(int i) const {
    const int64_t clusters = ptx::n_clusters();
    if (i < ahead_) return ptx::cluster_id() + i * clusters;
    if (i == ahead_) ptx::wait_for_previous_kernel();  // which resets the count
    int taken = 0;
    if (lane_ == 0) taken = atomicAdd(&p_.census->rows_taken, 1);
    return ahead_ * clusters + __shfl_sync(~0u, taken, 0);
  }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  int lane_, blocks_, ahead_;
  int ends_ = 0;
  uint32_t to_block_;  // from this block's shared memory to that of this lane's block
};

#endif

}  // namespace ullage::lossk::cuda
