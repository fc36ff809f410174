// Finds the texts of control and user-defined tokens in a text.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace ullage::model {

class SpecialTokens {
 public:
  struct Entry {
    std::string_view text;  // not empty, no two alike; outlives the SpecialTokens
    int32_t id;
    bool control;
  };
  struct Match {
    size_t begin, end;
    const Entry* entry;  // null: no match, and begin == end == the end of the text
  };

  SpecialTokens() = default;
  explicit SpecialTokens(std::vector<Entry> entries);

  // The leftmost match at `from` or later, the longest of those. Control tokens only
  // `with_control`.
  Match find(std::string_view text, size_t from, bool with_control) const;

  // The entry whose text is `text`, or null.
  const Entry* named(std::string_view text) const;

 private:
  const Entry* longest_prefix_of(std::string_view text, bool with_control) const;

  std::vector<Entry> entries_;  // sorted by text, so that those which share a prefix are neighbours
  std::array<bool, 256> begins_any_{};  // first byte -> whether an entry has it
  std::array<bool, 256> begins_user_defined_{};
};

}  // namespace ullage::model
