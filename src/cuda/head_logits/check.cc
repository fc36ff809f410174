#include "cuda/head_logits/check.h"

#include <cmath>
#include <string>
#include <string_view>

#include "contract/describe.h"
#include "contract/head_validate.h"

namespace ullage::lossk::cuda {
namespace {

#define ULLAGE_RETURN_IF_REFUSED(call) \
  if (Status status = (call); !status.ok()) return status

Status missing(const LossTerm& term, std::string_view field) {
  return {kHeadMissingInput,
          "term '" + term.name + "' needs " + std::string(field) + ", which is not given"};
}

Status check_size(std::string_view field, int64_t size, int64_t needed) {
  if (size >= needed) return kHeadOk;
  return {kLossLengthMismatch, std::string(field) + " has " + describe(size) +
                                   " elements; accepted: " + describe(needed) + " or more"};
}

Status check_dtype(std::string_view field, DType dtype, DType accepted) {
  if (dtype == accepted) return kHeadOk;
  return {kHeadBadDtype, std::string(field) + " is " + std::string(name_of(dtype)) +
                             "; accepted: " + std::string(name_of(accepted))};
}

}  // namespace

Status check_matrix(std::string_view field, const MatrixView& view, DType dtype, int64_t rows,
                    int64_t cols) {
  ULLAGE_RETURN_IF_REFUSED(check_dtype(field, view.dtype, dtype));
  if (view.rows != rows || view.cols != cols) {
    return {kHeadShapeMismatch, std::string(field) + " is " + describe_shape(view.rows, view.cols) +
                                    "; accepted: " + describe_shape(rows, cols)};
  }
  if (rows > 1 && view.row_stride < cols) {
    return {kHeadShapeMismatch, std::string(field) + ".row_stride is " + describe(view.row_stride) +
                                    "; accepted: its " + describe(cols) + " columns or more"};
  }
  return kHeadOk;
}

namespace {

template <class View>
Status check_floats(std::string_view field, const View& view, int64_t size) {
  if (!view) return kHeadOk;
  ULLAGE_RETURN_IF_REFUSED(check_dtype(field, view.dtype, DType::kF32));
  return check_size(field, view.size, size);
}

Status check_indices(std::string_view field, const IndexView& view, int64_t size) {
  if (!view) return kHeadOk;
  if (view.id_bytes != 4 && view.id_bytes != 8) {
    return {kHeadBadDtype,
            std::string(field) + ".id_bytes is " + describe(view.id_bytes) + "; accepted: 4, 8"};
  }
  return check_size(field, view.size, size);
}

Status check_hidden_teacher(const Teacher& teacher, const LossTerm& term, int64_t n_tok,
                            const TeacherInputs& given) {
  if (!given.hidden) return missing(term, "the teacher's hidden");
  if (!given.weight) return missing(term, "the teacher's weight");
  ULLAGE_RETURN_IF_REFUSED(
      check_matrix("the teacher's hidden", given.hidden, teacher.dtype, n_tok, teacher.d_model));
  return check_matrix("the teacher's weight", given.weight, teacher.weight_dtype, teacher.vocab,
                      teacher.d_model);
}

Status check_top_k_teacher(const Teacher& teacher, const LossTerm& term, int64_t n_tok,
                           const TeacherInputs& given) {
  if (!given.ids) return missing(term, "the teacher's ids");
  if (!given.log_probs) return missing(term, "the teacher's log_probs");
  int64_t size;
  if (__builtin_mul_overflow(n_tok, teacher.k, &size)) {
    return {kLossDimensionTooLarge, "n_tok * k does not fit 64 bits"};
  }
  ULLAGE_RETURN_IF_REFUSED(check_indices("the teacher's ids", given.ids, size));
  return check_floats("the teacher's log_probs", given.log_probs, size);
}

Status check_term(const HeadConfig& config, const LossTerm& term, const Shape& shape,
                  const Inputs& inputs) {
  if (needs_labels(term.kind) || term.mask == RowMask::kLabels) {
    if (!inputs.labels) return missing(term, "labels");
  } else if (term.mask == RowMask::kOwn && inputs.mask.empty()) {
    return missing(term, "mask");
  }
  if (is_policy(term.kind)) {
    if (!inputs.advantages) return missing(term, "advantages");
    if (!inputs.old_log_probs) return missing(term, "old_log_probs");
  }
  if ((term.kind == LossKind::kDpo || (is_policy(term.kind) && term.kl_beta > 0)) &&
      !inputs.reference_log_probs) {
    return missing(term, "reference_log_probs");
  }
  if (needs_segment_ids(term) && !inputs.segments) return missing(term, "segments");
  if (divides_by_segments(term) && inputs.n_segments == 0) return missing(term, "n_segments");
  if (term.kind == LossKind::kDpo) {
    if (!inputs.pairs) return missing(term, "pairs");
    if (inputs.pairs.size % 2 != 0) {
      return {kHeadBadPairs, "term '" + term.name + "': pairs has " + describe(inputs.pairs.size) +
                                 " ids; accepted: two a pair, chosen then rejected"};
    }
    ULLAGE_RETURN_IF_REFUSED(check_indices("pairs", inputs.pairs, inputs.pairs.size));
  }
  if (term.kind != LossKind::kDistillation) return kHeadOk;
  const auto t = static_cast<size_t>(term.teacher);
  const bool given = t < inputs.teachers.size();
  if (config.teachers[t].kind == TeacherKind::kHidden) {
    return check_hidden_teacher(config.teachers[t], term, shape.n_tok,
                                given ? inputs.teachers[t] : TeacherInputs{});
  }
  if (config.teachers[t].kind == TeacherKind::kTopK) {
    return check_top_k_teacher(config.teachers[t], term, shape.n_tok,
                               given ? inputs.teachers[t] : TeacherInputs{});
  }
  if (!given || !inputs.teachers[t].logits) return missing(term, "the teacher's logits");
  return check_matrix("the teacher's logits", inputs.teachers[t].logits, config.teachers[t].dtype,
                      shape.n_tok, config.teachers[t].vocab);
}

Status check_outputs(const Shape& shape, const HeadConfig& config, const Request& request,
                     const Inputs& inputs, const Outputs& outputs) {
  const auto n_terms = static_cast<int64_t>(config.terms.size());
  const auto span_size = [](const auto& span, std::string_view field, int64_t needed) -> Status {
    if (span.empty()) return kHeadOk;
    return check_size(field, static_cast<int64_t>(span.size()), needed);
  };
  ULLAGE_RETURN_IF_REFUSED(span_size(outputs.terms, "terms", n_terms));
  ULLAGE_RETURN_IF_REFUSED(span_size(outputs.argmax, "argmax", shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(span_size(outputs.correct, "correct", shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(span_size(outputs.policy_metrics, "policy_metrics", n_terms));
  ULLAGE_RETURN_IF_REFUSED(check_floats("token_loss", outputs.token_loss, shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(check_floats("lse", outputs.lse, shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(check_floats("label_log_prob", outputs.label_log_prob, shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(check_floats("entropy", outputs.entropy, shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(check_floats("shift", outputs.shift, shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(check_floats("log_sum", outputs.log_sum, shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(check_floats("distance", outputs.distance, shape.n_tok));
  if (!outputs.policy_metrics.empty() && !request.policy_metrics) {
    return {kHeadShapeMismatch,
            "policy_metrics is given, but request.policy_metrics was false when planned"};
  }
  if (!inputs.labels && (outputs.label_log_prob || !outputs.correct.empty())) {
    return {kHeadMissingInput, "label_log_prob and correct need labels, which are not given"};
  }
  return kHeadOk;
}

// d_logits: what the plan was made for, and if in place then exactly.
Status check_logits_gradient(const Shape& shape, const Request& request, const Inputs& inputs,
                             const Outputs& outputs) {
  if (!outputs.d_logits) return kHeadOk;
  if (!request.d_logits) {
    return {kHeadShapeMismatch, "d_logits is given, but request.d_logits was false when planned"};
  }
  ULLAGE_RETURN_IF_REFUSED(
      check_matrix("d_logits", outputs.d_logits, request.grad_dtype, shape.n_tok, shape.vocab));
  if (outputs.d_logits.data == inputs.logits.data) {
    if (outputs.accumulate) {
      return {kHeadShapeMismatch,
              "d_logits is the logits themselves; accepted: another buffer to accumulate in"};
    }
    if (shape.n_tok > 1 && outputs.d_logits.row_stride != inputs.logits.row_stride) {
      return {kHeadShapeMismatch,
              "d_logits is the logits themselves; accepted: their dtype and row_stride"};
    }
  }
  return kHeadOk;
}

}  // namespace

Status check_row_inputs(const Shape& shape, const HeadConfig& config, const Request& request,
                        const Inputs& inputs, const Outputs& outputs) {
  if (!std::isfinite(inputs.upstream)) {
    return {kLossNonFiniteScalar,
            "upstream is " + describe(inputs.upstream) + "; accepted: finite"};
  }
  const int64_t n = shape.n_tok;
  ULLAGE_RETURN_IF_REFUSED(check_indices("labels", inputs.labels, n));
  ULLAGE_RETURN_IF_REFUSED(check_indices("segments", inputs.segments, n));
  ULLAGE_RETURN_IF_REFUSED(check_floats("token_weights", inputs.token_weights, n));
  ULLAGE_RETURN_IF_REFUSED(check_floats("class_weights", inputs.class_weights, shape.vocab));
  ULLAGE_RETURN_IF_REFUSED(check_floats("advantages", inputs.advantages, n));
  ULLAGE_RETURN_IF_REFUSED(check_floats("old_log_probs", inputs.old_log_probs, n));
  ULLAGE_RETURN_IF_REFUSED(check_floats("reference_log_probs", inputs.reference_log_probs, n));
  ULLAGE_RETURN_IF_REFUSED(check_floats("upstream_rows", inputs.upstream_rows, n));
  ULLAGE_RETURN_IF_REFUSED(check_floats("group_shift", inputs.group_shift, n));
  ULLAGE_RETURN_IF_REFUSED(check_floats("group_log_sum", inputs.group_log_sum, n));
  ULLAGE_RETURN_IF_REFUSED(check_floats("group_label_log_prob", inputs.group_label_log_prob, n));
  ULLAGE_RETURN_IF_REFUSED(check_floats("group_distance", inputs.group_distance, n));
  ULLAGE_RETURN_IF_REFUSED(check_floats("group_entropy", inputs.group_entropy, n));
  ULLAGE_RETURN_IF_REFUSED(check_group_inputs(shape, config, inputs, outputs));
  if (!inputs.mask.empty()) {
    ULLAGE_RETURN_IF_REFUSED(check_size("mask", static_cast<int64_t>(inputs.mask.size()), n));
  }
  if (inputs.n_segments < 0 || inputs.n_segments > n) {
    return {kHeadBadSegments, "n_segments is " + describe(inputs.n_segments) +
                                  "; accepted on a GPU: 0 to n_tok = " + describe(n)};
  }
  if (n > 0) {
    for (const LossTerm& term : config.terms) {
      ULLAGE_RETURN_IF_REFUSED(check_term(config, term, shape, inputs));
    }
  }
  return check_outputs(shape, config, request, inputs, outputs);
}

Status check_device_inputs(const Shape& shape, const HeadConfig& config, const Request& request,
                           const Inputs& inputs, const Outputs& outputs) {
  if (shape.n_tok > 0) {
    if (!inputs.logits) return {kHeadMissingInput, "logits are not given"};
    ULLAGE_RETURN_IF_REFUSED(
        check_matrix("logits", inputs.logits, request.input_dtype, shape.n_tok, shape.vocab));
  }
  ULLAGE_RETURN_IF_REFUSED(check_row_inputs(shape, config, request, inputs, outputs));
  return check_logits_gradient(shape, request, inputs, outputs);
}

}  // namespace ullage::lossk::cuda
