#include "model/json_document.h"

#include <gtest/gtest.h>

#include <string>

#include "model/refusal.h"

namespace ullage::model {
namespace {

TEST(Json, ReadsEveryKindOfValue) {
  const auto json = parse_json(
      R"({"n":null,"t":true,"i":-7,"big":9223372036854775807,"r":1.5,"e":1e3,"s":"caf\u00e9 \ud83d\ude00",)"
      R"("a":[1,[],{"x":2}],"":0})",
      "x.json");
  ASSERT_TRUE(json) << json.status().to_string();
  EXPECT_TRUE(json->find("n")->is_null());
  EXPECT_EQ(*json->find("t")->get<bool>(), true);
  EXPECT_EQ(*json->find("i")->get<int64_t>(), -7);
  EXPECT_EQ(*json->find("big")->get<int64_t>(), INT64_MAX);
  EXPECT_EQ(*json->find("r")->get<double>(), 1.5);
  EXPECT_EQ(*json->find("e")->get<double>(), 1000);
  EXPECT_EQ(json->find("e")->get<int64_t>(), nullptr);
  EXPECT_EQ(*json->find("s")->get<std::string>(), "caf\xc3\xa9 \xf0\x9f\x98\x80");
  EXPECT_EQ(*json->find("")->get<int64_t>(), 0);
  EXPECT_EQ(json->find("x"), nullptr);
  const auto& list = *json->find("a")->get<JsonValue::Array>();
  ASSERT_EQ(list.size(), 3u);
  EXPECT_EQ(*list[2].find("x")->get<int64_t>(), 2);
  EXPECT_EQ(list[0].find("x"), nullptr);
}

TEST(Json, RefusesWhatIsNotStrictJsonWithTheByte) {
  expect_refused(parse_json("", "x.json"), kModelBadJson, {"x.json", "byte 1"});
  expect_refused(parse_json("{\"a\":1,}", "x.json"), kModelBadJson, {"byte 8"});
  expect_refused(parse_json("[1,]", "x.json"), kModelBadJson, {"byte 4"});
  expect_refused(parse_json("[1 /* one */]", "x.json"), kModelBadJson, {"byte 4"});
  expect_refused(parse_json("{'a':1}", "x.json"), kModelBadJson, {"byte 2"});
  expect_refused(parse_json("[01]", "x.json"), kModelBadJson, {"byte 3"});
  expect_refused(parse_json("[NaN]", "x.json"), kModelBadJson, {"byte 2"});
  expect_refused(parse_json("{} {}", "x.json"), kModelBadJson, {"byte 4"});
  expect_refused(parse_json("[\"\xc0\xaf\"]", "x.json"), kModelBadJson, {"byte 3"});
  expect_refused(parse_json("[\"\\ud800\"]", "x.json"), kModelBadJson, {"byte"});
  expect_refused(parse_json("[1e999]", "x.json"), kModelBadJson, {"1e999"});
}

// What was read is quoted, but not megabytes or control bytes of it.
TEST(Json, KeepsMessagesShortAndPrintable) {
  const auto refused = parse_json("[\"" + std::string(1 << 20, 'x') + "\x01\"]", "x.json");
  expect_refused(refused, kModelBadJson, {"byte", "..."});
  const auto bad = parse_json("[\"\xff\xfe\"]", "x.json");
  expect_refused(bad, kModelBadJson, {"\\xff"});
}

TEST(Json, RefusesOtherEncodingsByName) {
  expect_refused(parse_json("\xef\xbb\xbf{}", "x.json"), kModelBadJson, {"byte order mark"});
  expect_refused(parse_json(std::string("\xff\xfe{\0}\0", 6), "x.json"), kModelBadJson, {"UTF-16"});
  expect_refused(parse_json(std::string("\xfe\xff\0{\0}", 6), "x.json"), kModelBadJson, {"UTF-16"});
  expect_refused(parse_json(std::string("{\0}\0", 4), "x.json"), kModelBadJson, {"UTF-16"});
  expect_refused(parse_json(std::string("[1,2]\0[", 7), "x.json"), kModelBadJson, {"NUL"});
}

TEST(Json, RefusesAKeyTwice) {
  expect_refused(parse_json(R"({"a":1,"b":{"c":1,"d":2,"c":3}})", "x.json"), kModelDuplicate,
                 {"x.json", "'c'"});
  EXPECT_TRUE(parse_json(R"([{"a":1},{"a":2}])", "x.json"));
}

TEST(Json, BoundsDepthAndSize) {
  const auto nested = [](int depth) {
    return "{\"k\":" + std::string(static_cast<size_t>(depth) - 1, '[') +
           std::string(static_cast<size_t>(depth) - 1, ']') + "}";
  };
  EXPECT_TRUE(parse_json(nested(64), "x.json"));
  expect_refused(parse_json(nested(65), "x.json"), kModelBadJson, {"'k'", "deeper than 64"});
  expect_refused(parse_json(nested(100'000), "x.json"), kModelBadJson, {"deeper than 64"});
  expect_refused(parse_json(std::string(100'000, '['), "x.json"), kModelBadJson,
                 {"deeper than 64"});
  EXPECT_TRUE(parse_json("[1,2,3]", "x.json", {.max_values = 4}));
  expect_refused(parse_json("[1,2,3,4]", "x.json", {.max_values = 4}), kModelBadJson,
                 {"more than 4 values"});
}

}  // namespace
}  // namespace ullage::model
