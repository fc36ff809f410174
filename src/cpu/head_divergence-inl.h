// Divergences between a teacher's row and the student's: one sweep over both rows takes the two
// exponentials of a column and keeps what the gradient needs of them. Included once per Highway
// target; the contracts are in head_rows.h.
//
// With a = log2(e) scale (u - anchor), b the teacher's, 2^a and 2^b are the block's exponentials:
// what is kept in x is 2^b, or a - b for reverse KL. A loss such as sum p (ln p - ln q) is
//   sum 2^b (ln2 (b - a) + c) / sum 2^b - (lse_t - lse_s),  c = t_scale t_anchor - scale u_anchor,
// whose sums run in T within a block, where a and b are small, and in float64 over the blocks.
#if defined(ULLAGE_CPU_HEAD_DIVERGENCE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ULLAGE_CPU_HEAD_DIVERGENCE_INL_H_
#undef ULLAGE_CPU_HEAD_DIVERGENCE_INL_H_
#else
#define ULLAGE_CPU_HEAD_DIVERGENCE_INL_H_
#endif

#include "cpu/head_gradient-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

// x * y, and 0 where x is 0 whatever y is: a column without mass contributes nothing.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V mass_times(D d, V x, V y) {
  return hn::IfThenZeroElse(hn::Eq(x, hn::Zero(d)), hn::Mul(x, y));
}

constexpr double kLn2 = 1 / MathConstants<double>::kLog2E;

// A block of one side: lanes of log2(e) * scale * (x - anchor).
template <class T>
struct BlockSide {
  const T* row;
  T max, scale;

  HWY_INLINE BlockSide(const T* from, T of_scale, int64_t n)
      : row(from), max(static_cast<T>(max_row(from, n))), scale(of_scale) {}
  HWY_INLINE hn::Vec<RowTag<T>> exponent(int64_t j, int64_t count) const {
    const RowTag<T> d;
    const T anchor = anchor_of(max);
    const auto x = load_some(d, row + j, count, anchor);
    return hn::Mul(hn::Set(d, binary(scale)), hn::Sub(x, hn::Set(d, anchor)));
  }
  double offset() const { return static_cast<double>(scale) * static_cast<double>(anchor_of(max)); }
};

// The sums of 2^a, of 2^b and of the mass times the distance; 2^a to e, and x as above.
template <bool kReverse, class T>
HWY_INLINE std::array<T, 3> block_pair(const BlockSide<T>& u, const BlockSide<T>& t,
                                       bool from_teacher, int64_t n, T* e, T* x) {
  const RowTag<T> d;
  const hn::RebindToUnsigned<RowTag<T>> du;
  const auto mask =
      hn::BitCast(d, hn::Set(du, static_cast<hn::TFromD<decltype(du)>>(from_teacher ? -1 : 0)));
  return sum_row<3>(d, n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
    const auto a = u.exponent(j, count), b = t.exponent(j, count);
    hwy::Prefetch(u.row + j + kRowBlock);
    hwy::Prefetch(t.row + j + kRowBlock);
    const auto student = exp2_to_one(d, a), teacher = exp2_to_one(d, b);
    store_some(d, student, e + j, count);
    if constexpr (kReverse) {
      const auto distance = hn::Sub(a, b);
      store_some(d, distance, x + j, count);
      return std::array{student, teacher, mass_times(d, student, distance)};
    } else {
      store_some(d, teacher, x + j, count);
      return std::array{student, teacher, mass_times(d, teacher, hn::Sub(hn::And(b, mask), a))};
    }
  });
}

// A block of a row in T: where it lies, or in `buffer`.
template <class T>
HWY_INLINE const T* block_of(const RowSource& row, int64_t begin, int64_t n, T* buffer) {
  constexpr DType kType = std::is_same_v<T, double> ? DType::kF64 : DType::kF32;
  const auto* const from = static_cast<const std::byte*>(row.data) + begin * size_of(row.dtype);
  if (row.dtype == kType) return reinterpret_cast<const T*>(from);
  prepare<T>(from, row.dtype, nullptr, T(0), n, buffer);
  return buffer;
}

template <bool kReverse, class T>
DivergenceSums pair_sums(bool from_teacher, const RowSource& u, T u_scale, const RowSource& t,
                         T t_scale, int64_t n, const KeptRow<T>& kept) {
  HWY_ALIGN T u_buffer[kRowBlock], t_buffer[kRowBlock];
  DivergenceSums row;
  double weighted = 0;
  const auto times = [](double sum, double factor) { return factor == 0 ? 0 : sum * factor; };
  for (int64_t begin = 0; begin < n; begin += kRowBlock) {
    const int64_t count = std::min(kRowBlock, n - begin);
    const int64_t at = kept.whole ? begin : 0;
    const BlockSide<T> student(block_of(u, begin, count, u_buffer), u_scale, count);
    const BlockSide<T> teacher(block_of(t, begin, count, t_buffer), t_scale, count);
    kept.e_max[at / kRowBlock] = student.max;
    kept.x_max[at / kRowBlock] = teacher.max;
    T* const e = kept.e + at;
    T* const x = kept.x + at;
    const auto sums = block_pair<kReverse>(student, teacher, from_teacher, count, e, x);
    double u_sum = static_cast<double>(sums[0]), t_sum = static_cast<double>(sums[1]);
    if (u_sum >= 1 && u_sum < 1 + kSmallRest) {
      u_sum = 1 + sum_besides_one<true>(e, T(0), T(0), count, e);
    }
    if (t_sum >= 1 && t_sum < 1 + kSmallRest) {
      t_sum = 1 + (kReverse ? sum_besides_one<false>(teacher.row, anchor_of(teacher.max), t_scale,
                                                     count, e)
                            : sum_besides_one<true>(x, T(0), T(0), count, x));
    }
    const MergeFactors of_u =
        merge(row.student, static_cast<double>(u_scale), static_cast<double>(student.max), u_sum);
    const MergeFactors of_t =
        merge(row.teacher, static_cast<double>(t_scale), static_cast<double>(teacher.max), t_sum);
    const MergeFactors& f = kReverse ? of_u : of_t;
    // The mass of the quotient's divisor, to the last bit: `between` may be large, and cancels.
    const double mass = kReverse ? u_sum : t_sum;
    const double between = kReverse ? student.offset() - teacher.offset()
                                    : (from_teacher ? teacher.offset() : 0) - student.offset();
    weighted = times(weighted, f.before);
    if (mass != 0) weighted += times(kLn2 * static_cast<double>(sums[2]) + mass * between, f.block);
  }
  const auto lse = [](const RowSum& sum, T scale) {
    return static_cast<double>(scale) * sum.max + std::log(sum.sum);
  };
  const double u_lse = lse(row.student, u_scale), t_lse = lse(row.teacher, t_scale);
  row.loss = kReverse ? weighted / row.student.sum - (u_lse - t_lse)
                      : weighted / row.teacher.sum - ((from_teacher ? t_lse : 0) - u_lse);
  return row;
}

template <class T>
DivergenceSums divergence(lossk::Divergence kind, const RowSource& u, T u_scale, const RowSource& t,
                          T t_scale, int64_t n, const KeptRow<T>& kept) {
  if (kind == lossk::Divergence::kReverseKl) {
    return pair_sums<true>(true, u, u_scale, t, t_scale, n, kept);
  }
  const bool from_teacher = kind != lossk::Divergence::kCrossEntropy;
  return pair_sums<false>(from_teacher, u, u_scale, t, t_scale, n, kept);
}

// e_j of a block times this is q_j. The exponent is <= 0.
template <class T>
HWY_INLINE T block_factor(const RowSoftmax<T>& softmax, T block_max) {
  return std::exp(softmax.scale * (block_max - softmax.max)) * softmax.inverse_sum;
}

// ln q - ln p of a column is ln2 (a - b) and this.
template <class T>
HWY_INLINE double block_distance(const RowSoftmax<T>& student, T e_max,
                                 const RowSoftmax<T>& teacher, T x_max) {
  const auto offset = [](const RowSoftmax<T>& s, T max) {
    return static_cast<double>(s.scale) *
               (static_cast<double>(anchor_of(max)) - static_cast<double>(s.max)) -
           static_cast<double>(s.log_sum);
  };
  return offset(student, e_max) - offset(teacher, x_max);
}

// KL(p | m) and KL(q | m) with m = q + beta (p - q), which is exactly q where p = q. With the
// larger and the smaller of p and q, ln(m / larger) is one logarithm, of a number in (0, 1], and
// ln(m / smaller) is that and |ln(q / p)|, which needs none.
template <class T>
RowDivergence jensen_shannon(const RowSource& u, const RowSoftmax<T>& student, const RowSource& t,
                             const RowSoftmax<T>& teacher, T beta, int64_t n,
                             const KeptRow<T>& kept) {
  const RowTag<T> d;
  HWY_ALIGN T u_buffer[kRowBlock], t_buffer[kRowBlock];
  const auto v_beta = hn::Set(d, beta), ln2 = hn::Set(d, static_cast<T>(kLn2));
  const auto u_scale = hn::Set(d, binary(student.scale));
  const auto t_scale = hn::Set(d, binary(teacher.scale));
  double p_part = 0, q_part = 0;
  for (int64_t begin = 0; begin < n; begin += kRowBlock) {
    const int64_t count = std::min(kRowBlock, n - begin), block = begin / kRowBlock;
    const T* const u_block = block_of(u, begin, count, u_buffer);
    const T* const t_block = block_of(t, begin, count, t_buffer);
    const T u_anchor = anchor_of(kept.e_max[block]), t_anchor = anchor_of(kept.x_max[block]);
    const auto q_factor = hn::Set(d, block_factor(student, kept.e_max[block]));
    const auto p_factor = hn::Set(d, block_factor(teacher, kept.x_max[block]));
    const auto apart = hn::Set(
        d, static_cast<T>(block_distance(student, kept.e_max[block], teacher, kept.x_max[block])));
    const auto sums = sum_row<2>(d, count, [&](int64_t j, int64_t lanes) ULLAGE_INLINE_LAMBDA {
      const auto a = hn::Mul(
          u_scale, hn::Sub(load_some(d, u_block + j, lanes, u_anchor), hn::Set(d, u_anchor)));
      const auto b = hn::Mul(
          t_scale, hn::Sub(load_some(d, t_block + j, lanes, t_anchor), hn::Set(d, t_anchor)));
      const auto q = hn::Mul(q_factor, load_some(d, kept.e + begin + j, lanes, T(0)));
      const auto p = hn::Mul(p_factor, load_some(d, kept.x + begin + j, lanes, T(0)));
      const auto m = fma(d, v_beta, hn::Sub(p, q), q);
      const auto q_is_larger = hn::Lt(p, q);
      const auto distance = fma(d, ln2, hn::Sub(a, b), apart);
      const auto rest = log<true>(d, hn::Div(m, hn::IfThenElse(q_is_larger, q, p)));
      const auto p_to_m = hn::Neg(hn::Add(rest, hn::IfThenElseZero(q_is_larger, distance)));
      const auto q_to_m = hn::Sub(hn::IfThenZeroElse(q_is_larger, distance), rest);
      store_some(d, q_to_m, kept.x + begin + j, lanes);
      return std::array{mass_times(d, p, p_to_m), mass_times(d, q, q_to_m)};
    });
    p_part += static_cast<double>(sums[0]);
    q_part += static_cast<double>(sums[1]);
  }
  const auto b = static_cast<double>(beta);
  return {b * p_part + (1 - b) * q_part, q_part};
}

template <class T>
void divergence_gradient(lossk::Divergence kind, const KeptRow<T>& kept,
                         const RowSoftmax<T>& student, const RowSoftmax<T>& teacher, T beta,
                         const RowDivergence& at, T p_gain, T gain, bool add, int64_t n, T* g) {
  const RowTag<T> d;
  const bool jensen = kind == lossk::Divergence::kJensenShannon;
  const bool by_student = jensen || kind == lossk::Divergence::kReverseKl;
  if (jensen) gain *= T(1) - beta;
  for (int64_t begin = 0; begin < n; begin += kRowBlock) {
    const int64_t count = std::min(kRowBlock, n - begin), block = begin / kRowBlock;
    const T* const e = kept.e + begin;
    // Without a gain x counts nothing, not even where it is infinite.
    const T* const x = gain == 0 ? e : kept.x + begin;
    const T factor = block_factor(student, kept.e_max[block]);
    if (by_student && gain != 0) {  // q (P + G (ln(q / p) - loss)), or q (P + G (ln(q / m) - KL))
      const double unit = jensen ? 1 : kLn2;
      const double apart =
          jensen ? -at.student_part
                 : block_distance(student, kept.e_max[block], teacher, kept.x_max[block]) - at.loss;
      const auto shift = hn::Set(d, static_cast<T>(apart / unit));
      const auto p = hn::Set(d, p_gain * factor);
      const auto v_gain = hn::Set(d, gain * static_cast<T>(unit) * factor);
      row_update(count, add, g + begin, [&](int64_t j, int64_t lanes) ULLAGE_INLINE_LAMBDA {
        const auto excess = hn::Mul(v_gain, hn::Add(load_some(d, x + j, lanes, T(0)), shift));
        return mass_times(d, load_some(d, e + j, lanes, T(0)), hn::Add(p, excess));
      });
    } else {  // (P + G) q - G p
      const auto q = hn::Set(d, (p_gain + gain) * factor);
      const auto p = hn::Set(d, gain == 0 ? T(0) : gain * block_factor(teacher, kept.x_max[block]));
      row_update(count, add, g + begin, [&](int64_t j, int64_t lanes) ULLAGE_INLINE_LAMBDA {
        return hn::Sub(hn::Mul(q, load_some(d, e + j, lanes, T(0))),
                       hn::Mul(p, load_some(d, x + j, lanes, T(0))));
      });
    }
  }
}

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
