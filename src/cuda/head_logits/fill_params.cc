#include "cuda/head_logits/fill_params.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "contract/head_validate.h"

namespace ullage::lossk::cuda {
namespace {

TermParams term_params(const LossTerm& term, const Inputs& inputs, const Outputs& outputs) {
  TermParams t;
  t.kind = term.kind;
  t.divergence = term.divergence;
  t.mask = resolved_mask(term, static_cast<bool>(inputs.labels), !inputs.mask.empty());
  t.smoothing = static_cast<float>(term.label_smoothing);
  t.beta = static_cast<float>(term.beta);
  t.epsilon_low = static_cast<float>(term.epsilon_low);
  t.epsilon_high = static_cast<float>(term.epsilon_high);
  t.kl_beta = static_cast<float>(term.kl_beta);
  if (term.t_squared) t.loss_scale = static_cast<float>(term.temperature * term.temperature);
  t.weight = term.weight;
  if (is_policy(term.kind)) {
    t.per_segment_mean = resolved_normalizer(term) == PolicyNormalizer::kSequenceMeans;
    t.wants_metrics = term.kind != LossKind::kCispo && !outputs.policy_metrics.empty();
  }
  if (term.divisor) {
    t.divisor = *term.divisor;
  } else if (divides_by_segments(term)) {
    t.divisor = static_cast<double>(inputs.n_segments);
    if (resolved_normalizer(term) == PolicyNormalizer::kMaxLength) {
      t.divisor *= static_cast<double>(term.max_length);
    }
  } else if (term.kind == LossKind::kDpo) {
    const int64_t n_pairs = inputs.pairs.size / 2;
    t.divisor = static_cast<double>(n_pairs);
  } else {
    t.census_divisor = true;
  }
  return t;
}

RowFloats floats(const VectorView& view) {
  return {static_cast<const float*>(view.data), view.stride};
}
RowIndices indices(const IndexView& view) { return {view.data, view.stride, view.id_bytes}; }
RowOutput output(const MutableVectorView& view) {
  return {static_cast<float*>(view.data), view.stride};
}

}  // namespace

bool is_top_k(const HeadConfig& config, const LossTerm& term) {
  return term.kind == LossKind::kDistillation &&
         config.teachers[static_cast<size_t>(term.teacher)].kind == TeacherKind::kTopK;
}

void fill_terms(const HeadConfig& config, std::span<const Pass> passes, const Inputs& inputs,
                const Outputs& outputs, HeadParams& p) {
  const LabelRange labels = label_range(config.options, p.vocab);
  p.vocab_offset = config.options.vocab_offset;
  p.first_label = labels.first;
  p.last_label = labels.last;
  p.is_shard = config.options.group_vocab > 0;
  p.smoothed_columns = static_cast<float>(whole_vocab(config.options, p.vocab));
  p.every_row_counts = !inputs.labels;
  for (const LossTerm& term : config.terms) {
    TermParams& t = p.terms[p.n_terms++];
    t = term_params(term, inputs, outputs);
    if (is_sequence(term)) t.sequence = p.n_sequence_terms++;
    p.every_row_counts |= t.mask == RowMask::kNone;
    p.masked_rows_count |= t.mask == RowMask::kOwn;
    p.wants_smoothing |= t.smoothing > 0;
  }
  for (size_t i = 0; i < passes.size(); ++i) {
    for (const size_t t : passes[i].terms) p.terms[t].pass = static_cast<int>(i);
  }
}

namespace {

TeacherInputs teacher_given(const Inputs& inputs, int teacher) {
  const auto t = static_cast<size_t>(teacher);
  return t < inputs.teachers.size() ? inputs.teachers[t] : TeacherInputs{};
}

void fill_top_k(const HeadConfig& config, const Pass& pass, const Inputs& inputs, HeadParams& p) {
  const TeacherInputs given = teacher_given(inputs, pass.teacher);
  const int64_t k = config.teachers[static_cast<size_t>(pass.teacher)].k;
  p.top_k = static_cast<int>(k);
  p.top_k_ids = indices(given.ids);
  p.top_k_log_probs = floats(given.log_probs);
  for (const size_t t : pass.terms) {
    if (!is_top_k(config, config.terms[t])) continue;
    p.terms[t].top_k = true;
    p.terms[t].tail = config.terms[t].top_k_tail;
    p.wants_others |= p.terms[t].tail == TopKTail::kTailBin && k < p.vocab;
  }
}

void fill_dense_teacher(const HeadConfig& config, const Pass& pass, const Inputs& inputs,
                        HeadParams& p) {
  const MatrixView logits = teacher_given(inputs, pass.teacher).logits;
  p.teacher = logits.data;
  p.teacher_stride = logits.row_stride;
  p.teacher_log2_scale = static_cast<float>(pass.teacher_scale * std::numbers::log2e);
  for (const size_t t : pass.terms) {
    const LossTerm& term = config.terms[t];
    if (term.kind != LossKind::kDistillation) continue;
    p.wants_cross |= term.divergence == Divergence::kCrossEntropy;
    // Of a mixture both rows have a part, or a column that the student alone has is log 0.
    if (term.divergence != Divergence::kJensenShannon) continue;
    p.terms[t].beta = p.mix_beta = std::min(p.terms[t].beta, std::nextafter(1.0f, 0.0f));
  }
}

}  // namespace

void fill_pass(const HeadConfig& config, std::span<const Pass> passes, size_t which,
               const Inputs& inputs, HeadParams& p) {
  const Pass& pass = passes[which];
  p.scale = static_cast<float>(pass.scale);
  p.log2_scale = static_cast<float>(pass.scale * std::numbers::log2e);
  p.tempered_log2_scale = static_cast<float>(pass.student_scale * std::numbers::log2e);
  p.squarings = squarings_of(pass);
  bool smooths = false, measures = false;
  for (size_t t = 0; t < config.terms.size(); ++t) {
    TermParams& term = p.terms[t];
    term.here = static_cast<size_t>(term.pass) == which;
    term.scale =
        static_cast<float>(term.kind == LossKind::kDistillation ? pass.student_scale : pass.scale);
    smooths |= term.here && term.smoothing > 0;
    measures |= term.here && term.wants_metrics;
  }
  const bool reports = which == 0;
  if (!reports) {
    p.lse = p.label_log_prob = p.entropy = p.shift = p.log_sum = p.distance = {};
    p.argmax = nullptr;
    p.correct = nullptr;
  }
  p.wants_smoothing = smooths || (p.wants_smoothing && p.distance.data != nullptr);
  p.wants_entropy = (measures || p.entropy.data != nullptr) && p.group_entropy.data == nullptr;
  p.wants_argmax = p.argmax != nullptr || p.correct != nullptr;
  const bool top_k = pass.teacher >= 0 &&
                     config.teachers[static_cast<size_t>(pass.teacher)].kind == TeacherKind::kTopK;
  if (top_k) {
    fill_top_k(config, pass, inputs, p);
  } else {
    p.row_words = nullptr;
    if (pass.teacher >= 0) fill_dense_teacher(config, pass, inputs, p);
  }
}

float unit_of_gains(const HeadParams& p, int exponent) {
  double largest = 0;
  for (int t = 0; t < p.n_terms; ++t) {
    const TermParams& term = p.terms[t];
    const double divisor = term.divisor > 0 ? term.divisor : static_cast<double>(p.n_tok);
    largest = std::max(largest, std::abs(p.upstream * term.weight) / divisor);
  }
  if (largest == 0) return 1;
  return static_cast<float>(std::ldexp(1.0, std::clamp(exponent - std::ilogb(largest), -100, 100)));
}

void fill_vectors(const Inputs& inputs, const Outputs& outputs, HeadParams& p) {
  p.labels = indices(inputs.labels);
  p.segments = indices(inputs.segments);
  p.pairs = indices(inputs.pairs);
  p.n_segments = inputs.n_segments;
  p.n_pairs = inputs.pairs.size / 2;
  p.mask = inputs.mask.empty() ? nullptr : inputs.mask.data();
  p.token_weights = floats(inputs.token_weights);
  p.class_weights = floats(inputs.class_weights);
  p.advantages = floats(inputs.advantages);
  p.old_log_probs = floats(inputs.old_log_probs);
  p.reference_log_probs = floats(inputs.reference_log_probs);
  p.group_shift = floats(inputs.group_shift);
  p.group_log_sum = floats(inputs.group_log_sum);
  p.group_label_log_prob = floats(inputs.group_label_log_prob);
  p.group_distance = floats(inputs.group_distance);
  p.group_entropy = floats(inputs.group_entropy);
  p.upstream_rows = floats(inputs.upstream_rows);
  p.upstream = inputs.upstream;
  p.token_loss = output(outputs.token_loss);
  p.lse = output(outputs.lse);
  p.label_log_prob = output(outputs.label_log_prob);
  p.entropy = output(outputs.entropy);
  p.shift = output(outputs.shift);
  p.log_sum = output(outputs.log_sum);
  p.distance = output(outputs.distance);
  p.argmax = outputs.argmax.empty() ? nullptr : outputs.argmax.data();
  p.correct = outputs.correct.empty() ? nullptr : outputs.correct.data();
  p.term_scalars = outputs.terms.empty() ? nullptr : outputs.terms.data();
  p.total = outputs.total;
  p.n_valid = outputs.n_valid;
  p.policy_metrics = outputs.policy_metrics.empty() ? nullptr : outputs.policy_metrics.data();
}

}  // namespace ullage::lossk::cuda
