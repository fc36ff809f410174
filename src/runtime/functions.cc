#include "runtime/functions.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <nlohmann/json.hpp>

#include "runtime/function_table.h"
#include "runtime/json_arguments.h"
#include "runtime/near_name.h"

namespace ullage::runtime {
namespace {

using nlohmann::ordered_json;

std::string dump(const ordered_json& value) {
  // The caller's own bytes appear in errors, so they may be anything: replaced where not UTF-8.
  return value.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

ordered_json to_json(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

ordered_json to_json(const std::vector<double>& list) {
  ordered_json out = ordered_json::array();
  for (double value : list) out.push_back(to_json(value));
  return out;
}

ordered_json to_json(bool value) { return value; }
ordered_json to_json(int64_t value) { return value; }
ordered_json to_json(std::string_view value) { return value; }

ordered_json to_json(const Field& field) {
  return std::visit([](const auto& value) { return to_json(value); }, field);
}

ordered_json to_json(const ReturnValue& value) {
  if (const auto* field = std::get_if<Field>(&value)) return to_json(*field);
  ordered_json out = ordered_json::object();
  for (const auto& [name, field] : std::get<Object>(value)) out[std::string(name)] = to_json(field);
  return out;
}

template <class Named>
std::vector<std::string_view> names_of(const Named& list) {
  std::vector<std::string_view> names;
  names.reserve(list.size());
  for (const auto& one : list) names.push_back(one.name);
  return names;
}

template <class Named>
auto find(const Named& list, std::string_view name) {
  const auto same = [name](const auto& one) { return one.name == name; };
  const auto it = std::find_if(list.begin(), list.end(), same);
  return it == list.end() ? nullptr : &*it;
}

Execution unknown(std::string_view kind, std::string_view message, std::string_view suggestion,
                  const std::vector<std::string_view>& names) {
  std::string text(message);
  if (!suggestion.empty()) text += fmt::format("; did you mean '{}'?", suggestion);
  return {false, error_json(kind, text, fmt::format("one of {}", fmt::join(names, ", ")))};
}

Execution unknown_module(std::string_view name) {
  const std::vector<std::string_view> names = names_of(modules());
  return unknown("unknown_module", fmt::format("there is no module '{}'", name),
                 near_name(name, names), names);
}

Execution unknown_function(const Module& module, std::string_view name) {
  const std::vector<std::string_view> names = names_of(module.functions);
  std::string suggestion(near_name(name, names));
  for (const Module& other : modules()) {
    if (find(other.functions, name)) suggestion = fmt::format("{} {}", other.name, name);
  }
  return unknown("unknown_function",
                 fmt::format("there is no function '{}' in {}", name, module.name), suggestion,
                 names);
}

Execution execute_or_throw(std::string_view module_name, std::string_view function_name,
                           std::string_view args_json) {
  const Module* module = find(modules(), module_name);
  if (module == nullptr) return unknown_module(module_name);
  const Function* function = find(module->functions, function_name);
  if (function == nullptr) return unknown_function(*module, function_name);

  const auto arguments = parse_arguments(*function, args_json);
  if (const auto* error = std::get_if<ArgumentError>(&arguments)) {
    return {false, error_json(error->kind, error->message, error->expected)};
  }
  const ReturnValue result = function->call(std::get<std::vector<Argument>>(arguments));
  return {
      true,
      dump({{"module", module->name}, {"function", function->name}, {"result", to_json(result)}})};
}

ordered_json describe(const Parameter& parameter) {
  ordered_json out = {
      {"name", parameter.name}, {"type", name_of(parameter.type)}, {"doc", parameter.doc}};
  if (parameter.default_value) out["default"] = *parameter.default_value;
  return out;
}

ordered_json describe(const Function& function) {
  ordered_json parameters = ordered_json::array();
  for (const Parameter& parameter : function.parameters) parameters.push_back(describe(parameter));
  const ReturnValue sample = function.sample();
  ordered_json returns = {{"type", name_of(type_of(sample))}, {"doc", function.returns}};
  if (const auto* object = std::get_if<Object>(&sample)) {
    for (const auto& [name, field] : *object) {
      returns["fields"][std::string(name)] = name_of(type_of(field));
    }
  }
  return {{"function", function.name},
          {"doc", function.doc},
          {"parameters", parameters},
          {"returns", returns}};
}

}  // namespace

Execution execute(std::string_view module, std::string_view function, std::string_view args_json) {
  try {
    return execute_or_throw(module, function, args_json);
  } catch (const std::bad_alloc&) {
    return {false, error_json("out_of_memory", "the call does not fit this machine's memory",
                              "smaller arguments")};
  }
}

std::string error_json(std::string_view kind, std::string_view message, std::string_view expected) {
  return dump({{"error", {{"kind", kind}, {"message", message}, {"expected", expected}}}});
}

std::string_view version() { return ULLAGE_VERSION; }

std::string functions_json() {
  ordered_json listed_modules = ordered_json::array();
  for (const Module& module : modules()) {
    ordered_json functions = ordered_json::array();
    for (const Function& function : module.functions) functions.push_back(describe(function));
    listed_modules.push_back(
        {{"module", module.name}, {"doc", module.doc}, {"functions", functions}});
  }
  ordered_json listed_constants = ordered_json::array();
  for (const Constant& constant : constants()) {
    listed_constants.push_back({{"module", constant.module},
                                {"name", constant.name},
                                {"value", to_json(constant.value)},
                                {"doc", constant.doc}});
  }
  return dump(
      {{"version", version()}, {"modules", listed_modules}, {"constants", listed_constants}});
}

}  // namespace ullage::runtime
