#include "runtime/near_name.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace ullage::runtime {
namespace {

constexpr size_t kMaxLength = 64;

// Levenshtein distance, one row at a time; both names at most kMaxLength characters.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::array<size_t, kMaxLength + 1> row{};
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string_view near_name(std::string_view name, std::span<const std::string_view> candidates) {
  std::string_view nearest;
  size_t fewest = name.size() / 3 + 1;
  if (name.size() > kMaxLength) return nearest;
  for (std::string_view candidate : candidates) {
    if (candidate.size() > kMaxLength) continue;
    const size_t edits = edit_distance(name, candidate);
    if (edits < fewest) {
      fewest = edits;
      nearest = candidate;
    }
  }
  return nearest;
}

}  // namespace ullage::runtime
