#include "session/decoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace ullage::session {
namespace {

using Tokens = std::vector<int32_t>;

struct GoldenCase {
  const char* model;
  const char* values;
};

// gtest names a failure by this.
void PrintTo(const GoldenCase& given, std::ostream* out) { *out << given.model; }

// Small random decoders with float64 values of an independent implementation: see the folder's
// README.
class GoldenModel : public testing::TestWithParam<GoldenCase> {
 protected:
  void SetUp() override {
    const auto models = std::filesystem::path(ULLAGE_TEST_DATA) / "models";
    auto opened = model::Checkpoint::open(models / GetParam().model);
    ASSERT_TRUE(opened.ok()) << opened.status().to_string();
    checkpoint_ = std::make_unique<model::Checkpoint>(*std::move(opened));
    std::ifstream file(models / GetParam().values);
    golden_ = nlohmann::json::parse(file);
  }

  Decoder decoder(const DecoderOptions& options) {
    auto made = Decoder::create(*checkpoint_, options);
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    return *std::move(made);
  }
  size_t d_model() const { return static_cast<size_t>(checkpoint_->config().d_model); }
  size_t vocab() const { return static_cast<size_t>(checkpoint_->config().vocab); }

  std::unique_ptr<model::Checkpoint> checkpoint_;
  nlohmann::json golden_;
};

// The largest difference, relative to the largest expected magnitude.
double relative_error(std::span<const float> actual, const std::vector<double>& expected) {
  double worst = 0, scale = 0;
  EXPECT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    worst = std::max(worst, std::abs(actual[i] - expected[i]));
    scale = std::max(scale, std::abs(expected[i]));
  }
  return worst / scale;
}

TEST_P(GoldenModel, HiddenLogitsAndGreedyTokens) {
  double worst = 0;
  for (const auto& run : golden_["runs"]) {
    const auto prompt = run["prompt"].get<Tokens>();
    const auto greedy = run["greedy"].get<Tokens>();
    Decoder session = decoder({.max_ctx = static_cast<int64_t>(prompt.size() + greedy.size())});
    std::vector<float> hidden(prompt.size() * d_model());
    std::vector<float> logits(vocab());
    ASSERT_TRUE(session.forward(prompt, hidden.data()).ok());
    const std::span<const float> last(hidden.end() - static_cast<int64_t>(d_model()), hidden.end());
    session.logits(last.data(), 1, logits.data());
    worst = std::max(worst, relative_error(last, run["final_hidden_last"]));
    worst = std::max(worst, relative_error(logits, run["last_prompt_logits"]));

    std::vector<float> state(d_model());
    for (size_t step = 0; step < greedy.size(); ++step) {
      const auto best = std::max_element(logits.begin(), logits.end());
      ASSERT_EQ(best - logits.begin(), greedy[step]) << "step " << step;
      const double expected = run["step_top1_logit"][step];
      EXPECT_NEAR(*best, expected, 1e-4 * std::abs(expected));
      ASSERT_TRUE(session.forward({&greedy[step], 1}, state.data()).ok());
      session.logits(state.data(), 1, logits.data());
    }
  }
  EXPECT_LE(worst, 1e-4);
  std::printf("largest relative error %.2e\n", worst);
}

// The grade: any split of the tokens into calls, any max_rows and any number of threads.
TEST_P(GoldenModel, SplitsAndThreadsChangeNoBit) {
  const auto tokens = golden_["runs"][3]["prompt"].get<Tokens>();
  std::vector<float> expected(tokens.size() * d_model());
  const auto n = static_cast<int64_t>(tokens.size());
  Decoder one = decoder({.max_ctx = n, .n_threads = 1});
  for (size_t i = 0; i < tokens.size(); ++i) {
    ASSERT_TRUE(one.forward({&tokens[i], 1}, &expected[i * d_model()]).ok());
  }
  for (const int n_threads : {1, 2, 3, 4}) {
    for (const int64_t max_rows : {1, 7, 16, 256}) {
      for (const size_t split : {1, 13, 33, 70}) {
        Decoder session = decoder({.max_ctx = n + 9, .max_rows = max_rows, .n_threads = n_threads});
        std::vector<float> hidden(expected.size(), -1);
        for (size_t i = 0; i < tokens.size(); i += split) {
          const size_t count = std::min(split, tokens.size() - i);
          ASSERT_TRUE(session.forward({&tokens[i], count}, &hidden[i * d_model()]).ok());
        }
        ASSERT_EQ(std::memcmp(hidden.data(), expected.data(), hidden.size() * sizeof(float)), 0)
            << n_threads << " threads, max_rows " << max_rows << ", split " << split;
      }
    }
  }
}

TEST_P(GoldenModel, AResetSessionEqualsAFreshOne) {
  const auto tokens = golden_["runs"][2]["prompt"].get<Tokens>();
  const auto other = golden_["runs"][3]["prompt"].get<Tokens>();
  Decoder fresh = decoder({.max_ctx = 128});
  Decoder used = decoder({.max_ctx = 128});
  ASSERT_TRUE(used.forward(other, nullptr).ok());
  used.reset();
  std::vector<float> a(tokens.size() * d_model()), b(a.size());
  ASSERT_TRUE(fresh.forward(tokens, a.data()).ok());
  ASSERT_TRUE(used.forward(tokens, b.data()).ok());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
}

TEST_P(GoldenModel, RefusalsChangeNothing) {
  Decoder session = decoder({.max_ctx = 4});
  const Tokens tokens = {1, 2, 3, 4};
  std::vector<float> hidden(5 * d_model(), 7);
  EXPECT_EQ(session.forward(Tokens{1, 2, 3, 4, 5}, hidden.data()).code(), kResidentContextFull);
  EXPECT_EQ(session.forward(Tokens{1, -1}, hidden.data()).code(), kResidentDimensionTooLarge);
  const Tokens beyond = {static_cast<int32_t>(vocab())};
  EXPECT_EQ(session.forward(beyond, hidden.data()).code(), kResidentDimensionTooLarge);
  EXPECT_EQ(session.position(), 0);
  EXPECT_EQ(hidden, std::vector<float>(hidden.size(), 7));
  EXPECT_TRUE(session.forward(tokens, hidden.data()).ok());  // exactly full
  EXPECT_EQ(session.forward({tokens.data(), 1}, nullptr).code(), kResidentContextFull);

  const auto create = [&](const DecoderOptions& options) {
    return Decoder::create(*checkpoint_, options).status().code();
  };
  EXPECT_EQ(create({.max_ctx = 0}), kResidentEmptyDimension);
  EXPECT_EQ(create({.max_ctx = 65537}), kResidentDimensionTooLarge);
  EXPECT_EQ(create({.max_rows = 0}), kResidentEmptyDimension);
}

// The GGUF of qwen3-tiny has quantised weights of every kind, so values of its own; that of Llama 3
// pairs adjacent elements and has its frequency scaling as a tensor.
INSTANTIATE_TEST_SUITE_P(
    Families, GoldenModel,
    testing::Values(GoldenCase{"qwen3-tiny", "qwen3-tiny/golden.json"},
                    GoldenCase{"qwen3-tiny.gguf", "qwen3-tiny.gguf.golden.json"},
                    GoldenCase{"qwen2-tiny-bias", "qwen2-tiny-bias/golden.json"},
                    GoldenCase{"llama-tiny-untied-sharded",
                               "llama-tiny-untied-sharded/golden.json"},
                    GoldenCase{"llama3-rope-tiny-bf16", "llama3-rope-tiny-bf16/golden.json"},
                    GoldenCase{"llama3-rope-tiny-bf16.gguf", "llama3-rope-tiny-bf16/golden.json"}),
    [](const auto& given) {
      std::string name = given.param.model;
      std::replace_if(name.begin(), name.end(), [](char c) { return c == '-' || c == '.'; }, '_');
      return name;
    });

TEST(DecoderPlan, NamesItsBytes) {
  model::Config c;
  c.n_layers = 2;
  c.d_model = 64;
  c.h_q = 4;
  c.h_kv = 2;
  c.d_head = 16;
  c.d_ff = 128;
  c.vocab = 100;
  const auto plan = Decoder::plan(c, {.max_ctx = 32, .n_threads = 1});
  ASSERT_TRUE(plan.ok());
  int64_t sum = 0;
  for (const Booking& booking : plan->bookings) sum += booking.bytes;
  EXPECT_EQ(plan->bytes, sum);
  EXPECT_EQ(plan->bookings[0].bytes + plan->bookings[1].bytes, 2 * 2 * 2 * 32 * 16 * 4);
  c.h_q = 5;
  EXPECT_EQ(Decoder::plan(c, {}).status().code(), kResidentHeadGeometry);
  c.h_q = 4;
  c.d_head = 15;
  EXPECT_EQ(Decoder::plan(c, {}).status().code(), kResidentHeadGeometry);
}

}  // namespace
}  // namespace ullage::session
