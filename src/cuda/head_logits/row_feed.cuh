// Which row a cluster takes next: the load warp of its first block finds out and tells every block
// (cluster_rows.cuh).
#pragma once

#include "cuda/head_logits/cluster_shared.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

// The first rows, up to two for each group, by the cluster's place; the others to whom they come
// first: multiprocessors differ in how far they are from memory, and with equal shares the first
// were done after three quarters of the time (H200).
template <class Kind>
class RowFeed {
 public:
  __device__ RowFeed(const ClusterShared<Kind>& shared, int lane)
      : p_(shared.p),
        shared_(shared),
        lane_(lane),
        blocks_(static_cast<int>(ptx::cluster_size())),
        ahead_(min(2 * p_.groups, p_.slots)) {  // rows_told_ahead
    const uint32_t here = shared.slots_start;
    to_block_ = ptx::address_in_block(here, lane < blocks_ ? lane : 0) - here;
  }

  // Rows that are told before any is loaded.
  __device__ int ahead() const { return ahead_; }

  // The cluster's i-th row, ascending.
  __device__ void tell(int i) {
    if (ends_ == shared_.ends()) return;
    if (i == ahead_ && row_ < p_.n_rows) {
      ptx::wait_for_previous_kernel();  // which resets the count
      ask_count();
    }
    if (i <= ahead_) ask_row(i);
    RowId told{RowId::kNoRow, 0};
    if (row_ < p_.n_rows) {
      const int64_t label = as_index(p_.labels, label_bits_);
      const bool counts = p_.every_row_counts || mask_ != 0 || is_label(p_, label);
      told.id = static_cast<int>(counts ? row_ : ~row_);
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
    if (i >= ahead_) ask_row(i + 1);
  }

  // After the last: the last cluster leaves the counts as it found them.
  __device__ void reset() const {
    ptx::wait_for_previous_kernel();
    if (lane_ != 0) return;
    Census& census = *p_.census;
    if (atomicAdd(&census.clusters_ended, 1) + 1 != static_cast<int>(ptx::n_clusters())) return;
    census.rows_taken = census.clusters_ended = 0;
  }

 private:
  // Memory answers late where it is busy: a row's number and its label are asked for while the rows
  // before are told.
  __device__ void ask_count() {
    if (lane_ == 0) count_ = atomicAdd(&p_.census->rows_taken, 1);
  }
  // The launch's row that is the cluster's i-th, and what tells whether it counts.
  __device__ void ask_row(int i) {
    const int64_t clusters = ptx::n_clusters();
    if (i < ahead_) {
      row_ = ptx::cluster_id() + i * clusters;
    } else if (row_ < p_.n_rows) {
      row_ = ahead_ * clusters + __shfl_sync(~0u, count_, 0);
    }
    if (row_ >= p_.n_rows) return;
    const int64_t of_all = p_.first_row + row_;
    if (p_.labels.data != nullptr) label_bits_ = index_bits_at(p_.labels, of_all);
    if (p_.masked_rows_count) mask_ = p_.mask[of_all];
    if (i >= ahead_) ask_count();
  }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  int lane_, blocks_, ahead_;
  int ends_ = 0;
  int count_ = 0;  // of rows taken before, in lane 0
  int64_t row_ = 0;
  uint64_t label_bits_ = ~uint64_t{0};
  uint8_t mask_ = 0;
  uint32_t to_block_;  // from this block's shared memory to that of this lane's block
};

#endif

}  // namespace ullage::lossk::cuda
