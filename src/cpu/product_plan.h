// How a product is cut: which operand stays packed, in what pieces the other streams past it, and
// the bytes both take. Host arithmetic, the same for every instruction set; none of it changes a
// bit of C.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/product.h"

namespace ullage::cpu {

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The operand with fewer lanes (rows of A, columns of B) is stationary: it is packed once and
// shared by the threads, at most this much of it at a time, so that it stays in the last-level
// cache.
inline constexpr int64_t kStationaryBytes = int64_t{4} << 20;

// The other streams: each thread packs its own pieces, every element once, into a buffer that takes
// less than half of a 1 MiB second-level cache: kProductKBlock x 384 lanes of float, or 192 of
// double.
inline constexpr int64_t kStreamBytes = int64_t{384} << 10;

// Lanes are packed to a multiple of the widest vector (16 floats) or row tile (8).
inline constexpr int64_t kLanePadding = 16;

struct ProductPlan {
  bool a_is_stationary;
  int64_t stationary_lanes;  // packed at once
  int64_t stationary_k;      // packed at once: a multiple of kProductKBlock
  int64_t stream_lanes_max;  // that kStreamBytes holds, for one block of k
  int64_t stationary_bytes;
  // No less for a larger shape, so that a caller may plan for its largest; `stationary_bytes`, a
  // whole number of blocks, can be more for 86 lanes than for 426.
  int64_t promised_bytes;

  ProductPlan(const ProductShape& shape, int64_t element_bytes)
      : a_is_stationary(shape.n >= shape.m),
        stream_lanes_max(kStreamBytes / (kProductKBlock * element_bytes)) {
    const int64_t block_bytes = kProductKBlock * element_bytes;  // one lane, one block of k
    const int64_t lanes = std::min(shape.m, shape.n);
    stationary_lanes = std::min(round_up(std::max<int64_t>(lanes, 1), kLanePadding),
                                kStationaryBytes / block_bytes);
    const int64_t k_blocks = (shape.k + kProductKBlock - 1) / kProductKBlock;
    const int64_t k_blocks_held = kStationaryBytes / (block_bytes * stationary_lanes);
    const int64_t held = std::max<int64_t>(1, std::min(k_blocks, k_blocks_held));
    stationary_k = held * kProductKBlock;
    stationary_bytes = stationary_lanes * held * block_bytes;
    promised_bytes = k_blocks > k_blocks_held ? kStationaryBytes : stationary_bytes;
  }
};

}  // namespace ullage::cpu
