#include "model/tokenizer.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ullage::model {
namespace {

using Ids = std::vector<int32_t>;
using nlohmann::json;

constexpr const char* kFixtures[] = {"gpt2", "smollm", "qwen2", "llama3"};

std::string path_of(const std::string& name) { return ULLAGE_TEST_DATA "/tokenizer/" + name; }

json read_json(const std::string& name) { return json::parse(std::ifstream(path_of(name))); }

Tokenizer fixture(const std::string& name) {
  auto tokenizer = Tokenizer::from_json_file(path_of(name + ".json"));
  EXPECT_TRUE(tokenizer) << tokenizer.status().to_string();
  return *tokenizer;
}

void expect_cases(const Tokenizer& tokenizer, const json& cases) {
  for (const json& example : cases) {
    const auto text = example["text"].get<std::string>();
    for (const bool parse_special : {false, true}) {
      const auto ids = tokenizer.encode(text, parse_special);
      ASSERT_TRUE(ids) << ids.status().to_string();
      EXPECT_EQ(*ids, example[parse_special ? "special" : "plain"].get<Ids>()) << text;
      EXPECT_EQ(tokenizer.decode(*ids), text);
    }
  }
}

TEST(Tokenizer, AgreesWithHuggingFaceOnAwkwardTexts) {
  for (const std::string name : kFixtures) {
    SCOPED_TRACE(name);
    expect_cases(fixture(name), read_json(name + "_cases.json"));
  }
}

// SmolLM2's own vocabulary as its GGUF has it, less what has no say in the fixture's texts.
TokenizerData smollm2(const json& stored) {
  TokenizerData data;
  for (int64_t id = 0; id < stored["n_tokens"].get<int64_t>(); ++id) {
    data.tokens.push_back("left out " + std::to_string(id));
  }
  data.token_types.assign(data.tokens.size(), kUnusedToken);
  for (const auto& [text, id] : stored["tokens"].items()) {
    data.tokens[id.get<size_t>()] = text;
    data.token_types[id.get<size_t>()] = kNormalToken;
  }
  for (const json& id : stored["control"]) data.token_types[id.get<size_t>()] = kControlToken;
  data.merges = stored["merges"].get<std::vector<std::string>>();
  data.pre = stored["pre"].get<std::string>();
  data.bos_id = 1;
  data.eos_id = 2;
  data.add_bos = false;
  return data;
}

TEST(Tokenizer, AgreesWithHuggingFaceOnSmolLm2) {
  const json stored = read_json("smollm2.json");
  const auto tokenizer = Tokenizer::create(smollm2(stored));
  ASSERT_TRUE(tokenizer) << tokenizer.status().to_string();
  EXPECT_EQ(tokenizer->size(), 49152);
  expect_cases(*tokenizer, stored["cases"]);
  EXPECT_EQ(*tokenizer->encode("It is a truth universally acknowledged", false),
            (Ids{1589, 314, 253, 4569, 21902, 14494}));
}

TEST(Tokenizer, RefusesBytesTheVocabularyHasNoTokenFor) {
  const json stored = read_json("smollm2.json");
  const auto tokenizer = Tokenizer::create(smollm2(stored));
  ASSERT_TRUE(tokenizer);
  const auto missing = stored["missing_bytes"].get<std::vector<int>>();
  for (int byte = 0; byte < 256; ++byte) {
    const std::string text = {'a', ' ', static_cast<char>(byte)};
    const auto ids = tokenizer->encode(text, false);
    const bool is_missing = std::find(missing.begin(), missing.end(), byte) != missing.end();
    EXPECT_EQ(ids.ok(), !is_missing) << byte;
    if (!ids) {
      EXPECT_EQ(ids.status().code(), kModelBadValue);
      EXPECT_NE(ids.status().message().find("at offset 2 "), std::string::npos);
    }
  }
  EXPECT_NE(
      tokenizer->encode("<|im_end|>x\x04", true).status().message().find("byte 0x04 at offset 11 "),
      std::string::npos);
}

RC_GTEST_PROP(Tokenizer, AnyBytesRoundTrip, ()) {
  static const std::vector<Tokenizer> all = {fixture("gpt2"), fixture("smollm"), fixture("qwen2"),
                                             fixture("llama3")};
  const auto parts = *rc::gen::container<std::vector<std::string>>(rc::gen::oneOf(
      rc::gen::arbitrary<std::string>(),
      rc::gen::container<std::string>(rc::gen::arbitrary<char>()),
      rc::gen::element<std::string>("<|im_end|>", "<|im", "<tool_call>", "'ll", " the", "\u00e9",
                                    "\U0001f600", "\r\n", "  ", "\xf0\x9f", "1234")));
  std::string text;
  for (const std::string& part : parts) text += part;
  for (const Tokenizer& tokenizer : all) {
    for (const bool parse_special : {false, true}) {
      const auto ids = tokenizer.encode(text, parse_special);
      RC_ASSERT(ids.ok());
      RC_ASSERT(tokenizer.decode(*ids) == text);
      StreamDecoder stream(tokenizer);
      std::string streamed;
      for (const int32_t id : *ids) streamed += stream.push(id);
      RC_ASSERT(streamed + stream.flush() == text);
    }
  }
}

TEST(Tokenizer, AllBytesRoundTripAloneAndTogether) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  for (const std::string name : kFixtures) {
    const Tokenizer tokenizer = fixture(name);
    for (const char c : all) {
      EXPECT_EQ(tokenizer.encode({&c, 1}, true)->size(), 1);
      EXPECT_EQ(tokenizer.decode(*tokenizer.encode({&c, 1}, true)), std::string(1, c));
    }
    EXPECT_EQ(tokenizer.decode(*tokenizer.encode(all, true)), all);
  }
}

TEST(Tokenizer, EncodesWordsOfAMegabyte) {
  const Tokenizer tokenizer = fixture("qwen2");
  for (const std::string unit : {"the", "\u4e00", "=", " ", "\xff"}) {
    std::string text;
    while (text.size() < 1 << 20) text += unit;
    const auto ids = tokenizer.encode(text, true);
    ASSERT_TRUE(ids) << ids.status().to_string();
    EXPECT_EQ(tokenizer.decode(*ids), text);
  }
}

TEST(Tokenizer, ControlTokensAreFoundOnlyWhereAskedFor) {
  const Tokenizer tokenizer = fixture("smollm");
  const int32_t end = *tokenizer.special_id("<|im_end|>");
  const int32_t call = *tokenizer.special_id("<tool_call>");
  EXPECT_TRUE(tokenizer.is_control(end));
  EXPECT_FALSE(tokenizer.is_control(call));
  EXPECT_FALSE(tokenizer.is_control(-1));
  EXPECT_FALSE(tokenizer.is_control(static_cast<int32_t>(tokenizer.size())));
  EXPECT_EQ(tokenizer.special_id("the"), std::nullopt);
  EXPECT_EQ(*tokenizer.encode("<|im_end|>", true), (Ids{end}));
  EXPECT_GT(tokenizer.encode("<|im_end|>", false)->size(), 4u);
  EXPECT_EQ(*tokenizer.encode("<tool_call>", false), (Ids{call}));
}

TEST(Tokenizer, IdsWithoutATokenHaveNoText) {
  const Tokenizer tokenizer = fixture("gpt2");
  const auto past = static_cast<int32_t>(tokenizer.size());
  EXPECT_EQ(tokenizer.decode(Ids{-1, past, INT32_MAX, INT32_MIN}), "");
  EXPECT_EQ(tokenizer.decode({}), "");
}

TEST(Tokenizer, TemplateSaysWhetherTheModelExpectsBos) {
  const Tokenizer llama3 = fixture("llama3");
  EXPECT_TRUE(llama3.add_bos());
  EXPECT_FALSE(llama3.add_eos());
  EXPECT_EQ(llama3.bos_id(), llama3.special_id("<|endoftext|>"));
  EXPECT_FALSE(fixture("gpt2").add_bos());
  EXPECT_EQ(fixture("gpt2").bos_id(), std::nullopt);
}

TEST(StreamDecoder, NeverSplitsASequence) {
  const Tokenizer tokenizer = fixture("gpt2");
  const auto byte = [&](int value) {
    const char c = static_cast<char>(value);
    return tokenizer.encode({&c, 1}, false)->at(0);
  };
  StreamDecoder stream(tokenizer);
  EXPECT_EQ(stream.push(byte('a')), "a");
  for (const int part : {0xf0, 0x9f, 0x98}) EXPECT_EQ(stream.push(byte(part)), "");
  EXPECT_EQ(stream.push(byte(0x80)), "\U0001f600");
  // What begins no sequence passes at once; what an interrupted one left is handed out with the
  // next.
  EXPECT_EQ(stream.push(byte(0x80)), "\x80");
  EXPECT_EQ(stream.push(byte(0xe4)), "");
  EXPECT_EQ(stream.push(byte('b')),
            "\xe4"
            "b");
  EXPECT_EQ(stream.push(byte(0xe4)), "");
  EXPECT_EQ(stream.flush(), "\xe4");
  EXPECT_EQ(stream.flush(), "");
}

// A vocabulary of the letters a, b and c, of "ab", and of one control token.
TokenizerData letters() {
  TokenizerData data;
  data.tokens = {"a", "b", "c", "ab", "<end>"};
  data.merges = {"a b"};
  data.token_types = {1, 1, 1, 1, 3};
  data.pre = "gpt-2";
  return data;
}

template <class Change>
Status refused(Change change) {
  TokenizerData data = letters();
  change(data);
  return Tokenizer::create(data).status();
}

TEST(TokenizerCreate, AcceptsASmallVocabulary) {
  const auto tokenizer = Tokenizer::create(letters());
  ASSERT_TRUE(tokenizer) << tokenizer.status().to_string();
  EXPECT_EQ(*tokenizer->encode("abcab<end>", true), (Ids{3, 2, 3, 4}));
  EXPECT_EQ(tokenizer->bos_id(), std::nullopt);
}

TEST(TokenizerCreate, MergesAreIgnoredForWholePiecesWhereThePreTokenizerSaysSo) {
  TokenizerData data = letters();
  data.tokens.push_back("cab");
  data.token_types.push_back(kNormalToken);
  EXPECT_EQ(*Tokenizer::create(data)->encode("cab", false), (Ids{2, 3}));
  data.pre = "llama-bpe";
  EXPECT_EQ(*Tokenizer::create(data)->encode("cab", false), (Ids{5}));
  data.ignore_merges = false;
  EXPECT_EQ(*Tokenizer::create(data)->encode("cab", false), (Ids{2, 3}));
}

TEST(TokenizerCreate, NoneIsMinusOneOrAllOnes) {
  TokenizerData data = letters();
  data.eos_id = 4294967295;
  data.bos_id = 4;
  data.add_bos = data.add_eos = true;
  const auto tokenizer = Tokenizer::create(data);
  ASSERT_TRUE(tokenizer);
  EXPECT_EQ(tokenizer->eos_id(), std::nullopt);
  EXPECT_EQ(tokenizer->bos_id(), 4);
  EXPECT_TRUE(tokenizer->add_bos());
  EXPECT_FALSE(tokenizer->add_eos());
}

TEST(TokenizerCreate, RefusesOtherKinds) {
  EXPECT_EQ(refused([](auto& data) { data.model = "llama"; }).code(), kModelTokenizer);
  EXPECT_EQ(refused([](auto& data) { data.pre = "tekken"; }).code(), kModelTokenizer);
  EXPECT_EQ(refused([](auto& data) { data.patterns = {"("}; }).code(), kModelTokenizer);
  EXPECT_EQ(refused([](auto& data) { data.token_types[0] = kByteToken; }).code(), kModelTokenizer);
  EXPECT_EQ(refused([](auto& data) { data = {}; }).code(), kModelTokenizer);
}

TEST(TokenizerCreate, RefusesDuplicates) {
  const Status token = refused([](auto& data) { data.tokens[2] = "a"; });
  EXPECT_EQ(token.code(), kModelDuplicate);
  EXPECT_EQ(token.message(), "tokens 0 and 2 are both 'a'");
  EXPECT_EQ(refused([](auto& data) { data.merges = {"a b", "a b"}; }).code(), kModelDuplicate);
}

TEST(TokenizerCreate, RefusesBadValues) {
  for (const int64_t id : {int64_t{-2}, int64_t{5}, int64_t{4294967294}, INT64_MAX, INT64_MIN}) {
    EXPECT_EQ(refused([id](auto& data) { data.bos_id = id; }).code(), kModelBadValue) << id;
    EXPECT_EQ(refused([id](auto& data) { data.eos_id = id; }).code(), kModelBadValue) << id;
  }
  for (const int32_t type : {0, 7, -1, INT32_MIN}) {
    EXPECT_EQ(refused([type](auto& data) { data.token_types[1] = type; }).code(), kModelBadValue);
  }
  EXPECT_EQ(refused([](auto& data) { data.token_types.pop_back(); }).code(), kModelBadValue);
}

TEST(TokenizerCreate, RefusesMergesThatDoNotJoinTokens) {
  for (const char* merge : {"", "a", "a  b", "a b c", " a", "a x", "x a", "b a"}) {
    const Status status = refused([merge](auto& data) { data.merges = {merge}; });
    EXPECT_EQ(status.code(), kModelBadValue) << merge;
    EXPECT_NE(status.message().find("'" + std::string(merge) + "'"), std::string::npos);
  }
  // Outside the byte alphabet a text stands for its own bytes, so this would not decode to "a" +
  // 0xe9.
  const Status status = refused([](auto& data) {
    data.tokens = {"a", "\u00e9", "a\u00e9"};
    data.token_types = {1, 1, 3};
    data.merges = {"a \u00e9"};
  });
  EXPECT_EQ(status.code(), kModelBadValue);
}

}  // namespace
}  // namespace ullage::model
