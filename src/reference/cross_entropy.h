// The float64 oracle of cross-entropy, as plain loops. Callers have checked shapes and targets;
// matrices are row-major and dense.
//
// loss of a row = log sum_j exp(z_j - m) - (z_target - m), m = max_j z_j. Both terms are formed
// after the shift, so a large common offset costs nothing and uniform logits give log(vocab)
// exactly.
#pragma once

#include <cstdint>

namespace ullage::reference {

// logits [n_tok][vocab], targets [n_tok] -> token_losses [n_tok].
void cross_entropy(const double* logits, const int64_t* targets, int64_t n_tok, int64_t vocab,
                   double* token_losses);

// hidden [n_tok][d_model], weight [vocab][d_model], targets [n_tok] -> token_losses [n_tok].
// logits [min(chunk, n_tok)][vocab] is scratch: the only logits that exist.
void fused_linear_cross_entropy(const double* hidden, const double* weight, const int64_t* targets,
                                int64_t n_tok, int64_t d_model, int64_t vocab, int64_t chunk,
                                double* logits, double* token_losses);

// The same losses, and the gradients of their mean: d_hidden [n_tok][d_model], d_weight
// [vocab][d_model], both overwritten. logits [vocab] is scratch.
//   g_j = (softmax(z)_j - [j = target]) / n_tok
//   d_hidden_t = sum_j g_j weight_j,  d_weight_j = sum_t g_j hidden_t
void fused_linear_cross_entropy_backward(const double* hidden, const double* weight,
                                         const int64_t* targets, int64_t n_tok, int64_t d_model,
                                         int64_t vocab, double* logits, double* token_losses,
                                         double* d_hidden, double* d_weight);

// token_losses summed in token order.
double total_loss(const double* token_losses, int64_t n_tok);

}  // namespace ullage::reference
