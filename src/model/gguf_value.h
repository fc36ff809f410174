// A typed metadata value of a GGUF file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace ullage::model {

enum class GgufType : uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
};

// Bytes of a scalar as stored; of a string, and of an array too, the 8 of its length.
uint64_t size_of(GgufType type);

// A view of one metadata value inside the mapping. Lengths, types and booleans are checked.
struct GgufValue {
  GgufType type = GgufType::kUint8;  // of the elements, where it is an array
  bool is_array = false;
  uint64_t count = 1;                  // elements of an array
  std::span<const std::byte> payload;  // a string's bytes; otherwise the elements as stored

  // Of a scalar, or nothing where it is of another kind; an integer above 2^63 - 1 is nothing too.
  std::optional<int64_t> integer() const;
  std::optional<double> real() const;  // float32 or float64
  std::optional<bool> boolean() const;
  std::optional<std::string_view> string() const;  // any bytes

  // Of an array, or nothing where it is of another kind. Strings may hold any bytes.
  std::optional<std::vector<std::string_view>> strings() const;
  std::optional<std::vector<int64_t>> integers() const;
};

}  // namespace ullage::model
