#include "ullage/lossk/cross_entropy.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

namespace ullage::lossk {
namespace {

struct Problem {
  int64_t n_tok;
  int64_t d_model;
  int64_t vocab;
  std::vector<double> hidden;
  std::vector<double> weight;
  std::vector<int64_t> targets;

  FusedCrossEntropy fused(int64_t chunk) const {
    return fused_linear_ce_flat(hidden, weight, targets, n_tok, d_model, vocab, chunk);
  }
  FusedCrossEntropyGradients gradients() const {
    return fused_linear_ce_bwd_flat(hidden, weight, targets, n_tok, d_model, vocab);
  }
};

Problem random_problem(int64_t n_tok, int64_t d_model, int64_t vocab, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int64_t> label(0, vocab - 1);
  Problem p{n_tok, d_model, vocab, {}, {}, {}};
  for (int64_t i = 0; i < n_tok * d_model; ++i) p.hidden.push_back(normal(random));
  for (int64_t i = 0; i < vocab * d_model; ++i) p.weight.push_back(normal(random));
  for (int64_t i = 0; i < n_tok; ++i) p.targets.push_back(label(random));
  return p;
}

void expect_close(const std::vector<double>& actual, const std::vector<double>& expected,
                  double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], tolerance * std::max(1.0, std::abs(expected[i]))) << i;
  }
}

TEST(CrossEntropy, UniformLogitsGiveLogVocabToTheLastBit) {
  const std::vector<double> logits(6 * 9, 0.25);
  const std::vector<int64_t> targets = {0, 3, 6, 0, 3, 6};
  const CrossEntropy out = ce_from_logits_flat(logits, targets, 6, 9);
  EXPECT_EQ(out.status, 580);
  EXPECT_EQ(out.mean_loss, std::log(9.0));
  EXPECT_EQ(out.mean_loss, 2.1972245773362196);
  EXPECT_EQ(out.token_losses, std::vector<double>(6, std::log(9.0)));
}

// The shift happens before either term is formed: 2^52 as a common offset changes no bit.
TEST(CrossEntropy, ACommonOffsetCostsNothing) {
  const std::vector<double> logits = {1, -3, 5, 0, 2, 2};
  std::vector<double> shifted = logits;
  for (double& z : shifted) z += 0x1p52;
  const std::vector<int64_t> targets = {1, 2};
  EXPECT_EQ(ce_from_logits_flat(logits, targets, 2, 3).token_losses,
            ce_from_logits_flat(shifted, targets, 2, 3).token_losses);
}

TEST(CrossEntropy, AgreesWithAutogradElsewhere) {
  std::ifstream file(std::string(ULLAGE_TEST_DATA) + "/fused_linear_ce.json");
  const nlohmann::json golden = nlohmann::json::parse(file);
  ASSERT_EQ(golden["cases"].size(), 4u);
  for (const auto& c : golden["cases"]) {
    const Problem p{c["n_tok"], c["d_model"], c["vocab"], c["hidden"], c["weight"], c["targets"]};
    const double mean_loss = c["mean_loss"];
    for (int64_t chunk = 1; chunk <= p.n_tok + 1; ++chunk) {
      const FusedCrossEntropy forward = p.fused(chunk);
      ASSERT_EQ(forward.status, 580);
      EXPECT_NEAR(forward.mean_loss, mean_loss, 1e-12 * std::max(1.0, mean_loss));
      expect_close(forward.token_losses, c["token_losses"], 1e-12);
    }
    const FusedCrossEntropyGradients backward = p.gradients();
    ASSERT_EQ(backward.status, 580);
    EXPECT_NEAR(backward.mean_loss, mean_loss, 1e-12 * std::max(1.0, mean_loss));
    expect_close(backward.d_hidden, c["d_hidden"], 1e-12);
    expect_close(backward.d_weight, c["d_weight"], 1e-12);
  }
}

TEST(FusedCrossEntropy, EveryChunkSizeGivesTheSameBits) {
  for (const auto& [n_tok, d_model, vocab] :
       {std::array<int64_t, 3>{1, 1, 1}, {2, 3, 1}, {17, 5, 31}, {33, 8, 127}}) {
    const Problem p = random_problem(n_tok, d_model, vocab, 7);
    const FusedCrossEntropy whole = p.fused(n_tok);
    for (int64_t chunk = 1; chunk <= n_tok + 2; ++chunk) {
      const FusedCrossEntropy out = p.fused(chunk);
      ASSERT_EQ(out.status, 580);
      ASSERT_EQ(out.mean_loss, whole.mean_loss) << chunk;
      ASSERT_EQ(out.total_loss, whole.total_loss) << chunk;
      ASSERT_EQ(out.token_losses, whole.token_losses) << chunk;
      ASSERT_EQ(out.n_chunks, (n_tok + chunk - 1) / chunk);
      ASSERT_EQ(out.peak_logit_cells, static_cast<double>(std::min(chunk, n_tok) * vocab));
    }
    EXPECT_EQ(p.gradients().mean_loss, whole.mean_loss);
    const ChunkInvariance both =
        ce_chunk_invariance_flat(p.hidden, p.weight, p.targets, n_tok, d_model, vocab);
    EXPECT_EQ(both.status, 580);
    EXPECT_EQ(both.max_abs_delta, 0.0);
    EXPECT_EQ(both.mean_loss_chunk_one, whole.mean_loss);
    EXPECT_EQ(both.mean_loss_chunk_all, whole.mean_loss);
  }
}

// Small integers: the logits are exact, so the fused form must equal the form from logits bit for
// bit.
RC_GTEST_PROP(FusedCrossEntropyProperty, EqualsTheLossOfItsLogits, ()) {
  const int64_t n_tok = *rc::gen::inRange<int64_t>(1, 8);
  const int64_t d_model = *rc::gen::inRange<int64_t>(1, 6);
  const int64_t vocab = *rc::gen::inRange<int64_t>(1, 12);
  const auto integers = [](int64_t count) {
    const auto small = rc::gen::map(rc::gen::inRange(-9, 10), [](int i) { return double(i); });
    return *rc::gen::container<std::vector<double>>(static_cast<size_t>(count), small);
  };
  Problem p{n_tok, d_model, vocab, integers(n_tok * d_model), integers(vocab * d_model), {}};
  p.targets = *rc::gen::container<std::vector<int64_t>>(static_cast<size_t>(n_tok),
                                                        rc::gen::inRange<int64_t>(0, vocab));
  std::vector<double> logits;
  for (int64_t t = 0; t < n_tok; ++t) {
    for (int64_t j = 0; j < vocab; ++j) {
      double dot = 0;
      for (int64_t d = d_model; d-- > 0;)
        dot += p.hidden[t * d_model + d] * p.weight[j * d_model + d];
      logits.push_back(dot);
    }
  }
  const CrossEntropy from_logits = ce_from_logits_flat(logits, p.targets, n_tok, vocab);
  const FusedCrossEntropy fused = p.fused(*rc::gen::inRange<int64_t>(1, n_tok + 2));
  RC_ASSERT(fused.status == kLossOk);
  RC_ASSERT(fused.token_losses == from_logits.token_losses);
  RC_ASSERT(fused.total_loss == from_logits.total_loss);
  for (double loss : fused.token_losses) RC_ASSERT(loss >= 0);
}

TEST(FusedCrossEntropyBackward, AgreesWithCentralDifferences) {
  const Problem p = random_problem(5, 4, 11, 3);
  const FusedCrossEntropyGradients g = p.gradients();
  const double step = 1e-5;
  const auto difference = [&](std::vector<double> Problem::* list, size_t i) {
    Problem above = p, below = p;
    (above.*list)[i] += step;
    (below.*list)[i] -= step;
    return (above.fused(2).mean_loss - below.fused(2).mean_loss) / (2 * step);
  };
  for (size_t i = 0; i < p.hidden.size(); ++i) {
    EXPECT_NEAR(g.d_hidden[i], difference(&Problem::hidden, i), 1e-8) << i;
  }
  for (size_t i = 0; i < p.weight.size(); ++i) {
    EXPECT_NEAR(g.d_weight[i], difference(&Problem::weight, i), 1e-8) << i;
  }
}

// Softmax and one-hot both sum to one, so each column of d_weight sums to zero over the vocabulary.
TEST(FusedCrossEntropyBackward, DWeightCancelsOverTheVocabulary) {
  const Problem p = random_problem(16, 12, 257, 5);
  const FusedCrossEntropyGradients g = p.gradients();
  double largest = 0;
  for (int64_t d = 0; d < p.d_model; ++d) {
    double sum = 0;
    for (int64_t j = 0; j < p.vocab; ++j) {
      sum += g.d_weight[j * p.d_model + d];
      largest = std::max(largest, std::abs(g.d_weight[j * p.d_model + d]));
    }
    EXPECT_NEAR(sum, 0.0, 1e-9);
  }
  EXPECT_GT(largest, 1e-3) << "gradients of zero would cancel too";
}

// Every refusal reaches every function that can give it, and leaves nothing behind.
void expect_all_refuse(const Problem& p, int status) {
  const FusedCrossEntropy forward = p.fused(1);
  EXPECT_EQ(forward.status, status);
  EXPECT_EQ(forward.mean_loss, 0);
  EXPECT_EQ(forward.total_loss, 0);
  EXPECT_TRUE(forward.token_losses.empty());
  EXPECT_EQ(forward.peak_logit_cells, 0);
  EXPECT_EQ(forward.n_chunks, 0);
  const FusedCrossEntropyGradients backward = p.gradients();
  EXPECT_EQ(backward.status, status);
  EXPECT_EQ(backward.mean_loss, 0);
  EXPECT_TRUE(backward.d_hidden.empty());
  EXPECT_TRUE(backward.d_weight.empty());
  const ChunkInvariance both =
      ce_chunk_invariance_flat(p.hidden, p.weight, p.targets, p.n_tok, p.d_model, p.vocab);
  EXPECT_EQ(both.status, status);
  EXPECT_EQ(both.max_abs_delta, 0);
  EXPECT_EQ(both.mean_loss_chunk_one, 0);
  EXPECT_EQ(both.mean_loss_chunk_all, 0);
}

TEST(FusedCrossEntropy, Refuses) {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const Problem good = random_problem(3, 2, 5, 1);
  ASSERT_EQ(good.fused(1).status, 580);
  const auto with = [&](auto change) {
    Problem p = good;
    change(p);
    return p;
  };
  for (int64_t Problem::* dim : {&Problem::n_tok, &Problem::d_model, &Problem::vocab}) {
    expect_all_refuse(with([&](Problem& p) { p.*dim = 0; }), 581);
    expect_all_refuse(with([&](Problem& p) { p.*dim = kMin; }), 581);
    expect_all_refuse(with([&](Problem& p) { p.*dim = kMax; }), 583);
  }
  expect_all_refuse(with([](Problem& p) { p.hidden.pop_back(); }), 582);
  expect_all_refuse(with([](Problem& p) { p.weight.pop_back(); }), 582);
  expect_all_refuse(with([](Problem& p) { p.targets.pop_back(); }), 582);
  expect_all_refuse(with([](Problem& p) { p.targets[1] = -1; }), 586);
  expect_all_refuse(with([](Problem& p) { p.targets[2] = p.vocab; }), 586);
  expect_all_refuse(with([](Problem& p) { p.targets[0] = kMin; }), 586);
  for (double bad : {std::nan(""), static_cast<double>(INFINITY)}) {
    expect_all_refuse(with([&](Problem& p) { p.hidden.back() = bad; }), 585);
    expect_all_refuse(with([&](Problem& p) { p.weight.front() = -bad; }), 585);
  }
  expect_all_refuse(with([](Problem& p) { p.hidden = p.weight = std::vector(10, 1e200); }), 585);

  EXPECT_EQ(good.fused(0).status, 581);
  EXPECT_EQ(good.fused(kMin).status, 581);
  EXPECT_EQ(good.fused(kMax).status, 587);
  EXPECT_EQ(fused_linear_ce_flat({}, {}, {}, 1 << 26, 1 << 17, 1 << 20, 1).status, 584);
}

TEST(FusedCrossEntropy, WhatLiesBeyondTheShapeIsNeverRead) {
  const Problem good = random_problem(3, 2, 5, 1);
  Problem longer = good;
  longer.hidden.push_back(std::nan(""));
  longer.weight.push_back(std::nan(""));
  longer.targets.push_back(-7);
  EXPECT_EQ(longer.fused(2).token_losses, good.fused(2).token_losses);
  EXPECT_EQ(longer.gradients().d_weight, good.gradients().d_weight);
}

TEST(CrossEntropy, Refuses) {
  const std::vector<double> logits = {0, 1, 2, 3};
  const std::vector<int64_t> targets = {0, 1};
  const auto status = [&](std::vector<double> z, std::vector<int64_t> y, int64_t n, int64_t v) {
    const CrossEntropy out = ce_from_logits_flat(z, y, n, v);
    EXPECT_EQ(out.token_losses.empty(), out.status != kLossOk);
    return static_cast<int>(out.status);
  };
  EXPECT_EQ(status(logits, targets, 2, 2), 580);
  EXPECT_EQ(status(logits, targets, 0, 2), 581);
  EXPECT_EQ(status(logits, targets, 2, 3), 582);
  EXPECT_EQ(status(logits, {0}, 2, 2), 582);
  EXPECT_EQ(status(logits, targets, (1 << 26) + 1, 2), 583);
  EXPECT_EQ(status({0, 1, 2, std::nan("")}, targets, 2, 2), 585);
  EXPECT_EQ(status({-1.7e308, 1.7e308, 0, 0}, targets, 2, 2), 585) << "the loss overflows";
  EXPECT_EQ(status(logits, {0, -1}, 2, 2), 586);
  EXPECT_EQ(status(logits, {0, 2}, 2, 2), 586);
}

}  // namespace
}  // namespace ullage::lossk
