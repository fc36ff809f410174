// Text that came from a file, made safe to show.
#pragma once

#include <string>
#include <string_view>

namespace ullage::model {

// The text for an error message: control bytes, and all bytes above 0x7e of a text that is not
// UTF-8, as \xNN; a long text loses its middle.
std::string printable(std::string_view text);
std::string in_quotes(std::string_view text);  // 'the same'

}  // namespace ullage::model
