#include "model/gguf_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

namespace ullage::model {
namespace {

std::optional<int64_t> same_in_every_layer(const GgufValue& value) {
  const auto list = value.integers();
  if (!list || list->empty()) return {};
  if (std::ranges::any_of(*list, [&](int64_t item) { return item != list->front(); })) return {};
  return list->front();
}

std::optional<Scalar> scalar_of(const GgufValue& value) {
  if (const auto flag = value.boolean()) return *flag;
  if (const auto integer = value.integer()) return *integer;
  if (const auto real = value.real()) return *real;
  if (const auto text = value.string()) return std::string(*text);
  if (const auto same = same_in_every_layer(value)) return *same;
  return NoScalar{value.is_array ? fmt::format("an array of {}", value.count)
                                 : "an integer above 2^63 - 1"};
}

}  // namespace

FieldReader gguf_fields(const GgufFile& file, std::string_view origin) {
  return {origin, [&file](std::string_view key) -> std::optional<Scalar> {
            const GgufValue* value = file.find(key);
            if (value == nullptr) return {};
            return scalar_of(*value);
          }};
}

}  // namespace ullage::model
