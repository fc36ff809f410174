#include "runtime/head_scalars.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "contract/head_validate.h"
#include "contract/token_losses.h"
#include "cpu/storage.h"

namespace ullage::lossk {
namespace {

using cpu::value_at;

double value_or(const VectorView& view, int64_t i, double otherwise) {
  return view ? value_at(view, i) : otherwise;
}

}  // namespace

HeadScalars::HeadScalars(const HeadLayout& layout, const Inputs& inputs,
                         std::span<std::byte> statistics)
    : layout_(layout), inputs_(inputs), n_tok_(layout.shape.n_tok) {
  std::memset(statistics.data(), 0, statistics.size());
  std::byte* next = statistics.data();
  const auto take = [&]<class T>(T*& array, int64_t count) {
    array = reinterpret_cast<T*>(next);
    next += count * static_cast<int64_t>(sizeof(T));
  };
  const int64_t n_terms = layout.n_terms();
  take(softmax_, static_cast<int64_t>(layout.groups.size()) * n_tok_);
  take(teachers_, layout.n_distillation * n_tok_);
  take(terms_, n_terms * n_tok_);
  take(live_, n_tok_);
  take(order_, n_tok_);
  take(segment_length_, n_tok_);
  take(divisors_, n_terms);
  take(extra_, n_terms);

  const auto& terms = layout.config.terms;
  for (int64_t row = 0; row < n_tok_; ++row) {
    const bool labelled = has_label(row);
    const bool counted = std::any_of(terms.begin(), terms.end(), [&](const LossTerm& term) {
      return counts_row(term, inputs, row);
    });
    if (reports(row) || counted) live_[n_live_++] = row;
    if (labelled) order_[n_labelled_++] = row;
  }
  if (layout.smoothing && layout.config.options.group_vocab > 0) {
    smoothing_mass_ = static_cast<double>(layout.config.options.group_vocab);
  } else if (layout.smoothing) {
    for (int64_t j = 0; j < layout.shape.vocab; ++j) {
      smoothing_mass_ += value_or(inputs.class_weights, j, 1);
    }
  }
  sort_segments();
  for (int term = 0; term < n_terms; ++term) {
    divisors_[term] = terms[static_cast<size_t>(term)].divisor.value_or(default_divisor(term));
  }
}

// Of another shard's label, -1: 1, for shards have no class weights.
double HeadScalars::class_weight(int64_t label) const {
  return value_or(inputs_.class_weights, label, 1);
}

double HeadScalars::row_count(int term) const {
  const LossTerm& t = layout_.config.terms[static_cast<size_t>(term)];
  return static_cast<double>(std::count_if(
      live_, live_ + n_live_, [&](int64_t row) { return counts_row(t, inputs_, row); }));
}

double HeadScalars::default_divisor(int term) const {
  const LossTerm& t = layout_.config.terms[static_cast<size_t>(term)];
  switch (t.kind) {
    case LossKind::kCrossEntropy: {
      double sum = 0;
      for (const int64_t row : live_rows()) {
        if (has_label(row)) sum += class_weight(label(row));
      }
      return sum;
    }
    case LossKind::kZLoss:
    case LossKind::kDistillation:
      return row_count(term);
    case LossKind::kDpo: {
      const int64_t n_pairs = inputs_.pairs.size / 2;
      return static_cast<double>(n_pairs);
    }
    case LossKind::kGrpo:
    case LossKind::kGspo:
    case LossKind::kCispo:
      break;
  }
  const auto segments = static_cast<double>(inputs_.n_segments);
  switch (resolved_normalizer(t)) {
    case PolicyNormalizer::kMaxLength:
      return segments * static_cast<double>(t.max_length);
    case PolicyNormalizer::kSequenceMeans:
    case PolicyNormalizer::kSequences:
      return segments;
    default:
      return static_cast<double>(n_labelled_);
  }
}

// Labelled rows by segment: a segment's rows become adjacent, whatever the ids.
void HeadScalars::sort_segments() {
  if (!inputs_.segments) {
    for (int64_t i = 0; i < n_labelled_; ++i) segment_length_[order_[i]] = n_labelled_;
    return;
  }
  const IndexView& segments = inputs_.segments;
  std::sort(order_, order_ + n_labelled_, [&](int64_t a, int64_t b) {
    return segments[a] != segments[b] ? segments[a] < segments[b] : a < b;
  });
  for (int64_t begin = 0; begin < n_labelled_;) {
    int64_t end = begin;
    while (end < n_labelled_ && segments[order_[end]] == segments[order_[begin]]) ++end;
    for (int64_t i = begin; i < end; ++i) segment_length_[order_[i]] = end - begin;
    begin = end;
  }
}

std::span<const int64_t> HeadScalars::rows_of(int64_t segment) const {
  const IndexView& segments = inputs_.segments;
  const int64_t* begin =
      std::lower_bound(order_, order_ + n_labelled_, segment,
                       [&](int64_t row, int64_t value) { return segments[row] < value; });
  const int64_t* end = begin;
  while (end < order_ + n_labelled_ && segments[*end] == segment) ++end;
  return {begin, end};
}

TermRow HeadScalars::token_term(int term, int64_t row) const {
  const LossTerm& t = layout_.config.terms[static_cast<size_t>(term)];
  const SoftmaxStatistics& s = softmax(layout_.group_of[static_cast<size_t>(term)], row);
  const double lp = s.label - s.log_sum;
  switch (t.kind) {
    case LossKind::kCrossEntropy: {
      const double smoothing = t.label_smoothing;
      const double hit = (1 - smoothing) * class_weight(label(row));
      double loss = hit == 0 ? 0 : hit * (s.log_sum - s.label);
      if (smoothing > 0) {
        loss += smoothing / smoothed_columns() * (smoothing_mass_ * s.log_sum - s.distance);
      }
      return {value_or(inputs_.token_weights, row, 1) * loss, 0};
    }
    case LossKind::kZLoss: {
      const double scale = layout_.groups[layout_.group_of[static_cast<size_t>(term)]].scale;
      const double lse = scale * s.max + s.log_sum;
      return {lse * lse, 0};
    }
    case LossKind::kDistillation: {
      const int distillation = layout_.distillation[static_cast<size_t>(term)];
      const double factor = t.t_squared ? t.temperature * t.temperature : 1;
      return {factor * teachers_[distillation * n_tok_ + row].divergence.loss, 0};
    }
    case LossKind::kGrpo:
    case LossKind::kCispo: {
      const double advantage = value_at(inputs_.advantages, row);
      const double log_ratio = lp - value_at(inputs_.old_log_probs, row);
      TokenLoss<double> token =
          t.kind == LossKind::kGrpo
              ? clipped_ratio_loss(log_ratio, advantage, t.epsilon_low, t.epsilon_high)
              : clipped_weight_loss(lp, log_ratio, advantage, t.epsilon_low, t.epsilon_high);
      if (t.kl_beta > 0) {
        const auto k3 = k3_penalty(lp, value_at(inputs_.reference_log_probs, row));
        token.loss += t.kl_beta * k3.loss;
        token.slope += t.kl_beta * k3.slope;
      }
      const double weight = resolved_normalizer(t) == PolicyNormalizer::kSequenceMeans
                                ? 1 / static_cast<double>(segment_length_[row])
                                : 1;
      return {weight * token.loss, weight * token.slope};
    }
    case LossKind::kGspo:
    case LossKind::kDpo:
      break;
  }
  return {0, 0};
}

void HeadScalars::place_in_group(int64_t row) {
  if (layout_.config.options.group_vocab == 0) return;
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  for (int group = 0; group < static_cast<int>(layout_.groups.size()); ++group) {
    SoftmaxStatistics& s = softmax(group, row);
    if (inputs_.group_shift) {
      s.max = value_at(inputs_.group_shift, row);
      s.log_sum = value_at(inputs_.group_log_sum, row);
      s.sum = std::exp(s.log_sum);
      s.label = s.log_sum + value_or(inputs_.group_label_log_prob, row, 0);
      s.distance = value_or(inputs_.group_distance, row, 0);
      s.entropy = value_or(inputs_.group_entropy, row, 0);
    } else if (s.max == kNone || (has_label(row) && label(row) < 0)) {
      s.label = kNone;
    }
  }
}

void HeadScalars::finish_row(int64_t row) {
  place_in_group(row);
  for (int term = 0; term < layout_.n_terms(); ++term) {
    const LossTerm& t = layout_.config.terms[static_cast<size_t>(term)];
    if (t.kind == LossKind::kGspo || t.kind == LossKind::kDpo) continue;
    if (counts_row(t, inputs_, row)) term_row(term, row) = token_term(term, row);
  }
}

// A segment's ratio is the exponential of the mean of its tokens' log-ratios; each of its tokens
// carries the segment's loss, so the mean's 1 / length and the sum over tokens cancel in the slope.
void HeadScalars::finish_gspo(int term) {
  const LossTerm& t = layout_.config.terms[static_cast<size_t>(term)];
  for (int64_t begin = 0; begin < n_labelled_;) {
    const int64_t length = segment_length_[order_[begin]];
    double log_ratio = 0, advantage = 0;
    for (int64_t i = begin; i < begin + length; ++i) {
      const int64_t row = order_[i];
      log_ratio += log_probability(term, row) - value_at(inputs_.old_log_probs, row);
      advantage += value_at(inputs_.advantages, row);
    }
    const auto n = static_cast<double>(length);
    const auto segment =
        clipped_ratio_loss(log_ratio / n, advantage / n, t.epsilon_low, t.epsilon_high);
    const double weight = resolved_normalizer(t) == PolicyNormalizer::kSequenceMeans ? 1 / n : 1;
    for (int64_t i = begin; i < begin + length; ++i) {
      const int64_t row = order_[i];
      TokenLoss<double> token = segment;
      if (t.kl_beta > 0) {
        const auto k3 =
            k3_penalty(log_probability(term, row), value_at(inputs_.reference_log_probs, row));
        token.loss += t.kl_beta * k3.loss;
        token.slope += t.kl_beta * k3.slope;
      }
      term_row(term, row) = {weight * token.loss, weight * token.slope};
    }
    begin += length;
  }
}

void HeadScalars::finish_dpo(int term) {
  const LossTerm& t = layout_.config.terms[static_cast<size_t>(term)];
  const auto excess = [&](std::span<const int64_t> rows) {
    double sum = 0;
    for (const int64_t row : rows) {
      sum += log_probability(term, row) - value_at(inputs_.reference_log_probs, row);
    }
    return sum;
  };
  for (int64_t pair = 0; pair < inputs_.pairs.size / 2; ++pair) {
    const auto chosen = rows_of(inputs_.pairs[2 * pair]);
    const auto rejected = rows_of(inputs_.pairs[2 * pair + 1]);
    const auto loss = preference_loss(excess(chosen) - excess(rejected), t.beta);
    extra_[term] += loss.loss;
    for (const int64_t row : chosen) term_row(term, row).slope += loss.slope;
    for (const int64_t row : rejected) term_row(term, row).slope -= loss.slope;
  }
}

void HeadScalars::finish_segments() {
  for (int term = 0; term < layout_.n_terms(); ++term) {
    const LossKind kind = layout_.config.terms[static_cast<size_t>(term)].kind;
    if (kind == LossKind::kGspo) finish_gspo(term);
    if (kind == LossKind::kDpo) finish_dpo(term);
  }
}

double HeadScalars::gain(int term, int64_t row) const {
  const LossTerm& t = layout_.config.terms[static_cast<size_t>(term)];
  if (t.weight == 0 || divisors_[term] == 0 || !counts_row(t, inputs_, row)) return 0;
  const double factor =
      t.kind == LossKind::kDistillation && t.t_squared ? t.temperature * t.temperature : 1;
  return inputs_.upstream * value_or(inputs_.upstream_rows, row, 1) * factor * t.weight /
         divisors_[term];
}

RowCoefficients HeadScalars::coefficients(int group, int64_t row) const {
  RowCoefficients c;
  for (const int term : layout_.groups[static_cast<size_t>(group)].terms) {
    const LossTerm& t = layout_.config.terms[static_cast<size_t>(term)];
    const double g = gain(term, row);
    if (g == 0) continue;
    switch (t.kind) {
      case LossKind::kCrossEntropy: {
        const double scaled = g * value_or(inputs_.token_weights, row, 1);
        const double hit = (1 - t.label_smoothing) * class_weight(label(row));
        const double even = t.label_smoothing / smoothed_columns();
        c.p += scaled * (hit + even * smoothing_mass_);
        c.l += scaled * hit;
        c.u += scaled * even;
        break;
      }
      case LossKind::kZLoss: {
        const SoftmaxStatistics& s = softmax(group, row);
        c.p += 2 * g * (layout_.groups[static_cast<size_t>(group)].scale * s.max + s.log_sum);
        break;
      }
      case LossKind::kDistillation:
        break;
      case LossKind::kGrpo:
      case LossKind::kGspo:
      case LossKind::kCispo:
      case LossKind::kDpo:
        c.p -= g * terms_[term * n_tok_ + row].slope;
        c.l -= g * terms_[term * n_tok_ + row].slope;
        break;
    }
  }
  return c;
}

double HeadScalars::label_gradient(int group, int64_t row, const RowCoefficients& c) const {
  const SoftmaxStatistics& s = softmax(group, row);
  const double lp = s.label - s.log_sum;
  return (c.p - c.l) * std::exp(lp) + c.l * std::expm1(lp);
}

double HeadScalars::sum_of(int term) const {
  double sum = extra_[term];
  for (const int64_t row : live_rows()) sum += terms_[term * n_tok_ + row].loss;
  return sum;
}

// Where a batch has no segments, all its labelled rows are one.
PolicyMetrics HeadScalars::metrics(int term) const {
  const LossTerm& t = layout_.config.terms[static_cast<size_t>(term)];
  const int group = layout_.group_of[static_cast<size_t>(term)];
  PolicyMetrics m;
  m.max_advantage = -std::numeric_limits<double>::infinity();
  m.min_advantage = std::numeric_limits<double>::infinity();
  m.n_tokens = n_labelled_;
  for (int64_t begin = 0; begin < n_labelled_;) {
    const int64_t length = segment_length_[order_[begin]];
    const auto n = static_cast<double>(length);
    ++m.n_segments;
    double mean_log_ratio = 0, mean_advantage = 0;
    for (int64_t i = begin; i < begin + length; ++i) {
      const int64_t row = order_[i];
      mean_log_ratio += (log_probability(term, row) - value_at(inputs_.old_log_probs, row)) / n;
      mean_advantage += value_at(inputs_.advantages, row) / n;
    }
    for (int64_t i = begin; i < begin + length; ++i) {
      const int64_t row = order_[i];
      const bool by_segment = t.kind == LossKind::kGspo;
      const double lp = log_probability(term, row);
      const double old_lp = value_at(inputs_.old_log_probs, row);
      const double advantage = value_at(inputs_.advantages, row);
      const double log_ratio = by_segment ? mean_log_ratio : lp - old_lp;
      const double ratio = std::exp(log_ratio);
      const bool clipped = ratio < 1 - t.epsilon_low || ratio > 1 + t.epsilon_high;
      const double value_weight = by_segment ? 1 / n : 1;
      m.old_log_probs += old_lp / n;
      m.new_log_probs += lp / n;
      m.ratio += ratio / n;
      m.kl += (std::expm1(log_ratio) - log_ratio) / n;
      m.clipped += clipped ? 1 / n : 0;
      m.advantage += (by_segment ? mean_advantage : advantage) / n;
      m.entropy += softmax(group, row).entropy / n;
      m.ratio_sum += value_weight * ratio;
      m.ratio_squared_sum += value_weight * ratio * ratio;
      m.max_advantage = std::max(m.max_advantage, advantage);
      m.min_advantage = std::min(m.min_advantage, advantage);
    }
    begin += length;
  }
  return m;
}

double HeadScalars::label_log_prob(const SoftmaxStatistics& s, int64_t row) const {
  if (!has_label(row)) return 0;
  const bool elsewhere = std::isinf(s.label) && layout_.config.options.group_vocab > 0;
  return elsewhere ? s.label : s.label - s.log_sum;
}

void HeadScalars::report(const Outputs& outputs) const {
  const auto& terms = layout_.config.terms;
  double total = 0;
  for (int term = 0; term < layout_.n_terms(); ++term) {
    const auto i = static_cast<size_t>(term);
    const double scalar = divisors_[term] == 0 ? 0 : sum_of(term) / divisors_[term];
    if (!outputs.terms.empty()) outputs.terms[i] = scalar;
    if (terms[i].weight != 0) total += terms[i].weight * scalar;
    const bool has_metrics = terms[i].kind == LossKind::kGrpo || terms[i].kind == LossKind::kGspo;
    if (!outputs.policy_metrics.empty() && has_metrics) outputs.policy_metrics[i] = metrics(term);
  }
  if (outputs.total) *outputs.total = total;
  if (outputs.n_valid) *outputs.n_valid = inputs_.labels ? n_labelled_ : n_tok_;

  const auto set = [](const MutableVectorView& view, int64_t row, double value) {
    if (view) cpu::store_double(value, view.data, view.dtype, row * view.stride);
  };
  const bool narrow_shift = outputs.shift && outputs.shift.dtype == DType::kF32;
  for (int64_t row = 0; row < n_tok_; ++row) {
    const SoftmaxStatistics none{};
    const SoftmaxStatistics& s = reports(row) ? softmax(layout_.base_group, row) : none;
    const double scale = layout_.config.options.logits_scale;
    double loss = 0;
    for (int term = 0; term < layout_.n_terms(); ++term) {
      const double weight = terms[static_cast<size_t>(term)].weight;
      if (weight != 0) loss += weight * terms_[term * n_tok_ + row].loss;
    }
    set(outputs.token_loss, row, loss);
    set(outputs.lse, row, scale * s.max + s.log_sum);
    set(outputs.label_log_prob, row, label_log_prob(s, row));
    set(outputs.entropy, row, s.entropy);
    // log_sum makes up for what the shift's rounding takes; of an infinite one that is not a
    // number.
    const SoftmaxStatistics& read = softmax(layout_.base_group, row);
    const double shift = narrow_shift ? static_cast<float>(read.max) : read.max;
    set(outputs.shift, row, shift);
    set(outputs.log_sum, row,
        shift == read.max ? read.log_sum : scale * (read.max - shift) + read.log_sum);
    const auto columns = static_cast<double>(layout_.shape.vocab);
    set(outputs.distance, row,
        shift == read.max ? read.distance : columns * scale * (read.max - shift) + read.distance);
  }
}

}  // namespace ullage::lossk
