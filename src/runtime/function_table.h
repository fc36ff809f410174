// The one table of contract functions. `ullage exec`, `ullage functions`, docs/functions.md, the C
// ABI and Python all read it, so a function is described in one place: function_table.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace ullage::runtime {

enum class ValueType { kBool, kInt, kFloat, kString, kIntList, kFloatList, kObject };

std::string_view name_of(ValueType type);

// What a caller passes.
using Argument = std::variant<int64_t, double, std::vector<int64_t>, std::vector<double>>;

// What a function returns: one value, or an object whose fields keep their order.
using Field = std::variant<bool, int64_t, double, std::string_view, std::vector<double>>;
using Object = std::vector<std::pair<std::string_view, Field>>;
using ReturnValue = std::variant<Field, Object>;

ValueType type_of(const Field& field);
ValueType type_of(const ReturnValue& value);  // kObject for an object

struct Parameter {
  std::string_view name;
  std::string_view doc;
  std::optional<int64_t> default_value = {};
  ValueType type = ValueType::kInt;  // filled in from the C++ function's own signature
};

struct Function {
  std::string_view name;
  std::string_view doc;
  std::vector<Parameter> parameters;  // those with a default come last
  std::string_view returns;
  // Takes one argument per parameter, of the parameter's type.
  ReturnValue (*call)(std::span<const Argument> arguments);
  ReturnValue (*sample)();  // a value of the returned shape, whose types describe the result
};

struct Module {
  std::string_view name;
  std::string_view doc;
  std::vector<Function> functions;
};

struct Constant {
  std::string_view module;
  std::string_view name;
  Field value;
  std::string_view doc;
};

std::span<const Module> modules();
std::span<const Constant> constants();

}  // namespace ullage::runtime
