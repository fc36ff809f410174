// lossk.contract: what a loss may ask for, answered before any work. Pure arithmetic on counts:
// nothing here allocates, and no count, however extreme, overflows a check.
//
// Two budgets, two questions. The work budget bounds what may be computed in total; the logit
// budget bounds what may exist at once. Total work is meant to exceed peak memory: that is what
// chunking is for.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "ullage/export.h"
#include "ullage/status.h"

namespace ullage::lossk {

// LOSS_MAX_WORK_CELLS: the largest n_tok * d_model * vocab, 2^46 multiply-adds.
inline constexpr int64_t kLossMaxWorkCells = int64_t{1} << 46;

// LOSS_MAX_LOGIT_CELLS: the largest chunk * vocab, 2^27 logits: 1 GiB in float64.
inline constexpr int64_t kLossMaxLogitCells = int64_t{1} << 27;

// LOSS_TRANSCENDENTAL_FLOOR: no comparison of losses asks for less than this, because exp and log
// are not correctly rounded everywhere.
inline constexpr double kLossTranscendentalFloor = 1e-9;

// Ceilings of the single dimensions (583 above them). Every published model passes: vocabularies
// reach 262,144 columns, widths 18,432, and a batch of 2^26 tokens is 512 contexts of 131,072.
inline constexpr int64_t kLossMaxTokens = int64_t{1} << 26;
inline constexpr int64_t kLossMaxModelDim = int64_t{1} << 17;
inline constexpr int64_t kLossMaxVocab = int64_t{1} << 20;

// The name of a code in 580-588; "unknown_status" for any other, a neighbouring family's included.
ULLAGE_API std::string_view loss_status_name(int64_t code);

// Shape of a fused projection hidden [n_tok][d_model] x weight [vocab][d_model].
// 581: a dimension below 1; 583: one above its ceiling; 584: n_tok * d_model * vocab above
// kLossMaxWorkCells.
ULLAGE_API StatusCode loss_dims_check(int64_t n_tok, int64_t d_model, int64_t vocab);

// May `chunk` rows of `vocab` logits exist at once? 581: either below 1; 583: vocab above its
// ceiling; 587: chunk * vocab above kLossMaxLogitCells. A chunk is refused, never clamped.
ULLAGE_API StatusCode loss_chunk_check(int64_t chunk, int64_t vocab);

// chunk * vocab, the logits one chunk holds; -1 where either is below 1.
ULLAGE_API double loss_logit_cells(int64_t chunk, int64_t vocab);

// n_tok * d_model * vocab <= ceiling, by successive division. False where any of the four is
// below 1.
ULLAGE_API bool loss_work_fits(int64_t n_tok, int64_t d_model, int64_t vocab, int64_t ceiling);

// Each of the first n_tok targets is in [0, vocab). False where there are fewer than n_tok of them
// or n_tok is negative. A negative target is out of range here, not a mask.
ULLAGE_API bool loss_targets_in_range(std::span<const int64_t> targets, int64_t n_tok,
                                      int64_t vocab);

// Neither NaN nor infinite.
ULLAGE_API bool loss_scalars_ok(double value);

// The largest difference two spellings of one loss may show when the loss is about `magnitude` and
// is reduced from `reduction_width` summands: max(1, |magnitude|) * (kLossTranscendentalFloor +
// reduction_width * 2^-52), the second term being the error bound of a float64 sum in any order
// (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). 0, which only equality
// meets, where magnitude is not finite or reduction_width is below 1.
ULLAGE_API double loss_tol_for(double magnitude, int64_t reduction_width);

}  // namespace ullage::lossk
