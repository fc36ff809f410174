// From the strips' sums to the row's: a lane a strip, the lanes of a section in a butterfly; then a
// lane a section, the warp in a butterfly.
//
// A table holds values of kind k of strip or section i at [k * n + i].
#pragma once

#include "cuda/head_logits/row_divergences.cuh"

namespace ullage::lossk::cuda {

template <class Kind>
__device__ inline void put_sums(float* table, int n, int i, const StripSums<Kind>& s) {
  table[kMax * n + i] = s.max;
  table[kSum * n + i] = s.sums.sum;
  if constexpr (Kind::kHasTeacher) {
    table[kTeacherMax * n + i] = s.teacher_max;
    table[kTeacherSum * n + i] = s.sums.teacher_sum;
  }
  if constexpr (Kind::kTempered) table[kTemperedSum * n + i] = s.sums.tempered_sum;
  if constexpr (Kind::kHasLogSum) table[kLogSum<Kind> * n + i] = s.sums.log_sum;
}
// Strip `i`: its maxima, and the sums of what the lanes of a warp have of it.
template <class Kind>
__device__ inline void put_strip(float* table, int n, int i, const StripMaxima& most,
                                 const RelativeSums<Kind>& mine, int lane) {
  constexpr int kCount = kSums<Kind::kFamily> - (Kind::kHasTeacher ? 2 : 1);
  if constexpr (kCount == 1) {
    // In one branch: a second made sums alone 0.02 of a read slower (H200).
    const float sum = warp_sum(mine.sum);
    if (lane == 0) put_sums(table, n, i, StripSums<Kind>{most.student, most.teacher, {sum}});
  } else {
    float sums[kCount] = {mine.sum};
    if constexpr (Kind::kHasTeacher) sums[1] = mine.teacher_sum;
    if constexpr (Kind::kTempered) sums[2] = mine.tempered_sum;
    if constexpr (Kind::kHasLogSum) sums[kCount - 1] = mine.log_sum;
    const float sum = spread_sums(sums, lane);
    const int which = lane / kLanesOfSum<kCount>;
    const int kind = which == 0                        ? kSum
                     : which == 1 && Kind::kHasTeacher ? kTeacherSum
                     : which == 2 && Kind::kTempered   ? kTemperedSum
                                                       : kLogSum<Kind>;
    if (lane % kLanesOfSum<kCount> == 0 && which < kCount) table[kind * n + i] = sum;
    if (lane != 0) return;
    table[kMax * n + i] = most.student;
    if constexpr (Kind::kHasTeacher) table[kTeacherMax * n + i] = most.teacher;
  }
}
template <class Kind>
__device__ inline StripSums<Kind> sums_at(const float* table, int n, int i) {
  StripSums<Kind> s;
  s.max = table[kMax * n + i];
  s.sums.sum = table[kSum * n + i];
  if constexpr (Kind::kHasTeacher) {
    s.teacher_max = table[kTeacherMax * n + i];
    s.sums.teacher_sum = table[kTeacherSum * n + i];
  }
  if constexpr (Kind::kTempered) s.sums.tempered_sum = table[kTemperedSum * n + i];
  if constexpr (Kind::kHasLogSum) s.sums.log_sum = table[kLogSum<Kind> * n + i];
  return s;
}

// Brings sums to the maxima of `to`.
template <class Kind>
__device__ inline void bring_to(const HeadParams& p, StripSums<Kind>& s, float max,
                                float teacher_max) {
  float teacher_by = 0, tempered_by = 0;
  if constexpr (Kind::kHasTeacher) teacher_by = teacher_shift(p, s.teacher_max, teacher_max);
  if constexpr (Kind::kTempered) {
    tempered_by = student_shift<Kind>(p, p.tempered_log2_scale, s.max, max);
  }
  s.sums.shift(p.wants_cross, student_shift<Kind>(p, p.log2_scale, s.max, max), teacher_by,
               tempered_by);
}

// Strip `i` of the table of `n`, a lane each; returns the section's, in each of its `per_section`
// lanes. Lanes without a strip bring nothing.
template <class Kind>
__device__ inline StripSums<Kind> section_sums(const HeadParams& p, const float* table, int n,
                                               int i, int per_section) {
  using ullage::cuda::ptx::max_nan;
  StripSums<Kind> mine, section;
  if (i < n) mine = sums_at<Kind>(table, n, i);
  section.max = mine.max, section.teacher_max = mine.teacher_max;
  for (int step = 1; step < per_section; step *= 2) {
    section.max = max_nan(section.max, __shfl_xor_sync(~0u, section.max, step));
    if constexpr (Kind::kHasTeacher) {
      section.teacher_max =
          max_nan(section.teacher_max, __shfl_xor_sync(~0u, section.teacher_max, step));
    }
  }
  bring_to(p, mine, section.max, section.teacher_max);
  section.sums = mine.sums;
  for (int step = 1; step < per_section; step *= 2) {
    section.sums.sum += __shfl_xor_sync(~0u, section.sums.sum, step);
    if constexpr (Kind::kHasTeacher) {
      section.sums.teacher_sum += __shfl_xor_sync(~0u, section.sums.teacher_sum, step);
    }
    if constexpr (Kind::kTempered) {
      section.sums.tempered_sum += __shfl_xor_sync(~0u, section.sums.tempered_sum, step);
    }
    if constexpr (Kind::kHasLogSum) {
      section.sums.log_sum += __shfl_xor_sync(~0u, section.sums.log_sum, step);
    }
  }
  return section;
}

// All sections of the table of `n` strips into that of sections, by a warp.
template <class Kind>
__device__ inline void fold_strips(const HeadParams& p, const float* strips, int n, float* sections,
                                   int lane) {
  const int per_section = p.cut.strips_per_section;
  for (int i = lane; i - lane < n; i += 32) {
    const StripSums<Kind> section = section_sums<Kind>(p, strips, n, i, per_section);
    if (i < n && i % per_section == 0) put_sums(sections, kMaxSections, i / per_section, section);
  }
  __syncwarp();
}

// A row's sums from those of all its columns, which are relative to the row's maxima.
template <class Kind>
__device__ inline RowSums row_sums(const HeadParams& p, float max, float teacher_max,
                                   const RelativeSums<Kind>& all) {
  constexpr Family kFamily = Kind::kFamily;
  RowSums row;
  row.stored_max = max;
  row.max = Kind::kSoftcap ? softcapped(p, max) : max;
  row.reference = row.max * p.log2_scale;
  if constexpr (Kind::kHasTeacher) {
    row.teacher_max = teacher_max;
    row.teacher_reference = teacher_max * p.teacher_log2_scale;
  }
  row.sum = all.sum;
  row.log2_sum = row.tempered_log2_sum = log2f(row.sum);
  if constexpr (Kind::kTempered) {
    row.tempered_reference = row.max * p.tempered_log2_scale;
    row.tempered_sum = all.tempered_sum;
    row.tempered_log2_sum = log2f(row.tempered_sum);
  }
  if constexpr (Kind::kHasTeacher) {
    row.teacher_sum = all.teacher_sum;
    row.teacher_log2_sum = log2f(row.teacher_sum);
  }
  if constexpr (Kind::kHasTeacher && Kind::kHasLogSum) {
    if (kFamily == Family::kReverse) {
      row.reverse_kl = all.log_sum;
    } else if (p.wants_cross) {
      row.cross = all.log_sum;
    } else {
      row.forward_kl = all.log_sum;
    }
  }
  if constexpr (kFamily == Family::kEntropy) row.entropy = all.log_sum;
  return row;
}

// From the sections, by a warp; in every lane.
template <class Kind>
__device__ inline RowSums row_sums(const HeadParams& p, const float* table, int n_sections,
                                   int lane) {
  StripSums<Kind> mine;
  if (lane < n_sections) mine = sums_at<Kind>(table, kMaxSections, lane);
  const float max = warp_max(mine.max);
  const float teacher_max = Kind::kHasTeacher ? warp_max(mine.teacher_max) : 0.0f;
  bring_to(p, mine, max, teacher_max);
  return row_sums<Kind>(p, max, teacher_max,
                        warp_sum(lane < n_sections ? mine.sums : RelativeSums<Kind>{}));
}

// The second exchange carries plain sums, and the smallest column of the maximum; where nothing is
// asked for, which is known not to be unless kAsked, only the family's own.
template <class Kind, bool kAsked, class Strip>
__device__ inline void put_strip_extras(const HeadParams& p, float* table, int n, int i,
                                        const Strip& student, const Strip& teacher, int columns,
                                        int64_t first_column, const RowSums& row, int lane) {
  constexpr Family kFamily = Kind::kFamily;
  const auto put = [&](int which, float value) {
    if (lane == 0) table[which * n + i] = value;
  };
  if constexpr (kFamily == Family::kMixed) {
    const MixedSums s = strip_mixed_sums<Kind>(p, student, teacher, columns, row, lane);
    put(kMixedCross, s.cross);
    put(kMixedForward, s.forward);
    put(kMixedReverse, s.reverse);
    put(kTeacherFromMix, s.teacher_from_mix);
    put(kStudentFromMix, s.student_from_mix);
  }
  if constexpr (kFamily == Family::kJensenShannon) {
    float sums[2];
    lane_mix_sums<Kind>(p, student, teacher, columns, row, lane, sums);
    const float sum = spread_sums(sums, lane);
    const int which = lane / kLanesOfSum<2>;
    if (lane % kLanesOfSum<2> == 0) table[which * n + i] = sum;
  }
  if (!kAsked || !wants_extra<kFamily>(p)) return;
  const ExtraSums s = strip_extra_sums<Kind>(p, student, columns, first_column, row, lane);
  put(kEntropy<kFamily>, s.entropy);
  put(kSmooth<kFamily>, s.smooth);
  put(kArgmax<kFamily>, __int_as_float(s.argmax));
}

// As section_sums, of the first kKinds extras; a step's shuffles are under way together.
template <class Kind, int kKinds>
__device__ inline void section_extras(const float* table, int n, int i, int per_section,
                                      float (&values)[kKinds]) {
  constexpr int kSmallest = kArgmax<Kind::kFamily>;
#pragma unroll
  for (int k = 0; k < kKinds; ++k) {
    values[k] = i < n ? table[k * n + i] : k == kSmallest ? __int_as_float(0x7fffffff) : 0.0f;
  }
  for (int step = 1; step < per_section; step *= 2) {
    float others[kKinds];
#pragma unroll
    for (int k = 0; k < kKinds; ++k) others[k] = __shfl_xor_sync(~0u, values[k], step);
#pragma unroll
    for (int k = 0; k < kKinds; ++k) {
      values[k] = k == kSmallest
                      ? __int_as_float(min(__float_as_int(values[k]), __float_as_int(others[k])))
                      : values[k] + others[k];
    }
  }
}

// Calls act<n>() for the n extras that there are, if any.
template <class Kind, class Act>
__device__ inline void with_extras(const HeadParams& p, const Act& act) {
  constexpr Family kFamily = Kind::kFamily;
  if constexpr (kExtras<kFamily> > 0) {
    if (wants_extra<kFamily>(p)) return act.template operator()<kExtras<kFamily>>();
  }
  if constexpr (kOwnExtras<kFamily> > 0) act.template operator()<kOwnExtras<kFamily>>();
}

// As fold_strips, of extras.
template <class Kind>
__device__ inline void fold_extras(const HeadParams& p, const float* strips, int n, float* sections,
                                   int lane) {
  const int per_section = p.cut.strips_per_section;
  with_extras<Kind>(p, [&]<int kKinds>() {
    for (int i = lane; i - lane < n; i += 32) {
      float values[kKinds];
      section_extras<Kind>(strips, n, i, per_section, values);
      if (i >= n || i % per_section != 0) continue;
#pragma unroll
      for (int k = 0; k < kKinds; ++k) sections[k * kMaxSections + i / per_section] = values[k];
    }
  });
  __syncwarp();
}

// Of all the row's columns.
template <Family kFamily>
__device__ inline void take_own_extras(const float (&own)[kOwnExtras<kFamily>], RowSums& row) {
  const float scale = kFamily == Family::kJensenShannon ? __frcp_rn(row.sum) : 1.0f;
  row.teacher_from_mix = own[kTeacherFromMix] * scale;
  row.student_from_mix = own[kStudentFromMix] * scale;
  if constexpr (kFamily == Family::kMixed) {
    row.cross = own[kMixedCross];
    row.forward_kl = own[kMixedForward];
    row.reverse_kl = own[kMixedReverse];
  }
}

template <class Kind>
__device__ inline void add_extras(const HeadParams& p, const float* table, int n_sections, int lane,
                                  RowSums& row) {
  constexpr Family kFamily = Kind::kFamily;
  const auto mine = [&](int which) {
    return lane < n_sections ? table[which * kMaxSections + lane] : 0.0f;
  };
  if constexpr (kOwnExtras<kFamily> > 0) {
    float own[kOwnExtras<kFamily>];
#pragma unroll
    for (int k = 0; k < kOwnExtras<kFamily>; ++k) own[k] = mine(k);
    warp_sums(own);
    take_own_extras<kFamily>(own, row);
  }
  if (!wants_extra<kFamily>(p)) return;
  row.entropy = warp_sum(mine(kEntropy<kFamily>));
  row.smooth = warp_sum(mine(kSmooth<kFamily>));
  row.argmax = __reduce_min_sync(
      ~0u, lane < n_sections ? __float_as_int(mine(kArgmax<kFamily>)) : 0x7fffffff);
}

}  // namespace ullage::lossk::cuda
