// The matrix: every term and random mixes, masks, scales, accumulation, storage types, odd
// vocabularies and chunks, each within the derived bounds of the float64 oracle, and against itself
// to the bit where that is promised.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/head_random.h"
#include "support/head_within_bounds.h"

namespace ullage::test {
namespace {

using lossk::Implementation;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};

// Where the gradient has no jump near.
RandomHead draw_away_from_clip(const std::vector<LossTerm>& terms,
                               const std::function<RandomHead()>& draw) {
  for (int attempt = 0; attempt < 200; ++attempt) {
    RandomHead head = draw();
    head.config.terms = terms;
    // 16-bit storage moves a log-probability by about 2^-8 of its size.
    if (distance_to_clip(head.config, head.inputs) > 0.1) return head;
  }
  ADD_FAILURE() << "no draw away from the clip bounds";
  return {};
}

std::string name_of_case(const PlanCase& c) {
  std::string name;
  for (const LossTerm& term : c.config.terms) name += term.name + " ";
  return name + std::string(name_of(c.request.input_dtype)) + " n " +
         std::to_string(c.inputs.shape.n_tok) + " d " + std::to_string(c.inputs.shape.d_model) +
         " vocab " + std::to_string(c.inputs.shape.vocab) + " chunk " +
         std::to_string(c.limits.chunk);
}

TEST(HeadMatrix, EveryTermEveryTypeEveryVocabulary) {
  Rng rng(test_seed());
  for (const DType dtype : kDTypes) {
    Fractions fractions;
    for (const int64_t vocab : {1, 2, 31, 127, 129, 1000}) {
      for (const LossTerm& term : term_variants()) {
        const RandomHead head = draw_away_from_clip(
            {term}, [&] { return random_head(rng, vocab > 200 ? 4 : 6, 0, vocab); });
        const PlanCase c = case_of(head, dtype);
        SCOPED_TRACE(name_of_case(c));
        expect_within_bounds(c, fractions);
      }
    }
    print(std::string(name_of(dtype)).c_str(), fractions);
  }
}

TEST(HeadMatrix, LargeOddVocabularies) {
  Rng rng(test_seed() + 1);
  const std::vector<LossTerm> terms = {
      {.name = "ce", .label_smoothing = 0.1},
      {.name = "z", .kind = LossKind::kZLoss, .weight = 1e-3},
      {.name = "rkl", .kind = LossKind::kDistillation, .divergence = Divergence::kReverseKl},
      {.name = "jsd", .kind = LossKind::kDistillation, .divergence = Divergence::kJensenShannon},
      {.name = "top",
       .kind = LossKind::kDistillation,
       .divergence = Divergence::kForwardKl,
       .teacher = 2},
      {.name = "gspo", .kind = LossKind::kGspo}};
  for (const int64_t vocab : {8003, 50257}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Fractions fractions;
      const RandomHead head =
          draw_away_from_clip(terms, [&] { return random_head(rng, 3, 0, vocab, 8); });
      const PlanCase c = case_of(head, dtype);
      SCOPED_TRACE(name_of_case(c));
      expect_within_bounds(c, fractions);
      print(name_of_case(c).c_str(), fractions);
    }
  }
}

// A random configuration through the fused door.
PlanCase random_mix(Rng& rng, DType dtype) {
  const std::vector<LossTerm> variants = term_variants();
  std::vector<LossTerm> terms;
  for (int64_t n = 1 + below(rng, 5); n > 0; --n) {
    LossTerm term = variants[below(rng, static_cast<int64_t>(variants.size()))];
    term.name += "#" + std::to_string(n);
    term.weight = below(rng, 5) == 0 ? 0 : uniform(rng, -1, 2);
    if (below(rng, 2)) term.logits_scale = uniform(rng, 0.5, 1.5);
    if (below(rng, 3) == 0) term.mask = static_cast<RowMask>(below(rng, 4));
    if (below(rng, 4) == 0) term.divisor = uniform(rng, 1, 20);
    terms.push_back(term);
  }
  constexpr int64_t kVocabularies[] = {1, 2, 31, 64, 127, 129, 257};
  const int64_t d_model = std::max<int64_t>(0, below(rng, 20) - 5);
  RandomHead head = draw_away_from_clip(terms, [&] {
    RandomHead drawn = random_head(rng, 1 + below(rng, 13), d_model, kVocabularies[below(rng, 7)]);
    drawn.config.options.logits_scale = below(rng, 2) ? 1 : uniform(rng, 0.5, 1.5);
    drawn.config.options.softcap = below(rng, 3) == 0 ? 4.0 : 0;
    if (d_model > 0) {
      drawn.config.options.bias = below(rng, 2) == 0;
      drawn.config.options.adapter_rank = below(rng, 2) * 2;
      drawn.config.options.adapter_scale = 0.5;
    }
    return drawn;
  });
  head.inputs.upstream = uniform(rng, -2, 2);
  if (below(rng, 2)) head.inputs.upstream_rows = normals(rng, head.inputs.shape.n_tok, 1);
  PlanCase c = case_of(head, dtype);
  c.limits.chunk = 1 + below(rng, head.inputs.shape.n_tok);
  c.limits.n_threads = static_cast<int>(1 + below(rng, 3));
  return c;
}

TEST(HeadMatrix, RandomMixes) {
  Rng rng(test_seed() + 2);
  for (const DType dtype : kDTypes) {
    Fractions fractions;
    for (int round = 0; round < 120; ++round) {
      PlanCase c = random_mix(rng, dtype);
      // Gradients may be stored in a type of their own.
      if (below(rng, 2)) c.request.grad_dtype = kDTypes[below(rng, 4)];
      if (below(rng, 2)) c.request.d_weight_dtype = kDTypes[below(rng, 4)];
      SCOPED_TRACE("round " + std::to_string(round) + ": " + name_of_case(c));
      expect_within_bounds(c, fractions);
    }
    print(std::string(name_of(dtype)).c_str(), fractions);
  }
}

// Hidden states of one type and weights of another are multiplied as the values they are (R23).
TEST(HeadMatrix, MixedTypes) {
  Rng rng(test_seed() + 3);
  for (const DType input : kDTypes) {
    for (const DType weight : kDTypes) {
      RandomHead head = random_head(rng, 6, 9, 33);
      head.config.terms = {{.name = "ce"}, {.name = "z", .kind = LossKind::kZLoss}};
      PlanCase c = case_of(head, input);
      c.request.weight_dtype = c.request.d_weight_dtype = weight;
      SCOPED_TRACE(std::string(name_of(input)) + " x " + std::string(name_of(weight)));
      const Result<lossk::HeadPlan> plan =
          lossk::plan(c.inputs.shape, c.config, c.request, c.limits);
      if (!plan) {
        EXPECT_EQ(plan.status().code(), kHeadBadDtype) << plan.status().to_string();
        continue;
      }
      Fractions fractions;
      expect_within_bounds(c, fractions);
    }
  }
}

// --- To the bit ----------------------------------------------------------------------------------

// Scalars of a run: everything but gradients.
std::vector<double> scalars(const PlanOutcome& outcome) {
  const HeadResult& r = outcome.result;
  std::vector<double> all = r.terms;
  all.push_back(r.total);
  for (const auto* each : {&r.token_loss, &r.lse, &r.label_log_prob, &r.entropy}) {
    all.insert(all.end(), each->begin(), each->end());
  }
  return all;
}

std::vector<double> gradients(const PlanOutcome& outcome) {
  const HeadResult& r = outcome.result;
  std::vector<double> all;
  for (const auto* each :
       {&r.d_logits, &r.d_hidden, &r.d_weight, &r.d_bias, &r.d_adapter_a, &r.d_adapter_b}) {
    all.insert(all.end(), each->begin(), each->end());
  }
  return all;
}

TEST(HeadMatrix, EveryChunkHasTheSameBits) {
  Rng rng(test_seed() + 4);
  for (const DType dtype : kDTypes) {
    for (int round = 0; round < 20; ++round) {
      PlanCase c = random_mix(rng, dtype);
      SCOPED_TRACE(name_of_case(c));
      c.limits = {.chunk = c.inputs.shape.n_tok, .n_threads = 1};
      const PlanOutcome whole = run_plan(c);
      ASSERT_TRUE(whole.status.ok()) << whole.status.to_string();
      for (int64_t chunk = 1; chunk < c.inputs.shape.n_tok; ++chunk) {
        c.limits = {.chunk = chunk, .n_threads = static_cast<int>(1 + chunk % 3)};
        EXPECT_EQ(run_plan(c).bits, whole.bits) << "chunk " << chunk;
      }
    }
  }
}

TEST(HeadMatrix, ForwardAloneHasTheSameScalars) {
  Rng rng(test_seed() + 5);
  for (const DType dtype : kDTypes) {
    for (int round = 0; round < 30; ++round) {
      PlanCase c = random_mix(rng, dtype);
      SCOPED_TRACE(name_of_case(c));
      const PlanOutcome both = run_plan(c);
      c.gradient = false;
      const PlanOutcome forward = run_plan(c);
      ASSERT_TRUE(both.status.ok() && forward.status.ok());
      EXPECT_EQ(scalars(forward), scalars(both));
      EXPECT_EQ(forward.result.argmax, both.result.argmax);
    }
  }
}

// fused and per_term: the same scalars; gradients within one rounding of their storage type, and of
// what the bounds give to each.
TEST(HeadMatrix, FusedEqualsPerTerm) {
  Rng rng(test_seed() + 6);
  for (const DType dtype : kDTypes) {
    for (int round = 0; round < 40; ++round) {
      PlanCase c = random_mix(rng, dtype);
      c.inputs = as_stored(c.inputs, c.request);
      SCOPED_TRACE(name_of_case(c));
      const PlanOutcome fused = run_plan(c);
      c.limits.implementation = Implementation::kPerTerm;
      const PlanOutcome per_term = run_plan(c);
      ASSERT_TRUE(fused.status.ok() && per_term.status.ok());
      if (dtype == DType::kF64) {
        EXPECT_EQ(scalars(per_term), scalars(fused));
      }
      const std::vector<double> a = gradients(fused), b = gradients(per_term);
      const reference::HeadErrorBounds bounds = reference::head_error_bounds(
          c.config, c.inputs, reference::head_losses(c.config, c.inputs),
          dtype == DType::kF64 ? DType::kF64 : DType::kF32);
      std::vector<double> allowed;
      if (c.inputs.shape.d_model == 0) {
        allowed = bounds.d_logits;
      } else {
        for (const auto* each : {&bounds.d_hidden, &bounds.d_weight, &bounds.d_bias,
                                 &bounds.d_adapter_a, &bounds.d_adapter_b}) {
          allowed.insert(allowed.end(), each->begin(), each->end());
        }
      }
      ASSERT_EQ(allowed.size(), a.size());
      const Comparison result = compare(a, b, [&](size_t i) {
        return 2 * allowed[i] + 2 * reference::rounding_error(dtype, std::abs(b[i]) + allowed[i]) +
               1e-300;
      });
      EXPECT_TRUE(result.ok || result.message.starts_with("vacuous")) << result.message;
    }
  }
}

// z-loss at weight 0 is reported, and changes no bit of anything else (R20).
TEST(HeadMatrix, WeightZeroChangesNoBit) {
  Rng rng(test_seed() + 7);
  for (const DType dtype : kDTypes) {
    for (const LossTerm& silent : term_variants()) {
      RandomHead head = random_head(rng, 5, 4, 33);
      head.config.terms = {{.name = "first", .label_smoothing = 0.1},
                           {.name = "kd", .kind = LossKind::kDistillation}};
      PlanCase c = case_of(head, dtype);
      const PlanOutcome without = run_plan(c);
      c.config.terms.push_back(silent);
      c.config.terms.back().weight = 0;
      const PlanOutcome with = run_plan(c);
      ASSERT_TRUE(with.status.ok() && without.status.ok());
      SCOPED_TRACE(name_of_case(c));
      EXPECT_EQ(gradients(with), gradients(without));
      EXPECT_EQ(with.result.total, without.result.total);
      EXPECT_EQ(with.result.token_loss, without.result.token_loss);
      EXPECT_EQ(with.result.terms[0], without.result.terms[0]);
      c.config.terms.back().weight = 1;
      EXPECT_EQ(run_plan(c).result.terms[2], with.result.terms[2]);
    }
  }
}

// Ignored rows hold NaN, infinities and ids out of range: not a bit changes.
TEST(HeadMatrix, PoisonedIgnoredRows) {
  Rng rng(test_seed() + 8);
  for (const DType dtype : kDTypes) {
    for (const int64_t d_model : {0, 5}) {
      for (const LossTerm& term : term_variants()) {
        if (term.mask != RowMask::kAuto) continue;
        RandomHead head = random_head(rng, 8, d_model, 65);
        head.config.terms = {term, {.name = "second", .weight = 0.5}};
        head.config.options.bias = d_model > 0;
        head.inputs.labels[3] = -100;
        head.inputs.labels[6] = -1;
        head.inputs.upstream_rows = normals(rng, 8, 1);
        PlanCase c = case_of(head, dtype);
        c.limits.chunk = 3;
        SCOPED_TRACE(name_of_case(c));
        const PlanOutcome clean = run_plan(c);
        HeadInputs& in = c.inputs;
        for (size_t row = 0; row < 8; ++row) {
          if (in.labels[row] >= 0) continue;
          for (std::vector<double>* values :
               {&in.logits, &in.hidden, &in.token_weights, &in.upstream_rows, &in.advantages,
                &in.old_log_probs, &in.reference_log_probs, &in.teachers[0].logits,
                &in.teachers[1].hidden, &in.teachers[2].log_probs}) {
            const size_t width = values->size() / 8;
            for (size_t i = 0; i < width; ++i) {
              (*values)[row * width + i] = i % 3 == 0 ? kNan : i % 3 == 1 ? kInf : -kInf;
            }
          }
          in.segments[row] = -12345;
          in.teachers[2].ids[2 * row] = 1 << 30;
        }
        const PlanOutcome poisoned = run_plan(c);
        ASSERT_TRUE(clean.status.ok() && poisoned.status.ok()) << poisoned.status.to_string();
        EXPECT_EQ(poisoned.bits, clean.bits);
      }
    }
  }
}

// The teacher is the student: exactly 0, in every type, through both doors, whatever the chunk.
TEST(HeadMatrix, IdenticalTeacher) {
  Rng rng(test_seed() + 9);
  for (const DType dtype : kDTypes) {
    for (const int64_t d_model : {0, 16}) {
      for (const int64_t vocab : {1, 2, 127, 1000}) {
        RandomHead head = random_head(rng, 5, d_model, vocab);
        HeadInputs& in = head.inputs;
        in.teachers.resize(1);
        if (d_model == 0) {
          for (size_t i = 1; i < in.logits.size(); i += 7) {
            if (vocab > 2) in.logits[i] = -kInf;
          }
          in.teachers[0] = {.logits = in.logits};
          head.config.teachers = {{.vocab = vocab}};
        } else {
          in.teachers[0] = {.hidden = in.hidden, .weight = in.weight};
          head.config.teachers = {
              {.kind = lossk::TeacherKind::kHidden, .vocab = vocab, .d_model = d_model}};
        }
        in.labels.clear();
        for (const Divergence divergence :
             {Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJensenShannon}) {
          head.config.terms = {{.name = "kd",
                                .kind = LossKind::kDistillation,
                                .divergence = divergence,
                                .temperature = 2,
                                .student_temperature = 2,
                                .beta = 0.3}};
          PlanCase c = case_of(head, dtype);
          c.limits.chunk = 2;
          SCOPED_TRACE(name_of_case(c) + std::to_string(static_cast<int>(divergence)));
          const PlanOutcome outcome = run_plan(c);
          ASSERT_TRUE(outcome.status.ok()) << outcome.status.to_string();
          EXPECT_EQ(outcome.result.total, 0.0);
          for (const double g : gradients(outcome)) ASSERT_EQ(g, 0.0);
        }
      }
    }
  }
}

// Columns that are -inf in student and teacher are as good as absent.
TEST(HeadMatrix, MaskedVocabulary) {
  Rng rng(test_seed() + 10);
  for (const DType dtype : kDTypes) {
    Fractions fractions;
    for (const LossTerm& term : term_variants()) {
      // The top k of a teacher and smoothing put mass on a masked column only by mistake.
      if (term.label_smoothing > 0) continue;
      RandomHead head = draw_away_from_clip({term}, [&] {
        RandomHead drawn = random_head(rng, 5, 0, 67);
        HeadInputs& in = drawn.inputs;
        for (size_t i = 0; i < in.logits.size(); ++i) {
          const auto row = i / 67;
          const auto column = static_cast<int64_t>(i % 67);
          const bool top =
              column == in.teachers[2].ids[2 * row] || column == in.teachers[2].ids[2 * row + 1];
          if (column % 3 != 1 || column == in.labels[row] || top) continue;
          in.logits[i] = in.teachers[0].logits[i] = -kInf;
        }
        return drawn;
      });
      if (term.teacher == 1) continue;  // a teacher from hidden states has no such columns
      const PlanCase c = case_of(head, dtype);
      SCOPED_TRACE(name_of_case(c));
      expect_within_bounds(c, fractions);
      const PlanOutcome outcome = run_plan(c);
      for (const double g : outcome.result.d_logits) ASSERT_TRUE(std::isfinite(g));
      ASSERT_TRUE(std::isfinite(outcome.result.total));
    }
    print(std::string(name_of(dtype)).c_str(), fractions);
  }
}

}  // namespace
}  // namespace ullage::test
