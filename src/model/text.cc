#include "model/text.h"

#include <fmt/format.h>

#include <cstdint>

#include "model/utf8.h"

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

std::string printable(std::string_view text) {
  std::string out;
  if (text.size() <= kShownBytes) {
    append_escaped(out, text, utf8_valid_prefix_bytes(text) == text.size());
  } else {
    append_escaped(out, text.substr(0, kShownBytes / 2), false);
    out += "...";
    append_escaped(out, text.substr(text.size() - kShownBytes / 4), false);
  }
  return out;
}

std::string in_quotes(std::string_view text) { return "'" + printable(text) + "'"; }

}  // namespace ullage::model
