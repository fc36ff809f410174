// From a configuration and a run's views to the parameters that the row kernels of both doors
// share.
#pragma once

#include <span>

#include "cuda/head_logits/passes.h"
#include "ullage/lossk/head.h"

namespace ullage::lossk::cuda {

// Terms whose row gradients need sums over whole segments first.
inline bool is_sequence(const LossTerm& term) {
  return term.kind == LossKind::kGspo || term.kind == LossKind::kDpo;
}

// Distillation from a teacher's k likeliest ids.
bool is_top_k(const HeadConfig& config, const LossTerm& term);

// Terms, and which rows count: what all passes share. `passes`: those of the configuration.
void fill_terms(const HeadConfig& config, std::span<const Pass> passes, const Inputs& inputs,
                const Outputs& outputs, HeadParams& p);

// Of what all share, vectors included, the part of one pass: its softmax, its teacher and, of the
// first, the outputs of rows.
void fill_pass(const HeadConfig& config, std::span<const Pass> passes, size_t which,
               const Inputs& inputs, HeadParams& p);

// The power of two that brings the largest |upstream * weight / divisor| of a term to between
// 2^exponent and twice that; 1 where all are 0. What an f16 gradient is stored times, so that a
// mean over many rows keeps its digits. A divisor that only the census knows counts as n_tok.
float unit_of_gains(const HeadParams& p, int exponent);

// Per-row inputs and outputs, scalars.
void fill_vectors(const Inputs& inputs, const Outputs& outputs, HeadParams& p);

}  // namespace ullage::lossk::cuda
