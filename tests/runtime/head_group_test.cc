// A vocabulary cut into shards: the oracle's shards are the whole oracle, a plan's shards are
// within the whole head's bounds of it, and every shard has the same losses to the bit.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/head_random.h"
#include "support/head_shards.h"
#include "support/head_within_bounds.h"
#include "support/run_in_memory.h"

namespace ullage::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double as_f32(double value) { return static_cast<float>(value); }
double as_f64(double value) { return value; }

// The variants that a shard takes.
std::vector<LossTerm> shard_terms() {
  std::vector<LossTerm> terms;
  for (const LossTerm& term : term_variants()) {
    if (term.kind == LossKind::kDistillation) continue;
    terms.push_back(term);
    terms.back().logits_scale = 1;
  }
  return terms;
}

RandomHead draw(Rng& rng, int64_t n_tok, int64_t d_model, int64_t vocab) {
  RandomHead head = random_head(rng, n_tok, d_model, vocab);
  head.config.teachers.clear();
  head.inputs.teachers.clear();
  head.inputs.class_weights.clear();
  head.config.options.logits_scale = uniform(rng, 0.5, 1.5);
  head.config.options.softcap = below(rng, 2) ? 4.0 : 0;
  if (d_model == 0) return head;
  head.config.options.bias = below(rng, 2) == 0;
  head.config.options.adapter_rank = below(rng, 2) * 2;
  head.config.options.adapter_scale = 0.5;
  return head;
}

void expect_close(const char* what, const std::vector<double>& is, const std::vector<double>& right,
                  const std::function<double(size_t)>& bound, Fractions& fractions) {
  const Comparison c = compare(is, right, bound);
  EXPECT_TRUE(c.ok || c.message.starts_with("vacuous")) << what << ": " << c.message;
  fractions[what] = std::max(fractions[what], c.fraction);
}

TEST(HeadGroup, TheOraclesShardsAreTheWholeOracle) {
  Rng rng(test_seed() + 40);
  Fractions fractions;
  for (const LossTerm& term : shard_terms()) {
    for (const int64_t d_model : {0, 5}) {
      SCOPED_TRACE(term.name);
      RandomHead head = draw(rng, 6, d_model, 20);
      head.config.terms = {term};
      const HeadResult right = reference::head_losses(head.config, head.inputs);
      std::vector<Shard> shards = shards_of(head.config, head.inputs, {7, 1, 12});
      std::vector<HeadResult> own, results;
      for (const Shard& s : shards) own.push_back(reference::head_losses(s.config, s.inputs));
      join(shards, own, as_f64);
      for (const Shard& s : shards) results.push_back(reference::head_losses(s.config, s.inputs));
      const HeadResult is = assembled(shards, results, 20);
      const auto within = [&](size_t) { return 1e-12 * std::max(1.0, std::abs(right.total)); };
      expect_close("token_loss", is.token_loss, right.token_loss, within, fractions);
      expect_close("terms", is.terms, right.terms, within, fractions);
      expect_close("lse", is.lse, right.lse, within, fractions);
      expect_close("label_log_prob", is.label_log_prob, right.label_log_prob, within, fractions);
      expect_close("entropy", is.entropy, right.entropy, within, fractions);
      EXPECT_NEAR(is.policy_metrics[0].entropy, right.policy_metrics[0].entropy, 1e-12);
      EXPECT_NEAR(is.policy_metrics[0].ratio, right.policy_metrics[0].ratio, 1e-9);
      expect_close("d_logits", is.d_logits, right.d_logits, within, fractions);
      expect_close("d_hidden", is.d_hidden, right.d_hidden, within, fractions);
      expect_close("d_weight", is.d_weight, right.d_weight, within, fractions);
      expect_close("d_bias", is.d_bias, right.d_bias, within, fractions);
      expect_close("d_adapter_a", is.d_adapter_a, right.d_adapter_a, within, fractions);
      expect_close("d_adapter_b", is.d_adapter_b, right.d_adapter_b, within, fractions);
    }
  }
}

struct GroupRun {
  std::vector<Shard> shards;
  std::vector<PlanOutcome> outcomes;
  HeadResult whole;
};

// Both phases of every shard, one after the other. c: the whole head's case.
GroupRun run_group(const PlanCase& c, const std::vector<int64_t>& sizes) {
  GroupRun run{shards_of(c.config, c.inputs, sizes), {}, {}};
  std::vector<HeadResult> own, results;
  const auto outcome_of = [&](const Shard& shard, bool statistics) {
    PlanCase of_shard = c;
    of_shard.config = shard.config;
    of_shard.inputs = shard.inputs;
    of_shard.statistics = statistics;
    PlanOutcome outcome = run_plan(of_shard);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.to_string();
    return outcome;
  };
  for (const Shard& shard : run.shards) own.push_back(outcome_of(shard, true).result);
  join(run.shards, own, c.request.input_dtype == DType::kF64 ? as_f64 : as_f32);
  for (const Shard& shard : run.shards) {
    run.outcomes.push_back(outcome_of(shard, false));
    results.push_back(run.outcomes.back().result);
  }
  run.whole = assembled(run.shards, results, c.inputs.shape.vocab);
  return run;
}

void expect_same_losses(const GroupRun& run) {
  const HeadResult& first = run.outcomes[0].result;
  for (const PlanOutcome& outcome : run.outcomes) {
    EXPECT_EQ(outcome.result.terms, first.terms);
    EXPECT_EQ(outcome.result.total, first.total);
    EXPECT_EQ(outcome.result.token_loss, first.token_loss);
    EXPECT_EQ(outcome.result.lse, first.lse);
    EXPECT_EQ(outcome.result.label_log_prob, first.label_log_prob);
    EXPECT_EQ(outcome.result.entropy, first.entropy);
    EXPECT_EQ(outcome.result.n_valid, first.n_valid);
  }
}

// The bounds are those of the whole head. What the exchange rounds, six numbers a row of at most
// ln V + 2 max |a| each, is within what they allow a sum over V >= 64 columns: gamma_V ln's own and
// 8 u max |a|. Each shard rounds its part of d_hidden, and of d_adapter_a, by itself.
void expect_shards_within_bounds(PlanCase c, const std::vector<int64_t>& sizes,
                                 Fractions& fractions) {
  c.inputs = as_stored(c.inputs, c.request);
  const GroupRun run = run_group(c, sizes);
  expect_same_losses(run);
  const HeadResult& is = run.whole;
  const HeadResult right = reference::head_losses(c.config, c.inputs);
  const DType type = c.request.input_dtype;
  const DType accumulate = type == DType::kF64 ? DType::kF64 : DType::kF32;
  const reference::HeadErrorBounds bounds =
      reference::head_error_bounds(c.config, c.inputs, right, accumulate);
  const auto check = [&](const char* what, std::vector<double> HeadResult::* field,
                         std::vector<double> reference::HeadErrorBounds::* bound, DType stored) {
    const double parts = static_cast<double>(sizes.size());
    expect_close(
        what, is.*field, right.*field,
        [&](size_t i) {
          const double off = (bounds.*bound)[i], size = std::abs((right.*field)[i]);
          double largest = size + off;
          for (const PlanOutcome& outcome : run.outcomes) {
            const auto& part = outcome.result.*field;
            if (i < part.size()) largest = std::max(largest, std::abs(part[i]));
          }
          return off + 0x1p-48 * size + 1e-300 +
                 (stored == DType::kF64 ? 0 : parts * reference::rounding_error(stored, largest));
        },
        fractions);
  };
  using R = HeadResult;
  using B = reference::HeadErrorBounds;
  check("terms", &R::terms, &B::terms, DType::kF64);
  check("token_loss", &R::token_loss, &B::token_loss, DType::kF64);
  check("lse", &R::lse, &B::lse, DType::kF64);
  check("label_log_prob", &R::label_log_prob, &B::label_log_prob, DType::kF64);
  check("entropy", &R::entropy, &B::entropy, DType::kF64);
  if (c.inputs.shape.d_model == 0) {
    check("d_logits", &R::d_logits, &B::d_logits, type);
    return;
  }
  check("d_hidden", &R::d_hidden, &B::d_hidden, type);
  check("d_weight", &R::d_weight, &B::d_weight, type);
  if (c.config.options.bias) check("d_bias", &R::d_bias, &B::d_bias, type);
  if (c.config.options.adapter_rank > 0) {
    check("d_adapter_a", &R::d_adapter_a, &B::d_adapter_a, type);
    check("d_adapter_b", &R::d_adapter_b, &B::d_adapter_b, type);
  }
}

TEST(HeadGroup, EveryTermWithinTheWholeHeadsBounds) {
  Rng rng(test_seed() + 41);
  Fractions fractions;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    for (const LossTerm& term : shard_terms()) {
      for (const int64_t d_model : {0, 7}) {
        RandomHead head = draw(rng, 8, d_model, 203);
        head.config.terms = {term};
        if (distance_to_clip(head.config, head.inputs) < 1e-3) continue;
        SCOPED_TRACE(term.name + " " + std::string(name_of(dtype)));
        PlanCase c = case_of(head, dtype);
        c.limits = {.chunk = 1 + below(rng, 8), .n_threads = 2};
        expect_shards_within_bounds(c, {100, 2, 101}, fractions);
      }
    }
  }
  print("HeadGroup", fractions);
}

TEST(HeadGroup, MixesFromHiddenOverSeveralBlocksOfColumns) {
  Rng rng(test_seed() + 42);
  Fractions fractions;
  for (int round = 0; round < 4; ++round) {
    RandomHead head = draw(rng, 5, 6, 8003);
    head.config.terms = {{.name = "ce", .weight = 0.7, .label_smoothing = round < 2 ? 0.1 : 0},
                         {.name = "z", .kind = LossKind::kZLoss, .weight = 0.1}};
    expect_shards_within_bounds(case_of(head, round % 2 ? DType::kBF16 : DType::kF32),
                                {2668, 2668, 2667}, fractions);
  }
  print("HeadGroup, 8003 columns", fractions);
}

// Chunk, strips, threads: not a bit changes, nor with gradients left out; and nothing is made
// twice.
TEST(HeadGroup, TheSameBitsHoweverTheRunIsCut) {
  Rng rng(test_seed() + 43);
  RandomHead head = draw(rng, 40, 5, 8300 + 9000);
  head.config.options.adapter_rank = 0;
  head.config.terms = {{.name = "ce"}, {.name = "gspo", .kind = LossKind::kGspo}};
  PlanCase c = case_of(head, DType::kF32);
  c.entropy = false;
  c.limits = {.chunk = 40, .n_threads = 1};
  const std::vector<int64_t> sizes = {8300, 9000};
  const GroupRun whole = run_group(c, sizes);
  EXPECT_EQ(whole.outcomes[0].mode, "chunk");
  c.limits.chunk = 7;
  const GroupRun chunks = run_group(c, sizes);
  EXPECT_EQ(chunks.outcomes[0].mode, "chunk");  // no second pass for the sequences
  c.limits.chunk = 31;                          // too few rows to be worth their products
  c.limits = {.budget_bytes = run_group(c, sizes).outcomes[0].workspace_bytes, .n_threads = 3};
  const GroupRun strips = run_group(c, sizes);
  EXPECT_EQ(strips.outcomes[0].mode, "strips");
  c.gradient = false;
  const GroupRun forward = run_group(c, sizes);
  for (size_t s = 0; s < sizes.size(); ++s) {
    EXPECT_EQ(whole.outcomes[s].bits, chunks.outcomes[s].bits);
    EXPECT_EQ(whole.outcomes[s].bits, strips.outcomes[s].bits);
    EXPECT_EQ(whole.outcomes[s].result.token_loss, forward.outcomes[s].result.token_loss);
    EXPECT_EQ(whole.outcomes[s].result.total, forward.outcomes[s].result.total);
  }
}

TEST(HeadGroup, MetricsOfAPolicyAreTheWholeHeads) {
  Rng rng(test_seed() + 47);
  for (const LossKind kind : {LossKind::kGrpo, LossKind::kGspo}) {
    RandomHead head = draw(rng, 9, 6, 90);
    head.config.terms = {{.name = "policy", .kind = kind}};
    PlanCase c = case_of(head, DType::kF64);
    c.policy_metrics = true;
    const GroupRun run = run_group(c, {40, 50});
    const lossk::PolicyMetrics right =
        reference::head_losses(head.config, head.inputs).policy_metrics[0];
    for (const PlanOutcome& outcome : run.outcomes) {
      const lossk::PolicyMetrics& is = outcome.result.policy_metrics[0];
      EXPECT_NEAR(is.entropy, right.entropy, 1e-11);
      EXPECT_NEAR(is.new_log_probs, right.new_log_probs, 1e-11);
      EXPECT_NEAR(is.ratio, right.ratio, 1e-11 * (1 + right.ratio));
      EXPECT_NEAR(is.clipped, right.clipped, 1e-11);
      EXPECT_EQ(is.n_tokens, right.n_tokens);
    }
  }
}

// R19: an offset that moves no logit's difference moves no bit of a cross-entropy.
TEST(HeadGroup, ACommonOffsetCostsNothing) {
  Rng rng(test_seed() + 44);
  RandomHead head = random_head(rng, 5, 0, 60);
  head.inputs.class_weights.clear();
  head.config.teachers.clear();
  head.inputs.teachers.clear();
  head.config.terms = {{.name = "ce", .label_smoothing = 0.1},
                       {.name = "grpo", .kind = LossKind::kGrpo}};
  for (double& z : head.inputs.logits) z = std::round(z * 64) / 64;
  const PlanCase c = case_of(head, DType::kF32);
  const GroupRun plain = run_group(c, {25, 35});
  for (const double offset : {0x1p14, -0x1p14, 30000.0}) {
    PlanCase moved = c;
    for (double& z : moved.inputs.logits) z += offset;
    const GroupRun far = run_group(moved, {25, 35});
    for (size_t s = 0; s < 2; ++s) {
      EXPECT_EQ(far.outcomes[s].result.token_loss, plain.outcomes[s].result.token_loss);
      EXPECT_EQ(far.outcomes[s].result.d_logits, plain.outcomes[s].result.d_logits);
    }
  }
}

// R11, and a shard of padding alone, whose columns are banned by -inf.
TEST(HeadGroup, ShardsWithoutTheLabelAndWithoutMass) {
  for (const int64_t first : {50, 51, 49, 97, 11}) {
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      RandomHead head;
      head.inputs.shape = {3, 0, 100};
      head.inputs.logits.assign(300, 0);
      head.inputs.labels = {10, -100, 10};
      head.config.terms = {{.name = "ce"}};
      GroupRun run = run_group(case_of(head, dtype), {first, 100 - first});
      expect_same_losses(run);
      EXPECT_NEAR(run.whole.total, std::log(100), 1e-6);
      EXPECT_EQ(run.whole.n_valid, 2);
      for (int64_t j = 0; j < 300; ++j) {
        const double expected = j / 100 == 1 ? 0 : (.01 - (j % 100 == 10 ? 1 : 0)) / 2;
        ASSERT_NEAR(run.whole.d_logits[static_cast<size_t>(j)], expected, 1e-7) << j;
      }
      for (int64_t i = 0; i < 3; ++i) {
        for (int64_t j = first; j < 100; ++j) head.inputs.logits[i * 100 + j] = -INFINITY;
      }
      run = run_group(case_of(head, dtype), {first, 100 - first});
      expect_same_losses(run);
      EXPECT_NEAR(run.whole.total, std::log(static_cast<double>(first)), 1e-6);
      for (int64_t j = first; j < 100; ++j) ASSERT_EQ(run.whole.d_logits[j], 0);
      // A banned label: an honest infinity, wherever its shard's other columns are.
      head.inputs.labels[0] = 99;
      run = run_group(case_of(head, dtype), {first, 100 - first});
      for (const PlanOutcome& outcome : run.outcomes) {
        EXPECT_EQ(outcome.result.token_loss[0], INFINITY);
        EXPECT_NEAR(outcome.result.token_loss[2], std::log(static_cast<double>(first)), 1e-6);
      }
    }
  }
}

TEST(HeadGroup, NaNOfOneShardSurfacesInAllAndIgnoredRowsAreNotRead) {
  Rng rng(test_seed() + 45);
  RandomHead head = draw(rng, 4, 0, 30);
  head.config.options.softcap = 0;
  head.config.terms = {{.name = "ce"}};
  head.inputs.labels = {1, -1, 29, 4};
  head.inputs.logits[30 + 3] = kNaN;
  head.inputs.logits[60 + 2] = kNaN;
  const GroupRun run = run_group(case_of(head, DType::kF32), {10, 20});
  for (const PlanOutcome& outcome : run.outcomes) {
    const HeadResult& r = outcome.result;
    EXPECT_TRUE(std::isfinite(r.token_loss[0]) && std::isfinite(r.token_loss[3]));
    EXPECT_EQ(r.token_loss[1], 0);
    EXPECT_TRUE(std::isnan(r.token_loss[2]));
    const size_t columns = r.d_logits.size() / 4;
    for (size_t j = 0; j < columns; ++j) {
      EXPECT_EQ(r.d_logits[columns + j], 0);
      EXPECT_TRUE(std::isnan(r.d_logits[2 * columns + j]));
    }
  }
}

TEST(HeadGroup, NoRowsAndOnlyIgnoredRows) {
  Rng rng(test_seed() + 46);
  for (const int64_t n_tok : {0, 3}) {
    RandomHead head = draw(rng, n_tok, 3, 9);
    head.config.options.adapter_rank = 0;
    head.config.terms = {{.name = "ce"}, {.name = "z", .kind = LossKind::kZLoss}};
    for (auto& label : head.inputs.labels) label = -100;
    const GroupRun run = run_group(case_of(head, DType::kF32), {4, 5});
    EXPECT_EQ(run.whole.total, 0);
    EXPECT_EQ(run.whole.n_valid, 0);
    for (const double g : run.whole.d_weight) EXPECT_EQ(g, 0);
  }
}

// Both numbers say lse, in either type; also for rows without a label that a term counts.
TEST(HeadGroup, ShiftAndLogSumAreTheLogSumExp) {
  const std::vector<double> logits = {1e4 + .1,  1e4, 1e4 - 1, -INFINITY, -INFINITY,
                                      -INFINITY, 5,   6,       7};
  const std::vector<int64_t> labels = {0, 0, -1};
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    double wide[2][3];
    float narrow[2][3];
    lossk::Inputs in;
    in.logits = {logits.data(), DType::kF64, 3, 3, 3};
    in.labels = {labels.data(), 8, 3};
    lossk::Outputs out;
    const bool f32 = dtype == DType::kF32;
    out.shift = {f32 ? static_cast<void*>(narrow[0]) : wide[0], dtype, 3};
    out.log_sum = {f32 ? static_cast<void*>(narrow[1]) : wide[1], dtype, 3};
    const HeadConfig config = {
        .terms = {{.name = "z", .kind = LossKind::kZLoss, .mask = RowMask::kNone}},
        .options = {.logits_scale = 3}};
    run({3, 0, 3}, config, {.input_dtype = DType::kF64}, {}, in, out);
    for (int i = 0; i < 3 && f32; ++i) wide[0][i] = narrow[0][i], wide[1][i] = narrow[1][i];
    EXPECT_NEAR(wide[0][0], 1e4 + .1, 1e-3);
    // Of lse itself a float would keep three decimals.
    const double sum = std::log(1 + std::exp(-.3) + std::exp(-3.3));
    EXPECT_NEAR(3 * (wide[0][0] - 1e4 - .1) + wide[1][0], sum, f32 ? 1e-7 : 1e-11);
    EXPECT_EQ(wide[0][1], -INFINITY);
    EXPECT_EQ(wide[1][1], -INFINITY);
    EXPECT_NEAR(3 * wide[0][2] + wide[1][2], 21 + std::log(1 + std::exp(-3) + std::exp(-6)), 1e-6);
  }
}

TEST(HeadGroup, AShardsLabelsAreItsGroups) {
  const std::vector<float> logits = {0, 0};
  std::vector<int64_t> labels = {9};
  double log_prob = 0;
  const HeadConfig config = {.terms = {{.name = "ce"}},
                             .options = {.vocab_offset = 4, .group_vocab = 10}};
  lossk::Inputs in;
  in.logits = {logits.data(), DType::kF32, 1, 2, 2};
  in.labels = {labels.data(), 8, 1};
  lossk::Outputs out;
  out.label_log_prob = {&log_prob, DType::kF64, 1};
  for (const auto& [label, expected] :
       {std::pair{9, -INFINITY}, {0, -INFINITY}, {4, -std::log(2.0f)}, {5, -std::log(2.0f)}}) {
    labels[0] = label;
    run({1, 0, 2}, config, {}, {}, in, out);
    EXPECT_FLOAT_EQ(static_cast<float>(log_prob), expected);
  }
  labels[0] = 10;
  const auto plan = lossk::plan({1, 0, 2}, config, {}, {});
  alignas(64) std::byte room[1 << 14];
  const Status refused = plan->run(in, out, room);
  EXPECT_EQ(refused.code(), kLossTargetOutOfRange);
  EXPECT_NE(refused.message().find("labels[0] is 10; accepted: 0 to 9"), std::string::npos)
      << refused.message();
}

}  // namespace
}  // namespace ullage::test
