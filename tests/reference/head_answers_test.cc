// The oracle on losses of labels, and on what all terms share: right answers.
#include "support/head_answers.h"

#include <gtest/gtest.h>

#include <cmath>

#include "support/compare.h"

namespace ullage::test {
namespace {

// R1: weights per token, one row ignored; that row's weight, and NaN in its inputs, do not matter.
TEST(HeadAnswers, PerTokenUpstreamWeights) {
  for (const double third : {5.0, kNan}) {
    HeadInputs inputs;
    inputs.shape = {4, 2, 3};
    inputs.hidden = {1, 0, 0, 1, third == 5.0 ? 1 : kNan, third == 5.0 ? 1 : kInf, 2, -1};
    inputs.weight = {1, 0, 0, 1, -1, 2};
    inputs.labels = {0, 1, -100, 2};
    inputs.upstream_rows = {2, -1, third, .5};
    const HeadResult result = reference::head_losses(config_of({kSum}), inputs);
    EXPECT_TRUE(close(result.token_loss, Values{.407606, 1.407606, 0, 6.050946}, kSixDigits));
    EXPECT_TRUE(close(result.d_hidden,
                      Values{-.849579, .849579, .575210, -.575210, 0, 0, .973987, -.973987},
                      kSixDigits));
    EXPECT_TRUE(close(result.d_weight,
                      Values{.280812, -.565196, .536771, .731614, -.817583, -.166419}, kSixDigits));
  }
}

// R4: the label's gradient of a confident row is the sum of what the others lose, not a difference
// that cancels.
TEST(HeadAnswers, GradientOfAConfidentLabel) {
  const Values z = {9.125, 11.5, 13.8125, 16.125};
  const Values right = {-.098124, -.0100186, -.00100101, -9.92028e-5};
  for (size_t i = 0; i < z.size(); ++i) {
    Values logits(1000, 0);
    logits[7] = z[i];
    HeadInputs inputs = logits_of(logits, 1000);
    inputs.labels = {7};
    const HeadResult result = reference::head_losses(config_of({kSum}), inputs);
    EXPECT_NEAR(result.d_logits[7], right[i], 2e-5 * std::abs(right[i]));
  }
}

// R10: a bias, and one that bans a token.
TEST(HeadAnswers, Bias) {
  HeadInputs inputs;
  inputs.shape = {1, 2, 2};
  inputs.hidden = {0, 0};
  inputs.weight = {7, -3, 2, 5};
  inputs.bias = {0, std::log(3)};
  inputs.labels = {0};
  HeadConfig config = config_of({kSum});
  config.options.bias = true;
  HeadResult result = reference::head_losses(config, inputs);
  EXPECT_NEAR(result.total, std::log(4), 1e-15);
  EXPECT_TRUE(close(result.d_bias, Values{-.75, .75}, 1e-15));

  inputs.shape.vocab = 3;
  inputs.weight = {7, -3, 2, 5, 1, 1};
  inputs.bias = {0, std::log(3), -kInf};
  result = reference::head_losses(config, inputs);
  EXPECT_NEAR(result.total, std::log(4), 1e-15);
  EXPECT_TRUE(close(result.d_bias, Values{-.75, .75, 0}, 1e-15));
  EXPECT_NEAR(result.entropy[0], -.25 * std::log(.25) - .75 * std::log(.75), 1e-15);
}

// R15: a low-rank adapter moves the loss and has gradients of its own.
TEST(HeadAnswers, LowRankAdapter) {
  HeadInputs inputs;
  inputs.shape = {1, 2, 2};
  inputs.hidden = {1, 0};
  inputs.weight = {1, 0, 0, 1};
  inputs.adapter_a = {1, 1};
  inputs.adapter_b = {1, 0};
  inputs.labels = {0};
  HeadConfig config = config_of({kSum});
  config.options.adapter_rank = 1;
  const HeadResult result = reference::head_losses(config, inputs);
  EXPECT_NEAR(result.total, .126928, kSixDigits);
  EXPECT_TRUE(close(result.d_logits, Values{-.119203, .119203}, kSixDigits));
  EXPECT_TRUE(close(result.d_adapter_b, Values{-.119203, .119203}, kSixDigits));
  EXPECT_TRUE(close(result.d_adapter_a, Values{-.119203, 0}, kSixDigits));
  EXPECT_TRUE(close(result.d_hidden, Values{-.238406, 0}, kSixDigits));
}

// R19: a large common offset costs the loss nothing.
TEST(HeadAnswers, CommonOffset) {
  for (const double offset : {1e4, 3e4, -1e4}) {
    HeadInputs inputs = logits_of({offset + 1, offset + 2, offset + 3}, 3);
    inputs.labels = {0};
    EXPECT_NEAR(reference::head_losses(config_of({kSum}), inputs).total, 2.407605964444380, 1e-12);
  }
  HeadInputs far = logits_of({0, 100}, 2);
  far.labels = {0};
  EXPECT_EQ(reference::head_losses(config_of({kSum}), far).total, 100.0);
}

// R20: z-loss is reported apart, and at weight 0 changes no bit.
TEST(HeadAnswers, ZLossIsReportedApart) {
  HeadInputs inputs = logits_of({1, 2, 3}, 3);
  inputs.labels = {0};
  const LossTerm z = {.name = "z", .kind = LossKind::kZLoss, .weight = .01};
  LossTerm silent = z;
  silent.weight = 0;
  const HeadResult with = reference::head_losses(config_of({kSum, z}), inputs);
  EXPECT_NEAR(with.lse[0], 3.407606, kSixDigits);
  EXPECT_NEAR(with.terms[0], 2.407606, kSixDigits);
  EXPECT_NEAR(.01 * with.terms[1], .116118, kSixDigits);
  EXPECT_NEAR(with.total, 2.523724, kSixDigits);
  EXPECT_TRUE(close(with.d_logits, Values{-.903834, .261407, .710579}, kSixDigits));
  const HeadResult without = reference::head_losses(config_of({kSum}), inputs);
  const HeadResult reported = reference::head_losses(config_of({kSum, silent}), inputs);
  EXPECT_EQ(reported.total, without.total);
  EXPECT_EQ(reported.d_logits, without.d_logits);
  EXPECT_EQ(reported.terms[1], with.terms[1]);
  EXPECT_EQ(with.terms[0], without.terms[0]);
}

// R21: no rows, no valid rows, one column.
TEST(HeadAnswers, Degenerate) {
  HeadConfig config = config_of({{}, {.kind = LossKind::kZLoss}});
  HeadInputs inputs;
  inputs.shape = {0, 3, 5};
  inputs.weight.assign(15, 1);
  HeadResult result = reference::head_losses(config, inputs);
  EXPECT_EQ(result.terms, Values(2, 0.0));
  EXPECT_EQ(result.n_valid, 0);
  EXPECT_EQ(result.d_weight, Values(15, 0.0));

  inputs.shape.n_tok = 2;
  inputs.hidden.assign(6, kNan);
  inputs.labels = {-1, -100};
  result = reference::head_losses(config, inputs);
  EXPECT_EQ(result.terms, Values(2, 0.0));
  EXPECT_EQ(result.n_valid, 0);
  EXPECT_EQ(result.d_weight, Values(15, 0.0));
  EXPECT_EQ(result.d_hidden, Values(6, 0.0));
  EXPECT_EQ(result.argmax, std::vector<int64_t>(2, -1));

  inputs = logits_of({3, -7}, 1);
  inputs.labels = {0, 0};
  result = reference::head_losses(config_of({{}}), inputs);
  EXPECT_EQ(result.total, 0.0);
  EXPECT_EQ(result.d_logits, Values(2, 0.0));
}

// PyTorch's cross_entropy(label_smoothing=0.1, weight=[.5, 2, 1]) on [[1, 2, 3], [0, -1, 2]],
// targets [0, 1], written out: the mean divides by the targets' class weights.
TEST(HeadAnswers, SmoothingAndClassWeightsAsPyTorch) {
  HeadInputs inputs = logits_of({1, 2, 3, 0, -1, 2}, 3);
  inputs.labels = {0, 1};
  inputs.class_weights = {.5, 2, 1};
  const HeadResult result = reference::head_losses(config_of({{.label_smoothing = .1}}), inputs);
  const auto nll = [&](int row, int j) {
    double sum = 0;
    for (int i = 0; i < 3; ++i) sum += std::exp(inputs.logits[3 * row + i]);
    return std::log(sum) - inputs.logits[3 * row + j];
  };
  const double hard = .5 * nll(0, 0) + 2 * nll(1, 1);
  double smooth = 0;
  for (int row = 0; row < 2; ++row) {
    for (int j = 0; j < 3; ++j) smooth += inputs.class_weights[j] * nll(row, j);
  }
  EXPECT_NEAR(result.total, (.9 * hard + .1 / 3 * smooth) / 2.5, 1e-15);
}

// Softcap, then scale: the order matters and is this one.
TEST(HeadAnswers, SoftcapComesBeforeScale) {
  HeadInputs inputs = logits_of({1, 2, 30}, 3);
  inputs.labels = {2};
  HeadConfig config = config_of({kSum});
  config.options.softcap = 5;
  config.options.logits_scale = 2;
  double sum = 0;
  for (const double z : inputs.logits) sum += std::exp(2 * 5 * std::tanh(z / 5));
  EXPECT_NEAR(reference::head_losses(config, inputs).lse[0], std::log(sum), 1e-14);
}

// Labels of a shard count from its offset.
TEST(HeadAnswers, VocabularyOffset) {
  HeadInputs inputs = logits_of({1, 2, 3}, 3);
  inputs.labels = {51};
  HeadConfig config = config_of({kSum});
  config.options.vocab_offset = 50;
  EXPECT_NEAR(reference::head_losses(config, inputs).total, 1.407606, kSixDigits);
}

// Ignored rows are never read: whatever is in them, every output keeps its bits.
TEST(HeadAnswers, PoisonedIgnoredRowsChangeNothing) {
  Rng rng(test_seed() + 3);
  for (const int64_t d_model : {0, 3}) {
    RandomHead head = random_head(rng, 8, d_model, 9);
    for (const LossTerm& term : term_variants()) {
      if (term.mask != RowMask::kAuto) continue;
      head.config.terms.push_back(term);
    }
    head.config.options.bias = d_model > 0;
    HeadInputs poisoned = head.inputs;
    const auto poison = [&](Values& values, size_t row) {
      const size_t width = values.size() / 8;
      for (size_t i = 0; i < width; ++i) values[row * width + i] = i % 2 ? kNan : kInf;
    };
    size_t n_poisoned = 0;
    for (size_t row = 0; row < 8; ++row) {
      if (poisoned.labels[row] >= 0) continue;
      ++n_poisoned;
      for (Values* values :
           {&poisoned.logits, &poisoned.hidden, &poisoned.token_weights, &poisoned.advantages,
            &poisoned.old_log_probs, &poisoned.reference_log_probs, &poisoned.teachers[0].logits,
            &poisoned.teachers[1].hidden, &poisoned.teachers[2].log_probs}) {
        poison(*values, row);
      }
      poisoned.segments[row] = 1000;
      for (int64_t i = 0; i < 2; ++i) poisoned.teachers[2].ids[2 * row + i] = -7;
    }
    const HeadResult clean = reference::head_losses(head.config, head.inputs);
    const HeadResult result = reference::head_losses(head.config, poisoned);
    if (n_poisoned == 0) continue;
    EXPECT_EQ(result.terms, clean.terms);
    EXPECT_EQ(result.d_logits, clean.d_logits);
    EXPECT_EQ(result.d_hidden, clean.d_hidden);
    EXPECT_EQ(result.d_weight, clean.d_weight);
    EXPECT_EQ(result.token_loss, clean.token_loss);
  }
}

}  // namespace
}  // namespace ullage::test
