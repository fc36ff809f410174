// A warp of a cluster's block that sums its span of strips and writes their gradient
// (cluster_rows.cuh).
#pragma once

#include "cuda/head_logits/cluster_shared.cuh"
#include "cuda/head_logits/kept_strip.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

// What is known of a launch before its first row. Loops that have nothing beside them run a fifth
// faster than the same loops among those of every other case (H200): instructions are fetched.
enum class Task {
  kSums,      // rows are summed, and that is all
  kGradient,  // and their gradient is written, in whole words, with nothing added to it
  kAdds,      // or added to what is there
  kAny,
};

// Whether a row's matrices all have the same shift.
template <class Kind>
__device__ inline bool same_shift(const HeadParams& p) {
  using T = typename Kind::Element;
  const auto as_logits = [&](const void* matrix, int64_t row_stride) {
    return (reinterpret_cast<uintptr_t>(matrix) - reinterpret_cast<uintptr_t>(p.logits)) % 16 ==
               0 &&
           (row_stride - p.logits_stride) % kPerWord<T> == 0;
  };
  return (!Kind::kHasTeacher || as_logits(p.teacher, p.teacher_stride)) &&
         (p.gradient == nullptr || as_logits(p.gradient, p.gradient_stride));
}

template <class Kind, Task kTask, Placement kPlacement>
class ColumnWarp {
  using T = typename Kind::Element;
  using Strip = KeptStrip<T, kPlacement>;
  static constexpr bool kHasOwnExtras = kOwnExtras<Kind::kFamily> > 0;
  static constexpr bool kOnlyGradient = kTask == Task::kGradient || kTask == Task::kAdds;

 public:
  // Warp `warp` of the block's for columns: p.row_warps share a row, as many others the next.
  __device__ ColumnWarp(const ClusterShared<Kind>& shared, int warp, int lane)
      : p_(shared.p),
        shared_(shared),
        lane_(lane),
        group_(warp / p_.row_warps),
        has_same_shift_(kTask == Task::kAny && same_shift<Kind>(p_)) {
    const int block_first = static_cast<int>(ptx::cluster_rank()) * p_.strips_per_block;
    local_first_ = place_of(warp % p_.row_warps) * p_.strips_per_warp;
    first_ = block_first + local_first_;
    column_ = first_column(p_, first_);
    columns_ = columns_between(p_, first_, first_ + p_.strips_per_warp);
    block_column_ = first_column(p_, block_first);
  }

  __device__ void run() {
    const bool second = kOnlyGradient ? kHasOwnExtras : shared_.n_extras > 0;
    const bool writes = kOnlyGradient || p_.gradient != nullptr;
    // Nothing is left to do with a row once it is summed.
    const bool sums_only = kTask == Task::kSums || (!writes && !second);
    RingCursor slot, before, arrival;  // before: of the group's row before, i - groups
    RowId row_before{RowId::kNoRow};
    // A row's maxima are looked for while the sums of the row before travel: its slot has been free
    // for a row's time.
    const bool ahead = kHasOwnExtras && p_.strips_per_warp == 1 && p_.slots >= 3 * p_.groups;
    StripMaxima most{};
    bool has_most = false;
    slot.advance(p_.slots, group_);
    before = slot;
    arrival.advance(shared_.arrivals(), group_);
    for (int i = group_;; i += p_.groups) {
      ptx::barrier_wait(shared_.loaded(arrival.at), arrival.parity);
      arrival.advance(shared_.arrivals(), p_.groups);
      const RowId row = shared_.id(i);
      // The tables of rows up to i - 2 groups are free once those have their words.
      if (sums_only) {
        if (row.is_none()) return;
        if (i >= 2 * p_.groups) shared_.wait_for_word(i - 2 * p_.groups);
      }
      if (row.counts()) sum(slot.at, row, i, has_most, most);
      if (!row.is_none()) ptx::barrier_arrive(shared_.sums_there(i));
      if (sums_only) {
        ptx::barrier_arrive(shared_.emptied(slot.at));
      } else {
        if (!row_before.is_none()) {
          if (kTask == Task::kAdds) ask_for_gradient(row_before);
          shared_.wait_for_word(i - p_.groups);
          if (writes) write(before.at, row_before, i - p_.groups);
          ptx::barrier_arrive(shared_.emptied(before.at));
          before.advance(p_.slots, p_.groups);
        }
        if (row.is_none()) return;
        if (ahead) {
          ptx::barrier_wait(shared_.loaded(arrival.at), arrival.parity);
          const RowId next = shared_.id(i + p_.groups);
          RingCursor next_slot = slot;
          next_slot.advance(p_.slots, p_.groups);
          has_most = next.counts();
          if (has_most) most = maxima(next_slot.at, next);
        }
        if (second) {
          ptx::barrier_wait(shared_.row_sums_there(i), shared_.extras_parity(i));
          if (row.counts()) sum_extras(slot.at, row, i);
          ptx::barrier_arrive(shared_.extras_there(i));
        }
        row_before = row;
      }
      slot.advance(p_.slots, p_.groups);
    }
  }

 private:
  // Of a row's warps, in the order of its columns. The four schedulers of a multiprocessor take
  // warps in turn: each gets adjacent spans, of which as many are a round longer as of any other's.
  // (Of 3.25 rounds a strip, every fourth has four: one scheduler had them all, and three waited.)
  __device__ int place_of(int warp) const {
    constexpr int kSchedulers = 4;
    if (p_.row_warps % kSchedulers != 0) return warp;
    return warp % kSchedulers * (p_.row_warps / kSchedulers) + warp / kSchedulers;
  }
  // How far into a 16-byte word a row starts, in columns; a block's slice and a strip start as far.
  __device__ static int shift_of_row(const void* matrix, int64_t row_stride, RowId row) {
    const auto first = static_cast<unsigned>(reinterpret_cast<uintptr_t>(matrix) / sizeof(T));
    return static_cast<int>(
        (first + static_cast<unsigned>(row.row()) * static_cast<unsigned>(row_stride)) %
        kPerWord<T>);
  }

  // The row's columns in a slot, from the row's `from` on.
  struct Columns {
    Strip student, teacher;
  };
  __device__ Columns columns_of(int slot, RowId row, int from) const {
    const T* const at = reinterpret_cast<const T*>(shared_.slot(slot)) + (from - block_column_);
    Columns columns{{at, 0}, {at + p_.matrix_bytes / sizeof(T), 0}};
    if constexpr (kPlacement != Placement::kInWords) {
      columns.student.shift = shift_of_row(p_.logits, p_.logits_stride, row);
      columns.teacher.shift = kPlacement == Placement::kSameShift ? columns.student.shift
                              : Kind::kHasTeacher ? shift_of_row(p_.teacher, p_.teacher_stride, row)
                                                  : 0;
    }
    return columns;
  }

  // Calls act(strip of the block, student, teacher, columns, first column) for each of the span.
  template <class Act>
  __device__ void for_each_strip(int slot, RowId row, const Act& act) const {
    int column = column_;
    for (int s = 0; s < p_.strips_per_warp; ++s) {
      const int end =
          s + 1 < p_.strips_per_warp ? first_column(p_, first_ + s + 1) : column_ + columns_;
      const Columns at = columns_of(slot, row, column);
      act(local_first_ + s, at.student, at.teacher, end - column, column);
      column = end;
    }
  }

  __device__ T* gradient_of(RowId row) const {
    return static_cast<T*>(p_.gradient) + (row.row() * p_.gradient_stride + column_);
  }
  // What it is added to is on its way to L2 before the row's word is waited for.
  __device__ void ask_for_gradient(RowId row) const {
    constexpr int kLine = 128 / sizeof(T);  // columns
    if (!row.counts()) return;
    for (int c = lane_ * kLine; c < columns_; c += 32 * kLine) {
      ptx::prefetch_to_l2(gradient_of(row) + c);
    }
  }
  __device__ void write(int slot, RowId row, int i) const {
    T* const to = gradient_of(row);
    if (!row.counts()) return clear_gradient(p_, to, columns_, lane_);
    const Columns at = columns_of(slot, row, column_);
    const RowWord word = *shared_.word(i);  // its own copy: stores might change the other
    constexpr bool kInWords = kPlacement == Placement::kInWords;
    const Span span{column_, columns_, static_cast<int>(p_.vocab) - column_};
    if constexpr (Kind::kSoftcap && kTask == Task::kGradient) {
      span_gradient<Kind, true, true>(p_, at.student, at.teacher, columns_, to, nullptr, column_,
                                      word, lane_);
    } else if constexpr (kOnlyGradient) {
      span_gradient_in_words<Kind, !kInWords, kTask == Task::kAdds>(p_, at.student, at.teacher,
                                                                    span, to, word, lane_);
    } else {
      if constexpr (!Kind::kSoftcap && !kInWords) {
        if (has_same_shift_ && is_plain(p_, word)) {
          return span_gradient_in_words<Kind, true>(p_, at.student, at.teacher, span, to, word,
                                                    lane_);
        }
      }
      write_gradient<Kind>(p_, at.student, at.teacher, columns_, to, column_, word, lane_);
    }
  }

  // Of a span of one strip.
  __device__ StripMaxima maxima(int slot, RowId row) const {
    const Columns at = columns_of(slot, row, column_);
    return strip_maxima<Kind>(at.student, at.teacher, columns_, lane_);
  }
  // `most`: of the span's one strip, where they are known.
  __device__ void sum(int slot, RowId row, int i, bool has_most, StripMaxima most) const {
    float* const table = shared_.sums(i);
    for_each_strip(slot, row,
                   [&](int s, const Strip& student, const Strip& teacher, int columns, int) {
                     if (!has_most) most = strip_maxima<Kind>(student, teacher, columns, lane_);
                     with_loads(student, teacher, [&](const auto& mine, const auto& others) {
                       put_strip(table, p_.strips_per_block, s, most,
                                 lane_sums<Kind>(p_, mine, others, columns, lane_, most), lane_);
                     });
                   });
  }
  __device__ void sum_extras(int slot, RowId row, int i) const {
    const RowSums sums = shared_.word(i)->sums;
    float* const table = shared_.extras(i);
    for_each_strip(
        slot, row, [&](int s, const Strip& student, const Strip& teacher, int columns, int column) {
          with_loads(student, teacher, [&](const auto& mine, const auto& others) {
            put_strip_extras<Kind, !kOnlyGradient>(p_, table, p_.strips_per_block, s, mine, others,
                                                   columns, column, sums, lane_);
          });
        });
  }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  int lane_, group_;
  int first_, local_first_;  // strip, of the row and of the block
  int column_, columns_;     // the span's
  int block_column_;         // the block's first
  bool has_same_shift_;
};

// Whether a gradient may be added with nothing beside it. Beside the loops of a family that goes
// through a row twice, one more is no longer inlined, and each was half as slow again
// (Jensen-Shannon in float32, H200).
template <class Kind>
inline constexpr bool kAddsAlone = !Kind::kSoftcap && kOwnExtras<Kind::kFamily> == 0;

template <class Kind>
__device__ inline void run_column_warp(const ClusterShared<Kind>& shared, int warp, int lane) {
  const HeadParams& p = shared.p;
  const auto run = [&]<Task kTask, Placement kPlacement>() {
    ColumnWarp<Kind, kTask, kPlacement>(shared, warp, lane).run();
  };
  const auto run_alone = [&]<Placement kPlacement>() {
    if (p.gradient == nullptr) {
      if constexpr (kOwnExtras<Kind::kFamily> == 0) {
        run.template operator()<Task::kSums, kPlacement>();
      }
      return;
    }
    if constexpr (kAddsAlone<Kind>) {
      if (p.accumulate) return run.template operator()<Task::kAdds, kPlacement>();
    }
    run.template operator()<Task::kGradient, kPlacement>();
  };
  // With nothing beside it.
  const bool alone = !wants_extra<Kind::kFamily>(p) && same_shift<Kind>(p) &&
                     (kAddsAlone<Kind> || !p.accumulate) &&
                     (p.gradient != nullptr || kOwnExtras<Kind::kFamily> == 0);
  if (p.in_whole_words) {
    alone ? run_alone.template operator()<Placement::kInWords>()
          : run.template operator()<Task::kAny, Placement::kInWords>();
  } else if constexpr (Kind::kSoftcap) {
    run.template operator()<Task::kAny, Placement::kAny>();
  } else {
    alone ? run_alone.template operator()<Placement::kSameShift>()
          : run.template operator()<Task::kAny, Placement::kAny>();
  }
}

#endif

}  // namespace ullage::lossk::cuda
