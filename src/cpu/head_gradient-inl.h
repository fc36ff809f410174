// Gradients of a row in the accumulate type, and their one rounding. Included once per Highway
// target; the contracts are in head_rows.h.
#if defined(ULLAGE_CPU_HEAD_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ULLAGE_CPU_HEAD_GRADIENT_INL_H_
#undef ULLAGE_CPU_HEAD_GRADIENT_INL_H_
#else
#define ULLAGE_CPU_HEAD_GRADIENT_INL_H_
#endif

#include "cpu/head_statistics-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

// g_j (+)= term(j, count) over a row.
template <class T, class Term>
HWY_INLINE void row_update(int64_t n, bool add, T* g, Term&& term) {
  const RowTag<T> d;
  for_each_vector(d, n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
    auto value = term(j, count);
    if (add) value = hn::Add(load_some(d, g + j, count, T(0)), value);
    store_some(d, value, g + j, count);
  });
}

template <class T>
void label_gradient(const T* u, const RowSoftmax<T>& student, T p_gain, T u_gain, const T* w,
                    bool add, int64_t n, T* g) {
  const RowTag<T> d;
  const auto v_p = hn::Set(d, p_gain), v_u = hn::Set(d, u_gain);
  row_update(n, add, g, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
    auto value = hn::Mul(v_p, LogProbabilities<T>(u, student, j, count).probability);
    if (u_gain != 0) {
      value = hn::Sub(value, w ? hn::Mul(v_u, load_some(d, w + j, count, T(0))) : v_u);
    }
    return value;
  });
}

template <class T>
void softcap_slope(const T* u, T softcap, int64_t n, T* g) {
  const RowTag<T> d;
  const auto inverse = hn::Set(d, T(1) / softcap), one = hn::Set(d, T(1));
  for_each_vector(d, n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
    const auto y = hn::Mul(load_some(d, u + j, count, T(0)), inverse);
    const auto slope = hn::Sub(one, hn::Mul(y, y));
    store_some(d, hn::Mul(load_some(d, g + j, count, T(0)), slope), g + j, count);
  });
}

// out_j (+)= value(j, count), rounded once to Out. kFinite: of values that are finite.
template <class T, bool kFinite = false, class Out, class Value>
HWY_INLINE void store_row(int64_t n, Out* out, bool accumulate, Value&& value) {
  const RowTag<T> d;
  if (accumulate) {
    for_each_vector(d, n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
      const auto old = load_some(d, out + j, count, T(0));
      store_some(d, hn::Add(old, value(j, count)), out + j, count);
    });
  } else {
    for_each_vector(d, n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
      store_some<kFinite>(d, value(j, count), out + j, count);
    });
  }
}

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
