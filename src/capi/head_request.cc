#include "capi/head_request.h"

#include <array>
#include <concepts>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "runtime/head_config_json.h"

namespace ullage::capi {
namespace {

using nlohmann::json;

// Takes the named fields of one object; the first fault stays.
class Fields {
 public:
  Fields(const json& object, std::string owner) : object_(object), owner_(std::move(owner)) {
    if (!object.is_object()) refuse(owner_, object, "an object");
  }

  template <std::integral Int>
  void take(std::string_view name, Int& out) {
    const json* value = find(name);
    if (!value) return;
    if constexpr (std::same_as<Int, bool>) {
      if (!value->is_boolean()) return refuse(name, *value, "true or false");
      out = value->get<bool>();
    } else {
      const bool fits = value->is_number_unsigned() ? std::in_range<Int>(value->get<uint64_t>())
                                                    : value->is_number_integer() &&
                                                          std::in_range<Int>(value->get<int64_t>());
      if (!fits) return refuse(name, *value, "a whole number");
      out = value->get<Int>();
    }
  }
  void take(std::string_view name, double& out) {
    if (const json* value = find(name)) {
      if (!value->is_number()) return refuse(name, *value, "a number");
      out = value->get<double>();
    }
  }
  void take(std::string_view name, DType& out) { named(name, runtime::dtype_from_name, out); }
  void take(std::string_view name, lossk::Implementation& out) {
    named(name, runtime::implementation_from_name, out);
  }
  void take(std::string_view name, std::string& out) {
    if (const json* value = find(name)) {
      if (!value->is_string()) return refuse(name, *value, "a string");
      out = value->get<std::string>();
    }
  }
  // The object under `name`, an empty one where it is absent.
  json object(std::string_view name) {
    const json* value = find(name);
    return value ? *value : json::object();
  }

  void note(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  Status finish() {
    if (!object_.is_object()) return status_;
    for (const auto& [name, value] : object_.items()) {
      if (std::find(asked_.begin(), asked_.end(), name) == asked_.end()) {
        note(runtime::unknown_field(owner_, name, asked_));
      }
    }
    return status_;
  }

 private:
  template <class Enum>
  void named(std::string_view name, Result<Enum> (*from_name)(std::string_view), Enum& out) {
    std::string text;
    take(name, text);
    if (text.empty()) return;
    const Result<Enum> found = from_name(text);
    if (found) {
      out = *found;
    } else {
      note(found.status());
    }
  }
  const json* find(std::string_view name) {
    asked_.push_back(name);
    if (!object_.is_object()) return nullptr;
    const auto it = object_.find(name);
    return it == object_.end() ? nullptr : &*it;
  }
  void refuse(std::string_view name, const json& value, std::string_view accepted) {
    note({kHeadBadConfig,
          std::string(name) + " is " +
              value.dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 40) +
              "; accepted: " + std::string(accepted)});
  }

  const json& object_;
  std::string owner_;
  std::vector<std::string_view> asked_;
  Status status_ = kHeadOk;
};

}  // namespace

Result<HeadRequest> head_request_from_json(std::string_view text) {
  const json document = json::parse(text, nullptr, false);
  if (document.is_discarded()) {
    return {kHeadBadConfig,
            "the request is not JSON; accepted: an object with n_tok, vocab, config"};
  }
  HeadRequest out;
  Fields top(document, "the request");
  top.take("n_tok", out.shape.n_tok);
  top.take("d_model", out.shape.d_model);
  top.take("vocab", out.shape.vocab);
  top.take("device", out.device);
  const json config = top.object("config"), request = top.object("request"),
             limits = top.object("limits");
  if (Status status = top.finish(); !status.ok()) return status;
  if (out.device != "cpu" && out.device != "cuda") {
    return {kHeadUnknownKind, "device is '" + out.device + "'; accepted: cpu, cuda"};
  }

  Fields wanted(request, "request");
  wanted.take("input_dtype", out.request.input_dtype);
  wanted.take("weight_dtype", out.request.weight_dtype);
  wanted.take("grad_dtype", out.request.grad_dtype);
  wanted.take("d_weight_dtype", out.request.d_weight_dtype);
  wanted.take("d_logits", out.request.d_logits);
  wanted.take("d_hidden", out.request.d_hidden);
  wanted.take("d_weight", out.request.d_weight);
  wanted.take("d_bias", out.request.d_bias);
  wanted.take("d_adapter", out.request.d_adapter);
  wanted.take("entropy", out.request.entropy);
  wanted.take("policy_metrics", out.request.policy_metrics);
  if (Status status = wanted.finish(); !status.ok()) return status;

  Fields limited(limits, "limits");
  limited.take("budget_bytes", out.limits.budget_bytes);
  limited.take("chunk", out.limits.chunk);
  limited.take("n_threads", out.limits.n_threads);
  limited.take("implementation", out.limits.implementation);
  limited.take("accumulate", out.accumulate);
  limited.take("filter_tolerance", out.filter_tolerance);
  if (Status status = limited.finish(); !status.ok()) return status;

  Result<lossk::HeadConfig> read = runtime::head_config_from_json(config.dump());
  if (!read) return read.status();
  out.config = *std::move(read);
  return out;
}

}  // namespace ullage::capi
