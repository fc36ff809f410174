#include "runtime/head_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/head_config_json.h"

namespace ullage::runtime {
namespace {

using nlohmann::json;
using reference::HeadInputs;
using reference::HeadTeacher;

struct Matrix {
  std::vector<double> values;
  int64_t rows = 0, cols = 0;
};

// Reads arrays out of one object; the first fault stays.
class Arrays {
 public:
  Arrays(const json& object, std::string owner) : object_(object), owner_(std::move(owner)) {}

  bool has(const std::string& name) const { return object_.contains(name); }
  const Status& status() const { return status_; }

  Matrix matrix(const std::string& name) {
    Matrix result;
    const json* rows = list(name);
    if (!rows) return result;
    result.rows = static_cast<int64_t>(rows->size());
    for (size_t i = 0; i < rows->size(); ++i) {
      const json& row = (*rows)[i];
      const std::string at = name + "[" + std::to_string(i) + "]";
      if (!row.is_array()) {
        fail(kHeadBadConfig, at + " is no list; accepted: a list of rows");
        return {};
      }
      if (i == 0) result.cols = static_cast<int64_t>(row.size());
      if (static_cast<int64_t>(row.size()) != result.cols) {
        fail(kHeadShapeMismatch, at + " has " + std::to_string(row.size()) + " values; accepted: " +
                                     std::to_string(result.cols) + ", as the first row");
        return {};
      }
      for (const json& value : row) result.values.push_back(number(value, at));
    }
    return result;
  }

  void numbers(const std::string& name, std::vector<double>& out) {
    if (const json* values = list(name)) {
      for (const json& value : *values) out.push_back(number(value, name));
    }
  }

  // A list, or a list of equally long lists, of whole numbers.
  template <class Int>
  void integers(const std::string& name, std::vector<Int>& out) {
    if (const json* values = list(name)) append_integers(*values, name, kRows, out);
  }

  template <class Int>
  void integer(const std::string& name, Int& out) {
    std::vector<Int> one;
    if (has(name)) append_integers(json::array({object_[name]}), name, kValues, one);
    if (one.size() == 1) out = one[0];
  }

  void scalar(const std::string& name, double& out) {
    if (has(name)) out = number(object_[name], name);
  }

 private:
  enum Holds { kValues, kRows };

  void fail(StatusCode code, const std::string& message) {
    if (status_.ok()) status_ = Status(code, owner_ + message);
  }

  const json* list(const std::string& name) {
    const auto it = object_.find(name);
    if (it == object_.end()) return nullptr;
    if (it->is_array()) return &*it;
    fail(kHeadBadConfig, name + " is no list; accepted: a list");
    return nullptr;
  }

  double number(const json& value, const std::string& at) {
    if (value.is_number()) return value.get<double>();
    if (value == "inf") return std::numeric_limits<double>::infinity();
    if (value == "-inf") return -std::numeric_limits<double>::infinity();
    if (value != "nan") {
      fail(kHeadBadConfig, at + " holds something that is no number; accepted: numbers, \"inf\", "
                                "\"-inf\", \"nan\"");
    }
    return std::numeric_limits<double>::quiet_NaN();
  }

  template <class Int>
  void append_integers(const json& values, const std::string& name, Holds holds,
                       std::vector<Int>& out) {
    for (const json& value : values) {
      if (value.is_array() && holds == kRows) {
        if (value.size() != values[0].size()) {
          fail(kHeadShapeMismatch, name + " has rows of " + std::to_string(values[0].size()) +
                                       " and " + std::to_string(value.size()) +
                                       " values; accepted: equally many");
        }
        append_integers(value, name, kValues, out);
      } else if (value.is_boolean()) {
        out.push_back(static_cast<Int>(value.get<bool>()));
      } else if (value.is_number_integer() && std::in_range<Int>(value.get<int64_t>())) {
        out.push_back(value.get<Int>());
      } else {
        fail(kHeadBadConfig, name +
                                 " holds something that is no whole number in range; accepted: "
                                 "whole numbers");
        return;
      }
    }
  }

  const json& object_;
  std::string owner_;
  Status status_ = kHeadOk;
};

constexpr std::string_view kInputFields[] = {"logits",
                                             "hidden",
                                             "weight",
                                             "bias",
                                             "adapter_a",
                                             "adapter_b",
                                             "labels",
                                             "token_weights",
                                             "class_weights",
                                             "mask",
                                             "advantages",
                                             "old_log_probs",
                                             "reference_log_probs",
                                             "segments",
                                             "n_segments",
                                             "pairs",
                                             "group_shift",
                                             "group_log_sum",
                                             "group_label_log_prob",
                                             "group_distance",
                                             "group_entropy",
                                             "teachers",
                                             "teacher_logits",
                                             "teacher_hidden",
                                             "teacher_weight",
                                             "teacher_ids",
                                             "teacher_log_probs",
                                             "upstream",
                                             "upstream_rows"};
constexpr std::string_view kSkippedFields[] = {"name", "note", "expected"};
constexpr std::string_view kTeacherFields[] = {"logits", "hidden", "weight", "ids", "log_probs"};

// One teacher's inputs, whose fields start with `prefix`, and the description that follows from
// their shapes.
Status read_teacher(const json& object, const std::string& owner, const std::string& prefix,
                    HeadTeacher& inputs, json& description) {
  Arrays arrays(object, owner);
  if (arrays.has(prefix + "ids") || arrays.has(prefix + "log_probs")) {
    Matrix log_probs = arrays.matrix(prefix + "log_probs");
    inputs.log_probs = std::move(log_probs.values);
    arrays.integers(prefix + "ids", inputs.ids);
    description = {{"kind", "top_k"}, {"k", log_probs.cols}};
  } else if (arrays.has(prefix + "hidden")) {
    Matrix hidden = arrays.matrix(prefix + "hidden");
    Matrix weight = arrays.matrix(prefix + "weight");
    inputs.hidden = std::move(hidden.values);
    inputs.weight = std::move(weight.values);
    description = {{"kind", "hidden"}, {"vocab", weight.rows}, {"d_model", weight.cols}};
  } else {
    Matrix logits = arrays.matrix(prefix + "logits");
    inputs.logits = std::move(logits.values);
    description = {{"kind", "logits"}, {"vocab", logits.cols}};
  }
  return arrays.status();
}

Status check_fields(const json& object, const std::string& owner,
                    const std::vector<std::string_view>& known) {
  for (const auto& [name, value] : object.items()) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      return unknown_field(owner, name, known);
    }
  }
  return kHeadOk;
}

// The configuration's part of the case, with the options and teachers that follow from its inputs.
json config_part(const json& object) {
  json config = json::object();
  for (const std::string_view name : head_config_fields()) {
    if (const auto it = object.find(name); it != object.end()) config[std::string(name)] = *it;
  }
  config.erase("teachers");
  if (object.contains("bias")) config["bias"] = true;
  if (const auto it = object.find("adapter_a"); it != object.end()) {
    config["adapter_rank"] = it->size();
  }
  return config;
}

Result<HeadCase> read_case(const json& object) {
  if (!object.is_object()) return {kHeadBadConfig, "the case is no object; accepted: an object"};
  std::vector<std::string_view> known(std::begin(kInputFields), std::end(kInputFields));
  for (const std::string_view name : head_config_fields()) known.push_back(name);
  known.insert(known.end(), std::begin(kSkippedFields), std::end(kSkippedFields));
  if (Status status = check_fields(object, "", known); !status.ok()) return status;

  HeadCase result;
  HeadInputs& in = result.inputs;
  json config = config_part(object);
  json teachers = json::array();
  if (const auto it = object.find("teachers"); it != object.end()) {
    if (!it->is_array()) return {kHeadBadConfig, "teachers is no list; accepted: a list"};
    for (size_t i = 0; i < it->size(); ++i) {
      const std::string owner = "teachers[" + std::to_string(i) + "]";
      if (!(*it)[i].is_object()) return {kHeadBadConfig, owner + " is no object"};
      Status status =
          check_fields((*it)[i], owner, {std::begin(kTeacherFields), std::end(kTeacherFields)});
      if (status.ok()) {
        status = read_teacher((*it)[i], owner + ": ", "", in.teachers.emplace_back(),
                              teachers.emplace_back());
      }
      if (!status.ok()) return status;
    }
  } else if (object.contains("teacher_logits") || object.contains("teacher_hidden") ||
             object.contains("teacher_ids")) {
    Status status =
        read_teacher(object, "", "teacher_", in.teachers.emplace_back(), teachers.emplace_back());
    if (!status.ok()) return status;
  }
  if (!teachers.empty()) config["teachers"] = std::move(teachers);
  Result<lossk::HeadConfig> parsed = head_config_from_json(config.dump());
  if (!parsed) return parsed.status();
  result.config = *std::move(parsed);

  Arrays arrays(object, "");
  if (arrays.has("hidden")) {
    Matrix hidden = arrays.matrix("hidden"), weight = arrays.matrix("weight");
    in.shape = {hidden.rows, weight.cols, weight.rows};
    in.hidden = std::move(hidden.values);
    in.weight = std::move(weight.values);
    in.adapter_a = arrays.matrix("adapter_a").values;
    in.adapter_b = arrays.matrix("adapter_b").values;
  }
  if (arrays.has("logits")) {
    Matrix logits = arrays.matrix("logits");
    if (arrays.has("hidden")) {
      return {kHeadBadConfig, "logits and hidden are given; accepted: one of the two"};
    }
    in.shape = {logits.rows, 0, logits.cols};
    in.logits = std::move(logits.values);
  }
  arrays.numbers("bias", in.bias);
  arrays.integers("labels", in.labels);
  arrays.numbers("token_weights", in.token_weights);
  arrays.numbers("class_weights", in.class_weights);
  arrays.integers("mask", in.mask);
  arrays.numbers("advantages", in.advantages);
  arrays.numbers("old_log_probs", in.old_log_probs);
  arrays.numbers("reference_log_probs", in.reference_log_probs);
  arrays.numbers("group_shift", in.group_shift);
  arrays.numbers("group_log_sum", in.group_log_sum);
  arrays.numbers("group_label_log_prob", in.group_label_log_prob);
  arrays.numbers("group_distance", in.group_distance);
  arrays.numbers("group_entropy", in.group_entropy);
  arrays.integers("segments", in.segments);
  arrays.integers("pairs", in.pairs);
  for (const int64_t segment : in.segments) {
    if (segment >= in.n_segments) in.n_segments = segment == INT64_MAX ? segment : segment + 1;
  }
  arrays.integer("n_segments", in.n_segments);
  arrays.scalar("upstream", in.upstream);
  arrays.numbers("upstream_rows", in.upstream_rows);
  if (!arrays.status().ok()) return arrays.status();
  return result;
}

}  // namespace

Result<HeadCases> head_cases_from_json(std::string_view text) {
  const json document = json::parse(text, nullptr, false);
  if (!document.is_object()) {
    return {kHeadBadConfig,
            document.is_discarded()
                ? "the document is not JSON; accepted: a case, or {\"cases\": []}"
                : "the document is no object; accepted: a case, or {\"cases\": []}"};
  }
  HeadCases result;
  const auto cases = document.find("cases");
  result.listed = cases != document.end();
  if (!result.listed) {
    result.cases.push_back(read_case(document));
    return result;
  }
  if (!cases->is_array()) return {kHeadBadConfig, "cases is no list; accepted: a list of cases"};
  for (const json& each : *cases) result.cases.push_back(read_case(each));
  return result;
}

}  // namespace ullage::runtime
