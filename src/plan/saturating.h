// Arithmetic on counts that sticks at the largest value: one too large can never read as small.
#pragma once

#include <cstdint>
#include <limits>

namespace ullage {

inline constexpr int64_t kTooMany = std::numeric_limits<int64_t>::max();

constexpr int64_t saturating_times(int64_t a, int64_t b) {
  int64_t product = 0;
  const bool stuck = a == kTooMany || b == kTooMany || __builtin_mul_overflow(a, b, &product);
  return stuck ? kTooMany : product;
}

constexpr int64_t saturating_plus(int64_t a, int64_t b) {
  int64_t sum = 0;
  const bool stuck = a == kTooMany || b == kTooMany || __builtin_add_overflow(a, b, &sum);
  return stuck ? kTooMany : sum;
}

template <class... Factors>
constexpr int64_t saturating_times(int64_t a, int64_t b, Factors... rest) {
  return saturating_times(saturating_times(a, b), rest...);
}

}  // namespace ullage
