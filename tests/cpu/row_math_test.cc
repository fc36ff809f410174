#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/instruction_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/row_math_test.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/row_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

template <class T, class Function>
void map_lanes(const T* from, int64_t n, T* to, Function function) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = kLanesOf<decltype(d)>;
  for (int64_t j = 0; j < n; j += lanes) {
    const int64_t active = std::min(lanes, n - j);
    const auto x =
        active == lanes ? load_lanes(d, from + j) : load_lanes(d, from + j, active, T(1));
    const auto y = function(d, x);
    active == lanes ? store_lanes(d, y, to + j) : store_lanes(d, y, to + j, active);
  }
}
template <class T>
void map_exp(const T* from, int64_t n, T* to) {
  map_lanes(from, n, to, [](auto d, auto x) HWY_ATTR { return exp(d, x); });
}
template <class T>
void map_log(const T* from, int64_t n, T* to) {
  map_lanes(from, n, to, [](auto d, auto x) HWY_ATTR { return log(d, x); });
}
template <class T>
void map_exp2(const T* from, int64_t n, T* to) {
  map_lanes(from, n, to, [](auto d, auto x) HWY_ATTR { return exp2_to_one(d, x); });
}
// The logarithm of positive normal numbers.
template <class T>
void map_log_normal(const T* from, int64_t n, T* to) {
  map_lanes(from, n, to, [](auto d, auto x) HWY_ATTR { return log<true>(d, x); });
}
void exp_f32(const float* from, int64_t n, float* to) { map_exp(from, n, to); }
void exp_f64(const double* from, int64_t n, double* to) { map_exp(from, n, to); }
void log_f32(const float* from, int64_t n, float* to) { map_log(from, n, to); }
void log_f64(const double* from, int64_t n, double* to) { map_log(from, n, to); }
void exp2_f32(const float* from, int64_t n, float* to) { map_exp2(from, n, to); }
void exp2_f64(const double* from, int64_t n, double* to) { map_exp2(from, n, to); }
void log_normal_f32(const float* from, int64_t n, float* to) { map_log_normal(from, n, to); }
void log_normal_f64(const double* from, int64_t n, double* to) { map_log_normal(from, n, to); }

// The row's sum and its sum of squares, and its maximum.
template <class T>
void reduce(const T* row, int64_t n, Compute<T>* results) {
  const hn::ScalableTag<Compute<T>> d;
  using V = hn::Vec<decltype(d)>;
  const auto sums = sum_row<2>(d, n, [&](int64_t j, int64_t active) HWY_ATTR {
    // Lanes that do not count hold NaN.
    const V x = active == kLanesOf<decltype(d)>
                    ? load_lanes(d, row + j)
                    : load_lanes(d, row + j, active, std::numeric_limits<Compute<T>>::quiet_NaN());
    return std::array<V, 2>{x, hn::Mul(x, x)};
  });
  results[0] = sums[0];
  results[1] = sums[1];
  results[2] = max_row(row, n);
}
void reduce_f32(const float* row, int64_t n, float* results) { reduce(row, n, results); }
void reduce_f64(const double* row, int64_t n, double* results) { reduce(row, n, results); }
void reduce_bf16(const BF16* row, int64_t n, float* results) { reduce(row, n, results); }
void reduce_f16(const F16* row, int64_t n, float* results) { reduce(row, n, results); }

template <class T>
void widen_row(const T* from, int64_t n, float* to) {
  const hn::ScalableTag<float> d;
  for (int64_t j = 0; j < n; j += kLanesOf<decltype(d)>)
    hn::StoreU(load_lanes(d, from + j), d, to + j);
}
template <class T>
void narrow_row(const float* from, int64_t n, T* to) {
  const hn::ScalableTag<float> d;
  for (int64_t j = 0; j < n; j += kLanesOf<decltype(d)>)
    store_lanes(d, hn::LoadU(d, from + j), to + j);
}
void widen_bf16(const BF16* from, int64_t n, float* to) { widen_row(from, n, to); }
void widen_f16(const F16* from, int64_t n, float* to) { widen_row(from, n, to); }
void narrow_bf16(const float* from, int64_t n, BF16* to) { narrow_row(from, n, to); }
void narrow_f16(const float* from, int64_t n, F16* to) { narrow_row(from, n, to); }

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ullage::cpu {
HWY_EXPORT(exp_f32);
HWY_EXPORT(exp_f64);
HWY_EXPORT(log_f32);
HWY_EXPORT(log_f64);
HWY_EXPORT(exp2_f32);
HWY_EXPORT(exp2_f64);
HWY_EXPORT(log_normal_f32);
HWY_EXPORT(log_normal_f64);
HWY_EXPORT(reduce_f32);
HWY_EXPORT(reduce_f64);
HWY_EXPORT(reduce_bf16);
HWY_EXPORT(reduce_f16);
HWY_EXPORT(widen_bf16);
HWY_EXPORT(widen_f16);
HWY_EXPORT(narrow_bf16);
HWY_EXPORT(narrow_f16);

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class RowMathTest : public testing::TestWithParam<std::string_view> {
 protected:
  void SetUp() override { ASSERT_TRUE(force_instruction_set(GetParam())); }
  void TearDown() override { force_instruction_set(""); }
};
INSTANTIATE_TEST_SUITE_P(Sets, RowMathTest, testing::ValuesIn(instruction_sets()),
                         [](const auto& set) { return std::string(set.param); });

// The distance in units of the last place of `exact` rounded to T; 0 for equal infinities.
template <class T>
double ulps(T value, long double exact) {
  const T rounded = static_cast<T>(exact);
  if (std::isinf(rounded) || std::isinf(value)) return rounded == value ? 0 : 1e9;
  int exponent;
  std::frexp(rounded, &exponent);
  const int least = std::numeric_limits<T>::min_exponent - std::numeric_limits<T>::digits;
  const int place = std::max(exponent - std::numeric_limits<T>::digits, least);
  return static_cast<double>(std::abs(std::ldexp(static_cast<long double>(value) - exact, -place)));
}

// ULLAGE_SWEEP_STEP=1 in the environment visits every float; the test a dense sample.
uint64_t sweep_step() {
  const char* const step = std::getenv("ULLAGE_SWEEP_STEP");
  return step != nullptr ? std::strtoull(step, nullptr, 10) : 1009;
}

template <class Function, class Exact>
double largest_error_f32(Function function, Exact exact) {
  std::vector<float> x, y(4096);
  double largest = 0;
  const auto flush = [&] {
    function(x.data(), static_cast<int64_t>(x.size()), y.data());
    for (size_t i = 0; i < x.size(); ++i) largest = std::max(largest, ulps(y[i], exact(x[i])));
    x.clear();
  };
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += sweep_step()) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isnan(value) || std::isnan(exact(value))) continue;
    x.push_back(value);
    if (x.size() == y.size()) flush();
  }
  flush();
  return largest;
}

template <class Function, class Exact>
double largest_error_f64(Function function, Exact exact, const std::vector<double>& x) {
  std::vector<double> y(x.size());
  function(x.data(), static_cast<int64_t>(x.size()), y.data());
  double largest = 0;
  for (size_t i = 0; i < x.size(); ++i) largest = std::max(largest, ulps(y[i], exact(x[i])));
  return largest;
}

TEST_P(RowMathTest, ExpStaysWithinItsStatedError) {
  // A double's exp is good to 2^-52, a thousandth of what is measured.
  const double f32 =
      largest_error_f32(HWY_DYNAMIC_DISPATCH(exp_f32), [](float x) { return std::exp(double{x}); });
  EXPECT_LT(f32, 1.0);
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> wide(-745.2, 709.8), narrow(-1, 1);
  std::vector<double> x{0.0, -0.0, 709.78, 709.79, -708.4, -745.13, -745.14, 1e300, -1e300, 1e-300};
  for (int i = 0; i < 300000; ++i) x.push_back(wide(random)), x.push_back(narrow(random));
  const double f64 =
      largest_error_f64(HWY_DYNAMIC_DISPATCH(exp_f64), [](double v) { return expl(v); }, x);
  EXPECT_LT(f64, 1.0);
  std::printf("exp: %.4f ulp f32, %.4f ulp f64\n", f32, f64);
}

TEST_P(RowMathTest, Exp2ToOneStaysWithinItsStatedError) {
  // Of other numbers than those it is for, 0 is asked.
  const auto is_meant = [](double t) { return t <= 0 && t >= -125.875; };
  const double f32 = largest_error_f32(
      [](const float* from, int64_t n, float* to) { HWY_DYNAMIC_DISPATCH(exp2_f32)(from, n, to); },
      [&](float t) { return is_meant(t) ? std::exp2(double{t}) : NAN; });
  EXPECT_LT(f32, 0.88);
  std::mt19937_64 random(4);
  std::uniform_real_distribution<double> wide(-1021.75, 0), narrow(-1, 0);
  std::vector<double> x{0.0, -0.0, -0.5, -1, -1021.75, -1e-300};
  for (int i = 0; i < 300000; ++i) x.push_back(wide(random)), x.push_back(narrow(random));
  const double f64 =
      largest_error_f64(HWY_DYNAMIC_DISPATCH(exp2_f64), [](double v) { return exp2l(v); }, x);
  EXPECT_LT(f64, 0.9);
  std::printf("exp2: %.4f ulp f32, %.4f ulp f64\n", f32, f64);

  const std::vector<float> special{0, -0.0f, NAN, -kInfinity, -125.9f, -1e30f};
  std::vector<float> y(special.size());
  HWY_DYNAMIC_DISPATCH(exp2_f32)(special.data(), static_cast<int64_t>(y.size()), y.data());
  EXPECT_EQ(y[0], 1);
  EXPECT_EQ(y[1], 1);
  EXPECT_TRUE(std::isnan(y[2]));
  for (size_t i = 3; i < y.size(); ++i) EXPECT_EQ(y[i], 0);
}

TEST_P(RowMathTest, LogStaysWithinItsStatedError) {
  const double f32 =
      largest_error_f32(HWY_DYNAMIC_DISPATCH(log_f32), [](float x) { return std::log(double{x}); });
  EXPECT_LT(f32, 0.84);
  std::mt19937_64 random(2);
  std::uniform_real_distribution<double> one(0.5, 2), exponents(-1074, 1023.9);
  std::vector<double> x{
      0.0, 1.0, std::nextafter(1.0, 2), std::nextafter(1.0, 0), 0x1p-1074, 0x1p-1022, 1.7e308};
  for (int i = 0; i < 300000; ++i)
    x.push_back(one(random)), x.push_back(std::exp2(exponents(random)));
  const double f64 =
      largest_error_f64(HWY_DYNAMIC_DISPATCH(log_f64), [](double v) { return logl(v); }, x);
  EXPECT_LT(f64, 0.85);
  std::printf("log: %.4f ulp f32, %.4f ulp f64\n", f32, f64);
}

TEST_P(RowMathTest, SpecialValues) {
  const std::vector<float> x{kInfinity, -kInfinity, NAN, -1.0f, 0.0f, -0.0f, 1.0f, 200.0f, -200.0f};
  std::vector<float> y(x.size());
  HWY_DYNAMIC_DISPATCH(exp_f32)(x.data(), static_cast<int64_t>(x.size()), y.data());
  EXPECT_EQ(y[0], kInfinity);
  EXPECT_EQ(y[1], 0.0f);
  EXPECT_TRUE(std::isnan(y[2]));
  EXPECT_EQ(y[4], 1.0f);
  EXPECT_EQ(y[5], 1.0f);
  EXPECT_EQ(y[7], kInfinity);
  EXPECT_EQ(y[8], 0.0f);
  HWY_DYNAMIC_DISPATCH(log_f32)(x.data(), static_cast<int64_t>(x.size()), y.data());
  EXPECT_EQ(y[0], kInfinity);
  EXPECT_TRUE(std::isnan(y[1]));
  EXPECT_TRUE(std::isnan(y[2]));
  EXPECT_TRUE(std::isnan(y[3]));
  EXPECT_EQ(y[4], -kInfinity);
  EXPECT_EQ(y[5], -kInfinity);
  EXPECT_EQ(y[6], 0.0f);
  const std::vector<double> x64(x.begin(), x.end());
  std::vector<double> y64(x.size());
  HWY_DYNAMIC_DISPATCH(exp_f64)(x64.data(), static_cast<int64_t>(x.size()), y64.data());
  EXPECT_TRUE(std::isnan(y64[2]));
  EXPECT_EQ(y64[1], 0.0);
}

// All sets agree with the first, bit for bit.
template <class T, class Run>
void expect_same_bits_on_every_set(const std::vector<T>& x, Run run) {
  std::vector<T> first;
  for (std::string_view set : instruction_sets()) {
    ASSERT_TRUE(force_instruction_set(set));
    std::vector<T> y(x.size());
    run(x.data(), static_cast<int64_t>(x.size()), y.data());
    if (first.empty()) first = y;
    ASSERT_EQ(std::memcmp(first.data(), y.data(), y.size() * sizeof(T)), 0) << set;
  }
  force_instruction_set("");
}

TEST(RowMath, ExpAndLogHaveTheSameBitsOnEverySet) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal(0, 30);
  std::vector<float> x, positive;
  std::vector<double> x64, positive64;
  for (int i = 0; i < 100003; ++i) {
    x64.push_back(normal(random));
    positive64.push_back(std::exp(x64.back()));
    x.push_back(static_cast<float>(x64.back()));
    positive.push_back(std::exp(x.back()));
  }
  expect_same_bits_on_every_set(x, [](auto... a) { HWY_DYNAMIC_DISPATCH(exp_f32)(a...); });
  expect_same_bits_on_every_set(x, [](auto... a) { HWY_DYNAMIC_DISPATCH(exp2_f32)(a...); });
  expect_same_bits_on_every_set(x64, [](auto... a) { HWY_DYNAMIC_DISPATCH(exp2_f64)(a...); });
  expect_same_bits_on_every_set(x64, [](auto... a) { HWY_DYNAMIC_DISPATCH(exp_f64)(a...); });
  expect_same_bits_on_every_set(positive, [](auto... a) { HWY_DYNAMIC_DISPATCH(log_f32)(a...); });
  expect_same_bits_on_every_set(positive64, [](auto... a) { HWY_DYNAMIC_DISPATCH(log_f64)(a...); });
}

TEST_P(RowMathTest, LogOfNormalNumbersHasTheBitsOfLog) {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<double> exponents(-120, 120);
  std::vector<float> x{1, std::nextafter(1.0f, 0.0f), 0.5f};
  for (int i = 0; i < 10000; ++i) x.push_back(static_cast<float>(std::exp2(exponents(random))));
  const std::vector<double> x64(x.begin(), x.end());
  const auto n = static_cast<int64_t>(x.size());
  std::vector<float> y(x.size()), z(x.size());
  HWY_DYNAMIC_DISPATCH(log_f32)(x.data(), n, y.data());
  HWY_DYNAMIC_DISPATCH(log_normal_f32)(x.data(), n, z.data());
  EXPECT_EQ(y, z);
  std::vector<double> y64(x.size()), z64(x.size());
  HWY_DYNAMIC_DISPATCH(log_f64)(x64.data(), n, y64.data());
  HWY_DYNAMIC_DISPATCH(log_normal_f64)(x64.data(), n, z64.data());
  EXPECT_EQ(y64, z64);
}

// The order that the header promises.
template <class T>
T sum_in_lanes(const std::vector<T>& terms) {
  const size_t n_lanes = 256 / sizeof(T);
  std::vector<T> lanes(n_lanes, T(0));
  for (size_t j = 0; j < terms.size(); ++j) lanes[j % n_lanes] += terms[j];
  for (size_t half = n_lanes / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <class T, class Stored, class Run>
void expect_row_reductions(std::mt19937& random, Run run) {
  std::normal_distribution<double> normal;
  for (int64_t n : {0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 4097}) {
    std::vector<Stored> row(static_cast<size_t>(n));
    std::vector<T> values, squares;
    T most = -std::numeric_limits<T>::infinity();
    for (Stored& stored : row) {
      T value = static_cast<T>(normal(random));
      if constexpr (std::is_class_v<Stored>) {
        stored = Stored::from_float(value);
        value = stored.to_float();
      } else {
        stored = value;
      }
      values.push_back(value);
      squares.push_back(value * value);
      most = std::max(most, value);
    }
    T results[3];
    run(row.data(), n, results);
    EXPECT_EQ(results[0], sum_in_lanes(values)) << n;
    EXPECT_EQ(results[1], sum_in_lanes(squares)) << n;
    EXPECT_EQ(results[2], most) << n;
  }
}

TEST_P(RowMathTest, RowReductionsFollowTheStatedOrder) {
  std::mt19937 random(4);
  expect_row_reductions<float, float>(random, HWY_DYNAMIC_DISPATCH(reduce_f32));
  expect_row_reductions<double, double>(random, HWY_DYNAMIC_DISPATCH(reduce_f64));
  expect_row_reductions<float, BF16>(random, HWY_DYNAMIC_DISPATCH(reduce_bf16));
  expect_row_reductions<float, F16>(random, HWY_DYNAMIC_DISPATCH(reduce_f16));
}

TEST_P(RowMathTest, NaNShowsInTheSumAndNotInTheMaximum) {
  for (int64_t at : {0, 20, 77, 130, 139}) {
    std::vector<float> row(140, -3.0f);
    row[static_cast<size_t>(at)] = NAN;
    float results[3];
    HWY_DYNAMIC_DISPATCH(reduce_f32)(row.data(), 140, results);
    EXPECT_TRUE(std::isnan(results[0]));
    EXPECT_EQ(results[2], -3.0f);
  }
}

TEST_P(RowMathTest, SixteenBitTypesWidenAndRoundAsDTypeSays) {
  std::vector<BF16> bf16(65536);
  std::vector<F16> f16(65536);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    bf16[bits].bits = f16[bits].bits = static_cast<uint16_t>(bits);
  }
  std::vector<float> from_bf16(65536), from_f16(65536);
  HWY_DYNAMIC_DISPATCH(widen_bf16)(bf16.data(), 65536, from_bf16.data());
  HWY_DYNAMIC_DISPATCH(widen_f16)(f16.data(), 65536, from_f16.data());
  std::vector<float> values;
  for (size_t i = 0; i < 65536; ++i) {
    if (!std::isnan(bf16[i].to_float()))
      ASSERT_EQ(from_bf16[i], bf16[i].to_float()) << i;
    else
      ASSERT_TRUE(std::isnan(from_bf16[i]));
    if (!std::isnan(f16[i].to_float()))
      ASSERT_EQ(from_f16[i], f16[i].to_float()) << i;
    else
      ASSERT_TRUE(std::isnan(from_f16[i]));
    // Values on both sides of every rounding boundary of either type.
    for (uint32_t low : {0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u}) {
      values.push_back(std::bit_cast<float>(static_cast<uint32_t>(i) << 16 | low));
    }
  }
  const int64_t n = static_cast<int64_t>(values.size());
  std::vector<BF16> to_bf16(values.size());
  std::vector<F16> to_f16(values.size());
  HWY_DYNAMIC_DISPATCH(narrow_bf16)(values.data(), n, to_bf16.data());
  HWY_DYNAMIC_DISPATCH(narrow_f16)(values.data(), n, to_f16.data());
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) {
      ASSERT_TRUE(std::isnan(to_bf16[i].to_float()) && std::isnan(to_f16[i].to_float()));
      continue;
    }
    ASSERT_EQ(to_bf16[i].bits, BF16::from_float(values[i]).bits) << values[i];
    ASSERT_EQ(to_f16[i].bits, F16::from_float(values[i]).bits) << values[i];
  }
}

}  // namespace
}  // namespace ullage::cpu
#endif  // HWY_ONCE
