// Random inputs of the loss algebra with everything any term may ask for, and the term variants
// over which the head's tests run.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "reference/head_losses.h"
#include "support/seed.h"

namespace ullage::test {

using lossk::Divergence;
using lossk::HeadConfig;
using lossk::LossKind;
using lossk::LossTerm;
using lossk::PolicyNormalizer;
using lossk::RowMask;
using lossk::TopKTail;
using reference::HeadInputs;
using reference::HeadResult;

struct RandomHead {
  HeadConfig config;  // the three teachers; terms are the test's
  HeadInputs inputs;
};

inline std::vector<double> normals(Rng& rng, int64_t n, double scale) {
  std::vector<double> values(static_cast<size_t>(n));
  for (double& value : values) value = scale * normal(rng);
  return values;
}

// Teachers: 0 logits, 1 hidden, 2 the top k of teacher 0 at temperature 1.
inline RandomHead random_head(Rng& rng, int64_t n_tok, int64_t d_model, int64_t vocab,
                              int64_t k = 2) {
  k = std::min(k, vocab);
  RandomHead head;
  HeadInputs& in = head.inputs;
  in.shape = {n_tok, d_model, vocab};
  if (d_model == 0) {
    in.logits = normals(rng, n_tok * vocab, 2);
  } else {
    in.hidden = normals(rng, n_tok * d_model, 1);
    in.weight = normals(rng, vocab * d_model, 2 / std::sqrt(static_cast<double>(d_model)));
    in.bias = normals(rng, vocab, 0.5);
    in.adapter_a = normals(rng, 2 * d_model, 0.5);
    in.adapter_b = normals(rng, vocab * 2, 0.5);
  }
  in.n_segments = 4;  // one of them, 2, stays empty
  for (int64_t i = 0; i < n_tok; ++i) {
    in.labels.push_back(below(rng, 4) == 0 ? -100 : below(rng, vocab));
    in.token_weights.push_back(uniform(rng, 0.2, 2));
    in.mask.push_back(below(rng, 3) != 0);
    in.advantages.push_back(normal(rng));
    in.old_log_probs.push_back(-uniform(rng, 0.1, 5));
    in.reference_log_probs.push_back(-uniform(rng, 0.1, 5));
    const int64_t third = i * 3 / std::max<int64_t>(n_tok, 1);
    in.segments.push_back(third == 2 ? 3 : third);
  }
  // Every segment but the empty one has a label to speak of.
  for (int64_t i = 0; i < n_tok; i += 2) in.labels[i] = below(rng, vocab);
  for (int64_t j = 0; j < vocab; ++j) in.class_weights.push_back(uniform(rng, 0.2, 2));
  in.pairs = {0, 1, 3, 0};

  constexpr int64_t kTeacherWidth = 3;
  in.teachers.resize(3);
  in.teachers[0].logits = normals(rng, n_tok * vocab, 2);
  in.teachers[1].hidden = normals(rng, n_tok * kTeacherWidth, 1);
  in.teachers[1].weight = normals(rng, vocab * kTeacherWidth, 1);
  for (int64_t i = 0; i < n_tok; ++i) {
    const double* row = in.teachers[0].logits.data() + i * vocab;
    std::vector<int64_t> order;
    double sum = 0;
    for (int64_t j = 0; j < vocab; ++j) {
      order.push_back(j);
      sum += std::exp(row[j]);
    }
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
    for (int64_t b = 0; b < k; ++b) {
      in.teachers[2].ids.push_back(order[b]);
      in.teachers[2].log_probs.push_back(std::min(row[order[b]] - std::log(sum), 0.0));
    }
  }
  head.config.teachers = {
      {.kind = lossk::TeacherKind::kLogits, .vocab = vocab},
      {.kind = lossk::TeacherKind::kHidden, .vocab = vocab, .d_model = kTeacherWidth},
      {.kind = lossk::TeacherKind::kTopK, .k = k}};
  return head;
}

// Every kind in every form that is a formula of its own.
inline std::vector<LossTerm> term_variants() {
  std::vector<LossTerm> terms;
  const auto add = [&](const std::string& name, LossTerm term) {
    term.name = name;
    terms.push_back(term);
  };
  add("ce", {});
  add("ce_smoothed", {.label_smoothing = 0.1});
  add("ce_scaled", {.logits_scale = 1.7, .divisor = 3.5});
  add("z", {.kind = LossKind::kZLoss});
  add("z_own", {.kind = LossKind::kZLoss, .mask = RowMask::kOwn});
  add("z_every", {.kind = LossKind::kZLoss, .mask = RowMask::kNone});
  const char* divergences[] = {"ce", "fkl", "rkl", "jsd"};
  for (int d = 0; d < 4; ++d) {
    const LossTerm base = {
        .kind = LossKind::kDistillation, .divergence = static_cast<Divergence>(d), .beta = 0.3};
    const std::string suffix = std::string("_") + divergences[d];
    LossTerm term = base;
    add("kd" + suffix, term);
    term.temperature = 1.5;
    term.student_temperature = 1.3;
    term.t_squared = true;
    term.mask = RowMask::kOwn;
    add("kd_tempered" + suffix, term);
    term = base;
    term.teacher = 1;
    term.logits_scale = 0.7;
    term.mask = RowMask::kNone;
    add("kd_hidden" + suffix, term);
    term = base;
    term.teacher = 2;
    for (const TopKTail tail :
         {TopKTail::kTruncated, TopKTail::kTailBin, TopKTail::kRenormalized}) {
      term.top_k_tail = tail;
      add("kd_top_k" + std::to_string(static_cast<int>(tail)) + suffix, term);
    }
  }
  for (int n = 0; n <= 4; ++n) {
    const auto normalizer = static_cast<PolicyNormalizer>(n);
    const std::string suffix = "_" + std::to_string(n);
    add("grpo" + suffix, {.kind = LossKind::kGrpo,
                          .kl_beta = n % 2 ? 0.04 : 0,
                          .normalizer = normalizer,
                          .max_length = 9});
    add("gspo" + suffix, {.kind = LossKind::kGspo,
                          .epsilon_high = 0.28,
                          .kl_beta = n % 2 ? 0 : 0.1,
                          .normalizer = normalizer,
                          .max_length = 9});
  }
  // With both bounds 0 the clipped weight is 1: what differences can see of it.
  add("cispo", {.kind = LossKind::kCispo, .epsilon_low = 0, .epsilon_high = 0, .kl_beta = 0.05});
  add("dpo", {.kind = LossKind::kDpo, .beta = 0.4});
  return terms;
}

// How near the nearest ratio is to a clip bound, where the loss has a kink. In log-ratio.
inline double distance_to_clip(const HeadConfig& config, const HeadInputs& inputs) {
  double nearest = INFINITY;
  for (const LossTerm& term : config.terms) {
    if (term.kind != LossKind::kGrpo && term.kind != LossKind::kGspo) continue;
    HeadConfig scaled = config;
    scaled.terms = {{.name = "lp"}};
    scaled.options.logits_scale *= term.logits_scale;
    const HeadResult result = reference::head_losses(scaled, inputs);
    std::vector<double> sum(inputs.n_segments, 0), count(inputs.n_segments, 0);
    const auto note = [&](double log_ratio) {
      nearest = std::min({nearest, std::abs(log_ratio - std::log(1 - term.epsilon_low)),
                          std::abs(log_ratio - std::log(1 + term.epsilon_high))});
    };
    for (size_t i = 0; i < inputs.labels.size(); ++i) {
      if (inputs.labels[i] < 0) continue;
      const double log_ratio = result.label_log_prob[i] - inputs.old_log_probs[i];
      sum[inputs.segments[i]] += log_ratio;
      count[inputs.segments[i]] += 1;
      if (term.kind == LossKind::kGrpo) note(log_ratio);
    }
    for (size_t d = 0; d < sum.size(); ++d) {
      if (term.kind == LossKind::kGspo && count[d] > 0) note(sum[d] / count[d]);
    }
  }
  return nearest;
}

}  // namespace ullage::test
