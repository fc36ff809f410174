// How far the CUDA kernels may be from the oracle, derived from what they compute:
//
//   u_j = x_j * c - R, c = scale * log2 e     c and the result are rounded, |du| <= 3 e |u|; the
//                                             rounding of R is common to the row and cancels; under
//                                             a softcap each x is off by 8 e |x| (tanhf: 2 ulp, two
//                                             products)
//   2^u                                       relative 2^-22 (ex2.approx) + ln 2 |du|; squared s
//                                             times, 2^s as much and 2^s - 1 roundings
//   a sum of `depth` additions one on another  relative depth * e
//   logf, a product, a difference              a rounding or two of its operands
//
// with e = 2^-24. First-order terms are added up and 2 % put on top for the products of errors. A
// gradient is rounded once more, to its storage type.
#pragma once

#include <cmath>
#include <map>
#include <vector>

#include "contract/head_validate.h"
#include "cuda/head_logits/config.h"
#include "cuda/head_logits/passes.h"
#include "support/head_random.h"

namespace ullage::test {

inline constexpr double kUnit = 0x1p-24;
inline constexpr double kExp2 = 0x1p-22;
inline const double kLn2 = std::log(2.0);

// Rounds of a lane in a strip.
inline double lane_rounds(int64_t vocab) {
  // The longest strips are those of 16-bit logits without a teacher.
  const lossk::cuda::RowCut cut = lossk::cuda::cut_of(vocab, 2, lossk::cuda::Family::kLabels);
  return std::ceil(static_cast<double>(cut.n_rounds) / cut.n_strips);
}
// Additions one on another in a row's sum: 3 in a lane's eight columns, its rounds, 5 in the warp,
// then 4 over a section's strips and 4 over the sections.
inline double sum_depth(int64_t vocab) { return 3 + lane_rounds(vocab) + 5 + 4 + 4; }

// A strip's sums are brought to the section's maximum, the section's to the row's: each such step
// is a power of two more that they are multiplied by.
inline constexpr int kSteps = 2;

// Of sums of products, which a lane adds up column by column.
inline double product_sum_depth(int64_t vocab) { return 8 * lane_rounds(vocab) + 5 + 4 + 4; }

// A softmax and what its parts may be off by.
struct SoftmaxError {
  std::vector<double> log_q, q, d_q, u, d_u;  // u in base 2
  double max = 0, log_sum = 0, d_log_sum = 0, lse = 0, d_lse = 0;
  double depth = 0, product_depth = 0;

  // `squarings`: how often exponentials of another scale are squared to be these.
  SoftmaxError(const double* x, int64_t vocab, double scale, bool softcapped, int squarings = 0)
      : depth(sum_depth(vocab)), product_depth(product_sum_depth(vocab)) {
    max = *std::max_element(x, x + vocab);
    double sum = 0;
    for (int64_t j = 0; j < vocab; ++j) sum += std::exp(scale * (x[j] - max));
    log_sum = std::log(sum);
    double d_sum = (depth + 4 + kSteps) * kUnit + kSteps * kExp2;
    const double d_exp = std::ldexp(kExp2 + kUnit, squarings) - kUnit;
    std::vector<double> relative;
    for (int64_t j = 0; j < vocab; ++j) {
      const double a = scale * (x[j] - max);
      u.push_back(a / kLn2);
      log_q.push_back(a - log_sum);
      q.push_back(std::exp(log_q.back()));
      const bool finite = std::isfinite(a);
      double off = finite ? 3 * kUnit * std::abs(u.back()) : 0;
      if (finite && softcapped) {
        off += 8 * kUnit * scale / kLn2 * (std::abs(x[j]) + std::abs(max));
      }
      d_u.push_back(off);
      relative.push_back(d_exp + kLn2 * off + 2 * kUnit);
      d_sum += q.back() * relative.back();
    }
    d_log_sum = 1.02 * d_sum + 3 * kUnit * (1 + std::abs(log_sum));
    lse = scale * max + log_sum;
    d_lse = d_log_sum + 4 * kUnit * std::abs(scale * max) * (softcapped ? 4 : 1) +
            4 * kUnit * std::abs(lse);
    for (int64_t j = 0; j < vocab; ++j) {
      // Also where the kernel goes by ln q = u - log2 sum.
      const double from_log =
          std::isfinite(u[j]) ? 3 * kUnit * (std::abs(u[j]) * kLn2 + log_sum) : 0;
      d_q.push_back(1.02 * q[j] * (relative[j] + from_log + d_log_sum + 6 * kUnit) + 0x1p-120);
    }
  }

  double d_log_q(int64_t j) const {
    return kLn2 * d_u[j] + d_log_sum + 3 * kUnit * (std::abs(kLn2 * u[j]) + std::abs(log_sum));
  }
  // sum_j q_j |w_j|-like sums: sum of weight * value with the weights' and the values' errors.
  //
  // Where the first pass forms sum 2^u u, from each strip's reference, a step makes it
  // 2^by (sum 2^u u + by sum 2^u): the two have one sign, so an fma and a product round what they
  // come to, beside the power of two. |u| from a strip's reference and the |by| add up to |u| from
  // the row's, so that the roundings of all of them are within d_u; and sum 2^u has fewer
  // additions than product_depth counts.
  double entropy_error() const {
    double error = d_log_sum + 4 * kUnit * std::abs(log_sum);
    for (size_t j = 0; j < q.size(); ++j) {
      if (q[j] <= 0) continue;
      error += d_q[j] * std::abs(kLn2 * u[j]) + q[j] * kLn2 * d_u[j] +
               ((product_depth + 2 + 2 * kSteps) * kUnit + kSteps * kExp2) * q[j] *
                   std::abs(kLn2 * u[j]);
    }
    return 1.02 * error;
  }
};

// What one term's row loss and its gradient in a_j = scale * x_j may be off by, at gain 1.
struct TermError {
  double loss = 0;
  double slope = 0;              // label terms: of the slope in lp
  std::vector<double> gradient;  // [vocab]
};

class HeadBound {
 public:
  HeadBound(const lossk::HeadConfig& config, const reference::HeadInputs& in, DType dtype)
      : config_(config), in_(in), dtype_(dtype) {}

  // The bound of every element of d_logits, and of every term's scalar; `before`: what an
  // accumulating run adds to.
  void compute(const reference::HeadResult& expected, double before) {
    const auto [n, d_model, vocab] = in_.shape;
    const size_t n_terms = config_.terms.size();
    terms.assign(n_terms, 0);
    token_loss.assign(n, 0);
    gradient.assign(n * vocab, 0);
    lse.assign(n, 0);
    label_log_prob.assign(n, 0);
    entropy.assign(n, 0);
    std::vector<double> parts(n * vocab, 0);  // sizes of what the terms add up
    const std::vector<lossk::cuda::Pass> passes = lossk::cuda::passes_of(config_);
    std::map<double, Softmaxes> by_scale;
    for (const lossk::cuda::Pass& pass : passes) {
      for (const double scale : {pass.scale, pass.student_scale}) {
        if (by_scale.contains(scale)) continue;
        const int squarings = scale == pass.scale ? lossk::cuda::squarings_of(pass) : 0;
        by_scale.emplace(scale, softmaxes_at(scale, squarings));
      }
    }
    for (int64_t r = 0; r < n; ++r) {
      const Softmaxes& own = by_scale[config_.options.logits_scale];
      lse[r] = own.rows[r].d_lse;
      entropy[r] = own.rows[r].entropy_error();
      label_log_prob[r] = own.d_lp[r];
    }
    for (size_t t = 0; t < n_terms; ++t) {
      const lossk::LossTerm& term = config_.terms[t];
      const bool distills = term.kind == LossKind::kDistillation;
      const double scale = config_.options.logits_scale * term.logits_scale /
                           (distills ? term.student_temperature : 1);
      const auto& [rows, d_lp] = by_scale.at(scale);
      double divisor = 0;  // of the scalar: recovered from a row's gradient gain below
      divisor = divisor_of(term);
      for (int64_t r = 0; r < n; ++r) {
        if (!counts(term, r)) continue;
        const TermError error = error_of(term, r, rows[r], d_lp);
        terms[t] +=
            divisor > 0 ? (error.loss + kUnit * std::abs(expected.token_loss[r])) / divisor : 0;
        token_loss[r] += std::abs(term.weight) * error.loss;
        if (term.weight == 0 || divisor == 0) continue;
        const double upstream = in_.upstream_rows.empty() ? 1 : in_.upstream_rows[r];
        const double gain = std::abs(in_.upstream * upstream * term.weight * scale / divisor);
        for (int64_t j = 0; j < vocab; ++j) {
          gradient[r * vocab + j] += gain * error.gradient[j] * cap_slope(r, j);
          parts[r * vocab + j] += std::abs(in_.upstream * upstream * term.weight *
                                           expected.term_d_logits[t][r * vocab + j]);
        }
      }
      terms[t] += 1e-12 * std::abs(expected.terms[t]);
    }
    for (int64_t r = 0; r < n; ++r) {
      token_loss[r] += 2 * kUnit * std::abs(expected.token_loss[r]);
      for (int64_t j = 0; j < vocab; ++j) {
        const double g = expected.d_logits[r * vocab + j];
        double& bound = gradient[r * vocab + j];
        if (cap() > 0) bound += std::abs(g) * 32 * kUnit / std::max(cap_slope(r, j), 1e-6);
        bound += 4 * kUnit * (std::abs(g) + std::abs(before));
        bound = 1.02 * bound + storage_rounding(std::abs(g + before) + bound);
        // Every pass but the last leaves some of the terms' parts there.
        bound += static_cast<double>(lossk::cuda::n_gradients(passes) - 1) *
                 storage_rounding(parts[r * vocab + j] + std::abs(before) + bound);
      }
    }
  }

  std::vector<double> terms, token_loss, gradient, lse, label_log_prob, entropy;

 private:
  // Every row's softmax of logits at a scale, and the error of its label's ln q.
  struct Softmaxes {
    std::vector<SoftmaxError> rows;
    std::vector<double> d_lp;
  };
  Softmaxes softmaxes_at(double scale, int squarings) const {
    const auto [n, d_model, vocab] = in_.shape;
    Softmaxes at;
    at.d_lp.assign(n, 0);
    for (int64_t r = 0; r < n; ++r) {
      std::vector<double> x(in_.logits.begin() + r * vocab, in_.logits.begin() + (r + 1) * vocab);
      if (cap() > 0) {
        for (double& value : x) value = cap() * std::tanh(value / cap());
      }
      const SoftmaxError& row = at.rows.emplace_back(x.data(), vocab, scale, cap() > 0, squarings);
      if (!has_label(r)) continue;
      const int64_t y = label(r);
      at.d_lp[r] =
          1.02 * (row.d_log_sum + kLn2 * row.d_u[y] + 4 * kUnit * std::abs(kLn2 * row.u[y]) +
                  2 * kUnit * std::abs(row.log_q[y]));
    }
    return at;
  }

  double cap() const { return config_.options.softcap; }
  bool has_label(int64_t r) const { return !in_.labels.empty() && in_.labels[r] >= 0; }
  int64_t label(int64_t r) const { return in_.labels[r] - config_.options.vocab_offset; }
  double cap_slope(int64_t r, int64_t j) const {
    if (cap() == 0) return 1;
    const double t = std::tanh(in_.logits[r * in_.shape.vocab + j] / cap());
    return 1 - t * t;
  }
  bool counts(const lossk::LossTerm& term, int64_t r) const {
    switch (lossk::resolved_mask(term, !in_.labels.empty(), !in_.mask.empty())) {
      case lossk::RowMask::kLabels:
        return has_label(r);
      case lossk::RowMask::kOwn:
        return in_.mask[r] != 0;
      default:
        return true;
    }
  }
  double class_weight(int64_t j) const {
    return in_.class_weights.empty() ? 1 : in_.class_weights[j];
  }
  double segment_tokens(int64_t segment) const {
    double n = 0;
    for (int64_t r = 0; r < in_.shape.n_tok; ++r) n += has_label(r) && in_.segments[r] == segment;
    return n;
  }
  double divisor_of(const lossk::LossTerm& term) const {
    if (term.divisor) return *term.divisor;
    if (term.kind == LossKind::kDpo) return static_cast<double>(in_.pairs.size() / 2);
    if (lossk::divides_by_segments(term)) {
      const auto segments = static_cast<double>(in_.n_segments);
      return lossk::resolved_normalizer(term) == PolicyNormalizer::kMaxLength
                 ? segments * static_cast<double>(term.max_length)
                 : segments;
    }
    double sum = 0;
    for (int64_t r = 0; r < in_.shape.n_tok; ++r) {
      if (counts(term, r)) sum += term.kind == LossKind::kCrossEntropy ? class_weight(label(r)) : 1;
    }
    return sum;
  }
  double storage_rounding(double magnitude) const {
    if (dtype_ == DType::kBF16) return magnitude * 0x1p-8 + 0x1p-134;
    if (dtype_ == DType::kF16) return magnitude * 0x1p-11 + 0x1p-25;
    return magnitude * kUnit + 0x1p-149;
  }

  TermError error_of(const lossk::LossTerm& term, int64_t r, const SoftmaxError& row,
                     const std::vector<double>& d_lp) const {
    switch (term.kind) {
      case LossKind::kCrossEntropy:
        return cross_entropy(term, r, row, d_lp[r]);
      case LossKind::kZLoss:
        return z_loss(row);
      case LossKind::kDistillation:
        return distillation(term, r, row);
      default:
        return policy(term, r, row, d_lp);
    }
  }

  TermError cross_entropy(const lossk::LossTerm& term, int64_t r, const SoftmaxError& row,
                          double d_lp) const {
    const auto vocab = static_cast<int64_t>(row.q.size());
    const double token = in_.token_weights.empty() ? 1 : std::abs(in_.token_weights[r]);
    const double share = term.label_smoothing / static_cast<double>(vocab);
    const double hit = (1 - term.label_smoothing) * class_weight(label(r));
    double all_weights = 0, smooth = 0, d_smooth = 0;
    for (int64_t j = 0; j < vocab; ++j) {
      all_weights += class_weight(j);
      if (share == 0) continue;
      smooth += class_weight(j) * std::abs(kLn2 * row.u[j]);
      d_smooth += class_weight(j) * kLn2 * row.d_u[j];
    }
    const double target_sum = hit + share * all_weights;
    TermError error;
    error.loss =
        hit * d_lp +
        share *
            (all_weights * row.d_log_sum + d_smooth + (row.product_depth + 3) * kUnit * smooth) +
        8 * kUnit *
            (hit * std::abs(row.log_q[label(r)]) + share * (all_weights * row.log_sum + smooth));
    error.loss *= token;
    for (int64_t j = 0; j < vocab; ++j) {
      const double size =
          target_sum * row.q[j] + (j == label(r) ? hit : 0) + share * class_weight(j);
      error.gradient.push_back(token * (target_sum * row.d_q[j] + 10 * kUnit * size));
    }
    return error;
  }

  TermError z_loss(const SoftmaxError& row) const {
    TermError error;
    error.loss =
        2 * std::abs(row.lse) * row.d_lse + row.d_lse * row.d_lse + 4 * kUnit * row.lse * row.lse;
    for (size_t j = 0; j < row.q.size(); ++j) {
      error.gradient.push_back(2 * std::abs(row.lse) * (row.d_q[j] + 8 * kUnit * row.q[j]) +
                               2 * row.d_lse * (row.q[j] + row.d_q[j]));
    }
    return error;
  }

  TermError policy(const lossk::LossTerm& term, int64_t r, const SoftmaxError& row,
                   const std::vector<double>& d_lp) const {
    const double lp = row.log_q[label(r)];
    double d = d_lp[r] + 2 * kUnit * std::abs(lp), gain = 0, extra = 0;
    const double old = in_.old_log_probs.empty() ? 0 : in_.old_log_probs[r];
    const double advantage = in_.advantages.empty() ? 0 : std::abs(in_.advantages[r]);
    double log_ratio = lp - old, size = advantage;
    if (term.kind == LossKind::kGspo || term.kind == LossKind::kDpo) {
      // Sequences: every row of the segment may be off by the most that any row is.
      for (const double other : d_lp) d = std::max(d, other);
      size = 0;
      for (const double other : in_.advantages) size = std::max(size, std::abs(other));
      log_ratio = largest_mean_log_ratio_;
    }
    d += kUnit * (std::abs(lp) + std::abs(old));
    const double ratio = std::exp(std::min(log_ratio, 80.0));
    TermError error;
    if (term.kind == LossKind::kDpo) {
      const double margin = 2 * static_cast<double>(in_.shape.n_tok) * d;
      gain = term.beta;
      error.slope = term.beta * term.beta * margin + 8 * kUnit * term.beta;
      error.slope *= static_cast<double>(in_.pairs.size());
      gain *= static_cast<double>(in_.pairs.size());
      error.loss = term.beta * margin;
    } else {
      gain = ratio * size * (1 + (term.kind == LossKind::kCispo ? std::abs(lp) : 0));
      error.slope = ratio * size * (d + 12 * kUnit);
      error.loss = gain * (2 * d + 12 * kUnit);
      if (term.kl_beta > 0) {
        const double diff = in_.reference_log_probs[r] - lp, grown = std::exp(diff);
        const double d_diff = d + kUnit * (std::abs(in_.reference_log_probs[r]) + std::abs(lp));
        extra = term.kl_beta * (grown + 1);
        error.slope += term.kl_beta * (grown * d_diff + 8 * kUnit * (grown + 1));
        error.loss +=
            term.kl_beta * ((grown + 1) * d_diff + 8 * kUnit * (grown + std::abs(diff) + 1));
      }
    }
    const double slope = gain + extra;
    for (size_t j = 0; j < row.q.size(); ++j) {
      const double mass = row.q[j] + (static_cast<int64_t>(j) == label(r) ? 1 : 0);
      error.gradient.push_back(slope * row.d_q[j] + (error.slope + 10 * kUnit * slope) * mass);
    }
    return error;
  }

  // A bin's ln p and ln q with their errors, what it brings to the loss and h = d loss / d ln q.
  struct Bin {
    double log_p = 0, d_log_p = 0, log_q = 0, d_log_q = 0;
    double loss = 0, d_loss = 0, h = 0, d_h = 0;  // sizes, not signs
  };
  // expf and logf are off by 2 roundings each, products and sums by one; h and the loss are
  // products of at most p, q and a logarithm of their ratio, or of either to the mixture.
  static void bound_bin(const lossk::LossTerm& term, Bin& bin) {
    const double p = std::exp(bin.log_p), q = std::exp(bin.log_q);
    const double d_p = p * (bin.d_log_p + 4 * kUnit), d_q = q * (bin.d_log_q + 4 * kUnit);
    const double d_logs = bin.d_log_p + bin.d_log_q;
    const auto size = [](double x) { return std::isfinite(x) ? std::abs(x) : 0; };
    const double ratio = size(bin.log_p - bin.log_q);
    switch (term.divergence) {
      case Divergence::kCrossEntropy:
        bin.loss = p * size(bin.log_q), bin.h = p, bin.d_h = d_p;
        bin.d_loss = d_p * size(bin.log_q) + p * bin.d_log_q + 4 * kUnit * bin.loss;
        break;
      case Divergence::kForwardKl:
        bin.loss = p * ratio, bin.h = p, bin.d_h = d_p;
        bin.d_loss = d_p * ratio + p * (d_logs + 2 * kUnit * ratio) + 4 * kUnit * bin.loss;
        break;
      case Divergence::kReverseKl:
        bin.loss = q * ratio, bin.h = q * (ratio + 1);
        bin.d_loss = d_q * ratio + q * (d_logs + 2 * kUnit * ratio) + 4 * kUnit * bin.loss;
        bin.d_h = bin.d_loss + d_q + 4 * kUnit * bin.h;
        break;
      default: {
        // Logarithms to the mixture move less than the ratio does, but for m's own roundings.
        const double mixed = std::log1p(1 / term.beta) + std::log1p(1 / (1 - term.beta)) + ratio;
        const double d_mixed = d_logs + 12 * kUnit * (1 + mixed) + 8 * kUnit;
        bin.h = q * mixed, bin.d_h = d_q * mixed + q * d_mixed;
        bin.loss = bin.h + p * mixed, bin.d_loss = bin.d_h + d_p * mixed + p * d_mixed;
      }
    }
  }

  TermError top_k(const lossk::LossTerm& term, int64_t r, const SoftmaxError& row,
                  int64_t k) const {
    const auto vocab = static_cast<int64_t>(row.q.size());
    const reference::HeadTeacher& teacher = in_.teachers[term.teacher];
    const double factor = term.t_squared ? term.temperature * term.temperature : 1;
    const double adds = std::ceil(static_cast<double>(k) / 32) + 6;  // in a lane, then in the warp
    std::vector<Bin> bins;
    std::vector<bool> in_k(vocab, false);
    for (int64_t b = 0; b < k; ++b) {
      const int64_t id = teacher.ids[r * k + b];
      in_k[id] = true;
      bins.push_back({.log_p = teacher.log_probs[r * k + b],
                      .log_q = row.log_q[id],
                      .d_log_q = row.d_log_q(id) + 2 * kUnit * std::abs(row.log_q[id])});
    }
    const bool renormalized = term.top_k_tail == lossk::TopKTail::kRenormalized;
    if (renormalized) {
      double p_sum = 0, q_sum = 0, d_q = 0;
      for (const Bin& bin : bins) {
        p_sum += std::exp(bin.log_p), q_sum += std::exp(bin.log_q);
        d_q = std::max(d_q, bin.d_log_q);
      }
      const double own = (adds + 12) * kUnit;
      for (Bin& bin : bins) {
        bin.log_p -= std::log(p_sum), bin.log_q -= std::log(q_sum);
        bin.d_log_p = own + 6 * kUnit * (std::abs(std::log(p_sum)) + std::abs(bin.log_p));
        bin.d_log_q += d_q + own + 6 * kUnit * (std::abs(std::log(q_sum)) + std::abs(bin.log_q));
      }
    }
    double ratio = 0, d_ratio = 0;
    const bool others = term.top_k_tail == lossk::TopKTail::kTailBin && k < vocab;
    if (others) {
      // A thread rescales at most once for each of its vectors, then the warp and the block do.
      const double steps = std::ceil(static_cast<double>(vocab) / 2048) + 2;
      double p = 1, q = 0, d_q = 0, d_p = 0;
      for (const Bin& bin : bins) {
        p -= std::exp(bin.log_p);
        d_p += std::exp(bin.log_p) * (adds + 6) * kUnit;
      }
      for (int64_t j = 0; j < vocab; ++j) {
        if (in_k[j]) continue;
        q += row.q[j];
        d_q += row.q[j] * (kLn2 * row.d_u[j] + (steps + 1) * kExp2 + (2 * steps + 14) * kUnit);
      }
      p = std::max(p, 0.0);
      Bin bin = {.log_p = std::log(p), .log_q = std::log(q)};
      // What is left of 1 is as exact as 1 is.
      bin.d_log_p = p > 0 ? (d_p + 4 * kUnit) / p : 0;
      bin.d_log_q = q > 0 ? 1.02 * d_q / q + row.d_log_sum +
                                6 * kUnit *
                                    (std::abs(bin.log_q) + std::abs(row.log_sum) +
                                     kLn2 * std::abs(largest_u(row, in_k)))
                          : 0;
      bound_bin(term, bin);
      if (p == 0) bin.d_loss += (d_p + 4 * kUnit) * (1 + std::abs(bin.log_q) + 20);
      if (p == 0) bin.d_h += d_p + 4 * kUnit;
      if (q > 0) {
        ratio = bin.h / q;
        d_ratio = bin.d_h / q + ratio * (bin.d_log_q + 6 * kUnit);
      }
      bins.push_back(bin);
    }
    TermError error;
    double h_sum = 0, d_h_sum = 0, loss = 0;
    for (size_t b = 0; b < bins.size(); ++b) {
      if (!(others && b + 1 == bins.size())) bound_bin(term, bins[b]);
      h_sum += bins[b].h, d_h_sum += bins[b].d_h;
      loss += bins[b].loss, error.loss += bins[b].d_loss;
    }
    error.loss = 1.02 * factor * (error.loss + adds * kUnit * loss);
    d_h_sum += adds * kUnit * h_sum;
    if (renormalized) ratio = d_ratio = 0;
    for (int64_t j = 0; j < vocab; ++j) {
      const double size = renormalized ? 0 : ratio + h_sum;
      error.gradient.push_back(row.d_q[j] * size + row.q[j] * (d_ratio + d_h_sum) +
                               10 * kUnit * row.q[j] * size);
    }
    for (int64_t b = 0; b < k; ++b) {
      const double own_q = std::exp(bins[b].log_q), size = renormalized ? h_sum : ratio;
      const double d_size = renormalized ? d_h_sum : d_ratio;
      error.gradient[teacher.ids[r * k + b]] +=
          bins[b].d_h + own_q * ((bins[b].d_log_q + 6 * kUnit) * size + d_size) +
          10 * kUnit * (bins[b].h + own_q * size);
    }
    for (double& g : error.gradient) g *= 1.02 * factor;
    return error;
  }
  static double largest_u(const SoftmaxError& row, const std::vector<bool>& taken) {
    double largest = -1e4;
    for (size_t j = 0; j < row.u.size(); ++j) {
      if (!taken[j] && std::isfinite(row.u[j])) largest = std::max(largest, row.u[j]);
    }
    return largest;
  }

  TermError distillation(const lossk::LossTerm& term, int64_t r, const SoftmaxError& row) const {
    const auto vocab = static_cast<int64_t>(row.q.size());
    const lossk::Teacher& teacher = config_.teachers[term.teacher];
    if (teacher.kind == lossk::TeacherKind::kTopK) return top_k(term, r, row, teacher.k);
    const SoftmaxError t(in_.teachers[term.teacher].logits.data() + r * teacher.vocab, vocab,
                         config_.options.logits_scale * term.logits_scale / term.temperature,
                         false);
    const bool reverse = term.divergence == Divergence::kReverseKl;
    const bool mixture = term.divergence == Divergence::kJensenShannon;
    const bool cross = term.divergence == Divergence::kCrossEntropy;
    const double factor = term.t_squared ? term.temperature * term.temperature : 1;
    const SoftmaxError& weight = reverse ? row : t;  // whose probabilities weigh the logarithms
    TermError error;
    const double d_logs =
        row.d_log_sum + t.d_log_sum + 4 * kUnit * (std::abs(row.log_sum) + std::abs(t.log_sum));
    double mean = 0, d_mean = d_logs;
    std::vector<double> size(vocab, 0), d_size(vocab, 0);  // |log ratio| and its error
    for (int64_t j = 0; j < vocab; ++j) {
      const double w = cross ? row.log_q[j] : row.log_q[j] - t.log_q[j];
      const double shifted = cross ? kLn2 * row.u[j] : kLn2 * (row.u[j] - t.u[j]);
      if (mixture && std::isinf(w)) {
        // One of the two is 0 and m is a share of the other; the kernel's ratio is 2^120 or less.
        size[j] = -std::log(row.q[j] > 0 ? 1 - term.beta : term.beta);
        d_size[j] = kLn2 * (2 * kExp2 + (4 + 2 * 128) * kUnit) + kExp2 * size[j];
      }
      if (!std::isfinite(w) || !std::isfinite(shifted)) continue;
      size[j] = std::max(std::abs(w), std::abs(shifted));
      d_size[j] = row.d_log_q(j) + (cross ? 0 : t.d_log_q(j)) + 2 * kUnit * size[j];
      // log2 of the mixture over q: its slope in the log ratio is at most 1; ex2 and lg2 add 2^-22
      // each in base 2, the fused multiply-add a rounding.
      if (mixture) d_size[j] += kLn2 * (2 * kExp2 + 4 * kUnit) + kExp2 * size[j];
    }
    for (int64_t j = 0; j < vocab; ++j) {
      const double p = mixture ? t.q[j] + row.q[j] : weight.q[j];
      double d_p = mixture ? t.d_q[j] + row.d_q[j] : weight.d_q[j];
      // p is formed as q times the ratio, 2^ of a difference that is rounded, of 120 at most.
      if (mixture) {
        const double log_ratio = std::isfinite(row.log_q[j]) ? size[j] / kLn2 : 120;
        d_p += t.q[j] * (kExp2 + kLn2 * 3 * kUnit * log_ratio + 2 * kUnit);
      }
      mean += p * size[j];
      d_mean += d_p * size[j] + p * d_size[j] + (row.product_depth + 4) * kUnit * p * size[j];
    }
    error.loss = 1.02 * factor * d_mean;
    for (int64_t j = 0; j < vocab; ++j) {
      const double q = row.q[j], d_q = row.d_q[j];
      if (reverse || mixture) {
        error.gradient.push_back(1.02 * factor *
                                 (d_q * (size[j] + mean) + q * (d_size[j] + d_mean) +
                                  12 * kUnit * q * (size[j] + mean)));
      } else {
        error.gradient.push_back(factor * (d_q + t.d_q[j] + 10 * kUnit * (q + t.q[j])));
      }
    }
    return error;
  }

 public:
  // gspo: a bound of the mean log ratio of any segment.
  double largest_mean_log_ratio_ = 3;

 private:
  const lossk::HeadConfig& config_;
  const reference::HeadInputs& in_;
  DType dtype_;
};

}  // namespace ullage::test
