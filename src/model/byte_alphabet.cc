#include "model/byte_alphabet.h"

#include <array>

namespace ullage::model {
namespace {

constexpr uint32_t kAlphabetEnd = 0x144;  // one above the last code point in use

constexpr bool stands_for_itself(uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

// Code point -> byte; -1 outside the alphabet.
constexpr std::array<int16_t, kAlphabetEnd> kByteOf = [] {
  std::array<int16_t, kAlphabetEnd> table{};
  table.fill(-1);
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    table[stands_for_itself(byte) ? byte : next++] = static_cast<int16_t>(byte);
  }
  return table;
}();
static_assert(kByteOf[0x120] == ' ' && kByteOf[0x10a] == '\n' && kByteOf[0x143] == 0xad);

}  // namespace

std::optional<std::string> bytes_of_alphabet(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    uint32_t code_point = static_cast<uint8_t>(text[i]);
    if (code_point >= 0x80) {
      // The alphabet lies below U+0800, so a sequence has at most two bytes.
      if (code_point < 0xc2 || code_point > 0xdf || i + 1 == text.size()) return std::nullopt;
      const uint32_t second = static_cast<uint8_t>(text[++i]);
      if ((second & 0xc0u) != 0x80) return std::nullopt;
      code_point = (code_point & 0x1fu) << 6 | (second & 0x3fu);
    }
    if (code_point >= kAlphabetEnd || kByteOf[code_point] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kByteOf[code_point]));
  }
  return bytes;
}

}  // namespace ullage::model
