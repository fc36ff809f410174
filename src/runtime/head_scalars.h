// The scalar half of a run: from the statistics of rows to losses, divisors, coefficients of the
// gradient and metrics. float64, in row order; nothing here touches a column.
#pragma once

#include <cstdint>
#include <span>

#include "contract/head_validate.h"
#include "plan/head_plan.h"
#include "ullage/lossk/head.h"

namespace ullage::lossk {

// grad_a_j = p q_j - l [j = y] - u w_j + (distillations of full rows), over the terms of one group.
struct RowCoefficients {
  double p = 0, l = 0, u = 0;
};

// Views of the workspace; every array is [n_tok] for each group, term or distillation.
class HeadScalars {
 public:
  HeadScalars(const HeadLayout& layout, const Inputs& inputs, std::span<std::byte> statistics);

  // The rows that are not ignored, ascending.
  std::span<const int64_t> live_rows() const { return {live_, static_cast<size_t>(n_live_)}; }

  SoftmaxStatistics& softmax(int group, int64_t row) { return softmax_[group * n_tok_ + row]; }
  const SoftmaxStatistics& softmax(int group, int64_t row) const {
    return softmax_[group * n_tok_ + row];
  }
  TeacherStatistics& teacher(int term, int64_t row) {
    return teachers_[layout_.distillation[static_cast<size_t>(term)] * n_tok_ + row];
  }
  TermRow& term_row(int term, int64_t row) { return terms_[term * n_tok_ + row]; }

  bool has_label(int64_t row) const { return inputs_.labels && inputs_.labels[row] >= 0; }

  // The row's label as a column, or -1 where it has none or another shard has it.
  int64_t label(int64_t row) const {
    const int64_t column =
        has_label(row) ? inputs_.labels[row] - layout_.config.options.vocab_offset : -1;
    return column >= 0 && column < layout_.shape.vocab ? column : -1;
  }

  // Whether the outputs of rows report it: it has a label, or there are no labels.
  bool reports(int64_t row) const { return !inputs_.labels || inputs_.labels[row] >= 0; }

  // Losses and slopes of the row under every term that counts it and does not wait for a segment.
  // Of a shard: once its group's statistics, where given, have taken the place of the row's own.
  void finish_row(int64_t row);

  // The same for the terms over whole segments, once every row has its statistics.
  void finish_segments();

  // upstream * weight / divisor of a term on a row; 0 where the term does not count it.
  double gain(int term, int64_t row) const;

  // Over the label terms of the group.
  RowCoefficients coefficients(int group, int64_t row) const;

  // p q_y - l at the row's label, without the cancellation of q_y near 1.
  double label_gradient(int group, int64_t row, const RowCoefficients& c) const;

  // Everything in `outputs` that is one number per run or per row.
  void report(const Outputs& outputs) const;

 private:
  double row_count(int term) const;
  double default_divisor(int term) const;
  double log_probability(int term, int64_t row) const {
    const SoftmaxStatistics& s = softmax(layout_.group_of[static_cast<size_t>(term)], row);
    return s.label - s.log_sum;
  }
  double class_weight(int64_t label) const;
  double smoothed_columns() const {
    return static_cast<double>(whole_vocab(layout_.config.options, layout_.shape.vocab));
  }
  void place_in_group(int64_t row);
  double label_log_prob(const SoftmaxStatistics& s, int64_t row) const;
  void sort_segments();
  void finish_gspo(int term);
  void finish_dpo(int term);
  TermRow token_term(int term, int64_t row) const;
  std::span<const int64_t> rows_of(int64_t segment) const;
  double sum_of(int term) const;
  PolicyMetrics metrics(int term) const;

  const HeadLayout& layout_;
  const Inputs& inputs_;
  int64_t n_tok_;

  SoftmaxStatistics* softmax_;
  TeacherStatistics* teachers_;
  TermRow* terms_;
  double* divisors_;  // [n_terms]
  double* extra_;     // [n_terms] losses that belong to no row: those of pairs
  int64_t* live_;
  int64_t* order_;           // labelled rows by segment, then row
  int64_t* segment_length_;  // [n_tok] labelled rows of the row's segment, or of the batch

  int64_t n_live_ = 0;
  int64_t n_labelled_ = 0;
  double smoothing_mass_ = 0;  // sum_j w_j
};

}  // namespace ullage::lossk
