// Results of a device within their bounds, and how much of the bounds they used.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cuda/device_memory.h"
#include "support/compare.h"
#include "support/seed.h"

namespace ullage::test {

inline double worst_fraction = 0;  // of a bound, over the whole program

// bound(i): what element i may be off by.
inline void expect_close(const char* what, std::span<const double> actual,
                         std::span<const double> expected,
                         const std::function<double(size_t)>& bound, const std::string& where) {
  const Comparison result = compare(actual, expected, bound);
  // Random values alone may be smaller than what they can be known to.
  EXPECT_TRUE(result.ok || result.message.starts_with("vacuous"))
      << where << ", " << what << ": " << result.message;
  worst_fraction = std::max(worst_fraction, result.fraction);
}
inline void expect_close(const char* what, std::span<const double> actual,
                         std::span<const double> expected, const std::vector<double>& bound,
                         const std::string& where) {
  expect_close(what, actual, expected, [&](size_t i) { return bound[i]; }, where);
}

inline void print_worst_fraction() {
  std::printf("the largest error used %.3f of its bound\n", worst_fraction);
}

// Skips itself without a device, and says at the end what was used of the bounds.
class OnDevice : public testing::Test {
 protected:
  void SetUp() override { ULLAGE_SKIP_WITHOUT_DEVICE(); }
  static void TearDownTestSuite() { print_worst_fraction(); }
  Rng rng{test_seed()};
};

}  // namespace ullage::test
