// The byte alphabet of GPT-2 (https://github.com/openai/gpt-2): each byte as one printable code
// point, so that a vocabulary of byte strings can be written as text. The 188 bytes that are
// printable in Latin-1, the soft hyphen apart, stand for themselves; the other 68, in order, are
// U+0100 to U+0143.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ullage::model {

// The bytes that `text` (UTF-8, all of the alphabet) writes; nullopt where a code point is outside
// it.
std::optional<std::string> bytes_of_alphabet(std::string_view text);

}  // namespace ullage::model
