#include "reference/cross_entropy.h"

#include <algorithm>
#include <cmath>

namespace ullage::reference {
namespace {

struct RowStatistics {
  double max;
  double sum;  // of exp(z_j - max)
};

RowStatistics row_statistics(const double* logits, int64_t vocab) {
  const double max = *std::max_element(logits, logits + vocab);
  double sum = 0;
  for (int64_t j = 0; j < vocab; ++j) sum += std::exp(logits[j] - max);
  return {max, sum};
}

double row_loss(const RowStatistics& row, double target_logit) {
  return std::log(row.sum) - (target_logit - row.max);
}

// hidden [n_tok][d_model], weight [vocab][d_model] -> logits [n_tok][vocab].
void project(const double* hidden, const double* weight, int64_t n_tok, int64_t d_model,
             int64_t vocab, double* logits) {
  for (int64_t t = 0; t < n_tok; ++t) {
    for (int64_t j = 0; j < vocab; ++j) {
      double dot = 0;
      for (int64_t d = 0; d < d_model; ++d)
        dot += hidden[t * d_model + d] * weight[j * d_model + d];
      logits[t * vocab + j] = dot;
    }
  }
}

}  // namespace

void cross_entropy(const double* logits, const int64_t* targets, int64_t n_tok, int64_t vocab,
                   double* token_losses) {
  for (int64_t t = 0; t < n_tok; ++t) {
    const double* row = logits + t * vocab;
    token_losses[t] = row_loss(row_statistics(row, vocab), row[targets[t]]);
  }
}

void fused_linear_cross_entropy(const double* hidden, const double* weight, const int64_t* targets,
                                int64_t n_tok, int64_t d_model, int64_t vocab, int64_t chunk,
                                double* logits, double* token_losses) {
  for (int64_t begin = 0; begin < n_tok;) {
    const int64_t rows = std::min(chunk, n_tok - begin);
    project(hidden + begin * d_model, weight, rows, d_model, vocab, logits);
    cross_entropy(logits, targets + begin, rows, vocab, token_losses + begin);
    begin += rows;
  }
}

void fused_linear_cross_entropy_backward(const double* hidden, const double* weight,
                                         const int64_t* targets, int64_t n_tok, int64_t d_model,
                                         int64_t vocab, double* logits, double* token_losses,
                                         double* d_hidden, double* d_weight) {
  std::fill(d_hidden, d_hidden + n_tok * d_model, 0.0);
  std::fill(d_weight, d_weight + vocab * d_model, 0.0);
  for (int64_t t = 0; t < n_tok; ++t) {
    const double* h = hidden + t * d_model;
    double* d_h = d_hidden + t * d_model;
    project(h, weight, 1, d_model, vocab, logits);
    const RowStatistics row = row_statistics(logits, vocab);
    token_losses[t] = row_loss(row, logits[targets[t]]);
    for (int64_t j = 0; j < vocab; ++j) {
      const double softmax = std::exp(logits[j] - row.max) / row.sum;
      const double g = (softmax - (j == targets[t] ? 1.0 : 0.0)) / static_cast<double>(n_tok);
      for (int64_t d = 0; d < d_model; ++d) {
        d_h[d] += g * weight[j * d_model + d];
        d_weight[j * d_model + d] += g * h[d];
      }
    }
  }
}

double total_loss(const double* token_losses, int64_t n_tok) {
  double total = 0;
  for (int64_t t = 0; t < n_tok; ++t) total += token_losses[t];
  return total;
}

}  // namespace ullage::reference
