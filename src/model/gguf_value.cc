#include "model/gguf_value.h"

#include <cstring>
#include <utility>

namespace ullage::model {
namespace {

template <class T>
T load(std::span<const std::byte> bytes, uint64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

std::optional<int64_t> load_integer(GgufType type, std::span<const std::byte> bytes, uint64_t i) {
  switch (type) {
    case GgufType::kUint8:
      return load<uint8_t>(bytes, i);
    case GgufType::kInt8:
      return load<int8_t>(bytes, i);
    case GgufType::kUint16:
      return load<uint16_t>(bytes, i);
    case GgufType::kInt16:
      return load<int16_t>(bytes, i);
    case GgufType::kUint32:
      return load<uint32_t>(bytes, i);
    case GgufType::kInt32:
      return load<int32_t>(bytes, i);
    case GgufType::kInt64:
      return load<int64_t>(bytes, i);
    case GgufType::kUint64: {
      const auto value = load<uint64_t>(bytes, i);
      if (!std::in_range<int64_t>(value)) return {};
      return static_cast<int64_t>(value);
    }
    default:
      return {};
  }
}

}  // namespace

uint64_t size_of(GgufType type) {
  switch (type) {
    case GgufType::kUint8:
    case GgufType::kInt8:
    case GgufType::kBool:
      return 1;
    case GgufType::kUint16:
    case GgufType::kInt16:
      return 2;
    case GgufType::kUint32:
    case GgufType::kInt32:
    case GgufType::kFloat32:
      return 4;
    case GgufType::kString:
    case GgufType::kArray:
    case GgufType::kUint64:
    case GgufType::kInt64:
    case GgufType::kFloat64:
      return 8;
  }
  return 8;
}

std::optional<int64_t> GgufValue::integer() const {
  if (is_array) return {};
  return load_integer(type, payload, 0);
}

std::optional<double> GgufValue::real() const {
  if (is_array) return {};
  if (type == GgufType::kFloat32) return static_cast<double>(load<float>(payload, 0));
  if (type == GgufType::kFloat64) return load<double>(payload, 0);
  return {};
}

std::optional<bool> GgufValue::boolean() const {
  if (is_array || type != GgufType::kBool) return {};
  return payload[0] != std::byte{0};
}

std::optional<std::string_view> GgufValue::string() const {
  if (is_array || type != GgufType::kString) return {};
  return std::string_view(reinterpret_cast<const char*>(payload.data()), payload.size());
}

std::optional<std::vector<std::string_view>> GgufValue::strings() const {
  if (!is_array || type != GgufType::kString) return {};
  std::vector<std::string_view> list;
  auto rest = payload;
  for (uint64_t i = 0; i < count; ++i) {
    const auto size = load<uint64_t>(rest, 0);
    list.emplace_back(reinterpret_cast<const char*>(rest.data()) + sizeof(size), size);
    rest = rest.subspan(sizeof(size) + size);
  }
  return list;
}

std::optional<std::vector<int64_t>> GgufValue::integers() const {
  if (!is_array) return {};
  std::vector<int64_t> list;
  for (uint64_t i = 0; i < count; ++i) {
    const auto value = load_integer(type, payload, i);
    if (!value) return {};
    list.push_back(*value);
  }
  return list;
}

}  // namespace ullage::model
