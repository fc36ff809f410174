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
    Slice student{}, teacher{};
    for (int i = 0, ends = 0; ends < shared_.ends(); ++i) {
      const RowId row = shared_.wait_for_id(i);
      __syncwarp();
      if (told_by_peer && lane_ == 0) {
        ptx::barrier_expect(shared_.id_there(i), sizeof(RowId));
      }
      ends += row.is_none();
      // Its ends are asked for before its slot is waited for.
      if (row.counts()) {
        student = slice_of(p_.logits, p_.logits_stride, row.row());
        if (Kind::kHasTeacher) teacher = slice_of(p_.teacher, p_.teacher_stride, row.row());
      }
      // A row that there is not comes for each group of column warps.
      if (ends <= p_.groups) {
        if (i >= p_.slots) ptx::barrier_wait(shared_.emptied(slot.at), slot.parity ^ 1);
        bring(row.counts(), student, teacher, slot.at * p_.slot_bytes, shared_.loaded(arrival.at));
      }
      if (feeds) feed.tell(i + feed.ahead());
      slot.advance(p_.slots);
      arrival.advance(shared_.arrivals());
    }
    ptx::let_next_kernel_start();
    if (feeds) feed.reset();
  }

 private:
  // A block's part of a row, from the 16-byte word on in which it begins. The words that it has a
  // part in and no other row, `begin` to `end`, come by the copy engine; what is in others by the
  // lanes, and -inf behind the row, over what a row of a larger shift left there: this lane's
  // `value` to `at`, if that is not -1. In columns.
  struct Slice {
    const T* from;
    int begin, end;
    int at;
    T value;
  };
  __device__ Slice slice_of(const void* matrix, int64_t row_stride, int row) const {
    const T* const first = static_cast<const T*>(matrix) + row * row_stride + column_;
    if (p_.in_whole_words) return {first, 0, columns_, -1, T{}};
    const int shift = shift_of(first), row_end = shift + left_;
    const int last_word = row_end / kPerWord<T> * kPerWord<T>;
    Slice s{first - shift, column_ == 0 ? round_up(shift) : 0,
            min(round_up(shift + columns_), last_word), -1, minus_infinity<T>()};
    const int tail = lane_ - kLaneColumns, behind = max(s.begin, s.end) + tail;
    if (lane_ >= shift && lane_ < s.begin) s.at = lane_;
    if (s.end == last_word && tail >= 0 && tail < 2 * kPerWord<T> &&
        behind < p_.matrix_bytes / static_cast<int>(sizeof(T))) {
      s.at = behind;
    }
    if (s.at >= 0 && s.at < row_end) s.value = s.from[s.at];
    return s;
  }

  // To `offset` of the block's shared memory, which is free.
  __device__ void bring(bool counts, const Slice& student, const Slice& teacher, int offset,
                        uint32_t barrier) const {
    uint32_t bytes = 0;
    if (!p_.in_whole_words) ptx::fence_async_shared();  // lanes wrote ends of the slot's row before
    if (counts) {
      bytes = copy(student, offset, barrier);
      if (Kind::kHasTeacher) bytes += copy(teacher, offset + p_.matrix_bytes, barrier);
      if (!p_.in_whole_words) {
        put_end(student, offset);
        if (Kind::kHasTeacher) put_end(teacher, offset + p_.matrix_bytes);
      }
    }
    if (lane_ == 0) {
      ptx::barrier_expect(barrier, bytes);
    } else {
      ptx::barrier_arrive(barrier);
    }
    __syncwarp();
  }
  // Returns the bytes that the engine counts on the barrier.
  __device__ uint32_t copy(const Slice& s, int offset, uint32_t barrier) const {
    const auto bytes = static_cast<uint32_t>(max(s.end - s.begin, 0) * sizeof(T));
    if (lane_ == 0 && bytes > 0) {
      ptx::bulk_load(shared_.slots_start + offset + s.begin * sizeof(T), s.from + s.begin, bytes,
                     barrier);
    }
    return bytes;
  }
  __device__ void put_end(const Slice& s, int offset) const {
    if (s.at >= 0) reinterpret_cast<T*>(shared_.base + offset)[s.at] = s.value;
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
