// The plan of the losses at the head on the CPU: softmax groups, chunk, and every byte of the
// workspace by purpose. Pure: it reads nothing but its arguments.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/head_rows.h"
#include "cpu/product.h"
#include "ullage/lossk/head.h"

namespace ullage::lossk {

// One softmax over the vocabulary, shared by the terms with the same scale of the logits.
struct SoftmaxGroup {
  double scale;
  std::vector<int> terms;  // indices into the configuration's, ascending
};

// What a sweep over the columns leaves of one softmax of a row (see cpu/head_rows.h).
struct SoftmaxStatistics {
  double max;       // of u
  double sum;       // sum_j exp(a_j - scale * max)
  double log_sum;   // ln sum
  double label;     // a_y - scale * max, where the row has a label
  double distance;  // sum_j w_j (a_j - scale * max), w the class weights or 1; for label smoothing
  double entropy;
};

// The same of a teacher's row under one distillation term.
struct TeacherStatistics {
  double max;
  double sum;
  double log_sum;
  cpu::RowDivergence divergence;
  double log_q_tail;  // top-k: ln of the student's mass outside the k ids
};

// A row's loss under one term (unweighted, undivided), and its slope in lp for the terms that are
// functions of lp alone.
struct TermRow {
  double loss;
  double slope;
};

// Part of the workspace.
struct Slot {
  int64_t offset = 0;
  int64_t bytes = 0;
};

// [..] below is a shape in elements; T the accumulate type.
struct HeadSlots {
  Slot logits;                       // T [chunk][strip]
  Slot best;                         // RowBest [chunk]: the arg-max so far, in strips
  std::vector<Slot> teacher_logits;  // f32 or f64 [chunk][vocab], one for every teacher; empty but
                                     // for those from hidden states
  Slot hidden;                       // input dtype [chunk][d_model]: rows that are not ignored
  std::vector<Slot> teacher_hidden;  // teacher's dtype [chunk][teacher's d_model]
  Slot d_hidden;                     // T [chunk][d_model]
  Slot adapter_rows;                 // T [chunk][rank]: adapter_scale * x A^T
  Slot d_adapter_rows;               // T [chunk][rank]: adapter_scale * g B
  Slot d_weight;                     // T [vocab][d_model], where it is stored in another type
  Slot d_adapter_a;                  // T [rank][d_model]
  Slot d_adapter_b;                  // T [vocab][rank]
  Slot d_bias;                       // T [vocab]
  Slot columns;                      // T [2][vocab]: bias, class weights
  Slot scratch;                      // T [n_threads][scratch_rows][padded vocab]
  Slot statistics;                   // of rows, terms, segments: see carve in head_plan.cc
  Slot product;                      // packing
};

struct HeadLayout {
  Shape shape;
  HeadConfig config;
  Request request;
  DType accumulate = DType::kF32;
  int n_threads = 1;

  std::vector<SoftmaxGroup> groups;
  int base_group = 0;         // the group of scale options.logits_scale: what lse, label_log_prob
                              // and entropy report
  std::vector<int> group_of;  // [n_terms]
  std::vector<int> distillation;  // [n_terms]: rank among the distillation terms, or -1
  int n_distillation = 0;
  std::vector<bool> teacher_used;  // [n_teachers]: by some term
  bool gradient = false;           // any was requested
  bool two_pass = false;           // statistics of every row before the first gradient
  bool smoothing = false;          // some term smooths its labels
  bool top_k = false;              // some teacher gives its k most likely ids

  bool changes_logits = false;       // bias or softcap
  bool needs_effective_row = false;  // some term sweeps the row more often than once, or by columns
  bool reads_row_again = false;      // ... after the exponentials of its softmax
  // The one group with a gradient, where all of that is p q_j - l [j = y] of unchanged logits or of
  // logits plus bias; else -1.
  int one_label_group = -1;
  // The one distillation, from a whole row of a teacher, in the one group with a gradient: what its
  // divergence leaves of the row can wait for the gradient. Else -1.
  int sole_divergence = -1;

  // Scratch rows of a thread: which exist, in this order. A divergence leaves its x in `teacher`
  // and its e in `exponentials`, or for a sole one where the gradient will be (see cpu::KeptRow).
  bool scratch_student = false, scratch_teacher = false, scratch_exponentials = false,
       scratch_gradient = false;
  int scratch_rows() const {
    return scratch_student + scratch_teacher + scratch_exponentials + scratch_gradient;
  }
  int64_t scratch_stride = 0;  // elements of T in one scratch row: vocab and row_blocks(vocab) more

  std::string mode;
  int64_t chunk = 0;                             // rows at a time
  int64_t strip = 0;                             // columns at a time: vocab, or whole blocks of it
  int64_t packed_bytes = cpu::kMostPackedBytes;  // of a product's operand at a time
  int64_t n_chunks = 0;
  HeadSlots slots;
  std::vector<Booking> bookings;
  int64_t workspace_bytes = 0;
  int64_t materialized_bytes = 0;
  double operations = 0;
  std::vector<Rejection> rejections;

  bool from_hidden() const { return shape.d_model > 0; }
  bool strips() const { return strip < shape.vocab; }
  // A shard's statistics come from its group with the run that has a gradient.
  bool makes_strips_twice() const { return gradient && config.options.group_vocab == 0; }
  // Whether logits are made a chunk at a time, the student's or a teacher's.
  bool makes_logits() const { return from_hidden() || makes_teacher_logits(); }
  bool makes_teacher_logits() const;
  bool makes_logits_of(size_t teacher) const {
    return teacher_used[teacher] && config.teachers[teacher].kind == TeacherKind::kHidden;
  }
  bool is_top_k(int term) const;
  bool needs_tail(int term) const;     // top-k with a tail bin
  bool has_gradient(int group) const;  // some term of it has a weight
  int64_t n_terms() const { return static_cast<int64_t>(config.terms.size()); }
};

// The part of `plan` after validation. Errors: 581, 583, 587, 696.
Result<HeadLayout> plan_head(const Shape& shape, const HeadConfig& config, const Request& request,
                             const PlanLimits& limits, int n_threads);

}  // namespace ullage::lossk
