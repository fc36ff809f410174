// From a configuration and a run's views to the parameters that the row kernels of both doors
// share.
#pragma once

#include "cuda/head_logits/params.h"
#include "ullage/lossk/head.h"

namespace ullage::lossk::cuda {

// Terms whose row gradients need sums over whole segments first.
inline bool is_sequence(const LossTerm& term) {
  return term.kind == LossKind::kGspo || term.kind == LossKind::kDpo;
}

// Distillation from a teacher's k likeliest ids, by this term or by any.
bool is_top_k(const HeadConfig& config, const LossTerm& term);
bool has_top_k(const HeadConfig& config);

// Terms, the teacher, and which rows count.
void fill_terms(const HeadConfig& config, const Inputs& inputs, const Outputs& outputs,
                HeadParams& p);

// The power of two that brings the largest |upstream * weight / divisor| of a term to between
// 2^exponent and twice that; 1 where all are 0. What an f16 gradient is stored times, so that a
// mean over many rows keeps its digits. A divisor that only the census knows counts as n_tok.
float unit_of_gains(const HeadParams& p, int exponent);

// Per-row inputs and outputs, scalars.
void fill_vectors(const Inputs& inputs, const Outputs& outputs, HeadParams& p);

}  // namespace ullage::lossk::cuda
