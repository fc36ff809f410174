#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "contract/describe.h"
#include "contract/head_validate.h"

namespace ullage::lossk {
namespace {

// A field's name, built only for a message: "teachers[2].logits".
struct Field {
  std::string_view name;
  int64_t teacher = -1;

  std::string text() const {
    if (teacher < 0) return std::string(name);
    return "teachers[" + describe(teacher) + "]." + std::string(name);
  }
};

std::string at(const Field& field, int64_t index) {
  return field.text() + "[" + describe(index) + "]";
}

Status missing(const LossTerm* term, const Field& field, std::string_view why) {
  std::string message;
  if (term) message = "term '" + term->name + "': ";
  message += field.text() + " is not given; needed for " + std::string(why);
  return {kHeadMissingInput, std::move(message)};
}

Status check_dtype(const Field& field, DType dtype, DType planned) {
  if (dtype == planned) return kHeadOk;
  const std::string_view name = name_of(dtype);
  return {kHeadBadDtype, field.text() + " is " + (name.empty() ? "unknown" : std::string(name)) +
                             "; accepted: " + std::string(name_of(planned)) + ", as planned"};
}

Status check_matrix(const Field& field, const MatrixView& view, DType planned, int64_t rows,
                    int64_t cols) {
  if (view.rows != rows || view.cols != cols) {
    return {kHeadShapeMismatch, field.text() + " is " + describe_shape(view.rows, view.cols) +
                                    "; accepted: " + describe_shape(rows, cols)};
  }
  if (rows > 1 && view.row_stride < cols) {
    return {kHeadShapeMismatch, field.text() + ".row_stride is " + describe(view.row_stride) +
                                    "; accepted: " + describe(cols) + " or more"};
  }
  return check_dtype(field, view.dtype, planned);
}

Status check_size(const Field& field, int64_t size, int64_t expected) {
  if (size == expected) return kHeadOk;
  return {kHeadShapeMismatch,
          field.text() + " has " + describe(size) + " values; accepted: " + describe(expected)};
}

Status check_vector(const Field& field, const VectorView& view, int64_t size) {
  if (name_of(view.dtype).empty()) {
    return {kHeadBadDtype, field.text() + " is unknown; accepted: f64, f32, bf16, f16"};
  }
  return check_size(field, view.size, size);
}

Status check_index(const Field& field, const IndexView& view, int64_t size) {
  if (view.id_bytes != 4 && view.id_bytes != 8) {
    return {kHeadBadDtype,
            field.text() + ".id_bytes is " + describe(view.id_bytes) + "; accepted: 4 or 8"};
  }
  return check_size(field, view.size, size);
}

#define ULLAGE_RETURN_IF_REFUSED(expression)                          \
  do {                                                                \
    if (Status refused = (expression); !refused.ok()) return refused; \
  } while (false)

double value_at(const VectorView& view, int64_t i) {
  const auto offset = i * view.stride;
  switch (view.dtype) {
    case DType::kF64:
      return static_cast<const double*>(view.data)[offset];
    case DType::kF32:
      return static_cast<double>(static_cast<const float*>(view.data)[offset]);
    case DType::kBF16:
      return static_cast<double>(static_cast<const BF16*>(view.data)[offset].to_float());
    case DType::kF16:
      return static_cast<double>(static_cast<const F16*>(view.data)[offset].to_float());
  }
  return 0;
}

// The door: logits, or hidden, weight and what the options add.
Status check_door(const Shape& shape, const HeadOptions& options, const Request& request,
                  const Inputs& inputs) {
  if (shape.d_model == 0) {
    if (shape.n_tok > 0 && !inputs.logits) {
      return missing(nullptr, {"logits"}, "a shape whose d_model is 0");
    }
    if (!inputs.logits) return kHeadOk;
    return check_matrix({"logits"}, inputs.logits, request.input_dtype, shape.n_tok, shape.vocab);
  }
  constexpr std::string_view kWhy = "a shape whose d_model is not 0";
  if (shape.n_tok > 0 && !inputs.hidden) return missing(nullptr, {"hidden"}, kWhy);
  if (!inputs.weight) return missing(nullptr, {"weight"}, kWhy);
  if (inputs.hidden) {
    ULLAGE_RETURN_IF_REFUSED(
        check_matrix({"hidden"}, inputs.hidden, request.input_dtype, shape.n_tok, shape.d_model));
  }
  ULLAGE_RETURN_IF_REFUSED(
      check_matrix({"weight"}, inputs.weight, request.weight_dtype, shape.vocab, shape.d_model));
  if (options.bias) {
    if (!inputs.bias) return missing(nullptr, {"bias"}, "options.bias");
    ULLAGE_RETURN_IF_REFUSED(check_vector({"bias"}, inputs.bias, shape.vocab));
  }
  if (options.adapter_rank > 0) {
    if (!inputs.adapter_a || !inputs.adapter_b) {
      return missing(nullptr, {inputs.adapter_a ? "adapter_b" : "adapter_a"},
                     "options.adapter_rank > 0");
    }
    ULLAGE_RETURN_IF_REFUSED(check_matrix({"adapter_a"}, inputs.adapter_a, request.weight_dtype,
                                          options.adapter_rank, shape.d_model));
    ULLAGE_RETURN_IF_REFUSED(check_matrix({"adapter_b"}, inputs.adapter_b, request.weight_dtype,
                                          shape.vocab, options.adapter_rank));
  }
  return kHeadOk;
}

Status check_labels(const Shape& shape, const HeadOptions& options, const IndexView& labels) {
  ULLAGE_RETURN_IF_REFUSED(check_index({"labels"}, labels, shape.n_tok));
  const LabelRange range = label_range(options, shape.vocab);
  for (int64_t i = 0; i < shape.n_tok; ++i) {
    const int64_t label = labels[i];
    if (label >= 0 && (label < range.first || label > range.last)) {
      return {kLossTargetOutOfRange, at({"labels"}, i) + " is " + describe(label) +
                                         "; accepted: " + describe(range.first) + " to " +
                                         describe(range.last) + ", or negative to ignore the row"};
    }
  }
  return kHeadOk;
}

// Row-wise inputs that are given must fit, used or not.
Status check_row_inputs(const Shape& shape, const Inputs& inputs) {
  const int64_t n = shape.n_tok;
  const struct {
    std::string_view name;
    const VectorView& view;
    int64_t size;
  } vectors[] = {{"token_weights", inputs.token_weights, n},
                 {"class_weights", inputs.class_weights, shape.vocab},
                 {"advantages", inputs.advantages, n},
                 {"old_log_probs", inputs.old_log_probs, n},
                 {"reference_log_probs", inputs.reference_log_probs, n},
                 {"group_shift", inputs.group_shift, n},
                 {"group_log_sum", inputs.group_log_sum, n},
                 {"group_label_log_prob", inputs.group_label_log_prob, n},
                 {"group_distance", inputs.group_distance, n},
                 {"group_entropy", inputs.group_entropy, n},
                 {"upstream_rows", inputs.upstream_rows, n}};
  for (const auto& [name, view, size] : vectors) {
    if (view) ULLAGE_RETURN_IF_REFUSED(check_vector({name}, view, size));
  }
  if (!inputs.mask.empty()) {
    ULLAGE_RETURN_IF_REFUSED(check_size({"mask"}, static_cast<int64_t>(inputs.mask.size()), n));
  }
  if (inputs.n_segments < 0) {
    return {kHeadBadSegments, "n_segments is " + describe(inputs.n_segments) + "; accepted: >= 0"};
  }
  if (!inputs.segments) return kHeadOk;
  ULLAGE_RETURN_IF_REFUSED(check_index({"segments"}, inputs.segments, n));
  for (int64_t i = 0; i < n; ++i) {
    if (!inputs.labels || inputs.labels[i] < 0) continue;
    const int64_t segment = inputs.segments[i];
    if (segment < 0 || segment >= inputs.n_segments) {
      return {kHeadBadSegments,
              at({"segments"}, i) + " is " + describe(segment) +
                  "; accepted: 0 to n_segments - 1 = " + describe(inputs.n_segments - 1) +
                  " on every row whose label is >= 0"};
    }
  }
  return kHeadOk;
}

Status check_pairs(const LossTerm& term, const Inputs& inputs) {
  ULLAGE_RETURN_IF_REFUSED(check_index({"pairs"}, inputs.pairs, inputs.pairs.size));
  if (inputs.pairs.size % 2 != 0) {
    return {kHeadBadPairs, "term '" + term.name + "': pairs has " + describe(inputs.pairs.size) +
                               " ids; accepted: two a pair, chosen then rejected"};
  }
  for (int64_t i = 0; i < inputs.pairs.size; ++i) {
    const int64_t segment = inputs.pairs[i];
    if (segment < 0 || segment >= inputs.n_segments) {
      return {kHeadBadPairs,
              "term '" + term.name + "': " + at({"pairs"}, i) + " is " + describe(segment) +
                  "; accepted: 0 to n_segments - 1 = " + describe(inputs.n_segments - 1)};
    }
    if (i % 2 == 1 && segment == inputs.pairs[i - 1]) {
      return {kHeadBadPairs, "term '" + term.name + "': " + at({"pairs"}, i) + " is " +
                                 describe(segment) +
                                 ", chosen as well as rejected; accepted: two segments"};
    }
  }
  return kHeadOk;
}

Status check_top_k(const Shape& shape, const LossTerm& term, int64_t k, const Inputs& inputs) {
  const int64_t t = term.teacher;
  const TeacherInputs& teacher = inputs.teachers[static_cast<size_t>(t)];
  const Field ids{"ids", t}, log_probs{"log_probs", t};
  if (shape.n_tok == 0) return kHeadOk;
  if (!teacher.ids) return missing(&term, ids, "its top-k teacher");
  if (!teacher.log_probs) return missing(&term, log_probs, "its top-k teacher");
  int64_t size;
  if (__builtin_mul_overflow(shape.n_tok, k, &size)) {
    return {kLossDimensionTooLarge, "n_tok * k does not fit 64 bits"};
  }
  ULLAGE_RETURN_IF_REFUSED(check_index(ids, teacher.ids, size));
  ULLAGE_RETURN_IF_REFUSED(check_vector(log_probs, teacher.log_probs, size));
  for (int64_t row = 0; row < shape.n_tok; ++row) {
    if (!counts_row(term, inputs, row)) continue;
    for (int64_t i = row * k; i < (row + 1) * k; ++i) {
      const int64_t id = teacher.ids[i];
      if (id < 0 || id >= shape.vocab) {
        return {kHeadBadTopK, at(ids, i) + " is " + describe(id) + "; accepted: 0 to " +
                                  describe(shape.vocab - 1)};
      }
      for (int64_t j = row * k; j < i; ++j) {
        if (teacher.ids[j] == id) {
          return {kHeadBadTopK, at(ids, i) + " is " + describe(id) + ", as is " + at(ids, j) +
                                    "; accepted: distinct ids within a row"};
        }
      }
      const double log_prob = value_at(teacher.log_probs, i);
      if (!(log_prob <= 0)) {
        return {kHeadBadTopK, at(log_probs, i) + " is " + describe(log_prob) +
                                  "; accepted: a natural logarithm of a probability, <= 0"};
      }
    }
  }
  return kHeadOk;
}

Status check_teacher(const Shape& shape, const HeadConfig& config, const LossTerm& term,
                     const Inputs& inputs) {
  const int64_t t = term.teacher;
  if (t >= static_cast<int64_t>(inputs.teachers.size())) {
    return missing(&term, {"inputs", t}, "distillation");
  }
  const Teacher& teacher = config.teachers[static_cast<size_t>(t)];
  const TeacherInputs& given = inputs.teachers[static_cast<size_t>(t)];
  switch (teacher.kind) {
    case TeacherKind::kLogits:
      if (shape.n_tok == 0) return kHeadOk;
      if (!given.logits) return missing(&term, {"logits", t}, "distillation");
      return check_matrix({"logits", t}, given.logits, teacher.dtype, shape.n_tok, teacher.vocab);
    case TeacherKind::kHidden:
      if (shape.n_tok == 0) return kHeadOk;
      if (!given.hidden) return missing(&term, {"hidden", t}, "distillation");
      if (!given.weight) return missing(&term, {"weight", t}, "distillation");
      ULLAGE_RETURN_IF_REFUSED(
          check_matrix({"hidden", t}, given.hidden, teacher.dtype, shape.n_tok, teacher.d_model));
      return check_matrix({"weight", t}, given.weight, teacher.weight_dtype, teacher.vocab,
                          teacher.d_model);
    case TeacherKind::kTopK:
      return check_top_k(shape, term, teacher.k, inputs);
  }
  return kHeadOk;
}

Status check_term_inputs(const Shape& shape, const HeadConfig& config, const LossTerm& term,
                         const Inputs& inputs) {
  const auto absent = [&](const auto& view) { return shape.n_tok > 0 && !view; };
  const bool masked = !needs_labels(term.kind);
  if (absent(inputs.labels)) {
    if (!masked) return missing(&term, {"labels"}, "its kind");
    if (term.mask == RowMask::kLabels) return missing(&term, {"labels"}, "mask = labels");
  }
  if (masked && term.mask == RowMask::kOwn && shape.n_tok > 0 && inputs.mask.empty()) {
    return missing(&term, {"mask"}, "mask = own");
  }
  if (is_policy(term.kind)) {
    if (absent(inputs.advantages)) return missing(&term, {"advantages"}, "a policy term");
    if (absent(inputs.old_log_probs)) return missing(&term, {"old_log_probs"}, "a policy term");
  }
  const bool needs_reference =
      term.kind == LossKind::kDpo || (is_policy(term.kind) && term.kl_beta > 0);
  if (needs_reference && absent(inputs.reference_log_probs)) {
    return missing(&term, {"reference_log_probs"},
                   term.kind == LossKind::kDpo ? "dpo" : "kl_beta > 0");
  }
  if (needs_segment_ids(term) && absent(inputs.segments)) {
    return missing(&term, {"segments"}, "a loss of sequences");
  }
  if (divides_by_segments(term) && inputs.n_segments == 0 && shape.n_tok > 0) {
    return missing(&term, {"n_segments"}, "its divisor; give it, or a divisor");
  }
  if (term.kind == LossKind::kDpo) {
    if (absent(inputs.pairs)) return missing(&term, {"pairs"}, "dpo");
    return check_pairs(term, inputs);
  }
  if (term.kind == LossKind::kDistillation) return check_teacher(shape, config, term, inputs);
  return kHeadOk;
}

Status check_row_output(const Field& field, const MutableVectorView& view, int64_t n_tok) {
  if (!view) return kHeadOk;
  if (view.dtype != DType::kF32 && view.dtype != DType::kF64) {
    const std::string_view name = name_of(view.dtype);
    return {kHeadBadDtype, field.text() + " is " + (name.empty() ? "unknown" : std::string(name)) +
                               "; accepted: f32, f64"};
  }
  ULLAGE_RETURN_IF_REFUSED(check_size(field, view.size, n_tok));
  if (view.stride == 0 && n_tok > 1) {
    return {kHeadShapeMismatch, field.text() + ".stride is 0; accepted: any other"};
  }
  return kHeadOk;
}

Status check_gradient(const Field& field, const MutableMatrixView& view, bool planned, DType dtype,
                      int64_t rows, int64_t cols) {
  if (!view) return kHeadOk;
  if (!planned) {
    return {kHeadShapeMismatch,
            field.text() + " is given, but the plan's request does not ask for it"};
  }
  return check_matrix(field, view, dtype, rows, cols);
}

Status check_outputs(const Shape& shape, const HeadConfig& config, const Request& request,
                     const Inputs& inputs, const Outputs& outputs) {
  const auto n_terms = static_cast<int64_t>(config.terms.size());
  const auto unplanned = [](std::string_view name, std::string_view flag) {
    return Status(kHeadShapeMismatch, std::string(name) + " is given, but request." +
                                          std::string(flag) + " was false when planned");
  };
  const struct {
    std::string_view name;
    size_t size;
    int64_t expected;
  } spans[] = {{"terms", outputs.terms.size(), n_terms},
               {"argmax", outputs.argmax.size(), shape.n_tok},
               {"correct", outputs.correct.size(), shape.n_tok},
               {"policy_metrics", outputs.policy_metrics.size(), n_terms}};
  for (const auto& [name, size, expected] : spans) {
    if (size > 0)
      ULLAGE_RETURN_IF_REFUSED(check_size({name}, static_cast<int64_t>(size), expected));
  }
  ULLAGE_RETURN_IF_REFUSED(check_row_output({"token_loss"}, outputs.token_loss, shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(check_row_output({"lse"}, outputs.lse, shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(
      check_row_output({"label_log_prob"}, outputs.label_log_prob, shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(check_row_output({"entropy"}, outputs.entropy, shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(check_row_output({"shift"}, outputs.shift, shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(check_row_output({"log_sum"}, outputs.log_sum, shape.n_tok));
  ULLAGE_RETURN_IF_REFUSED(check_row_output({"distance"}, outputs.distance, shape.n_tok));
  if (outputs.entropy && !request.entropy) return unplanned("entropy", "entropy");
  if (!outputs.policy_metrics.empty() && !request.policy_metrics) {
    return unplanned("policy_metrics", "policy_metrics");
  }
  if (shape.n_tok > 0 && !inputs.labels && (outputs.label_log_prob || !outputs.correct.empty())) {
    return missing(nullptr, {"labels"}, "the outputs label_log_prob and correct");
  }

  const int64_t rank = config.options.adapter_rank;
  ULLAGE_RETURN_IF_REFUSED(check_gradient({"d_logits"}, outputs.d_logits, request.d_logits,
                                          request.grad_dtype, shape.n_tok, shape.vocab));
  ULLAGE_RETURN_IF_REFUSED(check_gradient({"d_hidden"}, outputs.d_hidden, request.d_hidden,
                                          request.grad_dtype, shape.n_tok, shape.d_model));
  ULLAGE_RETURN_IF_REFUSED(check_gradient({"d_weight"}, outputs.d_weight, request.d_weight,
                                          request.d_weight_dtype, shape.vocab, shape.d_model));
  ULLAGE_RETURN_IF_REFUSED(check_gradient({"d_adapter_a"}, outputs.d_adapter_a, request.d_adapter,
                                          request.d_weight_dtype, rank, shape.d_model));
  ULLAGE_RETURN_IF_REFUSED(check_gradient({"d_adapter_b"}, outputs.d_adapter_b, request.d_adapter,
                                          request.d_weight_dtype, shape.vocab, rank));
  if (outputs.d_bias) {
    if (!request.d_bias) return unplanned("d_bias", "d_bias");
    ULLAGE_RETURN_IF_REFUSED(check_dtype({"d_bias"}, outputs.d_bias.dtype, request.d_weight_dtype));
    ULLAGE_RETURN_IF_REFUSED(check_size({"d_bias"}, outputs.d_bias.size, shape.vocab));
    if (outputs.d_bias.stride == 0 && shape.vocab > 1) {
      return {kHeadShapeMismatch, "d_bias.stride is 0; accepted: any other"};
    }
  }
  if (outputs.d_logits && outputs.d_logits.data == inputs.logits.data) {
    if (outputs.accumulate) {
      return {kHeadShapeMismatch,
              "d_logits is the logits themselves; accepted: another buffer to accumulate in"};
    }
    if (outputs.d_logits.dtype != inputs.logits.dtype ||
        (shape.n_tok > 1 && outputs.d_logits.row_stride != inputs.logits.row_stride)) {
      return {kHeadShapeMismatch,
              "d_logits is the logits themselves; accepted: their dtype and row_stride"};
    }
  }
  return kHeadOk;
}

}  // namespace

Status check_inputs(const Shape& shape, const HeadConfig& config, const Request& request,
                    const Inputs& inputs, const Outputs& outputs) {
  if (!std::isfinite(inputs.upstream)) {
    return {kLossNonFiniteScalar,
            "upstream is " + describe(inputs.upstream) + "; accepted: finite"};
  }
  ULLAGE_RETURN_IF_REFUSED(check_door(shape, config.options, request, inputs));
  if (inputs.labels) {
    ULLAGE_RETURN_IF_REFUSED(check_labels(shape, config.options, inputs.labels));
  }
  ULLAGE_RETURN_IF_REFUSED(check_row_inputs(shape, inputs));
  for (const LossTerm& term : config.terms) {
    ULLAGE_RETURN_IF_REFUSED(check_term_inputs(shape, config, term, inputs));
  }
  ULLAGE_RETURN_IF_REFUSED(check_group_inputs(shape, config, inputs, outputs));
  return check_outputs(shape, config, request, inputs, outputs);
}

}  // namespace ullage::lossk
