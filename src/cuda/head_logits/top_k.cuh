// A teacher's k likeliest ids: a gather before the rows, a loss and one coefficient while their
// terms are evaluated, and a patch of the k columns after. Sources: reference/head_distillation.cc.
//
// With bins b, the k ids and perhaps the others, and h_b = d loss / d ln q_b,
//   d loss / d z_j = q_j (ratio - sum h) + [j = id b] (h_b - q_j ratio),  ratio = h_others /
//   q_others
// where there is a bin of the others, 0 where there is none. So the row's kernel adds one
// coefficient to every column, and the k columns are written once more, whole.
#pragma once

#include "cuda/head_logits/row_gradient.cuh"

namespace ullage::lossk::cuda {

// What a row's loss of one top-k term comes to; the same in every lane.
struct TopKLoss {
  float loss = 0;
  float dense = 0;  // ratio - sum h: what every column's q is multiplied by
  float h_sum = 0, ratio = 0;
  float teacher_mass = 0, student_mass = 0;  // logarithms; kRenormalized, else 0
};

__device__ inline const float* top_k_logits_of(const HeadParams& p, int64_t row) {
  return p.top_k_logits + row * p.top_k;
}
__device__ inline int64_t top_k_id(const HeadParams& p, int64_t row, int b) {
  return index_at(p.top_k_ids, row * p.top_k + b);
}
__device__ inline float top_k_log_p(const HeadParams& p, int64_t row, int b) {
  return float_at(p.top_k_log_probs, row * p.top_k + b, 0);
}
// Of a stored logit.
__device__ inline float log_q_of(const HeadParams& p, const RowSums& sums, float stored) {
  const float x = p.softcap > 0 ? softcapped(p, stored) : stored;
  return kLn2 * (fmaf(x, p.log2_scale, -sums.reference) - sums.log2_sum);
}

// One bin's part of the loss, and its h. `normalized`: the bins of either side add up to 1.
struct BinLoss {
  float loss = 0, h = 0;
};
__device__ inline BinLoss bin_loss(const TermParams& term, bool normalized, float log_p,
                                   float log_q) {
  const float p = expf(log_p), q = expf(log_q);
  BinLoss bin;
  switch (term.divergence) {
    case Divergence::kCrossEntropy:
      if (p > 0) bin.loss = -p * log_q;
      bin.h = -p;
      break;
    case Divergence::kForwardKl:
      if (p > 0) bin.loss = p * (log_p - log_q);
      bin.h = -p;
      break;
    case Divergence::kReverseKl:
      if (q > 0) {
        bin.loss = q * (log_q - log_p);
        bin.h = q * (log_q - log_p + (normalized ? 0.0f : 1.0f));
      }
      break;
    default: {
      // m = q + beta (p - q) is q exactly where p = q.
      const float m = fmaf(term.beta, p - q, q);
      if (m > 0) {
        if (p > 0) bin.loss = term.beta * p * logf(p / m);
        if (q > 0) bin.h = (1.0f - term.beta) * q * logf(q / m);
        bin.loss += bin.h;
      }
    }
  }
  return bin;
}

__device__ inline bool has_others(const HeadParams& p, const TermParams& term) {
  return term.tail == TopKTail::kTailBin && p.top_k < p.vocab;
}

// By a warp.
__device__ inline TopKLoss top_k_loss(const HeadParams& p, const TermParams& term, int64_t row,
                                      const RowSums& sums, int lane) {
  const float* const logits = top_k_logits_of(p, row);
  TopKLoss total;
  if (term.tail == TopKTail::kRenormalized) {
    // ln sum exp of both sides over the k.
    float p_max = minus_infinity<float>(), q_max = p_max;
    for (int b = lane; b < p.top_k; b += 32) {
      p_max = fmaxf(p_max, top_k_log_p(p, row, b));
      q_max = fmaxf(q_max, log_q_of(p, sums, logits[b]));
    }
    p_max = warp_max(p_max), q_max = warp_max(q_max);
    float p_sum = 0, q_sum = 0;
    for (int b = lane; b < p.top_k; b += 32) {
      p_sum += expf(top_k_log_p(p, row, b) - p_max);
      q_sum += expf(log_q_of(p, sums, logits[b]) - q_max);
    }
    total.teacher_mass = p_max + logf(warp_sum(p_sum));
    total.student_mass = q_max + logf(warp_sum(q_sum));
  }
  const bool normalized = term.tail != TopKTail::kTruncated;
  float loss = 0, h_sum = 0, p_sum = 0;
  for (int b = lane; b < p.top_k; b += 32) {
    const float log_p = top_k_log_p(p, row, b) - total.teacher_mass;
    const BinLoss bin =
        bin_loss(term, normalized, log_p, log_q_of(p, sums, logits[b]) - total.student_mass);
    loss += bin.loss;
    h_sum += bin.h;
    p_sum += expf(log_p);
  }
  total.loss = warp_sum(loss);
  total.h_sum = warp_sum(h_sum);
  if (has_others(p, term)) {
    const float log_p = logf(fmaxf(1.0f - warp_sum(p_sum), 0.0f));
    const float* const others = p.top_k_others + row * 2;
    const float log_q = kLn2 * ((others[0] - sums.reference) + (others[1] - sums.log2_sum));
    const BinLoss bin = bin_loss(term, normalized, log_p, log_q);
    total.loss += bin.loss;
    total.h_sum += bin.h;
    const float q = expf(log_q);
    total.ratio = q > 0 ? bin.h / q : 0.0f;
  }
  // The sums are known where the bins add up to 1; reverse KL's h drops a 1 that they cancel.
  if (normalized && term.divergence == Divergence::kReverseKl) total.h_sum = total.loss;
  if (normalized &&
      (term.divergence == Divergence::kCrossEntropy || term.divergence == Divergence::kForwardKl)) {
    total.h_sum = -1;
  }
  if (term.tail != TopKTail::kRenormalized) total.dense = total.ratio - total.h_sum;
  return total;
}

// What column id_b's gradient has beside q (dense).
__device__ inline float top_k_delta(const HeadParams& p, const TermParams& term,
                                    const TopKLoss& total, float log_p, float log_q) {
  const bool renormalized = term.tail == TopKTail::kRenormalized;
  const float own_q = log_q - total.student_mass;
  const BinLoss bin =
      bin_loss(term, term.tail != TopKTail::kTruncated, log_p - total.teacher_mass, own_q);
  return bin.h - expf(own_q) * (renormalized ? total.h_sum : total.ratio);
}

}  // namespace ullage::lossk::cuda
