// Well-formed UTF-8 as the Unicode standard has it (table 3-7): no overlong forms, no surrogates,
// nothing above U+10FFFF.
#pragma once

#include <cstddef>
#include <string_view>

namespace ullage::model {

// Bytes of the well-formed sequence that `text` starts with; 0 where it starts with none.
size_t utf8_sequence_bytes(std::string_view text);

// Bytes of the longest prefix of `text` that is well-formed throughout.
size_t utf8_valid_prefix_bytes(std::string_view text);

// Bytes at the end of `text` (0 to 3) that begin a well-formed sequence and do not finish it.
size_t utf8_unfinished_tail_bytes(std::string_view text);

}  // namespace ullage::model
