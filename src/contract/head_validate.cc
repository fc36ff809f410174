#include "contract/head_validate.h"

#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "contract/describe.h"

namespace ullage::lossk {
namespace {

// "term 'kl': temperature is -1; accepted: finite and > 0"
Status refuse(StatusCode code, const std::string& owner, std::string_view field,
              const std::string& value, std::string_view accepted) {
  std::string message = owner;
  if (!owner.empty()) message += ": ";
  message.append(field).append(" is ").append(value).append("; accepted: ").append(accepted);
  return {code, std::move(message)};
}

std::string owner_of(const LossTerm& term) { return "term '" + term.name + "'"; }
std::string owner_of_teacher(size_t index) { return "teachers[" + describe(index) + "]"; }

bool positive(double value) { return std::isfinite(value) && value > 0; }

template <class Enum>
bool within(Enum value, Enum last) {
  return static_cast<int64_t>(value) >= 0 && value <= last;
}

Status check_enums(const LossTerm& term) {
  const auto unknown = [&](std::string_view field, int value, std::string_view accepted) {
    return refuse(kHeadUnknownKind, owner_of(term), field, describe(value), accepted);
  };
  if (!within(term.kind, LossKind::kDpo)) {
    return unknown("kind", static_cast<int>(term.kind), "0 to 6, the values of LossKind");
  }
  if (!within(term.divergence, Divergence::kJensenShannon)) {
    return unknown("divergence", static_cast<int>(term.divergence),
                   "0 to 3, the values of Divergence");
  }
  if (!within(term.mask, RowMask::kNone)) {
    return unknown("mask", static_cast<int>(term.mask), "0 to 3, the values of RowMask");
  }
  if (!within(term.normalizer, PolicyNormalizer::kMaxLength)) {
    return unknown("normalizer", static_cast<int>(term.normalizer),
                   "0 to 4, the values of PolicyNormalizer");
  }
  if (!within(term.top_k_tail, TopKTail::kRenormalized)) {
    return unknown("top_k_tail", static_cast<int>(term.top_k_tail),
                   "0 to 2, the values of TopKTail");
  }
  return kHeadOk;
}

// What holds for every kind, whether it uses the field or not: a default is never refused.
Status check_numbers(const LossTerm& term) {
  const std::string owner = owner_of(term);
  if (!std::isfinite(term.weight)) {
    return refuse(kHeadBadWeight, owner, "weight", describe(term.weight), "finite");
  }
  if (!positive(term.logits_scale)) {
    return refuse(kHeadBadScale, owner, "logits_scale", describe(term.logits_scale),
                  "finite and > 0");
  }
  if (term.divisor && !positive(*term.divisor)) {
    return refuse(kHeadBadDivisor, owner, "divisor", describe(*term.divisor), "finite and > 0");
  }
  if (!(term.label_smoothing >= 0 && term.label_smoothing <= 1)) {
    return refuse(kHeadBadSmoothing, owner, "label_smoothing", describe(term.label_smoothing),
                  "0 to 1");
  }
  if (!positive(term.temperature)) {
    return refuse(kHeadBadTemperature, owner, "temperature", describe(term.temperature),
                  "finite and > 0");
  }
  if (!positive(term.student_temperature)) {
    return refuse(kHeadBadTemperature, owner, "student_temperature",
                  describe(term.student_temperature), "finite and > 0");
  }
  for (const auto& [field, epsilon] :
       {std::pair{"epsilon_low", term.epsilon_low}, std::pair{"epsilon_high", term.epsilon_high}}) {
    if (!(std::isfinite(epsilon) && epsilon >= 0)) {
      return refuse(kHeadBadEpsilon, owner, field, describe(epsilon), "finite and >= 0");
    }
  }
  if (!(std::isfinite(term.kl_beta) && term.kl_beta >= 0)) {
    return refuse(kHeadBadBeta, owner, "kl_beta", describe(term.kl_beta), "finite and >= 0");
  }
  return kHeadOk;
}

Status check_distillation(const LossTerm& term, const HeadConfig& config) {
  const std::string owner = owner_of(term);
  if (term.teacher < 0 || static_cast<size_t>(term.teacher) >= config.teachers.size()) {
    return refuse(kHeadMissingInput, owner, "teacher", describe(term.teacher),
                  config.teachers.empty()
                      ? "nothing, for the configuration has no teachers"
                      : "0 to " + describe(config.teachers.size() - 1) + ", the teachers given");
  }
  if (term.divergence == Divergence::kJensenShannon && !(term.beta > 0 && term.beta < 1)) {
    return refuse(kHeadBadBeta, owner, "beta", describe(term.beta),
                  "between 0 and 1, neither included, for jensen_shannon");
  }
  // Log-probabilities are those of one temperature: another cannot be had from k of them.
  if (config.teachers[static_cast<size_t>(term.teacher)].kind == TeacherKind::kTopK &&
      term.temperature != 1) {
    return refuse(kHeadBadTemperature, owner, "temperature", describe(term.temperature),
                  "1, for a top-k teacher gives the log-probabilities themselves");
  }
  return kHeadOk;
}

Status check_term(const LossTerm& term, const HeadConfig& config) {
  if (Status status = check_enums(term); !status.ok()) return status;
  if (Status status = check_numbers(term); !status.ok()) return status;
  const std::string owner = owner_of(term);
  switch (term.kind) {
    case LossKind::kCrossEntropy:
      // Of a one-hot target, cross-entropy and forward KL are the same number.
      if (term.divergence != Divergence::kCrossEntropy &&
          (term.divergence != Divergence::kForwardKl || term.label_smoothing > 0)) {
        return refuse(kHeadBadDivergence, owner, "divergence",
                      term.divergence == Divergence::kForwardKl   ? "forward_kl with smoothing"
                      : term.divergence == Divergence::kReverseKl ? "reverse_kl"
                                                                  : "jensen_shannon",
                      "cross_entropy, for labels are no distribution; a distillation term "
                      "with a teacher takes all four");
      }
      return kHeadOk;
    case LossKind::kDistillation:
      return check_distillation(term, config);
    case LossKind::kDpo:
      if (!positive(term.beta)) {
        return refuse(kHeadBadBeta, owner, "beta", describe(term.beta), "finite and > 0 for dpo");
      }
      return kHeadOk;
    case LossKind::kGrpo:
    case LossKind::kGspo:
    case LossKind::kCispo:
      if (term.normalizer == PolicyNormalizer::kMaxLength && term.max_length <= 0) {
        return refuse(kHeadBadDivisor, owner, "max_length", describe(term.max_length),
                      "> 0 for the normalizer max_length");
      }
      return kHeadOk;
    case LossKind::kZLoss:
      return kHeadOk;
  }
  return kHeadOk;
}

bool known(DType dtype) { return within(dtype, DType::kF16); }

Status check_teachers(const HeadConfig& config) {
  for (size_t i = 0; i < config.teachers.size(); ++i) {
    const Teacher& teacher = config.teachers[i];
    const std::string owner = owner_of_teacher(i);
    if (!within(teacher.kind, TeacherKind::kTopK)) {
      return refuse(kHeadUnknownKind, owner, "kind", describe(static_cast<int>(teacher.kind)),
                    "0 to 2, the values of TeacherKind");
    }
    if (!known(teacher.dtype) || !known(teacher.weight_dtype)) {
      return refuse(kHeadBadDtype, owner, "dtype", "unknown", "f64, f32, bf16, f16");
    }
    if (teacher.kind == TeacherKind::kTopK && teacher.k < 1) {
      return refuse(kHeadBadTopK, owner, "k", describe(teacher.k), ">= 1");
    }
    if (teacher.kind != TeacherKind::kTopK && teacher.vocab < 1) {
      return refuse(kHeadTeacherVocab, owner, "vocab", describe(teacher.vocab), ">= 1");
    }
    if (teacher.kind == TeacherKind::kHidden && teacher.d_model < 1) {
      return refuse(kHeadShapeMismatch, owner, "d_model", describe(teacher.d_model), ">= 1");
    }
  }
  return kHeadOk;
}

Status check_options(const HeadOptions& options) {
  if (!positive(options.logits_scale)) {
    return refuse(kHeadBadScale, "options", "logits_scale", describe(options.logits_scale),
                  "finite and > 0");
  }
  if (!(std::isfinite(options.softcap) && options.softcap >= 0)) {
    return refuse(kHeadBadScale, "options", "softcap", describe(options.softcap),
                  "finite and > 0, or 0 for none");
  }
  if (!std::isfinite(options.adapter_scale)) {
    return refuse(kHeadBadScale, "options", "adapter_scale", describe(options.adapter_scale),
                  "finite");
  }
  if (options.adapter_rank < 0) {
    return refuse(kHeadShapeMismatch, "options", "adapter_rank", describe(options.adapter_rank),
                  ">= 0");
  }
  if (options.vocab_offset < 0) {
    return refuse(kHeadShapeMismatch, "options", "vocab_offset", describe(options.vocab_offset),
                  ">= 0");
  }
  return kHeadOk;
}

bool product_overflows(int64_t a, int64_t b) {
  int64_t product;
  // 8 bytes an element: the largest storage type.
  return __builtin_mul_overflow(a, b, &product) ||
         __builtin_mul_overflow(product, int64_t{8}, &product);
}

Status check_shape(const Shape& shape) {
  if (shape.n_tok < 0) {
    return refuse(kLossEmptyDimension, "", "n_tok", describe(shape.n_tok), ">= 0");
  }
  if (shape.d_model < 0) {
    return refuse(kLossEmptyDimension, "", "d_model", describe(shape.d_model),
                  ">= 1, or 0 where the logits are given");
  }
  if (shape.vocab < 1) {
    return refuse(kLossEmptyDimension, "", "vocab", describe(shape.vocab), ">= 1");
  }
  for (const auto& [what, rows, cols] :
       {std::tuple{"n_tok * vocab", shape.n_tok, shape.vocab},
        std::tuple{"n_tok * d_model", shape.n_tok, shape.d_model},
        std::tuple{"vocab * d_model", shape.vocab, shape.d_model}}) {
    if (product_overflows(rows, cols)) {
      return refuse(kLossDimensionTooLarge, "", what, describe(rows) + " * " + describe(cols),
                    "what 2^63 bytes can hold");
    }
  }
  return kHeadOk;
}

// A request is served only by the door, and the options, that have what it asks for.
Status check_request(const Shape& shape, const HeadOptions& options, const Request& request) {
  const auto impossible = [](std::string_view field, std::string_view needs) {
    return Status(kHeadShapeMismatch,
                  "request: " + std::string(field) + " needs " + std::string(needs));
  };
  for (const DType dtype :
       {request.input_dtype, request.weight_dtype, request.grad_dtype, request.d_weight_dtype}) {
    if (!known(dtype)) {
      return refuse(kHeadBadDtype, "request", "a dtype", describe(static_cast<int>(dtype)),
                    "f64, f32, bf16, f16");
    }
  }
  const bool from_hidden = shape.d_model > 0;
  if (from_hidden) {
    if (request.d_logits) {
      return impossible("d_logits", "logits: the shape's d_model is not 0, so none are given");
    }
  } else {
    constexpr std::string_view kHiddenDoor = "hidden and weight: the shape's d_model is 0";
    if (request.d_hidden) return impossible("d_hidden", kHiddenDoor);
    if (request.d_weight) return impossible("d_weight", kHiddenDoor);
    if (options.bias) return impossible("options.bias", kHiddenDoor);
    if (options.adapter_rank > 0) return impossible("options.adapter_rank", kHiddenDoor);
  }
  if (request.d_bias && !options.bias) return impossible("d_bias", "options.bias");
  if (request.d_adapter && options.adapter_rank == 0) {
    return impossible("d_adapter", "options.adapter_rank > 0");
  }
  return kHeadOk;
}

}  // namespace

Status validate(const HeadConfig& config) {
  if (config.terms.empty()) return {kHeadBadConfig, "terms is empty; accepted: one term or more"};
  for (size_t i = 0; i < config.terms.size(); ++i) {
    const LossTerm& term = config.terms[i];
    if (term.name.empty()) {
      return refuse(kHeadBadConfig, "terms[" + describe(i) + "]", "name", "empty",
                    "a unique name of one character or more");
    }
    for (size_t j = 0; j < i; ++j) {
      if (config.terms[j].name == term.name) {
        return refuse(kHeadDuplicateName, "terms[" + describe(i) + "]", "name",
                      "'" + term.name + "', as is terms[" + describe(j) + "]", "a unique name");
      }
    }
  }
  if (Status status = check_options(config.options); !status.ok()) return status;
  if (Status status = check_teachers(config); !status.ok()) return status;
  for (const LossTerm& term : config.terms) {
    if (Status status = check_term(term, config); !status.ok()) return status;
  }
  return check_group(config);
}

Status check_plan(const Shape& shape, const HeadConfig& config, const Request& request) {
  if (Status status = check_shape(shape); !status.ok()) return status;
  int64_t last_label;
  if (__builtin_add_overflow(config.options.vocab_offset, shape.vocab - 1, &last_label)) {
    return refuse(kHeadShapeMismatch, "options", "vocab_offset",
                  describe(config.options.vocab_offset), "at most 2^63 - vocab");
  }
  if (Status status = check_request(shape, config.options, request); !status.ok()) return status;
  if (Status status = check_shard(shape, config.options); !status.ok()) return status;
  for (const LossTerm& term : config.terms) {
    if (term.kind != LossKind::kDistillation) continue;
    const auto index = static_cast<size_t>(term.teacher);
    const Teacher& teacher = config.teachers[index];
    if (teacher.kind == TeacherKind::kTopK) {
      if (teacher.k > shape.vocab) {
        return refuse(kHeadBadTopK, owner_of(term) + ", " + owner_of_teacher(index), "k",
                      describe(teacher.k), "1 to the vocabulary's " + describe(shape.vocab));
      }
    } else if (teacher.vocab < shape.vocab ||
               (teacher.vocab > shape.vocab && !term.truncate_teacher)) {
      return refuse(kHeadTeacherVocab, owner_of(term) + ", " + owner_of_teacher(index), "vocab",
                    describe(teacher.vocab),
                    "the student's " + describe(shape.vocab) +
                        (term.truncate_teacher ? " or more" : ", or more with truncate_teacher"));
    }
  }
  return kHeadOk;
}

}  // namespace ullage::lossk
