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
};
LogSoftmax log_softmax(const double* logits, int64_t vocab, double scale);

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
