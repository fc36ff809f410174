#include "model/utf8.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "model/byte_alphabet.h"

namespace ullage::model {
namespace {

std::string utf8_of(uint32_t code_point) {
  const auto byte = [](uint32_t value) { return static_cast<char>(value); };
  if (code_point < 0x80) return {byte(code_point)};
  if (code_point < 0x800) return {byte(0xc0 | code_point >> 6), byte(0x80 | (code_point & 0x3f))};
  if (code_point < 0x10000) {
    return {byte(0xe0 | code_point >> 12), byte(0x80 | (code_point >> 6 & 0x3f)),
            byte(0x80 | (code_point & 0x3f))};
  }
  return {byte(0xf0 | code_point >> 18), byte(0x80 | (code_point >> 12 & 0x3f)),
          byte(0x80 | (code_point >> 6 & 0x3f)), byte(0x80 | (code_point & 0x3f))};
}

TEST(Utf8, AcceptsEveryScalarValueAndHoldsBackEveryPrefixOfOne) {
  for (uint32_t c = 0; c < 0x110000; ++c) {
    const std::string text = utf8_of(c);
    const bool surrogate = c >= 0xd800 && c < 0xe000;
    ASSERT_EQ(utf8_sequence_bytes(text + "x"), surrogate ? 0 : text.size()) << std::hex << c;
    if (surrogate) continue;
    for (size_t n = 0; n <= text.size(); ++n) {
      const std::string cut = "a\x80" + text.substr(0, n);
      ASSERT_EQ(utf8_unfinished_tail_bytes(cut), n == text.size() ? 0 : n) << std::hex << c;
    }
  }
}

TEST(Utf8, RefusesWhatIsNotAScalarValue) {
  for (const std::string text :
       {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xe2\x82", "\xe2\x82(", "\xf0\x9f\x98",
        ""}) {
    EXPECT_EQ(utf8_sequence_bytes(text), 0) << testing::PrintToString(text);
  }
}

TEST(Utf8, ValidPrefixEndsAtTheFirstIllFormedByte) {
  for (size_t before = 0; before < 20; ++before) {  // around the eight-byte steps
    const std::string good = std::string(before, 'a') + "\u00e9\u4e00";
    EXPECT_EQ(utf8_valid_prefix_bytes(good), good.size());
    EXPECT_EQ(utf8_valid_prefix_bytes(good + "\xe4\xb8"), good.size());
    EXPECT_EQ(utf8_valid_prefix_bytes(good + "\xff tail of some length"), good.size());
  }
  EXPECT_EQ(utf8_valid_prefix_bytes(""), 0);
}

TEST(ByteAlphabet, SpellsAll256Bytes) {
  std::string all;
  for (uint32_t c = 0; c < 0x400; ++c) {
    if (const auto bytes = bytes_of_alphabet(utf8_of(c))) {
      ASSERT_EQ(bytes->size(), 1);
      EXPECT_EQ(all.find(*bytes), all.npos);
      all += *bytes;
    }
  }
  EXPECT_EQ(all.size(), 256);
  EXPECT_EQ(bytes_of_alphabet("\u0120na\u00c3\u00afve\u010a"), " na\u00efve\n");
  EXPECT_EQ(bytes_of_alphabet(""), "");
}

TEST(ByteAlphabet, RefusesOtherText) {
  for (const std::string text : {" ", "a b", "\n", "\x7f", "\u00ad", "\u00a0", "\u0144", "\u2581a",
                                 "a\u4e00", "\xc4", "\xc4(", "\xff"}) {
    EXPECT_EQ(bytes_of_alphabet(text), std::nullopt) << testing::PrintToString(text);
  }
}

}  // namespace
}  // namespace ullage::model
