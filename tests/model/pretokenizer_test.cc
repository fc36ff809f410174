#include "model/pretokenizer.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <string>
#include <vector>

namespace ullage::model {
namespace {

using Pieces = std::vector<std::string>;

PreTokenizer made(const std::vector<std::string>& patterns) {
  auto made = PreTokenizer::create(patterns);
  EXPECT_TRUE(made) << made.status().to_string();
  return *made;
}

PreTokenizer named(std::string_view name) {
  const auto kind = pre_tokenizer_named(name);
  EXPECT_TRUE(kind) << kind.status().to_string();
  return made(kind->patterns);
}

Pieces pieces(const PreTokenizer& pre_tokenizer, std::string_view text) {
  Pieces result;
  const Status status = pre_tokenizer.split(text, [&](std::string_view piece) -> Status {
    result.emplace_back(piece);
    return kModelOk;
  });
  EXPECT_TRUE(status.ok()) << status.to_string();
  return result;
}

TEST(PreTokenizer, Gpt2) {
  const auto gpt2 = named("gpt-2");
  EXPECT_EQ(pieces(gpt2, "I'm 1234  years\n\n old!! "),
            (Pieces{"I", "'m", " 1234", " ", " years", "\n\n", " old", "!!", " "}));
  EXPECT_EQ(pieces(gpt2, "I'M"), (Pieces{"I", "'", "M"}));
  EXPECT_EQ(pieces(gpt2, ""), Pieces{});
  EXPECT_EQ(pieces(named("default"), "a1"), (Pieces{"a", "1"}));
  EXPECT_EQ(pieces(named(""), "a1"), (Pieces{"a", "1"}));
}

TEST(PreTokenizer, SmolLmIsolatesDigitsFirst) {
  // The digit cuts the text before GPT-2's pattern sees it: the space stays alone.
  EXPECT_EQ(pieces(named("smollm"), "in 1984 \u00bdx"),
            (Pieces{"in", " ", "1", "9", "8", "4", " ", "\u00bd", "x"}));
}

TEST(PreTokenizer, Qwen2AndLlama3DifferInDigits) {
  EXPECT_EQ(pieces(named("qwen2"), "I'LL pay$12345,\r\n \n x"),
            (Pieces{"I", "'LL", " pay", "$", "1", "2", "3", "4", "5", ",\r\n", " \n", " x"}));
  EXPECT_EQ(pieces(named("llama-bpe"), "I'LL pay$12345,\r\n \n x"),
            (Pieces{"I", "'LL", " pay", "$", "123", "45", ",\r\n", " \n", " x"}));
}

TEST(PreTokenizer, NamesCarryTheirModelsHabits) {
  EXPECT_TRUE(pre_tokenizer_named("llama-bpe")->ignore_merges);
  EXPECT_TRUE(pre_tokenizer_named("llama-bpe")->add_bos);
  EXPECT_FALSE(pre_tokenizer_named("qwen2")->ignore_merges);
  EXPECT_FALSE(pre_tokenizer_named("smollm")->add_bos);
  const auto unknown = pre_tokenizer_named("tekken");
  EXPECT_EQ(unknown.status().code(), kModelTokenizer);
  EXPECT_NE(unknown.status().message().find("'tekken'"), std::string::npos);
}

TEST(PreTokenizer, WhiteSpaceIsUnicodes) {
  // U+180E was white space until Unicode 6.3, and for PCRE2's \s still is.
  EXPECT_EQ(pieces(made({R"(\s)"}), "a\u180eb\u3000c\u0085d\x1c"),
            (Pieces{"a\u180eb", "\u3000", "c", "\u0085", "d\x1c"}));
  EXPECT_EQ(pieces(made({R"([\S]+)"}), "a\u180eb c"), (Pieces{"a\u180eb", " ", "c"}));
  EXPECT_EQ(pieces(made({R"(\\s)"}), R"(a\sb)"), (Pieces{"a", R"(\s)", "b"}));
}

TEST(PreTokenizer, IllFormedBytesAreAPieceOfTheirOwn) {
  EXPECT_EQ(pieces(named("gpt-2"),
                   "ab\xff\xfe\x80"
                   "cd"),
            (Pieces{"ab", "\xff\xfe\x80", "cd"}));
  EXPECT_EQ(pieces(named("gpt-2"), "\xe4\xb8"), (Pieces{"\xe4\xb8"}));
  // Each side is a text of its own: the spaces before are not followed by anything.
  EXPECT_EQ(pieces(named("gpt-2"),
                   "a  \xc0"
                   " b"),
            (Pieces{"a", "  ", "\xc0", " b"}));
}

TEST(PreTokenizer, MatchesAndStretchesBetweenThemArePieces) {
  EXPECT_EQ(pieces(made({"b+"}), "abbca"), (Pieces{"a", "bb", "ca"}));
  EXPECT_EQ(pieces(made({"b+", "a"}), "aabbca"), (Pieces{"a", "a", "bb", "c", "a"}));
  EXPECT_EQ(pieces(made({}), "any text"), (Pieces{"any text"}));
  // Empty matches cut where they stand, as in Hugging Face's Split.
  EXPECT_EQ(pieces(made({"(?=b)"}), "aabbab"), (Pieces{"aa", "b", "ba", "b"}));
  EXPECT_EQ(pieces(made({"(?=\u00e9)"}), "a\u00e9\u00e9"), (Pieces{"a", "\u00e9", "\u00e9"}));
  EXPECT_EQ(pieces(made({"$"}), "ab"), (Pieces{"ab"}));
}

RC_GTEST_PROP(PreTokenizer, PiecesJoinToTheText, ()) {
  static const std::vector<PreTokenizer> all = {named("gpt-2"), named("smollm"), named("qwen2"),
                                                named("llama-bpe"), made({"(?=a)", "\\s*", "b?"})};
  const auto text = *rc::gen::container<std::string>(rc::gen::oneOf(
      rc::gen::arbitrary<char>(), rc::gen::elementOf(std::string("ab 1'\n\r\t\xc3\xa9"))));
  for (const PreTokenizer& pre_tokenizer : all) {
    std::string joined;
    for (const std::string& piece : pieces(pre_tokenizer, text)) {
      RC_ASSERT(!piece.empty());
      joined += piece;
    }
    RC_ASSERT(joined == text);
  }
}

TEST(PreTokenizer, LongRunsOfOneClassAreOnePiece) {
  for (const char* name : {"gpt-2", "smollm", "qwen2", "llama-bpe"}) {
    for (const char* unit : {"a", "!", " ", "\u00e9"}) {
      std::string text;
      while (text.size() < 3 << 20) text += unit;
      EXPECT_EQ(pieces(named(name), text), (Pieces{text})) << name << " " << unit;
    }
  }
}

TEST(PreTokenizer, RefusesPatternsThatDoNotCompile) {
  for (const char* pattern : {"(", "[a", "a{3,1}", R"(\p{Nonsense})", R"(a\C)", "\xff"}) {
    const auto result = PreTokenizer::create(std::vector<std::string>{pattern});
    EXPECT_EQ(result.status().code(), kModelTokenizer) << pattern;
  }
  EXPECT_EQ(PreTokenizer::create(std::vector<std::string>(17, "a")).status().code(),
            kModelTokenizer);
  EXPECT_TRUE(PreTokenizer::create(std::vector<std::string>(16, "a")));
  const std::vector<std::string> huge = {std::string((1 << 16) + 1, 'a')};
  EXPECT_EQ(PreTokenizer::create(huge).status().code(), kModelTokenizer);
}

TEST(PreTokenizer, RefusesPatternsThatGiveUp) {
  const auto doubling = made({"(a+)+$"});  // tries every way to part the letters
  const Status status = doubling.split(std::string(40, 'a') + "b",
                                       [](std::string_view) -> Status { return kModelOk; });
  EXPECT_EQ(status.code(), kModelTokenizer);
  EXPECT_NE(status.message().find("'(a+)+$'"), std::string::npos) << status.message();
}

TEST(PreTokenizer, StopsWhereTheSinkRefuses) {
  int calls = 0;
  const Status status = named("gpt-2").split("a b c", [&](std::string_view piece) -> Status {
    ++calls;
    return piece == " b" ? Status(kModelBadValue, "enough") : Status(kModelOk);
  });
  EXPECT_EQ(status.code(), kModelBadValue);
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace ullage::model
