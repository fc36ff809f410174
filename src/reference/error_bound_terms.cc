#include "reference/error_bound_terms.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace ullage::reference {

using lossk::Divergence;
using lossk::LossKind;
using lossk::LossTerm;
using lossk::TopKTail;

BoundedSoftmax bounded_softmax(const double* logits, int64_t vocab, double scale, double delta,
                               const Rounding& r) {
  BoundedSoftmax result;
  result.exact = log_softmax(logits, vocab, scale);
  for (int64_t j = 0; j < vocab; ++j) {
    const double a = std::abs(scale * logits[j]);
    if (std::isfinite(a)) result.a_max = std::max(result.a_max, a);
  }
  const double delta_a = scale * delta + 4 * r.u * result.a_max;
  const double sum = std::expm1(2 * delta_a) + 4 * r.u + r.gamma(static_cast<double>(vocab));
  const double log_size = std::log(static_cast<double>(vocab)) + 2 * result.a_max;
  result.lse = delta_a + sum + 4 * r.u * (1 + log_size);
  result.log_q = result.lse + 2 * delta_a + 4 * r.u * log_size;
  result.q = std::expm1(result.log_q) + 4 * r.u;
  return result;
}

RowBound cross_entropy_bound(const TermContext& c, int64_t row, const BoundedSoftmax& s,
                             const Rounding& r) {
  const HeadInputs& in = c.inputs;
  const LossTerm& term = c.term;
  const int64_t label = c.label(row);
  const auto vocab = static_cast<int64_t>(s.exact.log_q.size());
  RowBound bound;
  bound.d.resize(vocab);
  const double token_weight = in.token_weights.empty() ? 1 : std::abs(in.token_weights[row]);
  std::vector<double> target(vocab);
  double sum = 0, magnitude = 0;
  for (int64_t j = 0; j < vocab; ++j) {
    const double weight = in.class_weights.empty() ? 1 : in.class_weights[j];
    const double smooth = term.label_smoothing / static_cast<double>(vocab);
    target[j] = std::abs(weight) * ((j == label ? 1 - term.label_smoothing : 0) + smooth);
    sum += target[j];
    // Smoothing adds up W lse - sum_j w_j a_j, as large as its summands.
    if (target[j] != 0) magnitude += target[j] * (std::abs(s.exact.log_q[j]) + 2 * s.a_max);
  }
  const double n = term.label_smoothing > 0 ? static_cast<double>(vocab) + 8 : 8;
  bound.loss = token_weight * (sum * s.log_q + r.gamma(n) * magnitude);
  for (int64_t j = 0; j < vocab; ++j) {
    const double q = std::exp(s.exact.log_q[j]);
    bound.d[j] = token_weight * (q * sum * (s.q + r.gamma(n)) + 8 * r.u * (target[j] + q * sum));
  }
  return bound;
}

RowBound z_loss_bound(const BoundedSoftmax& s, const Rounding& r) {
  RowBound bound;
  const double lse = std::abs(s.exact.lse);
  bound.loss = 2 * lse * s.lse + s.lse * s.lse + 4 * r.u * lse * lse;
  for (const double log_q : s.exact.log_q) {
    bound.d.push_back(2 * std::exp(log_q) * (lse * (s.q + 8 * r.u) + s.lse * (1 + s.q)));
  }
  return bound;
}

namespace {

// Bins of a divergence (docs/losses.md): error of h_b, of the loss and of sum h.
struct BinBound {
  std::vector<double> h, h_size;  // error and size
  double loss = 0, h_sum = 0, h_sum_size = 0;
};

BinBound bin_bound(const LossTerm& term, const std::vector<double>& log_p,
                   const std::vector<double>& log_q, bool normalized, double p_error,
                   const BoundedSoftmax& s, double teacher_a_max, const Rounding& r) {
  BinBound bound;
  const double relative = std::expm1(p_error) + s.q + 8 * r.u;
  const double ratio = p_error + s.log_q;  // of ln(p / q)
  const double size = 2 * s.a_max + 2 * teacher_a_max;
  double magnitude = 0, mass = 0, loss = 0;
  for (size_t b = 0; b < log_q.size(); ++b) {
    const double p = std::exp(log_p[b]), q = std::exp(log_q[b]);
    double weight = 0, slope = 0, h_error = 0;
    const auto finite = [](double x) { return std::isfinite(x) ? std::abs(x) : 0; };
    switch (term.divergence) {
      case Divergence::kCrossEntropy:
      case Divergence::kForwardKl:
        weight = p;
        slope = p;
        h_error = p * relative;
        break;
      case Divergence::kReverseKl:
        weight = q;
        slope = q * (finite(log_q[b] - log_p[b]) + 1);
        h_error = q * ratio + slope * relative;
        if (q > 0) loss += q * finite(log_q[b] - log_p[b]);
        break;
      case Divergence::kJensenShannon: {
        const double m = q + term.beta * (p - q);
        weight = term.beta * p + (1 - term.beta) * q;
        slope = (1 - term.beta) * q * (m > 0 && q > 0 ? std::abs(std::log(q / m)) : 0);
        h_error = (1 - term.beta) * q * (ratio + 8 * r.u) + slope * relative;
        break;
      }
    }
    mass += weight;
    if (weight > 0) magnitude += weight * (finite(log_p[b]) + finite(log_q[b]) + size);
    bound.h.push_back(h_error);
    bound.h_size.push_back(slope);
    bound.h_sum += h_error;
    bound.h_sum_size += slope;
  }
  bound.loss = mass * ratio + (relative + r.gamma(static_cast<double>(log_q.size()))) * magnitude;
  bound.h_sum += r.gamma(static_cast<double>(log_q.size())) * bound.h_sum_size;
  if (normalized && term.divergence != Divergence::kJensenShannon) {
    const bool reverse = term.divergence == Divergence::kReverseKl;
    bound.h_sum = reverse ? bound.loss : 0;
    bound.h_sum_size = reverse ? loss : 1;
  }
  return bound;
}

}  // namespace

RowBound distillation_bound(const TermContext& c, int64_t row, const BoundedSoftmax& s,
                            double teacher_delta, const Rounding& r) {
  const int64_t vocab = c.vocab();
  const std::vector<double>& log_q = s.exact.log_q;
  RowBound bound;
  bound.d.assign(vocab, 0);
  if (c.teacher->kind != lossk::TeacherKind::kTopK) {
    const BoundedSoftmax t = bounded_softmax(c.teacher_logits + row * c.teacher->vocab, vocab,
                                             c.scale() / c.term.temperature, teacher_delta, r);
    const BinBound bins = bin_bound(c.term, t.exact.log_q, log_q, true, t.log_q, s, t.a_max, r);
    bound.loss = bins.loss;
    for (int64_t j = 0; j < vocab; ++j) {
      const double q = std::exp(log_q[j]);
      bound.d[j] = bins.h[j] + q * (bins.h_sum + bins.h_sum_size * (s.q + 8 * r.u)) +
                   4 * r.u * bins.h_size[j];
    }
    return bound;
  }

  const int64_t k = c.teacher->k;
  const HeadTeacher& teacher = c.inputs.teachers[c.term.teacher];
  const int64_t* ids = teacher.ids.data() + row * k;
  std::vector<double> log_p(teacher.log_probs.begin() + row * k,
                            teacher.log_probs.begin() + (row + 1) * k);
  std::vector<double> bins_q, rest;
  std::vector<bool> in_k(vocab, false);
  double p_mass = 0, q_mass = 0;
  for (int64_t b = 0; b < k; ++b) {
    in_k[ids[b]] = true;
    bins_q.push_back(log_q[ids[b]]);
    p_mass += std::exp(log_p[b]);
    q_mass += std::exp(log_q[ids[b]]);
  }
  for (int64_t j = 0; j < vocab; ++j) {
    if (!in_k[j]) rest.push_back(log_q[j]);
  }
  double p_error = 4 * r.u;
  const bool tail = c.term.top_k_tail == TopKTail::kTailBin && !rest.empty();
  double q_tail = 0;
  if (c.term.top_k_tail == TopKTail::kRenormalized) {
    for (int64_t b = 0; b < k; ++b) {
      log_p[b] -= std::log(p_mass);
      bins_q[b] -= std::log(q_mass);
    }
    p_error += r.gamma(static_cast<double>(k) + 8) * 2;
  } else if (tail) {
    for (const double value : rest) q_tail += std::exp(value);
    log_p.push_back(std::log(std::max(1 - p_mass, 0.0)));
    bins_q.push_back(std::log(q_tail));
    // 1 - sum p cancels.
    if (p_mass < 1) p_error += 0x1p-53 * 4 * static_cast<double>(k + 1) / (1 - p_mass);
  }
  const BinBound bins =
      bin_bound(c.term, log_p, bins_q, c.term.top_k_tail != TopKTail::kTruncated, p_error, s, 0, r);
  bound.loss = bins.loss;
  const bool renormalized = c.term.top_k_tail == TopKTail::kRenormalized;
  for (int64_t j = 0; j < vocab; ++j) {
    const double q = std::exp(log_q[j]);
    if (renormalized && !in_k[j]) continue;
    const double share = renormalized ? q / q_mass : q;
    bound.d[j] = share * (bins.h_sum + bins.h_sum_size * 2 * (s.q + 8 * r.u));
    if (tail && !in_k[j] && q_tail > 0) {
      bound.d[j] += (bins.h[k] + bins.h_size[k] * 2 * (s.q + 8 * r.u)) * q / q_tail;
    }
  }
  for (int64_t b = 0; b < k; ++b) bound.d[ids[b]] += bins.h[b] + 8 * r.u * bins.h_size[b];
  return bound;
}

namespace {

// A loss that is a function of lp, with the error of its slope.
struct SlopeBound {
  double loss = 0, slope = 0, slope_size = 0;
};

RowBound slope_bound(const SlopeBound& b, int64_t label, const BoundedSoftmax& s,
                     const Rounding& r) {
  RowBound bound;
  bound.loss = b.loss;
  for (size_t j = 0; j < s.exact.log_q.size(); ++j) {
    const double q = std::exp(s.exact.log_q[j]);
    const double hit = static_cast<int64_t>(j) == label ? 1 : 0;
    bound.d.push_back(b.slope * std::abs(hit - q) + b.slope_size * q * s.q +
                      8 * r.u * b.slope_size * (hit + q));
  }
  return bound;
}

// Labelled rows of each segment, or of the batch.
struct SegmentMeans {
  std::map<int64_t, double> n_labels, log_ratio, advantage;
};

}  // namespace

std::vector<RowBound> policy_bounds(const TermContext& c,
                                    const std::vector<BoundedSoftmax>& softmax, const Rounding& r) {
  const LossTerm& term = c.term;
  const HeadInputs& in = c.inputs;
  const bool gspo = term.kind == LossKind::kGspo;
  const auto segment = [&](int64_t row) { return in.segments.empty() ? 0 : in.segments[row]; };
  SegmentMeans mean, sizes;
  double worst_lp = 0;
  const auto lp_of = [&](int64_t row) { return softmax[row].exact.log_q[c.label(row)]; };
  for (int64_t row = 0; row < c.n_tok(); ++row) {
    if (!c.counts(row)) continue;
    worst_lp = std::max(worst_lp, softmax[row].log_q);
    mean.n_labels[segment(row)] += 1;
    mean.log_ratio[segment(row)] += lp_of(row) - in.old_log_probs[row];
    mean.advantage[segment(row)] += in.advantages[row];
    sizes.log_ratio[segment(row)] += std::abs(lp_of(row) - in.old_log_probs[row]);
    sizes.advantage[segment(row)] += std::abs(in.advantages[row]);
  }
  std::vector<RowBound> bounds(c.n_tok());
  for (int64_t row = 0; row < c.n_tok(); ++row) {
    if (!c.counts(row)) continue;
    const BoundedSoftmax& s = softmax[row];
    const double n = mean.n_labels[segment(row)], lp = lp_of(row);
    const double log_ratio = gspo ? mean.log_ratio[segment(row)] / n : lp - in.old_log_probs[row];
    const double advantage = std::abs(gspo ? mean.advantage[segment(row)] / n : in.advantages[row]);
    const double ratio = std::exp(log_ratio);
    // What a segment's n values lose when they are added up in float64, there and here.
    const double sum_error = gspo ? 0x1p-52 * (n + 2) / n : 0;
    const double d_log_ratio = sum_error * sizes.log_ratio[segment(row)];
    const double d_advantage = sum_error * sizes.advantage[segment(row)];
    SlopeBound b;
    b.slope =
        advantage * ratio * (std::expm1((gspo ? worst_lp : s.log_q) + d_log_ratio) + 16 * r.u) +
        1.01 * ratio * d_advantage;
    b.slope_size = advantage * ratio;
    b.loss = b.slope;
    if (term.kind == LossKind::kCispo) {
      b.slope_size = advantage * std::clamp(ratio, 1 - term.epsilon_low, 1 + term.epsilon_high);
      b.loss = b.slope * std::abs(lp) + b.slope_size * s.log_q;
    }
    if (term.kl_beta > 0) {
      const double d = in.reference_log_probs[row] - lp;
      b.loss +=
          term.kl_beta * (std::abs(std::expm1(d)) * s.log_q + std::exp(d) * s.log_q * s.log_q +
                          8 * r.u * (std::exp(d) + std::abs(d)));
      b.slope += term.kl_beta * std::exp(d) * (std::expm1(s.log_q) + 8 * r.u);
      b.slope_size += term.kl_beta * std::abs(std::expm1(d));
    }
    // A token's weight, 1 / N or 1, only scales.
    const double weight = lossk::PolicyNormalizer::kSequenceMeans == term.normalizer ? 1 / n : 1;
    b.loss *= weight;
    b.slope *= weight;
    b.slope_size *= weight;
    bounds[row] = slope_bound(b, c.label(row), s, r);
  }
  return bounds;
}

// The loss of a pair is beta-Lipschitz in its margin, its slope beta^2 / 4-Lipschitz; a margin is
// off by no more than all rows together.
std::vector<RowBound> preference_bounds(const TermContext& c,
                                        const std::vector<BoundedSoftmax>& softmax,
                                        const Rounding& r, double& pair_losses) {
  const double beta = c.term.beta;
  const auto n_pairs = static_cast<double>(c.inputs.pairs.size()) / 2;
  double margin = 0;
  for (int64_t row = 0; row < c.n_tok(); ++row) {
    if (c.counts(row)) margin += softmax[row].log_q + 8 * r.u;
  }
  pair_losses = n_pairs * beta * margin;
  std::vector<RowBound> bounds(c.n_tok());
  for (int64_t row = 0; row < c.n_tok(); ++row) {
    if (!c.counts(row)) continue;
    bounds[row] = slope_bound(
        {.loss = 0, .slope = n_pairs * beta * beta / 4 * margin, .slope_size = n_pairs * beta},
        c.label(row), softmax[row], r);
  }
  return bounds;
}

}  // namespace ullage::reference
