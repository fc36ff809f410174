// Error bounds of one row under one term. Between error_bound.cc and error_bound_terms.cc.
#pragma once

#include <vector>

#include "reference/head_terms.h"

namespace ullage::reference {

struct Rounding {
  double u;  // unit roundoff
  double gamma(double n) const { return n * u / (1 - n * u); }
};

// A row's softmax at one scale, and what it is off by.
struct BoundedSoftmax {
  LogSoftmax exact;
  double a_max = 0;  // of the finite |a_j|
  double log_q = 0;  // error of ln q_j and of lp
  double lse = 0;    // error of lse
  double q = 0;      // relative error of q_j
};

// delta: the error of the logits before `scale`.
BoundedSoftmax bounded_softmax(const double* logits, int64_t vocab, double scale, double delta,
                               const Rounding& r);

struct RowBound {
  double loss = 0;
  std::vector<double> d;  // [vocab], of the gradient in the effective logits
};

RowBound cross_entropy_bound(const TermContext& context, int64_t row, const BoundedSoftmax& s,
                             const Rounding& r);
RowBound z_loss_bound(const BoundedSoftmax& s, const Rounding& r);
RowBound distillation_bound(const TermContext& context, int64_t row, const BoundedSoftmax& s,
                            double teacher_delta, const Rounding& r);

// Losses of lp. Those of a segment depend on every row's softmax.
std::vector<RowBound> policy_bounds(const TermContext& context,
                                    const std::vector<BoundedSoftmax>& softmax, const Rounding& r);

// Of the sum over pairs too, whose losses belong to no row.
std::vector<RowBound> preference_bounds(const TermContext& context,
                                        const std::vector<BoundedSoftmax>& softmax,
                                        const Rounding& r, double& pair_losses);

}  // namespace ullage::reference
