// Vector lanes of the compute type: loads that widen a storage type, stores that round to one, and
// a multiply-add that is fused on every target. Included once per Highway target.
#if defined(ULLAGE_CPU_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ULLAGE_CPU_LANES_INL_H_
#undef ULLAGE_CPU_LANES_INL_H_
#else
#define ULLAGE_CPU_LANES_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "ullage/dtype.h"

// Highway's own emulation of float16 truncates and has no infinities; DType's does not.
#undef ULLAGE_CPU_EMULATES_F16
#define ULLAGE_CPU_EMULATES_F16 (HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128)

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Vectors have a length known to the compiler on every target that is built.
template <class D>
inline constexpr int64_t kLanesOf = static_cast<int64_t>(hn::MaxLanes(D()));

// Into the second-level cache only. The rows of a weight are often a multiple of 4 KiB apart, so a
// column of them falls into one set of the first level, where lines asked for early push each other
// out.
template <class T>
HWY_INLINE void prefetch_to_l2(const T* from) {
  __builtin_prefetch(from, /*rw=*/0, /*locality=*/2);
}

// What a storage type is computed in.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

// a * b + c rounded once. Targets without the instruction call std::fma lane by lane: slow, and the
// same bits.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V fma(D d, V a, V b, V c) {
#if HWY_NATIVE_FMA
  (void)d;
  return hn::MulAdd(a, b, c);
#else
  constexpr int64_t kLanes = kLanesOf<D>;
  HWY_ALIGN hn::TFromD<D> lanes_a[kLanes], lanes_b[kLanes], lanes_c[kLanes];
  hn::Store(a, d, lanes_a);
  hn::Store(b, d, lanes_b);
  hn::Store(c, d, lanes_c);
  for (int64_t i = 0; i < kLanes; ++i) lanes_c[i] = std::fma(lanes_a[i], lanes_b[i], lanes_c[i]);
  return hn::Load(d, lanes_c);
#endif
}

// One element, widened exactly.
HWY_INLINE double widen(double value) { return value; }
HWY_INLINE float widen(float value) { return value; }
HWY_INLINE float widen(BF16 value) { return value.to_float(); }
HWY_INLINE float widen(F16 value) { return value.to_float(); }

// One element, rounded to nearest even.
HWY_INLINE void narrow(double value, double* to) { *to = value; }
HWY_INLINE void narrow(float value, float* to) { *to = value; }
HWY_INLINE void narrow(float value, BF16* to) { *to = BF16::from_float(value); }
HWY_INLINE void narrow(float value, F16* to) { *to = F16::from_float(value); }

// The Lanes(d) elements at `from`, widened exactly.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> load_lanes(D d, const T* from) {
  return hn::LoadU(d, from);
}
template <class D>
HWY_INLINE hn::Vec<D> load_lanes(D d, const BF16* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}
template <class D>
HWY_INLINE hn::Vec<D> load_lanes(D d, const F16* from) {
#if ULLAGE_CPU_EMULATES_F16
  HWY_ALIGN float lanes[kLanesOf<D>];
  for (int64_t i = 0; i < kLanesOf<D>; ++i) lanes[i] = from[i].to_float();
  return hn::Load(d, lanes);
#else
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(from)));
#endif
}

// The first `count` < Lanes(d) elements at `from`; the other lanes hold `fill`.
template <class D, class T>
HWY_INLINE hn::Vec<D> load_lanes(D d, const T* from, int64_t count, hn::TFromD<D> fill) {
  constexpr int64_t kLanes = kLanesOf<D>;
  HWY_ALIGN hn::TFromD<D> lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = i < count ? widen(from[i]) : fill;
  return hn::Load(d, lanes);
}

// Lanes(d) elements to `to`, rounded to nearest even; NaN stays NaN, but where none is promised:
// kFinite.
template <bool kFinite = false, class D, class V = hn::Vec<D>, class T = hn::TFromD<D>>
HWY_INLINE void store_lanes(D d, V value, T* to) {
  hn::StoreU(value, d, to);
}
template <bool kFinite = false, class D, class V = hn::Vec<D>>
HWY_INLINE void store_lanes(D /*d*/, V value, BF16* to) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto word = hn::BitCast(d32, value);
  const auto odd = hn::And(hn::ShiftRight<16>(word), hn::Set(d32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(word, hn::Add(odd, hn::Set(d32, 0x7fffu))));
  if constexpr (kFinite) {
    hn::StoreU(hn::TruncateTo(d16, rounded), d16, reinterpret_cast<uint16_t*>(to));
    return;
  }
  const auto quiet = hn::Or(hn::ShiftRight<16>(word), hn::Set(d32, 0x40u));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(value));
  hn::StoreU(hn::TruncateTo(d16, hn::IfThenElse(is_nan, quiet, rounded)), d16,
             reinterpret_cast<uint16_t*>(to));
}
template <bool kFinite = false, class D, class V = hn::Vec<D>>
HWY_INLINE void store_lanes(D d, V value, F16* to) {
#if ULLAGE_CPU_EMULATES_F16
  constexpr int64_t kLanes = kLanesOf<D>;
  HWY_ALIGN float lanes[kLanes];
  hn::Store(value, d, lanes);
  for (int64_t i = 0; i < kLanes; ++i) narrow(lanes[i], to + i);
#else
  const hn::Rebind<hwy::float16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, value), d16, reinterpret_cast<hwy::float16_t*>(to));
#endif
}

// The first `count` < Lanes(d) lanes.
template <class D, class V, class T>
HWY_INLINE void store_lanes(D d, V value, T* to, int64_t count) {
  HWY_ALIGN hn::TFromD<D> lanes[kLanesOf<D>];
  hn::Store(value, d, lanes);
  for (int64_t i = 0; i < count; ++i) narrow(lanes[i], to + i);
}

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
