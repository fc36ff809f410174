// How far a correct implementation of the loss algebra may be from the float64 oracle: the only
// source of its tests' tolerances. First-order forward error analysis; u is the unit roundoff of
// the type that an implementation accumulates in, gamma_n = n u / (1 - n u).
//
//   logits      delta = gamma_K sum_k |x_k w_k|   (0 where they are given)
//   exponent    |a_j - m| is off by 2 delta_a, delta_a = s delta + 4 u max_j |a_j|
//   sum of exp  relative: e^(2 delta_a) - 1 + 4 u + gamma_V, for any order of the V additions
//   lse, ln q   lse is 1-Lipschitz in the max norm: delta_a + the sum's
//   q_j         relative: e^(error of ln q) - 1
//   row loss    its slope times the error of ln q, plus gamma_V times the sum of what it adds up
//   products    sum_j (bound of g_j) |w_j|, plus gamma times sum_j |g_j w_j|
//
// Where logits and their gradient are stored in a narrower type in between, of unit roundoff s:
//   logits      s max_j |z_j| more; with a bias or an adapter, whose parts are rounded before they
//               are added, 3 s times all that the parts add up
//   gradient    s |g_j| more; and the rows that an adapter puts between two products s each; where
//               it is added up in the stored type, in parts, s times all terms for each further one
#pragma once

#include <vector>

#include "reference/head_losses.h"

namespace ullage::reference {

// Parallel to HeadResult.
struct HeadErrorBounds {
  std::vector<double> terms;
  double total = 0;
  std::vector<double> token_loss, lse, label_log_prob, entropy;
  std::vector<double> d_logits, d_hidden, d_weight, d_bias, d_adapter_a, d_adapter_b;
};

// `expected` is head_losses(config, inputs); the inputs are as the implementation has them, rounded
// to their storage types. accumulate: kF64 or kF32. stored: what logits and their gradient are
// stored in between the products; kF64: in nothing narrower. gradient_parts: in how many the
// gradient is added up. Ratios are away from clip bounds, where a slope jumps.
HeadErrorBounds head_error_bounds(const lossk::HeadConfig& config, const HeadInputs& inputs,
                                  const HeadResult& expected, DType accumulate,
                                  DType stored = DType::kF64, int64_t gradient_parts = 1);

// Half a unit in the last place of `value` in the type: what one rounding may cost.
double rounding_error(DType dtype, double value);

}  // namespace ullage::reference
