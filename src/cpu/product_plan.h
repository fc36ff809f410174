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
// shared by the threads, at most kMostPackedBytes of it at a time, so that it stays in the
// last-level cache; less where the workspace is smaller.
//
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

  // `most_bytes` of the stationary operand may be packed at once.
  ProductPlan(const ProductShape& shape, int64_t element_bytes,
              int64_t most_bytes = kMostPackedBytes)
      : a_is_stationary(shape.n >= shape.m),
        stream_lanes_max(kStreamBytes / (kProductKBlock * element_bytes)) {
    const int64_t k = std::max<int64_t>(shape.k, 1);
    const int64_t lanes = std::max<int64_t>(std::min(shape.m, shape.n), 1);
    const int64_t lane_bytes = std::min(k, kProductKBlock) * element_bytes;  // of one block of k
    const int64_t lanes_held = most_bytes / lane_bytes / kLanePadding * kLanePadding;
    stationary_lanes = lanes < lanes_held ? round_up(lanes, kLanePadding) : lanes_held;
    const int64_t k_held = most_bytes / (stationary_lanes * element_bytes);
    const int64_t blocks_held = std::max<int64_t>(k_held / kProductKBlock, 1);
    stationary_k = std::min(blocks_held, (k - 1) / kProductKBlock + 1) * kProductKBlock;
    stationary_bytes = stationary_lanes * std::min(k, stationary_k) * element_bytes;
    promised_bytes = lanes > lanes_held || k > k_held ? most_bytes : stationary_bytes;
  }
};

}  // namespace ullage::cpu
