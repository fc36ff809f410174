#include "reference/head_losses.h"

#include <algorithm>
#include <cmath>

#include "reference/head_terms.h"

namespace ullage::reference {
namespace {

using lossk::HeadConfig;
using lossk::LossKind;
using lossk::LossTerm;
using lossk::RowMask;

bool has_label(const HeadInputs& inputs, int64_t row) {
  return inputs.labels.empty() || inputs.labels[row] >= 0;
}

TermResult compute_term(const TermContext& context) {
  switch (context.term.kind) {
    case LossKind::kCrossEntropy:
      return cross_entropy_term(context);
    case LossKind::kZLoss:
      return z_loss_term(context);
    case LossKind::kDistillation:
      return distillation_term(context);
    case LossKind::kGrpo:
    case LossKind::kGspo:
    case LossKind::kCispo:
      return policy_term(context);
    case LossKind::kDpo:
      return preference_term(context);
  }
  return {};
}

// x [rows][inner] times the transpose of w [cols][inner], for the rows that are read.
std::vector<double> product(const std::vector<double>& x, const std::vector<double>& w,
                            int64_t rows, int64_t cols, int64_t inner,
                            const std::vector<bool>& read) {
  std::vector<double> z(rows * cols, 0);
  for (int64_t i = 0; i < rows; ++i) {
    if (!read[i]) continue;
    for (int64_t j = 0; j < cols; ++j) {
      for (int64_t k = 0; k < inner; ++k) z[i * cols + j] += x[i * inner + k] * w[j * inner + k];
    }
  }
  return z;
}

// W + adapter_scale * B A, [vocab][d_model].
std::vector<double> adapted_weight(const HeadConfig& config, const HeadInputs& inputs) {
  std::vector<double> weight = inputs.weight;
  const int64_t rank = config.options.adapter_rank, d_model = inputs.shape.d_model;
  for (int64_t j = 0; j < inputs.shape.vocab; ++j) {
    for (int64_t k = 0; k < d_model; ++k) {
      for (int64_t r = 0; r < rank; ++r) {
        weight[j * d_model + k] += config.options.adapter_scale * inputs.adapter_b[j * rank + r] *
                                   inputs.adapter_a[r * d_model + k];
      }
    }
  }
  return weight;
}

// From d_logits: the gradients of the two operands of the product, of the bias, and of the adapter
// through the gradient of the adapted weight. Rows that are not read stay out of every sum.
void backward_product(const HeadConfig& config, const HeadInputs& inputs,
                      const std::vector<double>& weight, const std::vector<bool>& read,
                      HeadResult& result) {
  const auto [n_tok, d_model, vocab] = inputs.shape;
  result.d_hidden.assign(n_tok * d_model, 0);
  result.d_weight.assign(vocab * d_model, 0);
  if (config.options.bias) result.d_bias.assign(vocab, 0);
  for (int64_t i = 0; i < n_tok; ++i) {
    if (!read[i]) continue;
    for (int64_t j = 0; j < vocab; ++j) {
      const double g = result.d_logits[i * vocab + j];
      for (int64_t k = 0; k < d_model; ++k) {
        result.d_hidden[i * d_model + k] += g * weight[j * d_model + k];
        result.d_weight[j * d_model + k] += g * inputs.hidden[i * d_model + k];
      }
      if (config.options.bias) result.d_bias[j] += g;
    }
  }
  const int64_t rank = config.options.adapter_rank;
  const double scale = config.options.adapter_scale;
  result.d_adapter_a.assign(rank * d_model, 0);
  result.d_adapter_b.assign(vocab * rank, 0);
  for (int64_t j = 0; j < vocab; ++j) {
    for (int64_t r = 0; r < rank; ++r) {
      for (int64_t k = 0; k < d_model; ++k) {
        const double g = scale * result.d_weight[j * d_model + k];
        result.d_adapter_b[j * rank + r] += g * inputs.adapter_a[r * d_model + k];
        result.d_adapter_a[r * d_model + k] += g * inputs.adapter_b[j * rank + r];
      }
    }
  }
}

// lse in one number and in two, label_log_prob, entropy, argmax and correct, of the head's logits.
void row_outputs(const HeadConfig& config, const HeadInputs& inputs,
                 const std::vector<double>& logits, const std::vector<bool>& read,
                 HeadResult& result) {
  const auto [n_tok, d_model, vocab] = inputs.shape;
  result.lse.assign(n_tok, 0);
  result.label_log_prob.assign(n_tok, 0);
  result.entropy.assign(n_tok, 0);
  result.argmax.assign(n_tok, -1);
  result.correct.assign(n_tok, 0);
  result.shift.assign(n_tok, 0);
  result.log_sum.assign(n_tok, 0);
  result.distance.assign(n_tok, 0);
  for (int64_t row = 0; row < n_tok; ++row) {
    if (!read[row]) continue;
    const double* x = logits.data() + row * vocab;
    const LogSoftmax softmax = student_softmax(inputs, row, x, config.options.logits_scale);
    result.shift[row] = softmax.shift;
    result.log_sum[row] = softmax.log_sum;
    for (int64_t j = 0; j < vocab; ++j) {
      result.distance[row] += config.options.logits_scale * (x[j] - softmax.shift);
    }
    if (!has_label(inputs, row)) continue;
    ++result.n_valid;
    result.lse[row] = softmax.lse;
    result.argmax[row] = std::max_element(x, x + vocab) - x;
    result.entropy[row] = row_entropy(inputs, row, softmax);
    if (inputs.labels.empty()) continue;
    const int64_t label = inputs.labels[row] - config.options.vocab_offset;
    result.label_log_prob[row] = label_log_prob(inputs, row, label, softmax);
    result.correct[row] = result.argmax[row] == label;
  }
}

}  // namespace

LogSoftmax log_softmax(const double* logits, int64_t vocab, double scale) {
  double m = scale * logits[0];
  for (int64_t j = 1; j < vocab; ++j) m = std::max(m, scale * logits[j]);
  double sum = 0;
  for (int64_t j = 0; j < vocab; ++j) sum += std::exp(scale * logits[j] - m);
  LogSoftmax result;
  result.shift = *std::max_element(logits, logits + vocab);
  result.log_sum = std::log(sum);
  for (int64_t j = 0; j < vocab; ++j) {
    result.log_q.push_back((scale * logits[j] - m) - std::log(sum));
  }
  result.lse = m + std::log(sum);
  return result;
}

LogSoftmax student_softmax(const HeadInputs& inputs, int64_t row, const double* logits,
                           double scale) {
  const int64_t vocab = inputs.shape.vocab;
  if (inputs.group_shift.empty()) return log_softmax(logits, vocab, scale);
  LogSoftmax result;
  result.shift = inputs.group_shift[row];
  result.log_sum = inputs.group_log_sum[row];
  result.lse = scale * result.shift + result.log_sum;
  for (int64_t j = 0; j < vocab; ++j) {
    result.log_q.push_back(scale * (logits[j] - result.shift) - result.log_sum);
  }
  return result;
}

double row_entropy(const HeadInputs& inputs, int64_t row, const LogSoftmax& softmax) {
  if (!inputs.group_entropy.empty()) return inputs.group_entropy[row];
  double sum = 0;
  for (const double log_q : softmax.log_q) {
    if (std::exp(log_q) > 0) sum -= std::exp(log_q) * log_q;
  }
  return sum;
}

double label_log_prob(const HeadInputs& inputs, int64_t row, int64_t label,
                      const LogSoftmax& softmax) {
  if (!inputs.group_label_log_prob.empty()) return inputs.group_label_log_prob[row];
  if (label < 0 || label >= inputs.shape.vocab) return -INFINITY;
  return softmax.log_q[label];
}

bool TermContext::counts(int64_t row) const {
  const bool follows_labels = term.kind != LossKind::kZLoss && term.kind != LossKind::kDistillation;
  RowMask mask = follows_labels ? RowMask::kLabels : term.mask;
  if (mask == RowMask::kAuto) {
    mask = !inputs.labels.empty() ? RowMask::kLabels
           : !inputs.mask.empty() ? RowMask::kOwn
                                  : RowMask::kNone;
  }
  if (mask == RowMask::kLabels) return inputs.labels[row] >= 0;
  return mask == RowMask::kNone || inputs.mask[row] != 0;
}

HeadResult head_losses(const HeadConfig& config, const HeadInputs& inputs) {
  const auto [n_tok, d_model, vocab] = inputs.shape;
  HeadResult result;

  // A row is read where it has a label or a term counts it.
  std::vector<bool> read(n_tok, false);
  std::vector<TermContext> contexts;
  contexts.reserve(config.terms.size());
  for (const LossTerm& term : config.terms) {
    contexts.push_back({term, config.options, inputs, nullptr, nullptr, nullptr});
  }
  for (int64_t row = 0; row < n_tok; ++row) {
    read[row] = has_label(inputs, row);
    for (const TermContext& context : contexts) read[row] = read[row] || context.counts(row);
  }

  // x = softcap(z + bias), and its slope d x / d z.
  std::vector<double> weight;
  std::vector<double> logits = inputs.logits;
  if (d_model > 0) {
    weight = adapted_weight(config, inputs);
    logits = product(inputs.hidden, weight, n_tok, vocab, d_model, read);
  }
  std::vector<double> softcap_slope(n_tok * vocab, 1);
  for (int64_t i = 0; i < n_tok * vocab; ++i) {
    if (config.options.bias) logits[i] += inputs.bias[i % vocab];
    if (config.options.softcap > 0) {
      const double t = std::tanh(logits[i] / config.options.softcap);
      logits[i] = config.options.softcap * t;
      softcap_slope[i] = 1 - t * t;
    }
  }
  row_outputs(config, inputs, logits, read, result);

  std::vector<std::vector<double>> teacher_logits;
  for (size_t t = 0; t < config.teachers.size(); ++t) {
    const lossk::Teacher& teacher = config.teachers[t];
    const HeadTeacher& given = inputs.teachers[t];
    teacher_logits.push_back(
        teacher.kind == lossk::TeacherKind::kHidden
            ? product(given.hidden, given.weight, n_tok, teacher.vocab, teacher.d_model, read)
            : given.logits);
  }

  result.token_loss.assign(n_tok, 0);
  result.d_logits.assign(n_tok * vocab, 0);
  for (TermContext& context : contexts) {
    const LossTerm& term = context.term;
    context.logits = logits.data();
    if (term.kind == LossKind::kDistillation) {
      context.teacher = &config.teachers[term.teacher];
      context.teacher_logits = teacher_logits[term.teacher].data();
    }
    TermResult computed = compute_term(context);
    const double divisor = term.divisor.value_or(computed.default_divisor);
    // No rows to divide by: loss 0, gradients 0.
    const double per_divisor = divisor == 0 ? 0 : 1 / divisor;
    const double scalar = divisor == 0 ? 0 : computed.sum / divisor;
    for (int64_t row = 0; row < n_tok; ++row) {
      if (term.weight != 0) result.token_loss[row] += term.weight * computed.row_loss[row];
      if (!context.counts(row)) continue;
      const double rows = inputs.upstream_rows.empty() ? 1 : inputs.upstream_rows[row];
      for (int64_t i = row * vocab; i < (row + 1) * vocab; ++i) {
        computed.d_logits[i] *= context.scale() * softcap_slope[i] * per_divisor;
        if (term.weight != 0) {
          result.d_logits[i] += inputs.upstream * rows * term.weight * computed.d_logits[i];
        }
      }
    }
    result.terms.push_back(scalar);
    result.divisors.push_back(divisor);
    if (term.weight != 0) result.total += term.weight * scalar;
    result.policy_metrics.push_back(computed.metrics);
    result.term_row_loss.push_back(std::move(computed.row_loss));
    result.term_d_logits.push_back(std::move(computed.d_logits));
  }
  if (d_model > 0) backward_product(config, inputs, weight, read, result);
  return result;
}

}  // namespace ullage::reference
