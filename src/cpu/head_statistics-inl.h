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

// The block's sum but for the column that is 1; `e` as block_exponentials left it, where it did.
template <bool kKeep, class T, class In>
HWY_INLINE double sum_besides_one(const In* u, T anchor, T scale, int64_t n, const T* e) {
  const RowTag<T> d;
  const auto v_anchor = hn::Set(d, anchor), v_scale = hn::Set(d, scale), one = hn::Set(d, T(1));
  return static_cast<double>(sum_row<1>(d, n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
    hn::Vec<RowTag<T>> y;
    if constexpr (kKeep) {
      y = load_some(d, e + j, count, T(0));
    } else {
      y = exp_to_one(d, hn::Mul(v_scale, hn::Sub(load_some(d, u + j, count, anchor), v_anchor)));
    }
    return std::array{hn::IfThenZeroElse(hn::Eq(y, one), y)};
  })[0]);
}

// Where a block's sum is 1 and less than this, the others are added up again without the 1, beside
// which they lost their digits: ln sum and 1 - q of a confident row are theirs.
constexpr double kSmallRest = 1.0 / 32;

// Online over blocks: (M, S) and (m, s) merge to M' = max(M, m), S' = S e^(M - M') + s e^(m - M').
template <bool kKeep, class T, class In>
RowSum row_exponentials(const In* u, T scale, int64_t n, RowSum row, T* e, T* block_max) {
  for (int64_t j = 0; j < n; j += kRowBlock) {
    const int64_t count = std::min(kRowBlock, n - j);
    const auto largest = static_cast<T>(max_row(u + j, count));
    // A block that is all -inf sums to 0 from any finite anchor, and to NaN from its maximum.
    const T anchor = largest == -std::numeric_limits<T>::infinity() ? T(0) : largest;
    if constexpr (kKeep) block_max[j / kRowBlock] = largest;
    double sum = block_exponentials<kKeep>(u + j, anchor, scale, count, kKeep ? e + j : e);
    if (sum >= 1 && sum < 1 + kSmallRest) {
      sum = 1 + sum_besides_one<kKeep>(u + j, anchor, scale, count, kKeep ? e + j : e);
    }
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

// sums[i] = sum over a row of terms(j, count)[i], of whose lanes the first `count` are meant: in T
// within a block, in float64 over blocks.
template <size_t kSums, class T, class Terms>
HWY_INLINE std::array<double, kSums> row_sums(int64_t n, Terms&& terms) {
  const RowTag<T> d;
  std::array<double, kSums> totals{};
  for (int64_t begin = 0; begin < n; begin += kRowBlock) {
    const auto shifted = [&](int64_t j, int64_t count)
                             ULLAGE_INLINE_LAMBDA { return terms(begin + j, count); };
    const auto sums = sum_row<kSums>(d, std::min(kRowBlock, n - begin), shifted);
    for (size_t i = 0; i < kSums; ++i) totals[i] += static_cast<double>(sums[i]);
  }
  return totals;
}

template <class T, class Term>
HWY_INLINE double row_sum(int64_t n, Term&& term) {
  return row_sums<1, T>(n, [&](int64_t j, int64_t count)
                               ULLAGE_INLINE_LAMBDA { return std::array{term(j, count)}; })[0];
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
  // sum of term(p, q)
  const auto sum_of = [&](auto&& term) ULLAGE_INLINE_LAMBDA {
    return row_sum<T>(n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
      return term(Row(t, teacher, j, count), Row(u, student, j, count));
    });
  };
  switch (kind) {
    case lossk::Divergence::kCrossEntropy:
      return {-sum_of([&](const Row& p, const Row& q)
                          ULLAGE_INLINE_LAMBDA { return mass_times(d, p.probability, q.log); }),
              0};
    case lossk::Divergence::kForwardKl:
      return {sum_of([&](const Row& p, const Row& q) ULLAGE_INLINE_LAMBDA {
                return mass_times(d, p.probability, hn::Sub(p.log, q.log));
              }),
              0};
    case lossk::Divergence::kReverseKl:
      return {sum_of([&](const Row& p, const Row& q) ULLAGE_INLINE_LAMBDA {
                return mass_times(d, q.probability, hn::Sub(q.log, p.log));
              }),
              0};
    case lossk::Divergence::kJensenShannon:
      break;
  }
  // KL(x | m) for x = p and x = q.
  const auto parts = row_sums<2, T>(n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
    const Row p(t, teacher, j, count), q(u, student, j, count);
    const auto m = mixture(d, p.probability, q.probability, hn::Set(d, beta));
    return std::array{mass_times(d, p.probability, log(d, hn::Div(p.probability, m))),
                      mass_times(d, q.probability, log(d, hn::Div(q.probability, m)))};
  });
  const auto b = static_cast<double>(beta);
  return {b * parts[0] + (1 - b) * parts[1], parts[1]};
}

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
