#include "runtime/text_loss.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace ullage::runtime {
namespace {

using Tokens = std::vector<int32_t>;

const std::filesystem::path kModels = std::filesystem::path(ULLAGE_TEST_DATA) / "models";

model::Checkpoint open_model(const std::string& name) {
  auto opened = model::Checkpoint::open(kModels / name);
  EXPECT_TRUE(opened.ok()) << opened.status().to_string();
  return *std::move(opened);
}

nlohmann::json golden_runs(const std::string& path) {
  std::ifstream file(kModels / path);
  return nlohmann::json::parse(file)["runs"];
}

// Dense heads go through one of lossk's doors, the quantised one of the GGUF through the other.
TEST(TextLoss, MeanLossOfTheGoldenModelsAtAnyChunk) {
  for (const auto& [name, values] :
       {std::pair{"qwen3-tiny", "qwen3-tiny/golden.json"},
        {"qwen3-tiny.gguf", "qwen3-tiny.gguf.golden.json"},
        {"llama-tiny-untied-sharded", "llama-tiny-untied-sharded/golden.json"},
        {"llama3-rope-tiny-bf16", "llama3-rope-tiny-bf16/golden.json"}}) {
    const model::Checkpoint checkpoint = open_model(name);
    for (const auto& run : golden_runs(values)) {
      if (run["mean_next_token_loss"].is_null()) continue;
      const auto prompt = run["prompt"].get<Tokens>();
      const double expected = run["mean_next_token_loss"];
      const auto n = static_cast<int64_t>(prompt.size());
      double first = 0;
      for (const int64_t chunk : {int64_t{1}, int64_t{2}, int64_t{5}, n - 1, n}) {
        auto loss = run_text_loss(
            checkpoint, prompt, {.window = n, .chunk = chunk, .n_threads = 2, .verify = true}, {});
        ASSERT_TRUE(loss.ok()) << loss.status().to_string();
        EXPECT_EQ(loss->n_scored, n - 1);
        EXPECT_EQ(loss->n_verify_mismatches, 0);
        EXPECT_NEAR(loss->mean_loss, expected, 1e-4 * expected) << name;
        EXPECT_EQ(loss->perplexity, std::exp(loss->mean_loss));
        if (chunk == 1) first = loss->total_loss;
        EXPECT_EQ(loss->total_loss, first) << name << ", chunk " << chunk;
      }
    }
  }
}

// Terms beside the mean: cross-entropy again, z-loss under either head, whatever the chunk.
TEST(TextLoss, ReportsTheLossesOfAConfiguration) {
  const auto tokens = golden_runs("qwen3-tiny/golden.json")[3]["prompt"].get<Tokens>();
  for (const char* name : {"qwen3-tiny", "qwen3-tiny.gguf"}) {
    const model::Checkpoint checkpoint = open_model(name);
    TextLossRequest request = {.window = 23, .chunk = 66, .n_threads = 2};
    request.losses.terms = {{.name = "ce"},
                            {.name = "z", .kind = lossk::LossKind::kZLoss, .weight = 0.5},
                            {.name = "z / 7",
                             .kind = lossk::LossKind::kZLoss,
                             .weight = 0,
                             .divisor = 7,
                             .mask = lossk::RowMask::kNone}};
    const auto whole = run_text_loss(checkpoint, tokens, request, {});
    ASSERT_TRUE(whole.ok()) << whole.status().to_string();
    EXPECT_NEAR(whole->terms[0], whole->mean_loss, 1e-12);
    EXPECT_NEAR(whole->total, whole->terms[0] + 0.5 * whole->terms[1], 1e-12);
    EXPECT_GT(whole->terms[1], 0);
    EXPECT_NEAR(whole->terms[2] * 7, whole->terms[1] * 66, 1e-9);
    request.chunk = 5;
    request.verify = true;
    const auto cut = run_text_loss(checkpoint, tokens, request, {});
    ASSERT_TRUE(cut.ok());
    EXPECT_EQ(cut->n_verify_mismatches, 0);
    EXPECT_EQ(cut->total_loss, whole->total_loss);
    EXPECT_NEAR(cut->terms[1], whole->terms[1], 1e-12 * whole->terms[1]);
  }
}

TEST(TextLoss, RefusesLossesThatNeedMoreThanLabels) {
  const model::Checkpoint checkpoint = open_model("qwen3-tiny");
  TextLossRequest request;
  for (const lossk::LossKind kind : {lossk::LossKind::kGrpo, lossk::LossKind::kDpo}) {
    request.losses.terms = {{.name = "it", .kind = kind}};
    const auto plan = plan_text_loss(checkpoint, 100, request);
    ASSERT_FALSE(plan.ok());
    EXPECT_EQ(plan.status().code(), kHeadMissingInput) << plan.status().to_string();
  }
  request.losses.terms = {{.name = "it"}};
  request.losses.options.bias = true;
  EXPECT_EQ(plan_text_loss(checkpoint, 100, request).status().code(), kHeadMissingInput);
  request.losses.options = {.logits_scale = 0};
  EXPECT_EQ(plan_text_loss(checkpoint, 100, request).status().code(), kHeadBadScale);
}

// A text in windows is the texts of the windows: nothing is carried over, a last window of one
// token scores nothing, and threads change no bit.
TEST(TextLoss, WindowsKnowNothingOfEachOther) {
  const model::Checkpoint checkpoint = open_model("qwen3-tiny.gguf");
  const auto tokens = golden_runs("qwen3-tiny/golden.json")[3]["prompt"].get<Tokens>();  // 70
  const int64_t window = 23;  // 23 + 23 + 23 + 1
  double sum = 0;
  for (size_t first = 0; first < 69; first += 23) {
    auto part = run_text_loss(checkpoint, std::span(tokens).subspan(first, 23),
                              {.window = window, .chunk = 4, .n_threads = 1}, {});
    ASSERT_TRUE(part.ok());
    sum += part->total_loss;
  }
  std::vector<int64_t> progress;
  auto whole = run_text_loss(checkpoint, tokens, {.window = window, .chunk = 7, .n_threads = 3},
                             [&](int64_t done) { progress.push_back(done); });
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(whole->n_scored, 66);
  EXPECT_NEAR(whole->total_loss, sum, 1e-12 * sum);  // the additions associate differently
  EXPECT_EQ(progress, (std::vector<int64_t>{23, 46, 69}));
}

TEST(TextLoss, ThePlanNamesItsBytes) {
  const model::Checkpoint checkpoint = open_model("qwen3-tiny");
  auto plan = plan_text_loss(checkpoint, 1000, {.window = 100, .chunk = 64, .verify = true});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->n_windows, 10);
  EXPECT_EQ(plan->n_scored, 990);
  EXPECT_EQ(plan->n_chunks, 16);
  EXPECT_EQ(plan->verify_chunk, 33);
  EXPECT_EQ(plan->peak_logit_bytes, 64 * 512 * 4);
  EXPECT_EQ(plan->materialized_logit_bytes, 990 * 512 * 4);
  int64_t sum = 0;
  for (const Booking& booking : plan->bookings) sum += booking.bytes;
  EXPECT_EQ(plan->bytes, sum);
}

TEST(TextLoss, Refusals) {
  const model::Checkpoint checkpoint = open_model("qwen3-tiny");
  const auto code = [&](const TextLossRequest& request) {
    return plan_text_loss(checkpoint, 100, request).status().code();
  };
  EXPECT_EQ(code({.window = 1}), kLossEmptyDimension);
  EXPECT_EQ(code({.chunk = -1}), kLossEmptyDimension);
  EXPECT_EQ(code({.chunk = (1 << 27) / 512 + 1}), kLossBadChunk);
  EXPECT_EQ(code({.budget_bytes = 2047}), kLossBadChunk);
  EXPECT_EQ(code({.window = 65537}), kResidentDimensionTooLarge);
  for (const Tokens& tokens : {Tokens{1, 512}, Tokens{-1, 3}}) {
    EXPECT_EQ(run_text_loss(checkpoint, tokens, {}, {}).status().code(), kLossTargetOutOfRange);
  }
}

TEST(ChunkForBudget, IsAPowerOfTwoWithinBudgetAndCeiling) {
  EXPECT_EQ(*chunk_for_budget(151936, 256 << 20), 256);
  EXPECT_EQ(*chunk_for_budget(512, 2048), 1);
  EXPECT_EQ(*chunk_for_budget(512, 2048 * 8 - 1), 4);
  EXPECT_EQ(*chunk_for_budget(1 << 20, int64_t{1} << 60), 128);  // 2^27 cells
}

}  // namespace
}  // namespace ullage::runtime
