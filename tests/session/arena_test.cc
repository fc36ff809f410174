#include "session/arena.h"

#include <gtest/gtest.h>

#include <limits>

namespace ullage::session {
namespace {

TEST(Arena, SlicesAreAlignedZeroedAndApart) {
  ArenaPlan plan;
  const size_t a = plan.book("a", 3, 4);
  const size_t none = plan.book("none", 0, 4);
  const size_t b = plan.book("b", 17, 4);
  EXPECT_EQ(plan.bytes(), 64 + 0 + 128);
  EXPECT_EQ(plan.bookings()[b].purpose, "b");
  auto arena = Arena::create(plan);
  ASSERT_TRUE(arena.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(arena->slice<float>(a)) % 64, 0);
  EXPECT_EQ(arena->slice<std::byte>(b) - arena->slice<std::byte>(a), 64);
  EXPECT_EQ(arena->slice<std::byte>(none), arena->slice<std::byte>(b));
  for (int i = 0; i < 17; ++i) EXPECT_EQ(arena->slice<float>(b)[i], 0);
}

TEST(Arena, RefusesWhatCannotBe) {
  const int64_t max = std::numeric_limits<int64_t>::max();
  for (const auto& [count, bytes] :
       {std::pair<int64_t, int64_t>{max, 2}, {-1, 4}, {1, -4}, {max, 1}}) {
    ArenaPlan plan;
    plan.book("too much", count, bytes);
    EXPECT_TRUE(plan.overflowed());
    EXPECT_EQ(Arena::create(plan).status().code(), kResidentDimensionTooLarge);
  }
  ArenaPlan sum;
  sum.book("half", max / 2, 1);
  sum.book("half", max / 2, 1);
  sum.book("the straw", 64, 1);
  EXPECT_TRUE(sum.overflowed());
  ArenaPlan huge;  // countable, but no system has it
  huge.book("an exbibyte", int64_t{1} << 60, 1);
  EXPECT_EQ(Arena::create(huge).status().code(), kResidentDimensionTooLarge);
}

}  // namespace
}  // namespace ullage::session
