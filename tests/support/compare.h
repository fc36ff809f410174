// Element-wise comparison against bounds. compare_test.cc holds it to arrays that are known to be
// bad.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <span>
#include <string>

namespace ullage::test {

struct Comparison {
  bool ok = true;
  double fraction = 0;  // the largest |actual - expected| / bound
  std::string message;
};

// bound(i) >= 0 is what element i may be off by. NaN and infinities must be at the same places,
// with the same sign. A comparison whose bounds would pass an array of zeros for expected values
// that are not is vacuous, and fails.
inline Comparison compare(std::span<const double> actual, std::span<const double> expected,
                          const std::function<double(size_t)>& bound) {
  Comparison result;
  const auto fail = [&](const std::string& message) {
    result.ok = false;
    if (result.message.empty()) result.message = message;
  };
  const auto place = [&](size_t i) {
    char text[160];
    std::snprintf(text, sizeof text, " at %zu of %zu: actual %.17g, expected %.17g, bound %.3g", i,
                  expected.size(), actual[i], expected[i], bound(i));
    return std::string(text);
  };
  if (actual.size() != expected.size()) {
    fail("sizes differ: " + std::to_string(actual.size()) + " and " +
         std::to_string(expected.size()));
    return result;
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool same = std::isnan(expected[i])   ? std::isnan(actual[i])
                      : std::isinf(expected[i]) ? actual[i] == expected[i]
                                                : std::isfinite(actual[i]);
    if (!same) {
      fail("a NaN or infinity out of place" + place(i));
      return result;
    }
  }
  bool any = false, told_from_zero = false;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!std::isfinite(expected[i])) continue;
    const double error = std::abs(actual[i] - expected[i]), allowed = bound(i);
    any = any || expected[i] != 0;
    told_from_zero = told_from_zero || std::abs(expected[i]) > allowed;
    if (error > 0) {
      result.fraction = std::max(result.fraction, allowed > 0 ? error / allowed : INFINITY);
    }
    if (!(error <= allowed)) fail("too far" + place(i));
  }
  if (any && !told_from_zero) fail("vacuous: every bound is as large as the value it bounds");
  return result;
}

inline Comparison compare(std::span<const double> actual, std::span<const double> expected,
                          double bound) {
  return compare(actual, expected, [bound](size_t) { return bound; });
}

// For EXPECT_TRUE; says where it failed, and how much of the bound was used where it did not.
inline testing::AssertionResult close(std::span<const double> actual,
                                      std::span<const double> expected,
                                      const std::function<double(size_t)>& bound) {
  const Comparison result = compare(actual, expected, bound);
  if (!result.ok) return testing::AssertionFailure() << result.message;
  return testing::AssertionSuccess() << "used " << result.fraction << " of the bound";
}

inline testing::AssertionResult close(std::span<const double> actual,
                                      std::span<const double> expected, double bound) {
  return close(actual, expected, [bound](size_t) { return bound; });
}

}  // namespace ullage::test
