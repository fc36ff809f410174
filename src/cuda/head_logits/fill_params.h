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

// Terms, the teacher, and which rows count.
void fill_terms(const HeadConfig& config, const Inputs& inputs, const Outputs& outputs,
                HeadParams& p);

// Per-row inputs and outputs, scalars.
void fill_vectors(const Inputs& inputs, const Outputs& outputs, HeadParams& p);

}  // namespace ullage::lossk::cuda
