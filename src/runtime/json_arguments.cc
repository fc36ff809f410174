#include "runtime/json_arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

namespace ullage::runtime {
namespace {

using nlohmann::json;

struct Word {
  std::string_view text;
  double value;
};
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The bare words Python's json module writes for non-finite floats; longest first, as "Infinity"
// ends
// "-Infinity".
constexpr Word kBareWords[] = {{"-Infinity", -kInfinity}, {"Infinity", kInfinity}, {"NaN", kNan}};
constexpr Word kQuotedWords[] = {{"nan", kNan}, {"inf", kInfinity},      {"-inf", -kInfinity},
                                 {"NaN", kNan}, {"Infinity", kInfinity}, {"-Infinity", -kInfinity}};

// Puts quotes around the bare words, which no JSON parser reads, outside of strings.
std::string quote_bare_words(std::string_view text) {
  std::string quoted;
  quoted.reserve(text.size());
  bool in_string = false;
  for (size_t i = 0; i < text.size();) {
    const auto is_here = [&](const Word& word) { return text.substr(i).starts_with(word.text); };
    const auto word = std::find_if(std::begin(kBareWords), std::end(kBareWords), is_here);
    if (!in_string && word != std::end(kBareWords)) {
      quoted.append(1, '"').append(word->text).append(1, '"');
      i += word->text.size();
      continue;
    }
    if (text[i] == '"') in_string = !in_string;
    const bool escape = in_string && text[i] == '\\' && i + 1 < text.size();
    quoted.append(text.substr(i, escape ? 2 : 1));
    i += escape ? 2 : 1;
  }
  return quoted;
}

// A value as an error message shows it: short, and never the inside of a container.
std::string shown(const json& value) {
  if (value.is_array()) return fmt::format("a list of {}", value.size());
  if (value.is_object()) return "an object";
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  constexpr size_t kLongest = 40;
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

std::optional<int64_t> to_int(const json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) {
    // Beyond 2^53 a float no longer says which whole number was meant; an integer literal too long
    // for 64 bits arrives here as one.
    const auto number = value.get<double>();
    if (number == std::trunc(number) && std::abs(number) <= 0x1p53) {
      return static_cast<int64_t>(number);
    }
  }
  return std::nullopt;
}

std::optional<double> to_float(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (!value.is_string()) return std::nullopt;
  const auto& text = value.get_ref<const std::string&>();
  for (const Word& word : kQuotedWords) {
    if (text == word.text) return word.value;
  }
  return std::nullopt;
}

constexpr std::string_view kExpectedInt =
    "a whole number of at most 64 bits (53 where it has a point or an exponent)";
constexpr std::string_view kExpectedFloat = R"(a number, or "nan", "inf" or "-inf")";

ArgumentError type_error(std::string_view where, std::string_view expected, const json& value) {
  return {"type", fmt::format("{} must be {}, got {}", where, expected, shown(value)),
          std::string(expected)};
}

template <class T, class Convert>
std::variant<Argument, ArgumentError> to_scalar(const Parameter& parameter, const json& value,
                                                Convert convert, std::string_view expected) {
  const std::optional<T> scalar = convert(value);
  if (!scalar) return type_error(parameter.name, expected, value);
  return Argument(*scalar);
}

template <class T, class Convert>
std::variant<Argument, ArgumentError> to_list(const Parameter& parameter, const json& value,
                                              Convert convert, std::string_view expected) {
  if (!value.is_array()) {
    return type_error(parameter.name, fmt::format("a {}", name_of(parameter.type)), value);
  }
  std::vector<T> list;
  list.reserve(value.size());
  for (const json& element : value) {
    const std::optional<T> scalar = convert(element);
    if (!scalar) {
      return type_error(fmt::format("{}[{}]", parameter.name, list.size()), expected, element);
    }
    list.push_back(*scalar);
  }
  return Argument(std::move(list));
}

std::variant<Argument, ArgumentError> to_argument(const Parameter& parameter, const json& value) {
  switch (parameter.type) {
    case ValueType::kInt:
      return to_scalar<int64_t>(parameter, value, to_int, kExpectedInt);
    case ValueType::kFloat:
      return to_scalar<double>(parameter, value, to_float, kExpectedFloat);
    case ValueType::kIntList:
      return to_list<int64_t>(parameter, value, to_int, kExpectedInt);
    case ValueType::kFloatList:
      return to_list<double>(parameter, value, to_float, kExpectedFloat);
    case ValueType::kBool:
    case ValueType::kString:
    case ValueType::kObject:
      break;
  }
  return type_error(parameter.name, "a type this table does not pass", value);
}

}  // namespace

std::string signature(const Function& function) {
  std::string text(function.name);
  text += '(';
  for (const Parameter& parameter : function.parameters) {
    if (&parameter != function.parameters.data()) text += ", ";
    text += fmt::format("{}: {}", parameter.name, name_of(parameter.type));
    if (parameter.default_value) text += fmt::format(" = {}", *parameter.default_value);
  }
  return text + ')';
}

std::variant<std::vector<Argument>, ArgumentError> parse_arguments(const Function& function,
                                                                   std::string_view args_json) {
  json values;
  try {
    values = json::parse(quote_bare_words(args_json));
  } catch (const json::exception& error) {
    // what() begins with the exception's own "[json.exception.parse_error.101] ".
    const std::string_view what = error.what();
    return ArgumentError{
        "json", fmt::format("the arguments are not JSON: {}", what.substr(what.find("] ") + 2)),
        "a JSON array: " + signature(function)};
  }
  if (!values.is_array()) {
    return ArgumentError{"json", fmt::format("the arguments must be a list, got {}", shown(values)),
                         "a JSON array: " + signature(function)};
  }
  const auto& parameters = function.parameters;
  const auto n_required = static_cast<size_t>(std::count_if(
      parameters.begin(), parameters.end(), [](const auto& p) { return !p.default_value; }));
  if (values.size() < n_required || values.size() > parameters.size()) {
    const std::string count = n_required == parameters.size()
                                  ? fmt::format("{}", n_required)
                                  : fmt::format("{} to {}", n_required, parameters.size());
    return ArgumentError{"arity",
                         fmt::format("{} takes {} argument{}, got {}", function.name, count,
                                     count == "1" ? "" : "s", values.size()),
                         signature(function)};
  }
  for (size_t i = values.size(); i < parameters.size(); ++i) {
    values.push_back(parameters[i].default_value.value_or(0));  // there is one: i >= n_required
  }
  std::vector<Argument> arguments;
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::variant<Argument, ArgumentError> argument = to_argument(parameters[i], values[i]);
    if (auto* error = std::get_if<ArgumentError>(&argument)) return std::move(*error);
    arguments.push_back(std::get<Argument>(std::move(argument)));
  }
  return arguments;
}

}  // namespace ullage::runtime
