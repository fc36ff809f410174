#include "model/field_reader.h"

#include <fmt/format.h>

#include <cmath>

#include "model/text.h"

namespace ullage::model {
namespace {

std::string describe(const Scalar& scalar) {
  struct Describer {
    std::string operator()(bool flag) const { return flag ? "true" : "false"; }
    std::string operator()(int64_t integer) const { return fmt::format("{}", integer); }
    std::string operator()(double real) const { return fmt::format("the real number {}", real); }
    std::string operator()(const std::string& text) const {
      return "the string " + in_quotes(text);
    }
    std::string operator()(const NoScalar& other) const { return other.description; }
  };
  return std::visit(Describer(), scalar);
}

}  // namespace

void FieldReader::refuse(StatusCode code, std::string_view key, std::string_view accepted) {
  if (!ok()) return;
  const auto scalar = lookup_(key);
  status_ = {code, fmt::format("{}: {} is {}; {}", origin_, in_quotes(key),
                               scalar ? describe(*scalar) : "missing", accepted)};
}

void FieldReader::require(bool ok, std::string_view key, std::string_view accepted,
                          StatusCode code) {
  if (!ok) refuse(code, key, accepted);
}

int64_t FieldReader::integer(std::string_view key, int64_t min, int64_t max,
                             std::optional<int64_t> fallback) {
  const auto scalar = lookup_(key);
  if (!scalar && fallback) return *fallback;
  const auto* value = scalar ? std::get_if<int64_t>(&*scalar) : nullptr;
  if (value != nullptr && *value >= min && *value <= max) return *value;
  refuse(kModelBadField, key, fmt::format("an integer from {} to {} is read", min, max));
  return fallback.value_or(0);
}

double FieldReader::positive(std::string_view key, std::optional<double> fallback) {
  const auto scalar = lookup_(key);
  if (!scalar && fallback) return *fallback;
  double value = 0;
  if (scalar) {
    if (const auto* real = std::get_if<double>(&*scalar)) value = *real;
    if (const auto* whole = std::get_if<int64_t>(&*scalar)) value = static_cast<double>(*whole);
  }
  if (std::isfinite(value) && value > 0) return value;
  refuse(kModelBadField, key, "a finite number above 0 is read");
  return fallback.value_or(0);
}

bool FieldReader::flag(std::string_view key, bool fallback) {
  const auto scalar = lookup_(key);
  if (!scalar) return fallback;
  if (const auto* value = std::get_if<bool>(&*scalar)) return *value;
  refuse(kModelBadField, key, "true or false is read");
  return fallback;
}

std::string FieldReader::text(std::string_view key, std::optional<std::string> fallback) {
  auto scalar = lookup_(key);
  if (!scalar && fallback) return *fallback;
  if (scalar) {
    if (auto* value = std::get_if<std::string>(&*scalar)) return std::move(*value);
  }
  refuse(kModelBadField, key, "a string is read");
  return fallback.value_or("");
}

}  // namespace ullage::model
