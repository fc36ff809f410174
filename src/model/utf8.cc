#include "model/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace ullage::model {
namespace {

// What the first byte of a sequence promises: its length (0: no sequence starts so) and the range
// of its second byte, which is where overlong forms, surrogates and values above U+10FFFF are ruled
// out.
struct Lead {
  size_t bytes;
  uint8_t second_low;
  uint8_t second_high;
};

Lead lead_of(uint8_t byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xc2) return {0, 0, 0};
  if (byte < 0xe0) return {2, 0x80, 0xbf};
  if (byte == 0xe0) return {3, 0xa0, 0xbf};
  if (byte == 0xed) return {3, 0x80, 0x9f};
  if (byte < 0xf0) return {3, 0x80, 0xbf};
  if (byte == 0xf0) return {4, 0x90, 0xbf};
  if (byte < 0xf4) return {4, 0x80, 0xbf};
  if (byte == 0xf4) return {4, 0x80, 0x8f};
  return {0, 0, 0};
}

// How many bytes at the start of `text` (at most lead.bytes) agree with its first byte's promise.
size_t agreeing_bytes(std::string_view text, const Lead& lead) {
  const size_t limit = std::min(lead.bytes, text.size());
  for (size_t i = 1; i < limit; ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    const uint8_t low = i == 1 ? lead.second_low : 0x80;
    const uint8_t high = i == 1 ? lead.second_high : 0xbf;
    if (byte < low || byte > high) return i;
  }
  return limit;
}

}  // namespace

size_t utf8_sequence_bytes(std::string_view text) {
  if (text.empty()) return 0;
  const Lead lead = lead_of(static_cast<uint8_t>(text[0]));
  return agreeing_bytes(text, lead) == lead.bytes ? lead.bytes : 0;
}

size_t utf8_valid_prefix_bytes(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    uint64_t word;
    if (text.size() - at >= sizeof word) {
      std::memcpy(&word, text.data() + at, sizeof word);
      if ((word & 0x8080808080808080u) == 0) {  // eight ASCII bytes
        at += sizeof word;
        continue;
      }
    }
    const size_t bytes = utf8_sequence_bytes(text.substr(at));
    if (bytes == 0) break;
    at += bytes;
  }
  return at;
}

size_t utf8_unfinished_tail_bytes(std::string_view text) {
  // A lead byte never continues a sequence, so a tail that starts with one is aligned.
  for (size_t tail = std::min<size_t>(3, text.size()); tail > 0; --tail) {
    const std::string_view end = text.substr(text.size() - tail);
    const Lead lead = lead_of(static_cast<uint8_t>(end[0]));
    if (lead.bytes > tail && agreeing_bytes(end, lead) == tail) return tail;
  }
  return 0;
}

}  // namespace ullage::model
