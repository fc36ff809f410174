// The losses at the head: plan, caller's memory, run. Two doors, one room: the logits are given
// when the shape's d_model is 0 (`from_logits`); otherwise (`from_hidden`) they are made and
// reduced a chunk of rows at a time and never exist at once. The terms, their validation and their
// results are the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ullage/dtype.h"
#include "ullage/export.h"
#include "ullage/lossk/terms.h"
#include "ullage/plan.h"
#include "ullage/status.h"
#include "ullage/tensor.h"

namespace ullage::lossk {

struct Shape {
  int64_t n_tok = 0;
  int64_t d_model = 0;  // 0: the logits are given
  int64_t vocab = 0;
};

// What the caller will ask `run` for: all that changes the plan's memory or its operations.
struct Request {
  DType input_dtype = DType::kF32;     // logits, or hidden
  DType weight_dtype = DType::kF32;    // from_hidden; also of the adapter
  DType grad_dtype = DType::kF32;      // d_logits or d_hidden
  DType d_weight_dtype = DType::kF32;  // also of d_bias and the adapter's gradients
  bool d_logits = false;               // from_logits
  bool d_hidden = false;               // from_hidden; false: frozen, its product is skipped
  bool d_weight = false;
  bool d_bias = false;
  bool d_adapter = false;       // gradients of A and B
  bool entropy = false;         // per row
  bool policy_metrics = false;  // for every grpo and gspo term
};

enum class Implementation {
  kAuto,     // kFused
  kFused,    // every term in one pass
  kPerTerm,  // each term by itself, gradients added in the accumulate type: the parity mode
};

struct PlanLimits {
  int64_t budget_bytes = 0;  // workspace; 0: 256 MiB, or what one row needs where that is more
  int64_t chunk = 0;         // rows; 0: the largest that the budget allows
  int n_threads = 0;         // 0: as many as the machine has
  Implementation implementation = Implementation::kAuto;
};

// Inputs of one teacher; which are needed follows its kind.
struct TeacherInputs {
  MatrixView logits;     // [n_tok][vocab]
  MatrixView hidden;     // [n_tok][d_model]
  MatrixView weight;     // [vocab][d_model]
  IndexView ids;         // [n_tok * k], row-major, distinct within a row, in [0, vocab)
  VectorView log_probs;  // [n_tok * k], <= 0
};

struct Inputs {
  MatrixView logits;                // [n_tok][vocab]
  MatrixView hidden;                // [n_tok][d_model]
  MatrixView weight;                // [vocab][d_model]
  VectorView bias;                  // [vocab]
  MatrixView adapter_a, adapter_b;  // [r][d_model], [vocab][r]

  IndexView labels;  // [n_tok]; negative: the row is ignored; unless a term's mask counts it all
                     // the same, its logits, hidden and teacher are never read
  VectorView token_weights;        // [n_tok], cross_entropy
  VectorView class_weights;        // [vocab], cross_entropy
  std::span<const uint8_t> mask;   // [n_tok], for RowMask::kOwn
  VectorView advantages;           // [n_tok], policy terms
  VectorView old_log_probs;        // [n_tok], policy terms
  VectorView reference_log_probs;  // [n_tok], kl_beta > 0, and dpo
  IndexView segments;  // [n_tok], ids in [0, n_segments); not read where the label is negative
  int64_t n_segments = 0;
  IndexView pairs;  // [n_pairs * 2]: chosen, rejected segment, dpo
  std::vector<TeacherInputs> teachers;

  // Of a shard (HeadOptions::group_vocab): its group's row statistics, in the place of the rows'
  // own in every loss and gradient. All three, or none where the shard's own are asked for:
  // group.h.
  VectorView group_shift, group_log_sum, group_label_log_prob;  // [n_tok]
  VectorView group_distance;  // [n_tok], also where a term smooths its labels
  VectorView group_entropy;   // [n_tok], also with the outputs entropy or policy_metrics

  // The factor on every gradient: upstream * upstream_rows[row], the second where it is given.
  double upstream = 1;
  VectorView upstream_rows;  // [n_tok]
};

// Metrics of one grpo or gspo term, as the seed's system defines them: m the label mask, dw = m /
// (labelled tokens of the row's segment, or of the batch without segments), r the ratio (gspo: the
// segment's), vw = m for grpo and dw for gspo.
struct PolicyMetrics {
  double old_log_probs = 0, new_log_probs = 0;  // sum dw * lp_old, sum dw * lp
  double ratio = 0, kl = 0, clipped = 0;        // sum dw * {r, r - ln r - 1, [r clipped]}
  double advantage = 0, entropy = 0;            // sum dw * {A, H}
  double ratio_sum = 0, ratio_squared_sum = 0;  // sum vw * r, sum vw * r^2
  double max_advantage = 0,
         min_advantage = 0;              // over labelled rows; -inf and +inf where there are none
  int64_t n_tokens = 0, n_segments = 0;  // labelled rows; segments that have one
};

// Every output is optional. Nothing is written on refusal.
struct Outputs {
  std::span<double> terms;     // [n_terms] unweighted scalars
  double* total = nullptr;     // sum of weight * scalar
  int64_t* n_valid = nullptr;  // rows whose label is >= 0; every row without labels

  // Per row, f32 or f64, 0 where the label is negative. They are those of the head's logits_scale,
  // without a term's. token_loss is the sum over terms of weight * row loss, not divided: it has
  // what a term with another mask counts, and nothing of dpo, a loss of pairs.
  // Of a label that another shard has, label_log_prob is -inf until the group's is given.
  MutableVectorView token_loss, lse, label_log_prob, entropy;
  // lse as logits_scale * shift + log_sum, so that a large common offset costs log_sum no digits:
  // shift lies near the largest u of the row (where it is not the largest itself, log_sum makes up
  // for it). Also of a row without a label that a term counts; 0 on rows that are not read.
  MutableVectorView shift, log_sum;
  // sum_j (a_j - logits_scale * shift), where a term smooths its labels; of the rows of shift.
  MutableVectorView distance;
  std::span<int64_t> argmax;   // smallest index of the largest logit; -1 on ignored rows
  std::span<uint8_t> correct;  // argmax == label
  std::span<PolicyMetrics> policy_metrics;  // [n_terms]; written for grpo and gspo terms

  // Gradients of upstream * total. `accumulate` adds to what a buffer holds, in the accumulate
  // type, rounding once.
  MutableMatrixView d_logits;  // may be the logits themselves
  MutableMatrixView d_hidden;
  MutableMatrixView d_weight;
  MutableVectorView d_bias;
  MutableMatrixView d_adapter_a, d_adapter_b;
  bool accumulate = false;
};

// The promise: what `run` will use and do. The workspace is one block; the bookings add up to it.
class ULLAGE_API HeadPlan {
 public:
  const std::string& kernel() const;
  // "from_logits"; "chunk": the logits of `chunk` rows at a time; "chunk_two_pass": the same twice,
  // for a gradient waits for whole segments; "strips": without a gradient, or with the group's
  // statistics, some columns at a time of `chunk` rows; "recompute": with one, where the budget
  // holds few whole rows; makes strips twice. All give the same bits.
  const std::string& mode() const;
  int64_t chunk() const;  // rows at a time
  int64_t n_chunks() const;
  const std::vector<Booking>& bookings() const;
  int64_t workspace_bytes() const;
  int64_t materialized_bytes()
      const;                  // what [n_tok][vocab] logits in the accumulate type would take
  double operations() const;  // floating-point operations of the products
  const std::vector<Rejection>& rejections() const;

  // workspace: workspace_bytes() or more, 64-byte aligned. Allocates nothing. One run of a plan at
  // a time. Errors: 582, 586, 661, 663, 683, 692-697 for inputs that do not match the plan.
  Status run(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace) const;

  struct State;
  explicit HeadPlan(std::shared_ptr<const State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<const State> state_;
};

// Errors: 581-584 for the shape, 587 where even one row does not fit the budget or a given chunk
// does not, 661 and 662 for a shard, 680-699 for the configuration, naming the term and the field.
ULLAGE_API Result<HeadPlan> plan(const Shape& shape, const HeadConfig& config,
                                 const Request& request, const PlanLimits& limits);

// The configuration alone: what is meaningless whatever the data. 680, or the first fault.
ULLAGE_API Status validate(const HeadConfig& config);

}  // namespace ullage::lossk
