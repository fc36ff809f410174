// The warp of a cluster's block that loads its slices of rows (cluster_rows.cuh).
#pragma once

#include "cuda/head_logits/row_feed.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

template <class Kind>
class LoadWarp {
  using T = typename Kind::Element;

 public:
  __device__ LoadWarp(const ClusterShared<Kind>& shared, int lane)
      : p_(shared.p), shared_(shared), lane_(lane) {
    const int first = static_cast<int>(ptx::cluster_rank()) * p_.strips_per_block;
    column_ = first_column(p_, first);
    columns_ = columns_between(p_, first, first + p_.strips_per_block);
    left_ = static_cast<int>(p_.vocab) - column_;
  }

  // `feeds`: this warp is also the one that tells rows.
  __device__ void run(bool feeds) {
    const bool told_by_peer = ptx::cluster_size() > 1;
    if (told_by_peer && lane_ == 0) {
      for (int i = 0; i < p_.ids; ++i) ptx::barrier_expect(shared_.id_there(i), sizeof(RowId));
    }
    RowFeed<Kind> feed(shared_, lane_);
    for (int i = 0; feeds && i < feed.ahead(); ++i) feed.tell(i);
    RingCursor slot, arrival;
    for (int i = 0, ends = 0; ends < shared_.ends(); ++i) {
      const RowId row = shared_.wait_for_id(i);
      __syncwarp();
      if (told_by_peer && lane_ == 0) {
        ptx::barrier_expect(shared_.id_there(i), sizeof(RowId));
      }
      ends += row.is_none();
      // A row that there is not comes for each group of column warps.
      if (ends <= p_.groups) bring(row, i, slot, shared_.loaded(arrival.at));
      if (feeds) feed.tell(i + feed.ahead());
      slot.advance(p_.slots);
      arrival.advance(shared_.arrivals());
    }
    if (feeds) feed.reset();
  }

 private:
  __device__ void bring(const RowId& row, int i, const RingCursor& slot, uint32_t barrier) const {
    if (i >= p_.slots) ptx::barrier_wait(shared_.emptied(slot.at), slot.parity ^ 1);
    uint32_t bytes = 0;
    if (!p_.in_whole_words) ptx::fence_async_shared();  // lanes wrote ends of the slot's row before
    if (row.counts()) {
      const int offset = slot.at * p_.slot_bytes;
      bytes = load(p_.logits, p_.logits_stride, row.row(), offset, barrier);
      if (Kind::kHasTeacher) {
        bytes += load(p_.teacher, p_.teacher_stride, row.row(), offset + p_.matrix_bytes, barrier);
      }
    }
    if (lane_ == 0) {
      ptx::barrier_expect(barrier, bytes);
    } else {
      ptx::barrier_arrive(barrier);
    }
    __syncwarp();
  }

  // A slice to `offset` of the block's shared memory, from the 16-byte word on in which it begins:
  // the words that it has a part in, by the copy engine. Returns the bytes that the engine counts
  // on the barrier.
  __device__ uint32_t load(const void* matrix, int64_t row_stride, int row, int offset,
                           uint32_t barrier) const {
    const T* const slice = static_cast<const T*>(matrix) + row * row_stride + column_;
    int shift = 0, begin = 0, end = columns_;
    if (!p_.in_whole_words) {
      shift = shift_of(slice);
      const int row_end = shift + left_;
      begin = column_ == 0 ? round_up(shift) : 0;
      end = min(round_up(shift + columns_), row_end / kPerWord<T> * kPerWord<T>);
      load_ends(slice - shift, shift, begin, end, row_end, offset);
    }
    const auto bytes = static_cast<uint32_t>(max(end - begin, 0) * sizeof(T));
    if (lane_ == 0 && bytes > 0) {
      ptx::bulk_load(shared_.slots_start + offset + begin * sizeof(T), slice - shift + begin, bytes,
                     barrier);
    }
    return bytes;
  }

  // By the lanes, what lies in words that reach beyond the row, and -inf behind it: over what a row
  // of a larger shift left there. Positions are those in the slot.
  __device__ void load_ends(const T* from, int shift, int begin, int end, int row_end,
                            int offset) const {
    T* const to = reinterpret_cast<T*>(shared_.base + offset);
    const auto put = [&](int i) { to[i] = i < row_end ? from[i] : minus_infinity<T>(); };
    if (lane_ < begin && lane_ >= shift) put(lane_);
    const bool ends_here = end == row_end / kPerWord<T> * kPerWord<T>;
    const int i = max(begin, end) + lane_ - kLaneColumns, slots = p_.matrix_bytes / sizeof(T);
    if (ends_here && lane_ >= kLaneColumns && lane_ < kLaneColumns + 2 * kPerWord<T> && i < slots) {
      put(i);
    }
  }

  __device__ static int round_up(int columns) { return (columns + kPerWord<T> - 1) & -kPerWord<T>; }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  int lane_;
  int column_, columns_;  // the block's
  int left_;              // from its first to the row's end
};

#endif

}  // namespace ullage::lossk::cuda
