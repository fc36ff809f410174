// One row of the head on the CPU: statistics of its softmaxes, then its gradient. What lies
// between, the scalars, is HeadScalars'.
#pragma once

#include <cassert>
#include <cstdint>
#include <span>

#include "cpu/head_rows.h"
#include "plan/head_plan.h"
#include "runtime/head_scalars.h"

namespace ullage::lossk {

// A row of logits or of a teacher's, [vocab] adjacent elements.
using RowView = cpu::RowSource;

// Where a row's gradient goes, [vocab] adjacent elements; may be the row of logits itself.
struct RowTarget {
  void* data = nullptr;
  DType dtype = DType::kF32;
  bool accumulate = false;

  // A row without gradient: zeros, or what the caller accumulates in as it is.
  void add_nothing(int64_t vocab) const;
};

// What the rows of a run share. T is the accumulate type.
template <class T>
struct RowContext {
  const HeadLayout& layout;
  const Inputs& inputs;
  HeadScalars& scalars;
  const cpu::RowKernels<T>& kernels;
  const T* bias;           // [vocab], or null
  const T* class_weights;  // [vocab], or null: ones
  std::span<T> scratch;    // [n_threads][scratch rows][layout.scratch_stride]
  // What was asked for beyond losses and gradients.
  bool base_outputs;  // lse, its parts, label_log_prob or entropy
  bool entropy;       // per row
  bool metrics;
  bool single_sweep;  // the statistics of a row are one sweep over it, and nothing else reads it

  bool needs(int group) const {
    const bool used = !layout.groups[static_cast<size_t>(group)].terms.empty();
    return used || (group == layout.base_group && base_outputs);
  }
  cpu::RowSoftmax<T> student(int group, int64_t row) const {
    const SoftmaxStatistics& s = scalars.softmax(group, row);
    return {static_cast<T>(layout.groups[static_cast<size_t>(group)].scale), static_cast<T>(s.max),
            static_cast<T>(s.log_sum), static_cast<T>(1 / s.sum)};
  }

  // A worker's scratch rows, [layout.scratch_stride] each: room for block maxima behind the
  // columns.
  T* student_scratch(int worker) const {
    assert(layout.scratch_student && "planned for no row that is read in T");
    return scratch_row(worker, 0);
  }
  T* teacher_scratch(int worker) const { return scratch_row(worker, layout.scratch_student); }
  T* exponentials_scratch(int worker) const {
    return scratch_row(worker, layout.scratch_student + layout.scratch_teacher);
  }
  T* gradient_scratch(int worker) const { return scratch_row(worker, layout.scratch_rows() - 1); }
  T* scratch_row(int worker, int index) const {
    return scratch.data() + (worker * layout.scratch_rows() + index) * layout.scratch_stride;
  }
};

// The row of a teacher with logits, by its index in the configuration. Borrows the callable.
class TeacherRows {
 public:
  template <class Callable>
  TeacherRows(const Callable& callable)  // NOLINT: a callable is one
      : callable_(&callable), call_([](const void* c, size_t teacher) {
          return (*static_cast<const Callable*>(c))(teacher);
        }) {}
  RowView operator()(size_t teacher) const { return call_(callable_, teacher); }

 private:
  const void* callable_;
  RowView (*call_)(const void*, size_t);
};

template <class T>
class HeadRow {
 public:
  HeadRow(const RowContext<T>& context, int64_t row, int worker, RowView logits,
          TeacherRows teachers);

  // Fills the row's statistics. Where the row's gradient follows at once, its exponentials are kept
  // in `out`'s row or in scratch.
  void statistics(const RowTarget* gradient_follows);

  void gradient(const RowTarget& out);

  // The smallest index of the largest logit.
  int64_t argmax() const;

 private:
  RowView effective();
  T* exponentials_at(const RowTarget& out) const;
  T* block_max() const;
  RowView student_row();
  RowView teacher_row(int term) const;
  cpu::RowSoftmax<T> teacher(int term) const;
  cpu::KeptRow<T> kept_row(const RowTarget* out, bool whole) const;
  cpu::RowSum sweep_both(int term, const cpu::KeptRow<T>& kept);
  void finish_both(int term, const cpu::KeptRow<T>& kept);
  int divergence_of(int group) const;
  double teacher_scale(int term) const;
  double log_q_tail(int term);
  template <class Use>
  auto with_top_k(int term, Use&& use);
  void store_through_scratch(const RowTarget& out, int group, const RowCoefficients& sum);
  void add_group(int group, const RowTarget& out, bool add, T* g);

  const RowContext<T>& c_;
  int64_t row_;
  int worker_;
  RowView logits_;
  TeacherRows teachers_;
  int64_t vocab_;
  int64_t label_;
  bool kept_ = false;     // what the gradient needs of the sweep lies where `gradient` looks
  const T* u_ = nullptr;  // the effective logits, once made
};

extern template class HeadRow<float>;
extern template class HeadRow<double>;

}  // namespace ullage::lossk
