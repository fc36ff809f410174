// Plans of the losses run on the CPU: against the float64 oracle, against themselves to the bit,
// and against their promise of memory.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cpu/instruction_set.h"
#include "support/compare.h"
#include "support/head_plan_case.h"
#include "support/head_random.h"

namespace ullage::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

void expect_close(const char* what, const std::vector<double>& actual,
                  const std::vector<double>& expected, double relative) {
  double largest = 1;
  for (const double v : expected) {
    if (std::isfinite(v)) largest = std::max(largest, std::abs(v));
  }
  if (actual.empty() && expected.empty()) return;
  const Comparison c = compare(actual, expected, relative * largest);
  EXPECT_TRUE(c.ok || c.message.starts_with("vacuous")) << what << ": " << c.message;
}

void expect_matches_oracle(const PlanCase& c, double tolerance) {
  const PlanOutcome outcome = run_plan(c);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.to_string();
  const reference::HeadResult expected = reference::head_losses(c.config, c.inputs);
  const reference::HeadResult& actual = outcome.result;
  expect_close("terms", actual.terms, expected.terms, tolerance);
  expect_close("total", {actual.total}, {expected.total}, tolerance);
  expect_close("token_loss", actual.token_loss, expected.token_loss, tolerance);
  expect_close("lse", actual.lse, expected.lse, tolerance);
  if (!c.inputs.labels.empty()) {
    expect_close("label_log_prob", actual.label_log_prob, expected.label_log_prob, tolerance);
    EXPECT_EQ(actual.correct, expected.correct);
  }
  expect_close("entropy", actual.entropy, expected.entropy, tolerance);
  EXPECT_EQ(actual.argmax, expected.argmax);
  EXPECT_EQ(actual.n_valid, expected.n_valid);
  if (c.policy_metrics) {
    for (size_t i = 0; i < c.config.terms.size(); ++i) {
      const LossKind kind = c.config.terms[i].kind;
      if (kind != LossKind::kGrpo && kind != LossKind::kGspo) continue;
      const auto numbers = [](const lossk::PolicyMetrics& m) {
        return std::vector<double>{m.old_log_probs,
                                   m.new_log_probs,
                                   m.ratio,
                                   m.kl,
                                   m.clipped,
                                   m.advantage,
                                   m.entropy,
                                   m.ratio_sum,
                                   m.ratio_squared_sum,
                                   m.max_advantage,
                                   m.min_advantage,
                                   static_cast<double>(m.n_tokens),
                                   static_cast<double>(m.n_segments)};
      };
      expect_close("metrics", numbers(actual.policy_metrics[i]),
                   numbers(expected.policy_metrics[i]), tolerance);
    }
  }
  if (!c.gradient) return;
  expect_close("d_logits", actual.d_logits,
               c.inputs.shape.d_model == 0 ? expected.d_logits : std::vector<double>(), tolerance);
  expect_close("d_hidden", actual.d_hidden, expected.d_hidden, tolerance);
  expect_close("d_weight", actual.d_weight, expected.d_weight, tolerance);
  expect_close("d_bias", actual.d_bias, expected.d_bias, tolerance);
  if (c.config.options.adapter_rank == 0) return;
  expect_close("d_adapter_a", actual.d_adapter_a, expected.d_adapter_a, tolerance);
  expect_close("d_adapter_b", actual.d_adapter_b, expected.d_adapter_b, tolerance);
}

TEST(HeadRun, EveryTermFromLogits) {
  Rng rng(test_seed());
  for (const LossTerm& term : term_variants()) {
    for (const int64_t vocab : {int64_t{5}, int64_t{67}, int64_t{2500}}) {
      SCOPED_TRACE(term.name + " vocab " + std::to_string(vocab));
      RandomHead head = random_head(rng, 6, 0, vocab);
      head.config.terms = {term};
      PlanCase c = case_of(head);
      c.policy_metrics = true;
      expect_matches_oracle(c, 1e-13);
      c = case_of(head, DType::kF32);
      expect_matches_oracle(c, 2e-6);
    }
  }
}

TEST(HeadRun, RandomMixesFromHiddenWithEveryOption) {
  Rng rng(test_seed() + 1);
  const std::vector<LossTerm> variants = term_variants();
  for (int round = 0; round < 60; ++round) {
    RandomHead head = random_head(rng, 9, 5, 37);
    std::string names;
    for (int64_t n = 1 + below(rng, 4); n > 0; --n) {
      LossTerm term =
          variants[static_cast<size_t>(below(rng, static_cast<int64_t>(variants.size())))];
      term.weight = below(rng, 4) == 0 ? 0 : uniform(rng, -1, 2);
      if (below(rng, 2)) term.logits_scale = uniform(rng, 0.5, 1.5);
      term.name += "#" + std::to_string(n);
      names += term.name + " ";
      head.config.terms.push_back(term);
    }
    SCOPED_TRACE("round " + std::to_string(round) + ": " + names);
    head.config.options = {.logits_scale = below(rng, 2) ? 1 : uniform(rng, 0.5, 1.5),
                           .softcap = below(rng, 2) ? 3.0 : 0,
                           .bias = below(rng, 2) == 0,
                           .adapter_rank = below(rng, 2) * 2,
                           .adapter_scale = 0.5};
    head.inputs.upstream = uniform(rng, -2, 2);
    if (below(rng, 2)) head.inputs.upstream_rows = normals(rng, 9, 1);
    PlanCase c = case_of(head);
    c.limits.chunk = 1 + below(rng, 9);
    c.policy_metrics = below(rng, 2) == 0;
    expect_matches_oracle(c, 2e-13);
  }
}

// Chunk, threads, neighbours that are ignored: not a bit changes.
TEST(HeadRun, TheSameBitsAtEveryChunkAndThreadCount) {
  Rng rng(test_seed() + 2);
  const std::vector<LossTerm> variants = term_variants();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    for (int round = 0; round < 8; ++round) {
      RandomHead head = random_head(rng, 11, 19, 300);
      for (int n = 0; n < 3; ++n) {
        LossTerm term =
            variants[static_cast<size_t>(below(rng, static_cast<int64_t>(variants.size())))];
        term.name += std::to_string(n);
        head.config.terms.push_back(term);
      }
      head.config.options.bias = round % 2 == 0;
      PlanCase c = case_of(head, dtype);
      c.limits = {.chunk = 11, .n_threads = 1};
      const PlanOutcome whole = run_plan(c);
      ASSERT_TRUE(whole.status.ok()) << whole.status.to_string();
      for (int64_t chunk = 1; chunk <= 11; ++chunk) {
        c.limits = {.chunk = chunk, .n_threads = static_cast<int>(1 + chunk % 4)};
        const PlanOutcome cut = run_plan(c);
        EXPECT_EQ(whole.bits, cut.bits) << "chunk " << chunk;
      }
    }
  }
}

TEST(HeadRun, TheSameBitsOnEveryInstructionSet) {
  Rng rng(test_seed() + 13);
  const std::vector<LossTerm> variants = term_variants();
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kF64}) {
    for (const int64_t d_model : {0, 9}) {
      RandomHead head = random_head(rng, 5, d_model, 2100);
      head.config.terms = variants;
      head.config.options.softcap = dtype == DType::kF16 ? 0 : 20;
      PlanCase c = case_of(head, dtype);
      c.policy_metrics = true;
      std::vector<std::byte> best;
      for (const std::string_view set : cpu::instruction_sets()) {
        ASSERT_TRUE(cpu::force_instruction_set(set));
        const PlanOutcome outcome = run_plan(c);
        ASSERT_TRUE(outcome.status.ok()) << outcome.status.to_string();
        if (best.empty()) best = outcome.bits;
        EXPECT_EQ(best, outcome.bits) << set;
      }
      ASSERT_TRUE(cpu::force_instruction_set(""));
    }
  }
}

// Logits made a strip of columns at a time, twice where there is a gradient.
TEST(HeadRun, StripsGiveTheBitsOfWholeRows) {
  Rng rng(test_seed() + 11);
  for (int round = 0; round < 8; ++round) {
    SCOPED_TRACE(round);
    RandomHead head = random_head(rng, 40, 5, 2 * 4096 + 77 * round);
    head.config.terms = {{.name = "ce"}};
    if (round % 2) {
      head.config.terms.push_back({.name = "z", .kind = LossKind::kZLoss, .logits_scale = 0.7});
      head.config.terms.push_back({.name = "gspo", .kind = LossKind::kGspo});
    }
    head.config.options = {.logits_scale = 1.1,
                           .softcap = round % 4 == 2 ? 4.0 : 0,
                           .bias = round % 3 == 1,
                           .adapter_rank = round % 3 == 2 ? 2 : 0};
    PlanCase c = case_of(head, round < 3 ? DType::kBF16 : round < 6 ? DType::kF32 : DType::kF64);
    c.entropy = false;
    c.limits = {.chunk = 40, .n_threads = 2};
    const PlanOutcome whole = run_plan(c);
    ASSERT_TRUE(whole.status.ok()) << whole.status.to_string();
    EXPECT_EQ(whole.mode, "chunk");
    c.limits.chunk = 31;  // too few rows to be worth their products
    c.limits = {.budget_bytes = run_plan(c).workspace_bytes, .n_threads = 3};
    const PlanOutcome strips = run_plan(c);
    ASSERT_TRUE(strips.status.ok()) << strips.status.to_string();
    EXPECT_EQ(strips.mode, "recompute");
    EXPECT_LE(strips.workspace_bytes, c.limits.budget_bytes);
    EXPECT_EQ(whole.bits, strips.bits);

    c.gradient = false;
    c.limits = {.chunk = 1 + below(rng, 40)};
    const PlanOutcome forward = run_plan(c);
    ASSERT_TRUE(forward.status.ok());
    EXPECT_EQ(forward.mode, "strips");
    EXPECT_EQ(forward.result.terms, whole.result.terms);
    EXPECT_EQ(forward.result.token_loss, whole.result.token_loss);
    EXPECT_EQ(forward.result.lse, whole.result.lse);
    EXPECT_EQ(forward.result.label_log_prob, whole.result.label_log_prob);
    EXPECT_EQ(forward.result.argmax, whole.result.argmax);
    EXPECT_EQ(forward.result.correct, whole.result.correct);
  }
}

TEST(HeadRun, PoisonInIgnoredRowsIsNeverRead) {
  Rng rng(test_seed() + 3);
  for (const int64_t d_model : {0, 4}) {
    RandomHead head = random_head(rng, 8, d_model, 33);
    head.config.terms = {{.name = "ce"},
                         {.name = "z", .kind = LossKind::kZLoss},
                         {.name = "kd", .kind = LossKind::kDistillation}};
    head.inputs.labels = {3, -100, 5, -1, -1, 7, 8, -3};
    PlanCase c = case_of(head, DType::kF32);
    const PlanOutcome clean = run_plan(c);
    for (const size_t row : {1, 3, 4, 7}) {
      const auto poison = [&](std::vector<double>& values, int64_t cols) {
        for (int64_t j = 0; j < cols; ++j) {
          values[row * static_cast<size_t>(cols) + static_cast<size_t>(j)] =
              j % 2 ? kNaN : -INFINITY;
        }
      };
      if (d_model == 0) poison(c.inputs.logits, 33);
      if (d_model > 0) poison(c.inputs.hidden, d_model);
      poison(c.inputs.teachers[0].logits, 33);
      c.inputs.token_weights[row] = kNaN;
    }
    const PlanOutcome poisoned = run_plan(c);
    ASSERT_TRUE(poisoned.status.ok());
    EXPECT_EQ(clean.bits, poisoned.bits);
  }
}

TEST(HeadRun, NaNInACountedRowSurfaces) {
  Rng rng(test_seed() + 4);
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const int64_t at : {0, 17, 2051}) {
      RandomHead head = random_head(rng, 2, 0, 2060);
      head.config.terms = {{.name = "ce"}};
      head.inputs.labels = {3, 4};
      head.inputs.logits[static_cast<size_t>(at)] = kNaN;
      const PlanOutcome outcome = run_plan(case_of(head, dtype));
      ASSERT_TRUE(outcome.status.ok());
      EXPECT_TRUE(std::isnan(outcome.result.total));
      EXPECT_TRUE(std::isnan(outcome.result.d_logits[5]));
      EXPECT_TRUE(std::isfinite(outcome.result.d_logits[2060]));
    }
  }
}

TEST(HeadRun, NaNInEitherRowOfADistillationSurfaces) {
  Rng rng(test_seed() + 14);
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const Divergence divergence : {Divergence::kCrossEntropy, Divergence::kForwardKl,
                                        Divergence::kReverseKl, Divergence::kJensenShannon}) {
      for (const bool in_teacher : {false, true}) {
        RandomHead head = random_head(rng, 2, 0, 2060);
        head.config.terms = {
            {.name = "kd", .kind = LossKind::kDistillation, .divergence = divergence}};
        auto& row = in_teacher ? head.inputs.teachers[0].logits : head.inputs.logits;
        row[17] = kNaN;
        const PlanOutcome outcome = run_plan(case_of(head, dtype));
        ASSERT_TRUE(outcome.status.ok());
        EXPECT_TRUE(std::isnan(outcome.result.total));
        const std::vector<double>& g = outcome.result.d_logits;
        for (size_t j = 0; j < 2060; ++j) ASSERT_TRUE(std::isnan(g[j])) << j;
        for (size_t j = 2060; j < g.size(); ++j) ASSERT_TRUE(std::isfinite(g[j])) << j;
      }
    }
  }
}

TEST(HeadRun, IdenticalTeacherIsExactlyZero) {
  Rng rng(test_seed() + 5);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    for (const Divergence divergence :
         {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJensenShannon}) {
      RandomHead head = random_head(rng, 5, 0, 2301);
      head.inputs.teachers[0].logits = head.inputs.logits;
      // A masked vocabulary.
      for (size_t i = 7; i < head.inputs.logits.size(); i += 13) {
        head.inputs.logits[i] = head.inputs.teachers[0].logits[i] = -INFINITY;
      }
      head.config.terms = {
          {.name = "kd", .kind = LossKind::kDistillation, .divergence = divergence, .beta = 0.3}};
      const PlanOutcome outcome = run_plan(case_of(head, dtype));
      ASSERT_TRUE(outcome.status.ok());
      EXPECT_EQ(outcome.result.total, 0);
      for (const double g : outcome.result.d_logits) ASSERT_EQ(g, 0);
    }
  }
}

TEST(HeadRun, PerTermGivesTheSameScalarBits) {
  Rng rng(test_seed() + 6);
  RandomHead head = random_head(rng, 7, 6, 129);
  head.config.terms = {{.name = "ce"},
                       {.name = "z", .kind = LossKind::kZLoss, .weight = 0.1},
                       {.name = "grpo", .kind = LossKind::kGrpo},
                       {.name = "kd", .kind = LossKind::kDistillation}};
  PlanCase c = case_of(head);
  const PlanOutcome fused = run_plan(c);
  c.limits.implementation = lossk::Implementation::kPerTerm;
  const PlanOutcome per_term = run_plan(c);
  ASSERT_TRUE(per_term.status.ok());
  EXPECT_EQ(fused.result.terms, per_term.result.terms);
  EXPECT_EQ(fused.result.total, per_term.result.total);
  EXPECT_EQ(fused.result.token_loss, per_term.result.token_loss);
  expect_close("d_hidden", per_term.result.d_hidden, fused.result.d_hidden, 1e-15);
}

TEST(HeadRun, AccumulatesOnWhatIsThere) {
  Rng rng(test_seed() + 7);
  for (const int64_t d_model : {0, 5}) {
    RandomHead head = random_head(rng, 6, d_model, 20);
    head.config.terms = {{.name = "ce", .label_smoothing = 0.1}};
    head.config.options.bias = d_model > 0;
    head.inputs.labels[1] = -1;
    PlanCase c = case_of(head);
    c.accumulate = true;
    c.initial = 0.5;
    c.limits.chunk = 2;
    const PlanOutcome outcome = run_plan(c);
    ASSERT_TRUE(outcome.status.ok());
    reference::HeadResult expected = reference::head_losses(c.config, c.inputs);
    const auto shifted = [](std::vector<double> v) {
      for (double& x : v) x += 0.5;
      return v;
    };
    if (d_model == 0) {
      expect_close("d_logits", outcome.result.d_logits, shifted(expected.d_logits), 1e-14);
    } else {
      expect_close("d_hidden", outcome.result.d_hidden, shifted(expected.d_hidden), 1e-14);
      expect_close("d_weight", outcome.result.d_weight, shifted(expected.d_weight), 1e-14);
      expect_close("d_bias", outcome.result.d_bias, shifted(expected.d_bias), 1e-14);
    }
  }
}

TEST(HeadRun, NoRowsAndOnlyIgnoredRows) {
  Rng rng(test_seed() + 8);
  for (const int64_t d_model : {0, 3}) {
    for (const int64_t n_tok : {0, 3}) {
      RandomHead head = random_head(rng, n_tok, d_model, 9);
      head.config.terms = {{.name = "ce"}, {.name = "z", .kind = LossKind::kZLoss}};
      for (auto& label : head.inputs.labels) label = -100;
      PlanCase c = case_of(head, DType::kF32);
      c.initial = 3;
      const PlanOutcome outcome = run_plan(c);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status.to_string();
      EXPECT_EQ(outcome.result.total, 0);
      EXPECT_EQ(outcome.result.n_valid, 0);
      for (const double g : outcome.result.d_logits) EXPECT_EQ(g, 0);
      for (const double g : outcome.result.d_hidden) EXPECT_EQ(g, 0);
      for (const double g : outcome.result.d_weight) EXPECT_EQ(g, 0);
    }
  }
}

TEST(HeadRun, SixteenBitStorageRoundsOnce) {
  Rng rng(test_seed() + 9);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    RandomHead head = random_head(rng, 6, 0, 501);
    head.config.terms = {{.name = "ce"}, {.name = "z", .kind = LossKind::kZLoss, .weight = 0.01}};
    // The inputs as they are stored.
    head.inputs.logits = Stored(head.inputs.logits, dtype).values();
    PlanCase c = case_of(head, dtype);
    const PlanOutcome outcome = run_plan(c);
    ASSERT_TRUE(outcome.status.ok());
    const reference::HeadResult expected = reference::head_losses(c.config, c.inputs);
    expect_close("total", {outcome.result.total}, {expected.total}, 1e-6);
    // Half a unit in the last place, relative; below f16's normal numbers absolute.
    const double half_ulp = dtype == DType::kBF16 ? 0x1p-8 : 0x1p-11;
    const Comparison compared = compare(outcome.result.d_logits, expected.d_logits, [&](size_t i) {
      return std::abs(expected.d_logits[i]) * half_ulp * 1.001 + 0x1p-25 * 1.5;
    });
    EXPECT_TRUE(compared.ok) << compared.message;
  }
}

// Types that are not computed in the accumulate type go another way; so do unaligned rows (vocab
// 501).
TEST(HeadRun, GradientsInEveryType) {
  Rng rng(test_seed() + 12);
  for (const DType input : {DType::kF32, DType::kF64}) {
    for (const DType grad : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
      for (const bool smoothed : {false, true}) {
        RandomHead head = random_head(rng, 4, 0, 501);
        head.config.terms = {{.name = "ce", .label_smoothing = smoothed ? 0.1 : 0}};
        head.inputs.logits = Stored(head.inputs.logits, input).values();
        PlanCase c = case_of(head, input);
        c.request.grad_dtype = grad;
        c.accumulate = smoothed;
        const PlanOutcome outcome = run_plan(c);
        ASSERT_TRUE(outcome.status.ok()) << outcome.status.to_string();
        const reference::HeadResult expected = reference::head_losses(c.config, c.inputs);
        const double precision = grad == DType::kBF16  ? 0x1p-8
                                 : grad == DType::kF16 ? 0x1p-11
                                 : grad == DType::kF32 ? 0x1p-24
                                                       : 0;
        const double computed = input == DType::kF32 ? 2e-7 : 1e-15;
        const double subnormal = grad == DType::kF16 ? 0x1p-25 : 0;
        const Comparison compared =
            compare(outcome.result.d_logits, expected.d_logits, [&](size_t i) {
              return std::abs(expected.d_logits[i]) * precision * 1.001 + computed + subnormal;
            });
        EXPECT_TRUE(compared.ok) << compared.message;
      }
    }
  }
}

TEST(HeadRun, RefusalsWriteNothing) {
  Rng rng(test_seed() + 10);
  RandomHead head = random_head(rng, 3, 0, 5);
  head.config.terms = {{.name = "ce"}};
  head.inputs.labels = {1, 5, 2};
  const PlanOutcome outcome = run_plan(case_of(head));
  EXPECT_EQ(outcome.status.code(), kLossTargetOutOfRange);
  EXPECT_EQ(outcome.result.terms[0], -1);
  EXPECT_EQ(outcome.result.argmax[0], -7);
}

}  // namespace
}  // namespace ullage::test
