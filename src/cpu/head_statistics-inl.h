// What the scalar half of the algebra needs of a row: maximum and sum of the softmax, entropy, the
// smoothing sum. Included once per Highway target; the contracts are in head_rows.h.
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

template <class T>
void prepare(const void* z, DType dtype, const T* bias, T softcap, int64_t n, T* u) {
  const RowTag<T> d;
  const auto cap = hn::Set(d, softcap);
  visit_storage(z, dtype, [&](const auto* from) ULLAGE_INLINE_LAMBDA {
    for_each_vector(d, n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
      auto x = load_some(d, from + j, count, T(0));
      if (bias) x = hn::Add(x, load_some(d, bias + j, count, T(0)));
      if (softcap != 0) x = hn::Mul(cap, tanh(d, hn::Div(x, cap)));
      store_some(d, x, u + j, count);
    });
  });
}

// Exponentials of a softmax are powers of 2: e^(scale x) = 2^(binary(scale) x). To the roundings of
// u - anchor and of the product this adds that of log2 e, so e_j is right for a logit moved by 3
// half-ulps of its distance from the anchor.
template <class T>
constexpr T binary(T scale) {
  return static_cast<T>(static_cast<double>(scale) * MathConstants<double>::kLog2E);
}

// e_j = exp(scale * (u_j - anchor)) for one block, and their sum. In-place is fine. Meanwhile the
// next block comes from memory: the sweep for its maximum would wait for it.
template <bool kKeep, class T, class In>
HWY_INLINE double block_exponentials(const In* u, T anchor, T scale, int64_t n, T* e) {
  const RowTag<T> d;
  const auto v_anchor = hn::Set(d, anchor), v_scale = hn::Set(d, binary(scale));
  return static_cast<double>(sum_row<1>(d, n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
    const auto x = load_some(d, u + j, count, anchor);
    hwy::Prefetch(u + j + kRowBlock);
    const auto y = exp2_to_one(d, hn::Mul(v_scale, hn::Sub(x, v_anchor)));
    if constexpr (kKeep) store_some(d, y, e + j, count);
    return std::array{y};
  })[0]);
}

// The block's sum but for the column that is 1; `e` as block_exponentials left it, where it did.
template <bool kKeep, class T, class In>
HWY_INLINE double sum_besides_one(const In* u, T anchor, T scale, int64_t n, const T* e) {
  const RowTag<T> d;
  const auto v_anchor = hn::Set(d, anchor), v_scale = hn::Set(d, binary(scale));
  const auto one = hn::Set(d, T(1));
  return static_cast<double>(sum_row<1>(d, n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
    hn::Vec<RowTag<T>> y;
    if constexpr (kKeep) {
      y = load_some(d, e + j, count, T(0));
    } else {
      y = exp2_to_one(d, hn::Mul(v_scale, hn::Sub(load_some(d, u + j, count, anchor), v_anchor)));
    }
    return std::array{hn::IfThenZeroElse(hn::Eq(y, one), y)};
  })[0]);
}

// Where a block's sum is 1 and less than this, the others are added up again without the 1, beside
// which they lost their digits: ln sum and 1 - q of a confident row are theirs.
constexpr double kSmallRest = 1.0 / 32;

// Online over blocks: (M, S) and (m, s) merge to M' = max(M, m), S' = S e^(M - M') + s e^(m - M').
// Returns both factors: other sums with the same weights merge by them.
struct MergeFactors {
  double before, block;
};
HWY_INLINE MergeFactors merge(RowSum& row, double scale, double max, double sum) {
  MergeFactors f{1, 1};
  if (max > row.max) {
    f.before = row.sum == 0 ? 0 : std::exp(scale * (row.max - max));
    row.max = max;
  } else if (max != row.max) {
    f.block = sum == 0 ? 0 : std::exp(scale * (max - row.max));
  }
  row.sum = row.sum * f.before + sum * f.block;
  return f;
}

// A block that is all -inf sums to 0 from any finite anchor, and to NaN from its maximum.
template <class T>
HWY_INLINE T anchor_of(T max) {
  return max == -std::numeric_limits<T>::infinity() ? T(0) : max;
}

template <bool kKeep, class T, class In>
RowSum row_exponentials(const In* u, T scale, int64_t n, RowSum row, T* e, T* block_max) {
  for (int64_t j = 0; j < n; j += kRowBlock) {
    const int64_t count = std::min(kRowBlock, n - j);
    const auto largest = static_cast<T>(max_row(u + j, count));
    const T anchor = anchor_of(largest);
    if constexpr (kKeep) block_max[j / kRowBlock] = largest;
    double sum = block_exponentials<kKeep>(u + j, anchor, scale, count, kKeep ? e + j : e);
    if (sum >= 1 && sum < 1 + kSmallRest) {
      sum = 1 + sum_besides_one<kKeep>(u + j, anchor, scale, count, kKeep ? e + j : e);
    }
    merge(row, static_cast<double>(scale), static_cast<double>(largest), sum);
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
    const V distance = hn::Sub(x, hn::Set(d, softmax.max));
    log = hn::Sub(hn::Mul(hn::Set(d, softmax.scale), distance), hn::Set(d, softmax.log_sum));
    const V e = exp2_to_one(d, hn::Mul(hn::Set(d, binary(softmax.scale)), distance));
    probability = hn::Mul(e, hn::Set(d, softmax.inverse_sum));
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

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
