// Cross-entropy from labels and z-loss.
#include <cmath>

#include "reference/head_terms.h"

namespace ullage::reference {
// PyTorch's cross_entropy: the target is (1 - e) of the label and e / V of every class, and class c
// counts c_c times:
//   loss = w sum_j t_j (-ln q_j),  t_j = c_j ((1 - e) [j = y] + e / V)
//   d a_j = w (q_j sum_i t_i - t_j)
TermResult cross_entropy_term(const TermContext& context) {
  const int64_t vocab = context.vocab();
  const HeadInputs& inputs = context.inputs;
  const double smoothing = context.term.label_smoothing;
  TermResult result;
  result.row_loss.assign(context.n_tok(), 0);
  result.d_logits.assign(context.n_tok() * vocab, 0);
  const auto class_weight = [&](int64_t j) {
    return inputs.class_weights.empty() ? 1.0 : inputs.class_weights[j];
  };
  for (int64_t row = 0; row < context.n_tok(); ++row) {
    if (!context.counts(row)) continue;
    const int64_t label = context.label(row);
    const double token_weight = inputs.token_weights.empty() ? 1 : inputs.token_weights[row];
    const LogSoftmax softmax = context.softmax(row);
    std::vector<double> target(vocab);
    double target_sum = 0, loss = 0;
    const auto add = [&](double share, double log_q) {
      target_sum += share;
      if (share != 0) loss -= share * log_q;
    };
    for (int64_t j = 0; j < vocab; ++j) {
      const double share =
          (j == label ? 1 - smoothing : 0) + smoothing / static_cast<double>(vocab);
      target[j] = class_weight(j) * share;
      add(target[j], softmax.log_q[j]);
    }
    // Another shard's label; shards have neither smoothing nor class weights.
    if (label < 0 || label >= vocab) add(1, context.log_prob(row, softmax));
    for (int64_t j = 0; j < vocab; ++j) {
      result.d_logits[row * vocab + j] =
          token_weight * (std::exp(softmax.log_q[j]) * target_sum - target[j]);
    }
    result.row_loss[row] = token_weight * loss;
    result.sum += token_weight * loss;
    result.default_divisor += label < 0 || label >= vocab ? 1 : class_weight(label);
  }
  return result;
}

// loss = lse^2,  d a_j = 2 lse q_j
TermResult z_loss_term(const TermContext& context) {
  const int64_t vocab = context.vocab();
  TermResult result;
  result.row_loss.assign(context.n_tok(), 0);
  result.d_logits.assign(context.n_tok() * vocab, 0);
  for (int64_t row = 0; row < context.n_tok(); ++row) {
    if (!context.counts(row)) continue;
    const LogSoftmax softmax = context.softmax(row);
    for (int64_t j = 0; j < vocab; ++j) {
      result.d_logits[row * vocab + j] = 2 * softmax.lse * std::exp(softmax.log_q[j]);
    }
    result.row_loss[row] = softmax.lse * softmax.lse;
    result.sum += softmax.lse * softmax.lse;
    result.default_divisor += 1;
  }
  return result;
}

}  // namespace ullage::reference
