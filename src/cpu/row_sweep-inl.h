// Walking along a row in vectors: loads and stores of any storage type, and the functions of a
// row's elements that row_math-inl.h does not have. Included once per Highway target.
#if defined(ULLAGE_CPU_ROW_SWEEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ULLAGE_CPU_ROW_SWEEP_INL_H_
#undef ULLAGE_CPU_ROW_SWEEP_INL_H_
#else
#define ULLAGE_CPU_ROW_SWEEP_INL_H_
#endif

#include "cpu/row_math-inl.h"
#include "cpu/storage.h"

// For lambdas over lanes: with two callers (whole vectors, the row's end) GCC would call them, and
// pass vectors through memory.
#undef ULLAGE_INLINE_LAMBDA
#define ULLAGE_INLINE_LAMBDA HWY_ATTR __attribute__((always_inline))

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

// Vectors of the accumulate type T along a row.
template <class T>
using RowTag = hn::ScalableTag<T>;

// step(j, count) for vectors of a row at columns j, ascending; `count` < Lanes(d) only for the
// last.
template <class D, class Step>
HWY_INLINE void for_each_vector(D /*d*/, int64_t n, Step&& step) {
  constexpr int64_t kLanes = kLanesOf<D>;
  int64_t j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
    step(j, kLanes);
    step(j + kLanes, kLanes);
  }
  for (; j < n; j += kLanes) step(j, std::min(kLanes, n - j));
}

// Whether vectors of T load from and store to a storage type directly. The mixed cases, a float64
// beside a shorter type, are rare and go lane by lane.
template <class T, class Stored>
inline constexpr bool kDirect = std::is_same_v<Compute<Stored>, T>;

// One element in the accumulate type, and rounded from it once.
template <class T, class Stored>
HWY_INLINE T load_element(const Stored* from) {
  return static_cast<T>(widen(*from));
}
template <class T, class Stored>
HWY_INLINE void store_element(T value, Stored* to) {
  if constexpr (std::is_same_v<T, double> && sizeof(Stored) == 2) {
    narrow(round_to_odd(value), to);
  } else {
    narrow(static_cast<Compute<Stored>>(value), to);
  }
}

// `count` <= Lanes(d) elements, all but the row's last few as whole vectors.
template <class D, class Stored, class T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> load_some(D d, const Stored* from, int64_t count, T fill) {
  constexpr int64_t kLanes = kLanesOf<D>;
  if constexpr (kDirect<T, Stored>) {
    if (HWY_LIKELY(count == kLanes)) return load_lanes(d, from);
  }
  HWY_ALIGN T lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = i < count ? load_element<T>(from + i) : fill;
  return hn::Load(d, lanes);
}
template <bool kFinite = false, class D, class V, class Stored, class T = hn::TFromD<D>>
HWY_INLINE void store_some(D d, V value, Stored* to, int64_t count) {
  constexpr int64_t kLanes = kLanesOf<D>;
  if constexpr (kDirect<T, Stored>) {
    if (HWY_LIKELY(count == kLanes)) return store_lanes<kFinite>(d, value, to);
  }
  HWY_ALIGN T lanes[kLanes];
  hn::Store(value, d, lanes);
  for (int64_t i = 0; i < count; ++i) store_element(lanes[i], to + i);
}

// visit(pointer of the storage type).
template <class Void, class Visit>
HWY_INLINE auto visit_storage(Void* data, DType dtype, Visit&& visit) {
  const auto as = [&]<class Stored>(Stored) ULLAGE_INLINE_LAMBDA {
    using Pointer = std::conditional_t<std::is_const_v<Void>, const Stored*, Stored*>;
    return visit(static_cast<Pointer>(data));
  };
  switch (dtype) {
    case DType::kF64:
      return as(double{});
    case DType::kF32:
      return as(float{});
    case DType::kBF16:
      return as(BF16{});
    case DType::kF16:
      break;
  }
  return as(F16{});
}

// The same for the storage types that load and store directly: f64, or f32 and shorter.
template <class T, class Void, class Visit>
HWY_INLINE auto visit_direct(Void* data, DType dtype, Visit&& visit) {
  if constexpr (std::is_same_v<T, double>) {
    using Pointer = std::conditional_t<std::is_const_v<Void>, const double*, double*>;
    return visit(static_cast<Pointer>(data));
  } else {
    const auto as = [&]<class Stored>(Stored) ULLAGE_INLINE_LAMBDA {
      using Pointer = std::conditional_t<std::is_const_v<Void>, const Stored*, Stored*>;
      return visit(static_cast<Pointer>(data));
    };
    if (dtype == DType::kBF16) return as(BF16{});
    if (dtype == DType::kF16) return as(F16{});
    return as(float{});
  }
}

// tanh x = m / (m + 2) with m = e^(2|x|) - 1, within 3 ulp; NaN stays NaN. e^y - 1 is
// 2^n (e^r - 1) + (2^n - 1), which loses no digit where y is small (n = 0), nor elsewhere.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V tanh(D d, V x) {
  using T = hn::TFromD<D>;
  using C = MathConstants<T>;
  const hn::RebindToUnsigned<D> du;
  const V magic = hn::Set(d, C::kRoundingMagic), one = hn::Set(d, T(1));
  // From 20 on tanh rounds to 1 in both types. NaN fails the comparison and passes.
  V y = hn::Abs(x);
  y = hn::IfThenElse(hn::Gt(y, hn::Set(d, T(20))), hn::Set(d, T(20)), y);
  y = hn::Add(y, y);
  const V shifted = fma(d, y, hn::Set(d, C::kLog2E), magic);
  const V n = hn::Sub(shifted, magic);
  V r = fma(d, n, hn::Set(d, -C::kLn2High), y);
  r = fma(d, n, hn::Set(d, -C::kLn2Low), r);
  const V grown = fma(d, polynomial(d, r, C::kExp), hn::Mul(r, r), r);  // e^r - 1
  const auto bias = hn::Set(du, static_cast<hn::TFromD<decltype(du)>>(C::kExponentBias));
  const auto exponent = hn::Add(hn::Sub(hn::BitCast(du, shifted), hn::BitCast(du, magic)), bias);
  const V power = hn::BitCast(d, hn::ShiftLeft<C::kMantissaBits>(exponent));
  const V m = fma(d, power, grown, hn::Sub(power, one));
  return hn::CopySign(hn::Div(m, hn::Add(m, hn::Set(d, T(2)))), x);
}

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
