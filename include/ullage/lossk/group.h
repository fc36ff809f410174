// One head whose vocabulary is cut over the ranks of a group: each holds some rows of the weight
// (or columns of the logits), all hold the same hidden rows and labels. A shard is a head whose
// HeadOptions::group_vocab is the vocabulary of all and whose vocab_offset is its own first column;
// shards may differ in size, and a batch may leave one without a label.
//
//   1. Each rank runs its shard without gradients for its statistics: the outputs shift, log_sum
//      and label_log_prob; distance where a term smooths its labels; entropy where entropies or
//      policy metrics are wanted.
//   2. The ranks exchange these numbers of each row, and each combines them, in rank order.
//   3. Each rank runs its shard again with the combination as Inputs::group_*.
//
// A row of the group's softmax is the shard's times e^(lse of the shard - lse of the group), and
// its losses are functions of the group's statistics alone. So the losses are the same bits on
// every rank; d_logits, d_weight, d_bias and d_adapter_b are the shard's own rows and columns;
// d_hidden and d_adapter_a are the shard's part of a sum over the ranks.
//
// What a shard does not take (661): distillation, class weights, terms with a logits_scale of their
// own, argmax and correct.
#pragma once

#include <cmath>
#include <limits>
#include <span>

namespace ullage::lossk {

// Of one row; the outputs of the same names.
struct RowStatistics {
  double shift = 0, log_sum = 0, label_log_prob = 0;
  double distance = 0, columns = 0;  // for smoothed labels; columns: how many the shard has
  double entropy = 0;
};

// With s = logits_scale, M = max_r shift_r and t_r = s (shift_r - M) + log_sum_r over the ranks r:
//   shift = M,  log_sum = ln sum_r e^(t_r)
//   label_log_prob = max_r (label_log_prob_r + t_r - log_sum), for all but one rank say -inf
//   distance = sum_r (distance_r + columns_r s (shift_r - M))
//   entropy = sum_r w_r (entropy_r - ln w_r), w_r = e^(t_r - log_sum) the shard's share
// The same bits wherever the same float64 functions are; NaN of one shard is NaN of the group.
inline RowStatistics combined(std::span<const RowStatistics> shards, double logits_scale) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  const auto larger = [](double a, double b) { return b > a || std::isnan(b) ? b : a; };
  RowStatistics group{kNone, 0, kNone, 0, 0, 0};
  for (const RowStatistics& shard : shards) group.shift = larger(group.shift, shard.shift);
  const auto exponent = [&](const RowStatistics& shard) {
    return logits_scale * (shard.shift - group.shift) + shard.log_sum;
  };
  double sum = 0;
  for (const RowStatistics& shard : shards) sum += std::exp(exponent(shard));
  group.log_sum = std::log(sum);
  for (const RowStatistics& shard : shards) {
    const double log_share = exponent(shard) - group.log_sum, share = std::exp(log_share);
    group.label_log_prob = larger(group.label_log_prob, shard.label_log_prob + log_share);
    group.distance += shard.distance + shard.columns * logits_scale * (shard.shift - group.shift);
    group.columns += shard.columns;
    if (share != 0) group.entropy += share * (shard.entropy - log_share);
  }
  return group;
}

}  // namespace ullage::lossk
