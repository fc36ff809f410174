#include "session/layer_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <vector>

namespace ullage::session {
namespace {

TEST(RmsNorm, ScalesToUnitMeanSquare) {
  const std::vector<float> src = {3, -4, 0, 0};
  const std::vector<float> weight = {1, 1, 2, 1};
  std::vector<float> dst(4);
  rms_norm(src.data(), weight.data(), 4, 0, dst.data());  // rms 2.5
  EXPECT_FLOAT_EQ(dst[0], 1.2f);
  EXPECT_FLOAT_EQ(dst[1], -1.6f);
  rms_norm(src.data(), weight.data(), 4, 6.25, dst.data());  // mean square 6.25 + 6.25
  EXPECT_FLOAT_EQ(dst[0], static_cast<float>(3 / std::sqrt(12.5)));
}

// A pair is a complex number, turned by position * frequency.
TEST(Rope, TurnsPairsOfEitherKind) {
  const std::vector<double> frequencies = {1, 0.25, 0.001};
  std::vector<float> table(5 * 6);
  fill_rope_table(frequencies, 5, table.data());
  std::vector<float> adjacent = {1, 2, 3, 4, 5, 6};
  std::vector<float> split = {1, 3, 5, 2, 4, 6};
  rotate(&table[4 * 6], 6, true, adjacent.data());
  rotate(&table[4 * 6], 6, false, split.data());
  for (int i = 0; i < 3; ++i) {
    const std::complex<double> pair(2 * i + 1, 2 * i + 2);
    const auto turned = pair * std::polar(1.0, 4 * frequencies[static_cast<size_t>(i)]);
    EXPECT_NEAR(adjacent[static_cast<size_t>(2 * i)], turned.real(), 1e-6 * std::abs(pair));
    EXPECT_NEAR(adjacent[static_cast<size_t>(2 * i + 1)], turned.imag(), 1e-6 * std::abs(pair));
    EXPECT_EQ(split[static_cast<size_t>(i)], adjacent[static_cast<size_t>(2 * i)]);
    EXPECT_EQ(split[static_cast<size_t>(i + 3)], adjacent[static_cast<size_t>(2 * i + 1)]);
  }
}

TEST(Swiglu, GatesAndStaysFiniteFarOut) {
  std::vector<float> gate = {0, 1, -200, 200};
  const std::vector<float> up = {5, 2, 3, 0.5};
  swiglu(up.data(), 4, gate.data());
  EXPECT_EQ(gate[0], 0);
  EXPECT_FLOAT_EQ(gate[1], static_cast<float>(2 / (1 + std::exp(-1.0))));
  EXPECT_EQ(gate[2], 0);
  EXPECT_FLOAT_EQ(gate[3], 100);
}

}  // namespace
}  // namespace ullage::session
