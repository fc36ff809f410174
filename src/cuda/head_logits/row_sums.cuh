// What a row's strips are reduced to, and how: each lane sums its own columns, then the warp's
// lanes are added in a butterfly, then strips and sections (row_fold.cuh). The order is fixed by
// the vocabulary (params.h, RowCut).
//
// Exponentials are taken in base 2 of differences from a reference that is known before the first
// of them: with c = scale * log2 e and R = c * x_0, rounded, u = x * c - R in one fused
// multiply-add; v likewise for the teacher. R stands for x_0 everywhere, so its own rounding
// cancels, and a common offset of up to 1e8 costs nothing. x_0 is the maximum of a strip, which a
// warp goes through once before: no sum is ever rescaled on the way, and nothing depends on how
// many columns are taken at a time. A strip's sums are then brought to the section's maximum, a
// section's to the row's.
#pragma once

#include "cuda/head_logits/element.cuh"

namespace ullage::lossk::cuda {

inline constexpr float kLn2 = 0.693147180559945309f, kLog2E = 1.442695040888963407f;

__device__ inline float float_at(const RowFloats& v, int64_t i, float otherwise) {
  return v.data == nullptr ? otherwise : v.data[i * v.stride];
}

template <Family kFamily>
inline constexpr bool kHasTeacher = has_teacher(kFamily);
template <Family kFamily>
inline constexpr bool kIsForward = is_forward(kFamily);

// What a strip, a section and a row bring to the first exchange: values and their order in it.
enum SumPartial : int {
  kMax = 0,          // max x
  kSum = 1,          // sum 2^u
  kTeacherMax = 2,   // with a teacher
  kTeacherSum = 3,   // sum 2^v
  kTemperedSum = 4,  // kTempered: sum 2^w, w: u of the student beside the teacher
};
template <Family kFamily>
inline constexpr int kSums = n_sums(kFamily);
// Then, where there is one: kForward: sum 2^v u or sum 2^v (u - v); kTempered: the same of w;
// kReverse: sum 2^u (u - v); kEntropy: sum 2^u u.
template <class Kind>
inline constexpr int kLogSum = kSums<Kind::kFamily> - 1;

// And to the second, after a further pass over the row: what a family needs of its own, over
// normalised p and q (kJensenShannon: times sum 2^u) and in base-2 logarithms,
enum OwnExtra : int {
  // kMixed and kJensenShannon
  kTeacherFromMix = 0,  // sum p log (p / m)
  kStudentFromMix = 1,  // sum q log (q / m)
  // kMixed
  kMixedCross = 2,    // sum p log q
  kMixedForward = 3,  // sum p log (p / q)
  kMixedReverse = 4,  // sum q log (q / p)
};
template <Family kFamily>
inline constexpr int kOwnExtras = n_extras(kFamily, false);
// then what few ask for.
template <Family kFamily>
inline constexpr int kEntropy = kOwnExtras<kFamily>;  // sum 2^u u
template <Family kFamily>
inline constexpr int kSmooth = kEntropy<kFamily> + 1;  // sum w_j u_j
// The smallest column whose logit is the maximum, as an int.
template <Family kFamily>
inline constexpr int kArgmax = kEntropy<kFamily> + 2;
template <Family kFamily>
inline constexpr int kExtras = n_extras(kFamily, true);

template <Family kFamily>
__device__ inline bool wants_extra(const HeadParams& p) {
  return kExtras<kFamily> > kOwnExtras<kFamily> &&
         (p.wants_entropy || p.wants_argmax || p.wants_smoothing);
}

// The row's totals; the same in every lane of every warp that evaluates its terms.
struct RowSums {
  float stored_max = 0;  // before the softcap
  float max = 0, reference = 0, sum = 1, log2_sum = 0;
  float teacher_max = 0, teacher_reference = 0, teacher_sum = 1, teacher_log2_sum = 0;
  // Of the student beside the teacher; but for kTempered, only the logarithm is kept, that of sum.
  float tempered_reference = 0, tempered_sum = 1, tempered_log2_sum = 0;
  float cross = 0, forward_kl = 0, reverse_kl = 0;  // base 2, as the partials have them
  float teacher_from_mix = 0, student_from_mix = 0;
  float entropy = 0, smooth = 0;
  int argmax = -1;
};

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
// Of several values at a time, so that a step's shuffles are under way together.
template <int n>
__device__ inline void warp_sums(float (&x)[n]) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    float other[n];
#pragma unroll
    for (int i = 0; i < n; ++i) other[i] = __shfl_xor_sync(~0u, x[i], step);
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] += other[i];
  }
}
// The same sums of two to four values in fewer shuffles: a step that halves the lanes of a value
// halves the values of a lane. The i-th is in lane i * kLanesOfSum<n>.
template <int n>
inline constexpr int kLanesOfSum = n == 2 ? 16 : 8;
template <int n>
__device__ inline float spread_sums(const float (&x)[n], int lane) {
  static_assert(n >= 2 && n <= 4);
  const auto exchanged = [](float keep, float give, int step) {
    return keep + __shfl_xor_sync(~0u, give, step);
  };
  const bool upper = lane & 16, second = lane & 8;
  float mine = x[0];
  if constexpr (n == 2) mine = exchanged(upper ? x[1] : x[0], upper ? x[0] : x[1], 16);
  if constexpr (n == 3) {
    const float first = exchanged(upper ? x[2] : x[0], upper ? x[0] : x[2], 16);
    const float other = exchanged(x[1], x[1], 16);
    mine = exchanged(upper || !second ? first : other, upper || second ? first : other, 8);
  } else if constexpr (n == 4) {
    const float first = exchanged(upper ? x[2] : x[0], upper ? x[0] : x[2], 16);
    const float other = exchanged(upper ? x[3] : x[1], upper ? x[1] : x[3], 16);
    mine = exchanged(second ? other : first, second ? first : other, 8);
  } else {
    mine = exchanged(mine, mine, 8);
  }
#pragma unroll
  for (int step = 4; step > 0; step /= 2) mine = exchanged(mine, mine, step);
  return mine;
}
// Floats as ints of the same order; a canonical NaN is the largest.
__device__ inline int ordered(float x) {
  const int bits = __float_as_int(x);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ inline float warp_max(float x) {
  const int most = __reduce_max_sync(~0u, ordered(x));
  return __int_as_float(most ^ (most >> 31 & 0x7fffffff));
}

__device__ inline float softcapped(const HeadParams& p, float z) {
  return p.softcap * tanhf(z * p.inverse_softcap);
}

// The columns from `valid` on stay -inf.
__device__ inline void soften(const HeadParams& p, float (&x)[8], int valid) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < valid) x[i] = softcapped(p, x[i]);
  }
}

// The reference of a maximum; that of nothing but -inf is 0, so that its columns stay -inf, and
// none is: a mask may be the lowest finite number.
__device__ inline float reference_of(float max, float log2_scale) {
  constexpr float kLowest = -0x1.fffffep127f;
  const float reference = ullage::cuda::ptx::max_nan(max * log2_scale, kLowest);
  return max == minus_infinity<float>() ? 0.0f : reference;
}

// The sums of some of a row's columns, relative to references that stand beside them.
template <class Kind>
struct RelativeSums {
  float sum = 0, teacher_sum = 0, log_sum = 0, tempered_sum = 0;

  // From references R, T to R - by, T - teacher_by; kTempered: W to W - tempered_by. What is left
  // of sums far below those is nothing, and not 0 times what may be infinite: beside a maximum of
  // -1e10, the rounding of R alone makes 2^u so; and where one row is -inf, the other's columns are
  // infinitely far from it.
  __device__ void shift(bool cross, float by, float teacher_by, float tempered_by) {
    const float weight = ullage::cuda::ptx::exp2_approx(by);
    const auto part = [](float of, float value) { return of == 0 ? 0.0f : of * value; };
    if constexpr (Kind::kHasTeacher) {
      const float teacher_weight = ullage::cuda::ptx::exp2_approx(teacher_by);
      if constexpr (kIsForward<Kind::kFamily>) {
        const float student_by = Kind::kTempered ? tempered_by : by;
        log_sum = part(teacher_weight,
                       fmaf(cross ? student_by : student_by - teacher_by, teacher_sum, log_sum));
      }
      if constexpr (Kind::kTempered) {
        tempered_sum = part(ullage::cuda::ptx::exp2_approx(tempered_by), tempered_sum);
      }
      if constexpr (Kind::kFamily == Family::kReverse) {
        log_sum = part(weight, fmaf(by - teacher_by, sum, log_sum));
      }
      teacher_sum = part(teacher_weight, teacher_sum);
    }
    if constexpr (Kind::kFamily == Family::kEntropy) {
      log_sum = part(weight, fmaf(by, sum, log_sum));
    }
    sum = part(weight, sum);
  }
};

// Those of all lanes.
template <class Kind>
__device__ inline RelativeSums<Kind> warp_sum(const RelativeSums<Kind>& mine) {
  if constexpr (Kind::kFamily == Family::kLabels) {
    return {warp_sum(mine.sum)};
  } else if constexpr (Kind::kFamily == Family::kEntropy) {
    float all[] = {mine.sum, mine.log_sum};
    warp_sums(all);
    return {all[0], 0, all[1]};
  } else if constexpr (Kind::kTempered) {
    float all[] = {mine.sum, mine.teacher_sum, mine.log_sum, mine.tempered_sum};
    warp_sums(all);
    return {all[0], all[1], all[2], all[3]};
  } else if constexpr (Kind::kHasLogSum) {
    float all[] = {mine.sum, mine.teacher_sum, mine.log_sum};
    warp_sums(all);
    return {all[0], all[1], all[2]};
  } else {
    float all[] = {mine.sum, mine.teacher_sum};
    warp_sums(all);
    return {all[0], all[1]};
  }
}

// What one strip, or one section, brings to the first exchange: sums relative to its own maxima.
template <class Kind>
struct StripSums {
  float max = minus_infinity<float>(), teacher_max = minus_infinity<float>();
  RelativeSums<Kind> sums;
};

// The reference of a student's stored maximum, at a scale.
template <class Kind>
__device__ inline float student_reference(const HeadParams& p, float log2_scale, float max) {
  return reference_of(Kind::kSoftcap ? softcapped(p, max) : max, log2_scale);
}
__device__ inline float teacher_reference(const HeadParams& p, float max) {
  return reference_of(max, p.teacher_log2_scale);
}
// How far the sums beside `max` are from those beside `to`. Nothing but -inf has no reference,
// unless a softcap makes it finite.
template <class Kind>
__device__ inline float student_shift(const HeadParams& p, float log2_scale, float max, float to) {
  return max == minus_infinity<float>() && !Kind::kSoftcap
             ? 0.0f
             : student_reference<Kind>(p, log2_scale, max) -
                   student_reference<Kind>(p, log2_scale, to);
}
__device__ inline float teacher_shift(const HeadParams& p, float max, float to) {
  return max == minus_infinity<float>() ? 0.0f
                                        : teacher_reference(p, max) - teacher_reference(p, to);
}

// Calls step<k>(first) for rounds first .. first + k - 1, ascending up to round n: k is kMost while
// so many are left, then 2, then 1. `n`: the same in every lane.
template <int kMost, class Step>
__device__ inline void in_groups(int n, const Step& step, int first = 0) {
#pragma unroll 1
  for (; n - first >= kMost; first += kMost) step.template operator()<kMost>(first);
  if constexpr (kMost > 1) in_groups<(kMost > 2 ? 2 : 1)>(n, step, first);
}

// How many rounds of a strip are taken at a time, where its kind says `kOfNear` of what is near.
template <class Kind, class Strip, int kOfNear>
inline constexpr int kRoundsOf = kOfNear == 1 || Strip::kNear ? kOfNear : Kind::kRoundsFromMemory;

// Calls step<kTail>(column, student's eight, teacher's eight) for each of this lane's vectors of a
// strip, ascending; kTail: in the strip's last round, which is short, so that columns at and past
// `columns` may be among them, as -inf. At most kMost vectors of each are loaded ahead.
//
// A Strip has `load(column)` and, for the last round, `load_tail(column, columns)`; where
// kLoadsAhead, loads are cheap enough to have several under way; where it is kNear, they come from
// shared memory or L1; where kApart, the gradient is not written over it. Where it is kPadded, -inf
// follows the row's last column up to a whole round. Then that round is as good as any: code of its
// own, for one warp of all, would make the others wait (a softcap makes -inf finite).
template <class Kind, int kMost, class Strip, class Step>
__device__ inline void for_each_vector(const Strip& student, const Strip& teacher, int columns,
                                       int lane, const Step& step) {
  using Eight = Vector<typename Kind::Element>;
  constexpr bool kPadded = Strip::kPadded && !Kind::kSoftcap;
  const int whole = (kPadded ? columns + kWarpColumns - 1 : columns) / kWarpColumns;
  const auto column_of = [&](int round) { return round * kWarpColumns + lane * kLaneColumns; };
  in_groups<Strip::kLoadsAhead ? kMost : 1>(whole, [&]<int k>(int first) {
    Eight mine[k], others[k];
#pragma unroll
    for (int r = 0; r < k; ++r) {
      mine[r] = student.load(column_of(first + r));
      if constexpr (Kind::kHasTeacher) others[r] = teacher.load(column_of(first + r));
    }
#pragma unroll
    for (int r = 0; r < k; ++r) {
      step.template operator()<false>(column_of(first + r), mine[r], others[r]);
    }
  });
  if (kPadded || columns % kWarpColumns == 0) return;
  const Eight mine = student.load_tail(column_of(whole), columns);
  Eight others;
  if constexpr (Kind::kHasTeacher) others = teacher.load_tail(column_of(whole), columns);
  step.template operator()<true>(column_of(whole), mine, others);
}

// Logits as the softmax takes them; `valid` of them.
template <class Kind>
__device__ inline void unpack_logits(const HeadParams& p, const Vector<typename Kind::Element>& v,
                                     int valid, float (&x)[8]) {
  unpack(v, x);
  if constexpr (Kind::kSoftcap) soften(p, x, valid);
}

// Pairs first: three roundings for eight columns.
__device__ inline float tree_sum(const float (&e)[8]) {
  return ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]));
}

// The labels' 2^u of columns x, beside those of the student beside the teacher. References are
// squared exactly as well: a power of two times another.
template <int n>
__device__ inline void labels_exponentials(const HeadParams& p, const float (&x)[n],
                                           const float (&tempered)[n], float reference,
                                           float (&e)[n]) {
  if (p.squarings == 0) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      e[i] = ullage::cuda::ptx::exp2_approx(fmaf(x[i], p.log2_scale, -reference));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < n; ++i) e[i] = tempered[i] * tempered[i];
#pragma unroll 1
  for (int s = 1; s < p.squarings; ++s) {
#pragma unroll
    for (int i = 0; i < n; ++i) e[i] *= e[i];
  }
}

// The largest of a strip, student's and teacher's; in every lane.
struct StripMaxima {
  float student, teacher;
};
// What the exponents of its columns are taken from.
struct References {
  float student, teacher, tempered;
};
template <class Kind>
__device__ inline References references_of(const HeadParams& p, const StripMaxima& most) {
  References from{student_reference<Kind>(p, p.log2_scale, most.student), 0, 0};
  if constexpr (Kind::kHasTeacher) from.teacher = teacher_reference(p, most.teacher);
  if constexpr (Kind::kTempered) {
    from.tempered = student_reference<Kind>(p, p.tempered_log2_scale, most.student);
  }
  return from;
}

// Adds eight columns to a lane's sums; `valid`: of them.
template <class Kind>
__device__ inline void add_columns(const HeadParams& p,
                                   const Vector<typename Kind::Element>& student,
                                   const Vector<typename Kind::Element>& teacher, int valid,
                                   const References& from, RelativeSums<Kind>& sums) {
  using ullage::cuda::ptx::exp2_approx;
  float x[8], e[8];
  unpack_logits<Kind>(p, student, valid, x);
  if constexpr (Kind::kTempered) {
    float w[8], labels[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w[i] = fmaf(x[i], p.tempered_log2_scale, -from.tempered);
      e[i] = exp2_approx(w[i]);
    }
    sums.tempered_sum += tree_sum(e);
    labels_exponentials(p, x, e, from.student, labels);
    sums.sum += tree_sum(labels);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = w[i];
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = fmaf(x[i], p.log2_scale, -from.student);
      e[i] = exp2_approx(x[i]);
    }
    sums.sum += tree_sum(e);
  }
  // Columns without probability are left out: 0 * log 0 is 0.
  if constexpr (Kind::kFamily == Family::kEntropy) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (e[i] > 0) sums.log_sum = fmaf(e[i], x[i], sums.log_sum);
    }
  }
  if constexpr (Kind::kHasTeacher) {
    float t[8], et[8];
    unpack(teacher, t);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      t[i] = fmaf(t[i], p.teacher_log2_scale, -from.teacher);
      et[i] = exp2_approx(t[i]);
    }
    sums.teacher_sum += tree_sum(et);
    if constexpr (kIsForward<Kind::kFamily>) {
      // 1, or 0 for a cross-entropy.
      const float with_teacher = p.wants_cross ? 0.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (et[i] > 0) sums.log_sum = fmaf(et[i], fmaf(-with_teacher, t[i], x[i]), sums.log_sum);
      }
    } else if constexpr (Kind::kFamily == Family::kReverse) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (e[i] > 0) sums.log_sum = fmaf(e[i], x[i] - t[i], sums.log_sum);
      }
    }
  }
}

template <class Kind, class Strip>
__device__ inline StripMaxima strip_maxima(const Strip& student, const Strip& teacher, int columns,
                                           int lane) {
  using T = typename Kind::Element;
  RunningMax<T> running, teacher_running;
  if constexpr (Strip::kShifted) {
    // Word by word: all but the first eight, which the strip before has a part in, then those of
    // the first and of the last that are this strip's, a lane each.
    const int rounds = (columns + kWarpColumns - 1) / kWarpColumns;
    const auto add = [&](int i) {
      running.add(student.words_at(i));
      if constexpr (Kind::kHasTeacher) teacher_running.add(teacher.words_at(i));
    };
    add(max(lane, 1) * kLaneColumns);
    in_groups<Kind::kRoundsOfMax>(
        rounds,
        [&]<int k>(int first) {
#pragma unroll
          for (int r = 0; r < k; ++r) add((first + r) * kWarpColumns + lane * kLaneColumns);
        },
        1);
    const int i = lane % kLaneColumns, end = i < student.shift ? rounds * kWarpColumns : 0;
    running.add(student.data[end + i]);
    if constexpr (Kind::kHasTeacher) teacher_running.add(teacher.data[end + i]);
  } else {
    for_each_vector<Kind, kRoundsOf<Kind, Strip, Kind::kRoundsOfMax>>(
        student, teacher, columns, lane,
        [&]<bool kTail>(int, const Vector<T>& mine, const Vector<T>& others) {
          running.add(mine);
          if constexpr (Kind::kHasTeacher) teacher_running.add(others);
        });
  }
  StripMaxima most{warp_max(running.value()), minus_infinity<float>()};
  if constexpr (Kind::kHasTeacher) most.teacher = warp_max(teacher_running.value());
  return most;
}

// This lane's part of a strip.
template <class Kind, class Strip>
__device__ inline RelativeSums<Kind> lane_sums(const HeadParams& p, const Strip& student,
                                               const Strip& teacher, int columns, int lane,
                                               const StripMaxima& most) {
  using T = typename Kind::Element;
  const References from = references_of<Kind>(p, most);
  RelativeSums<Kind> sums;
  for_each_vector<Kind, kRoundsOf<Kind, Strip, Kind::kRoundsOfSums>>(
      student, teacher, columns, lane,
      [&]<bool kTail>(int column, const Vector<T>& mine, const Vector<T>& others) {
        add_columns<Kind>(p, mine, others, kTail ? columns - column : kLaneColumns, from, sums);
      });
  return sums;
}

// Arg max, label smoothing and, beside those or a teacher, the entropy: asked for by few, so they
// take a pass of their own.
struct ExtraSums {
  float entropy = 0, smooth = 0;
  int argmax = 0x7fffffff;
};

template <class Kind, class Strip>
__device__ inline ExtraSums strip_extra_sums(const HeadParams& p, const Strip& student, int columns,
                                             int64_t first_column, const RowSums& row, int lane) {
  using T = typename Kind::Element;
  using StudentOnly = RowKind<T, Family::kLabels, Kind::kSoftcap>;
  ExtraSums s;
  const auto add = [&]<bool kTail>(int column, const Vector<T>& mine, const Vector<T>&) {
    float x[8];
    unpack_logits<Kind>(p, mine, kTail ? columns - column : kLaneColumns, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (x[i] == row.max) s.argmax = min(s.argmax, static_cast<int>(first_column) + column + i);
      x[i] = fmaf(x[i], p.log2_scale, -row.reference);
      const float e = ullage::cuda::ptx::exp2_approx(x[i]);
      if (e > 0) s.entropy = fmaf(e, x[i], s.entropy);
    }
    if (p.wants_smoothing) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (first_column + column + i >= p.vocab) continue;
        const float w = float_at(p.class_weights, first_column + column + i, 1);
        if (w != 0) s.smooth = fmaf(w, x[i], s.smooth);
      }
    }
  };
  for_each_vector<StudentOnly, 1>(student, student, columns, lane, add);
  s.entropy = warp_sum(s.entropy);
  s.smooth = warp_sum(s.smooth);
  s.argmax = __reduce_min_sync(~0u, s.argmax);
  return s;
}

}  // namespace ullage::lossk::cuda
