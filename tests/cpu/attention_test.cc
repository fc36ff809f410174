#include "cpu/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "cpu/instruction_set.h"

namespace ullage::cpu {
namespace {

struct FreeDeleter {
  void operator()(float* p) const { std::free(p); }
};
using Aligned = std::unique_ptr<float[], FreeDeleter>;

Aligned aligned(int64_t count, float value) {
  const auto bytes = static_cast<size_t>((count * 4 + 63) / 64 * 64);
  Aligned memory(static_cast<float*>(std::aligned_alloc(64, bytes)));
  std::fill_n(memory.get(), count, value);
  return memory;
}

struct Problem {
  int64_t n_keys, d_head, capacity;
  std::vector<float> query, keys, values;  // [d_head], [n_keys][d_head] twice
  Aligned key_cache, value_cache, scores;

  // What the cache holds before the keys are stored must not matter: `stale` fills it.
  Problem(int64_t n, int64_t d, float stale)
      : n_keys(n),
        d_head(d),
        capacity(n + 5),
        query(static_cast<size_t>(d)),
        keys(static_cast<size_t>(n * d)),
        values(keys.size()),
        key_cache(aligned(key_cache_elements(capacity, d), stale)),
        value_cache(aligned(value_cache_elements(capacity, d), stale)),
        scores(aligned(round_up_to_key_block(capacity), stale)) {
    std::mt19937 random(static_cast<uint32_t>(n * 1000 + d));
    std::normal_distribution<float> normal;
    for (auto* part : {&query, &keys, &values}) {
      for (float& x : *part) x = normal(random);
    }
    for (int64_t j = 0; j < n; ++j) {
      store_key_value(cache(), j, d, &keys[static_cast<size_t>(j * d)],
                      &values[static_cast<size_t>(j * d)]);
    }
  }

  KeyValueCache cache() const { return {key_cache.get(), value_cache.get()}; }

  std::vector<float> attend_first(int64_t n) {
    std::vector<float> out(static_cast<size_t>(d_head));
    attend(query.data(), cache(), n, d_head, scale(), scores.get(), out.data());
    return out;
  }

  float scale() const { return 1 / std::sqrt(static_cast<float>(d_head)); }
};

// u: unit roundoff. A score is off by (d_head + 2) u sum|q k| scale, so a weight by twice the worst
// of those relatively, plus exp (2 u) and the sums over keys (n_keys u each, two of them); the
// output by that times sum p |v|.
double bound(const Problem& p, int64_t i, const std::vector<double>& weights, double worst_score) {
  constexpr double kUnit = std::numeric_limits<float>::epsilon() / 2;
  const auto d = static_cast<double>(p.d_head);
  const auto n = static_cast<double>(p.n_keys);
  double magnitude = 0;
  for (int64_t j = 0; j < p.n_keys; ++j) {
    magnitude += weights[static_cast<size_t>(j)] *
                 std::abs(static_cast<double>(p.values[static_cast<size_t>(j * p.d_head + i)]));
  }
  return kUnit * (2 * (d + 2) * worst_score + 2 * n + 8) * magnitude;
}

TEST(Attention, AgreesWithFloat64) {
  double worst_used = 0;
  for (const int64_t d_head : {2, 16, 20, 64, 80, 128}) {
    for (const int64_t n_keys : {1, 2, 15, 16, 17, 33, 200}) {
      Problem p(n_keys, d_head, 0);
      std::vector<double> weights(static_cast<size_t>(n_keys));
      double max = -1e300, worst_score = 0, sum = 0;
      for (int64_t j = 0; j < n_keys; ++j) {
        double score = 0, magnitude = 0;
        for (int64_t i = 0; i < d_head; ++i) {
          const double term = static_cast<double>(p.query[static_cast<size_t>(i)]) *
                              p.keys[static_cast<size_t>(j * d_head + i)];
          score += term;
          magnitude += std::abs(term);
        }
        weights[static_cast<size_t>(j)] = score * p.scale();
        max = std::max(max, weights[static_cast<size_t>(j)]);
        worst_score = std::max(worst_score, magnitude * p.scale());
      }
      for (double& w : weights) sum += (w = std::exp(w - max));
      for (double& w : weights) w /= sum;
      const std::vector<float> out = p.attend_first(n_keys);
      for (int64_t i = 0; i < d_head; ++i) {
        double expected = 0;
        for (int64_t j = 0; j < n_keys; ++j) {
          expected +=
              weights[static_cast<size_t>(j)] * p.values[static_cast<size_t>(j * d_head + i)];
        }
        const double allowed = bound(p, i, weights, worst_score);
        const double error = std::abs(out[static_cast<size_t>(i)] - expected);
        ASSERT_LE(error, allowed) << "d_head " << d_head << " n_keys " << n_keys << " i " << i;
        worst_used = std::max(worst_used, error / allowed);
      }
    }
  }
  std::printf("used %.3f of the bound\n", worst_used);
}

// Positions past n_keys, written or not, change no bit: a prefill sees what a decode saw.
TEST(Attention, LaterPositionsAreNotSeen) {
  Problem clean(100, 48, 0);
  Problem stale(100, 48, std::numeric_limits<float>::quiet_NaN());
  for (const int64_t n : {1, 16, 17, 50, 100}) {
    const std::vector<float> a = clean.attend_first(n);
    const std::vector<float> b = stale.attend_first(n);
    EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << n;
  }
}

TEST(Attention, SameBitsOnEveryInstructionSet) {
  for (const int64_t d_head : {2, 48, 128}) {
    Problem p(77, d_head, 0);
    const std::vector<float> expected = p.attend_first(77);
    for (const std::string_view set : instruction_sets()) {
      ASSERT_TRUE(force_instruction_set(set));
      const std::vector<float> out = p.attend_first(77);
      EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)), 0) << set;
    }
    force_instruction_set("");
  }
}

TEST(Attention, NaNSurfaces) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Problem bad_query(20, 32, 0);
  bad_query.query[3] = nan;
  Problem bad_key(20, 32, 0);
  std::vector<float> row(32, nan);
  store_key_value(bad_key.cache(), 7, 32, row.data(), &bad_key.values[0]);
  for (Problem* p : {&bad_query, &bad_key}) {
    for (const float x : p->attend_first(20)) EXPECT_TRUE(std::isnan(x));
  }
  for (const float x : bad_key.attend_first(7)) EXPECT_FALSE(std::isnan(x));
}

}  // namespace
}  // namespace ullage::cpu
