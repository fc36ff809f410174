// Which row a cluster takes next: the load warp of its first block finds out and tells every block
// (cluster_rows.cuh).
#pragma once

#include "cuda/head_logits/cluster_shared.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

// The first rows, up to two for each group, by the cluster's place; the others to whom they come
// first: multiprocessors differ in how far they are from memory, and with equal shares the first
// were done after three quarters of the time (H200). Adjacent rows are taken several at a time
// where there are many: memory answers late where it is busy, and short rows would wait for it.
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
    const int64_t clusters = ptx::n_clusters();
    ask_row(lane < ahead_ ? ptx::cluster_id() + lane * clusters : p_.n_rows);
  }

  // Rows that are told before any is loaded.
  __device__ int ahead() const { return ahead_; }

  // The cluster's i-th row, ascending.
  __device__ void tell(int i) {
    if (ends_ == shared_.ends()) return;
    if (at_ == size_) take(i);
    const RowId told{__shfl_sync(~0u, mine_.id, at_), __shfl_sync(~0u, mine_.label, at_)};
    ++at_;
    ends_ += told.is_none();
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

 private:
  // The rows asked for become those to tell, from the i-th on; the next are asked for.
  __device__ void take(int i) {
    if (i == ahead_) {
      ptx::wait_for_previous_kernel();  // which resets the count
      ask_count();
      ask_rows();
    }
    mine_ = {RowId::kNoRow, 0};
    if (row_ < p_.n_rows) {
      const int64_t label = as_index(p_.labels, label_bits_);
      const bool counts = p_.every_row_counts || mask_ != 0 || is_label(p_, label);
      mine_.id = static_cast<int>(counts ? row_ : ~row_);
      mine_.label = static_cast<int>(column_of_label(p_, label));
    }
    at_ = 0;
    size_ = i < ahead_ ? ahead_ : p_.rows_at_a_time;
    if (i >= ahead_) ask_rows();
  }

  // Of the launch's rows that nobody has taken, p_.rows_at_a_time, a lane each.
  __device__ void ask_count() {
    if (lane_ == 0) count_ = atomicAdd(&p_.census->rows_taken, p_.rows_at_a_time);
  }
  __device__ void ask_rows() {
    const int64_t first = ahead_ * int64_t{ptx::n_clusters()} + __shfl_sync(~0u, count_, 0);
    ask_row(lane_ < p_.rows_at_a_time ? first + lane_ : p_.n_rows);
    if (first < p_.n_rows) ask_count();
  }
  // What tells whether a row counts.
  __device__ void ask_row(int64_t row) {
    row_ = row;
    if (row >= p_.n_rows) return;
    const int64_t of_all = p_.first_row + row;
    if (p_.labels.data != nullptr) label_bits_ = index_bits_at(p_.labels, of_all);
    if (p_.masked_rows_count) mask_ = p_.mask[of_all];
  }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  int lane_, blocks_, ahead_;
  RowId mine_{RowId::kNoRow, 0};  // this lane's of the rows to tell
  int at_ = 0, size_ = 0;         // of them
  int ends_ = 0;
  unsigned count_ = 0;  // of rows taken before those asked for next, in lane 0
  int64_t row_ = 0;     // this lane's of those asked for
  uint64_t label_bits_ = ~uint64_t{0};
  uint8_t mask_ = 0;
  uint32_t to_block_;  // from this block's shared memory to that of this lane's block
};

#endif

}  // namespace ullage::lossk::cuda
