// A fresh seed each run, printed, so that a failure can be repeated with ULLAGE_TEST_SEED.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace ullage::test {

inline uint64_t test_seed() {
  static const uint64_t seed = [] {
    const char* given = std::getenv("ULLAGE_TEST_SEED");
    const uint64_t value = given ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::printf("ULLAGE_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

using Rng = std::mt19937_64;

inline double normal(Rng& rng) { return std::normal_distribution<double>()(rng); }
inline double uniform(Rng& rng, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(rng);
}
inline int64_t below(Rng& rng, int64_t n) {
  return std::uniform_int_distribution<int64_t>(0, n - 1)(rng);
}

}  // namespace ullage::test
