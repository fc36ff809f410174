// lossk.cross_entropy: the checks of the contract in front of the oracle's loops.
#include <algorithm>
#include <cmath>

#include "reference/cross_entropy.h"
#include "ullage/lossk/contract.h"
#include "ullage/lossk/cross_entropy.h"

namespace ullage::lossk {
namespace {

bool covers(std::span<const double> list, int64_t length) {
  return list.size() >= static_cast<uint64_t>(length);
}

bool all_finite(std::span<const double> list, int64_t length) {
  const auto covered = list.first(static_cast<size_t>(length));
  return std::all_of(covered.begin(), covered.end(), loss_scalars_ok);
}

StatusCode targets_check(std::span<const int64_t> targets, int64_t n_tok, int64_t vocab) {
  if (targets.size() < static_cast<uint64_t>(n_tok)) return kLossLengthMismatch;
  return loss_targets_in_range(targets, n_tok, vocab) ? kLossOk : kLossTargetOutOfRange;
}

StatusCode fused_check(std::span<const double> hidden, std::span<const double> weight,
                       std::span<const int64_t> targets, int64_t n_tok, int64_t d_model,
                       int64_t vocab) {
  const StatusCode dims = loss_dims_check(n_tok, d_model, vocab);
  if (dims != kLossOk) return dims;
  if (!covers(hidden, n_tok * d_model) || !covers(weight, vocab * d_model)) {
    return kLossLengthMismatch;
  }
  const StatusCode labels = targets_check(targets, n_tok, vocab);
  if (labels != kLossOk) return labels;
  const bool finite = all_finite(hidden, n_tok * d_model) && all_finite(weight, vocab * d_model);
  return finite ? kLossOk : kLossNonFiniteScalar;
}

std::vector<double> zeros(int64_t count) { return std::vector<double>(static_cast<size_t>(count)); }

}  // namespace

CrossEntropy ce_from_logits_flat(std::span<const double> logits, std::span<const int64_t> targets,
                                 int64_t n_tok, int64_t vocab) {
  StatusCode status = loss_dims_check(n_tok, 1, vocab);
  if (status == kLossOk && !covers(logits, n_tok * vocab)) status = kLossLengthMismatch;
  if (status == kLossOk) status = targets_check(targets, n_tok, vocab);
  if (status == kLossOk && !all_finite(logits, n_tok * vocab)) status = kLossNonFiniteScalar;
  if (status != kLossOk) return {.status = status};

  std::vector<double> token_losses = zeros(n_tok);
  reference::cross_entropy(logits.data(), targets.data(), n_tok, vocab, token_losses.data());
  const double total = reference::total_loss(token_losses.data(), n_tok);
  if (!std::isfinite(total)) return {.status = kLossNonFiniteScalar};
  return {.mean_loss = total / static_cast<double>(n_tok),
          .total_loss = total,
          .token_losses = std::move(token_losses)};
}

FusedCrossEntropy fused_linear_ce_flat(std::span<const double> hidden,
                                       std::span<const double> weight,
                                       std::span<const int64_t> targets, int64_t n_tok,
                                       int64_t d_model, int64_t vocab, int64_t chunk) {
  StatusCode status = loss_dims_check(n_tok, d_model, vocab);
  if (status == kLossOk) status = loss_chunk_check(chunk, vocab);
  if (status == kLossOk) status = fused_check(hidden, weight, targets, n_tok, d_model, vocab);
  if (status != kLossOk) return {.status = status};

  const PeakLogitCells peak = ce_peak_logit_cells(n_tok, vocab, chunk);
  std::vector<double> logits = zeros(std::min(chunk, n_tok) * vocab);
  std::vector<double> token_losses = zeros(n_tok);
  reference::fused_linear_cross_entropy(hidden.data(), weight.data(), targets.data(), n_tok,
                                        d_model, vocab, chunk, logits.data(), token_losses.data());
  const double total = reference::total_loss(token_losses.data(), n_tok);
  if (!std::isfinite(total)) return {.status = kLossNonFiniteScalar};
  return {.mean_loss = total / static_cast<double>(n_tok),
          .total_loss = total,
          .token_losses = std::move(token_losses),
          .peak_logit_cells = peak.chunked_cells,
          .n_chunks = peak.n_chunks};
}

FusedCrossEntropyGradients fused_linear_ce_bwd_flat(std::span<const double> hidden,
                                                    std::span<const double> weight,
                                                    std::span<const int64_t> targets, int64_t n_tok,
                                                    int64_t d_model, int64_t vocab) {
  const StatusCode status = fused_check(hidden, weight, targets, n_tok, d_model, vocab);
  if (status != kLossOk) return {.status = status};

  std::vector<double> logits = zeros(vocab);
  std::vector<double> token_losses = zeros(n_tok);
  std::vector<double> d_hidden = zeros(n_tok * d_model);
  std::vector<double> d_weight = zeros(vocab * d_model);
  reference::fused_linear_cross_entropy_backward(
      hidden.data(), weight.data(), targets.data(), n_tok, d_model, vocab, logits.data(),
      token_losses.data(), d_hidden.data(), d_weight.data());
  const double total = reference::total_loss(token_losses.data(), n_tok);
  if (!std::isfinite(total) || !all_finite(d_hidden, n_tok * d_model) ||
      !all_finite(d_weight, vocab * d_model)) {
    return {.status = kLossNonFiniteScalar};
  }
  return {.d_hidden = std::move(d_hidden),
          .d_weight = std::move(d_weight),
          .mean_loss = total / static_cast<double>(n_tok)};
}

ChunkInvariance ce_chunk_invariance_flat(std::span<const double> hidden,
                                         std::span<const double> weight,
                                         std::span<const int64_t> targets, int64_t n_tok,
                                         int64_t d_model, int64_t vocab) {
  const FusedCrossEntropy all =
      fused_linear_ce_flat(hidden, weight, targets, n_tok, d_model, vocab, n_tok);
  if (all.status != kLossOk) return {.status = all.status};
  const FusedCrossEntropy one =
      fused_linear_ce_flat(hidden, weight, targets, n_tok, d_model, vocab, 1);
  if (one.status != kLossOk) return {.status = one.status};

  double delta = std::abs(one.total_loss - all.total_loss);
  for (size_t t = 0; t < all.token_losses.size(); ++t) {
    delta = std::max(delta, std::abs(one.token_losses[t] - all.token_losses[t]));
  }
  return {.max_abs_delta = delta,
          .mean_loss_chunk_one = one.mean_loss,
          .mean_loss_chunk_all = all.mean_loss};
}

}  // namespace ullage::lossk
