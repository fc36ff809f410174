// Whole model folders that are wrong, or right in unusual ways.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>
#include <map>
#include <string>

#include "model/byte_builder.h"
#include "model/checkpoint.h"
#include "model/refusal.h"
#include "model/temporary_folder.h"

namespace ullage::model {
namespace {

constexpr std::string_view kConfig =
    R"({"model_type":"llama","hidden_size":8,"intermediate_size":6,"num_hidden_layers":1,)"
    R"("num_attention_heads":2,"num_key_value_heads":1,"vocab_size":10,)"
    R"("max_position_embeddings":64,"rms_norm_eps":1e-05,"tie_word_embeddings":true})";

// A tensor's dtype, its shape as JSON and its elements' number and size.
struct Stored {
  std::string shape;
  size_t elements;
  std::string dtype = "F32";
  char fill = 0;
};
using Tensors = std::map<std::string, Stored>;

Tensors llama() {
  const std::string layer = "model.layers.0.";
  return {{"model.embed_tokens.weight", {"[10,8]", 80}},
          {"model.norm.weight", {"[8]", 8}},
          {layer + "input_layernorm.weight", {"[8]", 8}},
          {layer + "post_attention_layernorm.weight", {"[8]", 8}},
          {layer + "self_attn.q_proj.weight", {"[8,8]", 64}},
          {layer + "self_attn.k_proj.weight", {"[4,8]", 32}},
          {layer + "self_attn.v_proj.weight", {"[4,8]", 32}},
          {layer + "self_attn.o_proj.weight", {"[8,8]", 64}},
          {layer + "mlp.gate_proj.weight", {"[6,8]", 48}},
          {layer + "mlp.up_proj.weight", {"[6,8]", 48}},
          {layer + "mlp.down_proj.weight", {"[8,6]", 48}}};
}
constexpr int64_t kParameters = 80 + 8 + 8 + 8 + 64 + 32 + 32 + 64 + 48 + 48 + 48;

size_t size_of(const std::string& dtype) {
  if (dtype == "F32") return 4;
  return dtype == "BF16" ? 2 : 1;
}

std::string file_of(const Tensors& tensors) {
  std::string header = "{";
  std::string buffer;
  for (const auto& [name, stored] : tensors) {
    const size_t begin = buffer.size();
    buffer.append(stored.elements * size_of(stored.dtype), stored.fill);
    header += (header.size() > 1 ? ",\"" : "\"") + name + R"(":{"dtype":")" + stored.dtype +
              R"(","shape":)" + stored.shape + R"(,"data_offsets":[)" + std::to_string(begin) +
              "," + std::to_string(buffer.size()) + "]}";
  }
  return safetensors(header + "}") + buffer;
}

Tensors with(Tensors tensors, const std::string& name, Stored stored) {
  tensors[name] = std::move(stored);
  return tensors;
}

Tensors without(Tensors tensors, const std::string& name) {
  tensors.erase(name);
  return tensors;
}

class ModelFolder : public testing::Test {
 protected:
  Result<Checkpoint> open(const Tensors& tensors, std::string_view config = kConfig) {
    folder_.write("config.json", config);
    folder_.write("model.safetensors", file_of(tensors));
    return Checkpoint::open(folder_.path());
  }

  TemporaryFolder folder_;
};

std::string changed(std::string_view text, std::string_view from, std::string_view to) {
  std::string copy(text);
  return copy.replace(copy.find(from), from.size(), to);
}

TEST_F(ModelFolder, Opens) {
  const auto model = open(llama());
  ASSERT_TRUE(model) << model.status().to_string();
  EXPECT_EQ(model->config().n_parameters(), kParameters);
  EXPECT_EQ(model->stored_elements(), kParameters);
  EXPECT_EQ(model->stored_bytes(), 4 * kParameters);
  EXPECT_TRUE(model->warnings().empty());
}

TEST_F(ModelFolder, NamesTheFileThatIsMissing) {
  expect_refused(Checkpoint::open(folder_.path() / "nowhere"), kModelUnreadable, {"nowhere"});
  expect_refused(Checkpoint::open(folder_.path()), kModelUnreadable, {"config.json"});
  folder_.write("config.json", kConfig);
  expect_refused(Checkpoint::open(folder_.path()), kModelUnreadable,
                 {"model.safetensors", "model.safetensors.index.json"});
  folder_.write("model.safetensors", "");
  expect_refused(Checkpoint::open(folder_.path()), kModelTruncated, {"model.safetensors"});
}

TEST_F(ModelFolder, RefusesWhatIsNotARegularFile) {
  folder_.write("config.json", kConfig);
  std::filesystem::create_directory(folder_.path() / "model.safetensors");
  expect_refused(Checkpoint::open(folder_.path()), kModelUnreadable, {"not a regular file"});
  const auto pipe = folder_.path() / "pipe.gguf";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_refused(Checkpoint::open(pipe), kModelUnreadable, {"pipe.gguf", "not a regular file"});
  expect_refused(Checkpoint::open("/dev/zero"), kModelUnreadable, {"not a regular file"});
  folder_.write("x.gguf", "{\"not\": \"gguf\"}");
  expect_refused(Checkpoint::open(folder_.path() / "x.gguf"), kModelBadMagic, {"x.gguf"});
}

TEST_F(ModelFolder, NamesTheTensorThatIsMissingOrHasAnotherShape) {
  for (const auto& [name, stored] : llama()) {
    expect_refused(open(without(llama(), name)), kModelTensorMissing,
                   {"'" + name + "'", "missing"});
    expect_refused(open(with(llama(), name, {"[3,3]", 9})), kModelTensorMissing,
                   {"'" + name + "'", "[3, 3]"});
    expect_refused(open(with(llama(), name, {stored.shape, stored.elements, "U8"})),
                   kModelTypeUnsupported, {"'" + name + "'", "U8"});
    EXPECT_TRUE(open(with(llama(), name, {stored.shape, stored.elements, "BF16"})));
  }
  // A vector may be stored as a row.
  EXPECT_TRUE(open(with(llama(), "model.norm.weight", {"[1,8]", 8})));
  expect_refused(open(with(llama(), "model.norm.weight", {"[8,1]", 8})), kModelTensorMissing,
                 {"[8, 1]", "[8]"});
}

// R12
TEST_F(ModelFolder, SaysThatATiedHeadIsStored) {
  const auto model = open(with(llama(), "lm_head.weight", {"[10,8]", 80}));
  ASSERT_TRUE(model) << model.status().to_string();
  EXPECT_EQ(model->config().n_parameters(), kParameters);
  EXPECT_EQ(model->stored_elements(), kParameters + 80);
  EXPECT_EQ(model->head().data, model->embedding().data);
  ASSERT_EQ(model->warnings().size(), 1u);
  EXPECT_NE(model->warnings()[0].find("lm_head.weight"), std::string::npos);
}

TEST_F(ModelFolder, NeedsTheHeadThatIsNotTied) {
  const std::string config = changed(kConfig, "true", "false");
  expect_refused(open(llama(), config), kModelTensorMissing, {"'lm_head.weight'", "[10, 8]"});
  const auto model = open(with(llama(), "lm_head.weight", {"[10,8]", 80}), config);
  ASSERT_TRUE(model) << model.status().to_string();
  EXPECT_NE(model->head().data, model->embedding().data);
  EXPECT_EQ(model->config().n_parameters(), kParameters + 80);
}

TEST_F(ModelFolder, RefusesATensorThatTheForwardPassWouldLeaveOut) {
  const std::string bias = "model.layers.0.self_attn.o_proj.bias";
  expect_refused(open(with(llama(), bias, {"[8]", 8, "F32", 1})), kModelArchitecture,
                 {"'" + bias + "'"});
  // A bias of zeros adds nothing.
  const auto zero = open(with(llama(), bias, {"[8]", 8}));
  ASSERT_TRUE(zero) << zero.status().to_string();
  EXPECT_TRUE(zero->warnings().empty());
  EXPECT_TRUE(open(with(llama(), bias, {"[0,4611686018427387904]", 0})));
  expect_refused(open(with(llama(), "model.layers.1.mlp.up_proj.weight", {"[6,8]", 48})),
                 kModelArchitecture, {"model.layers.1.mlp.up_proj.weight", "1 layers"});
  EXPECT_TRUE(open(with(llama(), "model.layers.0.self_attn.rotary_emb.inv_freq", {"[2]", 2})));
}

TEST_F(ModelFolder, WarnsOfTensorsBesideTheDecoder) {
  const auto model = open(with(llama(), "vision_tower.patch.weight", {"[2]", 2, "U8"}));
  ASSERT_TRUE(model) << model.status().to_string();
  ASSERT_EQ(model->warnings().size(), 1u);
  EXPECT_NE(model->warnings()[0].find("vision_tower.patch.weight"), std::string::npos);
}

TEST_F(ModelFolder, FindsTheDecoderOfAMultimodalModel) {
  const std::string config = R"({"model_type":"llava","text_config":)" + std::string(kConfig) + "}";
  for (const std::string prefix : {"model.language_model.", "language_model.model.", ""}) {
    Tensors tensors;
    for (const auto& [name, stored] : llama()) {
      tensors[prefix + name.substr(std::string("model.").size())] = stored;
    }
    const auto model = open(tensors, config);
    ASSERT_TRUE(model) << prefix << ": " << model.status().to_string();
    EXPECT_TRUE(model->warnings().empty());
  }
}

TEST_F(ModelFolder, ReadsTheTokenizerBesideTheModel) {
  const std::string config =
      changed(kConfig, R"("vocab_size":10)", R"("vocab_size":12,"eos_token_id":[3,4])");
  const auto model = open(with(llama(), "model.embed_tokens.weight", {"[12,8]", 96}), config);
  ASSERT_TRUE(model) << model.status().to_string();
  expect_refused(model->tokenizer(), kModelTokenizer, {"no tokenizer.json"});
  const auto write_tokens = [&](int n) {
    std::string vocab;
    for (int i = 0; i < n; ++i) {
      vocab += (i > 0 ? ",\"" : "\"") + std::string(1, static_cast<char>('a' + i)) +
               "\":" + std::to_string(i);
    }
    folder_.write("tokenizer.json",
                  R"({"model":{"type":"BPE","vocab":{)" + vocab +
                      R"(},"merges":[]},"pre_tokenizer":{"type":"ByteLevel",)"
                      R"("add_prefix_space":false,"use_regex":true},"added_tokens":[]})");
  };
  write_tokens(11);  // a padded embedding is as it should be
  const auto tokenizer = model->tokenizer();
  ASSERT_TRUE(tokenizer) << tokenizer.status().to_string();
  EXPECT_EQ(tokenizer->size(), 11);
  EXPECT_EQ(tokenizer->eos_id(), 3);
  write_tokens(13);
  expect_refused(model->tokenizer(), kModelTokenizer, {"13 tokens", "12 rows"});
}

// The same model in two shards.
class Shards : public ModelFolder {
 protected:
  void SetUp() override {
    for (const auto& [name, stored] : llama()) {
      const bool first = name < "model.layers.0.mlp.up";
      (first ? a_ : b_)[name] = stored;
      index_[name] = first ? "a.safetensors" : "b.safetensors";
    }
  }

  Result<Checkpoint> open_shards() {
    folder_.write("config.json", kConfig);
    folder_.write("a.safetensors", file_of(a_));
    folder_.write("b.safetensors", file_of(b_));
    std::string text = R"({"metadata":{"total_size":)" + total_size_ + R"(},"weight_map":{)";
    std::string separator;
    for (const auto& [name, shard] : index_) {
      text += separator + "\"" + name + "\":\"" + shard + "\"";
      separator = ",";
    }
    folder_.write("model.safetensors.index.json", text + "}}");
    return Checkpoint::open(folder_.path());
  }

  Tensors a_, b_;
  std::map<std::string, std::string> index_;
  std::string total_size_ = std::to_string(4 * kParameters);
};

TEST_F(Shards, Open) {
  const auto model = open_shards();
  ASSERT_TRUE(model) << model.status().to_string();
  EXPECT_EQ(model->stored_elements(), kParameters);
  EXPECT_TRUE(model->warnings().empty());
}

// X1
TEST_F(Shards, RefuseAShardThatIsNotOnDisk) {
  index_["model.norm.weight"] = "c.safetensors";
  b_.erase("model.norm.weight");
  expect_refused(open_shards(), kModelUnreadable, {"c.safetensors"});
}

TEST_F(Shards, RefuseATensorThatItsShardLacks) {
  b_.erase("model.norm.weight");
  expect_refused(open_shards(), kModelTensorMissing, {"'model.norm.weight'", "'b.safetensors'"});
}

TEST_F(Shards, RefuseATensorThatTheIndexLacks) {
  index_.erase("model.norm.weight");
  expect_refused(open_shards(), kModelTensorMissing, {"'model.norm.weight'", "'b.safetensors'"});
}

TEST_F(Shards, RefuseATensorInTwoShards) {
  a_["model.norm.weight"] = b_["model.norm.weight"];
  expect_refused(open_shards(), kModelDuplicate,
                 {"'model.norm.weight'", "'a.safetensors'", "'b.safetensors'"});
}

TEST_F(Shards, RefuseAnIndexThatPointsElsewhere) {
  for (const char* shard : {"../a.safetensors", "/etc/passwd", ""}) {
    index_["model.norm.weight"] = shard;
    expect_refused(open_shards(), kModelBadField, {"'model.norm.weight'", shard});
  }
  folder_.write("model.safetensors.index.json", R"({"weight_map":[]})");
  expect_refused(Checkpoint::open(folder_.path()), kModelBadField, {"weight_map"});
  folder_.write("model.safetensors.index.json", R"({"weight_map":{"a":1}})");
  expect_refused(Checkpoint::open(folder_.path()), kModelBadField, {"'a'", "number 1"});
  folder_.write("model.safetensors.index.json", R"({"weight_map":{"a":"x","a":"x"}})");
  expect_refused(Checkpoint::open(folder_.path()), kModelDuplicate, {"'a'"});
}

// X3
TEST_F(Shards, WarnOfAWrongTotal) {
  total_size_ = "17";
  const auto model = open_shards();
  ASSERT_TRUE(model) << model.status().to_string();
  ASSERT_EQ(model->warnings().size(), 1u);
  EXPECT_NE(model->warnings()[0].find("total_size is 17"), std::string::npos);
}

}  // namespace
}  // namespace ullage::model
