#include "runtime/head_config_json.h"

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "runtime/near_name.h"

namespace ullage::runtime {
namespace {

using lossk::Divergence;
using lossk::HeadConfig;
using lossk::Implementation;
using lossk::LossKind;
using lossk::LossTerm;
using lossk::PolicyNormalizer;
using lossk::RowMask;
using lossk::Teacher;
using lossk::TeacherKind;
using lossk::TopKTail;
using nlohmann::json;

template <class Enum>
using Names = std::span<const std::pair<std::string_view, Enum>>;

// Enumerators by name; the first name of a value is the one that is written.
#define ULLAGE_NAMES(Enum) constexpr std::pair<std::string_view, Enum> k##Enum##Names[]
ULLAGE_NAMES(LossKind) = {{"cross_entropy", LossKind::kCrossEntropy},
                          {"z_loss", LossKind::kZLoss},
                          {"distillation", LossKind::kDistillation},
                          {"grpo", LossKind::kGrpo},
                          {"gspo", LossKind::kGspo},
                          {"cispo", LossKind::kCispo},
                          {"dpo", LossKind::kDpo}};
ULLAGE_NAMES(Divergence) = {{"cross_entropy", Divergence::kCrossEntropy},
                            {"forward_kl", Divergence::kForwardKl},
                            {"reverse_kl", Divergence::kReverseKl},
                            {"jensen_shannon", Divergence::kJensenShannon}};
ULLAGE_NAMES(RowMask) = {{"auto", RowMask::kAuto},
                         {"labels", RowMask::kLabels},
                         {"own", RowMask::kOwn},
                         {"none", RowMask::kNone}};
ULLAGE_NAMES(PolicyNormalizer) = {{"auto", PolicyNormalizer::kAuto},
                                  {"tokens", PolicyNormalizer::kTokens},
                                  {"sequence_means", PolicyNormalizer::kSequenceMeans},
                                  {"sequences", PolicyNormalizer::kSequences},
                                  {"max_length", PolicyNormalizer::kMaxLength}};
ULLAGE_NAMES(TopKTail) = {{"truncated", TopKTail::kTruncated},
                          {"tail_bin", TopKTail::kTailBin},
                          {"renormalized", TopKTail::kRenormalized}};
ULLAGE_NAMES(TeacherKind) = {{"logits", TeacherKind::kLogits},
                             {"hidden", TeacherKind::kHidden},
                             {"top_k", TeacherKind::kTopK}};
ULLAGE_NAMES(DType) = {
    {"f64", DType::kF64}, {"f32", DType::kF32}, {"bf16", DType::kBF16}, {"f16", DType::kF16}};
ULLAGE_NAMES(Implementation) = {{"auto", Implementation::kAuto},
                                {"fused", Implementation::kFused},
                                {"per_term", Implementation::kPerTerm}};
#undef ULLAGE_NAMES

template <class Enum>
std::string_view name_among(Names<Enum> names, Enum value) {
  for (const auto& [name, each] : names) {
    if (each == value) return name;
  }
  return "";
}

std::string listed(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) {
    if (!text.empty()) text += ", ";
    text += name;
  }
  return text;
}

// "; did you mean 'weight'?", where one is near.
std::string suggestion(std::string_view name, std::span<const std::string_view> known) {
  const std::string_view near = near_name(name, known);
  return near.empty() ? "" : "; did you mean '" + std::string(near) + "'?";
}

template <class Enum>
Result<Enum> named(const std::string& field, std::string_view name, Names<Enum> names) {
  std::vector<std::string_view> known;
  for (const auto& [each, value] : names) {
    if (each == name) return value;
    known.push_back(each);
  }
  return {kHeadUnknownKind, field + " is '" + std::string(name) + "'; accepted: " + listed(known) +
                                suggestion(name, known)};
}

std::string shown(const json& value) {
  if (value.is_array()) return "a list";
  if (value.is_object()) return "an object";
  return value.dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 40);
}

// Takes named fields of one object. The first fault stays; `finish` adds fields nobody asked for.
class Fields {
 public:
  Fields(const json& object, std::string owner) : object_(object), owner_(std::move(owner)) {
    if (!object.is_object()) refuse("", shown(object), "an object");
  }

  void number(std::string_view name, double& out) {
    if (const json* value = find(name)) {
      if (!value->is_number()) return refuse(name, shown(*value), "a number");
      out = value->get<double>();
    }
  }
  void number(std::string_view name, std::optional<double>& out) {
    double value = NAN;
    number(name, value);
    if (object_.is_object() && object_.contains(name)) out = value;
  }
  template <class Int>
  void integer(std::string_view name, Int& out) {
    if (const json* value = find(name)) {
      if (!value->is_number_integer() || !std::in_range<Int>(value->get<int64_t>()) ||
          (value->is_number_unsigned() && !std::in_range<Int>(value->get<uint64_t>()))) {
        return refuse(name, shown(*value), "a whole number");
      }
      out = value->get<Int>();
    }
  }
  void flag(std::string_view name, bool& out) {
    if (const json* value = find(name)) {
      if (!value->is_boolean()) return refuse(name, shown(*value), "true or false");
      out = value->get<bool>();
    }
  }
  void string(std::string_view name, std::string& out) {
    if (const json* value = find(name)) {
      if (!value->is_string()) return refuse(name, shown(*value), "a string");
      out = value->get<std::string>();
    }
  }
  template <class Enum, size_t n>
  void choice(std::string_view name, const std::pair<std::string_view, Enum> (&names)[n],
              Enum& out) {
    const json* value = find(name);
    if (!value) return;
    if (!value->is_string()) return refuse(name, shown(*value), "a string");
    const Result<Enum> found =
        named<Enum>(at(name), value->get_ref<const std::string&>(), Names<Enum>(names));
    if (found) {
      out = *found;
    } else if (status_.ok()) {
      status_ = found.status();
    }
  }
  bool has(std::string_view name) const { return object_.is_object() && object_.contains(name); }

  // The list under `name`; an empty one where it is absent.
  json list(std::string_view name) {
    const json* value = find(name);
    if (value && !value->is_array()) refuse(name, shown(*value), "a list");
    return value && value->is_array() ? *value : json::array();
  }

  void note(const Status& status) {
    if (status_.ok()) status_ = status;
  }
  void refuse(std::string_view name, const std::string& value, std::string_view accepted) {
    note({kHeadBadConfig, at(name) + " is " + value + "; accepted: " + std::string(accepted)});
  }

  Status finish() {
    if (!object_.is_object()) return status_;
    for (const auto& [name, value] : object_.items()) {
      if (std::find(asked_.begin(), asked_.end(), name) == asked_.end()) {
        note(unknown_field(owner_, name, asked_));
      }
    }
    return status_;
  }

 private:
  const json* find(std::string_view name) {
    asked_.push_back(name);
    if (!object_.is_object()) return nullptr;
    const auto it = object_.find(name);
    return it == object_.end() ? nullptr : &*it;
  }
  std::string at(std::string_view name) const {
    if (name.empty()) return owner_.empty() ? "the document" : owner_;
    return owner_.empty() ? std::string(name) : owner_ + ": " + std::string(name);
  }

  const json& object_;
  std::string owner_;
  std::vector<std::string_view> asked_;
  Status status_ = kHeadOk;
};

Status read_term(const json& object, const std::string& owner, LossTerm& term) {
  Fields fields(object, owner);
  if (object.is_object() && !fields.has("kind")) fields.refuse("kind", "absent", "a loss's kind");
  fields.choice("kind", kLossKindNames, term.kind);
  term.name = name_among<LossKind>(kLossKindNames, term.kind);
  fields.string("name", term.name);
  fields.number("weight", term.weight);
  fields.number("logits_scale", term.logits_scale);
  fields.number("divisor", term.divisor);
  fields.number("label_smoothing", term.label_smoothing);
  bool masked = true;
  fields.flag("masked", masked);
  if (!masked) term.mask = RowMask::kNone;
  fields.choice("mask", kRowMaskNames, term.mask);
  if (fields.has("mask") && fields.has("masked")) {
    fields.refuse("masked", "given with mask", "one of the two");
  }
  fields.choice("divergence", kDivergenceNames, term.divergence);
  fields.integer("teacher", term.teacher);
  fields.number("temperature", term.temperature);
  fields.number("student_temperature", term.student_temperature);
  fields.flag("t_squared", term.t_squared);
  fields.number("beta", term.beta);
  fields.choice("top_k_tail", kTopKTailNames, term.top_k_tail);
  fields.flag("truncate_teacher", term.truncate_teacher);
  fields.number("epsilon_low", term.epsilon_low);
  fields.number("epsilon_high", term.epsilon_high);
  fields.number("kl_beta", term.kl_beta);
  fields.choice("normalizer", kPolicyNormalizerNames, term.normalizer);
  fields.integer("max_length", term.max_length);
  return fields.finish();
}

Status read_teacher(const json& object, const std::string& owner, Teacher& teacher) {
  Fields fields(object, owner);
  fields.choice("kind", kTeacherKindNames, teacher.kind);
  fields.integer("vocab", teacher.vocab);
  fields.integer("d_model", teacher.d_model);
  fields.integer("k", teacher.k);
  fields.choice("dtype", kDTypeNames, teacher.dtype);
  fields.choice("weight_dtype", kDTypeNames, teacher.weight_dtype);
  return fields.finish();
}

Result<HeadConfig> read_config(const json& document) {
  HeadConfig config;
  Fields fields(document, "");
  lossk::HeadOptions& options = config.options;
  const json losses = fields.list("losses"), teachers = fields.list("teachers");
  fields.number("logits_scale", options.logits_scale);
  fields.number("softcap", options.softcap);
  fields.flag("bias", options.bias);
  fields.integer("adapter_rank", options.adapter_rank);
  fields.number("adapter_scale", options.adapter_scale);
  fields.integer("vocab_offset", options.vocab_offset);
  fields.integer("group_vocab", options.group_vocab);
  for (size_t i = 0; i < losses.size(); ++i) {
    fields.note(
        read_term(losses[i], "losses[" + std::to_string(i) + "]", config.terms.emplace_back()));
  }
  for (size_t i = 0; i < teachers.size(); ++i) {
    fields.note(read_teacher(teachers[i], "teachers[" + std::to_string(i) + "]",
                             config.teachers.emplace_back()));
  }
  if (Status status = fields.finish(); !status.ok()) return status;
  return config;
}

// Writes a field where it is not the default's.
template <class T>
void put(json& object, const char* name, const T& value, const T& otherwise) {
  if (!(value == otherwise)) object[name] = value;
}
template <class Enum, size_t n>
void put(json& object, const char* name, Enum value, Enum otherwise,
         const std::pair<std::string_view, Enum> (&names)[n]) {
  if (value != otherwise) object[name] = name_among<Enum>(names, value);
}

json term_json(const LossTerm& term) {
  const LossTerm d;
  json object = {{"name", term.name},
                 {"kind", name_among<LossKind>(kLossKindNames, term.kind)},
                 {"weight", term.weight}};
  put(object, "logits_scale", term.logits_scale, d.logits_scale);
  if (term.divisor) object["divisor"] = *term.divisor;
  put(object, "label_smoothing", term.label_smoothing, d.label_smoothing);
  put(object, "mask", term.mask, d.mask, kRowMaskNames);
  put(object, "divergence", term.divergence, d.divergence, kDivergenceNames);
  put(object, "teacher", term.teacher, d.teacher);
  put(object, "temperature", term.temperature, d.temperature);
  put(object, "student_temperature", term.student_temperature, d.student_temperature);
  put(object, "t_squared", term.t_squared, d.t_squared);
  put(object, "beta", term.beta, d.beta);
  put(object, "top_k_tail", term.top_k_tail, d.top_k_tail, kTopKTailNames);
  put(object, "truncate_teacher", term.truncate_teacher, d.truncate_teacher);
  put(object, "epsilon_low", term.epsilon_low, d.epsilon_low);
  put(object, "epsilon_high", term.epsilon_high, d.epsilon_high);
  put(object, "kl_beta", term.kl_beta, d.kl_beta);
  put(object, "normalizer", term.normalizer, d.normalizer, kPolicyNormalizerNames);
  put(object, "max_length", term.max_length, d.max_length);
  return object;
}

json teacher_json(const Teacher& teacher) {
  const Teacher d;
  json object = {{"kind", name_among<TeacherKind>(kTeacherKindNames, teacher.kind)}};
  put(object, "vocab", teacher.vocab, d.vocab);
  put(object, "d_model", teacher.d_model, d.d_model);
  put(object, "k", teacher.k, d.k);
  put(object, "dtype", teacher.dtype, d.dtype, kDTypeNames);
  put(object, "weight_dtype", teacher.weight_dtype, d.weight_dtype, kDTypeNames);
  return object;
}

}  // namespace

Status unknown_field(const std::string& owner, std::string_view field,
                     std::span<const std::string_view> known) {
  return {kHeadBadConfig, (owner.empty() ? "" : owner + ": ") + "field '" + std::string(field) +
                              "' is not known; accepted: " + listed(known) +
                              suggestion(field, known)};
}

Result<HeadConfig> head_config_from_json(std::string_view text) {
  const json document = json::parse(text, nullptr, false);
  if (document.is_discarded()) {
    return {kHeadBadConfig, "the document is not JSON; accepted: an object with losses"};
  }
  return read_config(document);
}

std::string head_config_to_json(const HeadConfig& config) {
  const lossk::HeadOptions d;
  json document = {{"losses", json::array()}};
  for (const LossTerm& term : config.terms) document["losses"].push_back(term_json(term));
  for (const Teacher& teacher : config.teachers) {
    document["teachers"].push_back(teacher_json(teacher));
  }
  put(document, "logits_scale", config.options.logits_scale, d.logits_scale);
  put(document, "softcap", config.options.softcap, d.softcap);
  put(document, "bias", config.options.bias, d.bias);
  put(document, "adapter_rank", config.options.adapter_rank, d.adapter_rank);
  put(document, "adapter_scale", config.options.adapter_scale, d.adapter_scale);
  put(document, "vocab_offset", config.options.vocab_offset, d.vocab_offset);
  put(document, "group_vocab", config.options.group_vocab, d.group_vocab);
  return document.dump();
}

std::span<const std::string_view> head_config_fields() {
  static constexpr std::string_view kFields[] = {"losses",        "teachers",     "logits_scale",
                                                 "softcap",       "bias",         "adapter_rank",
                                                 "adapter_scale", "vocab_offset", "group_vocab"};
  return kFields;
}

Result<Implementation> implementation_from_name(std::string_view name) {
  return named<Implementation>("implementation", name, kImplementationNames);
}

Result<DType> dtype_from_name(std::string_view name) {
  return named<DType>("dtype", name, kDTypeNames);
}

}  // namespace ullage::runtime
