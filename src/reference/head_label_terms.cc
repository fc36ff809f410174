// Cross-entropy from labels and z-loss.
#include <cmath>

#include "reference/head_terms.h"

namespace ullage::reference {
namespace {

// The same of a shard: the sum over the columns of all ranks is their group's,
//   sum_j ln q_j = distance - V log_sum
void cross_entropy_of_shard(const TermContext& context, int64_t row, double token_weight,
                            TermResult& result) {
  const HeadInputs& inputs = context.inputs;
  const auto vocab = static_cast<double>(context.options.group_vocab);
  const double even = context.term.label_smoothing / vocab, hit = 1 - context.term.label_smoothing;
  const LogSoftmax softmax = context.softmax(row);
  double loss = -hit * context.log_prob(row, softmax);
  if (even > 0 && !inputs.group_distance.empty()) {
    loss += even * (vocab * softmax.log_sum - inputs.group_distance[row]);
  }
  for (int64_t j = 0; j < context.vocab(); ++j) {
    result.d_logits[row * context.vocab() + j] =
        token_weight * (std::exp(softmax.log_q[j]) - even - (j == context.label(row) ? hit : 0));
  }
  result.row_loss[row] = token_weight * loss;
  result.sum += token_weight * loss;
  result.default_divisor += 1;
}

}  // namespace

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
    if (context.options.group_vocab > 0) {
      cross_entropy_of_shard(context, row, token_weight, result);
      continue;
    }
    const LogSoftmax softmax = context.softmax(row);
    std::vector<double> target(vocab);
    double target_sum = 0, loss = 0;
    for (int64_t j = 0; j < vocab; ++j) {
      const double share =
          (j == label ? 1 - smoothing : 0) + smoothing / static_cast<double>(vocab);
      target[j] = class_weight(j) * share;
      target_sum += target[j];
      if (target[j] != 0) loss -= target[j] * softmax.log_q[j];
    }
    for (int64_t j = 0; j < vocab; ++j) {
      result.d_logits[row * vocab + j] =
          token_weight * (std::exp(softmax.log_q[j]) * target_sum - target[j]);
    }
    result.row_loss[row] = token_weight * loss;
    result.sum += token_weight * loss;
    result.default_divisor += class_weight(label);
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
