// The gradient of adjacent columns, from the coefficients of row_terms.cuh.
#pragma once

#include "cuda/head_logits/row_divergences.cuh"
#include "cuda/head_logits/row_terms.cuh"

namespace ullage::lossk::cuda {

// Where the gradient of row `row` of n_tok goes, from `column` on.
template <class T>
__device__ inline T* gradient_at(const HeadParams& p, int64_t row, int64_t column) {
  return static_cast<T*>(p.gradient) + (row - p.first_row) * p.gradient_stride + column;
}

// The coefficients as the inner loop wants them, once a row.
struct GradientScales {
  float student = 0, teacher = 0;  // P / sum 2^u, C / sum 2^v
  float tempered = 0;              // C / sum 2^w, w: u of the student beside the teacher
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
  if constexpr (kIsForward<kFamily>) s.teacher = c.teacher * __frcp_rn(row.teacher_sum);
  if constexpr (kFamily == Family::kTempered) s.tempered = c.teacher * __frcp_rn(row.tempered_sum);
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

// g of n columns of kTempered, as gradient_of_column.
template <int n>
__device__ inline void tempered_gradient(const HeadParams& p, const RowSums& row,
                                         const GradientScales& scales, const float (&x)[n],
                                         const float (&t)[n], float (&g)[n]) {
  using ullage::cuda::ptx::exp2_approx;
  float tempered[n], labels[n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    tempered[i] = exp2_approx(fmaf(x[i], p.tempered_log2_scale, -row.tempered_reference));
    const float v = fmaf(t[i], p.teacher_log2_scale, -row.teacher_reference);
    g[i] = scales.tempered * tempered[i] - scales.teacher * exp2_approx(v);
  }
  labels_exponentials(p, x, tempered, row.reference, labels);
#pragma unroll
  for (int i = 0; i < n; ++i) g[i] = fmaf(scales.student, labels[i], g[i]);
}

// g of the `i`-th of eight columns, but for smoothing and the label. Products of the student and of
// the teacher are rounded one by one before they are subtracted, so that equal rows cancel exactly.
template <Family kFamily>
__device__ inline float gradient_of_column(const HeadParams& p, const RowSums& row,
                                           const RowCoefficients& c, const GradientScales& scales,
                                           const LogRatio& log_ratio, float x, float t, int i) {
  using ullage::cuda::ptx::exp2_approx;
  if constexpr (kFamily == Family::kTempered) {
    float g[1];
    tempered_gradient<1>(p, row, scales, {x}, {t}, g);
    return g[0];
  } else if constexpr (!kHasTeacher<kFamily>) {
    return scales.student * exp2_approx(fmaf(x, p.log2_scale, -row.reference));
  } else {
    const float u = fmaf(x, p.log2_scale, -row.reference);
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
// Of eight, the first kPhase past a multiple of four.
template <Family kFamily, int kPhase = 0>
__device__ inline void gradient_of_columns(const HeadParams& p, const RowSums& row,
                                           const RowCoefficients& c, const GradientScales& scales,
                                           const float (&x)[8], const float (&t)[8],
                                           float (&g)[8]) {
  if constexpr (kFamily == Family::kTempered) {
    tempered_gradient(p, row, scales, x, t, g);
  } else {
    const LogRatio log_ratio(row);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float teacher = kHasTeacher<kFamily> ? t[i] : 0.0f;
      g[i] = gradient_of_column<kFamily>(p, row, c, scales, log_ratio, x[i], teacher, i + kPhase);
    }
  }
}

// What the gradient needs of a row.
struct alignas(16) RowWord {
  RowSums sums;
  RowCoefficients c;
  GradientScales scales;
  int label;  // a column, or -1
};

// One column's, the label's or another, by a lane; the strips and `to` begin at `first_column`.
// kAdds: to what is there.
template <class Kind, bool kAdds = false, class Strip>
__device__ inline void write_column(const HeadParams& p, const Strip& student, const Strip& teacher,
                                    int column, typename Kind::Element* to, const RowWord& row,
                                    int first_column) {
  const float x = to_float(student.at(column));
  const float t = Kind::kHasTeacher ? to_float(teacher.at(column)) : 0.0f;
  float g = gradient_of_column<Kind::kFamily>(p, row.sums, row.c, row.scales, LogRatio(row.sums), x,
                                              t, column);
  if (first_column + column == row.label) g -= row.c.label;
  if constexpr (kAdds) g += to_float(to[column]);
  to[column] = from_float<typename Kind::Element>(g);
}

// Writes the gradient of `columns` adjacent columns, the row's `first_column` on, to `to`, rounding
// once. `held`: the values it is added to, or nullptr. kPlain: no smoothing, nothing held.
// kAligned: `to` is, and is stored to in whole 16-byte words.
template <class Kind, bool kPlain, bool kAligned, class Strip>
__device__ inline void span_gradient(const HeadParams& p, const Strip& student,
                                     const Strip& teacher, int columns, typename Kind::Element* to,
                                     const typename Kind::Element* held, int first_column,
                                     const RowWord& row, int lane) {
  using T = typename Kind::Element;
  // The label's column is written once more, so that the loop need not look for it: where the strip
  // is still what it was.
  constexpr bool kPatched = kPlain && Strip::kApart && !Kind::kSoftcap;
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
    if (!kPatched && static_cast<unsigned>(label - column) < kLaneColumns) {
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
  for_each_vector<Kind, kPlain ? kRoundsOf<Kind, Strip, Kind::kRoundsOfGradient> : 1>(
      student, teacher, columns, lane, write);
  if constexpr (kPatched) {
    __syncwarp();  // a pair's other lane may have written it
    if (label < 0 || label >= columns || label / kLaneColumns % 32 != lane) return;
    write_column<Kind>(p, student, teacher, label, to, row, first_column);
  }
}

// Which columns of a row a warp has.
struct Span {
  int first_column, columns;
  int left;  // from the first to the row's end
};

// The same where logits, teacher and gradient have the same shift, 0 unless kShifted: by whole
// words, each by the warp in whose span it begins. A word that the row shares with another is
// written column by column. kAdds: to what is there, of which two rounds are under way.
template <class Kind, bool kShifted, bool kAdds = false, class Strip>
__device__ inline void span_gradient_in_words(const HeadParams& p, const Strip& student,
                                              const Strip& teacher, const Span& span,
                                              typename Kind::Element* to, const RowWord& row,
                                              int lane) {
  using T = typename Kind::Element;
  static_assert(!Kind::kSoftcap, "-inf behind the row stays -inf");
  const int ahead = kShifted ? columns_to_word(to) : 0;
  const int end = kShifted ? min(span.columns + ahead, span.left) : span.columns;
  const int whole = kShifted ? max(end - ahead, 0) / kPerWord<T> * kPerWord<T> : end;
  const auto add = [&]<int kPhase>() {
    const auto mine = student.words_from(ahead), others = teacher.words_from(ahead);
    const int label = row.label - span.first_column - ahead;
    in_groups<2>((whole + kWarpColumns - 1) / kWarpColumns, [&]<int k>(int first) {
      const auto column_of = [&](int r) {
        return (first + r) * kWarpColumns + lane * kLaneColumns;
      };
      Vector<T> held[k];
#pragma unroll
      for (int r = 0; r < k; ++r) held[r] = words_of(to + ahead, column_of(r), whole);
#pragma unroll
      for (int r = 0; r < k; ++r) {
        const int column = column_of(r);
        float x[8], t[8], g[8], before[8];
        unpack(mine.load(column), x);
        if constexpr (Kind::kHasTeacher) unpack(others.load(column), t);
        gradient_of_columns<Kind::kFamily, kPhase>(p, row.sums, row.c, row.scales, x, t, g);
        unpack(held[r], before);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (column + i == label) g[i] -= row.c.label;
          g[i] += before[i];
        }
        store_whole(to + ahead + column, g, whole - column, lane);
      }
    });
  };
  const auto write = [&]<int kPhase>() {
    if constexpr (kAdds) return add.template operator()<kPhase>();
    for_each_vector<Kind, Kind::kRoundsOfGradient>(
        student.words_from(ahead), teacher.words_from(ahead), whole, lane,
        [&]<bool kTail>(int column, const Vector<T>& mine, const Vector<T>& others) {
          float x[8], t[8], g[8];
          unpack(mine, x);
          if constexpr (Kind::kHasTeacher) unpack(others, t);
          gradient_of_columns<Kind::kFamily, kPhase>(p, row.sums, row.c, row.scales, x, t, g);
          store_whole(to + ahead + column, g, whole - column, lane);
        });
  };
  if constexpr (kShifted && Kind::kFamily == Family::kJensenShannon) {
    with_constant(ahead % 4, write);
  } else {
    write.template operator()<0>();
  }
  __syncwarp();  // another lane may have written the label's column
  int column = -1;
  if (kShifted && lane < kPerWord<T>) {
    if (span.first_column == 0 && lane < min(ahead, span.left)) column = lane;
  } else if (kShifted && lane < 2 * kPerWord<T>) {
    const int behind = ahead + whole + lane - kPerWord<T>;
    if (behind < end) column = behind;
  } else if (!kAdds && lane == 2 * kPerWord<T>) {
    const int label = row.label - span.first_column;
    if (label >= (span.first_column == 0 ? 0 : ahead) && label < end) column = label;
  }
  if (column < 0) return;
  write_column<Kind, kAdds>(p, student, teacher, column, to, row, span.first_column);
}

// Nothing is added to the row's gradient.
__device__ inline bool is_plain(const HeadParams& p, const RowWord& word) {
  return word.c.uniform == 0 && !p.accumulate;
}

// One row's gradient over a warp's span, which starts at `first_column` and is written to `to`.
template <class Kind, class Strip>
__device__ inline void write_gradient(const HeadParams& p, const Strip& student,
                                      const Strip& teacher, int columns, typename Kind::Element* to,
                                      int first_column, const RowWord& word, int lane) {
  const bool plain = is_plain(p, word);
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
  }
  span_gradient<Kind, false, false>(p, student, teacher, columns, to, held, first_column, word,
                                    lane);
}

// The gradient of a row that no term counts.
template <class T>
__device__ inline void clear_gradient(const HeadParams& p, T* to, int columns, int lane) {
  if (p.gradient == nullptr || p.accumulate) return;
  const int ahead = min(columns_to_word(to), columns);
  const int whole = (columns - ahead) / kPerWord<T> * kPerWord<T>;
  for (int c = lane * kPerWord<T>; c < whole; c += 32 * kPerWord<T>) {
    ullage::cuda::ptx::store_words(to + ahead + c, uint4{});
  }
  const int behind = ahead + whole + lane;
  if (lane < ahead) to[lane] = from_float<T>(0);
  if (behind < columns) to[behind] = from_float<T>(0);
}

}  // namespace ullage::lossk::cuda
