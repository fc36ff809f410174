// The oracle's gradients against differences of its own losses, in float64, for every term and
// for random mixes, through both doors. Inputs are drawn fresh each run.
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "contract/head_validate.h"
#include "support/compare.h"
#include "support/head_random.h"

namespace ullage::test {
namespace {

// Fourth-order central differences of `total` in every element of `values`: the error is about
// step^4 and 2^-52 |total| / step.
std::vector<double> differences(std::vector<double>& values, const std::function<double()>& total) {
  constexpr double kStep = 1e-3;
  std::vector<double> result;
  for (double& value : values) {
    const double center = value;
    const auto at = [&](double offset) {
      value = center + offset;
      return total();
    };
    result.push_back((8 * (at(kStep) - at(-kStep)) - (at(2 * kStep) - at(-2 * kStep))) /
                     (12 * kStep));
    value = center;
  }
  return result;
}

void expect_gradients(const HeadConfig& config, HeadInputs inputs) {
  ASSERT_TRUE(lossk::validate(config).ok()) << lossk::validate(config).to_string();
  const HeadResult result = reference::head_losses(config, inputs);
  // 5th derivatives of these losses are up to some hundreds of their size.
  const double bound = 1e-8 * (1 + std::abs(result.total));
  const auto total = [&] { return inputs.upstream * reference::head_losses(config, inputs).total; };
  const auto check = [&](const char* what, std::vector<double>& values,
                         const std::vector<double>& gradient) {
    EXPECT_TRUE(close(gradient, differences(values, total), bound)) << what;
  };
  if (inputs.shape.d_model == 0) {
    check("d_logits", inputs.logits, result.d_logits);
    return;
  }
  check("d_hidden", inputs.hidden, result.d_hidden);
  check("d_weight", inputs.weight, result.d_weight);
  if (config.options.bias) check("d_bias", inputs.bias, result.d_bias);
  if (config.options.adapter_rank > 0) {
    check("d_adapter_a", inputs.adapter_a, result.d_adapter_a);
    check("d_adapter_b", inputs.adapter_b, result.d_adapter_b);
  }
}

// Draws until no ratio is where the difference would step over a clip bound.
RandomHead away_from_clip(const std::vector<LossTerm>& terms,
                          const std::function<RandomHead()>& draw) {
  for (int attempt = 0; attempt < 1000; ++attempt) {
    RandomHead head = draw();
    head.config.terms = terms;
    if (distance_to_clip(head.config, head.inputs) > 0.02) return head;
  }
  ADD_FAILURE() << "no draw away from the clip bounds";
  return {};
}

TEST(HeadDifferences, EveryTermFromLogits) {
  Rng rng(test_seed());
  for (const LossTerm& term : term_variants()) {
    SCOPED_TRACE(term.name);
    RandomHead head = away_from_clip({term}, [&] { return random_head(rng, 6, 0, 7); });
    if (term.name != "ce_scaled") head.inputs.class_weights.clear();
    expect_gradients(head.config, head.inputs);
  }
}

TEST(HeadDifferences, RandomMixesFromHiddenWithEveryOption) {
  Rng rng(test_seed() + 1);
  const std::vector<LossTerm> variants = term_variants();
  for (int round = 0; round < 24; ++round) {
    std::vector<LossTerm> terms;
    std::string names;
    for (int64_t n = 2 + below(rng, 4); n > 0; --n) {
      LossTerm term = variants[below(rng, static_cast<int64_t>(variants.size()))];
      term.weight = uniform(rng, -1, 2);
      term.logits_scale = uniform(rng, 0.5, 1.5);
      term.name += "#" + std::to_string(n);
      names += term.name + " ";
      terms.push_back(term);
    }
    SCOPED_TRACE("round " + std::to_string(round) + ": " + names);
    RandomHead head = away_from_clip(terms, [&] {
      RandomHead drawn = random_head(rng, 5, 3, 5);
      drawn.config.options = {.logits_scale = uniform(rng, 0.5, 1.5),
                              .softcap = below(rng, 2) ? 3.0 : 0,
                              .bias = below(rng, 2) == 0,
                              .adapter_rank = below(rng, 2) * 2,
                              .adapter_scale = 0.5};
      return drawn;
    });
    head.inputs.upstream = uniform(rng, -2, 2);
    expect_gradients(head.config, head.inputs);
  }
}

// The total's gradient is the weighted sum of the terms' own, row by row times upstream.
TEST(HeadDifferences, GradientsSuperpose) {
  Rng rng(test_seed() + 2);
  RandomHead head = random_head(rng, 9, 0, 11);
  head.config.terms = term_variants();
  for (LossTerm& term : head.config.terms) term.weight = uniform(rng, -1, 1);
  head.config.terms[0].weight = 0;
  head.inputs.upstream = 1.5;
  head.inputs.upstream_rows = normals(rng, 9, 1);
  const HeadResult result = reference::head_losses(head.config, head.inputs);
  std::vector<double> sum(result.d_logits.size(), 0);
  double total = 0;
  for (size_t t = 0; t < head.config.terms.size(); ++t) {
    const double weight = head.config.terms[t].weight;
    total += weight * result.terms[t];
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += 1.5 * head.inputs.upstream_rows[i / 11] * weight * result.term_d_logits[t][i];
    }
  }
  EXPECT_TRUE(close(result.d_logits, sum, 1e-12));
  EXPECT_NEAR(result.total, total, 1e-12 * std::abs(total));
}

}  // namespace
}  // namespace ullage::test
