// The comparator itself: arrays that are known to be bad must not pass.
#include "support/compare.h"

#include <limits>
#include <vector>

namespace ullage::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

const std::vector<double> kGood = {1, -2, 3, -4, 0.5, -0.25};

TEST(Compare, PassesWhatIsCloseAndSaysHowClose) {
  std::vector<double> near = kGood;
  near[3] += 0.005;
  const Comparison result = compare(near, kGood, 0.01);
  EXPECT_TRUE(result.ok);
  EXPECT_NEAR(result.fraction, 0.5, 1e-9);
  EXPECT_TRUE(compare(kGood, kGood, 0.0).ok);
}

TEST(Compare, FailsKnownBadArrays) {
  for (size_t i = 0; i < kGood.size(); ++i) {
    std::vector<double> bad = kGood;
    bad[i] = -bad[i];
    EXPECT_FALSE(compare(bad, kGood, 0.01).ok) << "sign flip " << i;
    bad[i] = kGood[i] + 0.02;
    EXPECT_FALSE(compare(bad, kGood, 0.01).ok) << "one wrong column " << i;
    bad[i] = kNan;
    EXPECT_FALSE(compare(bad, kGood, 0.01).ok) << "NaN " << i;
    bad[i] = kInf;
    EXPECT_FALSE(compare(bad, kGood, kInf).ok) << "infinity " << i;
  }
  EXPECT_FALSE(compare({{-500.0}}, {{-5.0}}, 0.1).ok) << "both negative";
  EXPECT_FALSE(compare(std::vector<double>(6, kNan), kGood, 0.01).ok) << "stale poison";
  EXPECT_FALSE(compare(std::vector<double>(6, 0), kGood, 0.01).ok) << "zeros";
  EXPECT_FALSE(compare({{1.0, 2.0}}, {{1.0}}, 0.1).ok) << "sizes";
}

TEST(Compare, PlacesOfNanAndInfinityAreCompared) {
  const std::vector<double> expected = {1, kNan, -kInf};
  EXPECT_TRUE(compare({{1.0, kNan, -kInf}}, expected, 0.1).ok);
  EXPECT_FALSE(compare({{1.0, 0.0, -kInf}}, expected, 0.1).ok);
  EXPECT_FALSE(compare({{1.0, kNan, kInf}}, expected, 0.1).ok);
}

TEST(Compare, ABoundThatPassesZerosIsVacuous) {
  EXPECT_FALSE(compare({{0.1, 0.2}}, {{0.1, 0.2}}, 0.5).ok);
  EXPECT_FALSE(compare({{0.1, 0.2}}, {{0.1, 0.2}}, kNan).ok);
  EXPECT_TRUE(compare({{0.0, 0.0}}, {{0.0, 0.0}}, 0.5).ok);
}

}  // namespace
}  // namespace ullage::test
