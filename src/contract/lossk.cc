#include <algorithm>
#include <cmath>
#include <limits>

#include "ullage/lossk/contract.h"
#include "ullage/lossk/cross_entropy.h"

namespace ullage::lossk {

std::string_view loss_status_name(int64_t code) {
  if (code < kLossOk || code > kLossUnknownObjective) return "unknown_status";
  return status_name(static_cast<int>(code));
}

StatusCode loss_dims_check(int64_t n_tok, int64_t d_model, int64_t vocab) {
  if (n_tok < 1 || d_model < 1 || vocab < 1) return kLossEmptyDimension;
  if (n_tok > kLossMaxTokens || d_model > kLossMaxModelDim || vocab > kLossMaxVocab) {
    return kLossDimensionTooLarge;
  }
  if (!loss_work_fits(n_tok, d_model, vocab, kLossMaxWorkCells)) return kLossWorkBudgetExceeded;
  return kLossOk;
}

StatusCode loss_chunk_check(int64_t chunk, int64_t vocab) {
  if (chunk < 1 || vocab < 1) return kLossEmptyDimension;
  if (vocab > kLossMaxVocab) return kLossDimensionTooLarge;
  if (chunk > kLossMaxLogitCells / vocab) return kLossBadChunk;
  return kLossOk;
}

double loss_logit_cells(int64_t chunk, int64_t vocab) {
  if (chunk < 1 || vocab < 1) return -1;
  return static_cast<double>(chunk) * static_cast<double>(vocab);
}

bool loss_work_fits(int64_t n_tok, int64_t d_model, int64_t vocab, int64_t ceiling) {
  if (n_tok < 1 || d_model < 1 || vocab < 1 || ceiling < 1) return false;
  return vocab <= ceiling / n_tok / d_model;
}

bool loss_targets_in_range(std::span<const int64_t> targets, int64_t n_tok, int64_t vocab) {
  if (n_tok < 0 || targets.size() < static_cast<uint64_t>(n_tok)) return false;
  const auto covered = targets.first(static_cast<size_t>(n_tok));
  return std::all_of(covered.begin(), covered.end(),
                     [vocab](int64_t target) { return 0 <= target && target < vocab; });
}

bool loss_scalars_ok(double value) { return std::isfinite(value); }

double loss_tol_for(double magnitude, int64_t reduction_width) {
  if (!std::isfinite(magnitude) || reduction_width < 1) return 0;
  const double rounding =
      static_cast<double>(reduction_width) * std::numeric_limits<double>::epsilon();
  return std::max(1.0, std::abs(magnitude)) * (kLossTranscendentalFloor + rounding);
}

PeakLogitCells ce_peak_logit_cells(int64_t n_tok, int64_t vocab, int64_t chunk) {
  PeakLogitCells out;
  out.status = loss_dims_check(n_tok, 1, vocab);
  if (out.status == kLossOk) out.status = loss_chunk_check(chunk, vocab);
  if (out.status != kLossOk) return out;
  out.chunked_cells = loss_logit_cells(std::min(chunk, n_tok), vocab);
  out.materialized_cells = loss_logit_cells(n_tok, vocab);
  out.ratio = out.materialized_cells / out.chunked_cells;
  out.n_chunks = (n_tok - 1) / chunk + 1;
  return out;
}

}  // namespace ullage::lossk
