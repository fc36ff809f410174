// "Did you mean": the known name closest to a mistyped one.
#pragma once

#include <span>
#include <string_view>

namespace ullage::runtime {

// The candidate fewest edits (insert, delete, replace) away, or "" where even that one differs in
// more than a third of the name. Names longer than 64 characters match nothing.
std::string_view near_name(std::string_view name, std::span<const std::string_view> candidates);

}  // namespace ullage::runtime
