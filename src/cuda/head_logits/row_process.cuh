// From a row's sums to its terms, its outputs and what its gradient needs; by one warp a row, the
// same code for a cluster that keeps the row in shared memory and for a block that streams it. (Of
// short rows, by one lane: short_rows.cuh.)
#pragma once

#include "cuda/head_logits/row_fold.cuh"
#include "cuda/head_logits/row_gradient.cuh"
#include "cuda/head_logits/row_outputs.cuh"
#include "cuda/head_logits/top_k.cuh"

namespace ullage::lossk::cuda {

// A row that no term counts and that has no label: nothing of it is read.
__device__ inline void clear_row(const HeadParams& p, int64_t row, int lane) {
  if (lane < p.n_terms) p.row_losses[lane * p.n_tok + row] = 0;
  write_outputs(p, row, {}, lane);
}

// A row whose terms are evaluated: what its gradient waits for, and what its outputs are made of.
struct FinishedRow {
  RowWord word;
  float log_prob;  // of the label
};

// `term`, `gain`: of this lane. `writes`: this warp writes the row's losses.
template <class Kind>
__device__ inline FinishedRow finish_row(const HeadParams& p, const TermParams& term, int64_t row,
                                         const RowInputs& in, RowSums sums, float gain, int lane,
                                         bool writes) {
  FinishedRow done;
  done.log_prob = in.label >= 0 ? label_log_prob<Kind>(p, in, sums) : 0.0f;
  // A shard has no dense teacher.
  if constexpr (!Kind::kHasTeacher) {
    if (p.is_shard) done.log_prob = place_in_group(p, row, in, sums, done.log_prob);
  }
  TopKTerm top_k;
  if constexpr (!Kind::kHasTeacher) {
    for (int t = 0; p.top_k > 0 && t < p.n_terms; ++t) {
      if (!p.terms[t].top_k) continue;
      const TopKLoss total = top_k_loss(p, p.terms[t], row, sums, lane);
      if (lane == t) top_k = {total.loss, total.dense};
    }
  }
  done.word.sums = sums;
  done.word.c = evaluate_terms<Kind::kFamily>(p, term, row, in, sums, gain, done.log_prob, top_k,
                                              lane, writes);
  done.word.scales = gradient_scales<Kind::kFamily>(sums, done.word.c);
  done.word.label = static_cast<int>(in.label);
  return done;
}

// The same in three steps, of a family with extras of its own: no coefficient hangs on them, so
// only the word's sums and scales wait for the second exchange, and the losses for nobody.
template <class Kind>
__device__ inline FinishedRow begin_row(const HeadParams& p, const TermParams& term, int64_t row,
                                        const RowInputs& in, const RowSums& sums, float gain,
                                        int lane) {
  static_assert(kOwnExtras<Kind::kFamily> > 0);
  FinishedRow done;
  done.log_prob = in.label >= 0 ? label_log_prob<Kind>(p, in, sums) : 0.0f;
  done.word.c =
      evaluate_terms<Kind::kFamily>(p, term, row, in, sums, gain, done.log_prob, {}, lane, false);
  done.word.label = static_cast<int>(in.label);
  return done;
}
template <class Kind>
__device__ inline void complete_word(const RowSums& sums, RowWord& word) {
  word.sums = sums;
  word.scales = gradient_scales<Kind::kFamily>(sums, word.c);
}
template <class Kind>
__device__ inline void write_losses(const HeadParams& p, const TermParams& term, int64_t row,
                                    const RowInputs& in, const FinishedRow& done, float gain,
                                    int lane) {
  RowCoefficients unused;
  if (lane >= p.n_terms || !term.here || term.sequence >= 0) return;
  p.row_losses[lane * p.n_tok + row] =
      term_of_row<Kind::kFamily>(p, term, row, in, done.word.sums, gain, done.log_prob, {}, unused);
}

// What a row reports.
__device__ inline RowReport report_of(const HeadParams& p, int64_t row, const RowInputs& in,
                                      const FinishedRow& done) {
  const RowSums& sums = done.word.sums;
  RowReport said = row_report(p, row, is_reported(p, in), in, sums, done.log_prob);
  // The maximum itself, so without what rounding the reference took. Nothing but -inf sums to 0.
  const float off = fmaf(sums.max, p.log2_scale, -sums.reference);
  said.shift = sums.max;
  said.log_sum = kLn2 * (sums.log2_sum - (sums.sum > 0 ? off : 0));
  const auto columns = p.group_shift.data != nullptr ? p.smoothed_columns : p.vocab;
  said.distance = kLn2 * fmaf(-static_cast<float>(columns), off, sums.smooth);
  return said;
}
template <class Kind>
__device__ inline void report_non_finite(const HeadParams& p, int64_t row, const RowSums& sums) {
  const bool finite =
      sums.stored_max < INFINITY && (!Kind::kHasTeacher || sums.teacher_max < INFINITY);
  if (!finite) report(p, row, Fault::kNonFinite);
}

// The whole of a row by one lane, but for a top-k teacher's terms.
template <class Kind>
__device__ inline RowWord finish_row_alone(const HeadParams& p, int64_t row, const RowInputs& in,
                                           RowSums sums) {
  FinishedRow done;
  done.log_prob = in.label >= 0 ? label_log_prob<Kind>(p, in, sums) : 0.0f;
  if constexpr (!Kind::kHasTeacher) {
    if (p.is_shard) done.log_prob = place_in_group(p, row, in, sums, done.log_prob);
  }
  done.word.sums = sums;
  done.word.c = evaluate_terms_alone<Kind::kFamily>(p, row, in, sums, done.log_prob);
  done.word.scales = gradient_scales<Kind::kFamily>(sums, done.word.c);
  done.word.label = static_cast<int>(in.label);
  write_outputs_alone(p, row, report_of(p, row, in, done));
  report_non_finite<Kind>(p, row, sums);
  return done.word;
}

template <class Kind>
__device__ inline void write_finished_row(const HeadParams& p, int64_t row, const RowInputs& in,
                                          const FinishedRow& done, int lane) {
  write_outputs(p, row, report_of(p, row, in, done), lane);
  if (lane != 0) return;
  report_non_finite<Kind>(p, row, done.word.sums);
  if (p.row_words != nullptr) static_cast<RowWord*>(p.row_words)[row] = done.word;
}

// Rounds before a strip. Rows in thirds are short.
template <class Int>
__device__ inline Int first_round(const RowCut& cut, Int strip) {
  const Int part = strip * cut.n_rounds >> cut.log2_strips;
  return cut.in_thirds ? static_cast<Int>(static_cast<unsigned>(part) / 3) : part;
}
// The first column of a strip; its number and the rounds multiply to less than 2^31.
__device__ inline int first_column(const HeadParams& p, int strip) {
  return first_round(p.cut, strip) * kWarpColumns;
}
// The columns of strips `first` to before `last`.
__device__ inline int columns_between(const HeadParams& p, int first, int last) {
  const int from = first_column(p, first);
  const int64_t to = first_round(p.cut, int64_t{last}) * kWarpColumns;
  return static_cast<int>((to < p.vocab ? to : p.vocab) - from);
}

}  // namespace ullage::lossk::cuda
