// The gradient of adjacent columns, from the coefficients of row_terms.cuh.
#pragma once

#include "cuda/head_logits/row_divergences.cuh"
#include "cuda/head_logits/row_terms.cuh"

namespace ullage::lossk::cuda {

// The coefficients as the inner loop wants them, once a row.
struct GradientScales {
  float student = 0, teacher = 0;  // P / sum 2^u, C / sum 2^v
  // kReverse: q_j (P + R (ln q_j - ln p_j - KL)) = 2^u (constant + slope * (u - v)); the row's
  // logarithms cancel.
  // kJensenShannon: q_j (P + J (ln (q_j / m_j) - KL)) = 2^u (constant + slope * log2 (m / q)).
  float slope = 0, constant = 0;
};

template <Family kFamily>
__device__ inline GradientScales gradient_scales(const RowSums& row, const RowCoefficients& c) {
  GradientScales s;
  const float inverse_sum = __frcp_rn(row.sum);
  s.student = c.p * inverse_sum;
  if constexpr (kFamily == Family::kForward) s.teacher = c.teacher * __frcp_rn(row.teacher_sum);
  if constexpr (kFamily == Family::kReverse) {
    const float reverse = c.reverse * kLn2;
    s.slope = reverse * inverse_sum;
    s.constant = fmaf(-reverse, row.reverse_kl * inverse_sum, c.p) * inverse_sum;
  }
  if constexpr (kFamily == Family::kJensenShannon) {
    const float mix = c.mix * kLn2;
    s.slope = -mix * inverse_sum;
    s.constant = fmaf(-mix, row.student_from_mix, c.p) * inverse_sum;
  }
  return s;
}

// g of the `i`-th of eight columns, but for smoothing and the label. Products of the student and of
// the teacher are rounded one by one before they are subtracted, so that equal rows cancel exactly.
template <Family kFamily>
__device__ inline float gradient_of_column(const HeadParams& p, const RowSums& row,
                                           const RowCoefficients& c, const GradientScales& scales,
                                           const LogRatio& log_ratio, float x, float t, int i) {
  using ullage::cuda::ptx::exp2_approx;
  const float u = fmaf(x, p.log2_scale, -row.reference);
  if constexpr (kFamily == Family::kLabels) {
    return scales.student * exp2_approx(u);
  } else {
    const float v = fmaf(t, p.teacher_log2_scale, -row.teacher_reference);
    if constexpr (kFamily == Family::kForward) {
      return scales.student * exp2_approx(u) - scales.teacher * exp2_approx(v);
    } else if constexpr (kFamily == Family::kReverse) {
      const float e = exp2_approx(u);
      return e > 0 ? e * fmaf(scales.slope, u - v, scales.constant) : 0.0f;
    } else if constexpr (kFamily == Family::kJensenShannon) {
      const MixColumn at(i, u, v, log_ratio, p.mix_beta);
      return exp2_approx(u) * fmaf(scales.slope, at.log_mix, scales.constant);
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
      float g = q > 0 ? q * weight : 0.0f;
      if (c.teacher != 0) g -= c.teacher * exp2_approx(log_p);
      return g;
    }
  }
}
// Of eight, the first `shift` before a multiple of eight.
template <Family kFamily>
__device__ inline void gradient_of_columns(const HeadParams& p, const RowSums& row,
                                           const RowCoefficients& c, const GradientScales& scales,
                                           const float (&x)[8], const float (&t)[8], float (&g)[8],
                                           int shift = 0) {
  const LogRatio log_ratio(row);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float teacher = kFamily == Family::kLabels ? 0.0f : t[i];
    g[i] = gradient_of_column<kFamily>(p, row, c, scales, log_ratio, x[i], teacher, i - shift);
  }
}

// What the gradient needs of a row.
struct alignas(16) RowWord {
  RowSums sums;
  RowCoefficients c;
  GradientScales scales;
  int label;  // a column, or -1
};

// Writes the gradient of `columns` adjacent columns, the row's `first_column` on, to `to`, rounding
// once. `held`: the values it is added to, or nullptr. kPlain: no smoothing, nothing held.
// kAligned: `to` is, and is stored to in whole 16-byte words.
template <class Kind, bool kPlain, bool kAligned, class Strip>
__device__ inline void span_gradient(const HeadParams& p, const Strip& student,
                                     const Strip& teacher, int columns, typename Kind::Element* to,
                                     const typename Kind::Element* held, int first_column,
                                     const RowWord& row, int lane) {
  using T = typename Kind::Element;
  // The label's column is written once more, so that the loop need not look for it.
  constexpr bool kPatched = kPlain && Strip::kKept && !Kind::kSoftcap;
  const int label = row.label - first_column;
  const auto write = [&]<bool kTail>(int column, const Vector<T>& mine, const Vector<T>& others) {
    const int valid = kTail || Strip::kPadded ? columns - column : kLaneColumns;
    if (kTail && valid <= 0) return;
    float x[8], t[8], g[8];
    unpack_logits<Kind>(p, mine, valid, x);
    if constexpr (Kind::kHasTeacher) unpack(others, t);
    gradient_of_columns<Kind::kFamily>(p, row.sums, row.c, row.scales, x, t, g);
    if (!kPlain && row.c.uniform != 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i >= valid) continue;
        g[i] -= row.c.uniform * float_at(p.class_weights, first_column + column + i, 1);
      }
    }
    if constexpr (!kPatched) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column + i == label) g[i] -= row.c.label;
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
        unpack(load_vector(held + column, valid, kAligned), before);
#pragma unroll
        for (int i = 0; i < 8; ++i) g[i] += before[i];
      }
    }
    if constexpr (kAligned && !kTail) {
      store_whole(to + column, g, columns - column, lane);
    } else {
      store_vector(to + column, g, valid, kAligned);
    }
  };
  for_each_vector<Kind, kPlain ? Kind::kRounds : 1>(student, teacher, columns, lane, write);
  if constexpr (kPatched) {
    __syncwarp();  // a pair's other lane may have written it
    if (label < 0 || label >= columns || label / kLaneColumns % 32 != lane) return;
    const float x = to_float(student.at(label));
    const float t = Kind::kHasTeacher ? to_float(teacher.at(label)) : 0.0f;
    const float g = gradient_of_column<Kind::kFamily>(
        p, row.sums, row.c, row.scales, LogRatio(row.sums), x, t, label % kLaneColumns);
    to[label] = from_float<T>(g - row.c.label);
  }
}

// The same where logits, teacher and gradient all start `shift` columns into a 16-byte word of
// theirs: by whole words, and column by column where one is shared with a neighbour. A word may
// reach beyond the row's slot, into another; nothing of that is stored.
template <class Kind, class Strip>
__device__ inline void span_gradient_in_words(const HeadParams& p, const Strip& student,
                                              const Strip& teacher, int columns,
                                              typename Kind::Element* to, int first_column,
                                              const RowWord& row, int lane) {
  const int label = row.label - first_column;
  for (int column = lane * kLaneColumns - student.shift; column < columns; column += kWarpColumns) {
    float x[8], t[8], g[8];
    unpack(student.words_at(column + student.shift), x);
    if constexpr (Kind::kHasTeacher) unpack(teacher.words_at(column + student.shift), t);
    gradient_of_columns<Kind::kFamily>(p, row.sums, row.c, row.scales, x, t, g, student.shift);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (column + i == label) g[i] -= row.c.label;
    }
    if (column >= 0 && column + kLaneColumns <= columns) {
      store_vector(to + column, g, kLaneColumns, true);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column + i >= 0 && column + i < columns) {
          to[column + i] = from_float<typename Kind::Element>(g[i]);
        }
      }
    }
  }
}

// One row's gradient over a warp's span, which starts at `first_column` and is written to `to`.
template <class Kind, class Strip>
__device__ inline void write_gradient(const HeadParams& p, const Strip& student,
                                      const Strip& teacher, int columns, typename Kind::Element* to,
                                      int first_column, const RowWord& word, int lane) {
  const bool plain = word.c.uniform == 0 && !p.accumulate;
  const typename Kind::Element* held = p.accumulate ? to : nullptr;
  if constexpr (Strip::kAligned) {
    if (is_aligned(to)) {
      if (plain) {
        span_gradient<Kind, true, true>(p, student, teacher, columns, to, nullptr, first_column,
                                        word, lane);
      } else {
        span_gradient<Kind, false, true>(p, student, teacher, columns, to, held, first_column, word,
                                         lane);
      }
      return;
    }
  } else if constexpr (Strip::kKept && !Kind::kSoftcap) {
    const auto shift = static_cast<int>(reinterpret_cast<uintptr_t>(to) % 16 / sizeof(*to));
    if (plain && shift == student.shift && (!Kind::kHasTeacher || shift == teacher.shift)) {
      span_gradient_in_words<Kind>(p, student, teacher, columns, to, first_column, word, lane);
      return;
    }
  }
  span_gradient<Kind, false, false>(p, student, teacher, columns, to, held, first_column, word,
                                    lane);
}

// The gradient of a row that no term counts.
template <class T>
__device__ inline void clear_gradient(const HeadParams& p, T* to, int columns, int lane) {
  if (p.gradient == nullptr || p.accumulate) return;
  const float zeros[8] = {};
  for (int c = lane * kLaneColumns; c < columns; c += kWarpColumns) {
    store_vector(to + c, zeros, columns - c, is_aligned(to));
  }
}

}  // namespace ullage::lossk::cuda
