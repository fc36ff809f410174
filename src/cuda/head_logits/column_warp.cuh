// A warp of a cluster's block that sums its span of strips and writes their gradient
// (cluster_rows.cuh).
#pragma once

#include "cuda/head_logits/cluster_shared.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

// Columns in shared memory, where the first lies `shift` columns into a 16-byte word; 0 where
// kAligned.
template <class T, bool kAligned_>
struct KeptStrip {
  static constexpr bool kAligned = kAligned_, kKept = true;
  const T* data;  // the word's first column
  int shift;

  // Eight from the `i`-th of the first word on, a multiple of eight.
  __device__ Vector<T> words_at(int i) const {
    Vector<T> v;
#pragma unroll
    for (int w = 0; w < kWordsOf<T>; ++w) {
      v.words[w] = reinterpret_cast<const uint4*>(data + i)[w];
    }
    return v;
  }
  __device__ Vector<T> load(int column) const {
    if constexpr (kAligned) return words_at(column);
    return load_shifted(data + column, shift);
  }
  __device__ Vector<T> load_tail(int column, int columns) const {
    Vector<T> v = load(column);
    if (column + kLaneColumns > columns) blank_from(v, columns - column);
    return v;
  }
};

template <class Kind>
class ColumnWarp {
  using T = typename Kind::Element;

 public:
  __device__ ColumnWarp(const ClusterShared<Kind>& shared, const ClusterRowsOf& rows, int warp,
                        int lane)
      : p_(shared.p), shared_(shared), rows_(rows), lane_(lane) {
    const int block_first = static_cast<int>(ptx::cluster_rank()) * p_.strips_per_block;
    local_first_ = warp * p_.strips_per_warp;
    first_ = block_first + local_first_;
    column_ = first_column(p_, first_);
    columns_ = columns_between(p_, first_, first_ + p_.strips_per_warp);
    const int block_column = first_column(p_, block_first);
    offset_ = (column_ - block_column) * static_cast<int>(sizeof(T));
    shift_ = Shift(p_.logits, p_.logits_stride, rows, p_, block_column);
    if (Kind::kHasTeacher) {
      teacher_shift_ = Shift(p_.teacher, p_.teacher_stride, rows, p_, block_column);
    }
    to_write_ = static_cast<T*>(p_.gradient) + first_element(p_, rows, p_.gradient_stride, column_);
    write_step_ = rows.stride * p_.gradient_stride;
  }

  __device__ void run() {
    const bool second = shared_.has_extras;
    // Nothing is left to do with a row once it is summed.
    const bool sums_only = p_.gradient == nullptr && !second;
    RowCounts counts;
    RingCursor now, before;                // slots of rows i and i - 1
    unsigned n_summed = 0, n_written = 0;  // rows that count
    bool counted = false, counted_before = false;
    for (int i = 0; i <= rows_.count; ++i) {
      counted_before = counted;
      counted = i < rows_.count && counts.next(p_, rows_, i, lane_);
      if (counted) {
        // The table of the row before last is free.
        if (sums_only && n_summed >= 2) wait_for_word(n_summed - 2);
        sum(now, i, n_summed);
      }
      if (sums_only) {
        n_summed += counted;
        ptx::barrier_arrive(shared_.emptied(now.at));
        now.advance(p_.slots);
        continue;
      }
      if (i > 0) {
        if (counted_before) {
          wait_for_word(n_written);
          if (p_.gradient != nullptr) write(before, i - 1, n_written);
          ++n_written;
        } else {
          ptx::wait_for_previous_kernel();
          clear_gradient(p_, to_write_, columns_, lane_);
        }
        to_write_ += write_step_;
        ptx::barrier_arrive(shared_.emptied(before.at));
        before.advance(p_.slots);
      }
      if (counted) {
        if (second) sum_extras(now, i, n_summed);
        ++n_summed;
      }
      now.advance(p_.slots);
    }
  }

 private:
  // How far into a 16-byte word a slice of row i starts, in columns.
  struct Shift {
    unsigned first = 0, step = 0;

    Shift() = default;
    __device__ Shift(const void* data, int64_t row_stride, const ClusterRowsOf& rows,
                     const HeadParams& p, int column)
        : first(static_cast<unsigned>(reinterpret_cast<uintptr_t>(data) / sizeof(T) +
                                      first_element(p, rows, row_stride, column))),
          step(static_cast<unsigned>(rows.stride * row_stride)) {}
    __device__ int of_row(int i) const {
      return static_cast<int>((first + step * static_cast<unsigned>(i)) % (16 / sizeof(T)));
    }
  };

  __device__ void wait_for_word(unsigned n) const {
    ptx::barrier_wait(shared_.word_there(n), n / 2 % 2);
  }

  // Calls act(student, teacher) with row i's columns in a slot, from column `from` of the span on.
  template <class Act>
  __device__ void with_columns(int slot, int i, int from, const Act& act) const {
    const T* const at = reinterpret_cast<const T*>(shared_.slot(slot) + offset_) + from;
    const T* const teacher = at + p_.matrix_bytes / sizeof(T);
    if (p_.in_whole_words) {
      act(KeptStrip<T, true>{at, 0}, KeptStrip<T, true>{teacher, 0});
    } else {
      act(KeptStrip<T, false>{at, shift_.of_row(i)},
          KeptStrip<T, false>{teacher, teacher_shift_.of_row(i)});
    }
  }

  // Calls act(strip of the block, student, teacher, columns, first column) for each of the span.
  template <class Act>
  __device__ void for_each_strip(int slot, int i, const Act& act) const {
    int column = column_;
    for (int s = 0; s < p_.strips_per_warp; ++s) {
      const int end =
          s + 1 < p_.strips_per_warp ? first_column(p_, first_ + s + 1) : column_ + columns_;
      with_columns(slot, i, column - column_, [&](const auto& student, const auto& teacher) {
        act(local_first_ + s, student, teacher, end - column, column);
      });
      column = end;
    }
  }

  __device__ void write(const RingCursor& slot, int i, unsigned n) {
    with_columns(slot.at, i, 0, [&](const auto& student, const auto& teacher) {
      write_gradient<Kind>(p_, student, teacher, columns_, to_write_, column_, *shared_.word(n),
                           lane_);
    });
  }

  // `n`: of the rows that count, this is the n-th.
  __device__ void sum(const RingCursor& slot, int i, unsigned n) {
    ptx::barrier_wait(shared_.loaded(slot.at), slot.parity);
    for_each_strip(
        slot.at, i, [&](int s, const auto& student, const auto& teacher, int columns, int) {
          const StripSums<Kind> strip = strip_sums<Kind>(p_, student, teacher, columns, lane_);
          if (lane_ == 0) put_sums(shared_.sums(n), p_.strips_per_block, s, strip);
        });
    ptx::barrier_arrive(shared_.sums_there(n));
  }
  __device__ void sum_extras(const RingCursor& slot, int i, unsigned n) {
    ptx::barrier_wait(shared_.row_sums_there(), n % 2);
    const RowSums row = shared_.word(n)->sums;
    for_each_strip(slot.at, i,
                   [&](int s, const auto& student, const auto& teacher, int columns, int column) {
                     put_strip_extras<Kind>(p_, shared_.extras(), p_.strips_per_block, s, student,
                                            teacher, columns, column, row, lane_);
                   });
    ptx::barrier_arrive(shared_.extras_there());
  }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  const ClusterRowsOf& rows_;
  int lane_;
  int first_, local_first_;      // strip, of the row and of the block
  int column_, columns_;         // the span's
  int offset_;                   // of the span in a matrix of a slot, bytes
  Shift shift_, teacher_shift_;  // where rows are not in whole words
  T* to_write_;                  // the span in the next row to be written
  int64_t write_step_;           // elements to the cluster's next row
};

#endif

}  // namespace ullage::lossk::cuda
