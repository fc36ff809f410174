#include "runtime/head_row.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "contract/head_validate.h"
#include "cpu/storage.h"
#include "runtime/top_k_row.h"

namespace ullage::lossk {
namespace {

template <class T>
constexpr DType kTypeOf = std::is_same_v<T, double> ? DType::kF64 : DType::kF32;

}  // namespace

void RowTarget::add_nothing(int64_t vocab) const {
  if (!accumulate) std::memset(data, 0, static_cast<size_t>(vocab * size_of(dtype)));
}

template <class T>
HeadRow<T>::HeadRow(const RowContext<T>& context, int64_t row, int worker, RowView logits,
                    TeacherRows teachers)
    : c_(context),
      row_(row),
      worker_(worker),
      logits_(logits),
      teachers_(teachers),
      vocab_(context.layout.shape.vocab),
      label_(context.scalars.label(row)) {
  if (!c_.layout.scratch_student && logits_.dtype == kTypeOf<T>) {
    u_ = static_cast<const T*>(logits_.data);
  }
}

// The effective logits u: the row itself where nothing changes it, else scratch.
template <class T>
RowView HeadRow<T>::effective() {
  if (!u_) {
    T* const made = c_.student_scratch(worker_);
    c_.kernels.prepare(logits_.data, logits_.dtype, c_.bias,
                       static_cast<T>(c_.layout.config.options.softcap), vocab_, made);
    u_ = made;
  }
  return {u_, kTypeOf<T>};
}

// The same in the type in which it lies, for kernels that read any.
template <class T>
RowView HeadRow<T>::student_row() {
  return c_.layout.changes_logits ? effective() : logits_;
}

template <class T>
RowView HeadRow<T>::teacher_row(int term) const {
  return teachers_(static_cast<size_t>(c_.layout.config.terms[static_cast<size_t>(term)].teacher));
}

template <class T>
double HeadRow<T>::teacher_scale(int term) const {
  const LossTerm& t = c_.layout.config.terms[static_cast<size_t>(term)];
  return c_.layout.config.options.logits_scale * t.logits_scale / t.temperature;
}

template <class T>
cpu::RowSoftmax<T> HeadRow<T>::teacher(int term) const {
  const TeacherStatistics& s = c_.scalars.teacher(term, row_);
  return {static_cast<T>(teacher_scale(term)), static_cast<T>(s.max), static_cast<T>(s.log_sum),
          static_cast<T>(1 / s.sum)};
}

// use(TopKRow) for a top-k term.
template <class T>
template <class Use>
auto HeadRow<T>::with_top_k(int term, Use&& use) {
  const LossTerm& t = c_.layout.config.terms[static_cast<size_t>(term)];
  const auto index = static_cast<size_t>(t.teacher);
  const int64_t k = c_.layout.config.teachers[index].k;
  const TeacherInputs& given = c_.inputs.teachers[index];
  const int group = c_.layout.group_of[static_cast<size_t>(term)];
  const SoftmaxStatistics& s = c_.scalars.softmax(group, row_);
  const double scale = c_.layout.groups[static_cast<size_t>(group)].scale;
  const T* const u = static_cast<const T*>(effective().data);
  const auto log_p = [&, k](int64_t i) { return cpu::value_at(given.log_probs, row_ * k + i); };
  const auto log_q = [&, k](int64_t i) {
    return scale * (static_cast<double>(u[given.ids[row_ * k + i]]) - s.max) - s.log_sum;
  };
  return use(TopKRow(t, k, k == vocab_, log_p, log_q, c_.scalars.teacher(term, row_).log_q_tail));
}

// ln of the student's mass outside the k ids, from a copy of the row without them: 1 - sum q would
// lose its digits where they hold nearly everything.
template <class T>
double HeadRow<T>::log_q_tail(int term) {
  const HeadLayout& layout = c_.layout;
  const auto index = static_cast<size_t>(layout.config.terms[static_cast<size_t>(term)].teacher);
  const int64_t k = layout.config.teachers[index].k;
  const int group = layout.group_of[static_cast<size_t>(term)];
  const double scale = layout.groups[static_cast<size_t>(group)].scale;
  const SoftmaxStatistics& s = c_.scalars.softmax(group, row_);
  const RowView view = effective();
  T* const rest = c_.teacher_scratch(worker_);
  c_.kernels.prepare(view.data, view.dtype, nullptr, T(0), vocab_, rest);
  for (int64_t i = 0; i < k; ++i) {
    rest[c_.inputs.teachers[index].ids[row_ * k + i]] = -std::numeric_limits<T>::infinity();
  }
  const cpu::RowSum sum = c_.kernels.exponentials(rest, kTypeOf<T>, static_cast<T>(scale), vocab_,
                                                  {}, nullptr, nullptr);
  // A tail of masked columns alone has no maximum to be distant from.
  if (sum.sum == 0) return -std::numeric_limits<double>::infinity();
  return scale * (sum.max - s.max) + std::log(sum.sum) - s.log_sum;
}

// The gradient's own row where it may be written before the logits were last read, else scratch.
template <class T>
T* HeadRow<T>::exponentials_at(const RowTarget& out) const {
  const bool holds = out.dtype == kTypeOf<T> && !out.accumulate;
  const bool free = out.data != logits_.data || c_.single_sweep;
  return holds && free ? static_cast<T*>(out.data) : c_.gradient_scratch(worker_);
}

// Behind the gradient's scratch row.
template <class T>
T* HeadRow<T>::block_max() const {
  return c_.gradient_scratch(worker_) + vocab_;
}

// Where a divergence leaves the row for a gradient in `out`, or for none.
template <class T>
cpu::KeptRow<T> HeadRow<T>::kept_row(const RowTarget* out, bool whole) const {
  const bool sole = c_.layout.sole_divergence >= 0;
  T* const scratch = sole ? c_.gradient_scratch(worker_) : c_.exponentials_scratch(worker_);
  T* const x = c_.teacher_scratch(worker_);
  return {sole && out ? exponentials_at(*out) : scratch, scratch + vocab_, x, x + vocab_, whole};
}

// The first distillation of the group from a whole row of a teacher, whose sweep gives the group's
// softmax too; -1 where none counts the row.
template <class T>
int HeadRow<T>::divergence_of(int group) const {
  for (const int term : c_.layout.groups[static_cast<size_t>(group)].terms) {
    const LossTerm& t = c_.layout.config.terms[static_cast<size_t>(term)];
    if (t.kind != LossKind::kDistillation || c_.layout.is_top_k(term)) continue;
    if (counts_row(t, c_.inputs, row_)) return term;
  }
  return -1;
}

// The sweep over the student's and a teacher's row; the student's sum.
template <class T>
cpu::RowSum HeadRow<T>::sweep_both(int term, const cpu::KeptRow<T>& kept) {
  const LossTerm& t = c_.layout.config.terms[static_cast<size_t>(term)];
  const auto group = static_cast<size_t>(c_.layout.group_of[static_cast<size_t>(term)]);
  const cpu::DivergenceSums sums = c_.kernels.divergence(
      t.divergence, student_row(), static_cast<T>(c_.layout.groups[group].scale), teacher_row(term),
      static_cast<T>(teacher_scale(term)), vocab_, kept);
  TeacherStatistics& s = c_.scalars.teacher(term, row_);
  s.max = sums.teacher.max;
  s.sum = sums.teacher.sum;
  s.log_sum = std::log(sums.teacher.sum);
  s.divergence = {sums.loss, 0};
  return sums.student;
}

// What waits for the student's softmax.
template <class T>
void HeadRow<T>::finish_both(int term, const cpu::KeptRow<T>& kept) {
  const LossTerm& t = c_.layout.config.terms[static_cast<size_t>(term)];
  if (t.divergence != Divergence::kJensenShannon) return;
  c_.scalars.teacher(term, row_).divergence = c_.kernels.jensen_shannon(
      student_row(), c_.student(c_.layout.group_of[static_cast<size_t>(term)], row_),
      teacher_row(term), teacher(term), static_cast<T>(t.beta), vocab_, kept);
}

template <class T>
void HeadRow<T>::statistics(const RowTarget* gradient_follows) {
  const HeadLayout& layout = c_.layout;
  const bool sweeps_again = layout.smoothing || c_.entropy || c_.metrics;
  const RowView view = sweeps_again ? effective() : student_row();
  const auto kept_by = [&](int term) {
    const LossTerm& t = layout.config.terms[static_cast<size_t>(term)];
    const bool keeps = gradient_follows && term == layout.sole_divergence;
    kept_ |= keeps;
    return kept_row(keeps ? gradient_follows : nullptr,
                    keeps || t.divergence == Divergence::kJensenShannon);
  };
  for (int group = 0; group < static_cast<int>(layout.groups.size()); ++group) {
    const SoftmaxGroup& g = layout.groups[static_cast<size_t>(group)];
    const bool is_base = group == layout.base_group;
    if (!c_.needs(group)) continue;
    SoftmaxStatistics& s = c_.scalars.softmax(group, row_);
    // Before the sweep below overwrites a row in place.
    const double label_logit = label_ >= 0 ? cpu::load_double(view.data, view.dtype, label_) : 0;
    const int divergence = divergence_of(group);
    cpu::RowSum row;
    if (divergence >= 0) {
      row = sweep_both(divergence, kept_by(divergence));
    } else {
      T* kept = nullptr;
      if (gradient_follows && group == layout.one_label_group) {
        kept = exponentials_at(*gradient_follows);
        kept_ = true;
      }
      row = c_.kernels.exponentials(view.data, view.dtype, static_cast<T>(g.scale), vocab_, {},
                                    kept, kept ? block_max() : nullptr);
    }
    s.max = row.max;
    s.sum = row.sum;
    s.log_sum = std::log(row.sum);
    s.label = label_ >= 0 ? g.scale * (label_logit - s.max) : 0;
    if (divergence >= 0) finish_both(divergence, kept_by(divergence));
    if (layout.smoothing && !g.terms.empty()) {
      s.distance =
          g.scale * c_.kernels.weighted_distance(static_cast<const T*>(view.data), c_.class_weights,
                                                 static_cast<T>(s.max), vocab_);
    }
    if ((is_base && c_.entropy) || (!g.terms.empty() && c_.metrics)) {
      s.entropy =
          c_.kernels.entropy(static_cast<const T*>(view.data), c_.student(group, row_), vocab_);
    }
  }
  for (int term = 0; term < layout.n_terms(); ++term) {
    const LossTerm& t = layout.config.terms[static_cast<size_t>(term)];
    if (t.kind != LossKind::kDistillation || !counts_row(t, c_.inputs, row_)) continue;
    if (layout.is_top_k(term)) {
      if (layout.needs_tail(term)) c_.scalars.teacher(term, row_).log_q_tail = log_q_tail(term);
      c_.scalars.teacher(term, row_).divergence.loss =
          with_top_k(term, [](const auto& row) { return row.loss(); });
    } else if (divergence_of(layout.group_of[static_cast<size_t>(term)]) != term) {
      sweep_both(term, kept_by(term));
      finish_both(term, kept_by(term));
    }
  }
}

// One group's share of d total / d u.
template <class T>
void HeadRow<T>::add_group(int group, const RowTarget& out, bool add, T* g) {
  const HeadLayout& layout = c_.layout;
  const double scale = layout.groups[static_cast<size_t>(group)].scale;
  const auto& terms = layout.groups[static_cast<size_t>(group)].terms;
  const cpu::RowSoftmax<T> q = c_.student(group, row_);
  RowCoefficients sum = c_.scalars.coefficients(group, row_);
  const auto each_distillation = [&](bool top_k, auto&& use) {
    for (const int term : terms) {
      const LossTerm& t = layout.config.terms[static_cast<size_t>(term)];
      if (t.kind != LossKind::kDistillation) continue;
      if (layout.is_top_k(term) != top_k) continue;
      const double gain = c_.scalars.gain(term, row_);
      if (gain != 0 || (kept_ && term == layout.sole_divergence)) use(term, t, gain);
    }
  };
  each_distillation(true, [&](int term, const LossTerm&, double gain) {
    sum.p += gain * with_top_k(term, [](const auto& row) { return row.dense(); });
  });
  // The first divergence has q at hand, and takes the label terms' share of it along.
  each_distillation(false, [&](int term, const LossTerm& t, double gain) {
    const cpu::KeptRow<T> kept = kept_row(&out, true);
    if (!kept_) {
      sweep_both(term, kept);
      finish_both(term, kept);
    }
    c_.kernels.divergence_gradient(t.divergence, kept, q, teacher(term), static_cast<T>(t.beta),
                                   c_.scalars.teacher(term, row_).divergence,
                                   static_cast<T>(scale * sum.p), static_cast<T>(scale * gain), add,
                                   vocab_, g);
    sum.p = 0;
    add = true;
  });
  if (sum.p != 0 || sum.u != 0) {
    c_.kernels.label_gradient(static_cast<const T*>(effective().data), q,
                              static_cast<T>(scale * sum.p), static_cast<T>(scale * sum.u),
                              c_.class_weights, add, vocab_, g);
    add = true;
  }
  if (!add) std::fill(g, g + vocab_, T(0));
  each_distillation(true, [&](int term, const LossTerm& t, double gain) {
    const auto index = static_cast<size_t>(t.teacher);
    const int64_t k = layout.config.teachers[index].k;
    with_top_k(term, [&](const auto& row) {
      for (int64_t i = 0; i < k; ++i) {
        const int64_t id = c_.inputs.teachers[index].ids[row_ * k + i];
        g[id] += static_cast<T>(scale * gain * row.sparse(i));
      }
    });
  });
  if (label_ >= 0) g[label_] -= static_cast<T>(scale * sum.l);
}

template <class T>
void HeadRow<T>::gradient(const RowTarget& out) {
  const HeadLayout& layout = c_.layout;
  if (const int group = layout.one_label_group; group >= 0) {
    const double scale = layout.groups[static_cast<size_t>(group)].scale;
    const RowCoefficients sum = c_.scalars.coefficients(group, row_);
    if (sum.p == 0 && sum.l == 0) return out.add_nothing(vocab_);
    T* const e = exponentials_at(out);
    if (!kept_) {
      const RowView view = layout.changes_logits ? effective() : logits_;
      c_.kernels.exponentials(view.data, view.dtype, static_cast<T>(scale), vocab_, {}, e,
                              block_max());
    }
    if ((out.dtype == DType::kF64) != (kTypeOf<T> == DType::kF64)) {
      store_through_scratch(out, group, sum);
      return;
    }
    const double old =
        label_ >= 0 && out.accumulate ? cpu::load_double(out.data, out.dtype, label_) : 0;
    c_.kernels.scale_exponentials(e, block_max(), c_.student(group, row_),
                                  static_cast<T>(scale * sum.p), vocab_, out.dtype, out.data,
                                  out.accumulate);
    if (label_ >= 0) {
      const double value = c_.scalars.label_gradient(group, row_, sum);
      cpu::store_double(old + scale * value, out.data, out.dtype, label_);
    }
    return;
  }
  const bool holds = out.dtype == kTypeOf<T> && !out.accumulate && out.data != logits_.data;
  T* const g = layout.sole_divergence >= 0 ? exponentials_at(out)
               : holds                     ? static_cast<T*>(out.data)
                                           : c_.gradient_scratch(worker_);
  bool add = false;
  for (int group = 0; group < static_cast<int>(layout.groups.size()); ++group) {
    if (!layout.has_gradient(group)) continue;
    add_group(group, out, add, g);
    add = true;
  }
  if (!add) std::fill(g, g + vocab_, T(0));
  if (layout.config.options.softcap > 0) {
    c_.kernels.softcap_slope(static_cast<const T*>(effective().data),
                             static_cast<T>(layout.config.options.softcap), vocab_, g);
  }
  if (g != out.data) c_.kernels.store(g, vocab_, out.dtype, out.data, out.accumulate);
}

// The gradient of one label group in a type that is not computed in T.
template <class T>
void HeadRow<T>::store_through_scratch(const RowTarget& out, int group,
                                       const RowCoefficients& sum) {
  const double scale = c_.layout.groups[static_cast<size_t>(group)].scale;
  T* const e = c_.gradient_scratch(worker_);
  c_.kernels.scale_exponentials(e, block_max(), c_.student(group, row_),
                                static_cast<T>(scale * sum.p), vocab_, kTypeOf<T>, e, false);
  if (label_ >= 0) {
    e[label_] = static_cast<T>(scale * c_.scalars.label_gradient(group, row_, sum));
  }
  c_.kernels.store(e, vocab_, out.dtype, out.data, out.accumulate);
}

template <class T>
int64_t HeadRow<T>::argmax() const {
  return c_.kernels.argmax(logits_.data, logits_.dtype, c_.bias, vocab_);
}

template class HeadRow<float>;
template class HeadRow<double>;

}  // namespace ullage::lossk
