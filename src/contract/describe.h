// Numbers as text for messages: the shortest digits that read back to the same value.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>

namespace ullage {

template <class Number>
std::string describe(Number value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, value);
  return {text, end};
}

inline std::string describe_shape(int64_t rows, int64_t cols) {
  return "[" + describe(rows) + "][" + describe(cols) + "]";
}

}  // namespace ullage
