// Counts at which a careless check would overflow or be off by one.
#pragma once

#include <array>
#include <cstdint>
#include <limits>

namespace ullage {

inline constexpr int64_t kInt64Min = std::numeric_limits<int64_t>::min();
inline constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();

inline constexpr std::array<int64_t, 17> kExtremes = {kInt64Min,
                                                      kInt64Min + 1,
                                                      -1,
                                                      0,
                                                      1,
                                                      2,
                                                      3,
                                                      (1 << 10) + 1,
                                                      1 << 17,
                                                      (1 << 17) + 1,
                                                      1 << 20,
                                                      (1 << 20) + 1,
                                                      int64_t{1} << 32,
                                                      int64_t{1} << 46,
                                                      int64_t{1} << 62,
                                                      kInt64Max - 1,
                                                      kInt64Max};

}  // namespace ullage
