// A matrix of 16-bit numbers in blocks of 64 columns. Plain data: the planner reads it without a
// CUDA toolkit.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define ULLAGE_HOST_DEVICE __host__ __device__
#else
#define ULLAGE_HOST_DEVICE
#endif

namespace ullage::cuda {

// Columns of a block: what one step along k, or half a tile along m, takes of a row: 128 bytes.
inline constexpr int kBlockColumns = 64;

// [block][rows][64] of a 16-bit type, rows adjacent in a block, the blocks in ranges of equally
// many but for the last, which takes the rest and lies apart; the others lie range_stride elements
// from each other.
struct BlockedMatrix {
  void* first = nullptr;  // of the ranges before the last
  void* last = nullptr;
  int64_t range_stride = 0;
  int64_t rows = 0;
  int n_ranges = 1;
  int range_blocks = 0;
  int n_blocks = 0;

  ULLAGE_HOST_DEVICE int range_of(int block) const {
    const int range = block / range_blocks;
    return range < n_ranges ? range : n_ranges - 1;
  }
  ULLAGE_HOST_DEVICE void* block(int index) const {
    const int range = range_of(index);
    const int64_t offset = (index - int64_t{range} * range_blocks) * rows * kBlockColumns;
    return range == n_ranges - 1 ? static_cast<uint16_t*>(last) + offset
                                 : static_cast<uint16_t*>(first) + range * range_stride + offset;
  }
};

}  // namespace ullage::cuda
