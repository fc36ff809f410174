#include "model/checkpoint.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

namespace ullage::model {
namespace {

std::filesystem::path model_path(const std::string& name) {
  return std::filesystem::path(ULLAGE_TEST_DATA) / "models" / name;
}

Checkpoint open_model(const std::string& name) {
  auto opened = Checkpoint::open(model_path(name));
  if (!opened) throw std::runtime_error(opened.status().to_string());
  return *std::move(opened);
}

// `params` of the golden.json that came with each model, from an independent implementation.
TEST(Checkpoint, CountsTheParametersOfTheGoldenModels) {
  const struct {
    std::string name;
    int64_t parameters;
  } models[] = {{"qwen3-tiny", 143808},
                {"qwen2-tiny-bias", 93504},
                {"llama3-rope-tiny-bf16", 86336},
                {"llama-tiny-untied-sharded", 317856}};
  for (const auto& [name, parameters] : models) {
    const Checkpoint model = open_model(name);
    EXPECT_EQ(model.name(), name);
    EXPECT_EQ(model.config().n_parameters(), parameters) << name;
    EXPECT_EQ(model.stored_elements(), parameters) << name;
    EXPECT_TRUE(model.warnings().empty()) << name << ": " << model.warnings()[0];
  }
}

TEST(Checkpoint, ReadsQwen3) {
  const Checkpoint model = open_model("qwen3-tiny/");
  const Config& c = model.config();
  EXPECT_EQ(model.name(), "qwen3-tiny");
  EXPECT_EQ(c.family, Family::kQwen3);
  EXPECT_EQ(c.n_layers, 2);
  EXPECT_EQ(c.d_model, 64);
  EXPECT_EQ(c.h_q, 4);
  EXPECT_EQ(c.h_kv, 2);
  EXPECT_EQ(c.d_head, 32);
  EXPECT_EQ(c.d_ff, 160);
  EXPECT_EQ(c.vocab, 512);
  EXPECT_EQ(c.max_position, 2048);
  EXPECT_EQ(c.rms_eps, 1e-6);
  EXPECT_EQ(c.rope_theta, 1e6);
  EXPECT_TRUE(c.tied_head);
  EXPECT_TRUE(c.qk_norm);
  EXPECT_FALSE(c.qkv_bias);
  EXPECT_EQ(c.eos_id, -1);
  EXPECT_EQ(model.head().data, model.embedding().data);
  ASSERT_EQ(model.layers().size(), 2);
  const LayerWeights& layer = model.layers()[1];
  EXPECT_EQ(layer.q.rows, 128);
  EXPECT_EQ(layer.q.cols, 64);
  EXPECT_EQ(layer.o.rows, 64);
  EXPECT_EQ(layer.o.cols, 128);
  EXPECT_EQ(layer.down.cols, 160);
  EXPECT_EQ(layer.q_norm.rows, 1);
  EXPECT_EQ(layer.q_norm.cols, 32);
  EXPECT_FALSE(layer.q_bias);
}

}  // namespace
}  // namespace ullage::model
