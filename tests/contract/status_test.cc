#include "ullage/status.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "ullage/dtype.h"

namespace ullage {
namespace {

TEST(StatusLedger, EveryCodeHasAUniqueNameWithinItsFamilyAndAMeaning) {
  std::set<std::string> names;
#define ULLAGE_CHECK(code, symbol, name, meaning)     \
  EXPECT_TRUE(names.insert(name).second) << name;     \
  EXPECT_EQ(status_name(code), name);                 \
  EXPECT_FALSE(status_meaning(code).empty()) << name; \
  EXPECT_EQ(Status(symbol).ok(), (code) % 20 == 0) << name;
  ULLAGE_STATUS_LEDGER(ULLAGE_CHECK)
#undef ULLAGE_CHECK
  EXPECT_EQ(status_name(579), "unknown_status");
  EXPECT_EQ(status_name(-2147483647 - 1), "unknown_status");
}

TEST(Status, SaysCodeNameAndOffendingValue) {
  EXPECT_EQ(Status(kLossBadChunk, "chunk 3 needs 4").to_string(),
            "587 chunk_exceeds_logit_budget: chunk 3 needs 4");
}

// All 65,536 values of each 16-bit type survive a round trip through float, NaN stays NaN.
TEST(DType, SixteenBitTypesRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const BF16 b{static_cast<uint16_t>(bits)};
    const F16 h{static_cast<uint16_t>(bits)};
    if (b.to_float() == b.to_float()) {
      ASSERT_EQ(BF16::from_float(b.to_float()).bits, bits);
    } else {
      const float nan = BF16::from_float(b.to_float()).to_float();
      ASSERT_NE(nan, nan);
    }
    if (h.to_float() == h.to_float()) {
      ASSERT_EQ(F16::from_float(h.to_float()).bits, bits);
    } else {
      const float nan = F16::from_float(h.to_float()).to_float();
      ASSERT_NE(nan, nan);
    }
  }
}

// g++'s _Float16 conversion is an independent implementation of the same rounding.
TEST(DType, F16RoundsAsTheCompilerDoes) {
  uint32_t word = 12345;
  for (int i = 0; i < 2000000; ++i) {
    word = word * 1664525u + 1013904223u;
    const float value = std::bit_cast<float>(word);
    if (value != value) continue;
    ASSERT_EQ(F16::from_float(value).bits, std::bit_cast<uint16_t>(static_cast<_Float16>(value)))
        << value;
  }
}

}  // namespace
}  // namespace ullage
