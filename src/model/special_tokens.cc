#include "model/special_tokens.h"

#include <algorithm>
#include <utility>

namespace ullage::model {

SpecialTokens::SpecialTokens(std::vector<Entry> entries) : entries_(std::move(entries)) {
  std::ranges::sort(entries_, {}, &Entry::text);
  for (const Entry& entry : entries_) {
    const auto first = static_cast<uint8_t>(entry.text[0]);
    begins_any_[first] = true;
    if (!entry.control) begins_user_defined_[first] = true;
  }
}

SpecialTokens::Match SpecialTokens::find(std::string_view text, size_t from,
                                         bool with_control) const {
  const auto& begins = with_control ? begins_any_ : begins_user_defined_;
  for (size_t at = from; at < text.size(); ++at) {
    if (!begins[static_cast<uint8_t>(text[at])]) continue;
    if (const Entry* entry = longest_prefix_of(text.substr(at), with_control)) {
      return {at, at + entry->text.size(), entry};
    }
  }
  return {text.size(), text.size(), nullptr};
}

const SpecialTokens::Entry* SpecialTokens::named(std::string_view text) const {
  const auto at = std::ranges::lower_bound(entries_, text, {}, &Entry::text);
  return at != entries_.end() && at->text == text ? &*at : nullptr;
}

const SpecialTokens::Entry* SpecialTokens::longest_prefix_of(std::string_view text,
                                                             bool with_control) const {
  const Entry* longest = nullptr;
  auto first = entries_.begin();
  auto last = entries_.end();
  // The entries of [first, last) agree with `text` in the first `depth` bytes.
  for (size_t depth = 0; depth < text.size() && first != last; ++depth) {
    if (first->text.size() == depth) ++first;  // the one that ends here
    const auto at_depth = [depth](const Entry& entry) {
      return static_cast<uint8_t>(entry.text[depth]);
    };
    const auto range =
        std::ranges::equal_range(first, last, static_cast<uint8_t>(text[depth]), {}, at_depth);
    first = range.begin();
    last = range.end();
    if (first != last && first->text.size() == depth + 1 && (with_control || !first->control)) {
      longest = &*first;
    }
  }
  return longest;
}

}  // namespace ullage::model
