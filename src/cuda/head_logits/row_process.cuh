// One row from its columns to its outputs: the same code for a cluster that keeps the row in shared
// memory and for a block that streams it. A warp has adjacent strips, its span. `Strips` says where
// they lie and how warps exchange what they found:
//   int first() last()                   this warp's strips
//   Strip student(s) teacher(s)          one of them: KeptStrip or StreamedStrip
//   Strip student_span() teacher_span()  all of them as one
//   Element* gradient_span()             where their gradient is written
//   bool gradient_aligned()              ... in vectors
//   void gradient_written()
//   void publish_sum(SumPartial, strip, float), publish_extra(ExtraPartial, ...)   by a whole warp
//   void finish_sums(), finish_extras()  return when every warp's values are there
//   const float* sums(SumPartial), extras(ExtraPartial)
//   float gain()                         lane t: of term t
#pragma once

#include "cuda/head_logits/row_gradient.cuh"

namespace ullage::lossk::cuda {

__device__ inline bool wants_extra(const HeadParams& p) {
  return p.wants_entropy || p.wants_argmax || p.wants_smoothing;
}

__device__ inline int columns_of(const HeadParams& p, int strip) {
  return strip == p.n_strips - 1 ? p.last_columns : p.strip_columns;
}
// Of the strips from `first` to before `last`.
__device__ inline int columns_between(const HeadParams& p, int first, int last) {
  return (last - first - 1) * p.strip_columns + columns_of(p, last - 1);
}

// The outputs of one row; by one thread. `counted`: the row has a label, or there are no labels.
__device__ inline void write_row(const HeadParams& p, int64_t row, bool counted,
                                 const RowInputs& in, const RowSums& sums, float log_prob) {
  const float lse = counted ? log_sum_exp(sums) : 0.0f;
  float entropy = counted ? kLn2 * (sums.log2_sum - sums.entropy / sums.sum) : 0.0f;
  if (counted && p.group_entropy.data != nullptr) entropy = float_at(p.group_entropy, row, 0);
  if (p.row_log_prob != nullptr) p.row_log_prob[row] = log_prob;
  if (p.row_entropy != nullptr) p.row_entropy[row] = entropy;
  if (p.lse.data != nullptr) p.lse.data[row * p.lse.stride] = lse;
  if (p.label_log_prob.data != nullptr) {
    p.label_log_prob.data[row * p.label_log_prob.stride] = log_prob;
  }
  if (p.entropy.data != nullptr) p.entropy.data[row * p.entropy.stride] = entropy;
  if (p.argmax != nullptr) p.argmax[row] = counted ? sums.argmax : -1;
  if (p.correct != nullptr) p.correct[row] = in.label >= 0 && sums.argmax == in.label;
}

// lse in two numbers, a shift and the logarithm of the sum relative to it; by one thread.
__device__ inline void write_shift(const HeadParams& p, int64_t row, float shift, float log_sum) {
  if (p.shift.data != nullptr) p.shift.data[row * p.shift.stride] = shift;
  if (p.log_sum.data != nullptr) p.log_sum.data[row * p.log_sum.stride] = log_sum;
}
__device__ inline void write_distance(const HeadParams& p, int64_t row, float distance) {
  if (p.distance.data != nullptr) p.distance.data[row * p.distance.stride] = distance;
}

// A row that no term counts and that has no label: gradient and outputs 0, nothing read.
template <class T>
__device__ inline void clear_row(const HeadParams& p, int64_t row, int first_strip, int last_strip,
                                 bool writes) {
  const int lane = threadIdx.x % 32;
  if (p.gradient != nullptr && !p.accumulate) {
    T* columns = static_cast<T*>(p.gradient) + (row - p.first_row) * p.gradient_stride +
                 int64_t{first_strip} * p.strip_columns;
    const int n = columns_between(p, first_strip, last_strip);
    const float zeros[8] = {};
    for (int c = lane * kLaneColumns; c < n; c += kWarpColumns) {
      store_vector(columns + c, zeros, n - c, is_aligned(columns));
    }
  }
  if (writes && lane < p.n_terms) p.row_losses[lane * p.n_tok + row] = 0;
  if (writes && lane == 0) {
    write_row(p, row, false, {}, {}, 0);
    write_shift(p, row, 0, 0);
    write_distance(p, row, 0);
  }
}

template <class Kind, class Strips>
__device__ inline RowSums reduce_row(const HeadParams& p, Strips& strips, int lane) {
  constexpr Family kFamily = Kind::kFamily;
  for (int s = strips.first(); s < strips.last(); ++s) {
    const StripSums strip = strip_sums<Kind>(p, strips.student(s), strips.teacher(s), lane);
    strips.publish_sum(kMax, s, strip.max);
    strips.publish_sum(kSum, s, strip.sum);
    if constexpr (Kind::kHasTeacher) {
      strips.publish_sum(kTeacherMax, s, strip.teacher_max);
      strips.publish_sum(kTeacherSum, s, strip.teacher_sum);
    }
    if constexpr (kFamily == Family::kForward) {
      strips.publish_sum(kCross, s, strip.cross);
      strips.publish_sum(kForwardKl, s, strip.kl);
    }
    if constexpr (kFamily == Family::kReverse) strips.publish_sum(kReverseKl, s, strip.kl);
  }
  strips.finish_sums();

  RowSums sums;
  const int n = p.n_strips;
  const StripShifts own = shifts_of<Kind>(p, strips.sums(kMax), lane);
  sums.stored_max = own.stored_max;
  sums.max = own.max;
  sums.reference = own.reference;
  sums.sum = fold(own.weight, n, lane, [&](int s, int) { return strips.sums(kSum)[s]; });
  sums.log2_sum = log2f(sums.sum);
  if constexpr (Kind::kHasTeacher) {
    const StripShifts other = teacher_shifts_of(p, strips.sums(kTeacherMax), lane);
    const float* teacher_sums = strips.sums(kTeacherSum);
    sums.teacher_max = other.max;
    sums.teacher_reference = other.reference;
    sums.teacher_sum = fold(other.weight, n, lane, [&](int s, int) { return teacher_sums[s]; });
    sums.teacher_log2_sum = log2f(sums.teacher_sum);
    // u and v of the row are those of the strip plus the strip's shifts.
    if constexpr (kFamily == Family::kForward) {
      if (p.wants_cross) {
        sums.cross = fold(other.weight, n, lane, [&](int s, int i) {
          return fmaf(own.shift[i], teacher_sums[s], strips.sums(kCross)[s]);
        });
      }
      if (p.wants_forward_kl) {
        sums.forward_kl = fold(other.weight, n, lane, [&](int s, int i) {
          return fmaf(own.shift[i] - other.shift[i], teacher_sums[s], strips.sums(kForwardKl)[s]);
        });
      }
    }
    if constexpr (kFamily == Family::kReverse) {
      sums.reverse_kl = fold(own.weight, n, lane, [&](int s, int i) {
        return fmaf(own.shift[i] - other.shift[i], strips.sums(kSum)[s],
                    strips.sums(kReverseKl)[s]);
      });
    }
  }
  if (kFamily != Family::kMixed && !wants_extra(p)) return sums;

  for (int s = strips.first(); s < strips.last(); ++s) {
    if constexpr (kFamily == Family::kMixed) {
      const MixedSums strip =
          strip_mixed_sums<Kind>(p, strips.student(s), strips.teacher(s), sums, lane);
      strips.publish_extra(kMixedCross, s, strip.cross);
      strips.publish_extra(kMixedForward, s, strip.forward);
      strips.publish_extra(kMixedReverse, s, strip.reverse);
      strips.publish_extra(kTeacherFromMix, s, strip.teacher_from_mix);
      strips.publish_extra(kStudentFromMix, s, strip.student_from_mix);
    }
    if (wants_extra(p)) {
      const ExtraSums strip =
          strip_extra_sums<Kind>(p, strips.student(s), int64_t{s} * p.strip_columns, sums, lane);
      strips.publish_extra(kEntropy, s, strip.entropy);
      strips.publish_extra(kSmooth, s, strip.smooth);
      strips.publish_extra(kArgmax, s, __int_as_float(strip.argmax));
    }
  }
  strips.finish_extras();
  const auto total = [&](ExtraPartial partial) {
    return fold_sum(strips.extras(partial), n, lane);
  };
  if constexpr (kFamily == Family::kMixed) {
    sums.cross = total(kMixedCross);
    sums.forward_kl = total(kMixedForward);
    sums.reverse_kl = total(kMixedReverse);
    sums.teacher_from_mix = total(kTeacherFromMix);
    sums.student_from_mix = total(kStudentFromMix);
  }
  if (wants_extra(p)) {
    sums.entropy = total(kEntropy);
    sums.smooth = total(kSmooth);
    sums.argmax = fold_min_index(strips.extras(kArgmax), n, lane);
  }
  return sums;
}

// `writes`: this warp writes the row's outputs.
template <class Kind, class Strips>
__device__ inline void process_row(const HeadParams& p, int64_t row, const RowInputs& in,
                                   Strips& strips, int lane, bool writes) {
  using T = typename Kind::Element;
  RowSums sums = reduce_row<Kind>(p, strips, lane);
  if (p.gradient == nullptr && !writes) return;
  const float gain = strips.gain();
  float log_prob = in.label >= 0 ? label_log_prob<Kind>(p, in, sums) : 0.0f;
  // A shard has no dense teacher.
  if constexpr (!Kind::kHasTeacher) {
    if (p.is_shard) log_prob = place_in_group(p, row, in, sums, log_prob);
  }
  const RowCoefficients c =
      evaluate_terms<Kind::kFamily>(p, row, in, sums, gain, log_prob, lane, writes);
  if (writes && lane == 0) {
    write_row(p, row, is_reported(p, in), in, sums, log_prob);
    // The maximum itself, so without what rounding the reference took. Nothing but -inf sums to 0.
    const float off = fmaf(sums.max, p.log2_scale, -sums.reference);
    write_shift(p, row, sums.max, kLn2 * (sums.log2_sum - (sums.sum > 0 ? off : 0)));
    const auto columns = p.group_shift.data != nullptr ? p.smoothed_columns : p.vocab;
    write_distance(p, row, kLn2 * fmaf(-static_cast<float>(columns), off, sums.smooth));
    const bool finite =
        sums.stored_max < INFINITY && (!Kind::kHasTeacher || sums.teacher_max < INFINITY);
    if (!finite) report(p, row, Fault::kNonFinite);
  }
  if (p.gradient == nullptr) return;
  const GradientScales scales = gradient_scales<Kind::kFamily>(sums, c);
  const int64_t first_column = int64_t{strips.first()} * p.strip_columns;
  const T* held = p.accumulate ? static_cast<const T*>(p.gradient) +
                                     (row - p.first_row) * p.gradient_stride + first_column
                               : nullptr;
  const auto write_span = [&]<bool kPlain>() {
    span_gradient<Kind, kPlain>(p, strips.student_span(), strips.teacher_span(),
                                strips.gradient_span(), strips.gradient_aligned(), held,
                                first_column, in.label, sums, c, scales, lane);
  };
  if (c.uniform == 0 && held == nullptr) {
    write_span.template operator()<true>();
  } else {
    write_span.template operator()<false>();
  }
  strips.gradient_written();
}

}  // namespace ullage::lossk::cuda
