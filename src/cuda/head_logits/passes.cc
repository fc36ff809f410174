#include "cuda/head_logits/passes.h"

#include <algorithm>
#include <cmath>

#include "cuda/head_logits/fill_params.h"

namespace ullage::lossk::cuda {
namespace {

// The pass that a term would have to itself.
Pass pass_of(const HeadConfig& config, const LossTerm& term) {
  Pass pass;
  pass.scale = pass.student_scale = config.options.logits_scale * term.logits_scale;
  if (term.kind != LossKind::kDistillation) return pass;
  pass.teacher = term.teacher;
  pass.teacher_scale = pass.scale / term.temperature;
  pass.scale = pass.student_scale = pass.scale / term.student_temperature;
  if (!is_top_k(config, term) && term.divergence == Divergence::kJensenShannon) {
    pass.beta = term.beta;
  }
  return pass;
}

// Whether one pass can be both.
bool go_together(const Pass& a, const Pass& b) {
  if (a.scale != b.scale) return false;
  if (a.teacher < 0 || b.teacher < 0) return true;
  return a.teacher == b.teacher && a.teacher_scale == b.teacher_scale &&
         (a.beta < 0 || b.beta < 0 || a.beta == b.beta);
}

bool only_distills(const HeadConfig& config, const Pass& pass) {
  return std::all_of(pass.terms.begin(), pass.terms.end(),
                     [&](size_t t) { return config.terms[t].kind == LossKind::kDistillation; });
}

// The labels' pass takes along the first of forward divergences and nothing else.
void take_along_tempered(const HeadConfig& config, std::vector<Pass>& passes) {
  Pass& labels = passes[0];
  if (labels.terms.empty() || labels.teacher >= 0) return;
  const auto tempered = std::find_if(passes.begin(), passes.end(), [&](const Pass& pass) {
    return family_of(config, pass) == Family::kForward && only_distills(config, pass);
  });
  if (tempered == passes.end()) return;
  labels.student_scale = tempered->scale;
  labels.teacher = tempered->teacher;
  labels.teacher_scale = tempered->teacher_scale;
  labels.terms.insert(labels.terms.end(), tempered->terms.begin(), tempered->terms.end());
  std::sort(labels.terms.begin(), labels.terms.end());
  passes.erase(tempered);
}

}  // namespace

std::vector<Pass> passes_of(const HeadConfig& config) {
  std::vector<Pass> passes(1);
  passes[0].scale = passes[0].student_scale = config.options.logits_scale;
  for (size_t t = 0; t < config.terms.size(); ++t) {
    const Pass own = pass_of(config, config.terms[t]);
    auto taken = std::find_if(passes.begin(), passes.end(),
                              [&](const Pass& pass) { return go_together(pass, own); });
    if (taken == passes.end()) taken = passes.insert(taken, own);
    if (taken->teacher < 0) {
      taken->teacher = own.teacher;
      taken->teacher_scale = own.teacher_scale;
    }
    taken->beta = std::max(taken->beta, own.beta);
    taken->terms.push_back(t);
  }
  take_along_tempered(config, passes);
  return passes;
}

int64_t n_gradients(const std::vector<Pass>& passes) {
  return std::count_if(passes.begin(), passes.end(),
                       [](const Pass& pass) { return !pass.terms.empty(); });
}

Family family_of(const HeadConfig& config, const Pass& pass) {
  bool cross = false, forward = false, reverse = false, mixture = false;
  for (const size_t t : pass.terms) {
    const LossTerm& term = config.terms[t];
    if (term.kind != LossKind::kDistillation || is_top_k(config, term)) continue;
    cross |= term.divergence == Divergence::kCrossEntropy;
    forward |= term.divergence == Divergence::kForwardKl;
    reverse |= term.divergence == Divergence::kReverseKl;
    mixture |= term.divergence == Divergence::kJensenShannon;
  }
  if (cross + forward + reverse + mixture > 1) return Family::kMixed;
  if (mixture) return Family::kJensenShannon;
  if (cross || forward) {
    return pass.student_scale == pass.scale ? Family::kForward : Family::kTempered;
  }
  return reverse ? Family::kReverse : Family::kLabels;
}

int squarings_of(const Pass& pass) {
  for (int s = 1; s <= kMostSquarings; ++s) {
    if (pass.scale == std::ldexp(pass.student_scale, s)) return s;
  }
  return 0;
}

bool is_sequence_pass(const HeadConfig& config, const Pass& pass) {
  return std::any_of(pass.terms.begin(), pass.terms.end(),
                     [&](size_t t) { return is_sequence(config.terms[t]); });
}

}  // namespace ullage::lossk::cuda
