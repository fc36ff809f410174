#include "model/tokenizer_json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "model/pretokenizer.h"
#include "model/tokenizer.h"

namespace ullage::model {
namespace {

using nlohmann::json;

json small() {
  return json::parse(R"({
    "added_tokens": [{"id": 3, "content": "<end>", "special": true},
                     {"id": 4, "content": "<call>", "special": false},
                     {"id": 0, "content": "a", "special": false}],
    "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
    "post_processor": null,
    "decoder": {"type": "ByteLevel", "add_prefix_space": true},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
              "byte_fallback": false, "vocab": {"a": 0, "ab": 2, "b": 1}, "merges": ["a b"]}
  })");
}

Result<TokenizerData> parsed(const json& document) {
  return parse_tokenizer_json(document.dump(), "t.json");
}

// Sets `pointer` (RFC 6901) to `value`; a status of the changed document.
Status with(const char* pointer, const char* value) {
  json document = small();
  document[json::json_pointer(pointer)] = json::parse(value);
  return parsed(document).status();
}

TEST(TokenizerJson, ReadsASmallDocument) {
  const auto data = parsed(small());
  ASSERT_TRUE(data) << data.status().to_string();
  EXPECT_EQ(data->tokens, (std::vector<std::string>{"a", "b", "ab", "<end>", "<call>"}));
  EXPECT_EQ(data->token_types, (std::vector<int32_t>{kUserDefinedToken, kNormalToken, kNormalToken,
                                                     kControlToken, kUserDefinedToken}));
  EXPECT_EQ(data->merges, (std::vector<std::string>{"a b"}));
  EXPECT_EQ(data->patterns, (std::vector<std::string>{std::string(kGpt2Pattern)}));
  EXPECT_EQ(data->ignore_merges, false);
  EXPECT_EQ(data->bos_id, -1);
  EXPECT_TRUE(Tokenizer::create(*data));
}

TEST(TokenizerJson, ReadsMergesAsPairs) {
  json document = small();
  document["model"]["merges"] = json::parse(R"([["a", "b"]])");
  document["model"]["ignore_merges"] = true;
  const auto data = parsed(document);
  ASSERT_TRUE(data) << data.status().to_string();
  EXPECT_EQ(data->merges, (std::vector<std::string>{"a b"}));
  EXPECT_EQ(data->ignore_merges, true);
}

TEST(TokenizerJson, ReadsASequenceOfPreTokenizers) {
  json document = small();
  document["pre_tokenizer"] = json::parse(R"({"type": "Sequence", "pretokenizers": [
      {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": false},
      {"type": "Digits", "individual_digits": true}, {"type": "Digits", "individual_digits": false},
      {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})");
  const auto data = parsed(document);
  ASSERT_TRUE(data) << data.status().to_string();
  EXPECT_EQ(data->patterns, (std::vector<std::string>{"x+", R"(\p{N})", R"(\p{N}+)"}));

  document["pre_tokenizer"]["pretokenizers"] =
      json::parse(R"([{"type": "ByteLevel", "use_regex": false}])");
  EXPECT_EQ(parsed(document)->patterns, std::vector<std::string>());
}

TEST(TokenizerJson, ReadsTheTemplate) {
  json document = small();
  document["post_processor"] = json::parse(R"({"type": "Sequence", "processors": [
      {"type": "ByteLevel", "trim_offsets": false},
      {"type": "TemplateProcessing",
       "single": [{"SpecialToken": {"id": "<call>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                  {"SpecialToken": {"id": "<end>", "type_id": 0}}],
       "special_tokens": {"<end>": {"id": "<end>", "ids": [3]}, "<call>": {"id": "<call>", "ids": [4]}}}]})");
  const auto data = parsed(document);
  ASSERT_TRUE(data) << data.status().to_string();
  EXPECT_EQ(data->add_bos, true);
  EXPECT_EQ(data->bos_id, 4);
  EXPECT_EQ(data->add_eos, true);
  EXPECT_EQ(data->eos_id, 3);
}

TEST(TokenizerJson, RefusesMalformedDocuments) {
  const std::string whole = small().dump();
  for (const std::string& text :
       {std::string(), std::string("{"), whole.substr(0, whole.size() / 2), whole + "x",
        std::string("{\"a\":\"\xff\"}"), std::string(100000, '['),
        "{\"model\":" + std::string(100000, '[')}) {
    EXPECT_EQ(parse_tokenizer_json(text, "t.json").status().code(), kModelBadJson)
        << text.substr(0, 40);
  }
  EXPECT_EQ(parse_tokenizer_json("{\"a\":1,\"a\":2}", "t.json").status().code(), kModelDuplicate);
  EXPECT_EQ(parse_tokenizer_json("[]", "t.json").status().code(), kModelTokenizer);
}

TEST(TokenizerJson, RefusesWhatIsNotReadByName) {
  struct Case {
    const char *pointer, *value, *named;
  };
  for (
      const auto& [pointer, value, named] : {
          Case{"/model", "null", "no model"},
          {"/model/type", R"("Unigram")", "'Unigram'"},
          {"/model/dropout", "0.1", "model.dropout"},
          {"/model/continuing_subword_prefix", R"("##")", "'##'"},
          {"/model/end_of_word_suffix", R"("</w>")", "'</w>'"},
          {"/model/byte_fallback", "true", "byte_fallback"},
          {"/added_tokens/0/lstrip", "true", "'<end>' with lstrip"},
          {"/added_tokens/1/rstrip", "true", "'<call>' with rstrip"},
          {"/added_tokens/1/single_word", "true", "single_word"},
          {"/normalizer", R"({"type": "Lowercase"})", "'Lowercase'"},
          {"/normalizer",
           R"({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Replace"}]})",
           "'Replace'"},
          {"/pre_tokenizer", "null", "without ByteLevel"},
          {"/pre_tokenizer/type", R"("Whitespace")", "'Whitespace'"},
          {"/pre_tokenizer/add_prefix_space", "true", "add_prefix_space"},
          {"/pre_tokenizer",
           R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]})",
           "after ByteLevel"},
          {"/pre_tokenizer",
           R"({"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated"})", "Split"},
          {"/pre_tokenizer",
           R"({"type": "Split", "pattern": {"Regex": " "}, "behavior": "Removed"})", "'Removed'"},
          {"/pre_tokenizer",
           R"({"type": "Split", "pattern": {"Regex": " "}, "behavior": "Isolated", "invert": true})",
           "inverted"},
          {"/post_processor", R"({"type": "BertProcessing"})", "'BertProcessing'"},
          {"/post_processor", R"({"type": "TemplateProcessing", "single": []})", "template"},
          {"/post_processor",
           R"({"type": "TemplateProcessing", "single": [{"Sequence": {}}, {"Sequence": {}}]})",
           "template"},
          {"/decoder", R"({"type": "WordPiece"})", "'WordPiece'"},
      }) {
    const Status status = with(pointer, value);
    EXPECT_EQ(status.code(), kModelTokenizer) << pointer << " " << value;
    EXPECT_NE(status.message().find(named), std::string::npos) << status.message();
    EXPECT_TRUE(status.message().starts_with("t.json: ")) << status.message();
  }
}

TEST(TokenizerJson, AcceptsNfcWithoutApplyingIt) {
  json document = small();
  document["normalizer"] = {{"type", "NFC"}};
  EXPECT_TRUE(parsed(document));
}

TEST(TokenizerJson, RefusesBadFields) {
  for (const auto& [pointer, value] : std::initializer_list<std::pair<const char*, const char*>>{
           {"/model/vocab", "[]"},
           {"/model/vocab", "null"},
           {"/model/merges", "{}"},
           {"/model/merges", "[1]"},
           {"/model/merges", R"([["a"]])"},
           {"/model/merges", R"([["a", "b", "c"]])"},
           {"/model/merges", R"([["a", 1]])"},
           {"/added_tokens", "{}"},
           {"/added_tokens", "[1]"},
           {"/added_tokens/0/content", "null"}}) {
    EXPECT_EQ(with(pointer, value).code(), kModelBadField) << pointer << " " << value;
  }
}

TEST(TokenizerJson, RefusesIdsOutOfRangeOrTwice) {
  for (const char* id :
       {"-1", "5", "1.0", "1e2", "null", "\"1\"", "4294967295", "18446744073709551615"}) {
    EXPECT_EQ(with("/model/vocab/ab", id).code(), kModelBadValue) << id;
    EXPECT_EQ(with("/added_tokens/0/id", id).code(), kModelBadValue) << id;
  }
  EXPECT_EQ(with("/model/vocab/ab", "0").code(), kModelDuplicate);
  EXPECT_EQ(with("/added_tokens/0/id", "0").code(), kModelDuplicate);
  EXPECT_EQ(with("/added_tokens/2/id", "3").code(), kModelDuplicate);
  json document = small();  // one text at two ids is for Tokenizer::create to find
  document["added_tokens"][1]["content"] = "<end>";
  EXPECT_EQ(Tokenizer::create(*parsed(document)).status().code(), kModelDuplicate);
}

TEST(TokenizerJson, RefusesFilesThatCannotBeRead) {
  EXPECT_EQ(read_tokenizer_json("/nonexistent/tokenizer.json").status().code(), kModelUnreadable);
  EXPECT_EQ(read_tokenizer_json(ULLAGE_TEST_DATA).status().code(), kModelUnreadable);
}

}  // namespace
}  // namespace ullage::model
