// What users of other libraries report, as inputs with right answers. The answers were worked out
// independently of this code, to the digits given; the tests hold the float64 oracle to them.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "support/compare.h"
#include "support/head_random.h"

namespace ullage::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kSixDigits = 6e-7;

using Values = std::vector<double>;

HeadConfig config_of(std::vector<LossTerm> terms) {
  for (size_t t = 0; t < terms.size(); ++t) {
    if (terms[t].name.empty()) terms[t].name = "term" + std::to_string(t);
  }
  return {.terms = std::move(terms)};
}

HeadInputs logits_of(Values logits, int64_t vocab) {
  HeadInputs inputs;
  inputs.shape = {static_cast<int64_t>(logits.size()) / vocab, 0, vocab};
  inputs.logits = std::move(logits);
  return inputs;
}

const LossTerm kSum = {.divisor = 1};  // cross-entropy, sum over the rows

// R1: weights per token, one row ignored; that row's weight, and NaN in its inputs, do not matter.
TEST(HeadComplaints, PerTokenUpstreamWeights) {
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
TEST(HeadComplaints, GradientOfAConfidentLabel) {
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
TEST(HeadComplaints, PolicyNormalizers) {
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
TEST(HeadComplaints, MicroBatchesOverAGlobalDivisorAddUp) {
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
TEST(HeadComplaints, FullyMaskedSequenceContributesZero) {
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
TEST(HeadComplaints, CispoWeightsAreNotDifferentiated) {
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

LossTerm distill(Divergence divergence, double beta = .5) {
  return {.kind = LossKind::kDistillation, .divisor = 1, .divergence = divergence, .beta = beta};
}

HeadConfig distill_config(LossTerm term, lossk::Teacher teacher) {
  HeadConfig config = config_of({term});
  config.teachers = {teacher};
  return config;
}

// R9: the four divergences of one pair of rows.
TEST(HeadComplaints, Divergences) {
  HeadInputs inputs = logits_of({1, 2, 3}, 3);
  inputs.teachers = {{.logits = {3, 1, 0}}};
  const auto run = [&](Divergence divergence) {
    return reference::head_losses(distill_config(distill(divergence), {.vocab = 3}), inputs);
  };
  EXPECT_NEAR(run(Divergence::kCrossEntropy).total, 2.209391, kSixDigits);
  EXPECT_NEAR(run(Divergence::kForwardKl).total, 1.685124, kSixDigits);
  EXPECT_NEAR(run(Divergence::kReverseKl).total, 1.822630, kSixDigits);
  EXPECT_NEAR(run(Divergence::kJensenShannon).total, .353154, kSixDigits);
  EXPECT_TRUE(
      close(run(Divergence::kForwardKl).d_logits, Values{-.753764, .130533, .623231}, kSixDigits));
  EXPECT_TRUE(
      close(run(Divergence::kReverseKl).d_logits, Values{-.365559, -.259508, .625067}, kSixDigits));
}

// R9: equal distributions give exactly 0, at any temperature, with columns masked in both, and
// from logits as from hidden states.
TEST(HeadComplaints, IdenticalTeacherGivesExactlyZero) {
  Rng rng(test_seed());
  for (int round = 0; round < 50; ++round) {
    RandomHead head = random_head(rng, 4, 3, 33);
    HeadInputs& inputs = head.inputs;
    const double scale = std::exp(uniform(rng, -2, 4));
    for (double& value : inputs.hidden) value *= scale;
    inputs.teachers = {{.hidden = inputs.hidden, .weight = inputs.weight}};
    HeadConfig config;
    config.teachers = {{.kind = lossk::TeacherKind::kHidden, .vocab = 33, .d_model = 3}};
    for (const Divergence divergence :
         {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJensenShannon}) {
      LossTerm term = distill(divergence, uniform(rng, 0.05, 0.95));
      term.name = std::to_string(config.terms.size());
      term.temperature = term.student_temperature = 1.5;
      config.terms.push_back(term);
    }
    const HeadResult result = reference::head_losses(config, inputs);
    EXPECT_EQ(result.terms, Values(3, 0.0));
    EXPECT_EQ(result.d_logits, Values(4 * 33, 0.0));
  }
}

TEST(HeadComplaints, MaskedVocabularyContributesZero) {
  Rng rng(test_seed() + 1);
  const Values z = normals(rng, 5, 2), t = normals(rng, 5, 2);
  HeadInputs narrow = logits_of({z[0], z[2], z[4]}, 3);
  narrow.teachers = {{.logits = {t[0], t[2], t[4]}}};
  narrow.labels = {1};
  HeadInputs masked = logits_of({z[0], -kInf, z[2], -kInf, z[4]}, 5);
  masked.teachers = {{.logits = {t[0], -kInf, t[2], -kInf, t[4]}}};
  masked.labels = {2};
  for (const Divergence divergence : {Divergence::kCrossEntropy, Divergence::kForwardKl,
                                      Divergence::kReverseKl, Divergence::kJensenShannon}) {
    HeadConfig config = config_of({distill(divergence, .3), {.kind = LossKind::kZLoss}, {}});
    config.teachers = {{.vocab = 3}};
    const HeadResult expected = reference::head_losses(config, narrow);
    config.teachers = {{.vocab = 5}};
    const HeadResult result = reference::head_losses(config, masked);
    EXPECT_EQ(result.terms, expected.terms);
    EXPECT_EQ(result.entropy, expected.entropy);
    const Values& g = expected.d_logits;
    EXPECT_EQ(result.d_logits, (Values{g[0], 0, g[1], 0, g[2]}));
  }
}

// Probabilities that underflow are tiny, not NaN: their logarithms are known.
TEST(HeadComplaints, UnderflowGivesNoNan) {
  HeadInputs inputs = logits_of({0, -800, 3, -744.5}, 4);
  inputs.teachers = {{.logits = {0, -900, -1000, 2}}};
  for (const double beta : {0.01, 0.5, 0.75, 0.99}) {
    for (const Divergence divergence : {Divergence::kCrossEntropy, Divergence::kForwardKl,
                                        Divergence::kReverseKl, Divergence::kJensenShannon}) {
      const HeadResult result =
          reference::head_losses(distill_config(distill(divergence, beta), {.vocab = 4}), inputs);
      EXPECT_TRUE(std::isfinite(result.total));
      for (const double g : result.d_logits) EXPECT_TRUE(std::isfinite(g));
    }
  }
}

// R9c: what a top-2 teacher says of the other columns.
TEST(HeadComplaints, TopKTeacher) {
  const Values teacher = {3, 1, 0, -1, 2};
  double sum = 0;
  for (const double value : teacher) sum += std::exp(value);
  HeadInputs inputs = logits_of({1, 2, 3, 0, -1}, 5);
  inputs.teachers = {{.ids = {0, 4}, .log_probs = {3 - std::log(sum), 2 - std::log(sum)}}};
  const auto run = [&](TopKTail tail) {
    LossTerm term = distill(Divergence::kForwardKl);
    term.top_k_tail = tail;
    return reference::head_losses(distill_config(term, {.kind = lossk::TeacherKind::kTopK, .k = 2}),
                                  inputs);
  };
  EXPECT_NEAR(run(TopKTail::kTruncated).total, 1.975182, kSixDigits);
  EXPECT_NEAR(run(TopKTail::kTailBin).total, 1.723829, kSixDigits);
  EXPECT_NEAR(run(TopKTail::kRenormalized).total, .082608, kSixDigits);
  inputs.teachers = {{.logits = teacher}};
  const HeadResult full =
      reference::head_losses(distill_config(distill(Divergence::kForwardKl), {.vocab = 5}), inputs);
  EXPECT_NEAR(full.total, 1.782343, kSixDigits);
  EXPECT_GE(full.total, run(TopKTail::kTailBin).total);
}

// The whole vocabulary as the top k is the full teacher, in each of the three readings.
TEST(HeadComplaints, TopKOfTheWholeVocabularyIsTheFullTeacher) {
  Rng rng(test_seed() + 2);
  RandomHead head = random_head(rng, 5, 0, 7, 7);
  for (const Divergence divergence : {Divergence::kCrossEntropy, Divergence::kForwardKl,
                                      Divergence::kReverseKl, Divergence::kJensenShannon}) {
    LossTerm term = distill(divergence, .3);
    term.name = "full";
    head.config.terms = {term};
    for (const TopKTail tail :
         {TopKTail::kTruncated, TopKTail::kTailBin, TopKTail::kRenormalized}) {
      term.teacher = 2;
      term.top_k_tail = tail;
      term.name = std::to_string(static_cast<int>(tail));
      head.config.terms.push_back(term);
    }
    const HeadResult result = reference::head_losses(head.config, head.inputs);
    for (size_t t = 1; t < 4; ++t) {
      EXPECT_NEAR(result.terms[t], result.terms[0], 1e-13 * (1 + std::abs(result.terms[0])));
      EXPECT_TRUE(close(result.term_d_logits[t], result.term_d_logits[0], 1e-13));
    }
  }
}

// A tail whose columns are all masked has no mass.
TEST(HeadComplaints, TopKWithAMaskedTail) {
  HeadInputs inputs = logits_of({1, 2, -kInf, -kInf}, 4);
  inputs.teachers = {{.ids = {0, 1}, .log_probs = {std::log(.25), std::log(.75)}}};
  for (const Divergence divergence : {Divergence::kCrossEntropy, Divergence::kForwardKl,
                                      Divergence::kReverseKl, Divergence::kJensenShannon}) {
    const HeadResult result = reference::head_losses(
        distill_config(distill(divergence), {.kind = lossk::TeacherKind::kTopK, .k = 2}), inputs);
    EXPECT_TRUE(std::isfinite(result.total));
    for (const double g : result.d_logits) EXPECT_TRUE(std::isfinite(g));
  }
}

// A wider teacher, truncated, is the teacher of the student's columns.
TEST(HeadComplaints, TruncatedTeacher) {
  HeadInputs inputs = logits_of({1, 2, 3, 0, 1, 1}, 3);
  inputs.teachers = {{.logits = {3, 1, 0, 9, 9, 0, 2, 1, 9, 9}}};
  LossTerm term = distill(Divergence::kForwardKl);
  term.truncate_teacher = true;
  const HeadResult wide = reference::head_losses(distill_config(term, {.vocab = 5}), inputs);
  inputs.teachers = {{.logits = {3, 1, 0, 0, 2, 1}}};
  const HeadResult narrow = reference::head_losses(distill_config(term, {.vocab = 3}), inputs);
  EXPECT_EQ(wide.total, narrow.total);
  EXPECT_EQ(wide.d_logits, narrow.d_logits);
}

// R10: a bias, and one that bans a token.
TEST(HeadComplaints, Bias) {
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
TEST(HeadComplaints, LowRankAdapter) {
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
TEST(HeadComplaints, CommonOffset) {
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
TEST(HeadComplaints, ZLossIsReportedApart) {
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
TEST(HeadComplaints, Degenerate) {
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
TEST(HeadComplaints, SmoothingAndClassWeightsAsPyTorch) {
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
TEST(HeadComplaints, SoftcapComesBeforeScale) {
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
TEST(HeadComplaints, VocabularyOffset) {
  HeadInputs inputs = logits_of({1, 2, 3}, 3);
  inputs.labels = {51};
  HeadConfig config = config_of({kSum});
  config.options.vocab_offset = 50;
  EXPECT_NEAR(reference::head_losses(config, inputs).total, 1.407606, kSixDigits);
}

// Preference pairs: summed log-probabilities minus the reference's, one sigmoid a pair.
TEST(HeadComplaints, PreferencePairs) {
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

// Ignored rows are never read: whatever is in them, every output keeps its bits.
TEST(HeadComplaints, PoisonedIgnoredRowsChangeNothing) {
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

// A ratio at the clip bound itself still has a slope.
TEST(HeadComplaints, ClipBoundsAreInclusive) {
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
