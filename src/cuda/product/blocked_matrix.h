// A bf16 matrix in blocks of 64 columns. Plain data: the planner reads it without a CUDA toolkit.
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

// [block][rows][64], rows adjacent in a block, the blocks in ranges. The last range lies apart;
// where there are others, they lie range_stride elements from each other.
struct BlockedMatrix {
  void* first = nullptr;  // of the ranges before the last
  void* last = nullptr;
  int64_t range_stride = 0;
  int64_t rows = 0;
  int n_ranges = 1;
  int range_blocks = 0;    // the last range may have fewer
  int missing_blocks = 0;  // that the first range lacks at its front: ranges are aligned at the end
  int n_blocks = 0;        // there are

  // Blocks past the end, which a tile at the edge asks for, belong to the last range.
  ULLAGE_HOST_DEVICE int range_of(int block) const {
    const int range = (block + missing_blocks) / range_blocks;
    return range < n_ranges ? range : n_ranges - 1;
  }
  // Of bf16 values [rows][64].
  ULLAGE_HOST_DEVICE void* block(int index) const {
    const int range = range_of(index);
    const int64_t offset =
        (index + missing_blocks - int64_t{range} * range_blocks) * rows * kBlockColumns;
    return range == n_ranges - 1 ? static_cast<uint16_t*>(last) + offset
                                 : static_cast<uint16_t*>(first) + range * range_stride + offset;
  }
};

}  // namespace ullage::cuda
