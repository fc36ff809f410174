// head_rows_sm80_short: rows of one strip, several a warp. The warp sums them one after the other,
// then each has a lane for its terms, then the warp writes their gradients, from L1: where a row is
// short it is its terms that take time, and they take the same for one row or for many.
#pragma once

#include "cuda/head_logits/streamed_strip.cuh"

namespace ullage::lossk::cuda {

// Columns that L1 holds.
template <class T, bool kAligned>
struct ShortStrip : StreamedStrip<T, kAligned> {
  static constexpr bool kNear = true;
};

// A lane keeps what its row comes to; the others help to sum it. kAligned: every row of logits and
// teacher begins a 16-byte word.
template <class Kind, bool kAligned>
class ShortRows {
  using T = typename Kind::Element;
  using Strip = ShortStrip<T, kAligned>;
  static constexpr Family kFamily = Kind::kFamily;

 public:
  // `words`: this warp's, kRowsOfWarp of them, shared.
  __device__ ShortRows(const HeadParams& p, RowWord* words, int lane)
      : p_(p), words_(words), lane_(lane), columns_(static_cast<int>(p.vocab)) {}

  // Rows `first` on, of n_tok: as many as there are, up to p.rows_at_a_time.
  __device__ void take(int64_t first) {
    const int n = static_cast<int>(min(int64_t{p_.rows_at_a_time}, end_row(p_) - first));
    const int64_t row = first + lane_;
    const bool mine = lane_ < n;
    const int64_t label = mine ? stored_label(p_, row) : -1;
    const unsigned counting = __ballot_sync(~0u, mine && row_counts(p_, row, label));
    ask_for(first, n, counting);
    RowSums sums = sums_of(first, n, counting);
    if (kOwnExtras<kFamily> > 0 || wants_extra<kFamily>(p_)) add_extras(first, n, counting, sums);
    ullage::cuda::ptx::wait_for_previous_kernel();
    if (counting >> lane_ & 1) {
      RowInputs in = load_row_vectors(p_, row, label);
      in.label_logit = to_float(label_logit<T>(p_, row, in.label));
      words_[lane_] = finish_row_alone<Kind>(p_, row, in, sums);
    } else if (mine) {
      for (int t = 0; t < p_.n_terms; ++t) p_.row_losses[t * p_.n_tok + row] = 0;
      write_outputs_alone(p_, row, {});
    }
    __syncwarp();
    if (p_.gradient != nullptr) write_gradients(first, n, counting);
    __syncwarp();  // every lane has read the words
  }

 private:
  // All rows that count are on their way before the first is waited for.
  __device__ void ask_for(int64_t first, int n, unsigned counting) const {
    constexpr int kLine = 128 / sizeof(T);  // columns
    static_assert(32 * kLine >= 4 * kWarpColumns, "a lane a line of a strip");
    for_each(first, n, [&](int b, const Strip& student, const Strip& teacher) {
      if (!(counting >> b & 1) || lane_ * kLine >= columns_) return;
      ullage::cuda::ptx::prefetch_to_l1(student.data + lane_ * kLine);
      if constexpr (Kind::kHasTeacher) {
        ullage::cuda::ptx::prefetch_to_l1(teacher.data + lane_ * kLine);
      }
    });
  }
  // Calls act(b, student, teacher) for each of the rows.
  template <class Act>
  __device__ void for_each(int64_t first, int n, const Act& act) const {
    const auto at = [&](const void* data, int64_t stride) -> Strip {
      return {{static_cast<const T*>(data) + (first - p_.first_row) * stride}};
    };
    Strip student = at(p_.logits, p_.logits_stride);
    Strip teacher = Kind::kHasTeacher ? at(p_.teacher, p_.teacher_stride) : student;
    for (int b = 0; b < n; ++b) {
      act(b, student, teacher);
      student.data += p_.logits_stride;
      if constexpr (Kind::kHasTeacher) teacher.data += p_.teacher_stride;
    }
  }

  __device__ RowSums sums_of(int64_t first, int n, unsigned counting) const {
    StripSums<Kind> mine;
    for_each(first, n, [&](int b, const Strip& student, const Strip& teacher) {
      if (!(counting >> b & 1)) return;
      const StripMaxima most = strip_maxima<Kind>(student, teacher, columns_, lane_);
      const RelativeSums<Kind> sums =
          warp_sum(lane_sums<Kind>(p_, student, teacher, columns_, lane_, most));
      if (lane_ == b) mine = {most.student, most.teacher, sums};
    });
    // As the one strip of a section, and that of the row: what is not finite takes the same way.
    bring_to(p_, mine, mine.max, mine.teacher_max);
    return row_sums<Kind>(p_, mine.max, mine.teacher_max, mine.sums);
  }

  __device__ void add_extras(int64_t first, int n, unsigned counting, RowSums& sums) const {
    if (lane_ < n) words_[lane_].sums = sums;
    __syncwarp();
    for_each(first, n, [&](int b, const Strip& student, const Strip& teacher) {
      if (!(counting >> b & 1)) return;
      const RowSums& of = words_[b].sums;
      if constexpr (kFamily == Family::kMixed) {
        const MixedSums s = strip_mixed_sums<Kind>(p_, student, teacher, columns_, of, lane_);
        const float own[] = {s.teacher_from_mix, s.student_from_mix, s.cross, s.forward, s.reverse};
        if (lane_ == b) take_own_extras<kFamily>(own, sums);
      }
      if constexpr (kFamily == Family::kJensenShannon) {
        float own[2];
        lane_mix_sums<Kind>(p_, student, teacher, columns_, of, lane_, own);
        warp_sums(own);
        if (lane_ == b) take_own_extras<kFamily>(own, sums);
      }
      if (!wants_extra<kFamily>(p_)) return;
      const ExtraSums s = strip_extra_sums<Kind>(p_, student, columns_, 0, of, lane_);
      if (lane_ == b) sums.entropy = s.entropy, sums.smooth = s.smooth, sums.argmax = s.argmax;
    });
    __syncwarp();  // every lane has read the sums
  }

  __device__ void write_gradients(int64_t first, int n, unsigned counting) const {
    T* to = gradient_at<T>(p_, first, 0);
    for_each(first, n, [&](int b, const Strip& student, const Strip& teacher) {
      if (counting >> b & 1) {
        write_gradient<Kind>(p_, student, teacher, columns_, to, 0, words_[b], lane_);
      } else {
        clear_gradient(p_, to, columns_, lane_);
      }
      to += p_.gradient_stride;
    });
  }

  const HeadParams& p_;
  RowWord* words_;
  int lane_;
  int columns_;
};

template <class Kind>
__global__ void __launch_bounds__(kShortWarps * 32, kShortBlocks)
    short_rows(const __grid_constant__ HeadParams p) {
  static_assert(kRowsOfWarp <= 32, "a lane a row");
  // Of every warp's rows; no constructor runs.
  __shared__ alignas(RowWord) std::byte word_bytes[kShortWarps * kRowsOfWarp * sizeof(RowWord)];
  const int warp = ullage::cuda::ptx::warp_of_block(), lane = threadIdx.x % 32;
  RowWord* const words = reinterpret_cast<RowWord*>(word_bytes) + warp * kRowsOfWarp;
  const int64_t step = int64_t{gridDim.x} * kShortWarps * p.rows_at_a_time;
  const int64_t start = p.first_row + (int64_t{blockIdx.x} * kShortWarps + warp) * p.rows_at_a_time;
  const auto run = [&](auto rows) {
    for (int64_t first = start; first < end_row(p); first += step) rows.take(first);
  };
  if (p.in_whole_words) {
    run(ShortRows<Kind, true>(p, words, lane));
  } else {
    run(ShortRows<Kind, false>(p, words, lane));
  }
  ullage::cuda::ptx::let_next_kernel_start();
}

struct ShortRowsKernel {
  template <class Kind>
  static const void* of() {
    return reinterpret_cast<const void*>(&short_rows<Kind>);
  }
};

}  // namespace ullage::lossk::cuda
