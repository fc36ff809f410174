#include "model/checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <stdexcept>
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

std::vector<float> widen(const Weight& weight, int64_t row) {
  std::vector<float> values(static_cast<size_t>(weight.cols));
  dequantize(weight, row, 0, weight.cols, values.data());
  return values;
}

// How far a type may be from the float32 it was rounded from, relative to the largest magnitude of
// its row: half a step of its scale, and the rounding of the float16 scale and minimum.
double step(ElementType type) {
  switch (type) {
    case ElementType::kF32:
      return 0;
    case ElementType::kF16:
      return 0x1p-11;
    case ElementType::kBF16:
      return 0x1p-8;
    case ElementType::kQ8_0:
      return 0.5 / 127 + 0x1p-10;
    case ElementType::kQ5_0:
      return 1.0 / 16 + 0x1p-10;  // the end opposite the largest value is clipped by a step
    case ElementType::kQ4_0:
      return 1.0 / 8 + 0x1p-10;
    case ElementType::kQ5_1:
      return 1.0 / 31 + 0x1p-9;
    case ElementType::kQ4_1:
      return 1.0 / 15 + 0x1p-9;
    default:
      return -1;
  }
}

// `matching_row(i)` is the row of `stored` that belongs with row i of `original`.
template <class Matching>
void expect_near(const Weight& stored, const Weight& original, Matching matching_row) {
  ASSERT_EQ(stored.rows, original.rows);
  ASSERT_EQ(stored.cols, original.cols);
  for (int64_t row = 0; row < original.rows; ++row) {
    const auto a = widen(stored, matching_row(row));
    const auto b = widen(original, row);
    double largest = 0;
    for (const float x : b) largest = std::max(largest, std::abs(static_cast<double>(x)));
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_LE(std::abs(static_cast<double>(a[i]) - b[i]), step(stored.type) * largest)
          << name_of(stored.type) << " row " << row << " element " << i;
    }
  }
}

using Role = Weight LayerWeights::*;
constexpr Role kRoles[] = {&LayerWeights::attn_norm, &LayerWeights::q,        &LayerWeights::k,
                           &LayerWeights::v,         &LayerWeights::q_bias,   &LayerWeights::k_bias,
                           &LayerWeights::v_bias,    &LayerWeights::q_norm,   &LayerWeights::k_norm,
                           &LayerWeights::o,         &LayerWeights::ffn_norm, &LayerWeights::gate,
                           &LayerWeights::up,        &LayerWeights::down};

void expect_same_shape(const Config& a, const Config& b) {
  EXPECT_EQ(a.family, b.family);
  EXPECT_EQ(a.n_layers, b.n_layers);
  EXPECT_EQ(a.d_model, b.d_model);
  EXPECT_EQ(a.h_q, b.h_q);
  EXPECT_EQ(a.h_kv, b.h_kv);
  EXPECT_EQ(a.d_head, b.d_head);
  EXPECT_EQ(a.d_ff, b.d_ff);
  EXPECT_EQ(a.vocab, b.vocab);
  EXPECT_EQ(a.max_position, b.max_position);
  EXPECT_FLOAT_EQ(static_cast<float>(a.rms_eps), static_cast<float>(b.rms_eps));
  EXPECT_EQ(a.rope_theta, b.rope_theta);
  EXPECT_EQ(a.tied_head, b.tied_head);
  EXPECT_EQ(a.qkv_bias, b.qkv_bias);
  EXPECT_EQ(a.qk_norm, b.qk_norm);
  EXPECT_EQ(a.n_parameters(), b.n_parameters());
}

// One model in both worlds. Layer 1 of the GGUF file is in eight types, layer 0 in float32.
TEST(Checkpoint, GgufAndSafetensorsAgreeTensorByTensor) {
  const Checkpoint folder = open_model("qwen3-tiny");
  const Checkpoint gguf = open_model("qwen3-tiny.gguf");
  expect_same_shape(gguf.config(), folder.config());
  EXPECT_FALSE(gguf.config().rope_pairs_adjacent);
  EXPECT_EQ(gguf.stored_elements(), folder.stored_elements());
  EXPECT_TRUE(gguf.warnings().empty());
  const auto same_row = [](int64_t row) { return row; };
  expect_near(gguf.embedding(), folder.embedding(), same_row);
  expect_near(gguf.head(), folder.head(), same_row);
  expect_near(gguf.final_norm(), folder.final_norm(), same_row);
  for (size_t i = 0; i < folder.layers().size(); ++i) {
    for (const Role role : kRoles) {
      const Weight& a = gguf.layers()[i].*role;
      const Weight& b = folder.layers()[i].*role;
      ASSERT_EQ(static_cast<bool>(a), static_cast<bool>(b));
      if (a) expect_near(a, b, same_row);
    }
  }
  EXPECT_EQ(gguf.layers()[1].k.type, ElementType::kQ4_1);
  EXPECT_EQ(gguf.layers()[0].k.type, ElementType::kF32);
}

// llama.cpp's layout of a llama: row j of a head's first half and row j of its second half stand
// side by side, and the frequency scaling is a tensor of factors.
TEST(Checkpoint, ReadsLlamaRowsAndFactorsOfGguf) {
  const Checkpoint folder = open_model("llama3-rope-tiny-bf16");
  const Checkpoint gguf = open_model("llama3-rope-tiny-bf16.gguf");
  expect_same_shape(gguf.config(), folder.config());
  EXPECT_TRUE(gguf.config().rope_pairs_adjacent);
  EXPECT_FALSE(folder.config().rope_pairs_adjacent);
  EXPECT_EQ(gguf.stored_elements(), folder.stored_elements() + 8);
  EXPECT_TRUE(gguf.warnings().empty());
  const int64_t half = folder.config().d_head / 2;
  const auto paired_row = [half](int64_t row) {
    const int64_t within = row % (2 * half);
    return row - within + within % half * 2 + within / half;
  };
  for (size_t i = 0; i < folder.layers().size(); ++i) {
    const LayerWeights& a = gguf.layers()[i];
    const LayerWeights& b = folder.layers()[i];
    for (const auto role : {&LayerWeights::q, &LayerWeights::k}) {
      for (int64_t row = 0; row < (b.*role).rows; ++row) {
        ASSERT_EQ(widen(a.*role, paired_row(row)), widen(b.*role, row));
      }
    }
    for (int64_t row = 0; row < b.v.rows; ++row) ASSERT_EQ(widen(a.v, row), widen(b.v, row));
  }
  const auto with_factors = gguf.config().rope_inverse_frequencies();
  const auto with_scaling = folder.config().rope_inverse_frequencies();
  ASSERT_EQ(with_factors.size(), 8);
  ASSERT_EQ(with_scaling.size(), 8);
  for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(with_factors[i] / with_scaling[i], 1, 1e-6) << i;
  // The scaling does something: pair 7 turns 8 times slower than without it.
  EXPECT_NEAR(with_scaling[7] * 8, std::pow(500000.0, -14.0 / 16), 1e-12);
  EXPECT_EQ(with_scaling[0], 1);
}

TEST(Checkpoint, ReadsShardsUntiedHeadsAndBiases) {
  const Checkpoint untied = open_model("llama-tiny-untied-sharded");
  EXPECT_FALSE(untied.config().tied_head);
  EXPECT_NE(untied.head().data, untied.embedding().data);
  EXPECT_EQ(untied.head().rows, 320);
  EXPECT_EQ(untied.config().bos_id, 1);
  EXPECT_EQ(untied.config().eos_ids, std::vector<int64_t>{2});
  const Checkpoint biased = open_model("qwen2-tiny-bias");
  EXPECT_TRUE(biased.config().qkv_bias);
  EXPECT_EQ(biased.config().d_head, 16);
  EXPECT_EQ(biased.layers()[0].q_bias.cols, 64);
  EXPECT_EQ(biased.layers()[0].v_bias.cols, 32);
  EXPECT_FALSE(biased.layers()[0].q_norm);
}

// The seed of the fuzzer is a whole model: "ab" and "abc" are merged, id 7 ends a text.
TEST(Checkpoint, ReadsTheTokenizerOfGguf) {
  auto model = Checkpoint::open(std::filesystem::path(ULLAGE_TEST_DATA) /
                                "../../fuzz/seeds/gguf/llama.gguf");
  ASSERT_TRUE(model) << model.status().to_string();
  auto tokenizer = model->tokenizer();
  ASSERT_TRUE(tokenizer) << tokenizer.status().to_string();
  EXPECT_EQ(tokenizer->size(), 8);
  EXPECT_EQ(tokenizer->eos_id(), 7);
  EXPECT_EQ(tokenizer->bos_id(), std::nullopt);
  auto ids = tokenizer->encode("abcab a<|end|>", true);
  ASSERT_TRUE(ids) << ids.status().to_string();
  EXPECT_EQ(*ids, (std::vector<int32_t>{4, 3, 6, 7}));
  EXPECT_EQ(tokenizer->decode(*ids), "abcab a<|end|>");
}

TEST(Checkpoint, RefusesATokenizerThatIsNotThere) {
  const auto tokenizer = open_model("qwen3-tiny.gguf").tokenizer();
  ASSERT_FALSE(tokenizer);
  EXPECT_EQ(tokenizer.status().code(), kModelTokenizer);
  EXPECT_NE(tokenizer.status().message().find("qwen3-tiny.gguf"), std::string::npos);
}

}  // namespace
}  // namespace ullage::model
