// The oracle on policy terms and preference pairs: right answers.
#include <gtest/gtest.h>

#include <cmath>

#include "support/compare.h"
#include "support/head_answers.h"

namespace ullage::test {
namespace {

struct PolicyCase {
  HeadInputs inputs;
  Values log_probs;
};

// Rows whose label log-probabilities are the given ones exactly: two columns, ln p and ln(1 - p).
PolicyCase policy_case() {
  PolicyCase result;
  result.log_probs = {-1, -2, -.5, -3, -.7};
  Values logits;
  for (const double lp : result.log_probs) {
    logits.push_back(lp);
    logits.push_back(std::log(-std::expm1(lp)));
  }
  result.inputs = logits_of(logits, 2);
  result.inputs.labels.assign(5, 0);
  result.inputs.segments = {0, 0, 0, 1, 1};
  result.inputs.n_segments = 2;
  result.inputs.old_log_probs = {-1.2, -1.5, -.5, -2, -.7};
  result.inputs.reference_log_probs = {-1, -1.8, -.9, -3.2, -.6};
  result.inputs.advantages = {1, 1, 1, -.5, -.5};
  return result;
}

// dLoss / d lp of each row, from d logit_label = slope (1 - q_label).
Values slopes(const HeadResult& result, const Values& log_probs) {
  Values values;
  for (size_t i = 0; i < log_probs.size(); ++i) {
    values.push_back(result.d_logits[2 * i] / -std::expm1(log_probs[i]));
  }
  return values;
}

LossTerm policy(LossKind kind, PolicyNormalizer normalizer) {
  return {
      .kind = kind, .epsilon_high = .28, .kl_beta = .04, .normalizer = normalizer, .max_length = 3};
}

// R8: token and sequence ratios under the three normalisers.
TEST(HeadPolicyAnswers, PolicyNormalizers) {
  const PolicyCase given = policy_case();
  const auto run = [&](LossKind kind, PolicyNormalizer normalizer) {
    return reference::head_losses(config_of({policy(kind, normalizer)}), given.inputs);
  };
  const HeadResult tokens = run(LossKind::kGrpo, PolicyNormalizer::kTokens);
  EXPECT_TRUE(close(tokens.token_loss, Values{-1.221403, -.605675, -.997187, .400749, .500207},
                    kSixDigits));
  Values slope = slopes(tokens, given.log_probs);
  for (double& value : slope) value *= 5;
  EXPECT_TRUE(close(slope, Values{-1.221403, -.615387, -.986813, .007251, .495793}, kSixDigits));
  EXPECT_NEAR(tokens.terms[0], -.384662, kSixDigits);
  EXPECT_NEAR(run(LossKind::kGrpo, PolicyNormalizer::kSequenceMeans).terms[0], -.245472,
              kSixDigits);
  EXPECT_NEAR(run(LossKind::kGrpo, PolicyNormalizer::kMaxLength).terms[0], -.320551, kSixDigits);

  const HeadResult sequences = run(LossKind::kGspo, PolicyNormalizer::kTokens);
  EXPECT_TRUE(close(sequences.token_loss, Values{-.904837, -.903981, -.902025, .400749, .400207},
                    kSixDigits));
  EXPECT_NEAR(sequences.terms[0], -.381977, kSixDigits);
  EXPECT_NEAR(run(LossKind::kGspo, PolicyNormalizer::kSequenceMeans).terms[0], -.251568,
              kSixDigits);
  EXPECT_NEAR(run(LossKind::kGspo, PolicyNormalizer::kMaxLength).terms[0], -.318315, kSixDigits);
}

// R8: two micro-batches over the global normaliser give the batch's sum.
TEST(HeadPolicyAnswers, MicroBatchesOverAGlobalDivisorAddUp) {
  const HeadInputs whole = policy_case().inputs;
  for (const LossKind kind : {LossKind::kGrpo, LossKind::kGspo, LossKind::kCispo}) {
    LossTerm term = policy(kind, PolicyNormalizer::kTokens);
    term.divisor = 5;
    const HeadConfig config = config_of({term});
    HeadInputs first = whole, second = whole;
    for (int i = 0; i < 5; ++i) (i < 3 ? second : first).labels[i] = -100;
    EXPECT_NEAR(
        reference::head_losses(config, first).total + reference::head_losses(config, second).total,
        reference::head_losses(config, whole).total, 1e-15);
  }
}

// R8: a sequence without a label contributes 0, not 0 / 0; its segment id, and a padded row's, may
// be anything.
TEST(HeadPolicyAnswers, FullyMaskedSequenceContributesZero) {
  const PolicyCase given = policy_case();
  for (const LossKind kind : {LossKind::kGrpo, LossKind::kGspo, LossKind::kCispo}) {
    LossTerm term = policy(kind, PolicyNormalizer::kSequenceMeans);
    term.divisor = 2;
    HeadInputs padded = given.inputs;
    padded.labels[3] = padded.labels[4] = -100;
    padded.segments[3] = padded.segments[4] = 2;  // n_segments: out of bounds, were it read
    padded.old_log_probs[3] = kNan;
    HeadInputs alone = given.inputs;
    alone.shape.n_tok = 3;
    alone.labels.resize(3);
    const HeadResult expected = reference::head_losses(config_of({term}), alone);
    const HeadResult result = reference::head_losses(config_of({term}), padded);
    EXPECT_EQ(result.total, expected.total);
    EXPECT_TRUE(
        std::equal(expected.d_logits.begin(), expected.d_logits.end(), result.d_logits.begin()));
    EXPECT_EQ(Values(result.d_logits.begin() + 6, result.d_logits.end()), Values(4, 0.0));
  }
}

// cispo's clipped weight is a constant: the slope is -clip(r) A, inside and outside the bounds.
TEST(HeadPolicyAnswers, CispoWeightsAreNotDifferentiated) {
  const PolicyCase given = policy_case();
  LossTerm term = policy(LossKind::kCispo, PolicyNormalizer::kTokens);
  term.kl_beta = 0;
  term.divisor = 1;
  const HeadResult result = reference::head_losses(config_of({term}), given.inputs);
  Values weight, loss;
  for (size_t i = 0; i < 5; ++i) {
    const double r = std::exp(given.log_probs[i] - given.inputs.old_log_probs[i]);
    weight.push_back(-std::clamp(r, .8, 1.28) * given.inputs.advantages[i]);
    loss.push_back(weight[i] * given.log_probs[i]);
  }
  EXPECT_TRUE(close(result.token_loss, loss, 1e-14));
  EXPECT_TRUE(close(slopes(result, given.log_probs), weight, 1e-14));
}

// Preference pairs: summed log-probabilities minus the reference's, one sigmoid a pair.
TEST(HeadPolicyAnswers, PreferencePairs) {
  PolicyCase given = policy_case();
  given.inputs.pairs = {0, 1};
  const LossTerm term = {.kind = LossKind::kDpo, .beta = .1};
  const HeadResult result = reference::head_losses(config_of({term}), given.inputs);
  const double chosen = (-1 - 2 - .5) - (-1 - 1.8 - .9), rejected = (-3 - .7) - (-3.2 - .6);
  const double margin = .1 * (chosen - rejected);
  EXPECT_NEAR(result.total, -std::log(1 / (1 + std::exp(-margin))), 1e-14);
  const double slope = -.1 / (1 + std::exp(margin));
  EXPECT_TRUE(
      close(slopes(result, given.log_probs), Values{slope, slope, slope, -slope, -slope}, 1e-14));
  // Both ends of the sigmoid stay finite.
  given.inputs.reference_log_probs = {-5000, 0, 0, 0, 0};
  LossTerm steep = term;
  steep.beta = 10;
  EXPECT_EQ(reference::head_losses(config_of({steep}), given.inputs).total, 0.0);
  given.inputs.pairs = {1, 0};
  EXPECT_NEAR(reference::head_losses(config_of({steep}), given.inputs).total, 50002, 1);
}

// A ratio at the clip bound itself still has a slope.
TEST(HeadPolicyAnswers, ClipBoundsAreInclusive) {
  for (const double advantage : {1.0, -1.0}) {
    HeadInputs inputs = logits_of({0, 0}, 2);  // lp = -ln 2; with lp_old equal r is 1
    inputs.labels = {0};
    inputs.old_log_probs = {-std::log(2)};
    inputs.advantages = {advantage};
    const LossTerm term = {.kind = LossKind::kGrpo, .epsilon_low = 0, .epsilon_high = 0};
    const HeadResult result = reference::head_losses(config_of({term}), inputs);
    EXPECT_EQ(result.total, -advantage);
    EXPECT_EQ(result.d_logits, (Values{-advantage / 2, advantage / 2}));
  }
}

}  // namespace
}  // namespace ullage::test
