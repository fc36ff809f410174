// The oracle on distillation: right answers.
#include <gtest/gtest.h>

#include <cmath>

#include "support/compare.h"
#include "support/head_answers.h"

namespace ullage::test {
namespace {

LossTerm distill(Divergence divergence, double beta = .5) {
  return {.kind = LossKind::kDistillation, .divisor = 1, .divergence = divergence, .beta = beta};
}

HeadConfig distill_config(LossTerm term, lossk::Teacher teacher) {
  HeadConfig config = config_of({term});
  config.teachers = {teacher};
  return config;
}

// R9: the four divergences of one pair of rows.
TEST(HeadDistillationAnswers, Divergences) {
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
TEST(HeadDistillationAnswers, IdenticalTeacherGivesExactlyZero) {
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

TEST(HeadDistillationAnswers, MaskedVocabularyContributesZero) {
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
TEST(HeadDistillationAnswers, UnderflowGivesNoNan) {
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
TEST(HeadDistillationAnswers, TopKTeacher) {
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
TEST(HeadDistillationAnswers, TopKOfTheWholeVocabularyIsTheFullTeacher) {
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
TEST(HeadDistillationAnswers, TopKWithAMaskedTail) {
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
TEST(HeadDistillationAnswers, TruncatedTeacher) {
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

}  // namespace
}  // namespace ullage::test
