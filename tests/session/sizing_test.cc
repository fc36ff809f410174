#include "session/sizing.h"

#include <gtest/gtest.h>

namespace ullage::session {
namespace {

using model::ElementType;

model::Config qwen3_06b() {
  model::Config c;
  c.family = model::Family::kQwen3;
  c.n_layers = 28;
  c.d_model = 1024;
  c.h_q = 16;
  c.h_kv = 8;
  c.d_head = 128;  // not d_model / h_q
  c.d_ff = 3072;
  c.vocab = 151936;  // the tokenizer has 151669: sized by rows
  c.max_position = 40960;
  c.rms_eps = 1e-6;
  c.rope_theta = 1e6;
  c.tied_head = true;
  c.qk_norm = true;
  return c;
}

model::Config llama31_8b() {
  model::Config c;
  c.n_layers = 32;
  c.d_model = 4096;
  c.h_q = 32;
  c.h_kv = 8;
  c.d_head = 128;
  c.d_ff = 14336;
  c.vocab = 128256;
  c.max_position = 131072;
  return c;
}

Sizing size(const model::Config& config, const SizingRequest& request) {
  auto sizing = size_session(config, weight_sizes(config, ElementType::kBF16), request);
  EXPECT_TRUE(sizing.ok()) << sizing.status().to_string();
  return *sizing;
}

// Estimators take d_head for d_model / h_q = 64 and halve this.
TEST(Sizing, KvOfQwen3AtItsTrainingContext) {
  const auto kv = [](ElementType type) {
    return 40960 * size(qwen3_06b(), {.context = 40960, .kv_type = type}).kv_position_bytes;
  };
  EXPECT_EQ(kv(ElementType::kF16), 4697620480);
  EXPECT_EQ(kv(ElementType::kQ8_0), 2495610880);
  EXPECT_EQ(kv(ElementType::kQ4_0), 1321205760);
}

TEST(Sizing, ParametersAndDispatches) {
  EXPECT_EQ(qwen3_06b().n_parameters(), 596049920);
  EXPECT_EQ(llama31_8b().n_parameters(), 8030261248);
  const Sizing sizing = size(qwen3_06b(), {});
  EXPECT_EQ(sizing.dispatches, 171);
  EXPECT_EQ(sizing.dispatches_deep, 199);
  EXPECT_EQ(sizing.kv_bytes, 29360128 * 2);
  EXPECT_EQ(sizing.resident_bytes, 596049920 * 2 + 29360128 * 2);
}

TEST(Sizing, MistralSmallHasHeadsOf128) {
  model::Config c = llama31_8b();
  c.d_model = 5120;
  c.n_layers = 40;
  EXPECT_EQ(size(c, {}).kv_position_bytes, 163840);  // not 204,800
}

TEST(Sizing, BucketsSayWhatTheyWaste) {
  for (const auto& [context, bucket] : {std::pair<int64_t, int64_t>{1, 512},
                                        {512, 512},
                                        {513, 1024},
                                        {4096, 4096},
                                        {40960, 65536},
                                        {65536, 65536}}) {
    const Sizing sizing = size(qwen3_06b(), {.context = context});
    EXPECT_EQ(sizing.bucket, bucket);
    EXPECT_EQ(sizing.kv_bytes, bucket * sizing.kv_position_bytes);
    EXPECT_EQ(sizing.bucket_waste_bytes, (bucket - context) * sizing.kv_position_bytes);
  }
  const auto refuse = [](int64_t context) {
    return size_session(qwen3_06b(), {}, {.context = context}).status().code();
  };
  EXPECT_EQ(refuse(65537), kResidentDimensionTooLarge);
  EXPECT_EQ(refuse(0), kResidentEmptyDimension);
}

TEST(Sizing, LargestContextOfA24GiBCard) {
  const int64_t card = 24564LL << 20;
  const Sizing sizing = size(llama31_8b(), {.context = 8192, .memory_bytes = card});
  EXPECT_TRUE(sizing.fits);
  EXPECT_EQ(sizing.memory_context, 73979);
  EXPECT_EQ(sizing.largest_context, 65536);
  const Sizing small = size(llama31_8b(), {.context = 512, .memory_bytes = 16LL << 30});
  EXPECT_FALSE(small.fits && small.memory_context < 512);
}

// An untied embedding is read one row a token.
TEST(Sizing, ATokenReadsTheWeightsOnce) {
  const Sizing llama = size(llama31_8b(), {.context = 8192});
  EXPECT_EQ(llama.token_read_bytes, 2 * (8030261248 - 128255LL * 4096) + 8192LL * 131072);
  const Sizing qwen = size(qwen3_06b(), {.context = 512});
  EXPECT_EQ(qwen.token_read_bytes, 2 * 596049920 + 512 * 114688);
}

// The shape check is of this library's kernels; other engines run these models, so they are sized.
TEST(Sizing, RefusedGeometriesAreStillSized) {
  model::Config phi = qwen3_06b();
  phi.d_head = 96;
  const Sizing sizing = size(phi, {});
  EXPECT_EQ(sizing.session.code(), kResidentHeadGeometry);
  EXPECT_NE(sizing.session.message().find("d_head = 96"), std::string::npos);
  EXPECT_EQ(sizing.dispatches, 0);
  EXPECT_EQ(sizing.kv_position_bytes, 28 * 2 * 8 * 96 * 2);

  model::Config wide = qwen3_06b();
  wide.d_ff = 65536;
  EXPECT_EQ(size(wide, {}).session.code(), kResidentDimensionTooLarge);
}

TEST(Sizing, OverflowIsRefused) {
  model::Config c = qwen3_06b();
  c.n_layers = int64_t{1} << 40;
  c.h_kv = int64_t{1} << 40;
  EXPECT_EQ(size_session(c, {}, {}).status().code(), kResidentDimensionTooLarge);
}

}  // namespace
}  // namespace ullage::session
