// A JSON document, read strictly: UTF-8 without a byte order mark, no comments, no trailing commas,
// no key twice in an object, bounded depth and size.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ullage/status.h"

namespace ullage::model {

struct JsonMember;

struct JsonValue {
  using Array = std::vector<JsonValue>;
  using Object = std::vector<JsonMember>;  // ordered by key

  // Integers that int64_t cannot hold, and all numbers with a point or an exponent, are doubles.
  std::variant<std::monostate, bool, int64_t, double, std::string, Array, Object> value;

  bool is_null() const { return std::holds_alternative<std::monostate>(value); }
  template <class T>
  const T* get() const {
    return std::get_if<T>(&value);
  }
  // The member of an object; nullptr where there is none, or where this is no object.
  const JsonValue* find(std::string_view key) const;
};

struct JsonMember {
  std::string key;
  JsonValue value;
};

// What a value is, for an error message: "string 'abc'", "number 1000", "an array of 3".
std::string describe(const JsonValue& value);

struct JsonLimits {
  int max_depth = 64;
  int64_t max_values = int64_t{1} << 22;  // what bounds the memory: 72 bytes each, at most
};

// 649 for a key twice and 655 for all else, with the origin (a file's name) and the byte offset or
// the key at fault.
Result<JsonValue> parse_json(std::string_view text, std::string_view origin,
                             const JsonLimits& limits = {});

}  // namespace ullage::model
