// Quantities as people write and read them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ullage::apps {

// "4096", "256MiB", "1.5GiB", "24GB": bytes, with the units of IEC 80000 (KiB ... TiB, powers of
// 1024) and SI (kB ... TB). Nothing for anything else, or where the bytes pass 2^63 - 1.
std::optional<int64_t> parse_bytes(std::string_view text);

std::string with_commas(int64_t value);  // 151,936
std::string human_bytes(int64_t bytes);  // "1.11 GiB", "448.0 MiB", "17 B"

}  // namespace ullage::apps
