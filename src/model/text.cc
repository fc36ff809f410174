#include "model/text.h"

#include <fmt/format.h>

#include <cstdint>

namespace ullage::model {
namespace {

constexpr size_t kShownBytes = 160;

void append_escaped(std::string& out, std::string_view text, bool keep_high_bytes) {
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte < 0x20 || byte == 0x7f || (byte > 0x7f && !keep_high_bytes)) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
}

}  // namespace

bool is_utf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const auto lead = static_cast<uint8_t>(text[at]);
    int following;
    uint32_t code;
    if (lead < 0x80) {
      ++at;
      continue;
    } else if (lead >= 0xc2 && lead < 0xe0) {
      following = 1;
      code = lead & 0x1fu;
    } else if (lead >= 0xe0 && lead < 0xf0) {
      following = 2;
      code = lead & 0x0fu;
    } else if (lead >= 0xf0 && lead < 0xf5) {
      following = 3;
      code = lead & 0x07u;
    } else {
      return false;
    }
    if (text.size() - at <= static_cast<size_t>(following)) return false;
    for (int i = 1; i <= following; ++i) {
      const auto byte = static_cast<uint8_t>(text[at + static_cast<size_t>(i)]);
      if ((byte & 0xc0u) != 0x80u) return false;
      code = (code << 6) | (byte & 0x3fu);
    }
    if (following == 2 && (code < 0x800 || (code >= 0xd800 && code < 0xe000))) return false;
    if (following == 3 && (code < 0x10000 || code > 0x10ffff)) return false;
    at += static_cast<size_t>(following) + 1;
  }
  return true;
}

std::string printable(std::string_view text) {
  std::string out;
  if (text.size() <= kShownBytes) {
    append_escaped(out, text, is_utf8(text));
  } else {
    append_escaped(out, text.substr(0, kShownBytes / 2), false);
    out += "...";
    append_escaped(out, text.substr(text.size() - kShownBytes / 4), false);
  }
  return out;
}

std::string in_quotes(std::string_view text) { return "'" + printable(text) + "'"; }

}  // namespace ullage::model
