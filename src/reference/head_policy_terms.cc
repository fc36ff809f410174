// Policy-gradient terms and preference pairs: functions of the labels' log-probabilities
// lp = ln q_y alone, so d a_j = slope ([j = y] - q_j) with slope = dLoss / d lp of the row.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "reference/head_terms.h"

namespace ullage::reference {
namespace {

using lossk::LossKind;
using lossk::LossTerm;
using lossk::PolicyNormalizer;

// A number for each segment that has a labelled row: ids may be far apart.
using PerSegment = std::map<int64_t, double>;

// Labelled rows of each segment; without segments the batch is one.
struct Segments {
  std::vector<int64_t> of_row;  // [n_tok], 0 on rows without a label
  PerSegment n_labels;
};

Segments count_segments(const TermContext& context) {
  const HeadInputs& inputs = context.inputs;
  Segments result;
  result.of_row.assign(context.n_tok(), 0);
  for (int64_t row = 0; row < context.n_tok(); ++row) {
    if (!context.counts(row)) continue;
    if (!inputs.segments.empty()) result.of_row[row] = inputs.segments[row];
    result.n_labels[result.of_row[row]] += 1;
  }
  return result;
}

std::vector<LogSoftmax> softmax_of_counted_rows(const TermContext& context) {
  std::vector<LogSoftmax> rows(context.n_tok());
  for (int64_t row = 0; row < context.n_tok(); ++row) {
    if (!context.counts(row)) continue;
    rows[row] = context.softmax(row);
  }
  return rows;
}

void add_slope(const TermContext& context, int64_t row, const LogSoftmax& softmax, double slope,
               std::vector<double>& d_logits) {
  for (int64_t j = 0; j < context.vocab(); ++j) {
    d_logits[row * context.vocab() + j] =
        slope * ((j == context.label(row) ? 1 : 0) - std::exp(softmax.log_q[j]));
  }
}

double clip(double value, double low, double high) { return std::min(std::max(value, low), high); }

// How much a token counts, and the divisor where none is given.
PolicyNormalizer normalizer_of(const LossTerm& term) {
  if (term.normalizer != PolicyNormalizer::kAuto) return term.normalizer;
  return term.kind == LossKind::kGspo ? PolicyNormalizer::kSequences : PolicyNormalizer::kTokens;
}

double default_divisor(const TermContext& context, double n_tokens) {
  const auto n_segments = static_cast<double>(context.inputs.n_segments);
  switch (normalizer_of(context.term)) {
    case PolicyNormalizer::kAuto:
    case PolicyNormalizer::kTokens:
      return n_tokens;
    case PolicyNormalizer::kSequenceMeans:
    case PolicyNormalizer::kSequences:
      return n_segments;
    case PolicyNormalizer::kMaxLength:
      return n_segments * static_cast<double>(context.term.max_length);
  }
  return 0;
}

}  // namespace

TermResult policy_term(const TermContext& context) {
  const LossTerm& term = context.term;
  const HeadInputs& inputs = context.inputs;
  Segments segments = count_segments(context);
  const std::vector<LogSoftmax> softmax = softmax_of_counted_rows(context);
  const double low = 1 - term.epsilon_low, high = 1 + term.epsilon_high;
  const bool gspo = term.kind == LossKind::kGspo;

  // gspo: the ratio is the geometric mean of the segment's, the advantage the mean.
  PerSegment mean_log_ratio, mean_advantage;
  for (int64_t row = 0; row < context.n_tok(); ++row) {
    if (!context.counts(row)) continue;
    const int64_t d = segments.of_row[row];
    const double lp = context.log_prob(row, softmax[row]);
    mean_log_ratio[d] += (lp - inputs.old_log_probs[row]) / segments.n_labels[d];
    mean_advantage[d] += inputs.advantages[row] / segments.n_labels[d];
  }

  TermResult result;
  result.row_loss.assign(context.n_tok(), 0);
  result.d_logits.assign(context.n_tok() * context.vocab(), 0);
  lossk::PolicyMetrics& metrics = result.metrics;
  metrics.max_advantage = -std::numeric_limits<double>::infinity();
  metrics.min_advantage = std::numeric_limits<double>::infinity();
  double n_tokens = 0;
  for (int64_t row = 0; row < context.n_tok(); ++row) {
    if (!context.counts(row)) continue;
    const int64_t d = segments.of_row[row];
    const double lp = context.log_prob(row, softmax[row]);
    const double log_ratio = gspo ? mean_log_ratio[d] : lp - inputs.old_log_probs[row];
    const double advantage = gspo ? mean_advantage[d] : inputs.advantages[row];
    const double r = std::exp(log_ratio);

    double loss, slope;
    if (term.kind == LossKind::kCispo) {
      // -clip(r) A lp, the clipped weight held constant.
      loss = -clip(r, low, high) * advantage * lp;
      slope = -clip(r, low, high) * advantage;
    } else {
      // -min(r A, clip(r) A). Raising lp raises r; the clipped branch is flat. The 1/N of gspo's
      // mean and the N equal token losses of its segment cancel, so its slope has the same form.
      loss = -std::min(r * advantage, clip(r, low, high) * advantage);
      slope = -r * (std::max(advantage, 0.0) * (r <= high ? 1 : 0) +
                    std::min(advantage, 0.0) * (r >= low ? 1 : 0));
    }
    if (term.kl_beta > 0) {
      const double diff = inputs.reference_log_probs[row] - lp;
      loss += term.kl_beta * (std::expm1(diff) - diff);
      slope += term.kl_beta * -std::expm1(diff);
    }
    const double token_weight =
        normalizer_of(term) == PolicyNormalizer::kSequenceMeans ? 1 / segments.n_labels[d] : 1;
    result.row_loss[row] = token_weight * loss;
    result.sum += token_weight * loss;
    add_slope(context, row, softmax[row], token_weight * slope, result.d_logits);
    n_tokens += 1;

    const double document_weight = 1 / segments.n_labels[d];
    const double ratio_weight = gspo ? document_weight : 1;
    metrics.old_log_probs += document_weight * inputs.old_log_probs[row];
    metrics.new_log_probs += document_weight * lp;
    metrics.ratio += document_weight * r;
    metrics.kl += document_weight * (std::expm1(log_ratio) - log_ratio);
    metrics.clipped += document_weight * (r < low || r > high ? 1 : 0);
    metrics.advantage += document_weight * advantage;
    metrics.entropy += document_weight * row_entropy(inputs, row, softmax[row]);
    metrics.ratio_sum += ratio_weight * r;
    metrics.ratio_squared_sum += ratio_weight * r * r;
    metrics.max_advantage = std::max(metrics.max_advantage, inputs.advantages[row]);
    metrics.min_advantage = std::min(metrics.min_advantage, inputs.advantages[row]);
    metrics.n_tokens += 1;
  }
  metrics.n_segments = static_cast<int64_t>(segments.n_labels.size());
  result.default_divisor = default_divisor(context, n_tokens);
  return result;
}

// -ln sigmoid(beta margin) per pair, margin = sum over the chosen segment of (lp - lp_reference)
// minus the same over the rejected one. The slope of a pair's loss in its margin is
// -beta sigmoid(-beta margin); a segment may be in many pairs.
TermResult preference_term(const TermContext& context) {
  const HeadInputs& inputs = context.inputs;
  const Segments segments = count_segments(context);
  const std::vector<LogSoftmax> softmax = softmax_of_counted_rows(context);
  PerSegment log_ratio, slope;
  for (int64_t row = 0; row < context.n_tok(); ++row) {
    if (!context.counts(row)) continue;
    log_ratio[segments.of_row[row]] +=
        context.log_prob(row, softmax[row]) - inputs.reference_log_probs[row];
  }
  TermResult result;
  result.row_loss.assign(context.n_tok(), 0);
  result.d_logits.assign(context.n_tok() * context.vocab(), 0);
  for (size_t i = 0; i + 1 < inputs.pairs.size(); i += 2) {
    const int64_t chosen = inputs.pairs[i], rejected = inputs.pairs[i + 1];
    const double x = context.term.beta * (log_ratio[chosen] - log_ratio[rejected]);
    result.sum += x > 0 ? std::log1p(std::exp(-x)) : std::log1p(std::exp(x)) - x;
    slope[chosen] -= context.term.beta / (1 + std::exp(x));
    slope[rejected] += context.term.beta / (1 + std::exp(x));
    result.default_divisor += 1;
  }
  for (int64_t row = 0; row < context.n_tok(); ++row) {
    if (!context.counts(row)) continue;
    add_slope(context, row, softmax[row], slope[segments.of_row[row]], result.d_logits);
  }
  return result;
}

}  // namespace ullage::reference
