// What the scalar half of the algebra needs of a row: maximum and sum of the softmax, entropy, the
// smoothing sum, divergences. Included once per Highway target; the contracts are in head_rows.h.
#if defined(ULLAGE_CPU_HEAD_STATISTICS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ULLAGE_CPU_HEAD_STATISTICS_INL_H_
#undef ULLAGE_CPU_HEAD_STATISTICS_INL_H_
#else
#define ULLAGE_CPU_HEAD_STATISTICS_INL_H_
#endif

#include <cmath>
#include <limits>

#include "cpu/head_rows.h"
#include "cpu/row_sweep-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

// e_j = exp(scale * (u_j - anchor)) for one block, and their sum. In-place is fine. Meanwhile the
// next block comes from memory: the sweep for its maximum would wait for it.
template <bool kKeep, class T, class In>
HWY_INLINE double block_exponentials(const In* u, T anchor, T scale, int64_t n, T* e) {
  const RowTag<T> d;
  const auto v_anchor = hn::Set(d, anchor), v_scale = hn::Set(d, scale);
  return static_cast<double>(sum_row<1>(d, n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
    const auto x = load_some(d, u + j, count, anchor);
    hwy::Prefetch(u + j + kRowBlock);
    const auto y = exp_to_one(d, hn::Mul(v_scale, hn::Sub(x, v_anchor)));
    if constexpr (kKeep) store_some(d, y, e + j, count);
    return std::array{y};
  })[0]);
}

// Online over blocks: (M, S) and (m, s) merge to M' = max(M, m), S' = S e^(M - M') + s e^(m - M').
template <bool kKeep, class T, class In>
RowSum row_exponentials(const In* u, T scale, int64_t n, T* e, T* block_max) {
  RowSum row{-std::numeric_limits<double>::infinity(), 0};
  for (int64_t j = 0; j < n; j += kRowBlock) {
    const int64_t count = std::min(kRowBlock, n - j);
    const auto largest = static_cast<T>(max_row(u + j, count));
    // A block that is all -inf sums to 0 from any finite anchor, and to NaN from its maximum.
    const T anchor = largest == -std::numeric_limits<T>::infinity() ? T(0) : largest;
    if constexpr (kKeep) block_max[j / kRowBlock] = largest;
    const double sum = block_exponentials<kKeep>(u + j, anchor, scale, count, kKeep ? e + j : e);
    const auto m = static_cast<double>(largest), s = static_cast<double>(scale);
    if (m > row.max) {
      row.sum = (row.sum == 0 ? 0 : row.sum * std::exp(s * (row.max - m))) + sum;
      row.max = m;
    } else if (m == row.max) {
      row.sum += sum;
    } else {
      row.sum += sum == 0 ? 0 : sum * std::exp(s * (m - row.max));
    }
  }
  return row;
}

// sum over a row of term(j, count) -> lanes, of which the first `count` are meant: in T within a
// block, in float64 over blocks.
template <class T, class Term>
HWY_INLINE double row_sum(int64_t n, Term&& term) {
  const RowTag<T> d;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kRowBlock) {
    const auto sum = sum_row<1>(d, std::min(kRowBlock, n - begin),
                                [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA { return std::array{term(begin + j, count)}; });
    total += static_cast<double>(sum[0]);
  }
  return total;
}

template <class T>
double weighted_distance(const T* u, const T* w, T max, int64_t n) {
  const RowTag<T> d;
  const auto v_max = hn::Set(d, max);
  return row_sum<T>(n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
    const auto distance = hn::Sub(load_some(d, u + j, count, max), v_max);
    if (w == nullptr) return distance;
    const auto weight = load_some(d, w + j, count, T(0));
    return hn::IfThenZeroElse(hn::Eq(weight, hn::Zero(d)), hn::Mul(weight, distance));
  });
}

// ln q_j and q_j of lanes of a row; lanes past `count` have ln q = -inf and q = 0.
template <class T>
struct LogProbabilities {
  using V = hn::Vec<RowTag<T>>;
  V log, probability;

  HWY_INLINE LogProbabilities(const T* u, const RowSoftmax<T>& softmax, int64_t j, int64_t count) {
    const RowTag<T> d;
    const V x = load_some(d, u + j, count, -std::numeric_limits<T>::infinity());
    const V a = hn::Mul(hn::Set(d, softmax.scale), hn::Sub(x, hn::Set(d, softmax.max)));
    log = hn::Sub(a, hn::Set(d, softmax.log_sum));
    probability = hn::Mul(exp_to_one(d, a), hn::Set(d, softmax.inverse_sum));
  }
};

template <class T>
double entropy(const T* u, const RowSoftmax<T>& student, int64_t n) {
  const RowTag<T> d;
  return -row_sum<T>(n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
    const LogProbabilities<T> q(u, student, j, count);
    return hn::IfThenZeroElse(hn::Eq(q.probability, hn::Zero(d)), hn::Mul(q.probability, q.log));
  });
}

// x * y, and 0 where x is 0 whatever y is: a column without mass contributes nothing.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V mass_times(D d, V x, V y) {
  return hn::IfThenZeroElse(hn::Eq(x, hn::Zero(d)), hn::Mul(x, y));
}

// m = beta p + (1 - beta) q; written so that p = q gives exactly q.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V mixture(D d, V p, V q, V beta) {
  return fma(d, beta, hn::Sub(p, q), q);
}

template <class T>
RowDivergence divergence(lossk::Divergence kind, const T* u, const RowSoftmax<T>& student,
                         const T* t, const RowSoftmax<T>& teacher, T beta, int64_t n) {
  const RowTag<T> d;
  using Row = LogProbabilities<T>;
  switch (kind) {
    case lossk::Divergence::kCrossEntropy:
      return {-row_sum<T>(n,
                          [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
                            const Row p(t, teacher, j, count), q(u, student, j, count);
                            return mass_times(d, p.probability, q.log);
                          }),
              0};
    case lossk::Divergence::kForwardKl:
      return {row_sum<T>(n,
                         [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
                           const Row p(t, teacher, j, count), q(u, student, j, count);
                           return mass_times(d, p.probability, hn::Sub(p.log, q.log));
                         }),
              0};
    case lossk::Divergence::kReverseKl:
      return {row_sum<T>(n,
                         [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
                           const Row p(t, teacher, j, count), q(u, student, j, count);
                           return mass_times(d, q.probability, hn::Sub(q.log, p.log));
                         }),
              0};
    case lossk::Divergence::kJensenShannon:
      break;
  }
  const auto v_beta = hn::Set(d, beta);
  // KL(x | m) for x = p and x = q.
  const auto part = [&](bool of_teacher) ULLAGE_INLINE_LAMBDA {
    return row_sum<T>(n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
      const Row p(t, teacher, j, count), q(u, student, j, count);
      const auto m = mixture(d, p.probability, q.probability, v_beta);
      const auto x = of_teacher ? p.probability : q.probability;
      return mass_times(d, x, log(d, hn::Div(x, m)));
    });
  };
  const double teacher_part = part(true), student_part = part(false);
  const auto b = static_cast<double>(beta);
  return {b * teacher_part + (1 - b) * student_part, student_part};
}

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
