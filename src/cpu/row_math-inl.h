// What a softmax row is made of: exp, log, and reductions over a row. Included once per Highway
// target; every function gives the same bits on every target.
#if defined(ULLAGE_CPU_ROW_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ULLAGE_CPU_ROW_MATH_INL_H_
#undef ULLAGE_CPU_ROW_MATH_INL_H_
#else
#define ULLAGE_CPU_ROW_MATH_INL_H_
#endif

#include <array>
#include <limits>
#include <utility>

#include "cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

// Constants of exp and log. Polynomials interpolate at Chebyshev nodes; their errors are relative
// to the function's value.
template <class T>
struct MathConstants;

template <>
struct MathConstants<float> {
  static constexpr int kMantissaBits = 23;
  static constexpr int32_t kExponentBias = 127;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
  static constexpr float kRoundingMagic = 0x1.8p23f;
  static constexpr float kLog2E = 0x1.715476p+0f;
  static constexpr float kLn2High = 0x1.62e43p-1f, kLn2Low = -0x1.05c61p-29f;
  // e * kLn2Short is exact for every exponent e.
  static constexpr float kLn2Short = 0x1.62e4p-1f, kLn2Rest = 0x1.7f7d1cp-20f;
  // Beyond these, exp overflows, or rounds to 0.
  static constexpr float kExpMost = 0x1.64p6f, kExpLeast = -0x1.a4p6f;  // 89, -105
  // (e^r - 1 - r) / r^2 on |r| <= ln(2)/2, error 2^-32 of e^r.
  static constexpr std::array<float, 6> kExp{0.5f,          0x1.555556p-3f,  0x1.5554eap-5f,
                                             0x1.1110ep-7f, 0x1.6d4324p-10f, 0x1.a124f2p-13f};
  // (2^f - 1) / f on |f| <= 1/2, error 2^-27.6 of 2^f.
  static constexpr std::array<float, 6> kExp2{0x1.62e43p-1f,  0x1.ebfbep-3f,  0x1.c6af6cp-5f,
                                              0x1.3b2a54p-7f, 0x1.5f089p-10f, 0x1.44138ap-13f};
  // The last n of 2^n, and some, so that 2^(n + f) is normal.
  static constexpr float kExp2Least = -125.875f;
  // (ln((1 + s)/(1 - s)) - 2s) / s^3 in z = s^2 <= (3 - 2 sqrt 2)^2, error 2^-35.
  static constexpr std::array<float, 4> kLog{0x1.555556p-1f, 0x1.9999ecp-2f, 0x1.245c4p-2f,
                                             0x1.ddcf72p-3f};
};

template <>
struct MathConstants<double> {
  static constexpr int kMantissaBits = 52;
  static constexpr int64_t kExponentBias = 1023;
  static constexpr double kRoundingMagic = 0x1.8p52;
  static constexpr double kLog2E = 0x1.71547652b82fep+0;
  static constexpr double kLn2High = 0x1.62e42fefa39efp-1, kLn2Low = 0x1.abc9e3b39803fp-56;
  static constexpr double kLn2Short = 0x1.62e42fefa3p-1, kLn2Rest = 0x1.3de6af278ece6p-42;
  static constexpr double kExpMost = 710, kExpLeast = -746;
  // Error 2^-61.9.
  static constexpr std::array<double, 11> kExp{0.5,
                                               0x1.5555555555557p-3,
                                               0x1.5555555555556p-5,
                                               0x1.11111111100dcp-7,
                                               0x1.6c16c16c162d4p-10,
                                               0x1.a01a01abe7fe1p-13,
                                               0x1.a01a01a6d889cp-16,
                                               0x1.71de0231960ebp-19,
                                               0x1.27e4db646b17ep-22,
                                               0x1.af4de97ca4194p-26,
                                               0x1.1f730349868cep-29};
  // Error 2^-56.7.
  static constexpr std::array<double, 11> kExp2{
      0x1.62e42fefa39efp-1,  0x1.ebfbdff82c598p-3,  0x1.c6b08d704a0c2p-5,  0x1.3b2ab6fba1ddap-7,
      0x1.5d87fe78a5276p-10, 0x1.430913096fd9fp-13, 0x1.ffcbfc670dcd4p-17, 0x1.62bfd47773353p-20,
      0x1.b524fae627834p-24, 0x1.e6063f7217bc6p-28, 0x1.e9d3fe3952179p-32};
  static constexpr double kExp2Least = -1021.75;
  // Error 2^-57.6.
  static constexpr std::array<double, 7> kLog{
      0x1.5555555555558p-1, 0x1.99999999952d7p-2, 0x1.2492492df281ap-2, 0x1.c71c62e3f11e6p-3,
      0x1.7462b51cb66b1p-3, 0x1.39fe51a7c18f9p-3, 0x1.2b5900de53b32p-3};
};

// sum of coefficients[i] * x^i, from the highest.
template <class D, class V, size_t kCount>
HWY_INLINE V polynomial(D d, V x, const std::array<hn::TFromD<D>, kCount>& coefficients) {
  V sum = hn::Set(d, coefficients[kCount - 1]);
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) HWY_ATTR {
    ((sum = fma(d, sum, x, hn::Set(d, coefficients[kCount - 2 - kIndex]))), ...);
  }(std::make_index_sequence<kCount - 1>());
  return sum;
}

// e^x. Largest error: f32 0.988 ulp (every float), f64 0.97 (row_math_test's sweep).
// Overflows to infinity and underflows through the subnormals; NaN stays NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp(D d, V x) {
  using T = hn::TFromD<D>;
  using C = MathConstants<T>;
  const hn::RebindToUnsigned<D> du;
  using Word = hn::TFromD<decltype(du)>;
  // These comparisons are false for NaN, which therefore passes.
  x = hn::IfThenElse(hn::Gt(x, hn::Set(d, C::kExpMost)), hn::Set(d, C::kExpMost), x);
  x = hn::IfThenElse(hn::Lt(x, hn::Set(d, C::kExpLeast)), hn::Set(d, C::kExpLeast), x);
  // x = n ln 2 + r
  const V magic = hn::Set(d, C::kRoundingMagic);
  const V shifted = fma(d, x, hn::Set(d, C::kLog2E), magic);
  const V n = hn::Sub(shifted, magic);
  V r = fma(d, n, hn::Set(d, -C::kLn2High), x);
  r = fma(d, n, hn::Set(d, -C::kLn2Low), r);
  const V tail = fma(d, polynomial(d, r, C::kExp), hn::Mul(r, r), r);
  const V mantissa = hn::Add(hn::Set(d, T(1)), tail);
  // 2^n as 2^(n/2) * 2^(n - n/2), because n itself may be past the exponent range: the first
  // product is exact and the second rounds once. n + 4 * bias is positive, so halving is a logical
  // shift.
  const auto bias = hn::Set(du, static_cast<Word>(C::kExponentBias));
  const auto integer = hn::Sub(hn::BitCast(du, shifted), hn::BitCast(du, magic));
  const auto half = hn::Sub(
      hn::ShiftRight<1>(hn::Add(integer, hn::Set(du, static_cast<Word>(4 * C::kExponentBias)))),
      bias);  // n/2 + bias
  const auto rest = hn::Sub(hn::Add(integer, hn::Add(bias, bias)), half);
  const V first = hn::BitCast(d, hn::ShiftLeft<C::kMantissaBits>(half));
  const V second = hn::BitCast(d, hn::ShiftLeft<C::kMantissaBits>(rest));
  return hn::Mul(hn::Mul(mantissa, first), second);
}

// 2^t for t <= 0 (or above 0 by a rounding), which is the exponential of a softmax with ln 2 in its
// scale: 6 instructions of the multiply-add unit where `exp` has 12. Largest error: f32 0.876 ulp
// (every float), f64 0.87 (row_math_test's sweep); 1 at t = 0; 0 where the result would be
// subnormal; NaN stays NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp2_to_one(D d, V t) {
  using C = MathConstants<hn::TFromD<D>>;
  const hn::RebindToUnsigned<D> du;
  const V magic = hn::Set(d, C::kRoundingMagic);
  const V shifted = hn::Add(t, magic);
  const V f = hn::Sub(t, hn::Sub(shifted, magic));  // exact
  const V mantissa = fma(d, polynomial(d, f, C::kExp2), f, hn::Set(d, hn::TFromD<D>(1)));
  // The low bits of `shifted` are n; what lies above them leaves by the shift.
  const auto exponent = hn::ShiftLeft<C::kMantissaBits>(hn::BitCast(du, shifted));
  const V y = hn::BitCast(d, hn::Add(hn::BitCast(du, mantissa), exponent));
  // NaN fails the comparison and passes.
  return hn::IfThenZeroElse(hn::Lt(t, hn::Set(d, C::kExp2Least)), y);
}

// ln x. Largest error: f32 0.835 ulp (every float), f64 0.81 (row_math_test's sweep).
// ln 0 = -infinity; negative numbers give NaN; subnormals count in full. kNormal: x is positive and
// normal, and anything else gives some number.
template <bool kNormal = false, class D, class V = hn::Vec<D>>
HWY_INLINE V log(D d, V x) {
  using T = hn::TFromD<D>;
  using C = MathConstants<T>;
  using Limits = std::numeric_limits<T>;
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  using Word = hn::TFromD<decltype(du)>;
  constexpr T kTwoToMantissa = static_cast<T>(uint64_t{1} << C::kMantissaBits);
  const auto is_small = hn::Lt(x, hn::Set(d, Limits::min()));
  const V scaled =
      kNormal ? x : hn::IfThenElse(is_small, hn::Mul(x, hn::Set(d, kTwoToMantissa)), x);
  // x = 2^e m with m in [sqrt(1/2), sqrt 2): e counts from the bit pattern of sqrt(1/2).
  constexpr Word kSqrtHalf = std::is_same_v<T, float> ? static_cast<Word>(0x3f3504f3u)
                                                      : static_cast<Word>(0x3fe6a09e667f3bcdull);
  const auto word = hn::BitCast(du, scaled);
  const auto above = hn::Sub(word, hn::Set(du, kSqrtHalf));
  // Biased before the shift so that it may be logical, unbiased after.
  const auto exponent_word = hn::ShiftRight<C::kMantissaBits>(
      hn::Add(above, hn::Set(du, static_cast<Word>(C::kExponentBias) << C::kMantissaBits)));
  const auto exponent =
      hn::Sub(hn::BitCast(di, exponent_word),
              hn::Set(di, static_cast<hn::TFromD<decltype(di)>>(C::kExponentBias)));
  const V m =
      hn::BitCast(d, hn::Sub(word, hn::ShiftLeft<C::kMantissaBits>(hn::BitCast(du, exponent))));
  // The exponent as a float, through the rounding constant (its integer is below 2^12).
  const V magic = hn::Set(d, C::kRoundingMagic);
  V e = hn::Sub(hn::BitCast(d, hn::Add(hn::BitCast(di, magic), exponent)), magic);
  if constexpr (!kNormal) {
    e = hn::Sub(e, hn::IfThenElseZero(is_small, hn::Set(d, static_cast<T>(C::kMantissaBits))));
  }

  // ln(1 + f) = f - (f^2/2 - s (f^2/2 + R)), s = f/(2 + f), R = s^2 (2/3 + 2/5 s^2 + ...)
  const V f = hn::Sub(m, hn::Set(d, T(1)));
  const V s = hn::Div(f, hn::Add(f, hn::Set(d, T(2))));
  const V z = hn::Mul(s, s);
  const V big_r = hn::Mul(z, polynomial(d, z, C::kLog));
  const V half_square = hn::Mul(hn::Set(d, T(0.5)), hn::Mul(f, f));
  const V correction = fma(d, s, hn::Add(half_square, big_r), hn::Mul(e, hn::Set(d, C::kLn2Rest)));
  V result = hn::Sub(f, hn::Sub(half_square, correction));
  result = fma(d, e, hn::Set(d, C::kLn2Short), result);
  if constexpr (kNormal) return result;

  result = hn::IfThenElse(hn::Eq(x, hn::Set(d, Limits::infinity())), x, result);
  result = hn::IfThenElse(hn::Eq(x, hn::Zero(d)), hn::Set(d, -Limits::infinity()), result);
  // Written so that NaN fails the comparison.
  return hn::IfThenElse(hn::Ge(x, hn::Zero(d)), result, hn::Set(d, Limits::quiet_NaN()));
}

// Reductions over a row run in kRowLanes lanes, whatever the vector length: element j belongs to
// lane j mod kRowLanes, a lane takes its elements in ascending order, and at the end the upper half
// of the lanes is added to the lower until one is left. So a row's sum depends on its elements and
// their number alone.
template <class T>
inline constexpr int64_t kRowLanes = 256 / static_cast<int64_t>(sizeof(T));  // 4 vectors of AVX-512

// sums[i] = sum over j in [0, n) of values(j)[i]. `values(j, active)` returns kSums vectors whose
// first `active` lanes are for elements j, j + 1, ...; active is Lanes(d) but at the row's end, and
// what the other lanes hold does not count.
template <size_t kSums, class D, class Values>
HWY_INLINE std::array<hn::TFromD<D>, kSums> sum_row(D d, int64_t n, Values values) {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;
  constexpr int64_t kLanes = kLanesOf<D>;
  constexpr int64_t kVectors = kRowLanes<T> / kLanes;
  V lanes[kSums][kVectors];
  for (size_t i = 0; i < kSums; ++i) {
    for (int64_t v = 0; v < kVectors; ++v) lanes[i][v] = hn::Zero(d);
  }
  int64_t j = 0;
  for (; j + kRowLanes<T> <= n; j += kRowLanes<T>) {
    HWY_UNROLL(8)
    for (int64_t v = 0; v < kVectors; ++v) {
      const std::array<V, kSums> terms = values(j + v * kLanes, kLanes);
      for (size_t i = 0; i < kSums; ++i) lanes[i][v] = hn::Add(lanes[i][v], terms[i]);
    }
  }
  for (int64_t v = 0; j < n; ++v, j += kLanes) {
    const int64_t active = std::min(kLanes, n - j);
    const std::array<V, kSums> terms = values(j, active);
    const auto mask = hn::FirstN(d, static_cast<size_t>(active));
    for (size_t i = 0; i < kSums; ++i) {
      lanes[i][v] = hn::Add(lanes[i][v], hn::IfThenElseZero(mask, terms[i]));
    }
  }
  std::array<T, kSums> sums;
  for (size_t i = 0; i < kSums; ++i) {
    for (int64_t half = kVectors / 2; half > 0; half /= 2) {
      for (int64_t v = 0; v < half; ++v) lanes[i][v] = hn::Add(lanes[i][v], lanes[i][v + half]);
    }
    HWY_ALIGN T all[kLanes];
    hn::Store(lanes[i][0], d, all);
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
      for (int64_t lane = 0; lane < half; ++lane) all[lane] += all[lane + half];
    }
    sums[i] = all[0];
  }
  return sums;
}

// The largest of n elements, -infinity if n = 0. NaN is passed over: it shows in the row's sum.
template <class T>
HWY_INLINE Compute<T> max_row(const T* row, int64_t n) {
  const hn::ScalableTag<Compute<T>> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int64_t kLanes = kLanesOf<decltype(d)>;
  constexpr Compute<T> kLeast = -std::numeric_limits<Compute<T>>::infinity();
  constexpr int64_t kVectors = 4;  // independent maxima: a comparison and a blend take 4 cycles
  // The other where v is NaN: x86's maximum gives its second operand then. hn::Max differs between
  // targets there.
  const auto larger = [](V most, V v) HWY_ATTR {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
    return hn::Max(v, most);
#else
    return hn::IfThenElse(hn::Gt(v, most), v, most);
#endif
  };
  V most[kVectors];
  for (V& v : most) v = hn::Set(d, kLeast);
  int64_t j = 0;
  for (; j + kVectors * kLanes <= n; j += kVectors * kLanes) {
    HWY_UNROLL(4)
    for (int64_t v = 0; v < kVectors; ++v) {
      most[v] = larger(most[v], load_lanes(d, row + j + v * kLanes));
    }
  }
  for (; j + kLanes <= n; j += kLanes) most[0] = larger(most[0], load_lanes(d, row + j));
  if (j < n) most[0] = larger(most[0], load_lanes(d, row + j, n - j, kLeast));
  for (int64_t v = 1; v < kVectors; ++v) most[0] = larger(most[0], most[v]);
  HWY_ALIGN Compute<T> lanes[kLanes];
  hn::Store(most[0], d, lanes);
  return *std::max_element(lanes, lanes + kLanes);
}

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
