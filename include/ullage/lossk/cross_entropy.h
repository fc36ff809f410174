// lossk.cross_entropy: mean cross-entropy in float64, from logits or fused with the output
// projection. These are the reference forms, plain loops with checked inputs; the typed kernels are
// held to them.
//
// loss of a row = log sum_j exp(z_j - m) - (z_target - m), m = max_j z_j; mean_loss = total_loss /
// n_tok. Per-token losses are summed in token order whatever the chunk, so that every chunk size
// gives the same bits.
//
// Matrices are row-major and may be longer than their shape: what lies beyond is never read. A
// refusal leaves every number 0 and every list empty. Refusals common to all:
//   581, 583, 584  loss_dims_check       582  a list shorter than its shape
//   586            a target outside [0, vocab)
//   585            an input that is not finite, or a loss that overflows to one that is not
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ullage/export.h"
#include "ullage/status.h"

namespace ullage::lossk {

struct CrossEntropy {
  double mean_loss = 0;
  double total_loss = 0;
  std::vector<double> token_losses = {};  // [n_tok]
  StatusCode status = kLossOk;
};

struct FusedCrossEntropy {
  double mean_loss = 0;
  double total_loss = 0;
  std::vector<double> token_losses = {};  // [n_tok]
  double peak_logit_cells = 0;            // logits that existed at once
  int64_t n_chunks = 0;
  StatusCode status = kLossOk;
};

struct FusedCrossEntropyGradients {
  std::vector<double> d_hidden = {};  // [n_tok][d_model], of the mean loss
  std::vector<double> d_weight = {};  // [vocab][d_model], of the mean loss
  double mean_loss = 0;
  StatusCode status = kLossOk;
};

struct ChunkInvariance {
  double max_abs_delta = 0;  // over both totals and every token's loss
  double mean_loss_chunk_one = 0;
  double mean_loss_chunk_all = 0;
  StatusCode status = kLossOk;
};

struct PeakLogitCells {
  double chunked_cells = 0;       // min(chunk, n_tok) * vocab
  double materialized_cells = 0;  // n_tok * vocab
  double ratio = 0;               // materialized_cells / chunked_cells
  int64_t n_chunks = 0;           // ceil(n_tok / chunk)
  StatusCode status = kLossOk;
};

// logits [n_tok][vocab], targets [n_tok].
ULLAGE_API CrossEntropy ce_from_logits_flat(std::span<const double> logits,
                                            std::span<const int64_t> targets, int64_t n_tok,
                                            int64_t vocab);

// hidden [n_tok][d_model], weight [vocab][d_model], targets [n_tok]; projects and reduces `chunk`
// tokens at a time. Also refuses what loss_chunk_check(chunk, vocab) refuses.
ULLAGE_API FusedCrossEntropy fused_linear_ce_flat(std::span<const double> hidden,
                                                  std::span<const double> weight,
                                                  std::span<const int64_t> targets, int64_t n_tok,
                                                  int64_t d_model, int64_t vocab, int64_t chunk);

// Gradients of the mean loss. d_weight is as large as the weight, so logits are simply made one row
// at a time.
ULLAGE_API FusedCrossEntropyGradients fused_linear_ce_bwd_flat(std::span<const double> hidden,
                                                               std::span<const double> weight,
                                                               std::span<const int64_t> targets,
                                                               int64_t n_tok, int64_t d_model,
                                                               int64_t vocab);

// What a chunked call holds at its peak against all n_tok rows at once. Refuses what
// loss_dims_check(n_tok, 1, vocab) and loss_chunk_check(chunk, vocab) refuse.
ULLAGE_API PeakLogitCells ce_peak_logit_cells(int64_t n_tok, int64_t vocab, int64_t chunk);

// The fused loss at chunk = 1 and at chunk = n_tok. Also refuses (587) where n_tok rows do not fit
// the logit budget.
ULLAGE_API ChunkInvariance ce_chunk_invariance_flat(std::span<const double> hidden,
                                                    std::span<const double> weight,
                                                    std::span<const int64_t> targets, int64_t n_tok,
                                                    int64_t d_model, int64_t vocab);

}  // namespace ullage::lossk
