// The gradient of one strip, from the coefficients of row_terms.cuh.
#pragma once

#include "cuda/head_logits/row_terms.cuh"

namespace ullage::lossk::cuda {

// The coefficients as the inner loop wants them, once a row.
struct GradientScales {
  float student = 0, teacher = 0;  // P / sum 2^u, C / sum 2^v
  // kReverse: q_j (P + R (ln q_j - ln p_j - KL)) = 2^u (constant + slope * (u - v)); the row's
  // logarithms cancel.
  float slope = 0, constant = 0;
};

template <Family kFamily>
__device__ inline GradientScales gradient_scales(const RowSums& row, const RowCoefficients& c) {
  GradientScales s;
  const float inverse_sum = 1.0f / row.sum;
  s.student = c.p * inverse_sum;
  if constexpr (kFamily == Family::kForward) s.teacher = c.teacher * (1.0f / row.teacher_sum);
  if constexpr (kFamily == Family::kReverse) {
    const float reverse = c.reverse * kLn2;
    s.slope = reverse * inverse_sum;
    s.constant = fmaf(-reverse, row.reverse_kl * inverse_sum, c.p) * inverse_sum;
  }
  return s;
}

// g for eight columns, but for smoothing and the label. Products of the student and of the teacher
// are rounded one by one before they are subtracted, so that equal rows cancel exactly.
template <Family kFamily>
__device__ inline void gradient_of_columns(const HeadParams& p, const RowSums& row,
                                           const RowCoefficients& c, const GradientScales& scales,
                                           const float (&x)[8], const float (&t)[8],
                                           float (&g)[8]) {
  using ullage::cuda::ptx::exp2_approx;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float u = fmaf(x[i], p.log2_scale, -row.reference);
    if constexpr (kFamily == Family::kLabels) {
      g[i] = scales.student * exp2_approx(u);
    } else {
      const float v = fmaf(t[i], p.teacher_log2_scale, -row.teacher_reference);
      if constexpr (kFamily == Family::kForward) {
        g[i] = scales.student * exp2_approx(u) - scales.teacher * exp2_approx(v);
      } else if constexpr (kFamily == Family::kReverse) {
        const float e = exp2_approx(u);
        g[i] = e > 0 ? e * fmaf(scales.slope, u - v, scales.constant) : 0.0f;
      } else {
        const float log_q = u - row.log2_sum, log_p = v - row.teacher_log2_sum;
        const float q = exp2_approx(log_q);
        const float ratio = fminf(log_p - log_q, 126.0f);
        const float mix = log2_mix_over_student(ratio, p.mix_beta);
        float weight = c.p;
        if (c.reverse != 0) {
          weight = fmaf(c.reverse * kLn2, (log_q - log_p) - row.reverse_kl, weight);
        }
        weight = fmaf(c.mix * kLn2, -mix - row.student_from_mix, weight);
        g[i] = q > 0 ? q * weight : 0.0f;
        if (c.teacher != 0) g[i] -= c.teacher * exp2_approx(log_p);
      }
    }
  }
}

// Writes the gradient of adjacent columns to `to`, rounding once. `held`: the values it is added
// to, or nullptr. kPlain: no smoothing, nothing held.
template <class Kind, bool kPlain, class Strip>
__device__ inline void span_gradient(const HeadParams& p, const Strip& student,
                                     const Strip& teacher, typename Kind::Element* to,
                                     bool to_aligned, const typename Kind::Element* held,
                                     int64_t first_column, int64_t label, const RowSums& row,
                                     const RowCoefficients& c, const GradientScales& scales,
                                     int lane) {
  // The label's column, counted from this lane's first.
  const int label_at = static_cast<int>(label - first_column) - lane * kLaneColumns;
  for_each_vector<kPlain ? Kind::kUnroll : 1>(student, lane, [&](int column) {
    float x[8], t[8], g[8];
    load_logits<Kind>(p, student, column, x);
    if constexpr (Kind::kHasTeacher) unpack(teacher.load(column), t);
    gradient_of_columns<Kind::kFamily>(p, row, c, scales, x, t, g);
    if constexpr (!kPlain) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column + i >= student.n) continue;
        g[i] -= c.uniform * float_at(p.class_weights, first_column + column + i, 1);
      }
    }
    const int hit = label_at - (column - lane * kLaneColumns);
    if (static_cast<unsigned>(hit) < kLaneColumns) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i == hit) g[i] -= c.label;
      }
    }
    if constexpr (Kind::kSoftcap) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float tanh_value = x[i] * p.inverse_softcap;
        g[i] *= fmaf(-tanh_value, tanh_value, 1.0f);
      }
    }
    if constexpr (!kPlain) {
      if (held != nullptr) {
        float before[8];
        unpack(load_vector(held + column, student.n - column, is_aligned(held)), before);
#pragma unroll
        for (int i = 0; i < 8; ++i) g[i] += before[i];
      }
    }
    store_vector(to + column, g, student.capacity(column), to_aligned);
  });
}

}  // namespace ullage::lossk::cuda
