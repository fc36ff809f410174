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

  // A slice to `offset` of the block's shared memory: whole 16-byte words by the copy engine, and
  // by the lanes the ends, whose words may reach beyond what is the caller's. Returns the bytes
  // that the engine counts on the barrier.
  __device__ uint32_t load(const void* matrix, int64_t row_stride, int row, int offset,
                           uint32_t barrier) const {
    constexpr int kPerWord = 16 / sizeof(T);
    const T* const slice = static_cast<const T*>(matrix) + row * row_stride + column_;
    const auto shift = static_cast<int>(reinterpret_cast<uintptr_t>(slice) % 16 / sizeof(T));
    const int head = min((kPerWord - shift) % kPerWord, columns_);
    const int body = (columns_ - head) / kPerWord * kPerWord;
    const auto bytes = static_cast<uint32_t>(body * sizeof(T));
    if (lane_ == 0 && bytes > 0) {
      const uint32_t to = shared_.slots_start + offset + (shift + head) * sizeof(T);
      ptx::bulk_load(to, slice + head, bytes, barrier);
    }
    if (!p_.in_whole_words) {
      T* const to = reinterpret_cast<T*>(shared_.base + offset) + shift;
      const int tail = head + body + lane_ - kPerWord;
      if (lane_ < head) to[lane_] = slice[lane_];
      if (lane_ >= kPerWord && tail < columns_) to[tail] = slice[tail];
    }
    return bytes;
  }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  int lane_;
  int column_, columns_;  // the block's
};

#endif

}  // namespace ullage::lossk::cuda
