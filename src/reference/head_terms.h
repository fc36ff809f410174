// What each kind of term makes of the softcapped logits. Between these functions and head_losses.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/head_losses.h"

namespace ullage::reference {

// ln q of one row, and lse = ln sum_j exp(scale * x_j). Both are formed after the shift by the
// maximum m, so a large common offset costs no digits.
struct LogSoftmax {
  std::vector<double> log_q;  // [vocab]
  double lse = 0;
  double shift = 0, log_sum = 0;  // lse = scale * shift + log_sum, shift the largest x
};
LogSoftmax log_softmax(const double* logits, int64_t vocab, double scale);

// The student's: of a shard whose group's statistics are given, the columns it has of the group's.
LogSoftmax student_softmax(const HeadInputs& inputs, int64_t row, const double* logits,
                           double scale);

// -sum_j q_j ln q_j; of a shard in a group, the group's.
double row_entropy(const HeadInputs& inputs, int64_t row, const LogSoftmax& softmax);

// ln q of the row's label, at column `label`: -inf where it is another shard's.
double label_log_prob(const HeadInputs& inputs, int64_t row, int64_t label,
                      const LogSoftmax& softmax);

struct TermContext {
  const lossk::LossTerm& term;
  const lossk::HeadOptions& options;
  const HeadInputs& inputs;
  const double* logits;          // [n_tok][vocab], softcapped, not scaled
  const double* teacher_logits;  // [n_tok][teacher vocab], kLogits and kHidden
  const lossk::Teacher* teacher;

  int64_t n_tok() const { return inputs.shape.n_tok; }
  int64_t vocab() const { return inputs.shape.vocab; }
  double scale() const { return options.logits_scale * term.logits_scale; }
  bool counts(int64_t row) const;
  int64_t label(int64_t row) const { return inputs.labels[row] - options.vocab_offset; }
  LogSoftmax softmax(int64_t row) const {
    return student_softmax(inputs, row, logits + row * vocab(), scale());
  }
  double log_prob(int64_t row, const LogSoftmax& softmax) const {
    return label_log_prob(inputs, row, label(row), softmax);
  }
};

struct TermResult {
  std::vector<double> row_loss;  // [n_tok]
  double sum = 0;                // of the rows; dpo: of the pairs
  double default_divisor = 0;
  std::vector<double> d_logits;  // [n_tok][vocab], of `sum`, with respect to scale * logits
  lossk::PolicyMetrics metrics;  // grpo, gspo
};

TermResult cross_entropy_term(const TermContext& context);
TermResult z_loss_term(const TermContext& context);
TermResult distillation_term(const TermContext& context);
TermResult policy_term(const TermContext& context);      // grpo, gspo, cispo
TermResult preference_term(const TermContext& context);  // dpo

}  // namespace ullage::reference
