// Divergences between a teacher's distribution and the student's.
//
// All four are functions of the bins' ln p_b and ln q_b; a bin is a column, or with a top-k teacher
// one of the k ids or the tail. With h_b = dLoss / d ln q_b the gradient in the logits follows from
// d ln q_j / d a_i = [i = j] - q_i.
#include <algorithm>
#include <cmath>

#include "reference/head_terms.h"

namespace ullage::reference {
namespace {

using lossk::Divergence;
using lossk::TopKTail;

struct BinLoss {
  double loss = 0;
  std::vector<double> h;  // [bins]
  double h_sum = 0;
};

// A bin without probability contributes nothing: x ln x -> 0. `normalized`: the q_b sum to 1 and
// so do the p_b. Then the sums of h are known exactly and are used, so that equal distributions
// give zero and not its rounding; and reverse KL's h drops the + 1 of d (q ln q), which such
// q_b cancel.
BinLoss divergence(const lossk::LossTerm& term, const std::vector<double>& log_p,
                   const std::vector<double>& log_q, bool normalized) {
  BinLoss result;
  result.h.assign(log_q.size(), 0);
  double q_from_m = 0;  // KL(q | m)
  for (size_t b = 0; b < log_q.size(); ++b) {
    const double p = std::exp(log_p[b]), q = std::exp(log_q[b]);
    switch (term.divergence) {
      case Divergence::kCrossEntropy:
        if (p > 0) result.loss -= p * log_q[b];
        result.h[b] = -p;
        break;
      case Divergence::kForwardKl:
        if (p > 0) result.loss += p * (log_p[b] - log_q[b]);
        result.h[b] = -p;
        break;
      case Divergence::kReverseKl:
        if (q > 0) {
          result.loss += q * (log_q[b] - log_p[b]);
          result.h[b] = q * (log_q[b] - log_p[b] + (normalized ? 0 : 1));
        }
        break;
      case Divergence::kJensenShannon: {
        // m = q + beta (p - q) is q exactly where p = q.
        const double m = q + term.beta * (p - q);
        if (m > 0) {
          if (p > 0) result.loss += term.beta * p * std::log(p / m);
          if (q > 0) {
            result.h[b] = (1 - term.beta) * q * std::log(q / m);
            q_from_m += result.h[b];
          }
        }
        break;
      }
    }
    result.h_sum += result.h[b];
  }
  if (term.divergence == Divergence::kJensenShannon) result.loss += q_from_m;
  if (normalized) {
    if (term.divergence == Divergence::kReverseKl) {
      result.h_sum = result.loss;
    } else if (term.divergence != Divergence::kJensenShannon) {
      result.h_sum = -1;
    }
  }
  return result;
}

double log_sum_exp(const std::vector<double>& values) {
  return log_softmax(values.data(), static_cast<int64_t>(values.size()), 1).lse;
}

// Every column is a bin: d a_j = h_j - q_j sum h.
double full_row(const TermContext& context, int64_t row, const LogSoftmax& student, double* grad) {
  // A wider teacher's extra columns are dropped before its softmax.
  const LogSoftmax teacher =
      log_softmax(context.teacher_logits + row * context.teacher->vocab, context.vocab(),
                  context.scale() / context.term.temperature);
  const BinLoss bins = divergence(context.term, teacher.log_q, student.log_q, true);
  for (int64_t j = 0; j < context.vocab(); ++j) {
    grad[j] = bins.h[j] - std::exp(student.log_q[j]) * bins.h_sum;
  }
  return bins.loss;
}

double top_k_row(const TermContext& context, int64_t row, const LogSoftmax& student, double* grad) {
  const int64_t vocab = context.vocab(), k = context.teacher->k;
  const HeadTeacher& teacher = context.inputs.teachers[context.term.teacher];
  const int64_t* ids = teacher.ids.data() + row * k;
  const double* log_probs = teacher.log_probs.data() + row * k;
  std::vector<double> log_p(log_probs, log_probs + k), log_q;
  std::vector<bool> in_k(vocab, false);
  for (int64_t b = 0; b < k; ++b) {
    log_q.push_back(student.log_q[ids[b]]);
    in_k[ids[b]] = true;
  }

  // Both sides renormalised over the k ids: d a_j = h_j - q'_j sum h for those, 0 elsewhere.
  if (context.term.top_k_tail == TopKTail::kRenormalized) {
    const double p_mass = log_sum_exp(log_p), q_mass = log_sum_exp(log_q);
    for (int64_t b = 0; b < k; ++b) {
      log_p[b] -= p_mass;
      log_q[b] -= q_mass;
    }
    const BinLoss bins = divergence(context.term, log_p, log_q, true);
    for (int64_t b = 0; b < k; ++b) {
      grad[ids[b]] = bins.h[b] - std::exp(log_q[b]) * bins.h_sum;
    }
    return bins.loss;
  }

  // d a_j = -q_j sum h + ([j in K] h_j, or [j not in K] h_tail q_j / q_tail). Truncated there is no
  // tail, nor where the k ids are the whole vocabulary.
  const bool has_tail = context.term.top_k_tail == TopKTail::kTailBin && k < vocab;
  double log_q_tail = 0;
  if (has_tail) {
    double p_tail = 1;
    for (const double value : log_p) p_tail -= std::exp(value);
    std::vector<double> rest;
    for (int64_t j = 0; j < vocab; ++j) {
      if (!in_k[j]) rest.push_back(student.log_q[j]);
    }
    // A tail of masked columns alone has no mass; its maximum would make lse NaN.
    log_q_tail = *std::max_element(rest.begin(), rest.end());
    if (std::isfinite(log_q_tail)) log_q_tail = log_sum_exp(rest);
    log_p.push_back(std::log(std::max(p_tail, 0.0)));
    log_q.push_back(log_q_tail);
  }
  const bool normalized = context.term.top_k_tail == TopKTail::kTailBin;
  const BinLoss bins = divergence(context.term, log_p, log_q, normalized);
  for (int64_t j = 0; j < vocab; ++j) {
    const double q = std::exp(student.log_q[j]);
    grad[j] = -q * bins.h_sum;
    if (has_tail && !in_k[j] && q > 0) {
      grad[j] += bins.h[k] * std::exp(student.log_q[j] - log_q_tail);
    }
  }
  for (int64_t b = 0; b < k; ++b) grad[ids[b]] += bins.h[b];
  return bins.loss;
}

}  // namespace

TermResult distillation_term(const TermContext& context) {
  const int64_t vocab = context.vocab();
  const lossk::LossTerm& term = context.term;
  const double factor = term.t_squared ? term.temperature * term.temperature : 1;
  TermResult result;
  result.row_loss.assign(context.n_tok(), 0);
  result.d_logits.assign(context.n_tok() * vocab, 0);
  for (int64_t row = 0; row < context.n_tok(); ++row) {
    if (!context.counts(row)) continue;
    const LogSoftmax student = log_softmax(context.logits + row * vocab, vocab,
                                           context.scale() / term.student_temperature);
    double* grad = result.d_logits.data() + row * vocab;
    const double loss = context.teacher->kind == lossk::TeacherKind::kTopK
                            ? top_k_row(context, row, student, grad)
                            : full_row(context, row, student, grad);
    // The student's logits were scale / student_temperature times x, not scale times.
    for (int64_t j = 0; j < vocab; ++j) grad[j] *= factor / term.student_temperature;
    result.row_loss[row] = factor * loss;
    result.sum += factor * loss;
    result.default_divisor += 1;
  }
  return result;
}

}  // namespace ullage::reference
