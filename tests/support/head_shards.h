// A head's vocabulary cut into shards (ullage/lossk/group.h): inputs of each, and what they make
// together.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "reference/head_losses.h"
#include "ullage/lossk/group.h"

namespace ullage::test {

// Columns [first, first + count) of a matrix [rows][cols].
inline std::vector<double> columns_of(const std::vector<double>& matrix, int64_t cols,
                                      int64_t first, int64_t count) {
  std::vector<double> part;
  for (size_t at = 0; at < matrix.size(); at += static_cast<size_t>(cols)) {
    const auto begin = matrix.begin() + static_cast<int64_t>(at) + first;
    part.insert(part.end(), begin, begin + count);
  }
  return part;
}

struct Shard {
  lossk::HeadConfig config;
  reference::HeadInputs inputs;
  int64_t first = 0;
};

// Shards of so many columns each.
inline std::vector<Shard> shards_of(const lossk::HeadConfig& config,
                                    const reference::HeadInputs& whole,
                                    const std::vector<int64_t>& sizes) {
  const auto [n_tok, d_model, vocab] = whole.shape;
  std::vector<Shard> shards;
  int64_t first = 0;
  for (const int64_t size : sizes) {
    Shard shard{config, whole, first};
    shard.config.options.vocab_offset = config.options.vocab_offset + first;
    shard.config.options.group_vocab = config.options.vocab_offset + vocab;
    reference::HeadInputs& in = shard.inputs;
    in.shape.vocab = size;
    in.logits = columns_of(whole.logits, vocab, first, size);
    // Rows of a matrix [vocab][cols] are columns of one [1][vocab * cols].
    const auto rows = [&](std::vector<double>& matrix) {
      const auto cols = static_cast<int64_t>(matrix.size()) / vocab;
      if (cols > 0) matrix = columns_of(matrix, vocab * cols, first * cols, size * cols);
    };
    for (auto* matrix : {&in.weight, &in.bias, &in.adapter_b}) rows(*matrix);
    shards.push_back(std::move(shard));
    first += size;
  }
  EXPECT_EQ(first, vocab);
  return shards;
}

// Gives every shard the group's statistics, of the results that its shards had without them; as
// `exchange` rounds them.
template <class Round>
void join(std::vector<Shard>& shards, const std::vector<reference::HeadResult>& own,
          const Round& exchange) {
  const size_t n_tok = own[0].shift.size();
  for (size_t row = 0; row < n_tok; ++row) {
    std::vector<lossk::RowStatistics> of_row;
    for (size_t s = 0; s < own.size(); ++s) {
      const reference::HeadResult& result = own[s];
      of_row.push_back({exchange(result.shift[row]), exchange(result.log_sum[row]),
                        exchange(result.label_log_prob[row]), exchange(result.distance[row]),
                        static_cast<double>(shards[s].inputs.shape.vocab),
                        exchange(result.entropy.empty() ? 0 : result.entropy[row])});
    }
    const lossk::RowStatistics group =
        lossk::combined(of_row, shards[0].config.options.logits_scale);
    for (Shard& shard : shards) {
      shard.inputs.group_shift.push_back(exchange(group.shift));
      shard.inputs.group_log_sum.push_back(exchange(group.log_sum));
      shard.inputs.group_label_log_prob.push_back(exchange(group.label_log_prob));
      shard.inputs.group_distance.push_back(exchange(group.distance));
      shard.inputs.group_entropy.push_back(exchange(group.entropy));
    }
  }
}

// The whole head's result: the first shard's losses; columns and rows side by side; sums.
inline reference::HeadResult assembled(const std::vector<Shard>& shards,
                                       const std::vector<reference::HeadResult>& results,
                                       int64_t vocab) {
  reference::HeadResult whole = results[0];
  const auto n_tok = static_cast<int64_t>(whole.token_loss.size());
  whole.d_logits.assign(results[0].d_logits.empty() ? 0 : static_cast<size_t>(n_tok * vocab), 0);
  for (size_t s = 0; s < shards.size(); ++s) {
    const reference::HeadResult& part = results[s];
    const int64_t size = shards[s].inputs.shape.vocab;
    for (int64_t i = 0; i < n_tok && !part.d_logits.empty(); ++i) {
      std::copy_n(part.d_logits.begin() + i * size, size,
                  whole.d_logits.begin() + i * vocab + shards[s].first);
    }
    if (s == 0) continue;
    for (const auto rows : {&reference::HeadResult::d_weight, &reference::HeadResult::d_bias,
                            &reference::HeadResult::d_adapter_b}) {
      (whole.*rows).insert((whole.*rows).end(), (part.*rows).begin(), (part.*rows).end());
    }
    for (const auto sum : {&reference::HeadResult::d_hidden, &reference::HeadResult::d_adapter_a}) {
      for (size_t i = 0; i < (whole.*sum).size(); ++i) (whole.*sum)[i] += (part.*sum)[i];
    }
  }
  return whole;
}

}  // namespace ullage::test
