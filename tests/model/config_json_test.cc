#include "model/config_json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>

#include "model/refusal.h"

namespace ullage::model {
namespace {

// A config.json as key -> JSON text, so that each test changes what it is about.
using Fields = std::map<std::string, std::string>;

Fields llama() {
  return {{"model_type", "\"llama\""},  {"hidden_size", "64"},
          {"intermediate_size", "128"}, {"num_hidden_layers", "2"},
          {"num_attention_heads", "4"}, {"num_key_value_heads", "2"},
          {"vocab_size", "1000"},       {"max_position_embeddings", "2048"},
          {"rms_norm_eps", "1e-05"}};
}

std::string text_of(const Fields& fields) {
  std::string text = "{";
  for (const auto& [key, value] : fields) {
    text += (text.size() > 1 ? ",\"" : "\"") + key + "\":" + value;
  }
  return text + "}";
}

Result<Config> parse(const Fields& fields) {
  return parse_config_json(text_of(fields), "config.json");
}

Fields with(Fields fields, const Fields& changes) {
  for (const auto& [key, value] : changes) fields[key] = value;
  return fields;
}

Fields without(Fields fields, const std::string& key) {
  fields.erase(key);
  return fields;
}

Config accepted(const Fields& fields) {
  auto config = parse(fields);
  EXPECT_TRUE(config) << config.status().to_string();
  return config ? *std::move(config) : Config{};
}

TEST(ConfigJson, ReadsWhatOldLlamaFilesLeaveOut) {
  const Config c = accepted(without(llama(), "num_key_value_heads"));
  EXPECT_EQ(c.family, Family::kLlama);
  EXPECT_EQ(c.h_kv, 4);
  EXPECT_EQ(c.d_head, 16);
  EXPECT_EQ(c.rope_theta, 10000);
  EXPECT_EQ(c.rope_scaling.original_max_position, 0);
  EXPECT_FALSE(c.tied_head);
  EXPECT_FALSE(c.qkv_bias);
  EXPECT_FALSE(c.qk_norm);
  EXPECT_EQ(c.bos_id, -1);
  EXPECT_EQ(c.eos_id, -1);
  // 2 * 1000 * 64 + 2 * (64 * (2 * 64 + 2 * 64) + 3 * 64 * 128 + 2 * 64) + 64
  EXPECT_EQ(c.n_parameters(), 128000 + 2 * (16384 + 24576 + 128) + 64);
}

TEST(ConfigJson, KnowsWhatEachFamilyAdds) {
  const Config qwen2 = accepted(with(llama(), {{"model_type", "\"qwen2\""}}));
  EXPECT_EQ(qwen2.family, Family::kQwen2);
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.qk_norm);
  const Config qwen3 = accepted(with(llama(), {{"model_type", "\"qwen3\""}}));
  EXPECT_EQ(qwen3.family, Family::kQwen3);
  EXPECT_FALSE(qwen3.qkv_bias);
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_TRUE(accepted(with(llama(), {{"attention_bias", "true"}})).qkv_bias);
  EXPECT_TRUE(accepted(with(llama(), {{"tie_word_embeddings", "true"}})).tied_head);
}

// R15
TEST(ConfigJson, TakesHeadDimApartFromTheWidth) {
  EXPECT_EQ(accepted(with(llama(), {{"head_dim", "128"}})).d_head, 128);
  EXPECT_EQ(accepted(with(llama(), {{"head_dim", "null"}})).d_head, 16);
  expect_refused(parse(with(llama(), {{"head_dim", "0"}})), kModelBadField, {"'head_dim'", "0"});
  expect_refused(parse(with(llama(), {{"hidden_size", "66"}})), kModelBadField,
                 {"'head_dim'", "66", "4"});
  EXPECT_EQ(accepted(with(llama(), {{"hidden_size", "66"}, {"head_dim", "16"}})).d_head, 16);
  expect_refused(parse(with(llama(), {{"head_dim", "17"}})), kModelBadField, {"17", "even"});
}

TEST(ConfigJson, ReadsTokenIds) {
  Config c = accepted(with(llama(), {{"bos_token_id", "1"}, {"eos_token_id", "[2, 7, 9]"}}));
  EXPECT_EQ(c.bos_id, 1);
  EXPECT_EQ(c.eos_id, 2);
  EXPECT_EQ(c.eos_ids, (std::vector<int64_t>{2, 7, 9}));
  c = accepted(with(llama(), {{"eos_token_id", "null"}}));
  EXPECT_EQ(c.eos_id, -1);
  for (const char* key : {"bos_token_id", "eos_token_id"}) {
    for (const char* value : {"\"2\"", "-2", "1.0", "[1, \"2\"]", "4294967295", "{}"}) {
      expect_refused(parse(with(llama(), {{key, value}})), kModelBadField, {key});
    }
    expect_refused(parse(with(llama(), {{key, "1000"}})), kModelBadField, {"1000"});
    EXPECT_TRUE(parse(with(llama(), {{key, "999"}})));
  }
}

const std::string kLlama3 =
    R"("factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4,"original_max_position_embeddings":256)";

TEST(ConfigJson, ReadsRopeInBothSpellings) {
  const Config older =
      accepted(with(llama(), {{"rope_theta", "500000.0"},
                              {"rope_scaling", "{\"rope_type\":\"llama3\"," + kLlama3 + "}"}}));
  const Config oldest =
      accepted(with(llama(), {{"rope_theta", "500000"},
                              {"rope_scaling", "{\"type\":\"llama3\"," + kLlama3 + "}"}}));
  const Config newer = accepted(with(
      llama(),
      {{"rope_parameters", "{\"rope_type\":\"llama3\",\"rope_theta\":500000.0," + kLlama3 + "}"}}));
  const Config mixed =
      accepted(with(llama(), {{"rope_theta", "500000.0"},
                              {"rope_parameters", "{\"rope_type\":\"llama3\"," + kLlama3 + "}"}}));
  for (const Config& c : {older, oldest, newer, mixed}) {
    EXPECT_EQ(c.rope_theta, 500000);
    EXPECT_EQ(c.rope_scaling.factor, 8);
    EXPECT_EQ(c.rope_scaling.low_freq_factor, 1);
    EXPECT_EQ(c.rope_scaling.high_freq_factor, 4);
    EXPECT_EQ(c.rope_scaling.original_max_position, 256);
    EXPECT_EQ(c.rope_inverse_frequencies(), newer.rope_inverse_frequencies());
  }
  const Config plain = accepted(with(llama(), {{"rope_scaling", "null"}, {"rope_theta", "1e6"}}));
  EXPECT_EQ(plain.rope_theta, 1e6);
  EXPECT_EQ(plain.rope_scaling.original_max_position, 0);
  EXPECT_EQ(
      accepted(with(llama(), {{"rope_parameters", R"({"rope_type":"default","rope_theta":77.5})"}}))
          .rope_theta,
      77.5);
}

// The three regions of Llama 3's scaling, by the formula's own words.
TEST(ConfigJson, ScalesFrequenciesByTheirWavelength) {
  Config c = accepted(with(
      llama(), {{"head_dim", "8"},
                {"rope_parameters",
                 R"({"rope_type":"llama3","rope_theta":10000.0,"factor":8,"low_freq_factor":1,)"
                 R"("high_freq_factor":4,"original_max_position_embeddings":200})"}}));
  const auto frequencies = c.rope_inverse_frequencies();
  ASSERT_EQ(frequencies.size(), 4u);
  EXPECT_DOUBLE_EQ(frequencies[0], 1);  // wave of 2 pi: 31.8 turns, kept
  // 0.1: wave of 62.8, 3.18 turns, between 1 and 4
  const double kept = (200 * 0.1 / (2 * M_PI) - 1) / 3;
  EXPECT_DOUBLE_EQ(frequencies[1], (1 - kept) * 0.1 / 8 + kept * 0.1);
  EXPECT_DOUBLE_EQ(frequencies[2], 0.01 / 8);  // 0.318 turns
  EXPECT_DOUBLE_EQ(frequencies[3], 0.001 / 8);
}

TEST(ConfigJson, RefusesOtherRopes) {
  for (const char* type : {"linear", "dynamic", "yarn", "longrope", "LLAMA3"}) {
    for (const char* key : {"rope_type", "type"}) {
      const std::string object =
          "{\"" + std::string(key) + "\":\"" + type + "\",\"factor\":2.0,\"rope_theta\":1e4}";
      expect_refused(parse(with(llama(), {{"rope_scaling", object}})), kModelBadField,
                     {"rope_scaling", key, type, "llama3"});
      expect_refused(parse(with(llama(), {{"rope_parameters", object}})), kModelBadField,
                     {"rope_parameters", key, type});
    }
  }
  // An object per kind of layer, as other families have it.
  expect_refused(parse(with(llama(), {{"rope_parameters", R"({"full_attention":{}})"}})),
                 kModelBadField, {"rope_parameters", "rope_theta", "missing"});
  expect_refused(parse(with(llama(), {{"rope_scaling", "\"llama3\""}})), kModelBadField,
                 {"rope_scaling"});
  expect_refused(parse(with(llama(), {{"rope_theta", "0"}})), kModelBadField, {"rope_theta", "0"});
  expect_refused(parse(with(llama(), {{"partial_rotary_factor", "0.5"}})), kModelBadField,
                 {"partial_rotary_factor", "0.5"});
  const auto llama3 = [](const std::string& fields) {
    return parse(with(llama(), {{"rope_scaling", "{\"rope_type\":\"llama3\"" + fields + "}"}}));
  };
  expect_refused(llama3(""), kModelBadField, {"factor", "missing"});
  expect_refused(llama3(R"(,"factor":8,"low_freq_factor":4,"high_freq_factor":4,)"
                        R"("original_max_position_embeddings":256)"),
                 kModelBadField, {"high_freq_factor"});
  expect_refused(llama3(R"(,"factor":-8,"low_freq_factor":1,"high_freq_factor":4,)"
                        R"("original_max_position_embeddings":256)"),
                 kModelBadField, {"factor", "-8"});
  expect_refused(llama3(R"(,"factor":8,"low_freq_factor":1,"high_freq_factor":4,)"
                        R"("original_max_position_embeddings":0)"),
                 kModelBadField, {"original_max_position_embeddings", "0"});
}

// C1
TEST(ConfigJson, RefusesFieldsByName) {
  for (const auto& [key, value] : llama()) {
    if (key == "num_key_value_heads") continue;
    expect_refused(parse(without(llama(), key)), kModelBadField, {"'" + key + "'", "missing"});
    expect_refused(parse(with(llama(), {{key, "null"}})), kModelBadField, {"'" + key + "'"});
    expect_refused(parse(with(llama(), {{key, "[1]"}})), kModelBadField,
                   {"'" + key + "'", "an array of 1"});
    if (key == "model_type" || key == "rms_norm_eps") continue;
    for (const char* bad :
         {"\"64\"", "1e3", "64.0", "-1", "0", "1099511627776", "true", "18446744073709551680"}) {
      expect_refused(parse(with(llama(), {{key, bad}})), kModelBadField, {"'" + key + "'"});
    }
  }
  for (const char* bad : {"0", "-1e-6", "\"1e-6\"", "false"}) {
    expect_refused(parse(with(llama(), {{"rms_norm_eps", bad}})), kModelBadField,
                   {"'rms_norm_eps'"});
  }
  expect_refused(parse_config_json("{\"hidden_size\":64,}", "config.json"), kModelBadJson,
                 {"config.json", "byte 19"});
  std::string utf16 = "\xff\xfe";
  for (const char c : text_of(llama())) utf16 += {c, '\0'};
  expect_refused(parse_config_json(utf16, "config.json"), kModelBadJson, {"UTF-16"});
  expect_refused(parse_config_json("[]", "config.json"), kModelBadJson, {"an array", "object"});
  expect_refused(parse_config_json("", "config.json"), kModelBadJson, {"config.json"});
}

TEST(ConfigJson, RefusesHeadsThatDoNotGroup) {
  expect_refused(parse(with(llama(), {{"num_key_value_heads", "3"}})), kModelBadField,
                 {"4 query heads", "3 key/value heads"});
  expect_refused(parse(with(llama(), {{"num_key_value_heads", "8"}})), kModelBadField, {"8"});
  expect_refused(parse(with(llama(), {{"num_attention_heads", "131072"},
                                      {"num_key_value_heads", "131072"},
                                      {"head_dim", "2"}})),
                 kModelBadField, {"131072 heads of 2"});
}

TEST(ConfigJson, RefusesOtherFamilies) {
  for (const char* type : {"gemma3", "mistral", "qwen2_moe", "Llama", ""}) {
    expect_refused(parse(with(llama(), {{"model_type", "\"" + std::string(type) + "\""}})),
                   kModelArchitecture, {"'" + std::string(type) + "'", "llama, qwen2 and qwen3"});
  }
}

TEST(ConfigJson, RefusesWhatTheForwardPassLacks) {
  expect_refused(parse(with(llama(), {{"hidden_act", "\"gelu\""}})), kModelBadField,
                 {"'hidden_act'", "gelu", "silu"});
  expect_refused(parse(with(llama(), {{"mlp_bias", "true"}})), kModelBadField, {"'mlp_bias'"});
  expect_refused(parse(with(llama(), {{"attention_bias", "1"}})), kModelBadField,
                 {"'attention_bias'", "true or false"});
}

TEST(ConfigJson, RefusesWindowsThatBind) {
  const Fields qwen = with(llama(), {{"model_type", "\"qwen2\""}});
  const Fields on = with(qwen, {{"use_sliding_window", "true"}, {"sliding_window", "1024"}});
  expect_refused(parse(on), kModelBadField, {"'sliding_window'", "1024"});
  expect_refused(parse(with(on, {{"max_window_layers", "1"}})), kModelBadField, {"1024"});
  EXPECT_TRUE(parse(with(on, {{"max_window_layers", "2"}})));  // no layer is past it
  EXPECT_TRUE(parse(with(on, {{"sliding_window", "2048"}})));  // as long as the context
  EXPECT_TRUE(parse(with(on, {{"sliding_window", "null"}})));
  EXPECT_TRUE(parse(with(on, {{"use_sliding_window", "false"}})));
  EXPECT_TRUE(parse(with(on, {{"layer_types", R"(["full_attention","full_attention"])"}})));
  expect_refused(parse(with(qwen, {{"layer_types", R"(["full_attention","sliding_attention"])"}})),
                 kModelBadField, {"'layer_types'", "sliding_attention"});
}

// C2
TEST(ConfigJson, ReadsTheTextConfigOfAMultimodalModel) {
  const Fields outer = {{"model_type", "\"llava\""},
                        {"hidden_size", "7"},
                        {"tie_word_embeddings", "true"},
                        {"text_config", text_of(with(llama(), {{"model_type", "\"qwen3\""}}))}};
  const Config c = accepted(outer);
  EXPECT_EQ(c.family, Family::kQwen3);
  EXPECT_EQ(c.d_model, 64);
  EXPECT_TRUE(c.tied_head);
  expect_refused(parse(with(outer, {{"text_config", text_of(without(llama(), "vocab_size"))}})),
                 kModelBadField, {"text_config", "'vocab_size'"});
  expect_refused(parse(with(outer, {{"text_config", "[]"}})), kModelBadField, {"'text_config'"});
}

}  // namespace
}  // namespace ullage::model
