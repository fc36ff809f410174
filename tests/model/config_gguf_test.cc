#include "model/config_gguf.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

#include "model/byte_builder.h"
#include "model/refusal.h"

namespace ullage::model {
namespace {

// Metadata as key -> type and value in bytes; tensors as name -> dimensions, innermost first, F32.
struct Model {
  std::map<std::string, Bytes> entries;
  std::map<std::string, std::vector<uint64_t>> tensors;

  Model& u32(const std::string& key, uint32_t value) {
    entries[key] = Bytes().u32(kTypeU32).u32(value);
    return *this;
  }
  Model& f32(const std::string& key, float value) {
    entries[key] = Bytes().u32(kTypeF32).put(value);
    return *this;
  }
  Model& text(const std::string& key, std::string_view value) {
    entries[key] = Bytes().u32(kTypeString).string(value);
    return *this;
  }
  Model& u32_list(const std::string& key, const std::vector<uint32_t>& values) {
    Bytes bytes = Bytes().u32(kTypeArray).u32(kTypeU32).u64(values.size());
    for (const uint32_t value : values) bytes.u32(value);
    entries[key] = bytes;
    return *this;
  }
  Model& without(const std::string& key) {
    entries.erase(key);
    return *this;
  }
  Model& tensor(const std::string& name, std::vector<uint64_t> dimensions) {
    tensors[name] = std::move(dimensions);
    return *this;
  }
};

Model llama(const std::string& arch = "llama") {
  Model m;
  m.text("general.architecture", arch);
  m.u32(arch + ".block_count", 2).u32(arch + ".context_length", 2048);
  m.u32(arch + ".embedding_length", 64).u32(arch + ".feed_forward_length", 128);
  m.u32(arch + ".attention.head_count", 4).u32(arch + ".attention.head_count_kv", 2);
  m.f32(arch + ".attention.layer_norm_rms_epsilon", 1e-5f);
  m.tensor("token_embd.weight", {64, 100}).tensor("output.weight", {64, 100});
  return m;
}

// Data is filled with `fill`.
Result<Config> parse(const Model& model, float fill = 1) {
  Bytes file = gguf_header(model.tensors.size(), model.entries.size());
  for (const auto& [key, value] : model.entries) file.string(key).raw(value.str());
  uint64_t offset = 0;
  for (const auto& [name, dimensions] : model.tensors) {
    file.string(name).u32(static_cast<uint32_t>(dimensions.size()));
    uint64_t bytes = 4;
    for (const uint64_t dimension : dimensions) {
      file.u64(dimension);
      bytes *= dimension;
    }
    file.u32(kTensorF32).u64(offset);
    offset += (bytes + 31) / 32 * 32;
  }
  file.pad_to(32);
  for (uint64_t i = 0; i < offset; i += 4) file.put(fill);
  const auto gguf = read_gguf(as_bytes(file.str()), "x.gguf");
  if (!gguf) return gguf.status();
  return config_from_gguf(*gguf, "x.gguf");
}

Config accepted(const Model& model) {
  auto config = parse(model);
  EXPECT_TRUE(config) << config.status().to_string();
  return config ? *std::move(config) : Config{};
}

TEST(ConfigGguf, ReadsWhatEachFamilySays) {
  Config c = accepted(llama());
  EXPECT_EQ(c.family, Family::kLlama);
  EXPECT_EQ(c.n_layers, 2);
  EXPECT_EQ(c.d_model, 64);
  EXPECT_EQ(c.h_q, 4);
  EXPECT_EQ(c.h_kv, 2);
  EXPECT_EQ(c.d_head, 16);
  EXPECT_EQ(c.d_ff, 128);
  EXPECT_EQ(c.vocab, 100);
  EXPECT_EQ(c.max_position, 2048);
  EXPECT_EQ(c.rms_eps, static_cast<double>(1e-5f));
  EXPECT_EQ(c.rope_theta, 10000);
  EXPECT_TRUE(c.rope_pairs_adjacent);
  EXPECT_FALSE(c.tied_head);
  EXPECT_FALSE(c.qkv_bias);
  EXPECT_TRUE(accepted(llama().tensor("blk.0.attn_q.bias", {64})).qkv_bias);
  Model tied = llama();
  tied.tensors.erase("output.weight");
  EXPECT_TRUE(accepted(tied).tied_head);

  c = accepted(llama("qwen2"));
  EXPECT_EQ(c.family, Family::kQwen2);
  EXPECT_TRUE(c.qkv_bias);
  EXPECT_FALSE(c.rope_pairs_adjacent);
  c = accepted(
      llama("qwen3").u32("qwen3.attention.key_length", 32).u32("qwen3.attention.value_length", 32));
  EXPECT_EQ(c.family, Family::kQwen3);
  EXPECT_TRUE(c.qk_norm);
  EXPECT_EQ(c.d_head, 32);
  EXPECT_FALSE(c.rope_pairs_adjacent);
}

TEST(ConfigGguf, TakesDefaultsWhereKeysMayBeAbsent) {
  const Config c = accepted(llama().without("llama.attention.head_count_kv"));
  EXPECT_EQ(c.h_kv, 4);
  EXPECT_EQ(c.bos_id, -1);
  EXPECT_EQ(c.eos_id, -1);
}

TEST(ConfigGguf, RefusesMissingAndBadKeysByName) {
  for (const auto& [key, value] : llama().entries) {
    if (key == "llama.attention.head_count_kv") continue;
    expect_refused(parse(llama().without(key)), kModelBadField, {"'" + key + "'", "missing"});
    expect_refused(parse(llama().u32_list(key, {1, 2})), kModelBadField,
                   {"'" + key + "'", "an array of 2"});
    if (key == "general.architecture") continue;
    expect_refused(parse(llama().text(key, "64")), kModelBadField, {"'" + key + "'", "'64'"});
    expect_refused(parse(llama().u32(key, 0)), kModelBadField, {"'" + key + "'", "0"});
  }
  expect_refused(parse(llama().u32("llama.embedding_length", 1u << 31)), kModelBadField,
                 {"llama.embedding_length", "2147483648"});
  expect_refused(parse(llama().f32("llama.block_count", 2)), kModelBadField,
                 {"llama.block_count", "real"});
  Model huge = llama();
  huge.entries["llama.block_count"] = Bytes().u32(10).u64(UINT64_MAX);
  expect_refused(parse(huge), kModelBadField, {"llama.block_count", "2^63"});
}

TEST(ConfigGguf, ReadsPerLayerNumbersThatAreAllTheSame) {
  EXPECT_EQ(accepted(llama().u32_list("llama.attention.head_count_kv", {2, 2})).h_kv, 2);
  expect_refused(parse(llama().u32_list("llama.attention.head_count_kv", {0, 2})), kModelBadField,
                 {"llama.attention.head_count_kv", "an array of 2"});
  expect_refused(parse(llama().u32_list("llama.attention.head_count_kv", {})), kModelBadField,
                 {"llama.attention.head_count_kv"});
}

// G11
TEST(ConfigGguf, KnowsTheIdThatIsNone) {
  Config c = accepted(
      llama().u32("tokenizer.ggml.eos_token_id", 4294967295).u32("tokenizer.ggml.bos_token_id", 3));
  EXPECT_EQ(c.eos_id, -1);
  EXPECT_TRUE(c.eos_ids.empty());
  EXPECT_EQ(c.bos_id, 3);
  c = accepted(llama().u32("tokenizer.ggml.eos_token_id", 99));
  EXPECT_EQ(c.eos_ids, std::vector<int64_t>{99});
  expect_refused(parse(llama().u32("tokenizer.ggml.eos_token_id", 100)), kModelBadField,
                 {"100", "vocabulary of 100"});
}

TEST(ConfigGguf, ReadsLlama3sFactors) {
  const Config c = accepted(llama().tensor("rope_freqs.weight", {8}));
  EXPECT_EQ(c.rope_factors, std::vector<float>(8, 1.0f));
  expect_refused(parse(llama().tensor("rope_freqs.weight", {4})), kModelTensorMissing,
                 {"rope_freqs.weight", "[4]", "[8]"});
  for (const float factor : {0.0f, -1.0f, std::numeric_limits<float>::infinity(),
                             std::numeric_limits<float>::quiet_NaN()}) {
    expect_refused(parse(llama().tensor("rope_freqs.weight", {8}), factor), kModelBadField,
                   {"rope_freqs.weight"});
  }
  Config twice;
  twice.d_head = 4;
  twice.rope_theta = 100;
  twice.rope_factors = {1, 2};
  EXPECT_EQ(twice.rope_inverse_frequencies(), (std::vector<double>{1, 0.05}));
}

TEST(ConfigGguf, RefusesWhatTheForwardPassLacks) {
  expect_refused(parse(llama("gemma3")), kModelArchitecture, {"gemma3", "llama"});
  expect_refused(parse(llama().u32("llama.expert_count", 8)), kModelArchitecture,
                 {"llama.expert_count", "8"});
  EXPECT_TRUE(parse(llama().u32("llama.expert_count", 0)));
  expect_refused(parse(llama().text("llama.rope.scaling.type", "yarn")), kModelBadField,
                 {"llama.rope.scaling.type", "yarn"});
  expect_refused(parse(llama().f32("llama.rope.scaling.factor", 2)), kModelBadField,
                 {"llama.rope.scaling.factor", "2"});
  EXPECT_TRUE(
      parse(llama().text("llama.rope.scaling.type", "none").f32("llama.rope.scaling.factor", 2)));
  expect_refused(parse(llama().u32("llama.rope.dimension_count", 8)), kModelBadField,
                 {"llama.rope.dimension_count", "16"});
  expect_refused(parse(llama().u32("llama.attention.value_length", 8)), kModelBadField,
                 {"llama.attention.value_length", "16"});
  expect_refused(parse(llama().u32("llama.attention.sliding_window", 512)), kModelBadField,
                 {"llama.attention.sliding_window", "512"});
  EXPECT_TRUE(parse(llama().u32("llama.attention.sliding_window", 2048)));
  expect_refused(parse(llama().u32("split.count", 2)), kModelBadField, {"split.count", "2"});
  expect_refused(parse(llama().u32("llama.attention.head_count_kv", 3)), kModelBadField,
                 {"4 query heads", "3"});
  expect_refused(parse(llama().u32("llama.attention.head_count", 6)), kModelBadField,
                 {"llama.attention.key_length", "64", "6"});
}

TEST(ConfigGguf, TakesTheVocabularyFromTheEmbedding) {
  expect_refused(parse(llama().u32("llama.vocab_size", 99)), kModelBadField,
                 {"llama.vocab_size", "99", "100 rows"});
  EXPECT_TRUE(parse(llama().u32("llama.vocab_size", 100)));
  Model none = llama();
  none.tensors.erase("token_embd.weight");
  expect_refused(parse(none), kModelTensorMissing, {"token_embd.weight", "missing"});
  expect_refused(parse(llama().tensor("token_embd.weight", {64})), kModelTensorMissing,
                 {"token_embd.weight", "[64]"});
  expect_refused(parse(llama().tensor("token_embd.weight", {64, 0})), kModelBadField, {"0 rows"});
}

}  // namespace
}  // namespace ullage::model
