// The second pass over a row whose divergences need the normalised rows: kMixed, kJensenShannon.
#pragma once

#include "cuda/head_logits/row_sums.cuh"

namespace ullage::lossk::cuda {

// log2 (m / q) for the mixture m = beta p + (1 - beta) q, from log2 (p / q): 0 exactly where they
// are equal. Ratios beyond 2^126 stand for infinity; q is then nothing beside p.
__device__ inline float log2_mix_over_student(float log2_ratio, float beta) {
  const float ratio = ullage::cuda::ptx::exp2_approx(fminf(log2_ratio, 126.0f));
  return ullage::cuda::ptx::log2_approx(fmaf(beta, ratio - 1.0f, 1.0f));
}

// The divergences of one strip of normalised rows.
struct MixedSums {
  float cross = 0, forward = 0, reverse = 0, teacher_from_mix = 0, student_from_mix = 0;
};

template <class Kind, class Strip>
__device__ inline MixedSums strip_mixed_sums(const HeadParams& p, const Strip& student,
                                             const Strip& teacher, int columns, const RowSums& row,
                                             int lane) {
  using T = typename Kind::Element;
  MixedSums s;
  const auto add = [&]<bool kTail>(int column, const Vector<T>& mine, const Vector<T>& others) {
    float x[8], t[8];
    unpack_logits<Kind>(p, mine, kTail ? columns - column : kLaneColumns, x);
    unpack(others, t);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float log_q = fmaf(x[i], p.log2_scale, -row.reference) - row.log2_sum;
      const float log_p =
          fmaf(t[i], p.teacher_log2_scale, -row.teacher_reference) - row.teacher_log2_sum;
      const float q = ullage::cuda::ptx::exp2_approx(log_q);
      const float pr = ullage::cuda::ptx::exp2_approx(log_p);
      const float ratio = fminf(log_p - log_q, 126.0f);
      const float mix = log2_mix_over_student(ratio, p.mix_beta);
      if (pr > 0) {
        s.cross = fmaf(pr, log_q, s.cross);
        s.forward = fmaf(pr, log_p - log_q, s.forward);
        s.teacher_from_mix = fmaf(pr, ratio - mix, s.teacher_from_mix);
      }
      if (q > 0) {
        s.reverse = fmaf(q, log_q - log_p, s.reverse);
        s.student_from_mix = fmaf(q, -mix, s.student_from_mix);
      }
    }
  };
  for_each_vector<Kind, 1>(student, teacher, columns, lane, add);
  s.cross = warp_sum(s.cross);
  s.forward = warp_sum(s.forward);
  s.reverse = warp_sum(s.reverse);
  s.teacher_from_mix = warp_sum(s.teacher_from_mix);
  s.student_from_mix = warp_sum(s.student_from_mix);
  return s;
}

// What a column's u and v become log2 (p / q) with. A probability of 2^-120 stands for those below
// it, so that no logarithm is infinite: none of the sums shows the difference.
struct LogRatio {
  float least_u, least_v, shift;

  __device__ explicit LogRatio(const RowSums& row)
      : least_u(row.log2_sum - 120),
        least_v(row.teacher_log2_sum - 120),
        shift(row.log2_sum - row.teacher_log2_sum) {}
};
// 2^x by additions and multiplications, for |x| < 126; relative error below 2^-22, 2^0 is 1
// exactly. A polynomial of degree 5 over [-1/2, 1/2] for 2^f / 2^round(f), by minimax with its
// first coefficient held at 1.
__device__ inline float exp2_polynomial(float x) {
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: the sum's last bits are round(x)
  const float rounded = x + kToInteger, f = x - (rounded - kToInteger);
  float y = fmaf(1.32647133e-3f, f, 9.67151579e-3f);
  y = fmaf(y, f, 5.55073395e-2f);
  y = fmaf(y, f, 0.240222424f);
  y = fmaf(y, f, 0.693147004f);
  y = fmaf(y, f, 1.0f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(rounded) << 23));
}
// Whether a column's ratio is formed so, by its place among eight: three special functions a column
// keep their unit busier than the others are; one in twelve less evens that out.
__device__ constexpr bool ratio_by_polynomial(int column) { return (column & 3) == 2; }

// A column of a mixture: u and log2 (p / q), in at most 120 either way, 2^that and log2 (m / q).
// The last two are 1 and 0 exactly where p and q are equal.
struct MixColumn {
  float u, log_ratio, ratio, log_mix;

  __device__ MixColumn(int column, float u_, float v, const LogRatio& of, float beta) {
    using ullage::cuda::ptx::max_nan;
    u = max_nan(u_, of.least_u);
    log_ratio = (max_nan(v, of.least_v) - u) + of.shift;
    ratio = ratio_by_polynomial(column) ? exp2_polynomial(log_ratio)
                                        : ullage::cuda::ptx::exp2_approx(log_ratio);
    log_mix = ullage::cuda::ptx::log2_approx(fmaf(beta, ratio - 1.0f, 1.0f));
  }
};

// This lane's part of a strip's kTeacherFromMix and kStudentFromMix, times sum 2^u: three special
// functions a column.
template <class Kind, class Strip>
__device__ inline void lane_mix_sums(const HeadParams& p, const Strip& student,
                                     const Strip& teacher, int columns, const RowSums& row,
                                     int lane, float (&sums)[2]) {
  using T = typename Kind::Element;
  const LogRatio log_ratio(row);
  sums[0] = sums[1] = 0;
  const auto add = [&]<bool kTail>(int column, const Vector<T>& mine, const Vector<T>& others) {
    float x[8], t[8];
    unpack_logits<Kind>(p, mine, kTail ? columns - column : kLaneColumns, x);
    unpack(others, t);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const MixColumn at(i, fmaf(x[i], p.log2_scale, -row.reference),
                         fmaf(t[i], p.teacher_log2_scale, -row.teacher_reference), log_ratio,
                         p.mix_beta);
      const float e = ullage::cuda::ptx::exp2_approx(at.u);
      sums[kTeacherFromMix] = fmaf(e * at.ratio, at.log_ratio - at.log_mix, sums[kTeacherFromMix]);
      sums[kStudentFromMix] = fmaf(e, -at.log_mix, sums[kStudentFromMix]);
    }
  };
  for_each_vector<Kind, 2>(student, teacher, columns, lane, add);
}

}  // namespace ullage::lossk::cuda
