// Distillation from the k most likely ids of a teacher: bins of mass (p_i, q_i), i over the k ids
// and, with a tail bin, one more for everything else. With h_i = d loss / d ln q_i,
//   d loss / d a_j = [j a bin] h_j + [j in the tail] h_tail q_j / q_tail - q_j sum_i h_i.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ullage/lossk/terms.h"

namespace ullage::lossk {

// Of one bin: its share of the loss, and h.
struct DivergenceBin {
  double loss;
  double slope;
};

// Where the q of all bins sum to 1, reverse KL's h may drop the + 1 of d (q ln q): they cancel.
inline DivergenceBin divergence_bin(Divergence kind, double beta, double log_p, double log_q,
                                    bool normalized) {
  const double p = std::exp(log_p), q = std::exp(log_q);
  switch (kind) {
    case Divergence::kCrossEntropy:
      return {p == 0 ? 0 : -p * log_q, -p};
    case Divergence::kForwardKl:
      return {p == 0 ? 0 : p * (log_p - log_q), -p};
    case Divergence::kReverseKl:
      if (q == 0) return {0, 0};
      return {q * (log_q - log_p), q * (log_q - log_p + (normalized ? 0 : 1))};
    case Divergence::kJensenShannon:
      break;
  }
  const double m = q + beta * (p - q);
  const double p_part = p == 0 ? 0 : p * std::log(p / m);
  const double q_part = q == 0 ? 0 : (1 - beta) * q * std::log(q / m);
  return {beta * p_part + q_part, q_part};
}

// One row. log_p(i) and log_q(i) for i in [0, k): the log-probabilities of the ids under each
// side's full softmax; log_q_tail: of all other columns together.
template <class LogP, class LogQ>
class TopKRow {
 public:
  TopKRow(const LossTerm& term, int64_t k, bool is_whole_vocab, LogP log_p, LogQ log_q,
          double log_q_tail)
      : term_(term), log_p_(log_p), log_q_(log_q), log_q_tail_(log_q_tail) {
    renormalized_ = term.top_k_tail == TopKTail::kRenormalized;
    normalized_ = term.top_k_tail != TopKTail::kTruncated;
    double p_sum = 0, q_sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      p_sum += std::exp(log_p(i));
      q_sum += std::exp(log_q(i));
    }
    if (renormalized_) {
      p_shift_ = std::log(p_sum);
      q_shift_ = std::log(q_sum);
    }
    for (int64_t i = 0; i < k; ++i) add(bin(i));
    if (term.top_k_tail == TopKTail::kTailBin && !is_whole_vocab) {
      const DivergenceBin tail = divergence_bin(
          term.divergence, term.beta, std::log(std::max(1 - p_sum, 0.0)), log_q_tail, true);
      add(tail);
      tail_slope_ = tail.slope;
    }
    // Sums that are known are not left to rounding: equal distributions then have gradient 0.
    if (!normalized_ || term.divergence == Divergence::kJensenShannon) return;
    slope_sum_ = term.divergence == Divergence::kReverseKl ? loss_ : -1;
  }

  double loss() const { return loss_; }

  // d loss / d a_j = dense() * q_j + (at id i) sparse(i).
  double dense() const { return renormalized_ ? 0 : tail_gain() - slope_sum_; }
  double sparse(int64_t i) const {
    if (renormalized_) return bin(i).slope - std::exp(log_q_(i) - q_shift_) * slope_sum_;
    return bin(i).slope - std::exp(log_q_(i)) * tail_gain();
  }

 private:
  void add(const DivergenceBin& b) {
    loss_ += b.loss;
    slope_sum_ += b.slope;
  }
  DivergenceBin bin(int64_t i) const {
    return divergence_bin(term_.divergence, term_.beta, log_p_(i) - p_shift_, log_q_(i) - q_shift_,
                          normalized_);
  }
  // h_tail / q_tail.
  double tail_gain() const { return tail_slope_ == 0 ? 0 : tail_slope_ * std::exp(-log_q_tail_); }

  const LossTerm& term_;
  LogP log_p_;
  LogQ log_q_;
  double log_q_tail_;
  bool renormalized_, normalized_;
  double p_shift_ = 0, q_shift_ = 0;  // ln of the mass on the k ids, where renormalised
  double loss_ = 0;
  double slope_sum_ = 0;   // sum_i h_i
  double tail_slope_ = 0;  // h of the tail
};

}  // namespace ullage::lossk
