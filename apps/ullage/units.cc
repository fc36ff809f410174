#include "units.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <utility>

namespace ullage::apps {

std::optional<int64_t> parse_bytes(std::string_view text) {
  static constexpr std::array<std::pair<std::string_view, double>, 11> kUnits = {{{"", 1},
                                                                                  {"B", 1},
                                                                                  {"KiB", 0x1p10},
                                                                                  {"MiB", 0x1p20},
                                                                                  {"GiB", 0x1p30},
                                                                                  {"TiB", 0x1p40},
                                                                                  {"kB", 1e3},
                                                                                  {"KB", 1e3},
                                                                                  {"MB", 1e6},
                                                                                  {"GB", 1e9},
                                                                                  {"TB", 1e12}}};
  double number = 0;
  const auto [rest, error] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  if (error != std::errc() || !(number >= 0)) return std::nullopt;
  std::string_view unit(rest, static_cast<size_t>(text.data() + text.size() - rest));
  if (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  for (const auto& [name, bytes] : kUnits) {
    if (unit != name) continue;
    const double total = std::floor(number * bytes);
    if (total >= 0x1p63) return std::nullopt;
    return static_cast<int64_t>(total);
  }
  return std::nullopt;
}

std::string with_commas(int64_t value) {
  std::string digits = std::to_string(value);
  const size_t sign = value < 0 ? 1 : 0;
  for (size_t at = digits.size(); at > sign + 3;) digits.insert(at -= 3, 1, ',');
  return digits;
}

std::string human_bytes(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes < 10 << 10) return fmt::format("{} B", bytes);
  if (bytes < 10 << 20) return fmt::format("{:.1f} KiB", value / 0x1p10);
  if (bytes < 1 << 30) return fmt::format("{:.1f} MiB", value / 0x1p20);
  if (value < 0x1p40) return fmt::format("{:.2f} GiB", value / 0x1p30);
  return fmt::format("{:.2f} TiB", value / 0x1p40);
}

}  // namespace ullage::apps
