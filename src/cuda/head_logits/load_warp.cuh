// The warp of a cluster's block that loads its slices of rows (cluster_rows.cuh).
#pragma once

#include "cuda/head_logits/cluster_shared.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

template <class Kind>
class LoadWarp {
  using T = typename Kind::Element;

 public:
  __device__ LoadWarp(const ClusterShared<Kind>& shared, const ClusterRowsOf& rows, int lane)
      : p_(shared.p), shared_(shared), rows_(rows), lane_(lane) {
    const int first = static_cast<int>(ptx::cluster_rank()) * p_.strips_per_block;
    const int column = first_column(p_, first);
    columns_ = columns_between(p_, first, first + p_.strips_per_block);
    const auto slice = [&](const void* data, int64_t row_stride) {
      return static_cast<const T*>(data) + first_element(p_, rows, row_stride, column);
    };
    student_ = slice(p_.logits, p_.logits_stride);
    if (Kind::kHasTeacher) teacher_ = slice(p_.teacher, p_.teacher_stride);
  }

  __device__ void run() {
    RowCounts counts;
    RingCursor slot;
    for (int i = 0; i < rows_.count; ++i) {
      if (i >= p_.slots) ptx::barrier_wait(shared_.emptied(slot.at), slot.parity ^ 1);
      const uint32_t barrier = shared_.loaded(slot.at);
      uint32_t bytes = 0;
      if (counts.next(p_, rows_, i, lane_)) {
        const int offset = slot.at * p_.slot_bytes;
        bytes = load(student_, offset, barrier);
        if (Kind::kHasTeacher) bytes += load(teacher_, offset + p_.matrix_bytes, barrier);
      }
      if (lane_ == 0) {
        ptx::barrier_expect(barrier, bytes);
      } else {
        ptx::barrier_arrive(barrier);
      }
      __syncwarp();
      student_ += rows_.stride * p_.logits_stride;
      if (Kind::kHasTeacher) teacher_ += rows_.stride * p_.teacher_stride;
      slot.advance(p_.slots);
    }
  }

 private:
  // A slice to `offset` of the block's shared memory: whole 16-byte words by the copy engine, and
  // by the lanes the ends, whose words may reach beyond what is the caller's. Returns the bytes
  // that the engine counts on the barrier.
  __device__ uint32_t load(const T* slice, int offset, uint32_t barrier) const {
    constexpr int kPerWord = 16 / sizeof(T);
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
  const ClusterRowsOf& rows_;
  int lane_;
  int columns_;
  const T *student_, *teacher_ = nullptr;  // the next row's slices
};

#endif

}  // namespace ullage::lossk::cuda
