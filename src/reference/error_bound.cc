#include "reference/error_bound.h"

#include <algorithm>
#include <cmath>

#include "reference/error_bound_terms.h"

namespace ullage::reference {
namespace {

using lossk::HeadConfig;
using lossk::LossKind;
using lossk::LossTerm;

std::vector<double> sizes(std::vector<double> values) {
  for (double& value : values) value = std::abs(value);
  return values;
}

// x [rows][inner] times the transpose of w [cols][inner].
std::vector<double> product(const std::vector<double>& x, const std::vector<double>& w,
                            int64_t rows, int64_t cols, int64_t inner,
                            const std::vector<bool>& read) {
  std::vector<double> z(rows * cols, 0);
  for (int64_t i = 0; i < rows; ++i) {
    if (!read[i]) continue;
    for (int64_t j = 0; j < cols; ++j) {
      for (int64_t k = 0; k < inner; ++k) z[i * cols + j] += x[i * inner + k] * w[j * inner + k];
    }
  }
  return z;
}

double largest(const std::vector<double>& values, int64_t row, int64_t cols) {
  double result = 0;
  for (int64_t i = row * cols; i < (row + 1) * cols; ++i) {
    if (std::isfinite(values[i])) result = std::max(result, std::abs(values[i]));
  }
  return result;
}

// W + adapter_scale B A, and the sizes that its use adds up, |W| + 2 |adapter_scale| |B| |A|.
struct Weight {
  std::vector<double> exact, size;
};

Weight adapted(const HeadConfig& config, const HeadInputs& in) {
  Weight weight{in.weight, sizes(in.weight)};
  const int64_t rank = config.options.adapter_rank, d_model = in.shape.d_model;
  for (int64_t j = 0; j < in.shape.vocab; ++j) {
    for (int64_t k = 0; k < d_model; ++k) {
      for (int64_t t = 0; t < rank; ++t) {
        const double ba = config.options.adapter_scale * in.adapter_b[j * rank + t] *
                          in.adapter_a[t * d_model + k];
        weight.exact[j * d_model + k] += ba;
        weight.size[j * d_model + k] += 2 * std::abs(ba);
      }
    }
  }
  return weight;
}

// The bounds of what follows from d_logits: a product is off by the bound of one operand times the
// size of the other, and by gamma times all it adds up.
void product_bounds(const HeadConfig& config, const HeadInputs& in, const HeadResult& expected,
                    const Weight& weight, const std::vector<bool>& read, const Rounding& r,
                    double stored, HeadErrorBounds& bounds) {
  const auto [n_tok, d_model, vocab] = in.shape;
  const int64_t rank = config.options.adapter_rank;
  const double between = rank > 0 ? stored : 0;  // of the adapter's rows
  const double over_vocab = r.gamma(static_cast<double>(vocab + rank + 8)) + between;
  const double over_rows = r.gamma(static_cast<double>(n_tok + 8));
  bounds.d_hidden.assign(n_tok * d_model, 0);
  bounds.d_weight.assign(vocab * d_model, 0);
  if (config.options.bias) bounds.d_bias.assign(vocab, 0);
  for (int64_t i = 0; i < n_tok; ++i) {
    if (!read[i]) continue;
    for (int64_t j = 0; j < vocab; ++j) {
      const double off = bounds.d_logits[i * vocab + j];
      const double size = std::abs(expected.d_logits[i * vocab + j]) + off;
      for (int64_t k = 0; k < d_model; ++k) {
        const double x = std::abs(in.hidden[i * d_model + k]);
        bounds.d_hidden[i * d_model + k] +=
            weight.size[j * d_model + k] * (off + over_vocab * size);
        bounds.d_weight[j * d_model + k] += x * (off + over_rows * size);
      }
      if (config.options.bias) bounds.d_bias[j] += off + over_rows * size;
    }
  }
  bounds.d_adapter_a.assign(rank * d_model, 0);
  bounds.d_adapter_b.assign(vocab * rank, 0);
  if (rank == 0) return;
  const double scale = std::abs(config.options.adapter_scale);
  const double over_all = r.gamma(static_cast<double>(n_tok + vocab + d_model + 8)) + between;
  for (int64_t i = 0; i < n_tok; ++i) {
    if (!read[i]) continue;
    for (int64_t j = 0; j < vocab; ++j) {
      const double off = bounds.d_logits[i * vocab + j];
      const double size = std::abs(expected.d_logits[i * vocab + j]) + off;
      for (int64_t t = 0; t < rank; ++t) {
        for (int64_t k = 0; k < d_model; ++k) {
          const double x = std::abs(in.hidden[i * d_model + k]);
          const double a = std::abs(in.adapter_a[t * d_model + k]);
          const double b = std::abs(in.adapter_b[j * rank + t]);
          const double each = scale * x * (off + 2 * over_all * size);
          bounds.d_adapter_b[j * rank + t] += each * a;
          bounds.d_adapter_a[t * d_model + k] += each * b;
        }
      }
    }
  }
}

// Of a type narrower than the sums', else 0.
double unit_of(DType stored) {
  return stored == DType::kBF16 ? 0x1p-8 : stored == DType::kF16 ? 0x1p-11 : 0;
}

}  // namespace

double rounding_error(DType dtype, double value) {
  // Bits of the significand, and the exponent below which the spacing no longer shrinks.
  int precision = 53, smallest = -1022;
  if (dtype == DType::kF32) precision = 24, smallest = -126;
  if (dtype == DType::kBF16) precision = 8, smallest = -126;
  if (dtype == DType::kF16) precision = 11, smallest = -14;
  const int exponent = value == 0 ? smallest : std::max(std::ilogb(value), smallest);
  return std::ldexp(1, exponent - precision);
}

HeadErrorBounds head_error_bounds(const HeadConfig& config, const HeadInputs& in,
                                  const HeadResult& expected, DType accumulate, DType stored,
                                  int64_t gradient_parts) {
  const double unit = unit_of(stored);
  const Rounding r{accumulate == DType::kF64 ? 0x1p-53 : 0x1p-24};
  const auto [n_tok, d_model, vocab] = in.shape;
  const lossk::HeadOptions& options = config.options;
  HeadErrorBounds bounds;
  std::vector<bool> read(n_tok, false);
  std::vector<TermContext> contexts;
  contexts.reserve(config.terms.size());
  for (const LossTerm& term : config.terms) {
    contexts.push_back({term, options, in, nullptr, nullptr, nullptr});
  }
  for (int64_t i = 0; i < n_tok; ++i) {
    read[i] = in.labels.empty() || in.labels[i] >= 0;
    for (const TermContext& context : contexts) read[i] = read[i] || context.counts(i);
  }

  // u = softcap(z + bias), its slope, and per row the largest error of u. A softcap has slope <= 1.
  Weight weight;
  std::vector<double> logits = in.logits, delta(n_tok, 0), slope(n_tok * vocab, 1);
  if (d_model > 0) {
    weight = adapted(config, in);
    logits = product(in.hidden, weight.exact, n_tok, vocab, d_model, read);
    const std::vector<double> size =
        product(sizes(in.hidden), weight.size, n_tok, vocab, d_model, read);
    const double chain = static_cast<double>(d_model + options.adapter_rank + 4);
    for (int64_t i = 0; i < n_tok; ++i) delta[i] = r.gamma(chain) * largest(size, i, vocab);
    for (int64_t i = 0; i < n_tok && unit > 0; ++i) {
      const bool parts = options.bias || options.adapter_rank > 0;
      double adds_up = parts ? 3 * largest(size, i, vocab) : largest(logits, i, vocab);
      if (options.bias) adds_up += 3 * largest(in.bias, 0, vocab);
      delta[i] += unit * (adds_up + delta[i]);
    }
  }
  for (int64_t i = 0; i < n_tok; ++i) {
    if (!read[i]) continue;
    for (int64_t j = i * vocab; j < (i + 1) * vocab; ++j) {
      if (options.bias) logits[j] += in.bias[j % vocab];
      if (options.softcap > 0) {
        const double t = std::tanh(logits[j] / options.softcap);
        logits[j] = options.softcap * t;
        slope[j] = 1 - t * t;
      }
    }
    if (options.bias || options.softcap > 0) delta[i] += 8 * r.u * largest(logits, i, vocab);
  }
  std::vector<std::vector<double>> teacher_logits, teacher_delta;
  for (size_t t = 0; t < config.teachers.size(); ++t) {
    const lossk::Teacher& teacher = config.teachers[t];
    const HeadTeacher& given = in.teachers[t];
    teacher_logits.push_back(given.logits);
    teacher_delta.emplace_back(n_tok, 0);
    if (teacher.kind != lossk::TeacherKind::kHidden) continue;
    teacher_logits[t] =
        product(given.hidden, given.weight, n_tok, teacher.vocab, teacher.d_model, read);
    const std::vector<double> size = product(sizes(given.hidden), sizes(given.weight), n_tok,
                                             teacher.vocab, teacher.d_model, read);
    for (int64_t i = 0; i < n_tok; ++i) {
      teacher_delta[t][i] =
          r.gamma(static_cast<double>(teacher.d_model + 4)) * largest(size, i, teacher.vocab) +
          1.01 * unit * largest(teacher_logits[t], i, teacher.vocab);
    }
  }

  for (std::vector<double>* each :
       {&bounds.token_loss, &bounds.lse, &bounds.label_log_prob, &bounds.entropy}) {
    each->assign(n_tok, 0);
  }
  for (int64_t row = 0; row < n_tok; ++row) {
    if (!in.labels.empty() && in.labels[row] < 0) continue;
    const BoundedSoftmax s =
        bounded_softmax(logits.data() + row * vocab, vocab, options.logits_scale, delta[row], r);
    bounds.lse[row] = s.lse;
    bounds.label_log_prob[row] = s.log_q;
    double size = 0;
    for (const double log_q : s.exact.log_q) {
      if (std::isfinite(log_q)) size += std::exp(log_q) * (std::abs(log_q) + 2 * s.a_max);
    }
    bounds.entropy[row] = s.log_q + (s.q + r.gamma(static_cast<double>(vocab))) * size;
  }

  bounds.d_logits.assign(n_tok * vocab, 0);
  for (size_t t = 0; t < contexts.size(); ++t) {
    TermContext& c = contexts[t];
    const LossTerm& term = c.term;
    const bool distills = term.kind == LossKind::kDistillation;
    c.logits = logits.data();
    if (distills) {
      c.teacher = &config.teachers[term.teacher];
      c.teacher_logits = teacher_logits[term.teacher].data();
    }
    const double scale = c.scale() / (distills ? term.student_temperature : 1);
    std::vector<BoundedSoftmax> softmax(n_tok);
    for (int64_t row = 0; row < n_tok; ++row) {
      if (!c.counts(row)) continue;
      softmax[row] = bounded_softmax(logits.data() + row * vocab, vocab, scale, delta[row], r);
    }
    std::vector<RowBound> rows(n_tok);
    double sum = 0;
    if (term.kind == LossKind::kDpo) {
      rows = preference_bounds(c, softmax, r, sum);
    } else if (term.kind == LossKind::kGrpo || term.kind == LossKind::kGspo ||
               term.kind == LossKind::kCispo) {
      rows = policy_bounds(c, softmax, r);
    }
    const double factor = distills && term.t_squared ? term.temperature * term.temperature : 1;
    const double divisor = expected.divisors[t];
    const double per_divisor = divisor == 0 ? 0 : 1 / divisor;
    double row_losses = 0;
    for (int64_t row = 0; row < n_tok; ++row) {
      if (!c.counts(row)) continue;
      const BoundedSoftmax& s = softmax[row];
      if (term.kind == LossKind::kCrossEntropy) rows[row] = cross_entropy_bound(c, row, s, r);
      if (term.kind == LossKind::kZLoss) rows[row] = z_loss_bound(s, r);
      if (distills) rows[row] = distillation_bound(c, row, s, teacher_delta[term.teacher][row], r);
      sum += factor * rows[row].loss;
      row_losses += std::abs(expected.term_row_loss[t][row]);
      bounds.token_loss[row] +=
          std::abs(term.weight) *
          (factor * rows[row].loss + 8 * 0x1p-53 * std::abs(expected.term_row_loss[t][row]));

      const double upstream = std::abs(term.weight * in.upstream *
                                       (in.upstream_rows.empty() ? 1 : in.upstream_rows[row]));
      // d (1 - tanh^2) is at most 2 |dz| / cap.
      const double cap_error = options.softcap > 0 ? 2 * delta[row] / options.softcap + 8 * r.u : 0;
      for (int64_t j = 0; j < vocab; ++j) {
        const int64_t i = row * vocab + j;
        const double size = std::abs(expected.term_d_logits[t][i]);
        const double before_cap = slope[i] > 0 ? size / slope[i] : 0;
        bounds.d_logits[i] += upstream * (factor * per_divisor * scale * slope[i] * rows[row].d[j] +
                                          before_cap * cap_error + 16 * r.u * size +
                                          static_cast<double>(gradient_parts - 1) * unit * size);
      }
    }
    // Rows are added up in float64.
    const double scalar =
        per_divisor * (sum + 0x1p-53 * static_cast<double>(n_tok + 8) * (row_losses + sum)) +
        8 * 0x1p-53 * std::abs(expected.terms[t]);
    bounds.terms.push_back(scalar);
    bounds.total += std::abs(term.weight) * (scalar + 0x1p-50 * std::abs(expected.terms[t]));
  }
  for (size_t i = 0; i < bounds.d_logits.size() && unit > 0; ++i) {
    bounds.d_logits[i] += unit * (std::abs(expected.d_logits[i]) + bounds.d_logits[i]);
  }
  if (d_model > 0) product_bounds(config, in, expected, weight, read, r, unit, bounds);
  return bounds;
}

}  // namespace ullage::reference
